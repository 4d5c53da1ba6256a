"""Finds the routers of a mixture of experts from what a model does with five tokens, without a list of families.

Each row of the trial is one token, so that attention has one key to choose from. A call of `topk` with one row for
each token and at least two entries to choose from therefore chooses from a fixed set, which are experts, or groups of
experts. The innermost module that is running is the router.
"""

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..core.dtypes import from_torch
from .choices import Choice, Choosing
from .inventory import bits
from .parts import find_parts, is_quantized, unwrap
from .trial_forward import compute_context, is_loaded, undisturbed


logger = logging.getLogger(__name__)
ROWS = 5
"""Rows of the trial; no usual number of experts per token, so that a choice along another dimension is not taken."""
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_MOE = "experts"


@dataclass(frozen=True)
class Router:
    """A module that chooses experts.

    Attributes:
        name: Qualified name in the base model.
        scorer: Name of the module with the router's weights: itself, or the module inside that computes the scores.
        calls: Which of the calls of `topk` inside of the router are choices, from 0, in order. Routers with groups of
            experts also rank the experts within each group.
        counts: Number of entries of each choice: groups of experts, if there are any, and then experts.
        experts: Number of experts, including those that compute nothing.
        compute: Dtype in which the scores are computed.
    """

    name: str
    scorer: str
    calls: tuple[int, ...]
    counts: tuple[int, ...]
    experts: int
    compute: str

    @property
    def chosen(self) -> int:
        """Number of experts of each token."""
        return self.counts[-1]

    @property
    def width(self) -> int:
        """Number of integers that all choices for a token take."""
        return sum(self.counts)


@dataclass(frozen=True)
class Routers:
    """The routers of a model.

    Attributes:
        found: The routers, in the order in which they run.
        unreached: Names of modules with experts whose choice cannot be followed.
        why: Why nothing is known; empty if the trial ran.
    """

    found: tuple[Router, ...] = ()
    unreached: tuple[str, ...] = ()
    why: str = ""

    @property
    def width(self) -> int:
        """Number of integers that all choices for a token take."""
        return sum(router.width for router in self.found)

    @property
    def dtype(self) -> torch.dtype:
        """The smallest integer dtype that holds every index, and one more value for a token without a record."""
        largest = max((router.experts for router in self.found), default=0)
        return torch.uint8 if largest < 256 else torch.int16 if largest < 2**15 else torch.int32

    @property
    def bytes_per_token(self) -> int:
        """Bytes that all choices for a token take."""
        return self.width * self.dtype.itemsize


def unknown(dtype: torch.dtype) -> int:
    """Returns the value that stands for a token without a record: the largest of an integer dtype."""
    return int(torch.iinfo(dtype).max)


def find_routers(model: nn.Module, autocast: torch.dtype | None = None) -> Routers:
    """Finds the routers of a model with a forward pass of five tokens. A model without experts is not run.

    Args:
        model: A transformers model, possibly wrapped.
        autocast: The autocast dtype of the run; `None` without autocast.
    """
    base = unwrap(model)
    stacks = tuple(expert_stacks(base))
    if not stacks:
        return Routers()
    if not is_loaded(base):
        return Routers(unreached=stacks, why="an engine has not loaded the weights yet")
    device = next(base.parameters()).device
    trial = _Trial(base)
    tokens = torch.arange(1, ROWS + 1, device=device).unsqueeze(1)  # (ROWS, 1)
    try:
        with undisturbed(base), compute_context(device, autocast), trial.watching():
            base(input_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=False)
    except Exception as error:  # a model may need other inputs; nothing is known of its routers then
        logger.info("the trial for routers failed: %s: %s", type(error).__name__, error)
        return Routers(unreached=stacks, why=f"{type(error).__name__}: {str(error).splitlines()[0]}")
    found = tuple(trial.routers())
    reached = {_outside_adapters(router.name) for router in found}
    unreached = tuple(stack for stack in stacks if not _is_reached(_outside_adapters(stack), reached))
    return Routers(found, unreached)


