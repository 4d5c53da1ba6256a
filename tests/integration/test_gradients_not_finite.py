"""One value that is not finite costs one step, and never a weight; stock makes every weight NaN."""

import contextlib
import math
import warnings
from functools import partial
from importlib.metadata import version
from pathlib import Path

import cells
import pytest
import torch
import trl
from cells import Cell
from packaging.version import Version
from policing import reset_accelerate
from torch.distributed import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from transformers import TrainerCallback
from two_processes import run_in_two_processes

from safe_trainers import CheckpointError, PrecisionBase, PrecisionError, PrecisionMixin, PrecisionWarning
from safe_trainers.checkpoint.folder import NOT_FINITE, checkpoints_in
from safe_trainers.numerics.gradient_norm import GradientNorm, total_norm
from safe_trainers.testing import fp16_on_cpu
from upstream import TRL_0


STEPS = 4
OLD = Version(version("bitsandbytes")) < Version("0.50")
BITSANDBYTES = pytest.param(
    "adamw_bnb_8bit", marks=pytest.mark.skipif(OLD, reason="the optimizers of this bitsandbytes need a GPU")
)
TASKS = ("sft", "grpo", "rloo", "reward")
FLAGS = (None, "bf16")


def build(task="sft", flag=None, safe=True, trainer_class=None, **changes):
    reset_accelerate()
    torch.manual_seed(0)
    config = cells.SAFE_CONFIG[task] if safe else cells.PLAIN[task]
    made = cells.arguments(Cell("text", task, "fp32", flag), config, **{"steps": STEPS, **changes})
    return (trainer_class or (cells.SAFE if safe else cells.STOCK)[task])(**made)


def spoil_gradient(trainer, steps, value=math.nan):
    """Puts a value into one element of one gradient, in these steps."""

    def hook(gradient):
        if trainer.state.global_step not in steps:
            return gradient
        spoiled = gradient.clone()
        spoiled.view(-1)[0] = value
        return spoiled

    next(p for p in trainer.model.parameters() if p.dim() == 2 and p.requires_grad).register_hook(hook)


def spoil_output(module, trainer, steps, value, elements):
    def hook(_, args, output):
        if trainer.state.global_step not in steps or not torch.is_grad_enabled():
            return output
        spoiled = output.clone()
        spoiled[elements] = value
        return spoiled

    module.register_forward_hook(hook)


def spoil_embedding(trainer, steps, value=math.nan):
    """Puts a value into one activation of each loss, in these steps, as from a damaged image."""
    spoil_output(trainer.model.get_input_embeddings(), trainer, steps, value, (0, 0, 0))


def spoil_logits(trainer, steps, value=math.nan):
    """Puts a value into one input of each logit, in these steps."""
    spoil_output(trainer.model.model.norm, trainer, steps, value, (..., 0))


def finite(model):
    return all(p.isfinite().all() for p in model.parameters())


def last(trainer, name):
    return [entry[name] for entry in trainer.state.log_history if name in entry][-1]


@pytest.mark.parametrize("spoil", [spoil_gradient, spoil_logits, spoil_embedding])
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize("task", TASKS)
def test_the_step_is_skipped_and_counted(task, flag, value, spoil):
    trainer = build(task, flag)
    spoil(trainer, {1}, value)
    with pytest.warns(PrecisionWarning, match="step-skipped") as caught:
        trainer.train()
    assert finite(trainer.model)
    assert last(trainer, "precision/skipped_steps") == 1
    assert last(trainer, "precision/effective_steps") == STEPS - 1
    assert any("the gradient norm of step 2 is not finite" in str(warning.message) for warning in caught)


