"""Records the values of a model during one step, with hooks that change no tensor and no random state.

The hooks exist only during recorded steps. A tensor that several modules receive or return is measured once.
"""

import functools
import inspect
import json
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from . import digest, settings, storage
from .names import canonical, parent_of, watched_modules
from .storage import KINDS, PHASES, Interned
from .tokens import TokenRows, row_hashes


MOST_CALLS = 8
"""Calls of a module that are recorded in a phase of a step."""
MOST_WAITING = 256
"""Small tensors that are copied before they are measured together."""
MOST_OF_STATE = 1024
"""Values of each tensor of the optimizer's state that are recorded."""
LOSS_NAME, OPTIMIZER_NAME, ARGUMENTS_NAME = "(loss)", "(optimizer)", "(arguments)"
"""Names of what is recorded next to the modules."""
_CACHES = ("past_key_values", "cache")
"""Arguments with the keys and values of earlier tokens; transformers 5.24 and later use the second name."""
_PHASE = {name: number for number, name in enumerate(PHASES)}
_KIND = {name: number for number, name in enumerate(KINDS)}


def tensors_in(value: Any, name: str, depth: int = 3) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors in nested containers by dotted name; skips other objects such as caches."""
    if isinstance(value, torch.Tensor):
        if not value.is_meta and value.layout == torch.strided:
            yield name, value
    elif depth > 0 and isinstance(value, Mapping):
        for key, part in value.items():
            yield from tensors_in(part, f"{name}.{key}" if name else str(key), depth - 1)
    elif depth > 0 and isinstance(value, (tuple, list)):
        for index, part in enumerate(value):
            yield from tensors_in(part, f"{name}.{index}", depth - 1)


def _hook(method: Callable[..., None]) -> Callable[..., None]:
    """Makes an error of a recorder's hook end the recording, and not the computation that is recorded."""

    @functools.wraps(method)
    def guarded(self: "Recorder", *args: Any) -> None:
        if not self.recording or self.paused():
            return
        try:
            method(self, *args)
        except Exception as error:
            self.fail(error)

    return guarded


