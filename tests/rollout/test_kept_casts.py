"""While completions are made and scored, autocast keeps its casts of frozen weights."""

from collections import Counter
from types import SimpleNamespace

import cells
import psutil
import pytest
import torch
import trl
from cells import Cell
from live_bytes import alive_at_the_loss
from torch.utils._python_dispatch import TorchDispatchMode

from safe_trainers import PrecisionBase, PrecisionMixin, SafeGRPOConfig, SafeRLOOConfig
from safe_trainers.rollout import kept_casts
from safe_trainers.testing import fp16_on_cpu


CONFIGS = {"grpo": SafeGRPOConfig, "rloo": SafeRLOOConfig}
TOKENS = 6


class Casts(TorchDispatchMode):
    """Counts casts to half precision by the name of the weight."""

    def __init__(self, model):
        super().__init__()
        self._names = {parameter.data_ptr(): name for name, parameter in model.named_parameters()}
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and result.dtype.itemsize == 2:
            name = self._names.get(args[0].data_ptr())
            if name is not None:
                self.counts[name] += 1
        return result


def counting(stock):
    """A safe trainer that counts the casts of each phase, and the flags of its weights after them."""

    class Counting(PrecisionMixin, stock, PrecisionBase):
        def _generate_single_turn(self, *args, **kwargs):
            with Casts(self.model) as casts:
                made = super()._generate_single_turn(*args, **kwargs)
            self.rollouts = [*getattr(self, "rollouts", []), casts.counts]
            self.flags = [p.requires_grad for p in self.model.parameters()]
            return made

        def _get_per_token_logps_and_entropies(self, *args, **kwargs):
            with Casts(args[0]) as casts:
                made = super()._get_per_token_logps_and_entropies(*args, **kwargs)
            if not torch.is_grad_enabled():
                self.scorings = [*getattr(self, "scorings", []), casts.counts]
            return made

    return Counting


def build(cell, stock=trl.GRPOTrainer, **changes):
    changes = {"max_completion_length": TOKENS, "generation_kwargs": {"min_new_tokens": TOKENS}, **changes}
    return counting(stock)(**cells.arguments(cell, CONFIGS[cell.task], **changes))


def test_a_frozen_weight_is_cast_once_for_all_tokens_and_not_once_for_each():
    cell = Cell("text", "grpo", "fp32", "bf16", lora=True)
    casts = {}
    for kept in (False, True):
        trainer = build(cell, steps=1, keep_frozen_casts=kept)
        before = [p.requires_grad for p in trainer.model.parameters()]
        trainer.train()
        assert trainer.flags == before
        casts[kept] = {name: count for name, count in trainer.rollouts[0].items() if "lora" not in name}
    layers = trainer.model.config.num_hidden_layers
    assert len(casts[True]) >= 7 * layers  # q, k, v, o, gate, up, down
    assert set(casts[True].values()) == {1}
    assert casts[False] == dict.fromkeys(casts[True], TOKENS)


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_scoring_in_parts_casts_once(lora):
    """A rollout batch of four steps is scored in four forward passes."""
    cell = Cell("text", "grpo", "fp32", "bf16", lora=lora, beta=0.1)
    for kept, times in ((False, 4), (True, 1)):
        trainer = build(cell, steps=1, keep_frozen_casts=kept, gradient_accumulation_steps=4, num_iterations=2)
        trainer.train()
        assert len(trainer.scorings) == 2  # the old policy, and the reference: with LoRA the model without adapter
        for scoring in trainer.scorings:
            # TRL multiplies with the head itself, and casts it.
            assert {count for name, count in scoring.items() if "lora" not in name and "head" not in name} == {times}


@pytest.mark.parametrize(
    "cell",
    [
        Cell("text", "grpo", "fp32", "bf16", lora=True, beta=0.1),
        Cell("text", "grpo", "fp32", "fp16", lora=True),
        Cell("text", "grpo", "fp32", "bf16", beta=0.1),  # the frozen model is the reference
        Cell("text", "rloo", "fp32", "bf16", lora=True, beta=0.1),
        Cell("llava", "grpo", "fp32", "bf16", lora=True),
        Cell("gemma3", "grpo", "fp32", "bf16", lora=True, beta=0.1),
        Cell("qwen2_5_vl", "rloo", "fp32", "fp16", lora=True, beta=0.1),
        Cell("gpt_oss", "grpo", "fp32", "bf16", lora=True),
    ],
    ids=str,
)
def test_a_run_has_the_same_bits(cell, monkeypatch):
    results = []
    monkeypatch.setitem(cells.SAFE, cell.task, fp16_on_cpu(cells.SAFE[cell.task]))
    changes = {"gradient_accumulation_steps": 2, "num_iterations": 2, "loss_scale_init": 256.0}
    for kept in (False, True):
        results.append(cells.run(cell, True, keep=True, config=CONFIGS[cell.task], keep_frozen_casts=kept, **changes))
        assert results[-1].error is None
    off, on = results
    assert (on.losses, on.rewards, on.fingerprint) == (off.losses, off.rewards, off.fingerprint)
    stored = [result.trainer._run.feature(kept_casts.KeptCasts).nbytes for result in results]
    assert stored[0] == 0
    assert (stored[1] > 0) is cell.lora