@pytest.mark.parametrize("task", ["sft", "reward"])
def test_stock_makes_every_weight_nan(task):
    trainer = build(task, safe=False)
    spoil_gradient(trainer, {1})
    trainer.train()
    assert not any(p.isfinite().all() for p in trainer.model.parameters() if p.requires_grad)
    assert [entry["loss"] for entry in trainer.state.log_history if "loss" in entry][-1] == 0.0


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused", "sgd", "adafactor", BITSANDBYTES])
@pytest.mark.parametrize("max_grad_norm", [0.0, 1.0])
def test_a_skipped_step_leaves_weights_optimizer_and_schedule_as_they_are(optim, max_grad_norm):
    class Watch(TrainerCallback):
        weights = states = ()

        def on_step_end(self, args, state, control, model=None, optimizer=None, **kwargs):
            self.weights = (*self.weights, cells.fingerprint(model))
            held = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
            self.states = (*self.states, [value.clone() for value in held])

    trainer, watch = build(optim=optim, max_grad_norm=max_grad_norm, steps=3), Watch()
    trainer.add_callback(watch)
    spoil_gradient(trainer, {1})
    with pytest.warns(PrecisionWarning, match="step-skipped"):
        trainer.train()
    rates = [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]
    assert rates == pytest.approx([1e-3, 1e-3 * 2 / 3, 1e-3 * 2 / 3])
    assert watch.weights[0] == watch.weights[1] != watch.weights[2]
    assert all(map(torch.equal, watch.states[0], watch.states[1]))


def test_too_many_in_a_row_end_the_run():
    trainer = build(max_consecutive_skips=2)
    spoil_gradient(trainer, range(99))
    with pytest.warns(PrecisionWarning), pytest.raises(PrecisionError, match="gradients-not-finite") as caught:
        trainer.train()
    assert "2 optimizer steps in a row, up to step 2, were skipped" in str(caught.value)
    assert finite(trainer.model)


@pytest.mark.parametrize("flag", FLAGS)
def test_a_run_without_a_step_is_an_error(flag):
    trainer = build(flag=flag)
    spoil_gradient(trainer, range(99))
    with pytest.warns(PrecisionWarning), pytest.raises(PrecisionError, match="no-step-taken") as caught:
        trainer.train()
    assert f"a run of {STEPS} optimizer steps" in str(caught.value)


def test_a_run_without_a_step_is_an_error_in_fp16():
    trainer = build(flag="fp16", trainer_class=fp16_on_cpu(cells.SAFE["sft"]))
    spoil_gradient(trainer, range(99))
    with pytest.raises(PrecisionError, match="no-step-taken") as caught:
        trainer.train()
    assert "`model.embed_tokens` is the first module that computes a gradient that is not finite" in str(caught.value)
    assert "in float32 too" in str(caught.value)


def test_runs_without_such_a_gradient_are_bit_identical_to_stock():
    prints = []
    for safe in (True, False):
        trainer = build(safe=safe)
        trainer.train()
        prints.append(cells.fingerprint(trainer.model))
    assert prints[0] == prints[1]


# ---- Skipped on the device ----


@pytest.fixture
def deferred(monkeypatch):
    """Builds trainers whose fused optimizer skips by itself, as on CUDA devices."""
    monkeypatch.setattr("safe_trainers.trainer.base.GradientNorm", partial(GradientNorm, deferred=True))
    return partial(build, optim="adamw_torch_fused")


@pytest.mark.parametrize("steps", [{1}, {0, 2}, {STEPS - 1}, {1, 2}])
def test_a_fused_optimizer_skips_by_itself(steps, deferred):
    trainer = deferred()
    spoil_gradient(trainer, steps)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrecisionWarning)
        trainer.train()
    assert finite(trainer.model)
    if STEPS - 1 not in steps:  # the flag of a step is read one step later
        assert last(trainer, "precision/skipped_steps") == len(steps)
    assert not hasattr(trainer.optimizer.optimizer, "found_inf")


def test_a_fused_optimizer_that_skips_every_step_ends_the_run(deferred):
    trainer = deferred(max_consecutive_skips=2)
    spoil_gradient(trainer, range(99))
    with pytest.warns(PrecisionWarning), pytest.raises(PrecisionError, match="gradients-not-finite"):
        trainer.train()
    assert trainer.state.global_step == 2  # the flag of a step is read one step later
    assert finite(trainer.model)


