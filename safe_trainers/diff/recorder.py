"""Records the values of a model during one step, with hooks that change no tensor and no random state.

The hooks exist only during recorded steps. The inputs and outputs of every call that is not inside of another one are
recorded, and the loss. What the modules inside compute is recorded for their first calls.
"""

import contextlib
import functools
import inspect
import json
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from ..core.patches import patched
from ..model.parts import adapter_state, tensors_in, unwrap
from ..model.rows import IMAGES
from . import digest, settings, storage
from .names import canonical, parent_of, watched_modules
from .storage import KINDS, MOST_CALLS, PHASES, Interned
from .tokens import TokenRows, row_hashes
from .values import Values, sample_of_state


LOSS_NAME, OPTIMIZER_NAME, ARGUMENTS_NAME = "(loss)", "(optimizer)", "(arguments)"
"""Names of what is recorded next to the modules."""
_CACHES = ("past_key_values", "cache")
"""Arguments with the keys and values of earlier tokens; transformers 5.24 and later use the second name."""
_PHASE = {name: number for number, name in enumerate(PHASES)}
_KIND = {name: number for number, name in enumerate(KINDS)}


def _hook(method: Callable[..., None]) -> Callable[..., None]:
    """Makes an error of a recorder's hook end the recording, and not the computation that is recorded."""

    @functools.wraps(method)
    def guarded(self: "Recorder", *args: Any) -> None:
        if not self._open or self.paused():
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
        self._handles, self._open = list[Any](), False
        self._patches = contextlib.ExitStack()
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
        self._names.update((id(module), name) for name, module in modules)
        self._weights()
        self._settings: dict[str, dict[str, Any]] = settings.of_model(self.model, self._configs)
        self._settings[ARGUMENTS_NAME] = self._arguments
        self._settings[OPTIMIZER_NAME] = settings.of_optimizer(optimizer)
        self._adapters = adapter_state(self.model)
        self._tokens = TokenRows(len(modules))
        enter, leave = _module_hooks(self)
        for _, module in modules:
            self._stochastic[id(module)] = _is_stochastic(module)
            self._handles.append(module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True))
            self._handles.append(module.register_forward_hook(leave, always_call=True))
        base: Any = unwrap(self.model)
        if hasattr(base, "generate"):
            watching = functools.partial(_generate, weakref.ref(self), base.generate)
            self._patches.enter_context(patched("watched-generate", base, generate=watching))

    def _clear(self) -> None:
        digest.forget_factors()
        self._strings, self._slots, self._calls_arguments = Interned(), Interned(), Interned()
        self._autocasts, self._values = Interned({"": 0}), Values()
        self._parameters: list[tuple[str, str, torch.Tensor]] | None = None
        self._events: list[tuple[int, ...]] = []
        self._extras: list[int] = []
        self._token_seen: dict[int, Any] = {}
        self._hooked: dict[int, tuple[Any, int]] = {}
        self._counts: Counter[tuple[int, str]] = Counter()
        self._current: dict[int, tuple[int, int, bool]] = {}
        self._stochastic: dict[int, bool] = {}
        self._names: dict[int, str] = {}
        self._rows: dict[str, list[int]] = {}
        self._passes: Counter[int] = Counter()
        self._left_out: Counter[tuple[int, str]] = Counter()
        self._outermost: nn.Module | None = None
        self._phase = _PHASE[storage.FORWARD]

    def fail(self, error: Exception) -> None:
        """Ends the recording of this step; the hooks that are left do nothing.

        Args:
            error: What went wrong in a hook.
        """
        self._open, self.error = False, error

    def stop(self) -> None:
        """Removes the hooks and discards what was recorded of the step."""
        self._patches.close()
        while self._handles:
            self._handles.pop().remove()
        self._open = False
        self._clear()

    def end(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Ends the step.

        Returns:
            Columns and tables, as `storage.write_step` takes them.
        """
        for (phase, name), count in self._left_out.items():
            self._event(phase, storage.LEFT_OUT, name, 0, "", -1, extra=count)
        columns = {
            "events": np.array(self._events, np.int32).reshape(-1, 8),
            "extra": np.array(self._extras, np.int64),
            **self._values.columns(),
        }
        known = {} if self.known is None else self.known
        changed = {name: now for name, now in self._settings.items() if known.get(name) != now}
        tables = {
            "names": self._strings.by_number,
            "slots": self._slots.by_number,
            "dtypes": [_name_of(dtype) for dtype in self._values.dtypes.by_number],
            "shapes": self._values.shapes.by_number,
            "autocasts": [_name_of(dtype) for dtype in self._autocasts.by_number],
            "arguments": self._calls_arguments.by_number,
            "settings": changed if self.known is not None else {},
            "rows": self._rows,
            "passes": self._counted_passes(),
            "modules": len({name for _, name in self._counts}),
        }
        self.stop()
        return columns, tables

    def _counted_passes(self) -> int:
        """The passes of the model that the size of the file depends on; those of a rollout count as one."""
        counted = (phase for phase in self._passes if phase != _PHASE[storage.BACKWARD])
        return sum(1 if phase == _PHASE[storage.ROLLOUT] else self._passes[phase] for phase in counted)

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
        for slot, tensor in tensors_in(values, "" if isinstance(values, Mapping) else "output"):
            self._event(number, kind, name, call, slot, self._values.add(tensor))
        if isinstance(values, Mapping):
            self._scalars(number, name, call, values)

    def gradients(self, optimizer: Any) -> None:
        """Records the gradients of the parameters and the state of the optimizer, before an optimizer step."""
        if not self._open:
            return
        trained = self._trained()
        for name, slot, parameter in trained:
            if parameter.grad is not None:
                value = self._values.add(parameter.grad, False)
                self._event(_PHASE[storage.BACKWARD], storage.GRADIENT, name, 0, f"{slot}.grad", value)
        state, phase = getattr(optimizer, "state", {}), _PHASE[storage.OPTIMIZER]
        for name, slot, parameter in trained:
            held = list(tensors_in(state.get(parameter, {}), ""))
            if held:
                keys = "+".join(key for key, _ in held)
                value = self._values.add(sample_of_state(held), False, final=True)
                self._event(phase, storage.STATE, name, 0, f"{slot}/{keys}", value)

    def updated(self) -> None:
        """Records the trained parameters after an optimizer step. Call `end` before anything changes them."""
        if self._open:
            for name, slot, parameter in self._trained():
                value = self._values.add(parameter, False, final=True)
                self._event(_PHASE[storage.OPTIMIZER], storage.UPDATED, name, 0, slot, value)

    def _trained(self) -> list[tuple[str, str, torch.Tensor]]:
        """The trained parameters of this step, with the names of their modules and their own."""
        if self._parameters is None:
            named = ((canonical(name), parameter) for name, parameter in self.model.named_parameters())
            self._parameters = [(parent_of(name), name.rpartition(".")[2], p) for name, p in named if p.requires_grad]
        return self._parameters

    def _weights(self) -> None:
        phase = _PHASE[storage.START]
        for full, module in self.model.named_modules():
            name = canonical(full)
            for slot, parameter in module._parameters.items():
                if parameter is not None and not parameter.is_meta:
                    value = self._values.add(parameter)
                    self._event(phase, storage.WEIGHT, name, 0, slot, value, training=module.training)
            for slot, buffer in module._buffers.items():
                if buffer is not None and not buffer.is_meta:
                    kind = storage.DERIVED if slot in module._non_persistent_buffers_set else storage.BUFFER
                    self._event(phase, kind, name, 0, slot, self._values.add(buffer), training=module.training)

    # ---- Hooks ----

    @_hook
    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        name, outermost = self._names.get(id(module)), self._outermost is None
        if name is None or not (name or outermost):
            return  # a module of a copy of the model; the base model of a wrapper whose call is already recorded
        if outermost:
            self._outermost, self._phase = module, self._phase_of_call(kwargs)
        phase, call = self._phase, self._counts[self._phase, name]
        self._counts[phase, name] += 1
        inputs = {**dict(zip(_argument_names(module), args, strict=False)), **kwargs}
        always = outermost and phase != _PHASE[storage.BACKWARD]
        recorded = phase != _PHASE[storage.ROLLOUT] and (always or call < MOST_CALLS)
        self._current[id(module)] = phase, call, recorded
        if outermost:
            self._token_seen.clear()
            self._tokens.begin(inputs, phase == _PHASE[storage.ROLLOUT])
        if outermost and (not name or "input_ids" in inputs):
            self._passes[phase] += 1
            if recorded and "input_ids" in inputs:
                hashes = row_hashes(inputs["input_ids"], inputs.get("attention_mask"))
                self._rows[f"{PHASES[phase]} {self._passes[phase]}"] = hashes
        tensors = list(tensors_in(inputs, ""))
        self._token_events(phase, storage.TOKEN_PRE, name, tensors, module.training)
        if not recorded:
            if phase != _PHASE[storage.ROLLOUT]:
                self._left_out[phase, name] += 1
            return
        self._tensors(phase, storage.PRE, name, call, tensors, module.training)
        self._scalars(phase, name, call, inputs, module.training)
        if self._stochastic[id(module)] and module.training:
            state = digest.hash_of(_random_state(module))
            self._event(phase, storage.RANDOM, name, call, "", -1, training=True, extra=int(state))

    @_hook
    def _leave(self, module: nn.Module, output: Any) -> None:
        if id(module) not in self._current:
            return
        name = self._names[id(module)]
        phase, call, recorded = self._current.pop(id(module))
        if module is self._outermost:
            self._outermost = None
        tensors = list(tensors_in(output, "output"))
        self._token_events(phase, storage.TOKEN, name, tensors, module.training)
        if recorded:
            self._tensors(phase, storage.POST, name, call, tensors, module.training)

    def _tensors(self, phase: int, kind: str, name: str, call: int, tensors: Any, training: bool) -> None:
        """Records inputs or outputs of a module, and watches their gradients."""
        for slot, tensor in tensors:
            self._event(phase, kind, name, call, slot, self._values.add(tensor), training=training)
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
            first = self._values.add_rows(found[1])
            for place, (number, key) in enumerate(found[0]):
                self._event(phase, kind, name, number, slot, first + place, training=training, extra=key)

    def generating(self, images: Mapping[str, Any]) -> None:
        """Notes the images of a call of `generate`; none when it has ended."""
        if self._open:
            self._tokens.images = images

    def _phase_of_call(self, kwargs: Mapping[str, Any]) -> int:
        """The phase of a call that is not inside of another one, and of all calls in it."""
        if _in_backward():
            return _PHASE[storage.BACKWARD]
        if torch.is_grad_enabled():
            return _PHASE[storage.FORWARD]
        if self.sampling or any(kwargs.get(name) is not None for name in _CACHES):
            return _PHASE[storage.ROLLOUT]
        same = adapter_state(self.model) == self._adapters
        return _PHASE[storage.SCORING if same else storage.REFERENCE]

    @_hook
    def gradient(self, name: str, call: int, slot: str, gradient: torch.Tensor) -> None:
        """Records the gradient of a module's output."""
        self._event(_PHASE[storage.BACKWARD], storage.GRADIENT, name, call, slot, self._values.add(gradient))

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
            number = self._calls_arguments[json.dumps(scalars, sort_keys=True)]
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
        device = self._device
        autocast = self._autocasts[torch.get_autocast_dtype(device)] if torch.is_autocast_enabled(device) else 0
        self._events.append(
            (phase, _KIND[kind], self._strings[name], call, self._slots[slot], value, autocast, int(training))
        )
        self._extras.append(extra)


def _module_hooks(recorder: Recorder) -> tuple[Callable[..., None], Callable[..., None]]:
    """Makes the hooks of modules. A copy of the model has them too, so that they must not hold the recorder."""
    own = weakref.ref(recorder)

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found = None if torch.compiler.is_compiling() else own()
        if found is not None:
            found._enter(module, args, kwargs)

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        found = None if torch.compiler.is_compiling() else own()
        if found is not None:
            found._leave(module, output)

    return enter, leave


def _generate(own: "weakref.ref[Recorder]", method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Calls `generate`, and tells the recorder the images before."""
    recorder = own()
    if recorder is None:
        return method(*args, **kwargs)
    recorder.generating({name: kwargs[name] for name in IMAGES if name in kwargs})
    try:
        return method(*args, **kwargs)
    finally:
        recorder.generating({})


class _GradientHook:
    """Passes a gradient to the recorder, and keeps no tensor alive."""

    def __init__(self, recorder: Recorder, name: str, call: int, slot: str) -> None:
        self._recorder, self._place = recorder, (name, call, slot)

    def __call__(self, gradient: torch.Tensor) -> None:
        self._recorder.gradient(*self._place, gradient)


def _name_of(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


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