def test_flags_are_restored_after_an_error():
    cell = Cell("text", "grpo", "fp32", "bf16", lora=True)
    trainer = build(cell, steps=1)
    before = [p.requires_grad for p in trainer.model.parameters()]
    seen = []

    def fail(*args, **kwargs):
        seen.append(all(p.requires_grad for p in trainer.model.parameters() if p.ndim > 1))
        raise RuntimeError("stop")

    handle = trainer.model.get_base_model().register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="stop"):
        trainer.train()
    handle.remove()
    assert seen == [True]
    assert [p.requires_grad for p in trainer.model.parameters()] == before
    cells.reset_autocast()


def test_the_casts_are_freed_before_the_loss():
    """The tensors that are alive when the loss begins take no more memory."""
    alive = {}
    for kept in (False, True):
        trainer = build(Cell("text", "grpo", "fp32", "bf16", lora=True), steps=1, keep_frozen_casts=kept)
        alive[kept] = alive_at_the_loss(trainer)
    stored = trainer._run.feature(kept_casts.KeptCasts).nbytes
    assert stored > 100_000
    assert abs(alive[True] - alive[False]) < stored / 10


def test_nothing_is_kept_if_memory_is_short(monkeypatch):
    """The free memory of the machine is replaced by a small number."""
    cell = Cell("text", "grpo", "fp32", "bf16", lora=True)
    trainer = build(cell, steps=1)
    needed = sum(weight.numel() * 2 for weight in kept_casts.frozen(kept_casts.float32_matrices(trainer.model)))
    for free, kept in ((2 * needed - 2, 0), (2 * needed, needed)):
        trainer = build(cell, steps=1)
        with monkeypatch.context() as patched:  # some releases of transformers offload weights that do not fit
            patched.setattr(psutil, "virtual_memory", lambda free=free: SimpleNamespace(available=free))
            trainer.train()
        assert trainer._run.feature(kept_casts.KeptCasts).nbytes == kept
        assert (set(trainer.rollouts[0].values()) == {1}) is bool(kept)


def test_on_cuda_the_peak_of_the_run_is_the_limit(monkeypatch):
    """The counters of CUDA's allocator are replaced by numbers, as there is no GPU here."""
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 1000)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 400)
    assert kept_casts.spare_memory(torch.device("cuda")) == 600


@pytest.mark.parametrize(
    "cell", [Cell("text", "grpo", "fp32", None, lora=True), Cell("text", "grpo", "bf16", "bf16")], ids=str
)
def test_nothing_is_kept_without_frozen_float32_weights_under_autocast(cell):
    trainer = build(cell, steps=1)
    trainer.train()
    assert trainer._run.feature(kept_casts.KeptCasts).nbytes == 0


def test_the_report_has_the_bytes_of_frozen_weights_and_the_line_that_halves_them():
    cell = Cell("text", "grpo", "fp32", "bf16", lora=True)
    trainer = build(cell, steps=1)
    trainer.train()
    (note,) = (verdict for verdict in trainer.precision.report.verdicts if "frozen" in verdict.what)
    assert str(note.fix) == "`model_init_kwargs={'dtype': 'bfloat16'}`"
    stored = sum(4 * weight.numel() for weight in kept_casts.frozen(kept_casts.float32_matrices(trainer.model)))
    assert note.what.startswith(f"{stored / 2**20:.1f} MB of frozen float32 matrices compute in bfloat16")
    changes = trainer.precision.report.table("changed from stock").rows
    (change,) = (row for row in changes if "autocast keeps" in str(row[1]))
    assert f"{stored / 2 / 2**20:.1f} MB" in str(change[1])

    trainer = build(cell, steps=1, **dict(note.fix.settings))  # the advice
    trainer.train()
    assert not [verdict for verdict in trainer.precision.report.verdicts if "frozen" in verdict.what]
    assert sum(p.nbytes for p in trainer.model.parameters() if p.ndim > 1 and not p.requires_grad) == stored / 2
