"""Two real processes, which talk over gloo, log what one process makes of all their tokens.

This file is the test and, started by torchrun, each of its two processes.
"""

import json
import os
import subprocess
import sys
from pathlib import Path


if __name__ == "__main__":
    os.environ.update({"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "TOKENIZERS_PARALLELISM": "false"})
    sys.path.insert(0, str(Path(__file__).parent.parent))
    sys.path.insert(0, str(Path(__file__).parent.parent / "integration"))

import pytest
import torch
from mismatch_reference import LIMITS, as_rows, batch, reference

from safe_trainers.rollout.mismatch import Limits, combine, metrics, tally
from safe_trainers.rollout.mismatch_meter import MismatchMeter


PROCESSES = 2
STEPS = 3
# Rows and width of the batches of each process: unequal, and none at all.
SHARES = [[(5, 40), (1, 3)], [(2, 70)]]
ALONE = [[(3, 20)], []]
CELLS = {"grpo": {"gradient_accumulation_steps": 2}, "rloo": {}}


def shares(which, rank):
    return [batch(rows, width, seed=100 * rank + rows, unscored=0.1) for rows, width in which[rank]]


def train(task, changes):
    """One run: what this process has collected for each log, and what it has logged."""
    import cells
    import test_metrics
    from cells import Cell
    from policing import reset_accelerate

    reset_accelerate()
    cell = Cell("text", task, "fp32", "bf16", lora=True)
    made = cells.arguments(
        cell,
        cells.SAFE_CONFIG[task],
        steps=STEPS,
        rollout_compute="stock",
        max_completion_length=12,
        per_device_eval_batch_size=2,
        ddp_backend="gloo",
        generation_kwargs={"eos_token_id": list(range(20, 120))},  # rows of different lengths
        **changes,
    )
    rows = []

    class Saved(test_metrics.watched(cells.SAFE[task])):
        def log(self, logs, *args, **kwargs):
            if "loss" in logs or "eval_loss" in logs:
                rows.append(self.rows)
            super().log(logs, *args, **kwargs)

    trainer = Saved(**made, eval_dataset=made["train_dataset"].select(range(4)))
    assert trainer.accelerator.num_processes == torch.distributed.get_world_size() == PROCESSES
    assert torch.distributed.get_backend() == "gloo"
    trainer.train()
    trainer.evaluate()
    found = [entry for entry in trainer.state.log_history if "loss" in entry or "eval_loss" in entry]
    return trainer, {"rows": rows, "logs": [test_metrics.ours(e) | test_metrics.ours(e, "eval_") for e in found]}


def child(folder):
    """One of the processes."""
    rank = int(os.environ["RANK"])
    result = {}
    for task, changes in CELLS.items():
        trainer, result[task] = train(task, changes)
    record = trainer.precision[MismatchMeter]
    for name, which in (("shares", SHARES), ("alone", ALONE)):
        tallies = [tally(*one, LIMITS[1]) for one in shares(which, rank)]
        record.on_train_begin()
        if tallies:
            record.own["train"] = combine(torch.stack(tallies))
        record.before_log("train")
        result[name] = metrics(record.gathered["train"], "bfloat16", LIMITS[1])
    Path(folder, f"{rank}.json").write_text(json.dumps(result))


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What each process has seen and logged."""
    folder = tmp_path_factory.mktemp("processes")
    run = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={PROCESSES}",
         str(Path(__file__)), str(folder)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-4000:]
    found = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(PROCESSES)]
    assert len(list(Path(folder).iterdir())) == PROCESSES
    return found


@pytest.mark.parametrize("which", ["shares", "alone"])
def test_tokens_that_are_shared_out_give_the_numbers_of_one_process(which, results):
    rows = [one for rank in range(PROCESSES) for one in shares({"shares": SHARES, "alone": ALONE}[which], rank)]
    at_once = metrics(combine(torch.stack([tally(*one, LIMITS[1]) for one in rows])), "bfloat16", LIMITS[1])
    slowly = reference([row for one in rows for row in as_rows(*one)], "bfloat16", LIMITS[1])
    assert len(at_once) > 9
    for found in results:
        assert found[which] == {name: pytest.approx(value, rel=1e-12) for name, value in at_once.items()}
        assert found[which] == {name: pytest.approx(value, rel=1e-9) for name, value in slowly.items()}


@pytest.mark.parametrize("task", CELLS)
def test_real_runs_log_what_all_processes_have_sampled(task, results):
    one, other = (result[task] for result in results)
    assert one["logs"] == other["logs"]
    assert len(one["logs"]) == STEPS + 1  # and the evaluation
    # RLOO's reference is of a full forward pass; see test_metrics.py.
    near = {"rel": 1e-9, "abs": 1e-15} if task == "grpo" else {"rel": 2e-2, "abs": 3e-6}
    from cells import SAFE_CONFIG

    limits = Limits(None, 3.0, True, (0.8, 1.2)) if task == "grpo" else None  # TRL's defaults
    assert (getattr(SAFE_CONFIG[task], "vllm_importance_sampling_clip_max", None) == 3.0) is (limits is not None)
    for entry, mine, theirs in zip(one["logs"], one["rows"], other["rows"], strict=True):
        together = reference([*mine, *theirs], "bfloat16", limits)
        assert entry == {name: pytest.approx(value, **near) for name, value in together.items()}
        # Each process alone would have said something else.
        for alone in (mine, theirs):
            differing = reference(alone, "bfloat16", limits)
            assert entry["precision/logp_mismatch_mean"] != pytest.approx(differing["precision/logp_mismatch_mean"])


if __name__ == "__main__":
    child(sys.argv[1])
