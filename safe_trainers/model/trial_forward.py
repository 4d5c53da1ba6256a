"""Runs a model's forward pass on a short input, without changing the state of the run."""

import contextlib
import inspect
import itertools
import logging
import random
import re
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn

from ..core.dtypes import to_torch
from .parts import elements_of, find_parts, holds_packed, is_quantized, unwrap


logger = logging.getLogger(__name__)
DIAGNOSED: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()
"""Base models whose forward passes are not of the run at this moment: a question to them, or a search for a fault."""
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
"""Types of attributes that cannot change in place."""
_TABLES = frozenset(vars(nn.Module())) - {"training"}
"""Attributes that every module has, such as its parameters and hooks, which a forward pass does not change."""
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
"""Attributes of a module that hold the hooks of its forward pass, by their numbers."""
_DTYPE_ERROR = re.compile(r"dtype|scalar ?type|should be the same", re.IGNORECASE)
"""Matches PyTorch's errors about two different dtypes, on CPU and CUDA."""


@dataclass(frozen=True)
class Trial:
    """The result of a forward and a backward pass on a sample.

    Attributes:
        seconds: How long it took; 0 if it was not run.
        error: PyTorch's error about dtypes; `None` if both passes work.
        function: Name of the `torch.autograd.Function` whose backward pass failed; `None` if none did.
        skipped: Why nothing is known; `None` if the passes ran.
    """

    seconds: float = 0.0
    error: str | None = None
    function: str | None = None
    skipped: str | None = None

    def __str__(self) -> str:
        if self.skipped is not None:
            return f"not run: {self.skipped}"
        return f"{self.seconds:.2f} s, {'works' if self.error is None else self.error}"


@contextlib.contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Runs a block without gradients and in evaluation mode, and restores what a forward pass may change.

    Args:
        model: The model that is called in the block.
    """
    base = unwrap(model)
    nested = base in DIAGNOSED
    DIAGNOSED.add(base)
    try:
        with restored(model), torch.no_grad():
            for module in model.modules():
                # In evaluation mode, bitsandbytes on CPU repacks the weights of a layer permanently.
                module.training = any(p is not None and is_quantized(p) for p in module._parameters.values())
            yield
    finally:
        if not nested:
            DIAGNOSED.discard(base)


@contextlib.contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """Restores, when a block ends, what a forward pass may change.

    That is training mode, buffers other than packed weights, plain attributes such as counters, and the states of
    random generators of torch, Python, NumPy and the model's modules.

    Args:
        model: The model that is called in the block.
    """
    modules = list(model.modules())
    own = [{name: value for name, value in vars(module).items() if name not in _TABLES} for module in modules]
    attributes = [{name: value for name, value in kept.items() if isinstance(value, _PLAIN)} for kept in own]
    buffers = [dict(module._buffers) for module in modules]
    copied = [b for m in modules if m._buffers for b in _changeable(m)]
    values = {id(b): b.clone() for b in copied}
    devices = devices_of(model)
    forked = torch.random.fork_rng(devices, device_type=devices[0].type if devices else "cuda")
    with forked, _restored_generators(itertools.chain(*(kept.values() for kept in own))):
        try:
            yield
        finally:
            for module, plain, held in zip(modules, attributes, buffers, strict=True):
                vars(module).update(plain)
                # A quantiser may unpack weights in the first forward pass, which removes buffers.
                module._buffers.update({name: held[name] for name in held.keys() & module._buffers.keys()})
                for buffer in held.values():
                    if buffer is not None and id(buffer) in values and not torch.equal(buffer, values[id(buffer)]):
                        with torch.no_grad():
                            buffer.copy_(values[id(buffer)])


@contextlib.contextmanager
def without_later_hooks(model: nn.Module, number: int) -> Iterator[None]:
    """Calls no forward hooks in a block that were registered after a moment, so that observers do not see its passes.

    Args:
        model: The model that is called in the block.
        number: `torch.utils.hooks.RemovableHandle.next_id` at that moment.
    """
    held = [(vars(m), name, hooks) for m in model.modules() for name in _HOOKS if (hooks := vars(m).get(name))]
    try:
        for attributes, name, hooks in held:
            attributes[name] = OrderedDict((key, hook) for key, hook in hooks.items() if key < number)
        yield
    finally:
        for attributes, name, hooks in held:
            attributes[name] = hooks


@contextlib.contextmanager
def gradients_restored(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Removes the gradients of tensors during a block, and puts the same gradients back.

    Args:
        tensors: The parameters of the model whose backward pass runs in the block, and inputs with gradients.
    """
    held = [(tensor, tensor.grad) for tensor in tensors]
    for tensor, _ in held:
        tensor.grad = None
    try:
        yield
    finally:
        for tensor, gradient in held:
            tensor.grad = gradient


