"""Runs towers without a graph for gradients while none of their weights is trained.

With adapters and gradient checkpointing, transformers lets the outputs of all embeddings require gradients, also those
of a frozen tower. Autograd then computes the tower's backward pass, and checkpointing a second forward pass, for
gradients that nothing uses. Here the `get_*_features` methods run without a graph instead. In the first pass with
gradients, both ways are compared once, with values that show the order in which kernels sum.
"""

import logging
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from types import MethodType
from typing import Any, ClassVar

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from ..boundaries.cast_hooks import around_features, floating_tensors
from ..core import patches
from ..core.feature import Feature, Run
from ..model.parts import feature_methods, find_parts
from ..model.trial_forward import undisturbed
from .order_probe import OrderProbe
from .shared_features import same_bits, trains_features


logger = logging.getLogger(__name__)


class FrozenTowers(Feature):
    """Computes features without a graph where no weight that makes them is trained, and the bits are the same.

    Attributes:
        passes: Number of calls without a graph that would have had one.
        refused: Why a graph was kept, each reason once.
    """

    about_weights: ClassVar = {"_same": dict}

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.passes = 0
        self.refused: list[str] = []
        self._same: dict[Any, bool] = {}

    def ready(self) -> None:
        """Replaces the feature methods of the policy."""
        if getattr(self.run.args, "torch_compile", False) or self.run.sharded is not None:
            return  # a further pass would be compiled, and would gather weights that other ranks wait for
        owner = weakref.ref(self)  # the model may outlive the trainer

        def around(module: nn.Module, call: partial[Any], differentiated: bool) -> Any:
            feature = owner()
            return call() if feature is None or differentiated else feature._without_graph(module, call)

        for container, name, function in feature_methods(find_parts(self.run.model)):
            patches.replace("frozen-towers", container, name, MethodType(around_features(function, around), container))

    def _without_graph(self, module: nn.Module, call: partial[Any]) -> Any:
        if not torch.is_grad_enabled() or trains_features(module):
            return call()
        kind = self.run.accelerator.device.type
        context = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        key = call.func.__name__, id(module), module.training, context
        if key not in self._same:
            self._same[key] = self._compare(module, call)
        if not self._same[key]:
            return call()
        self.passes += 1
        with torch.no_grad():
            return call()

    def _compare(self, module: nn.Module, features: Callable[[], Any]) -> bool:
        """Whether a graph changes no bit, and none of the weights that it ends in is trained.

        Args:
            module: The module with the method.
            features: Computes the features.
        """
        try:
            with undisturbed(module), OrderProbe():
                with torch.enable_grad(), saved_tensors_hooks(_nothing, _nothing):
                    graph = features()
                trained = any(isinstance(leaf, nn.Parameter) for leaf in leaves_of(graph))
                same = trained or same_bits(graph, features())
        except Exception as error:  # the run goes on with the graph
            return self._refuse(repr(error))
        if trained:
            return self._refuse("a weight of the text model is trained that makes features")
        return same or self._refuse("features without a graph are not bit-identical")

    def _refuse(self, reason: str) -> bool:
        logger.info("features are computed with a graph: %s", reason)
        if reason not in self.refused:
            self.refused.append(reason)
        return False


def _nothing(tensor: torch.Tensor) -> torch.Tensor:
    """Replaces a tensor that a backward pass would need, which is not computed."""
    return torch.empty(0)


def leaves_of(value: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors in which the graph of a result ends: those whose gradients its backward pass computes.

    Args:
        value: A tensor, or a container of tensors.
    """
    tensors = list(floating_tensors(value))
    yield from (tensor for tensor in tensors if tensor.requires_grad and tensor.grad_fn is None)
    stack: list[Any] = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    seen = set(stack)
    while stack:
        node = stack.pop()
        variable = getattr(node, "variable", None)
        if isinstance(variable, torch.Tensor):
            yield variable
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                stack.append(following)
