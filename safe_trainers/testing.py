"""Test helpers for trainers built with this package, including a user's own algorithm.

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

from .core.coverage import SafetyContract
from .core.device import can_unscale
from .core.dtypes import HALVES, from_torch
from .core.trl import ROLLOUT_METHOD
from .media.caster import MediaCaster
from .media.inputs import MediaInputs
from .model.inventory import take_inventory
from .model.parts import MATMUL_LEAVES, find_parts, is_quantized, unwrap
from .model.trial_forward import DIAGNOSED
from .numerics import loss_scale
from .trainer.mixin import PrecisionMixin


class StrictGradScaler(torch.amp.GradScaler):
    """A CPU loss scaler that rejects the gradient dtypes that CUDA's kernel rejects.

    torch's CPU kernel unscales bfloat16 gradients and CUDA's does not, so a test with torch's own CPU scaler would
    pass where a GPU fails.
    """

    SUPPORTED = (torch.float32, torch.float64, torch.float16)

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.grad.dtype not in self.SUPPORTED:
                    kind = {torch.bfloat16: "BFloat16"}.get(parameter.grad.dtype, str(parameter.grad.dtype))
                    raise NotImplementedError(
                        f"\"_amp_foreach_non_finite_check_and_unscale_cuda\" not implemented for '{kind}'"
                    )
        return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)


def fp16_on_cpu(trainer_class: type) -> type:
    """Makes a trainer class whose `fp16=True` works on a CPU, with autocast and a strict loss scaler.

    On a CPU accelerate silently builds neither, so an ordinary fp16 test there runs in float32.

        trainer = fp16_on_cpu(SafeGRPOTrainer)(model, args=SafeGRPOConfig(fp16=True, use_cpu=True), ...)

    Args:
        trainer_class: Any trainer class of transformers, TRL or this package.

    Returns:
        A subclass with the same name. Without fp16, or on another device, it behaves like its base.
    """

    class Fp16OnCpu(trainer_class):
        @classmethod
        def precision_device(cls, args: Any) -> Any:
            device = super().precision_device(args)
            if device.kind != "cpu":
                return device
            refused = (name for name in sorted(HALVES) if not can_unscale(StrictGradScaler("cpu"), name))
            return replace(device, unscalable_dtypes=frozenset(refused))

        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            accelerator = self.accelerator
            if accelerator.mixed_precision == "fp16" and accelerator.device.type == "cpu":
                accelerator.native_amp = True
                accelerator.scaler = StrictGradScaler("cpu")
                if isinstance(self, PrecisionMixin):
                    loss_scale.configure(accelerator.scaler, self.args)

    Fp16OnCpu.__name__ = Fp16OnCpu.__qualname__ = trainer_class.__name__
    return Fp16OnCpu


class ComputeProbe:
    """Records the dtypes in which parts of a model compute, by phase.

    The compute dtype is read from a layer's output: a matrix product returns autocast's dtype under autocast, and the
    dtype of its weights without it. What is computed for a diagnosis is left out.

    Attributes:
        seen: Output dtypes by part (a tower's name or `"text"`) and phase (`"rollout"`, `"scoring"` or `"training"`).
    """

    def __init__(self) -> None:
        self.seen: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
        self._rollout_depth = 0

    @property
    def disagreements(self) -> list[str]:
        """One sentence for each part whose compute dtype differs between phases."""
        return [
            f"{leaf} computes in "
            + ", ".join(f"{'/'.join(sorted(d))} in {phase}" for phase, d in sorted(seen.items()))
            for leaf, seen in self.seen.items()
            if len(set().union(*seen.values())) > 1
        ]

    def phases(self) -> set[str]:
        """The phases in which any part was recorded."""
        return {phase for seen in self.seen.values() for phase in seen}

    @contextlib.contextmanager
    def attached(self, trainer: Any) -> Iterator["ComputeProbe"]:
        """Records the first matrix product of each tower and of the text model while the block runs.

        Args:
            trainer: Any TRL trainer, of this package or stock.

        Yields:
            This probe.
        """
        parts = find_parts(trainer.model)
        handles = []
        for name, module in {**parts.towers, "text": parts.text}.items():
            leaf = _first_leaf(module)
            if leaf is not None:
                handles.append(leaf.register_forward_hook(self._recorder(name, unwrap(trainer.model))))
        method = getattr(trainer, ROLLOUT_METHOD, None)
        if method is not None:

            def generate(*args: Any, **kwargs: Any) -> Any:
                self._rollout_depth += 1
                try:
                    return method(*args, **kwargs)
                finally:
                    self._rollout_depth -= 1

            setattr(trainer, ROLLOUT_METHOD, generate)
        try:
            yield self
        finally:
            for handle in handles:
                handle.remove()
            vars(trainer).pop(ROLLOUT_METHOD, None)

    def _recorder(self, name: str, model: nn.Module) -> Any:
        def record(module: nn.Module, args: Any, output: Any) -> None:
            if model in DIAGNOSED:
                return
            phase = "rollout" if self._rollout_depth else "training" if torch.is_grad_enabled() else "scoring"
            self.seen[name][phase].add(from_torch(output.dtype))

        return record


def assert_safe(trainer_class: type, **arguments: Any) -> SafetyContract:
    """Trains with a trainer class and checks its safety contract.

    Args:
        trainer_class: A class built from `PrecisionMixin`, a TRL trainer and `PrecisionBase`.
        **arguments: Arguments of the class; `args.max_steps` sets the length of the training.

    Returns:
        The contract, with the number of times that each hook fired.

    Raises:
        AssertionError: Lists every violation: a covered hook that never fired, a part whose compute dtype differs
            between rollout and training, weights whose dtype changed, or media buffered in the wrong dtype.
    """
    trainer: Any = trainer_class(**arguments)
    before = take_inventory(unwrap(trainer.model))
    probe = ComputeProbe()
    with probe.attached(trainer):
        trainer.train()
    contract: SafetyContract = trainer.precision.coverage
    # The data may have no media; all other hooks fire in every training.
    broken = [c for c in contract.missing() if c.area != "media" or c in contract.broken()]
    failures = [f"{c.area}: covered, but its hook {c.hook!r} never fired" for c in broken]
    failures += probe.disagreements
    after = take_inventory(unwrap(trainer.model))
    if before.elements != after.elements:
        failures.append(f"weights changed dtype during training: {before.elements} became {after.elements}")
    failures += _buffered_in_wrong_dtype(trainer)
    if failures:
        raise AssertionError(f"{contract}\nviolated:\n" + "\n".join(f"- {failure}" for failure in failures))
    return contract


def _buffered_in_wrong_dtype(trainer: Any) -> list[str]:
    """One sentence for each media tensor in the rollout buffer whose dtype is not the one decided for it."""
    caster: MediaCaster = trainer.precision[MediaInputs].caster
    wrong = []
    for batch in getattr(trainer, "_buffered_inputs", None) or []:
        for key in caster.media(batch):
            decision, actual = caster.decisions.get(key), from_torch(batch[key].dtype)
            if decision is None:
                wrong.append(f"{key} is buffered as {actual}, but no dtype was decided for it")
            elif decision.dtype is not None and actual != decision.dtype:
                wrong.append(f"{key} is buffered as {actual} instead of {decision.dtype}")
    return wrong


def _first_leaf(module: nn.Module) -> nn.Module | None:
    """The first submodule that multiplies its input with its own, unquantised weights."""
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