def expert_stacks(model: nn.Module) -> Iterator[str]:
    """Yields the modules of the text model that may hold experts: stacks of matrices, or lists of equal modules.

    Args:
        model: A transformers model, not wrapped.
    """
    text = find_parts(model).text
    prefix = next((name for name, module in model.named_modules() if module is text), "")
    lists: set[str] = set()
    for name, module in text.named_modules():
        qualified = f"{prefix}.{name}".strip(".")
        if isinstance(module, nn.ModuleList):
            inside = any(name.startswith(f"{outer}.") for outer in lists)
            lists.add(name)
            kinds = {type(child) for child in module}
            if inside and len(module) > 1 and len(kinds) == 1 and _MOE in name.rpartition(".")[2]:
                yield qualified
        elif (not isinstance(module, _CONVOLUTIONS) and any(map(_is_stack, module._parameters.values()))) or (
            bits(module) is not None and _MOE in name
        ):
            yield qualified


def _is_stack(parameter: nn.Parameter | None) -> bool:
    """Whether a parameter is a stack of at least two matrices."""
    if parameter is None:
        return False
    shape = getattr(getattr(parameter, "quant_state", None), "shape", parameter.shape)
    return len(shape) == 3 and shape[0] > 1 and (parameter.is_floating_point() or is_quantized(parameter))


def _outside_adapters(name: str) -> str:
    """Returns the name that a module has in a model without adapters."""
    return ".".join(part for part in name.split(".") if part not in ("base_layer", "parametrizations"))


def _is_reached(stack: str, routers: set[str]) -> bool:
    """Whether a router stands beside a stack of experts, or around it."""
    block = stack.rpartition(".")[0]
    return any(router == block or router.startswith(f"{block}.") for router in routers)


class _Trial:
    """Records what chooses in a forward pass of `ROWS` tokens.

    Args:
        model: The model, not wrapped.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._names = {module: name for name, module in model.named_modules()}
        self._stacks = {id(model.get_submodule(name)) for name in expert_stacks(model)}
        self._running: list[nn.Module] = []
        self._runs: dict[nn.Module, int] = {}
        self._calls: dict[nn.Module, int] = {}
        self._choices: dict[nn.Module, list[tuple[int, Choice]]] = {}
        self._products: dict[nn.Module, dict[int, str]] = {}  # dtypes of products by their last dimension
        self._outputs: dict[nn.Module, list[tuple[nn.Module, int]]] = {}

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Records while the block runs."""
        handles = []
        for module in find_parts(self._model).text.modules():
            handles.append(module.register_forward_pre_hook(self._enter))
            handles.append(module.register_forward_hook(self._leave, always_call=True))
        try:
            with Choosing(self._note, self._note_product):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def routers(self) -> Iterator[Router]:
        """Yields the routers that were seen, in the order in which they ran."""
        for module, choices in self._choices.items():
            if self._runs[module] != 1:
                continue
            scores = choices[-1][1].scores
            experts = scores.shape[-1]
            products = self._products.get(module, {})
            compute = products.get(experts) or from_torch(scores.dtype)
            scorer = self._scorer(module, experts)
            calls, counts = zip(*((call, choice.count) for call, choice in choices), strict=True)
            yield Router(self._names[module], self._names[scorer], calls, counts, experts, compute)

    def _scorer(self, module: nn.Module, experts: int) -> nn.Module:
        """Returns the module with a router's weights; a block that chooses itself contains the experts too."""
        if not any(id(part) in self._stacks for part in module.modules()):
            return module
        made = [part for part, width in self._outputs.get(module, ()) if width == experts]
        return made[-1] if made else module  # the outermost one ends last

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._running.append(module)
        self._runs[module] = self._runs.get(module, 0) + 1

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._running.pop()
        first = output[0] if isinstance(output, tuple) and output else output
        if not isinstance(first, torch.Tensor) or first.shape[:-1].numel() != ROWS:
            return
        for outer in self._running:
            if outer not in self._choices:  # what ends after the choice has not made the scores
                self._outputs.setdefault(outer, []).append((module, first.shape[-1]))

    def _note(self, choice: Choice) -> None:
        calls = {module: self._calls.get(module, 0) for module in self._running}
        self._calls.update((module, number + 1) for module, number in calls.items())
        if self._running and choice.rows == ROWS and choice.scores.shape[-1] > 1:
            module = self._running[-1]
            self._choices.setdefault(module, []).append((calls[module], choice))

    def _note_product(self, result: torch.Tensor) -> None:
        for module in self._running[-2:]:
            self._products.setdefault(module, {})[result.shape[-1]] = from_torch(result.dtype)