def test_a_save_does_not_reset_the_count_of_skipped_steps(deferred, tmp_path):
    saves = {"save_strategy": "steps", "save_steps": 1, "output_dir": str(tmp_path)}
    trainer = deferred(max_consecutive_skips=2, **saves)
    spoil_gradient(trainer, range(99))
    with pytest.warns(PrecisionWarning) as warned, pytest.raises(PrecisionError, match="gradients-not-finite"):
        trainer.train()
    assert trainer.state.global_step == 2
    assert any("[step-skipped]" in str(warning.message) for warning in warned)


def test_a_resumed_run_counts_the_skipped_step_before_the_save(deferred, tmp_path):
    counts = []
    for resumed in (None, str(tmp_path / "checkpoint-2")):
        trainer = deferred(save_strategy="steps", save_steps=2, output_dir=str(tmp_path))
        spoil_gradient(trainer, {1})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PrecisionWarning)
            trainer.train(resume_from_checkpoint=resumed)
        counts.append((last(trainer, "precision/skipped_steps"), last(trainer, "precision/effective_steps")))
    assert counts == [(1, STEPS - 1)] * 2


def test_a_skip_before_running_out_of_memory_is_not_counted_with_a_smaller_batch(deferred):
    """The flag of the last step of the attempt that was given up must not count as one of the next attempt."""

    class Sft(cells.SAFE["sft"]):
        passes = 0

        def training_step(self, *args, **kwargs):
            self.passes += 1
            if self.passes == 2:
                raise RuntimeError("CUDA out of memory.")  # a stand-in, as there is no CUDA here
            return super().training_step(*args, **kwargs)

        def compute_loss(self, *args, **kwargs):
            loss = super().compute_loss(*args, **kwargs)
            return loss * math.nan if self.passes == 1 else loss

    trainer = deferred(trainer_class=Sft, auto_find_batch_size=True, per_device_train_batch_size=4)
    trainer.train()
    assert trainer.state.global_step == STEPS
    assert not [entry for entry in trainer.state.log_history if "precision/skipped_steps" in entry]


# ---- Checkpoints ----


def spoil_weight(trainer):
    with torch.no_grad():
        next(p for p in trainer.model.parameters() if p.requires_grad).view(-1)[0] = math.nan


def test_a_checkpoint_with_nan_is_not_complete(tmp_path):
    class Spoiled(cells.SAFE["sft"]):
        def _save_checkpoint(self, *args, **kwargs):
            if self.state.global_step == 2:
                spoil_weight(self)
            super()._save_checkpoint(*args, **kwargs)

    saving = {"output_dir": str(tmp_path), "save_strategy": "steps", "save_steps": 1}
    trainer = build(trainer_class=Spoiled, steps=2, **saving)
    with pytest.warns(PrecisionWarning, match="checkpoint-not-finite"):
        trainer.train()
    second, first = checkpoints_in(tmp_path)
    assert first.complete
    assert second.faults == (NOT_FINITE,)
    with pytest.raises(CheckpointError, match="some trained weights are not finite"):
        build(**saving).train(resume_from_checkpoint=str(second.path))
    again = build(**saving, steps=3)
    again.train(resume_from_checkpoint=True)
    assert finite(again.model)
    assert [checkpoint.complete for checkpoint in checkpoints_in(tmp_path)] == [True] * 3


def test_resuming_nan_of_a_stock_run_is_reported(tmp_path):
    saving = {"output_dir": str(tmp_path), "save_strategy": "steps", "save_steps": 2}
    stock = build(safe=False, **saving, steps=2)
    spoil_gradient(stock, {1})
    stock.train()
    trainer = build(**saving, steps=3)
    with pytest.warns(PrecisionWarning, match="resumes-weights-not-finite"), pytest.raises(PrecisionError):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


