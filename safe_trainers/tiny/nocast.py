"""A vision-language model without any casts, like many models with remote code.

Pixels enter the tower's convolution, and the projected features are written into the text embeddings, without a cast.
With half-precision weights the first operation fails without autocast; with float32 weights the second one fails under
autocast.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  (PyTorch's own name for it)
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationMixin,
    LlamaConfig,
    LlamaModel,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import CausalLMOutputWithPast


class NoCastVisionConfig(PretrainedConfig):
    """Sizes of the vision tower.

    Args:
        hidden_size: Width of the tower.
        intermediate_size: Width of the feed-forward layer.
        num_attention_heads: Heads of the attention layer.
        image_size: Height and width of an image, in pixels.
        patch_size: Height and width of a patch, in pixels.
        **kwargs: Passed on to `PretrainedConfig`.
    """

    model_type = "safe_trainers_nocast_vision"
    base_config_key = "vision_config"

    def __init__(
        self,
        hidden_size: int = 64,
        intermediate_size: int = 128,
        num_attention_heads: int = 4,
        image_size: int = 32,
        patch_size: int = 8,
        **kwargs: Any,
    ) -> None:
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_attention_heads = num_attention_heads
        self.image_size = image_size
        self.patch_size = patch_size
        super().__init__(**kwargs)


class NoCastConfig(PretrainedConfig):
    """Configuration of a vision tower, a projector and a Llama text model.

    Args:
        vision_config: Sizes of the tower, as a config or a dict.
        text_config: The text model, as a config or a dict.
        image_token_id: The token that image features are written into.
        **kwargs: Passed on to `PretrainedConfig`.
    """

    model_type = "safe_trainers_nocast"
    sub_configs: ClassVar[dict[str, Any]] = {"vision_config": NoCastVisionConfig, "text_config": LlamaConfig}

    def __init__(
        self,
        vision_config: NoCastVisionConfig | dict[str, Any] | None = None,
        text_config: LlamaConfig | dict[str, Any] | None = None,
        image_token_id: int = 8,
        **kwargs: Any,
    ) -> None:
        if not isinstance(vision_config, NoCastVisionConfig):
            vision_config = NoCastVisionConfig(**(vision_config or {}))
        if not isinstance(text_config, LlamaConfig):
            text_config = LlamaConfig(**(text_config or {}))
        self.vision_config: NoCastVisionConfig = vision_config
        self.text_config: LlamaConfig = text_config
        self.image_token_id = image_token_id
        super().__init__(**kwargs)
        # As in checkpoints with remote code: TRL reads the auto class of models outside transformers from here.
        self.auto_map = {"AutoModelForImageTextToText": "nocast.NoCastForConditionalGeneration"}


class NoCastVisionTower(nn.Module):
    """Patch embedding and one transformer layer.

    Args:
        config: Sizes of the tower.
    """

    def __init__(self, config: NoCastVisionConfig) -> None:
        super().__init__()
        width, patch = config.hidden_size, config.patch_size
        self.num_heads = config.num_attention_heads
        self.patch_embedding = nn.Conv2d(3, width, kernel_size=patch, stride=patch)
        self.position_embedding = nn.Embedding((config.image_size // patch) ** 2, width)
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, config.intermediate_size)
        self.fc2 = nn.Linear(config.intermediate_size, width)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Encode images.

        Args:
            pixel_values: `(N, 3, H, W)`, in the weights' dtype, because they are not cast.

        Returns:
            `(N, H / patch * W / patch, hidden_size)`.
        """
        hidden = self.patch_embedding(pixel_values).flatten(2).transpose(1, 2)  # (N, P, D)
        hidden = hidden + self.position_embedding.weight
        count, patches, width = hidden.shape
        qkv = self.qkv(self.norm1(hidden)).view(count, patches, 3, self.num_heads, -1)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # each (N, heads, P, D / heads)
        mixed = F.scaled_dot_product_attention(query, key, value)
        hidden = hidden + self.out(mixed.transpose(1, 2).reshape(count, patches, width))
        return hidden + self.fc2(F.gelu(self.fc1(self.norm2(hidden))))


class NoCastPreTrainedModel(PreTrainedModel):
    """Base class: how to load, and which features the text model supports."""

    config_class = NoCastConfig
    base_model_prefix = "model"
    input_modalities = ("image", "text")
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _no_split_modules: ClassVar[list[str]] = ["LlamaDecoderLayer"]


