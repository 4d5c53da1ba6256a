"""Casts media tensors early to the dtype of the tower that consumes them, which halves bandwidth and memory.

The hooks of `boundaries` cast media inside the model anyway. An early cast only saves resources, and is done only if
the tower's output is bit-identical either way. The tower is asked once, with random values in the shape of the first
batch: the batch's own values may be numbers that the narrower dtype holds exactly, such as those of white images.
"""

import contextlib
import functools
import inspect
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..boundaries.cast_hooks import cast_floating, floating_tensors, map_floating
from ..core.dtypes import from_torch, to_torch
from ..core.errors import PrecisionError, refuse
from ..model.inventory import bits, first_dtype
from ..model.parts import find_parts, is_quantized, unwrap
from ..model.trial_forward import is_loaded, sample_inputs, undisturbed


logger = logging.getLogger(__name__)

MEDIA_KEYS: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "pixel_values",
            "pixel_values_images",
            "pixel_values_local",
            "image_patches",
            "image_pixel_values",
            "high_res_pixel_values",
        ),
        "get_image_features",
    ),
    "pixel_values_videos": "get_video_features",
    "input_features": "get_audio_features",
    "audio_input_features": "get_audio_features",
}
"""Floating-point model inputs that are media, and for each the method that returns the features of its tower.

Inputs are listed by name, because not every floating-point tensor may be cast: `second_per_grid_ts` is multiplied with
integer positions, `flattened_patches` contains row and column numbers, and `advantages` are not a model input.
"""

Context = Callable[[], contextlib.AbstractContextManager[Any]]


@dataclass(frozen=True)
class MediaDecision:
    """Whether one media tensor is cast early.

    Attributes:
        key: Name of the input.
        dtype: The dtype to which it is cast; `None` if it keeps the dtype of the processor.
        reason: Why.
    """

    key: str
    dtype: str | None
    reason: str


def takes_media(model: nn.Module, keys: Mapping[str, str]) -> bool:
    """Whether a model takes one of the media inputs.

    Args:
        model: The model, possibly wrapped.
        keys: Media keys and their feature methods, such as `MEDIA_KEYS`.
    """
    modules = {unwrap(model), *find_parts(model).containers}
    return any(keys.keys() & _arguments_of(module.forward) for module in modules)


def _arguments_of(forward: Callable[..., Any]) -> frozenset[str]:
    """Returns the names of a method's arguments, and keeps those of functions of classes, not of instances."""
    function = getattr(forward, "__func__", None)
    return frozenset(inspect.signature(forward).parameters) if function is None else _names_of(function)