def _changeable(module: nn.Module) -> Iterator[torch.Tensor]:
    """Yields the buffers of a module that a forward pass may change, which packed weights are not."""
    packed = holds_packed(module, in_buffers=True)
    for buffer in module._buffers.values():
        if buffer is not None and not buffer.is_meta and not (packed and buffer.ndim > 1 and is_quantized(buffer)):
            yield buffer


def devices_of(model: nn.Module) -> list[torch.device]:
    """Returns the devices of a model other than the CPU, each once; several if the model is divided among them."""
    found = {tensor.device for tensor in itertools.chain(model.parameters(), model.buffers())}
    return sorted((device for device in found if device.type not in {"cpu", "meta"}), key=str)


@contextlib.contextmanager
def _restored_generators(own: Iterable[Any]) -> Iterator[None]:
    """Restores the global random generators of Python and NumPy, and those among the attributes of modules."""
    before: list[Callable[[], Any]] = [partial(random.setstate, random.getstate())]
    before.append(partial(np.random.set_state, np.random.get_state()))
    for value in own:
        if isinstance(value, torch.Generator):
            before.append(partial(value.set_state, value.get_state()))
        elif isinstance(value, random.Random):
            before.append(partial(value.setstate, value.getstate()))
        elif isinstance(value, np.random.RandomState):
            before.append(partial(value.set_state, value.get_state()))
        elif isinstance(value, np.random.Generator):
            before.append(partial(setattr, value.bit_generator, "state", value.bit_generator.state))
    try:
        yield
    finally:
        for restore in before:
            restore()


def sample_inputs(processing_class: Any) -> Mapping[str, torch.Tensor]:
    """Makes the inputs of one short prompt, with a grey image or one second of silence if the processor supports them.

    Args:
        processing_class: The tokenizer or processor of the trainer.

    Returns:
        Model inputs with one row; only two tokens if the processor takes no media or has no chat template.
    """
    images, audio = hasattr(processing_class, "image_processor"), hasattr(processing_class, "feature_extractor")
    if not (images or audio) or getattr(processing_class, "chat_template", None) is None:
        tokens = torch.ones((1, 2), dtype=torch.long)  # (B, T)
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    media: dict[str, Any]
    if images:
        media = {"images": [[Image.new("RGB", (64, 64), (128, 128, 128))]]}
    else:
        media = {"audio": [np.zeros(processing_class.feature_extractor.sampling_rate, np.float32)]}
    kind = "image" if images else "audio"
    question = [{"role": "user", "content": [{"type": kind}, {"type": "text", "text": "?"}]}]
    text = processing_class.apply_chat_template(question, add_generation_prompt=True)
    return dict(processing_class(text=[text], return_tensors="pt", **media))


def trial_error(model: nn.Module, processing_class: Any, autocast: str | None) -> str | None:
    """Runs a short prompt through a model with several dtypes and returns PyTorch's error about dtypes, if any.

    The trial is needed because the structure of a model does not show whether it multiplies with parameters of its own
    (fused experts), or casts features itself.

    Args:
        model: The model, possibly wrapped by PEFT.
        processing_class: The processor if the run has images; `None` for text only.
        autocast: The autocast dtype of the run; `None` without autocast.

    Returns:
        The error message; `None` if the forward pass works, fails for another reason (such as kernels that need
        another device), or cannot be run because an engine has not loaded the weights yet.
    """
    model = unwrap(model)
    if not is_loaded(model):
        return None
    device = next(model.parameters()).device
    try:
        inputs = sample_inputs(processing_class)
        half = None if autocast is None else to_torch(autocast)
        with undisturbed(model), compute_context(device, half):
            for cached in _caches(model):
                model(**{name: value.to(device) for name, value in inputs.items()}, **cached)
    except Exception as error:
        if is_dtype_error(error):
            return str(error)
        logger.info(
            "the trial forward pass failed for a reason other than dtypes: %s: %s", type(error).__name__, error
        )
    return None


