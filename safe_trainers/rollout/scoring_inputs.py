"""Gives scoring the positions and token types with which `generate` and vLLM compute the same tokens.

TRL pads prompts on the left and scores them without `position_ids`. Models whose forward pass then counts the padding
(GPT-2) score tokens at later positions than they were sampled at: `generate` passes positions without the padding, and
vLLM has none. Models with rotary or relative positions give the same log-probabilities for both, and get TRL's inputs
unchanged.

TRL gives the tokens of completions and of labels the type 0. A model in which tokens of type 0 attend to later ones
(PaliGemma's prompts) would predict each token from those that follow it. Tokens that are predicted get the type 1, as
`generate` gives them.

Both are asked of the model, with a few tokens, when training begins: then it is on its device, and nothing wraps it
yet. Hooks that were registered after the trainer was built are not called. A model that cannot be run before an engine
has prepared it is asked at the first rollout. One whose weights ZeRO-3 has partitioned is not asked, and is scored as
in TRL.
"""

import contextlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..core.feature import Feature, Run
from ..core.trl import has_rollouts
from ..model.sequence_trial import depends_on_shift, sees_future, takes
from ..model.trial_forward import without_later_hooks
from ..policy.distributed import shards_weights
from .mismatch import EPS
from .vllm_images import marker_ids


POSITIONS, TYPES = "position_ids", "token_type_ids"
ANSWER = 1
"""The token type of answers, of models that tell prompts and answers apart."""


class ScoringInputs(Feature):
    """Completes the inputs of forward passes that compute log-probabilities.

    Attributes:
        positions: Whether positions are passed to scoring; `None` while it is not known.
        answers: Whether tokens that are predicted get the type `ANSWER`; `None` while it is not known.
    """

    about_weights: ClassVar = {"positions": type(None), "answers": type(None)}

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.positions: bool | None = None
        self.answers: bool | None = None
        self._scored: Mapping[str, Any] = {}
        self._later = 0

    def ready(self) -> None:
        """Remembers which hooks the model has; those that are registered later observe the run."""
        self._later = RemovableHandle.next_id

    def on_train_begin(self) -> None:
        """Asks the model, and rests if it needs nothing."""
        self._ask(self.run.model, wrapped=False)
        if self.positions is False and self.answers is False:
            self.rest("before_rollout", "before_scoring", "around_scoring", "on_loss_inputs")

    def before_rollout(self, prompt_ids: Any) -> None:
        """Asks a model that was not asked before, or that computes only as it is wrapped."""
        self._ask(self.run.model)

    def before_scoring(self, inputs: Mapping[str, Any]) -> None:
        """Keeps the arguments of the scoring method."""
        self._scored = inputs
        self._ask(self.run.model)

    def around_scoring(self, call: Callable[[], Any]) -> Any:
        """Scores completions; the forward passes get positions and token types if the model depends on them."""
        model, completion = self._scored.get("model"), self._scored.get("logits_to_keep")
        self._scored = {}
        if not (self.positions or self.answers) or not isinstance(model, nn.Module) or completion is None:
            return call()
        hook = partial(self._complete, int(completion))
        handle = model.register_forward_pre_hook(hook, with_kwargs=True)
        try:
            return call()
        finally:
            handle.remove()

    def on_loss_inputs(self, inputs: Any) -> Any:
        """Changes the token types of labels other than images, in trainers that compute their loss from labels.

        Args:
            inputs: The inputs of the loss.

        Returns:
            The inputs, or a copy of the mapping with changed token types.
        """
        types, labels = (inputs.get(name) if isinstance(inputs, Mapping) else None for name in (TYPES, "labels"))
        if types is None or labels is None or labels.shape != types.shape:
            return inputs
        self._ask(self.run.model)
        if not self.answers:
            return inputs
        predicted = labels != -100  # (B, T)
        for token in marker_ids(self.run.model):
            predicted &= labels != token
        return {**inputs, TYPES: types.masked_fill(predicted, ANSWER)}

    @property
    def _spacing(self) -> float:
        dtypes = self.run.policy.compute.value & EPS.keys()
        return max((EPS[dtype] for dtype in dtypes), default=EPS["float32"])

    def _ask(self, model: nn.Module, wrapped: bool = True) -> None:
        """Asks what is not known yet, of the model itself, unless an engine shards its weights, then as it is wrapped.

        A wrapped model that cannot be run is not asked again.
        """
        if self.positions is not None and self.answers is not None:
            return
        sharded = shards_weights(self.run.args)  # by hooks
        ways = [*([] if sharded else [False]), *([True] if wrapped else [])]
        with contextlib.nullcontext() if sharded else without_later_hooks(model, self._later):
            self._find(model, ways)

    def _find(self, model: nn.Module, ways: list[bool]) -> None:
        """Asks in one way after another, until there is an answer."""
        wrapped = True in ways
        if self.positions is None:
            scores = has_rollouts(type(self.run.trainer))
            asked = (depends_on_shift(model, self._spacing, way) if scores else False for way in ways)
            found = next((answer for answer in asked if answer is not None), None)
            self.positions = False if found is None and wrapped else found
        if self.answers is None:
            found = sees_future(model, self._spacing, token_type=0) if takes(model, TYPES) else False
            if found:
                leaks = sees_future(model, self._spacing, ANSWER)
                found = None if leaks is None else not leaks
            self.answers = False if found is None and wrapped else found

    def _complete(
        self, completion: int, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Adds positions and token types to the arguments of a forward pass of B sequences of T tokens.

        Args:
            completion: Number of tokens at the end that are predicted.
            model: The model.
            args: Its arguments.
            kwargs: Its keyword arguments.
        """
        changed = dict(kwargs)
        mask, types = kwargs.get("attention_mask"), kwargs.get(TYPES)
        if self.positions and isinstance(mask, torch.Tensor) and mask.dim() == 2 and kwargs.get(POSITIONS) is None:
            changed[POSITIONS] = positions_of(mask)
        if self.answers and types is not None and takes(model, TYPES):
            predicted = torch.arange(types.shape[1], device=types.device) >= types.shape[1] - completion  # (T,)
            changed[TYPES] = types.masked_fill(predicted, ANSWER)
        return args, changed


def positions_of(mask: torch.Tensor) -> torch.Tensor:
    """Returns the positions of tokens without the padding, as `generate` counts them.

    Args:
        mask: The attention mask, (B, T): 1 for tokens and 0 for padding.

    Returns:
        The positions, (B, T) int64; 0 for padding on the left.
    """
    return (mask.long().cumsum(-1) - 1).clamp(min=0)