@functools.lru_cache(maxsize=256)
def _names_of(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def count_media(
    due: Counter[str], keys: frozenset[str], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Counts a call of a model with media; a forward pre-hook of the module level, so that models can be pickled.

    Args:
        due: The count, under the key `"inputs"`.
        keys: Media keys.
        module: The model.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
    """
    due["inputs"] += any(_is_floating(kwargs.get(key)) for key in keys)


class MediaCaster:
    """Decides for each media key on its first batch whether to cast early, and casts all later batches accordingly.

    Args:
        keys: Media keys and their feature methods, such as `MEDIA_KEYS`.
        models: The models that consume the media, the policy first.
        contexts: The compute contexts in which the models run.
        sharded: Why towers cannot be called on their own, if an engine shards their weights; else `None`.
        engine: The dtype to which an engine (DeepSpeed) casts inputs, which is used if a tower cannot be called on its
            own; `None` if the engine does not cast inputs.
    """

    def __init__(
        self,
        keys: Mapping[str, str],
        models: Sequence[nn.Module],
        contexts: Sequence[Context],
        sharded: str | None = None,
        engine: torch.dtype | None = None,
    ) -> None:
        self._keys = keys
        self._models = models
        self._contexts = contexts
        self._sharded = sharded
        self._engine = engine
        self.decisions: dict[str, MediaDecision] = {}

    def media(self, batch: Mapping[str, Any]) -> list[str]:
        """Returns the keys of floating-point media tensors in `batch`."""
        return [key for key, value in batch.items() if key in self._keys and _is_floating(value)]

    def undecided(self, batch: Mapping[str, Any]) -> list[str]:
        """Returns the media keys of `batch` that are not decided yet."""
        return [key for key in self.media(batch) if key not in self.decisions]

    def decide(self, batch: Mapping[str, Any]) -> None:
        """Decides on the media keys of `batch` that are not decided yet.

        Runs each tower at most twice per context, without gradients and in evaluation mode, and restores the random
        state.

        Args:
            batch: Model inputs on the models' device, with media tensors in the dtype of the processor.

        Raises:
            PrecisionError: If a tower casts its media to the storage dtype of packed weights.
        """
        for key in self.undecided(batch):
            dtype, reason = self._decide(key, batch)
            self.decisions[key] = MediaDecision(key, None if dtype is None else from_torch(dtype), reason)

    def cast(self, key: str, value: Any) -> Any:
        """Casts a media value as decided, without modifying it.

        Args:
            key: Name of the input.
            value: A tensor, or nested lists of tensors, on any device.

        Returns:
            The value in the decided dtype.
        """
        decision = self.decisions.get(key)
        return value if decision is None or decision.dtype is None else cast_floating(value, to_torch(decision.dtype))

    def _decide(self, key: str, batch: Mapping[str, Any]) -> tuple[torch.dtype | None, str]:
        if self._sharded is not None:
            return self._without_comparison(f"{self._sharded}, so a tower cannot be called on its own")
        dtypes: set[torch.dtype] = set()
        for model in self._models:
            features = _feature_method(model, self._keys[key], key)
            if features is None:
                name = type(unwrap(model)).__name__
                return self._without_comparison(f"{name} has no {self._keys[key]}({key}, ...) to compare with")
            try:
                results = [self._compare(model, features, key, batch, context) for context in self._contexts]
            except PrecisionError:
                raise
            except Exception as error:
                # A model's code may fail when a tower is called on its own. The run is not affected, because the hooks
                # in the model cast the media.
                why = f"{self._keys[key]} could not be compared ({type(error).__name__}: {error})"
                return self._without_comparison(why)
            for dtype, reason in results:
                if dtype is None:
                    return None, reason
                dtypes.add(dtype)
        if len(dtypes) > 1:
            names = ", ".join(sorted(map(from_torch, dtypes)))
            return None, f"unchanged: the models that consume it have different dtypes ({names})"
        dtype = dtypes.pop()
        return dtype, f"cast to {from_torch(dtype)} before the move to the device: the tower's output is bit-identical"

    def _without_comparison(self, why: str) -> tuple[torch.dtype | None, str]:
        """Returns the dtype that stock TRL uses, and the reason."""
        if self._engine is None:
            return None, f"unchanged: {why}"
        return self._engine, f"cast to the engine's {from_torch(self._engine)}, as stock does: {why}"

    def _compare(
        self, model: nn.Module, features: Callable[..., Any], key: str, batch: Mapping[str, Any], context: Context
    ) -> tuple[torch.dtype | None, str]:
        inputs = _accepted(features, batch)
        tensor = inputs[key] = _random_like(inputs[key])
        with undisturbed(model), context():
            with _first_tower(model) as seen, _refusing_packed_casts(model, key):
                plain = features(**inputs)
            if not seen:
                return None, f"unchanged: {self._keys[key]} runs no tower"
            dtype = first_dtype(seen[0])
            before = {t.dtype for t in floating_tensors(tensor)}
            if dtype is None:
                return None, "unchanged: the tower has no floating-point weights"
            if dtype.itemsize >= max(d.itemsize for d in before):
                return None, f"unchanged: the tower's weights are {from_torch(dtype)}"
            early = features(**{**inputs, key: cast_floating(tensor, dtype)})
        if not _identical(plain, early):
            wide = from_torch(max(before, key=lambda d: d.itemsize))
            return None, (
                f"unchanged: the tower computes with {wide} values before it casts them, and an early cast to "
                f"{from_torch(dtype)} would change its output"
            )
        return dtype, "bit-identical"


class MediaCollator:
    """A collator that casts media as decided, before the dataloader moves them to the device.

    Batches that are not mappings (GRPO's are lists of rows) are returned unchanged.

    Args:
        collator: The trainer's collator.
        caster: Returns the trainer's `MediaCaster`.
    """

    def __init__(self, collator: Callable[..., Any], caster: Callable[[], MediaCaster]) -> None:
        self.collator = collator
        self._caster = caster

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Collates a batch and casts its media."""
        batch = self.collator(*args, **kwargs)
        if not isinstance(batch, Mapping):
            return batch
        caster = self._caster()
        cast = {key: caster.cast(key, batch[key]) for key in caster.media(batch)}
        return type(batch)({**batch, **cast}) if cast else batch  # type: ignore[call-arg]


def _feature_method(model: nn.Module, name: str, key: str) -> Callable[..., Any] | None:
    """Returns the method `name` of the model, or of a module around its text model, if it has a parameter `key`."""
    base = unwrap(model)
    for module in (base, *find_parts(base).containers):
        method = getattr(module, name, None)
        if callable(method) and key in inspect.signature(method).parameters:
            return method
    return None


def _accepted(function: Callable[..., Any], batch: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a feature method from a batch, and other required ones (Llama 4) from the config."""
    parameters = inspect.signature(function).parameters
    config = getattr(getattr(function, "__self__", None), "config", None)
    configs = (config, getattr(config, "vision_config", None))
    required = (n for n, p in parameters.items() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD)
    settings = {n: getattr(place, n) for n in required for place in configs if hasattr(place, n)}
    return {**settings, **{name: value for name, value in batch.items() if name in parameters}}


@contextlib.contextmanager
def _first_tower(model: nn.Module) -> Iterator[list[nn.Module]]:
    """Collects the towers of `model` that run, in their order."""
    seen: list[nn.Module] = []

    def record(module: nn.Module, args: tuple[Any, ...]) -> None:
        seen.append(module)

    handles = [tower.register_forward_pre_hook(record) for tower in find_parts(model).towers.values()]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def has_packed_towers(model: nn.Module) -> bool:
    """Whether a tower of a model has quantised layers."""
    return any(is_quantized(p) for tower in find_parts(model).towers.values() for p in tower.parameters())


def refuse_packed_casts(
    model: nn.Module, processing_class: Any, methods: Mapping[str, str], autocast: str | None
) -> None:
    """Runs towers with quantised layers on a grey image, to find casts of media to the dtype of packed weights.

    Towers that cannot be run here are checked on the first batch.

    Args:
        model: The model, possibly wrapped by PEFT.
        processing_class: The run's processor.
        methods: Media keys and their feature methods, such as `MEDIA_KEYS`.
        autocast: The autocast dtype of the run; `None` without autocast.

    Raises:
        PrecisionError: If a tower casts its media to the dtype of packed weights.
    """
    try:
        sample = sample_inputs(processing_class)
    except Exception as error:
        logger.info("no sample image for the towers: %s: %s", type(error).__name__, error)
        return
    if not is_loaded(model):
        return
    device = next(model.parameters()).device
    inputs = {name: value.to(device) for name, value in sample.items() if isinstance(value, torch.Tensor)}
    for key in inputs.keys() & methods.keys():
        method = _feature_method(model, methods[key], key)
        if method is None:
            continue
        context = contextlib.nullcontext() if autocast is None else torch.autocast(device.type, to_torch(autocast))
        with undisturbed(model), context, _refusing_packed_casts(model, key):
            try:
                method(**_accepted(method, inputs))
            except Exception as error:
                logger.info("a tower could not be run on its own: %s: %s", type(error).__name__, error)


@contextlib.contextmanager
def _refusing_packed_casts(model: nn.Module, key: str) -> Iterator[None]:
    """Refuses a tower that casts its input to `weight.dtype` of a quantised layer, which is only the storage dtype.

    SigLIP 2's patch embedding in LFM2-VL (transformers 5.23) does so, which turns pixels between -1 and 1 into 0.

    Args:
        model: The model whose tower runs in the block.
        key: The media input of the tower.

    Raises:
        PrecisionError: At the end of the block; replaces an error in the block, which the cast has caused.
    """
    found: dict[str, torch.dtype] = {}
    handles = []
    for name, layer in unwrap(model).named_modules():
        if isinstance(layer, nn.Linear) and any(map(is_quantized, layer.parameters(recurse=False))):

            def record(layer: nn.Module, args: tuple[Any, ...], name: str = name) -> None:
                if args and isinstance(args[0], torch.Tensor) and is_quantized(args[0]):
                    found[name] = args[0].dtype

            handles.append(layer.register_forward_pre_hook(record))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for name, dtype in found.items():
            what = f"`{key}` in a model whose `{name}` is quantised"
            raise PrecisionError(
                [refuse("media-cast-to-packed-dtype", what, dtype=from_torch(dtype), fix=_skipping(model, name))]
            )


def _skipping(model: nn.Module, name: str) -> str:
    """Returns the code that excludes a layer from quantisation."""
    number, last = bits(unwrap(model).get_submodule(name)), name.rpartition(".")[2]
    if number is None:
        return f"`modules_to_not_convert=[{last!r}]` in the quantisation config"
    return f"`BitsAndBytesConfig(load_in_{number}bit=True, llm_int8_skip_modules=[{last!r}, 'lm_head'])`"


def _random_like(value: Any) -> Any:
    """Replaces floating-point tensors in a value by random ones in their range. Zeros, which may mark padding, stay.

    Args:
        value: A tensor, or nested lists and mappings of tensors; not modified.
    """
    generator = torch.Generator().manual_seed(0)

    def drawn(tensor: torch.Tensor) -> torch.Tensor:
        largest = max(1.0, tensor.abs().max().item() if tensor.numel() else 1.0)
        noise = torch.rand(tensor.shape, generator=generator).to(tensor.device) * 2 - 1
        kept = (tensor == 0) & bool((tensor != 0).any())
        return tensor.where(kept, (largest * noise).to(tensor.dtype))

    return map_floating(drawn, value)


def _is_floating(value: Any) -> bool:
    return next(floating_tensors(value), None) is not None


def _identical(left: Any, right: Any) -> bool:
    """Whether two outputs contain the same floating-point tensors, bit by bit; false for outputs without tensors."""
    lefts, rights = list(floating_tensors(left)), list(floating_tensors(right))
    return bool(lefts) and len(lefts) == len(rights) and all(map(same_tensors, lefts, rights))


def same_tensors(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors have the same shape, dtype and values; NaN equals NaN.

    Args:
        left: A tensor.
        right: Another one.
    """
    same_kind = left.dtype == right.dtype and left.shape == right.shape
    return same_kind and torch.allclose(left, right, rtol=0, atol=0, equal_nan=True)