class Recorder:
    """Records the steps of a model.

    Args:
        model: The model as it is called, wrapped or not.
        args: The training arguments, for their settings; `None` without.

    Attributes:
        sampling: Whether completions are being generated.
        paused: Says whether the model is called for another purpose, so that the calls are not recorded.
        error: The error that ended the recording of this step in a hook; `None` without.
    """

    def __init__(self, model: nn.Module, args: Any = None) -> None:
        self.model, self.sampling = model, False
        self.paused: Callable[[], bool] = lambda: False
        self.error: Exception | None = None
        self._arguments, self._configs = settings.of_arguments(args), dict[int, Any]()
        self._handles, self._parameters, self._open = list[Any](), dict[int, list[str]](), False
        self.known: dict[str, Any] | None = None

    # ---- Steps ----

    @property
    def recording(self) -> bool:
        """Whether a step is being recorded."""
        return self._open

    def begin(self, optimizer: Any = None) -> None:
        """Begins to record a step: registers the hooks, and records the weights and the settings.

        Args:
            optimizer: The optimizer; its class and groups are settings.
        """
        self._clear()
        self._open, self.error = True, None
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        modules = list(watched_modules(self.model))
        self._names = {id(module): name for name, module in modules}
        self._weights()
        self._settings: dict[str, dict[str, Any]] = settings.of_model(self.model, self._configs)
        self._settings[ARGUMENTS_NAME] = self._arguments
        self._settings[OPTIMIZER_NAME] = settings.of_optimizer(optimizer)
        for _, module in modules:
            self._stochastic[id(module)] = _is_stochastic(module)
            self._handles.append(module.register_forward_pre_hook(self._enter, prepend=True, with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._leave))

    def _clear(self) -> None:
        self._strings, self._slots, self._calls_arguments = Interned(), Interned(), Interned()
        self._dtypes, self._shapes, self._autocasts = Interned(), Interned(), Interned([""])
        self._events: list[tuple[int, ...]] = []
        self._extras: list[int] = []
        self._values: list[tuple[Any, Any, Any]] = []
        self._kinds: list[tuple[int, int]] = []
        self._waiting: list[tuple[int, int, torch.Tensor]] = []  # number of the first value, count of rows, tensor
        self._token_seen: dict[int, Any] = {}
        self._seen: dict[int, tuple[Any, int, int]] = {}
        self._hooked: dict[int, tuple[Any, int]] = {}
        self._counts: Counter[tuple[int, str]] = Counter()
        self._current: dict[int, tuple[int, int]] = {}
        self._stochastic: dict[int, bool] = {}
        self._tokens, self._rows = TokenRows(), dict[str, list[int]]()
        self._inside, self._phase = False, _PHASE[storage.FORWARD]

    def fail(self, error: Exception) -> None:
        """Ends the recording of this step; the hooks that are left do nothing.

        Args:
            error: What went wrong in a hook.
        """
        self._open, self.error = False, error

    def stop(self) -> None:
        """Removes the hooks and discards what was recorded of the step."""
        while self._handles:
            self._handles.pop().remove()
        self._open = False
        self._clear()

    def end(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Ends the step.

        Returns:
            Columns and tables, as `storage.write_step` takes them.
        """
        while self._handles:
            self._handles.pop().remove()
        self._measure_waiting()
        hashes, stats, samples = _fetched(self._values)
        columns = {
            "events": np.array(self._events, np.int32).reshape(-1, 8),
            "extra": np.array(self._extras, np.int64),
            "hashes": hashes,
            "stats": stats,
            "kinds": np.array(self._kinds, np.int32).reshape(-1, 2),
            "samples": samples,
        }
        known = {} if self.known is None else self.known
        changed = {name: now for name, now in self._settings.items() if known.get(name) != now}
        tables = {
            "names": self._strings.values,
            "slots": self._slots.values,
            "dtypes": self._dtypes.values,
            "shapes": self._shapes.values,
            "autocasts": self._autocasts.values,
            "arguments": self._calls_arguments.values,
            "settings": changed if self.known is not None else {},
            "rows": self._rows,
        }
        self._open = False
        return columns, tables

    def description(self) -> dict[str, Any]:
        """Describes the model, as `storage.write_model` takes it. Call it between `begin` and `end` of the first step.

        Later steps store only settings that differ from these.
        """
        self.known = self._settings
        device = next((p.device for p in self.model.parameters()), torch.device("cpu"))
        return {
            "kinds": {canonical(name): type(module).__name__ for name, module in self.model.named_modules()},
            "settings": self._settings,
            "shapes": {canonical(name): list(p.shape) for name, p in self.model.named_parameters()},
            "environment": settings.environment(device),
        }

    # ---- What a trainer adds ----

    def add(self, phase: str, kind: str, name: str, values: Any) -> None:
        """Records tensors that no module computes.

        Args:
            phase: One of `PHASES`.
            kind: One of `KINDS`.
            name: What they belong to, such as `(loss)`.
            values: Tensors in nested containers; scalars in a mapping are recorded as arguments.
        """
        if not self._open:
            return
        number = _PHASE[phase]
        if kind == storage.PRE:
            self._counts[number, name] += 1
        call = max(0, self._counts[number, name] - 1)
        if call >= MOST_CALLS:
            return
        for slot, tensor in tensors_in(values, "" if isinstance(values, Mapping) else "output"):
            self._event(number, kind, name, call, slot, self._value(tensor))
        if isinstance(values, Mapping):
            self._scalars(number, name, call, values)

    def gradients(self, optimizer: Any) -> None:
        """Records the gradients of the parameters and the state of the optimizer, before an optimizer step."""
        if not self._open:
            return
        trained = list(self._trained())
        for name, slot, parameter in trained:
            if parameter.grad is not None:
                self._event(
                    _PHASE[storage.BACKWARD],
                    storage.GRADIENT,
                    name,
                    0,
                    f"{slot}.grad",
                    self._value(parameter.grad, False),
                )
        state, phase = getattr(optimizer, "state", {}), _PHASE[storage.OPTIMIZER]
        for name, slot, parameter in trained:
            held = list(tensors_in(state.get(parameter, {}), ""))
            if held:
                keys = "+".join(key for key, _ in held)
                self._event(phase, storage.STATE, name, 0, f"{slot}/{keys}", self._value(_sampled(held), False))

    def updated(self) -> None:
        """Records the trained parameters after an optimizer step."""
        if self._open:
            for name, slot, parameter in self._trained():
                self._event(_PHASE[storage.OPTIMIZER], storage.UPDATED, name, 0, slot, self._value(parameter, False))

    def _trained(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                full = canonical(name)
                yield parent_of(full), full.rpartition(".")[2], parameter

    def _weights(self) -> None:
        phase = _PHASE[storage.START]
        for full, module in self.model.named_modules():
            name = canonical(full)
            for slot, parameter in module._parameters.items():
                if parameter is not None and not parameter.is_meta:
                    self._event(phase, storage.WEIGHT, name, 0, slot, self._value(parameter), training=module.training)
            for slot, buffer in module._buffers.items():
                if buffer is not None and not buffer.is_meta:
                    kind = storage.DERIVED if slot in module._non_persistent_buffers_set else storage.BUFFER
                    self._event(phase, kind, name, 0, slot, self._value(buffer), training=module.training)

    # ---- Hooks ----

    @_hook
    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            return
        name, outermost = self._names[id(module)], module is self.model
        if not name and not outermost and self._inside:
            return  # the base model of a wrapper whose call is already recorded
        if not name or not self._inside:
            self._phase = self._phase_of_call(kwargs)
        if _in_backward():
            phase = _PHASE[storage.BACKWARD]
        else:
            phase = self._phase
        self._inside = self._inside or not name
        call = self._counts[phase, name]
        self._counts[phase, name] += 1
        self._current[id(module)] = phase, call
        inputs = {**dict(zip(_argument_names(module), args, strict=False)), **kwargs}
        if not name:
            self._token_seen.clear()
            self._tokens.begin(inputs, phase == _PHASE[storage.ROLLOUT])
            if call < MOST_CALLS and phase != _PHASE[storage.ROLLOUT] and "input_ids" in inputs:
                self._rows[f"{PHASES[phase]} {call}"] = row_hashes(inputs["input_ids"], inputs.get("attention_mask"))
        tensors = list(tensors_in(inputs, ""))
        self._token_events(phase, storage.TOKEN_PRE, name, tensors, module.training)
        if phase == _PHASE[storage.ROLLOUT] or call >= MOST_CALLS:
            return
        self._tensors(phase, storage.PRE, name, call, tensors, module.training)
        self._scalars(phase, name, call, inputs, module.training)
        if self._stochastic[id(module)] and module.training:
            state = digest.hash_of(_random_state(module))
            self._event(phase, storage.RANDOM, name, call, "", -1, training=True, extra=int(state))

    @_hook
    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or id(module) not in self._current:
            return
        name = self._names[id(module)]
        phase, call = self._current.pop(id(module))
        if not name:
            self._inside = False
        tensors = list(tensors_in(output, "output"))
        self._token_events(phase, storage.TOKEN, name, tensors, module.training)
        if phase == _PHASE[storage.ROLLOUT] or call >= MOST_CALLS:
            return
        self._tensors(phase, storage.POST, name, call, tensors, module.training)

    def _tensors(self, phase: int, kind: str, name: str, call: int, tensors: Any, training: bool) -> None:
        """Records inputs or outputs of a module, and watches their gradients."""
        for slot, tensor in tensors:
            self._event(phase, kind, name, call, slot, self._value(tensor), training=training)
            self._watch_gradient(name, call, slot, tensor)

    def _token_events(self, phase: int, kind: str, name: str, tensors: Any, training: bool) -> None:
        if not self._tokens.chosen or phase == _PHASE[storage.BACKWARD]:
            return
        for slot, tensor in tensors:
            if kind == storage.TOKEN_PRE and tensor.is_floating_point():
                continue  # the output of an earlier module
            known = self._token_seen.get(id(tensor))
            if known is not None and known() is tensor:
                continue  # a module returns the output of its last child
            self._token_seen[id(tensor)] = weakref.ref(tensor)
            found = self._tokens.rows_of(name, slot, tensor)
            if found is None:
                continue
            first = self._rows_value(found[1])
            for place, (number, key) in enumerate(found[0]):
                self._event(phase, kind, name, number, slot, first + place, training=training, extra=key)

    def _phase_of_call(self, kwargs: Mapping[str, Any]) -> int:
        if torch.is_grad_enabled():
            return _PHASE[storage.FORWARD]
        decoding = self.sampling or any(kwargs.get(name) is not None for name in _CACHES)
        return _PHASE[storage.ROLLOUT if decoding else storage.SCORING]

    @_hook
    def gradient(self, name: str, call: int, slot: str, gradient: torch.Tensor) -> None:
        """Records the gradient of a module's output."""
        self._event(_PHASE[storage.BACKWARD], storage.GRADIENT, name, call, slot, self._value(gradient))

    def _watch_gradient(self, name: str, call: int, slot: str, tensor: torch.Tensor) -> None:
        """Registers a hook on a tensor that has none yet; a parent often returns its child's output."""
        if not (tensor.requires_grad and torch.is_grad_enabled()) or tensor.is_leaf:
            return
        known, version = self._hooked.get(id(tensor)), tensor._version
        if known is None or known[0]() is not tensor or known[1] != version:
            self._hooked[id(tensor)] = weakref.ref(tensor), version
            self._handles.append(tensor.register_hook(_GradientHook(self, name, call, slot)))

    # ---- Values ----

    def _scalars(self, phase: int, name: str, call: int, values: Mapping[str, Any], training: bool = False) -> None:
        scalars = {key: value for key, value in values.items() if isinstance(value, (bool, int, float, str))}
        if scalars:
            number = self._calls_arguments(json.dumps(scalars, sort_keys=True))
            self._event(phase, storage.ARGUMENTS, name, call, "", -1, training=training, extra=number)

    def _event(
        self,
        phase: int,
        kind: str,
        name: str,
        call: int,
        slot: str,
        value: int,
        training: bool = False,
        extra: int = 0,
    ) -> None:
        autocast = self._autocasts(_autocast_dtype(self._device))
        self._events.append(
            (phase, _KIND[kind], self._strings(name), call, self._slots(slot), value, autocast, int(training))
        )
        self._extras.append(extra)

    def _value(self, tensor: torch.Tensor, known: bool = True) -> int:
        """Returns the number of a tensor's digest.

        A tensor that was not changed since is not measured again, except if it may have been changed without a new
        version, as optimizers do with parameters.
        """
        version = -1 if tensor.is_inference() or not known else tensor._version
        seen = self._seen.get(id(tensor))
        if seen is not None and seen[0]() is tensor and seen[1] == version >= 0:
            return seen[2]
        flat = digest.plain(tensor)
        if flat.device.type == "cpu" and 0 < flat.numel() <= digest.BATCHED:
            copied = flat.clone() if flat.data_ptr() == tensor.data_ptr() else flat
            self._waiting.append((len(self._values), 1, copied))
            self._values.append((0, (), ()))
            if len(self._waiting) >= MOST_WAITING:
                self._measure_waiting()
        else:
            self._values.append(digest.measure(flat))
        kind = self._dtypes(str(tensor.dtype).removeprefix("torch.")), self._shapes(tuple(tensor.shape))
        self._kinds.append(kind)
        self._seen[id(tensor)] = weakref.ref(tensor), version, len(self._values) - 1
        return len(self._values) - 1

    def _rows_value(self, rows: torch.Tensor) -> int:
        """Adds the digests of the rows of a matrix, which is not shared, and returns the number of the first."""
        first, (count, width) = len(self._values), rows.shape
        self._kinds += [(self._dtypes(str(rows.dtype).removeprefix("torch.")), self._shapes((width,)))] * count
        if rows.device.type == "cpu":
            self._waiting.append((first, count, rows))
            self._values += [(0, (), ())] * count
        else:
            self._values += [digest.measure(row) for row in rows]
        return first

    def _measure_waiting(self) -> None:
        """Measures the small tensors that were copied; large ones are measured at once, to copy nothing large."""
        measured = iter(digest.measure_many([(tensor, count) for _, count, tensor in self._waiting]))
        for first, count, _ in self._waiting:
            for index in range(first, first + count):
                self._values[index] = next(measured)
        self._waiting.clear()


class _GradientHook:
    """Passes a gradient to the recorder, and keeps no tensor alive."""

    def __init__(self, recorder: Recorder, name: str, call: int, slot: str) -> None:
        self._recorder, self._place = recorder, (name, call, slot)

    def __call__(self, gradient: torch.Tensor) -> None:
        self._recorder.gradient(*self._place, gradient)


def _sampled(held: list[tuple[str, torch.Tensor]]) -> torch.Tensor:
    """Values of the state of a parameter at a fixed stride, float32; all of them would take as long as a step."""
    flats = [digest.plain(tensor).view(-1) for _, tensor in held]
    return torch.cat([flat[:: max(1, -(-flat.numel() // MOST_OF_STATE))].float() for flat in flats])


def _fetched(values: list[tuple[Any, Any, Any]]) -> tuple[Any, Any, list[Any]]:
    """Reads all measured values from their devices at once: hashes (V,), stats (V, 3), samples."""
    hashes, stats, samples = (
        np.zeros(len(values), np.int64),
        np.zeros((len(values), 3)),
        [np.zeros(0, np.float32)] * len(values),
    )
    waiting = []
    for index, (value, measured, sample) in enumerate(values):
        if isinstance(value, torch.Tensor):
            waiting.append(index)
        else:
            hashes[index], stats[index], samples[index] = value, measured, sample
    for device in {values[index][0].device for index in waiting}:
        here = [index for index in waiting if values[index][0].device == device]
        hashes[here] = torch.stack([values[index][0] for index in here]).cpu().numpy()
        stats[here] = torch.stack([values[index][1] for index in here]).cpu().numpy()
        joined = torch.cat([values[index][2] for index in here]).cpu().numpy()
        lengths = [len(values[index][2]) for index in here]
        for index, part in zip(here, np.split(joined, np.cumsum(lengths)[:-1]), strict=True):
            samples[index] = part
    return hashes, stats, samples


def _autocast_dtype(device: str) -> str:
    if not torch.is_autocast_enabled(device):
        return ""
    return str(torch.get_autocast_dtype(device)).removeprefix("torch.")


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _is_stochastic(module: nn.Module) -> bool:
    """Whether a module's own code draws random numbers in training: dropout, or an attribute such as `dropout`."""
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.p > 0
    named = (value for name, value in vars(module).items() if "drop" in name or "jitter" in name)
    return any(isinstance(value, float) and value > 0 for value in named)


def _random_state(module: nn.Module) -> torch.Tensor:
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    if device.type != "cuda" and torch.cuda.is_available() and torch.cuda.is_initialized():
        device = torch.device("cuda", torch.cuda.current_device())  # dropout has no parameters
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _argument_names(module: nn.Module) -> tuple[str, ...]:
    """The names of the positional arguments of a module's forward method, so that calls by position and name align."""
    kind = type(module)
    if kind not in _SIGNATURES:
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        parameters = inspect.signature(kind.forward).parameters.values()
        names = [parameter.name for parameter in parameters if parameter.kind in positional][1:]
        _SIGNATURES[kind] = (*names, *(str(index) for index in range(len(names), 16)))
    return _SIGNATURES[kind]


_SIGNATURES: dict[type, tuple[str, ...]] = {}