# ---- What reaches no gradient ----


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_not_finite_at_the_end_are_reported(value):
    for safe in (False, True):
        trainer = build(safe=safe)
        unused = trainer.model.get_input_embeddings().weight
        with torch.no_grad():
            unused[trainer.processing_class.pad_token_id] = value
        if not safe:
            trainer.train()
            continue
        with pytest.warns(PrecisionWarning, match="weights-not-finite") as caught:
            trainer.train()
        text = next(str(warning.message) for warning in caught if "weights-not-finite" in str(warning.message))
        assert "1 trained tensors, such as model.embed_tokens.weight, at the end of the run" in text


def test_a_reference_model_with_nan_is_reported():
    """Stock trains nothing, and the log shows a loss of 0 as in a healthy run; TRL 0 trains NaN, and cannot sample."""
    for safe in (False, True):
        reset_accelerate()
        config = (cells.SAFE_CONFIG if safe else cells.PLAIN)["rloo"]
        made = cells.arguments(Cell("text", "rloo", "fp32", None, beta=0.1), config, steps=STEPS)
        trainer = (cells.SAFE if safe else cells.STOCK)["rloo"](**made)
        with torch.no_grad():
            next(trainer.ref_model.parameters()).fill_(math.nan)
        before = cells.fingerprint(trainer.model)
        if not safe:
            with pytest.raises(RuntimeError, match="probability") if TRL_0 else contextlib.nullcontext():
                trainer.train()
            assert TRL_0 or cells.fingerprint(trainer.model) == before
            assert TRL_0 or last(trainer, "grad_norm") == 0.0
            continue
        refused = pytest.raises(PrecisionError, match="no-step-taken") if TRL_0 else contextlib.nullcontext()
        with pytest.warns(PrecisionWarning, match="logps-not-finite") as caught, refused:
            trainer.train()
        assert sum("logps-not-finite" in str(warning.message) for warning in caught) == 1


@pytest.mark.parametrize("number", range(16))
def test_nothing_that_is_not_finite_passes_silently(number, monkeypatch):
    """One cell for each place of `benchmarks/not_finite.py`, which runs all of them."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    import not_finite

    place, (_, tasks) = list(not_finite.PLACES.items())[number]
    task = tasks[number % len(tasks)]
    precision = list(not_finite.PRECISIONS)[number // 2 % 4]
    plain = not_finite.run(place, "", task, precision, safe=True)
    found = not_finite.run(place, list(not_finite.VALUES)[number % 2], task, precision, safe=True)
    assert plain["outcome"] == "silent"  # the run itself is healthy
    assert plain["finite"]
    assert found["outcome"] != "silent" or found["fingerprint"] == plain["fingerprint"]


# ---- Rewards ----


@pytest.mark.parametrize(("task", "finding"), [("grpo", "rewards-overflow"), ("rloo", "no-step-taken")])
def test_rewards_whose_spread_overflows_end_the_run(task, finding):
    def huge(completion_ids, **kwargs):
        return [3e38 * (number % 2) for number in range(len(completion_ids))]

    reset_accelerate()
    made = cells.arguments(Cell("text", task, "fp32", None), cells.SAFE_CONFIG[task])
    trainer = cells.SAFE[task](**made | {"reward_funcs": huge})
    with pytest.raises(PrecisionError, match=finding) as caught:
        trainer.train()
    assert task == "rloo" or "rewards up to 3e+38 in a group" in str(caught.value)
    assert finite(trainer.model)


def test_rewards_that_a_trainer_has_summed_are_checked_too():
    """A stand-in for trainers that return the sum of all rewards, (N,), with more weights than columns."""

    class Summed(trl.GRPOTrainer):
        rewards = torch.tensor([0.0, 1.0, 0.0, 1.0])

        def _calculate_rewards(self, *args, **kwargs):
            self.reward_weights = torch.ones(3)
            return self.rewards

    class SafeSummed(PrecisionMixin, Summed, PrecisionBase):
        pass

    reset_accelerate()
    trainer = SafeSummed(**cells.arguments(Cell("text", "grpo", "fp32", None), cells.SAFE_CONFIG["grpo"]))
    assert torch.equal(trainer._calculate_rewards(), trainer.rewards)
    trainer.rewards = trainer.rewards * 3e38
    with pytest.raises(PrecisionError, match="rewards-overflow"):
        trainer._calculate_rewards()


ONE_RANK = """
import os, sys, warnings
import test_gradients_not_finite as here

