"""Runs towers once for each distinct image of a batch, where TRL's batches repeat an image for each completion.

The `get_*_features` methods of a model get the distinct images only, and their result is repeated. This is done while
no gradient flows into the tower, and, by default, only if the features are bit-identical: kernels may choose another
order of summation for another number of images, so each combination of shapes is computed both ways once, with the
images of the batch and with values that show the order. Where kernels choose another order for few images only, the
distinct images are computed several times, which still saves at least half of the work.
"""

import functools
import inspect
import itertools
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MethodType
from typing import Any, ClassVar

import torch
from torch import nn

from ..boundaries.cast_hooks import with_entries
from ..core import patches
from ..core.feature import Feature, Run
from ..model.parts import feature_methods, find_parts
from ..model.trial_forward import undisturbed
from ..policy.settings import ALWAYS, OFF
from .caster import MEDIA_KEYS, same_tensors
from .inputs import MediaInputs
from .order_probe import OrderProbe


logger = logging.getLogger(__name__)

SAMPLED = 64
"""Values of an image, or of its first patch, that are compared first, to find candidates for equal images."""
LIMIT = 256
"""Largest number of combinations of shapes that are computed both ways; others are never shared."""


class _NotShareableError(Exception):
    """The result of a method cannot be divided among the images."""


@dataclass(frozen=True)
class Repeats:
    """The images of a call, and which of them are equal.

    Attributes:
        sizes: Entries of each image along the first axis of the media tensor: 1, or its number of patches.
        distinct: Indices of the first image of each kind.
        kinds: For each image, the position of its kind in `distinct`.
        fixed: Whether the number of rows of an image's features follows from shapes alone: there are no masks or
            positions, and no padded images.
        padded: Whether entries may hold several images, some of them padding.
    """

    sizes: tuple[int, ...]
    distinct: tuple[int, ...]
    kinds: tuple[int, ...]
    fixed: bool = False
    padded: bool = False

    @property
    def kept(self) -> tuple[int, ...]:
        """The sizes of the distinct images."""
        return tuple(self.sizes[index] for index in self.distinct)

    def copied(self, copies: int) -> "Repeats":
        """The same images, of which each distinct one is computed several times."""
        return replace(self, distinct=self.distinct * copies)