def try_sample(
    model: nn.Module,
    processing_class: Any,
    autocast: torch.dtype | None,
    around: contextlib.AbstractContextManager[Any],
) -> Trial:
    """Runs a model forward and backward on a sample, without changing the state of the run.

    The backward pass is run if the model's code has a `torch.autograd.Function`, because PyTorch's own operations have
    a backward pass for each dtype that their forward pass accepts. It goes to the first trainable parameter of each
    tower and to those of the modules around the text model, so that its gradients need little memory. Linear layers
    compute one row, because the dtypes that meet in a layer are those of each row.

    Args:
        model: The model, possibly wrapped by PEFT.
        processing_class: The processor if the run has images or audio; `None` for text only.
        autocast: The autocast dtype of the run; `None` without autocast.
        around: The context of the forward pass.

    Returns:
        What happened. Errors that are not about dtypes, such as kernels that need another device, are not the model's.
    """
    model = unwrap(model)
    if not is_loaded(model):
        return Trial(skipped="an engine has not loaded the weights yet")
    device = next(model.parameters()).device
    begin = perf_counter()
    try:
        inputs = {name: value.to(device) for name, value in sample_inputs(processing_class).items()}
        first = _first_trainables(model)
        with undisturbed(model), _one_row(model), torch.set_grad_enabled(bool(first)):
            with compute_context(device, autocast), around:
                output = model(**inputs, **_caches(model)[-1])
            logits = output["logits"] if isinstance(output, Mapping) and "logits" in output else output[0]
            if logits.requires_grad and _has_own_function(logits):
                torch.autograd.grad(logits.float().sum(), first, allow_unused=True)
    except Exception as error:
        seconds = perf_counter() - begin
        if is_dtype_error(error):
            return Trial(seconds, str(error), _failed_function(error))
        logger.info(
            "the trial with a sample failed for a reason other than dtypes: %s: %s", type(error).__name__, error
        )
        return Trial(seconds, skipped=f"{type(error).__name__}: {error}")
    return Trial(perf_counter() - begin)


def is_dtype_error(error: Exception) -> bool:
    """Whether an error is one of PyTorch's about dtypes that do not match.

    Args:
        error: The error.
    """
    return isinstance(error, RuntimeError) and _DTYPE_ERROR.search(str(error)) is not None


def is_loaded(model: nn.Module) -> bool:
    """Whether all weights of a model are in memory; engines may load or shard them later.

    A weight without elements, such as that of a layer of width zero, is in memory. One that ZeRO-3 has partitioned is
    empty too, but records its size.

    Args:
        model: The model.
    """
    return not any(parameter.is_meta or parameter.numel() < elements_of(parameter) for parameter in model.parameters())


def compute_context(device: torch.device, autocast: torch.dtype | None) -> contextlib.AbstractContextManager[Any]:
    """Returns autocast to a dtype, or a null context.

    Args:
        device: The device.
        autocast: The autocast dtype; `None` without autocast.
    """
    return contextlib.nullcontext() if autocast is None else torch.autocast(device.type, autocast)


@contextlib.contextmanager
def _one_row(model: nn.Module) -> Iterator[None]:
    """Makes the plain linear layers of a model compute the first row of their input, and repeat it for the others."""
    handles = []
    for module in model.modules():
        if getattr(module.forward, "__func__", None) is nn.Linear.forward:
            row = _Row()
            handles += [module.register_forward_pre_hook(row.take), module.register_forward_hook(row.repeat)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Row:
    """The hooks of one layer that computes the first row of its input."""

    def __init__(self) -> None:
        self._shape: torch.Size | None = None

    def take(self, layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        value = args[0] if args else None
        self._shape = None
        if not isinstance(value, torch.Tensor) or value.ndim < 2 or value.shape[:-1].numel() < 2:
            return None
        self._shape = value.shape[:-1]
        return (value.flatten(0, -2)[:1],)

    def repeat(self, layer: nn.Module, args: tuple[Any, ...], output: Any) -> torch.Tensor | None:
        return None if self._shape is None else output.repeat(self._shape.numel(), 1).unflatten(0, self._shape)


def _first_trainables(model: nn.Module) -> list[nn.Parameter]:
    """Returns the first trainable parameter of each tower, and those of the modules around the text model themselves.

    A gradient reaches them through everything that lies between a tower and the logits.
    """
    parts = find_parts(model)
    own = [parameter for module in parts.containers for parameter in module.parameters(recurse=False)]
    firsts = (next((p for p in tower.parameters() if p.requires_grad), None) for tower in parts.towers.values())
    return [parameter for parameter in (*own, *firsts) if parameter is not None and parameter.requires_grad]


def _has_own_function(output: torch.Tensor) -> bool:
    """Whether a Python class defines the backward pass of an operation that led to a tensor."""
    pending, seen = [output.grad_fn], set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            return True
        seen.add(node)
        pending += [following for following, _ in node.next_functions]
    return False


def _failed_function(error: Exception) -> str | None:
    """Returns the name of the innermost `torch.autograd.Function` in whose backward pass an error occurred."""
    found, traceback = None, error.__traceback__
    while traceback is not None:
        for value in traceback.tb_frame.f_locals.values():
            if isinstance(value, torch.autograd.function.BackwardCFunction):
                found = type(value)._forward_cls.__qualname__  # type: ignore[attr-defined]
        traceback = traceback.tb_next
    return found


def _caches(model: nn.Module) -> list[dict[str, bool]]:
    """Returns the `use_cache` arguments to try: with a cache, as in `generate`, and without, as in training.

    A cache converts keys and values to one dtype, which hides that they differ.
    """
    parameters = inspect.signature(model.forward).parameters.values()
    if any(parameter.name == "use_cache" or parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return [{"use_cache": True}, {"use_cache": False}]
    return [{}]