rank = int(os.environ["RANK"])
trainer = here.build("rloo", "bf16", beta=0.1, ddp_backend="gloo", steps=2)
if rank == 1:  # the main process sees nothing itself
    reference = trainer.accelerator.unwrap_model(trainer.ref_model)
    layer = reference.get_submodule("model.layers.0.mlp.act_fn")
    layer.register_forward_hook(lambda module, args, output: output * float("nan"))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    trainer.train()
lines = [str(w.message).splitlines()[0] for w in caught if w.category is here.PrecisionWarning]
open(f"{sys.argv[1]}/{rank}.txt", "w").write("\\n".join(lines))
"""


@pytest.mark.slow
def test_what_one_rank_alone_sees_is_reported(tmp_path):
    run_in_two_processes(ONE_RANK, tmp_path, beside=__file__)
    first, second = ((tmp_path / f"{rank}.txt").read_text().splitlines() for rank in (0, 1))
    assert any("log-probabilities of completions" in line for line in first)
    assert not any("log-probabilities of completions" in line for line in second)


@pytest.fixture
def mesh():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        torch.distributed.destroy_process_group()


def test_the_norm_of_gradients_on_several_meshes_is_that_of_all(mesh):
    torch.manual_seed(0)
    plain = [torch.randn(3, 4), torch.randn(5)]
    mixed = [plain[0], distribute_tensor(plain[1], mesh, [Replicate()])]
    with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
        torch.nn.utils.get_total_norm(mixed)
    for gradients in (plain, mixed, mixed[1:]):
        expected = torch.cat([one.full_tensor().flatten() if hasattr(one, "full_tensor") else one.flatten()
                              for one in gradients]).norm()  # fmt: skip
        torch.testing.assert_close(total_norm(gradients), expected)
    assert total_norm([]).item() == 0
    assert not total_norm([plain[0], mixed[1] * math.nan]).isfinite()


SHARDS = """
import os, sys
from types import SimpleNamespace

import torch
from accelerate import Accelerator
from safe_trainers.numerics.gradient_norm import GradientNorm

rank = int(os.environ["RANK"])
accelerator = Accelerator(cpu=True)
assert accelerator.num_processes == 2
shard = torch.nn.Parameter(torch.ones(4))
optimizer = accelerator.prepare(torch.optim.SGD([shard], lr=1.0))
accelerator.state.fsdp_plugin = SimpleNamespace(fsdp_version=1)
norm, skipped = GradientNorm(accelerator), []
for step in range(3):
    shard.grad = torch.ones(4)
    if (rank, step) == (1, 1):
        shard.grad[0] = float("nan")
    norm.before_step()
    optimizer.step()
    norm.after_step()
    skipped.append(accelerator.optimizer_step_was_skipped)
open(f"{sys.argv[1]}/{rank}.txt", "w").write(f"{skipped} {shard.tolist()}")
"""


def test_ranks_that_hold_plain_shards_skip_together(tmp_path):
    """A stand-in for FSDP1, which needs a GPU: the gradient of each rank is its own, and the run does not clip."""
    run_in_two_processes(SHARDS, tmp_path, beside=__file__)
    found = [(tmp_path / f"{rank}.txt").read_text() for rank in (0, 1)]
    assert found == ["[False, True, False] [-1.0, -1.0, -1.0, -1.0]"] * 2
