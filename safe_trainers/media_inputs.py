"""The part of the base below TRL that every batch passes through, on its way to a model."""

import contextlib
import logging
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import Trainer

from .contract import SafetyContract
from .media import MEDIA_KEYS, MediaCaster, MediaCollator, MediaDecision
from .policy import PrecisionPolicy
from .towers import unwrap


logger = logging.getLogger(__name__)


class MediaInputs(Trainer):
    """Moves batches to the device, their media in the dtype of the tower that consumes them."""

    media_keys: ClassVar[Mapping[str, str]] = MEDIA_KEYS
    """Media inputs and the model method that shows what a tower makes of each. A subclass extends it:
    `media_keys = {**MEDIA_KEYS, "my_pixels": "get_image_features"}`."""

    precision_policy: PrecisionPolicy
    safety_contract: SafetyContract
    _media: MediaCaster | None = None

    def compute_context(self) -> contextlib.AbstractContextManager[Any]:
        """The context that training computes in: accelerate's autocast, or none."""
        return self.accelerator.autocast()

    @property
    def media_decisions(self) -> list[MediaDecision]:
        """What was decided on each media tensor so far: on its first batch, once."""
        return list(self._media.decisions.values()) if self._media is not None else []

    def _media_caster(self) -> MediaCaster:
        if self._media is None:
            contexts: list[Callable[[], Any]] = [self.compute_context]
            if self.precision_policy.rollout.value == "stock":
                contexts.append(contextlib.nullcontext)
            plugin = self.accelerator.state.deepspeed_plugin if self.is_deepspeed_enabled else None
            engine = plugin.hf_ds_config.dtype() if plugin is not None else None
            self._media = MediaCaster(self.media_keys, self._media_models(), contexts, self._sharded(), engine)
        return self._media

    def _media_models(self) -> list[nn.Module]:
        """Every model of this trainer that reads media: the policy, and reference or teacher models beside it."""
        policy = unwrap(self.model)
        others = {id(base): base for value in vars(self).values() if (base := _base_model(value)) is not None}
        return [policy, *(model for model in others.values() if model is not policy)]

    def _sharded(self) -> str | None:
        plugin = getattr(self.accelerator.state, "deepspeed_plugin", None)
        if plugin is not None and plugin.zero_stage == 3:
            return "ZeRO-3 shards the weights"
        return "FSDP shards the weights" if self.is_fsdp_enabled else None

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Prepares a batch for a model: moved to the device, media in the dtype of their tower.

        Args:
            inputs: Model inputs by name.

        Returns:
            A new mapping of the same kind; `inputs` is not changed.
        """
        self.safety_contract.fired["inputs"] += 1
        return super()._prepare_inputs(inputs)

    def _prepare_input(self, data: Any) -> Any:
        """Prepares any part of a batch. Some trainers call this past any class between them and `Trainer`."""
        if not isinstance(data, Mapping):
            return self._move(data)
        caster = self._media_caster()
        media = caster.media(data)
        if caster.undecided(data):
            caster.decide({key: self._move(value) for key, value in data.items()})
            for decision in caster.decisions.values():
                logger.info("media tensor %s: %s", decision.key, decision.reason)
        return type(data)(  # type: ignore[call-arg]
            {key: self._move(caster.cast(key, value)) if key in media else self._prepare_input(value)
             for key, value in data.items()}
        )  # fmt: skip

    def _get_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """Makes a dataloader whose batches hold their media as decided before they are moved.

        Only what this process collates: a worker does not know what is decided after it was started.
        """
        if self.args.dataloader_num_workers > 0:
            return super()._get_dataloader(*args, **kwargs)
        collator: Any = self.data_collator  # type: ignore[has-type]
        self.data_collator = MediaCollator(collator, self._media_caster)
        try:
            return super()._get_dataloader(*args, **kwargs)
        finally:
            self.data_collator = collator

    def _move(self, data: Any) -> Any:
        """Moves nested tensors to the device and leaves their dtype alone.

        `Trainer` does the same without DeepSpeed; under it, it casts every floating tensor to the engine's dtype, also
        those that are no model inputs or are multiplied into integer positions.
        """
        if isinstance(data, Mapping):
            return type(data)({key: self._move(value) for key, value in data.items()})  # type: ignore[call-arg]
        if isinstance(data, (list, tuple)):
            return type(data)(self._move(value) for value in data)
        return data.to(self.args.device) if isinstance(data, torch.Tensor) else data


def _base_model(value: Any) -> nn.Module | None:
    """The transformers model inside an attribute of a trainer, if there is one."""
    if not isinstance(value, nn.Module):
        return None
    base = unwrap(value)
    return base if hasattr(base, "get_input_embeddings") else None