@dataclass(frozen=True)
class _Call:
    """The arguments of a call of a feature method, as they were passed."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def run(self, function: Callable[..., Any]) -> Any:
        return function(*self.args, **self.kwargs)

    def named(self, bound: inspect.BoundArguments) -> dict[str, Any]:
        """Returns the arguments by name, those of `**kwargs` included."""
        return {name: value for name, value in bound.arguments.items() if name not in self.kwargs} | self.kwargs

    def shapes(self) -> tuple[Any, ...]:
        """Returns the shapes and dtypes of tensors, and other arguments as text: they may change the result's form."""
        return (*map(_shape, self.args), *((name, _shape(value)) for name, value in self.kwargs.items()))

    def selected(self, repeats: Repeats) -> "_Call":
        """Returns the call for the distinct images only."""
        entries, number = sum(repeats.sizes), len(repeats.sizes)

        def select(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or not value.ndim or value.shape[0] not in (entries, number):
                return value
            pieces = value.split(repeats.sizes if value.shape[0] == entries else [1] * number)
            return _joined([pieces[index] for index in repeats.distinct])

        return _Call(tuple(map(select, self.args)), {name: select(value) for name, value in self.kwargs.items()})


@dataclass
class _Decision:
    """What is known of a combination of shapes.

    Attributes:
        plan: How results are divided; `None` if they are not shared.
        copies: How many times each distinct image is computed.
    """

    plan: Any = None
    copies: int = 1


class SharedFeatures(Feature):
    """Shares the features of equal images within each call of a model.

    Attributes:
        seen: Images that models were called with.
        computed: Images that towers were run on.
        refused: Why features were not shared, each reason once.
    """

    about_weights: ClassVar = {"_decisions": dict}

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.seen = self.computed = 0
        self.refused: list[str] = []
        self._decisions: dict[Any, _Decision] = {}

    def ready(self) -> None:
        """Replaces the feature methods of the policy and of other models that take media."""
        compiled = getattr(self.run.args, "torch_compile", False)
        if self.run.settings.share_media_features == OFF or compiled or self.run.sharded is not None:
            return  # under FSDP and ZeRO-3, other ranks would wait in the passes of a comparison
        for model in self.run.feature(MediaInputs).models():
            for container, name, function in feature_methods(find_parts(model)):
                patches.replace("shared-features", container, name, MethodType(self._sharing(function), container))

    def _sharing(self, function: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(function)
        owner = weakref.ref(self)  # the model may outlive the trainer

        @functools.wraps(function)
        def features(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            feature, call = owner(), _Call(args, kwargs)
            if feature is None:
                return function(module, *args, **kwargs)
            arguments = call.named(signature.bind_partial(module, *args, **kwargs))
            keys = [key for key in arguments if key in MEDIA_KEYS]
            if len(keys) != 1 or (torch.is_grad_enabled() and trains_features(module)):
                return function(module, *args, **kwargs)
            repeats = find_repeats(arguments, keys[0])  # waits for the device
            if repeats is None:
                return function(module, *args, **kwargs)
            return feature._share(function.__name__, partial(function, module), module, call, repeats)

        return features

    def _share(
        self, name: str, features: Callable[..., Any], module: nn.Module, call: "_Call", repeats: Repeats
    ) -> Any:
        self.seen += len(repeats.kinds)
        kind = self.run.accelerator.device.type
        context = (torch.is_grad_enabled(), torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        key = (name, id(module), module.training, context, call.shapes(), call.selected(repeats).shapes())
        decision = self._decisions.get(key)
        if decision is not None and decision.plan is not None:
            computed = repeats.copied(decision.copies)
            self.computed += len(computed.distinct)
            try:
                return _expand(call.selected(computed).run(features), decision.plan, computed)
            except _NotShareableError:  # images of other sizes have another number of rows
                self._decisions[key] = self._refuse("the number of rows of an image depends on its values")
        self.computed += len(repeats.kinds)
        output = call.run(features)
        if decision is None and len(self._decisions) < LIMIT:
            self._decisions[key] = self._compare(features, module, call, repeats, output)
        return output

    def _compare(
        self, features: Callable[..., Any], module: nn.Module, call: "_Call", repeats: Repeats, output: Any
    ) -> _Decision:
        """Computes the features of the distinct images, and compares them with those of all images."""
        kind = f"{len(repeats.kinds)} images, {len(repeats.distinct)} distinct"
        copies, most = 1, max(1, len(repeats.kinds) // (2 * len(repeats.distinct)))
        while copies <= most:
            computed = repeats.copied(copies)
            try:
                with undisturbed(module):
                    shared = call.selected(computed).run(features)
                plan = _plan(output, shared, computed)
                same = same_bits(output, _expand(shared, plan, computed))
                if same and self.run.settings.share_media_features != ALWAYS:
                    with undisturbed(module), OrderProbe():
                        every, few = call.run(features), call.selected(computed).run(features)
                    same = same_bits(every, _expand(few, plan, computed))
            except Exception as error:  # a method may need all images; the run goes on with the result for all
                reason = "the result is not divided by image" if isinstance(error, _NotShareableError) else repr(error)
                return self._refuse(f"{kind}: {reason}")
            if same or self.run.settings.share_media_features == ALWAYS:
                return _Decision(plan, copies)
            copies *= 2
        return self._refuse(f"{kind}: the features are not bit-identical")

    def _refuse(self, reason: str) -> _Decision:
        logger.info("features are computed for each image: %s", reason)
        if reason not in self.refused:
            self.refused.append(reason)
        return _Decision()

    @property
    def shares(self) -> bool:
        """Whether the features of equal images are shared for some shape of a batch."""
        return any(decision.plan is not None for decision in self._decisions.values())


def _shape(value: Any) -> Any:
    """Returns shape and dtype of a tensor, a plain value as text, and the type of any other object."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype
    return repr(value) if isinstance(value, (bool, int, float, str, list, tuple, type(None))) else type(value)


def find_repeats(arguments: Mapping[str, Any], key: str) -> Repeats | None:
    """Finds the equal images in the arguments of a feature method.

    Args:
        arguments: The arguments by name; they may contain tensors with one row for each image.
        key: Name of the media tensor: one row for each image, or patches, (P, D), of images whose grids another
            argument contains, (N, 2) or (N, 3), integers.

    Returns:
        The images; `None` if no two are equal, or if it is not known which entries belong to an image.
    """
    media = arguments[key]
    if not isinstance(media, torch.Tensor) or media.ndim < 2 or media.shape[0] < 2:
        return None
    others = {name: v for name, v in arguments.items() if isinstance(v, torch.Tensor) and name != key and v.ndim}
    nested = (value for value in arguments.values() if isinstance(value, (list, tuple)))
    if any(isinstance(item, torch.Tensor) for value in nested for item in value):
        return None
    sizes = _grid_sizes(media, others) or [1] * media.shape[0]
    number = len(sizes)
    if number < 2 or any(other.shape[0] not in (number, media.shape[0]) for other in others.values()):
        return None
    parts = [media, *others.values()]
    ones = [1] * number
    pieces = [part.split(sizes if part.shape[0] == media.shape[0] else ones) for part in parts]
    images = list(zip(*pieces, strict=True))  # of each image, its entries of the media tensor and of the others
    starts = [0, *itertools.accumulate(sizes)][:-1]
    # Of patches, those of the first entry of an image are compared first.
    first_entries = media.detach() if number == media.shape[0] else media.detach()[starts]
    flat = first_entries.flatten(1)
    sampled = flat[:, :: max(1, flat.shape[1] // SAMPLED)].tolist()
    kinds: list[int] = []
    distinct: list[int] = []
    first: dict[Any, list[int]] = {}
    for index, image in enumerate(images):
        candidates = first.setdefault((sizes[index], *sampled[index]), [])
        for candidate in candidates:
            if all(map(torch.equal, image, images[distinct[candidate]])):
                kinds.append(candidate)
                break
        else:
            candidates.append(len(distinct))
            kinds.append(len(distinct))
            distinct.append(index)
    if len(distinct) == number:
        return None
    fixed = len(parts) == 1 and media.ndim == 4
    padded = key == "pixel_values" and media.ndim == 5 and media.shape[1] > 1
    return Repeats(tuple(sizes), tuple(distinct), tuple(kinds), fixed, padded)


def _grid_sizes(media: torch.Tensor, others: Mapping[str, torch.Tensor]) -> list[int] | None:
    """Returns the number of patches of each image, if an argument has the grids of images that make up the patches."""
    for other in others.values():
        if media.ndim == 2 and other.ndim == 2 and not other.is_floating_point() and other.shape[1] in (2, 3):
            sizes = other.prod(1).tolist()
            if sum(sizes) == media.shape[0]:
                return [int(size) for size in sizes]
    return None


# How a part of a result is divided: one entry for each image, or a number of rows for each entry of an image.
_SAME, _LISTED = "same", "listed"


def _plan(every: Any, few: Any, repeats: Repeats) -> Any:
    """Derives how a result is divided among images, from the results for all and for the distinct images.

    Raises:
        _NotShareableError: If a part of the result cannot be divided.
    """
    if isinstance(every, torch.Tensor) and isinstance(few, torch.Tensor):
        if every.ndim == few.ndim == 0:
            return _SAME
        number, entries = len(repeats.sizes), sum(repeats.sizes)
        if entries != number:  # a grid determines the entries of each image
            rows = every.shape[0] / entries
            if rows * sum(repeats.kept) == few.shape[0] and all(size * rows % 1 == 0 for size in repeats.sizes):
                return (rows, False)
        rows = every.shape[0] / number
        known = repeats.fixed or (rows == 1 and not repeats.padded)  # else it may be a mean of several numbers
        if known and rows % 1 == 0 and rows * len(repeats.distinct) == few.shape[0]:
            return (rows, True)
        raise _NotShareableError
    parts, others = _entries(every), _entries(few)
    if parts is None or others is None:
        return _SAME
    if isinstance(every, Sequence) and len(every) == len(repeats.sizes) and len(few) == len(repeats.distinct):
        return _LISTED
    if parts.keys() != others.keys():
        raise _NotShareableError
    return {name: _plan(part, others[name], repeats) for name, part in parts.items()}


def _expand(value: Any, plan: Any, repeats: Repeats) -> Any:
    """Repeats the parts of a result for the distinct images as a plan says."""
    if plan == _SAME:
        return value
    if plan == _LISTED:
        if len(value) != len(repeats.distinct):
            raise _NotShareableError
        return type(value)(value[kind] for kind in repeats.kinds)
    if isinstance(plan, tuple):
        rows, by_image = plan
        sizes = [int(rows * size) for size in ([1] * len(repeats.distinct) if by_image else repeats.kept)]
        if sum(sizes) != value.shape[0]:
            raise _NotShareableError
        pieces = value.split(sizes)
        return _joined([pieces[kind] for kind in repeats.kinds])
    expanded = {name: _expand(entry, plan[name], repeats) for name, entry in (_entries(value) or {}).items()}
    if isinstance(value, (list, tuple)):
        return type(value)(*expanded.values()) if hasattr(value, "_fields") else type(value)(expanded.values())
    return with_entries(value, expanded)


def _joined(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """Joins tensors of one dtype. Under autocast, `cat` rejects the other half-precision dtype."""
    with torch.autocast(pieces[0].device.type, enabled=False):
        return torch.cat(list(pieces))


def _entries(value: Any) -> dict[Any, Any] | None:
    """Returns the parts of a container by name or index, including attributes of a `ModelOutput` that are not keys."""
    if isinstance(value, Mapping):
        return {**dict(value), **getattr(value, "__dict__", {})}
    return dict(enumerate(value)) if isinstance(value, (list, tuple)) else None


def trains_features(module: nn.Module) -> bool:
    """Whether weights are trained that make features: those outside of the text model.

    Args:
        module: The module with the feature methods.
    """
    towers = find_parts(module).towers.values()
    own = module.parameters(recurse=False)
    return any(p.requires_grad for p in own) or any(p.requires_grad for t in towers for p in t.parameters())


def same_bits(left: Any, right: Any) -> bool:
    """Whether two results have the same form and the same bits.

    Args:
        left: A tensor, or a container of results.
        right: Another one.
    """
    if isinstance(left, torch.Tensor):
        return isinstance(right, torch.Tensor) and same_tensors(left, right)
    entries, others = _entries(left), _entries(right)
    if entries is None or others is None:
        return type(left) is type(right)
    return entries.keys() == others.keys() and all(same_bits(entry, others[n]) for n, entry in entries.items())
