"""Computes the losses of the current optimizer step again, forward and backward, without a trace in the run.

During a step only references to the batch and the random state before each loss are kept. A replay begins from this
random state, and restores all that it changes: random states, buffers, gradients, autocast, and TRL's metrics.
"""

import contextlib
import copy
import logging
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from ..core.feature import Run
from ..core.patches import PATCHES, patched
from ..model.parts import tensors_in
from ..model.trial_forward import devices_of, gradients_restored, restored


logger = logging.getLogger(__name__)

KEPT_BYTES = 256 * 2**20
"""Largest size of the batches of a step that are kept; of larger ones only the last are."""
_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class _Generator:
    """A random generator.

    Attributes:
        get: Returns its state.
        set: Sets its state.
        cheap: Whether its state is kept before each loss. Reading the states of Python and NumPy takes longer, and few
            models use them: they are kept if the first loss of a run used them.
    """

    get: Callable[[], Any]
    set: Callable[[Any], Any]
    cheap: bool = False


@dataclass
class LossCall:
    """A loss that was computed in this step.

    Attributes:
        compute: Computes it again.
        inputs: The inputs of the loss by name.
        random_state: The states of the random generators before it, by name.
        seed: The gradient of the loss itself, as the backward pass got it: the loss scale, divided by the number of
            batches in a step. `None` before the backward pass.
    """

    compute: Callable[[], Any]
    inputs: Mapping[str, Any]
    random_state: Mapping[str, Any]
    seed: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors in the inputs."""
        return sum(tensor.nbytes for _, tensor in tensors_in(self.inputs, ""))

    def note_seed(self, gradient: torch.Tensor) -> None:
        """Keeps the gradient of the loss; a hook of the loss."""
        self.seed = gradient.detach()


@dataclass
class Replay:
    """Keeps the losses of a step, and computes one again.

    Args:
        run: The run.

    Attributes:
        calls: The losses of the current step, in order.
        before: Those of the step before, while it is not known whether that step was skipped.
    """

    run: Run
    calls: deque[LossCall] = field(default_factory=deque)
    before: deque[LossCall] = field(default_factory=deque)
    _generators: dict[str, _Generator] | None = None

    @property
    def possible(self) -> bool:
        """Whether hooks of modules see the computation, and a second one changes no weight and waits for no rank."""
        run = self.run
        if getattr(run.args, "torch_compile", False) or run.args.n_gpu > 1:
            return False  # hooks would be compiled into the model, or run in the threads of `nn.DataParallel`
        if run.trainer.is_deepspeed_enabled or run.sharded is not None:
            return False
        # An optimizer that runs in the backward pass, such as LOMO.
        return not any(getattr(p, "_post_accumulate_grad_hooks", None) for p in run.model.parameters())

    def computed(self, compute: Callable[[], Any]) -> Any:
        """Computes a loss and keeps what is needed to compute it again.

        Args:
            compute: Computes the loss.

        Returns:
            What `compute` returns.
        """
        generators = self._generators or _all_generators(self._devices)
        call = LossCall(compute, self.run.loss_inputs, {name: g.get() for name, g in generators.items()})
        result = compute()
        if self._generators is None:
            self._generators = {n: g for n, g in generators.items() if g.cheap or g.get() != call.random_state[n]}
        loss = loss_of(result)
        if isinstance(loss, torch.Tensor) and loss.requires_grad:
            loss.register_hook(call.note_seed)
            self.calls.append(call)
            while len(self.calls) > 1 and sum(call.nbytes for call in self.calls) > KEPT_BYTES:
                self.calls.popleft()
        return result

    @property
    def _devices(self) -> set[torch.device]:
        return {self.run.accelerator.device, *devices_of(self.run.model)}

    def next_step(self, undecided: bool) -> None:
        """Forgets the losses of a step.

        Args:
            undecided: Whether it is not known yet whether the step was skipped; then they are kept for one more step.
        """
        self.before = self.calls if undecided else deque()
        self.calls = deque()

    def again(
        self, call: LossCall, around: contextlib.AbstractContextManager[Any], factor: float = 1.0
    ) -> torch.Tensor | None:
        """Computes a loss and its gradients again.

        Args:
            call: The loss.
            around: The context of both passes, which watches them.
            factor: Factor of the gradient of the loss, to compute with another loss scale.

        Returns:
            The loss; `None` if it cannot be computed again, for example for lack of memory.
        """
        run = self.run
        if call.seed is None or not self.possible:  # hooks of the optimizer exist only now
            return None
        outer, run.loss_inputs, run.replaying = run.loss_inputs, call.inputs, True
        try:
            with contextlib.ExitStack() as stack:
                for context in (
                    _autocast_restored(run.accelerator.device.type),
                    _trainer_restored(run.trainer),
                    _without_collectives(run),
                    restored(run.model),
                    _hooks_restored(run.model),
                    gradients_restored(run.model.parameters()),
                    around,
                    _gradients_freed(run.model),  # after they have been read
                    torch.enable_grad(),
                ):
                    stack.enter_context(context)
                for name, generator in _all_generators(self._devices).items():
                    if name in call.random_state:
                        generator.set(call.random_state[name])
                with run.trainer.compute_loss_context_manager():
                    loss = loss_of(call.compute())
                loss.backward((call.seed * factor).to(loss.dtype))
                return loss.detach()
        except Exception as error:  # no memory for a second pass, or a loss that fails when it is computed again
            logger.info("a loss could not be computed again: %s: %s", type(error).__name__, error)
            return None
        finally:
            run.loss_inputs, run.replaying = outer, False


def loss_of(result: Any) -> Any:
    """The loss in the result of `compute_loss`, which may have outputs too."""
    return result[0] if isinstance(result, tuple) else result


def _all_generators(devices: Iterable[torch.device]) -> dict[str, _Generator]:
    """The random generators that a loss can use, by name."""
    found = {
        "torch": _Generator(torch.get_rng_state, torch.set_rng_state, cheap=True),
        "python": _Generator(random.getstate, random.setstate),
        "numpy": _Generator(_numpy_state, _set_numpy_state),
    }
    for device in devices:
        if device.type != "cpu":
            module = torch.get_device_module(device)
            found[str(device)] = _Generator(
                partial(module.get_rng_state, device), partial(module.set_rng_state, device=device), cheap=True
            )
    return found


def _numpy_state() -> tuple[Any, ...]:
    """NumPy's random state, as values that compare with `==`."""
    state: Any = np.random.get_state()
    name, keys, *rest = state
    return (name, keys.tobytes(), *rest)