class NoCastModel(NoCastPreTrainedModel):
    """Vision tower, projector and text model, without the language-model head.

    Args:
        config: The configuration.
    """

    def __init__(self, config: NoCastConfig) -> None:
        super().__init__(config)
        width = config.text_config.hidden_size
        self.vision_tower = NoCastVisionTower(config.vision_config)
        self.projector = nn.Sequential(
            nn.Linear(config.vision_config.hidden_size, width), nn.GELU(), nn.Linear(width, width)
        )
        self.language_model = LlamaModel(config.text_config)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """Return the text model's token embedding."""
        return self.language_model.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the text model's token embedding."""
        self.language_model.set_input_embeddings(value)

    def get_image_features(self, pixel_values: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Encode and project images.

        Args:
            pixel_values: `(N, 3, H, W)`, in the weights' dtype.
            **kwargs: Ignored, as other families accept more.

        Returns:
            `(N, image tokens, text hidden size)`, in the dtype of the projector's output.
        """
        return self.projector(self.vision_tower(pixel_values))

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        pixel_values: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run the text model over text and image features.

        Args:
            input_ids: `(B, T)`, int64.
            pixel_values: `(N, 3, H, W)`, in the weights' dtype.
            attention_mask: `(B, T)`.
            inputs_embeds: `(B, T, D)`, instead of `input_ids`.
            **kwargs: Passed on to the text model.

        Returns:
            The text model's output.

        Raises:
            ValueError: If both or neither of `input_ids` and `inputs_embeds` are given, or if the number of image
                tokens is not the number of image features.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Give exactly one of `input_ids` and `inputs_embeds`.")
        if inputs_embeds is None:
            inputs_embeds = self.get_input_embeddings()(input_ids)  # (B, T, D)
            is_image = input_ids == self.config.image_token_id  # (B, T)
            # Images are also passed when decoding with a cache, but new tokens contain no image tokens.
            if pixel_values is not None and bool(is_image.any()):
                features = self.get_image_features(pixel_values).flatten(0, 1)  # (image tokens, D)
                if features.shape[0] != int(is_image.sum()):
                    raise ValueError(f"{int(is_image.sum())} image tokens for {features.shape[0]} image features.")
                inputs_embeds = inputs_embeds.clone()
                inputs_embeds[is_image] = features
        return self.language_model(inputs_embeds=inputs_embeds, attention_mask=attention_mask, **kwargs)


class NoCastForConditionalGeneration(NoCastPreTrainedModel, GenerationMixin):
    """The model with its language-model head.

    Args:
        config: The configuration.
    """

    def __init__(self, config: NoCastConfig) -> None:
        super().__init__(config)
        self.model = NoCastModel(config)
        self.lm_head = nn.Linear(config.text_config.hidden_size, config.text_config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """Return the text model's token embedding."""
        return self.model.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the text model's token embedding."""
        self.model.set_input_embeddings(value)

    def get_output_embeddings(self) -> nn.Module:
        """Return the language-model head."""
        return self.lm_head

    def get_image_features(self, pixel_values: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Encode and project images; see `NoCastModel.get_image_features`."""
        return self.model.get_image_features(pixel_values, **kwargs)

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        pixel_values: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Predict the next token.

        Args:
            input_ids: `(B, T)`, int64.
            pixel_values: `(N, 3, H, W)`, in the weights' dtype.
            attention_mask: `(B, T)`.
            position_ids: `(B, T)`, int64.
            past_key_values: Cache of earlier tokens.
            inputs_embeds: `(B, T, D)`, instead of `input_ids`.
            labels: `(B, T)`, int64; positions with -100 are ignored in the loss.
            logits_to_keep: Number of last positions for which logits are computed (0: all), or their indices.
            **kwargs: Passed on to the text model and the loss.

        Returns:
            Loss (if there are labels), logits `(B, T or logits_to_keep, vocabulary)` and cache.
        """
        if past_key_values is not None:  # transformers 5.24 and later pass it as `cache`, and warn of the old name
            kwargs["past_key_values"] = past_key_values
        outputs = self.model(
            input_ids=input_ids,
            pixel_values=pixel_values,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            **kwargs,
        )
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, keep])  # (B, T', V)
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=self.config.text_config.vocab_size, **kwargs
            )
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            **{name: value for name, value in outputs.items() if name in ("past_key_values", "cache")},
        )


AutoConfig.register(NoCastConfig.model_type, NoCastConfig, exist_ok=True)
AutoModelForImageTextToText.register(NoCastConfig, NoCastForConditionalGeneration, exist_ok=True)
# TRL falls back to this class for architectures that transformers does not export.
AutoModelForCausalLM.register(NoCastConfig, NoCastForConditionalGeneration, exist_ok=True)
