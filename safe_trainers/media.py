"""Media tensors follow the tower that consumes them, early enough to move, buffer and slice half the bytes.

Correctness does not depend on this: the boundaries inside the model cast whatever arrives. An early cast is an
economy, and is used only where it was seen to change nothing.
"""

import contextlib
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .boundaries import cast_floating
from .census import first_dtype
from .dtypes import from_torch, to_torch
from .errors import PrecisionError, refuse
from .policy import OFF
from .probing import sample_inputs, undisturbed
from .towers import anatomy, is_quantized, unwrap


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
"""Floating model inputs that are media, and the method that shows what a tower makes of each.

A list of names, never "every floating tensor": `second_per_grid_ts` is multiplied into integer positions,
`flattened_patches` carries row and column numbers, and `advantages` are no model input at all.
"""

Context = Callable[[], contextlib.AbstractContextManager[Any]]


@dataclass(frozen=True)
class MediaDecision:
    """What happens to one media tensor on its way to the device.

    Attributes:
        key: The input's name.
        dtype: The dtype it is cast to, `None` where it stays as the processor made it.
        reason: Why.
    """

    key: str
    dtype: str | None
    reason: str


class MediaCaster:
    """Decides once per media key, on its first batch, and casts every later batch alike.

    Args:
        keys: Media keys and their feature methods, as `MEDIA_KEYS`.
        models: Every model that consumes the media: the policy first, then a reference model.
        contexts: The compute contexts that the models run in.
        sharded: Why towers cannot be called on their own, where an engine shards their weights; else `None`.
        engine: The dtype that an engine's own input cast would give (DeepSpeed's), which is what a tower gets that
            cannot be asked; `None` where stock leaves inputs alone.
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
        self._dtypes: dict[str, torch.dtype | None] = {}
        self.decisions: dict[str, MediaDecision] = {}

    def media(self, batch: Mapping[str, Any]) -> list[str]:
        """The keys of `batch` that hold floating media."""
        return [key for key, value in batch.items() if key in self._keys and _is_floating(value)]

    def undecided(self, batch: Mapping[str, Any]) -> list[str]:
        """The media keys of `batch` that no batch had before."""
        return [key for key in self.media(batch) if key not in self.decisions]

    def decide(self, batch: Mapping[str, Any]) -> None:
        """Decides on the media keys of `batch` that no batch had before.

        Runs the consuming tower three times at most, without gradients, in evaluation mode and with the random state
        kept, so that nothing of the run changes.

        Args:
            batch: Model inputs on the models' device, media tensors as the processor made them.

        Raises:
            PrecisionError: If a tower casts its media to the dtype that packed weights are stored in.
        """
        for key in self.undecided(batch):
            dtype, reason = self._decide(key, batch)
            self._dtypes[key] = dtype
            self.decisions[key] = MediaDecision(key, None if dtype is None else from_torch(dtype), reason)

    def cast(self, key: str, value: Any) -> Any:
        """Casts a media value as decided; the given tensors are never changed.

        Args:
            key: Its name.
            value: A tensor, or nested lists of tensors, on any device.

        Returns:
            The value in the decided dtype.
        """
        dtype = self._dtypes.get(key)
        return value if dtype is None else cast_floating(value, dtype)

    def _decide(self, key: str, batch: Mapping[str, Any]) -> tuple[torch.dtype | None, str]:
        if self._sharded is not None:
            return self._unasked(f"{self._sharded}, so a tower cannot be asked on its own")
        wanted: set[torch.dtype] = set()
        for model in self._models:
            features = _feature_method(model, self._keys[key], key)
            if features is None:
                name = type(unwrap(model)).__name__
                return self._unasked(f"{name} has no {self._keys[key]}({key}, ...) to compare with")
            try:
                verdict = [self._compare(model, features, key, batch, context) for context in self._contexts]
            except PrecisionError:
                raise
            except Exception as error:  # whatever a model's own code says when it is called alone
                # That is no fault of the run: the boundaries cast inside the model.
                return self._unasked(f"{self._keys[key]} could not be compared ({type(error).__name__}: {error})")
            for dtype, reason in verdict:
                if dtype is None:
                    return None, reason
                wanted.add(dtype)
        if len(wanted) > 1:
            names = ", ".join(sorted(map(from_torch, wanted)))
            return None, f"unchanged: the models that consume it hold different dtypes ({names})"
        dtype = wanted.pop()
        return dtype, f"cast to {from_torch(dtype)} on the way to the device: the tower gives the same bits for both"

    def _unasked(self, why: str) -> tuple[torch.dtype | None, str]:
        """What a media tensor gets whose tower cannot be asked: what stock gives it."""
        if self._engine is None:
            return None, f"unchanged: {why}"
        return self._engine, f"cast to the engine's {from_torch(self._engine)}, as stock does: {why}"

    def _compare(
        self, model: nn.Module, features: Callable[..., Any], key: str, batch: Mapping[str, Any], context: Context
    ) -> tuple[torch.dtype | None, str]:
        inputs = _accepted(features, batch)
        tensor = inputs[key]
        with undisturbed(model), context():
            with _first_tower(model) as seen, _refusing_packed_casts(model, key):
                plain = features(**inputs)
            if not seen:
                return None, f"unchanged: {self._keys[key]} runs no tower"
            dtype = first_dtype(seen[0])
            given = {t.dtype for t in _tensors(tensor)}
            if dtype is None:
                return None, "unchanged: the tower has no floating weights of its own"
            if dtype.itemsize >= max(d.itemsize for d in given):
                return None, f"unchanged: the tower's weights are {from_torch(dtype)}"
            early = features(**{**inputs, key: cast_floating(tensor, dtype)})
        if not _identical(plain, early):
            wide = from_torch(max(given, key=lambda d: d.itemsize))
            return None, (
                f"unchanged: the tower computes on {wide} values before its own cast, and an early cast to "
                f"{from_torch(dtype)} would change its output"
            )
        return dtype, "same bits"


class MediaCollator:
    """A collator whose batches already hold their media as decided, so that the dataloader moves half the bytes.

    Before anything is decided, and for batches that are no mappings (GRPO's are rows), it is the collator itself.

    Args:
        collator: The trainer's collator.
        caster: Gives the trainer's `MediaCaster`.
    """

    def __init__(self, collator: Callable[..., Any], caster: Callable[[], MediaCaster]) -> None:
        self.collator = collator
        self._caster = caster

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Collates, and casts what is decided."""
        batch = self.collator(*args, **kwargs)
        if not isinstance(batch, Mapping):
            return batch
        caster = self._caster()
        cast = {key: caster.cast(key, batch[key]) for key in caster.media(batch)}
        return type(batch)({**batch, **cast}) if cast else batch  # type: ignore[call-arg]


def _feature_method(model: nn.Module, name: str, key: str) -> Callable[..., Any] | None:
    """The method of the model, or of a module around its text model, that takes `key`."""
    base = unwrap(model)
    for module in (base, *anatomy(base).containers):
        method = getattr(module, name, None)
        if callable(method) and key in inspect.signature(method).parameters:
            return method
    return None


def _accepted(function: Callable[..., Any], batch: Mapping[str, Any]) -> dict[str, Any]:
    """What a feature method takes of a batch. What it demands besides (Llama4's in transformers 4) is the config's."""
    parameters = inspect.signature(function).parameters
    config = getattr(getattr(function, "__self__", None), "config", None)
    places = (config, getattr(config, "vision_config", None))
    demanded = (n for n, p in parameters.items() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD)
    settings = {n: getattr(place, n) for n in demanded for place in places if hasattr(place, n)}
    return {**settings, **{name: value for name, value in batch.items() if name in parameters}}


@contextlib.contextmanager
def _first_tower(model: nn.Module) -> Iterator[list[nn.Module]]:
    """Collects the towers of `model` that run, in their order."""
    seen: list[nn.Module] = []

    def record(module: nn.Module, args: tuple[Any, ...]) -> None:
        seen.append(module)

    handles = [tower.register_forward_pre_hook(record) for tower in anatomy(model).towers.values()]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def has_packed_towers(model: nn.Module) -> bool:
    """Whether a tower of a model holds quantised layers."""
    return any(is_quantized(p) for tower in anatomy(model).towers.values() for p in tower.parameters())


def refuse_packed_casts(model: nn.Module, processing_class: Any, methods: Mapping[str, str], autocast: str) -> None:
    """Asks towers with quantised layers, with a grey picture, whether they cast it to the dtype of packed bytes.

    Args:
        model: The model, wrapped by PEFT or not.
        processing_class: The run's processor.
        methods: The method that consumes each media input, such as `MEDIA_KEYS`.
        autocast: The autocast dtype of the run, or `"off"`.

    Raises:
        PrecisionError: If one does. What cannot be asked here is asked again on the first batch.
    """
    try:
        sample = sample_inputs(processing_class)
    except Exception as error:
        logger.info("no picture to ask the towers with: %s: %s", type(error).__name__, error)
        return
    if any(parameter.is_meta or parameter.numel() == 0 for parameter in model.parameters()):
        return  # an engine has not filled it yet
    device = next(model.parameters()).device
    inputs = {name: value.to(device) for name, value in sample.items() if isinstance(value, torch.Tensor)}
    for key in inputs.keys() & methods.keys():
        method = _feature_method(model, methods[key], key)
        if method is None:
            continue
        context = contextlib.nullcontext() if autocast == OFF else torch.autocast(device.type, to_torch(autocast))
        with undisturbed(model), context, _refusing_packed_casts(model, key):
            try:
                method(**_accepted(method, inputs))
            except Exception as error:
                logger.info("a tower could not be asked: %s: %s", type(error).__name__, error)


@contextlib.contextmanager
def _refusing_packed_casts(model: nn.Module, key: str) -> Iterator[None]:
    """Refuses a tower whose own code casts to `weight.dtype` of a quantised layer, which is how its bytes are stored.

    SigLIP 2's patch embedding does, in LFM2-VL (transformers 5.23): of pixels between -1 and 1 nothing is left.

    Args:
        model: The model whose tower runs in the block.
        key: The media input that it reads.

    Raises:
        PrecisionError: After the block, or after an error in it, which then comes of the cast.
    """
    found: dict[str, torch.dtype] = {}
    handles = []
    for name, layer in unwrap(model).named_modules():
        if isinstance(layer, nn.Linear) and any(map(is_quantized, layer.parameters(recurse=False))):

            def record(layer: nn.Module, args: tuple[Any, ...], name: str = name) -> None:
                if args and isinstance(args[0], torch.Tensor) and not args[0].is_floating_point():
                    found[name] = args[0].dtype

            handles.append(layer.register_forward_pre_hook(record))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for name, dtype in found.items():
            given = f"`{key}` in a model whose `{name}` is quantised"
            details = {"dtype": str(dtype)[6:], "name": name.rpartition(".")[2]}
            load = "load_in_8bit" if dtype == torch.int8 else "load_in_4bit"
            raise PrecisionError([refuse("media-cast-to-packed-dtype", given, load=load, **details)])


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, Mapping):
        for item in {**dict(value), **getattr(value, "__dict__", {})}.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _is_floating(value: Any) -> bool:
    return next(_tensors(value), None) is not None


def _identical(left: Any, right: Any) -> bool:
    """Whether two outputs hold the same floating tensors, bit for bit; equal NaNs are equal."""
    lefts, rights = list(_tensors(left)), list(_tensors(right))
    # Outputs that show no tensors show no equality either.
    return bool(lefts) and len(lefts) == len(rights) and all(map(_same_bits, lefts, rights))


def _same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    same_kind = left.dtype == right.dtype and left.shape == right.shape
    return same_kind and torch.allclose(left, right, rtol=0, atol=0, equal_nan=True)