def _set_numpy_state(state: tuple[Any, ...]) -> None:
    name, keys, *rest = state
    np.random.set_state((name, np.frombuffer(keys, np.uint32), *rest))


@contextlib.contextmanager
def _autocast_restored(kind: str) -> Iterator[None]:
    """Restores autocast, which accelerate leaves on if a forward pass fails."""
    enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    nesting = _autocast_nesting()
    try:
        yield
    finally:
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, dtype)
        while _autocast_nesting() > nesting:
            torch.autocast_decrement_nesting()
        torch.clear_autocast_cache()


def _autocast_nesting() -> int:
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


@contextlib.contextmanager
def _trainer_restored(trainer: Any) -> Iterator[None]:
    """Restores the trainer's numbers, strings, tensors and metrics, which computing a loss changes."""
    before = dict(vars(trainer))
    tensors = {name: value.clone() for name, value in before.items() if type(value) is torch.Tensor}
    if "_metrics" in before:
        trainer._metrics = copy.deepcopy(before["_metrics"])
    try:
        yield
    finally:
        for name in vars(trainer).keys() - before.keys():
            delattr(trainer, name)
        plain = {name: value for name, value in before.items() if isinstance(value, _PLAIN) or name == "_metrics"}
        vars(trainer).update(plain)
        for name, value in tensors.items():
            before[name].detach().copy_(value)
            vars(trainer)[name] = before[name]


@contextlib.contextmanager
def _without_collectives(run: Run) -> Iterator[None]:
    """Makes a loss that is computed again wait for no other rank, which may compute none again.

    In DDP's own forward pass, ranks exchange buffers and the order of gradients, also inside of `no_sync`.
    """
    accelerator = run.accelerator
    if accelerator.num_processes == 1:
        yield
        return

    def own(value: Any, *args: Any, **kwargs: Any) -> Any:
        return value

    wrapped = getattr(run.trainer, "model_wrapped", run.model)
    with contextlib.ExitStack() as stack:
        replaced = dict.fromkeys(PATCHES["replayed-loss"].names, own)
        stack.enter_context(patched("replayed-loss", accelerator, **replaced))
        if isinstance(wrapped, nn.parallel.DistributedDataParallel):
            stack.enter_context(patched("replayed-model", wrapped, forward=wrapped.module))
        yield


@contextlib.contextmanager
def _hooks_restored(model: nn.Module) -> Iterator[None]:
    """Removes hooks that a loss leaves behind, as those that switch gradient checkpointing on again do."""
    tables = [table for m in model.modules() for table in (m._forward_hooks, m._forward_pre_hooks)]
    before = [set(table) for table in tables]
    try:
        yield
    finally:
        for table, known in zip(tables, before, strict=True):
            for key in table.keys() - known:
                del table[key]


@contextlib.contextmanager
def _gradients_freed(model: nn.Module) -> Iterator[None]:
    """Frees the gradient of each parameter as soon as it is complete, so that a replay needs little memory."""

    def free(parameter: torch.Tensor) -> None:
        parameter.grad = None

    trained = (parameter for parameter in model.parameters() if parameter.requires_grad)
    handles = [parameter.register_post_accumulate_grad_hook(free) for parameter in trained]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
