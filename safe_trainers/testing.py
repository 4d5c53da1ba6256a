"""Helpers for the tests of trainers, ours and those of a user's new algorithm.

```python
from safe_trainers.testing import assert_safe

def test_my_trainer():
    contract = assert_safe(SafeMyTrainer, model=model, args=args, train_dataset=dataset, ...)
```
"""

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from . import scaler
from .boundaries import MATMUL_LEAVES
from .census import take_census
from .contract import ROLLOUT_METHOD, SafetyContract
from .dtypes import HALVES, from_torch
from .media import MediaCaster
from .towers import anatomy, is_quantized, unwrap


class StrictGradScaler(torch.amp.GradScaler):
    """A loss scaler for the CPU that refuses what CUDA's kernel refuses.

    A stand-in: torch's CPU kernel unscales bfloat16 gradients, CUDA's has no such dtype, so a test with torch's own
    CPU scaler proves nothing about a GPU.
    """

    UNSCALED = (torch.float32, torch.float64, torch.float16)

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.grad.dtype not in self.UNSCALED:
                    kind = {torch.bfloat16: "BFloat16"}.get(parameter.grad.dtype, str(parameter.grad.dtype))
                    raise NotImplementedError(
                        f"\"_amp_foreach_non_finite_check_and_unscale_cuda\" not implemented for '{kind}'"
                    )
        return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)


def fp16_on_cpu(trainer_class: type) -> type:
    """A trainer class whose `fp16=True` is real on a CPU: with autocast, and with a strict loss scaler.

    accelerate builds neither there and says nothing, so that an fp16 test on a CPU tests float32.

        trainer = fp16_on_cpu(SafeGRPOTrainer)(model, args=SafeGRPOConfig(fp16=True, use_cpu=True), ...)

    Args:
        trainer_class: Any trainer of transformers, TRL or this package.

    Returns:
        A subclass of the same name; without fp16, or on another device, it behaves as its base.
    """

    class Fp16OnCpu(trainer_class):
        @classmethod
        def precision_device(cls, args: Any) -> Any:
            device = super().precision_device(args)
            if device.kind != "cpu":
                return device
            refused = (name for name in sorted(HALVES) if not scaler.unscales(StrictGradScaler("cpu"), name))
            return replace(device, unscalable=frozenset(refused))

        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            accelerator = self.accelerator
            if accelerator.mixed_precision == "fp16" and accelerator.device.type == "cpu":
                accelerator.native_amp = True
                accelerator.scaler = StrictGradScaler("cpu")
                if hasattr(self, "_configure_scaler"):  # a trainer of this package
                    self._configure_scaler()

    Fp16OnCpu.__name__ = Fp16OnCpu.__qualname__ = trainer_class.__name__
    return Fp16OnCpu


class ComputeProbe:
    """The dtypes that chosen leaves of a model really compute in, by phase.

    A leaf's output shows it: a matrix product under autocast gives autocast's dtype, and without it the weights'.

    Attributes:
        seen: For each probed leaf and phase (`"rollout"`, `"scoring"`, `"training"`) the dtypes of its outputs.
    """

    def __init__(self) -> None:
        self.seen: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
        self._rollout = 0

    @property
    def disagreements(self) -> list[str]:
        """The leaves that compute in different dtypes in different phases, in words."""
        return [
            f"{leaf} computes in "
            + ", ".join(f"{'/'.join(sorted(d))} in {phase}" for phase, d in sorted(seen.items()))
            for leaf, seen in self.seen.items()
            if len(set().union(*seen.values())) > 1
        ]

    def phases(self) -> set[str]:
        """The phases in which any leaf was seen."""
        return {phase for seen in self.seen.values() for phase in seen}

    @contextlib.contextmanager
    def attached(self, trainer: Any) -> Iterator["ComputeProbe"]:
        """Watches the first matrix product of each tower and of the text model while the block runs.

        Args:
            trainer: Any TRL trainer, safe or stock.

        Yields:
            The probe.
        """
        parts = anatomy(trainer.model)
        handles = []
        for name, module in {**parts.towers, "text": parts.text}.items():
            leaf = _first_leaf(module)
            if leaf is not None:
                handles.append(leaf.register_forward_hook(self._recorder(name)))
        method = getattr(trainer, ROLLOUT_METHOD, None)
        if method is not None:

            def generate(*args: Any, **kwargs: Any) -> Any:
                self._rollout += 1
                try:
                    return method(*args, **kwargs)
                finally:
                    self._rollout -= 1

            setattr(trainer, ROLLOUT_METHOD, generate)
        try:
            yield self
        finally:
            for handle in handles:
                handle.remove()
            vars(trainer).pop(ROLLOUT_METHOD, None)

    def _recorder(self, name: str) -> Any:
        def record(module: nn.Module, args: Any, output: Any) -> None:
            phase = "rollout" if self._rollout else "training" if torch.is_grad_enabled() else "scoring"
            self.seen[name][phase].add(from_torch(output.dtype))

        return record


def assert_safe(trainer_class: type, **arguments: Any) -> SafetyContract:
    """Trains with a safe trainer class and checks that it keeps its contract.

    Args:
        trainer_class: The class, made of `PrecisionMixin`, a TRL trainer and `PrecisionBase`.
        **arguments: What the class is built with; `args.max_steps` decides how long it trains.

    Returns:
        The contract, with the number of times that each hook fired.

    Raises:
        AssertionError: With everything that was not kept: a promised hook that never fired, a leaf that computes in
            another dtype in the rollout than in training, weights that changed their dtype, media that were buffered
            in another dtype than was decided.
    """
    trainer: Any = trainer_class(**arguments)
    before = take_census(unwrap(trainer.model))
    probe = ComputeProbe()
    with probe.attached(trainer):
        trainer.train()
    contract: SafetyContract = trainer.safety_contract
    # A run without media may be prepared in a trainer's own way: nothing in it has to follow a tower.
    ignored = set() if anatomy(trainer.model).towers else {"media"}
    failures = [
        f"{c.area}: promised, and its hook {c.hook!r} never fired" for c in contract.missing() if c.area not in ignored
    ]
    failures += probe.disagreements
    after = take_census(unwrap(trainer.model))
    if before.elements != after.elements:
        failures.append(f"weights changed their dtype in training: {before.elements} became {after.elements}")
    failures += _wrongly_buffered(trainer)
    if failures:
        raise AssertionError(f"{contract}\nnot kept:\n" + "\n".join(f"- {failure}" for failure in failures))
    return contract


def _wrongly_buffered(trainer: Any) -> list[str]:
    """Media tensors of the rollout buffer that are not in the dtype that was decided for them."""
    caster: MediaCaster = trainer._media_caster()
    wrong = []
    for batch in getattr(trainer, "_buffered_inputs", None) or []:
        for key in caster.media(batch):
            decision = caster.decisions.get(key)
            decided = "known" if decision is None else decision.dtype
            held = from_torch(batch[key].dtype)
            if decided is not None and held != decided:
                wrong.append(f"{key} is buffered as {held}, and was decided to be {decided}")
    return wrong


def _first_leaf(module: nn.Module) -> nn.Module | None:
    """The first module below that multiplies its input with unquantised weights of its own."""
    return next(
        (
            leaf
            for leaf in module.modules()
            if isinstance(leaf, MATMUL_LEAVES)
            and not isinstance(leaf, nn.MultiheadAttention)
            and not is_quantized(leaf.weight)
        ),
        None,
    )
