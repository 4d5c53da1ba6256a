"""Moves batches to the device, with media tensors in the dtype of the tower that consumes them."""

import contextlib
import logging
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from ..core.feature import Feature, Run
from ..model.parts import unwrap
from .caster import MediaCaster, MediaCollator, MediaDecision


logger = logging.getLogger(__name__)


class MediaInputs(Feature):
    """Moves batches to the device and casts their media."""

    name = "media"
    about_weights: ClassVar = {"_caster": type(None), "_resumed": dict}

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._caster: MediaCaster | None = None
        self._resumed: dict[str, MediaDecision] = {}  # the decisions of a checkpoint

    @property
    def decisions(self) -> list[MediaDecision]:
        """The decision on each media tensor that has been seen so far."""
        return list(self._caster.decisions.values()) if self._caster is not None else []

    @property
    def caster(self) -> MediaCaster:
        """The caster, created on first use, when all models of the trainer exist."""
        if self._caster is None:
            trainer = self.run.trainer
            contexts: list[Callable[[], Any]] = [trainer.compute_context]
            if self.run.policy.rollout.value == "stock":
                contexts.append(contextlib.nullcontext)
            plugin = self.run.accelerator.state.deepspeed_plugin if trainer.is_deepspeed_enabled else None
            engine = plugin.hf_ds_config.dtype() if plugin is not None else None
            sharded = None if self.run.sharded is None else f"{self.run.sharded} shards the weights"
            self._caster = MediaCaster(trainer.media_keys, self.models(), contexts, sharded, engine)
            self._caster.decisions.update(self._resumed)
        return self._caster

    def models(self) -> list[nn.Module]:
        """Returns the models of the trainer that consume media: the policy, then reference or teacher models."""
        policy = unwrap(self.run.model)
        values = (unwrap(value) for value in vars(self.run.trainer).values() if isinstance(value, nn.Module))
        others = {id(base): base for base in values if base is not policy and hasattr(base, "get_input_embeddings")}
        return [policy, *others.values()]

    def prepare(self, data: Any) -> Any:
        """Prepares any part of a batch; replaces `Trainer._prepare_input`.

        Args:
            data: Nested mappings and lists of tensors, which are not modified.

        Returns:
            The same structure on the device, with media in the dtype of their tower.
        """
        if not isinstance(data, Mapping):
            return self._move(data)
        caster = self.caster
        media = caster.media(data)
        self.run.coverage.fired["inputs"] += bool(media)
        if caster.undecided(data):
            caster.decide({key: self._move(value) for key, value in data.items()})
            for decision in caster.decisions.values():
                logger.info("media tensor %s: %s", decision.key, decision.reason)
        return type(data)(  # type: ignore[call-arg]
            {key: self._move(caster.cast(key, value)) if key in media else self.prepare(value)
             for key, value in data.items()}
        )  # fmt: skip

    def around_batch(self, call: Callable[[], Any]) -> Any:
        """Casts the media of a rollout batch, before TRL buffers and slices it.

        Returns:
            TRL's batch, or a copy of the mapping if a media tensor had to be cast.
        """
        batch = call()
        self.run.coverage.fired["buffer"] += 1
        if not isinstance(batch, Mapping):
            return batch
        caster = self.caster
        cast = {key: new for key in caster.media(batch) if (new := caster.cast(key, batch[key])) is not batch[key]}
        return {**batch, **cast} if cast else batch

    def state_dict(self) -> dict[str, Any]:
        """The decisions, and the dtypes of the run for which they were made."""
        decisions = {decision.key: [decision.dtype, decision.reason] for decision in self.decisions}
        return {"dtypes": self._dtypes(), "decisions": decisions}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the decisions of a run with the same dtypes."""
        if state["dtypes"] != self._dtypes():
            return
        self._resumed = {key: MediaDecision(key, *decision) for key, decision in state["decisions"].items()}
        if self._caster is not None:
            self._caster.decisions.update(self._resumed)

    def _dtypes(self) -> list[str]:
        policy, models = self.run.policy, self.models()
        stored = ("+".join(sorted({str(p.dtype) for p in model.parameters()})) for model in models)
        return [policy.compute.text, policy.autocast.text, policy.rollout.text, *stored]

    def collator(self, collator: Callable[..., Any]) -> MediaCollator:
        """Wraps the trainer's collator so that it casts media as decided."""
        return MediaCollator(collator, lambda: self.caster)

    def _move(self, data: Any) -> Any:
        """Moves nested tensors to the device without casting them.

        With DeepSpeed, `Trainer` casts every floating-point tensor to the engine's dtype, including tensors that are
        not model inputs or are multiplied with integer positions.
        """
        if isinstance(data, Mapping):
            return type(data)({key: self._move(value) for key, value in data.items()})  # type: ignore[call-arg]
        if isinstance(data, (list, tuple)):
            return type(data)(self._move(value) for value in data)
        return data.to(self.run.args.device) if isinstance(data, torch.Tensor) else data
