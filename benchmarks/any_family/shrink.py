"""Makes the config of a family small, by the names of its values."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig


HIDDEN = 128
HEADS = 4
HEAD = HIDDEN // HEADS
LAYERS = 2
IMAGE_SIZE = 64
PATCH_SIZE = 8
PATCHES = (IMAGE_SIZE // PATCH_SIZE) ** 2
VOCABULARY = 640
"""Size of the vocabulary. The tokenizer has fewer tokens; ids from `FIRST_MEDIA_ID` are those of media."""
FIRST_MEDIA_ID = 600

_LEAVE = 0
_RULES = tuple(
    (re.compile(pattern), value)
    for pattern, value in (
        (r"mlp_ratio|.*_ratio|.*_factor|.*_rate|.*kernel.*|num_channels|.*stride|.*_merge_size|in_chan.*", _LEAVE),
        (r"(.*_)?(vocab_size.*|vocabulary_size)", VOCABULARY),
        (r"(image|img|crop)_size|resolution|max_img_size", IMAGE_SIZE),
        (r"patch_size", PATCH_SIZE),
        (r"num_(position_embeddings|patches)|image_seq_length|max_value_projector_patch_to_query_dict", PATCHES),
        (r"mm_tokens_per_image|num_image_tokens|.*soft_tokens_per_image", PATCHES // 4),
        (r"num_query_tokens|.*_latents|latent_query_num", 4),
        (r"(moe_)?(num_|n_)shared_experts|n_groups?|topk_group|num_expert_group", 1),
        (r"num_experts_per_tok|moe_top_?k|moe_k|top_k_experts|num_experts_per_token", 2),
        (r"(moe_|.*_)?(num_|n_)(local_|routed_)?experts", 4),
        (r"num_nextn_predict_layers|first_k_dense_replace|num_kv_shared_layers|max_window_layers|num_mtp.*", _LEAVE),
        (r"(.*_)?(key_value_heads|kv_heads|key_heads)", HEADS // 2),
        (r"(.*_)?(attention_heads|num_heads|n_heads?|.*_heads)", HEADS),
        (r"(.*_)?(q|kv|o)_lora_rank|.*_lora_rank", HEAD),
        (r"(.*_)?(head_dim|v_head_dim|dim_head|head_size|d_kv)", HEAD),
        (r"(.*_)?(intermediate_size|intermediate_dim|ffn_dim|ffn_hidden_size)", 2 * HIDDEN),
        (r"(.*_)?(mlp_dim|d_ff|expert_dim|size_mlp)", 2 * HIDDEN),
        (r"(.*_)?(hidden_size|hidden_dim|embed_dim|embedding_dim|d_model|embedding_size)", HIDDEN),
        (r"(.*_)?(proj.*_dim|in_dim|out_dim|adapter_input_size)", HIDDEN),
        (r"(.*_)?(output_dim|hidden_size_per_layer_input|encoder_hidden_size|input_dim|emb_dim)", HIDDEN),
        (r"(.*_)?(max_position_embeddings|max_source_positions|n_positions)", 1024),
    )
)  # fmt: skip
"""The value of an integer by its name: the first pattern that matches decides."""
_LAYERS = re.compile(r"(num_)?(.*_)?(hidden_layers|layers|n_layers?|depth|num_blocks)")
_INDEXES = re.compile(r".*(_indexe?s|_idxs|_layer|_layers|_layer_id|_indices)")
_IDS = re.compile(r".*(token_id|token_index|_id|token_ids|_patch_id)")
_MEDIA_ID = re.compile(r"(image|video|audio)_token_(id|index)")
_SPECIAL = re.compile(r"_?(pad|bos|eos|sep|decoder_start|forced_eos|eod)_token_id")


class Shrinker:
    """Makes the values of a config small.

    Args:
        special: The ids of the tokenizer's special tokens, such as `pad_token_id`.
    """

    def __init__(self, special: Mapping[str, int]) -> None:
        self.special = special
        self.media: dict[int, int] = {}

    def shrink(self, values: dict[str, Any]) -> dict[str, Any]:
        """Returns small values for the config whose values are given, with those of its parts."""
        kept = self._kept_layers(values)
        count = next(iter(kept.values()), None)
        made = {}
        for name, value in values.items():
            made[name] = self._one(name, value, values, kept, LAYERS if count is None else len(count))
        return made

    def _one(self, name: str, value: Any, values: Mapping[str, Any], kept: dict[int, list[int]], layers: int) -> Any:
        if isinstance(value, PreTrainedConfig):
            return self.shrink(value.to_dict())
        if isinstance(value, dict):
            if name == "per_layer_config":
                indexes = next(iter(kept.values()), list(range(layers)))
                found = {int(index): self.shrink(part) for index, part in value.items()}
                return {new: found[old] for new, old in enumerate(indexes) if old in found}
            if not all(isinstance(key, str) for key in value) or name == "label2id":
                return value
            if "mrope_section" in value or "rope_theta" in value or "rope_type" in value:
                return _rope(value, values)
            return self.shrink(value)
        if isinstance(value, list | tuple):
            return self._sequence(name, list(value), kept, layers)
        if value is None and _MEDIA_ID.fullmatch(name):
            return self._token(name, -len(self.media) - 1, named=True)
        if not isinstance(value, int) or isinstance(value, bool):
            return value
        if _IDS.fullmatch(name):
            return self._token(name, value)
        if _LAYERS.fullmatch(name) and value > 0 and "dense" not in name and "shared" not in name:
            found = kept.get(value)
            return min(value, LAYERS if found is None else len(found))
        if _INDEXES.fullmatch(name) and value < 0:
            return max(value, -layers)
        for pattern, small in _RULES:
            if pattern.fullmatch(name):
                if small == HEADS // 2 and value == values.get(name.replace("key_value", "attention")):
                    return HEADS
                return small if small and value > 0 else value
        return value

    def _token(self, name: str, value: int, named: bool = False) -> int:
        if _SPECIAL.fullmatch(name):
            return self.special.get(name.lstrip("_"), self.special["eos_token_id"])
        return value if value < 0 and not named else self.media.setdefault(value, FIRST_MEDIA_ID + len(self.media))

    def _sequence(self, name: str, value: list[Any], kept: dict[int, list[int]], layers: int) -> list[Any]:
        if name.endswith("token_ids"):
            return [self._token(name, one) for one in value]
        if name == "downsample_channels":
            return [HIDDEN] * len(value)
        if name == "image_grid_pinpoints":
            return [[IMAGE_SIZE, IMAGE_SIZE]]
        if name in ("image_size", "patch_size") and len(set(value)) == 1:
            return [IMAGE_SIZE if name == "image_size" else PATCH_SIZE] * len(value)
        if len(value) in kept and len(value) > 1 and not all(isinstance(one, dict | list) for one in value):
            chosen = [value[index] for index in kept[len(value)]]
            if not all(isinstance(one, int) and not isinstance(one, bool) for one in chosen):
                return chosen
            return chosen if max(value) < len(value) // 2 else list(range(len(chosen)))
        if "layer" in name and len(value) > 8 and all(isinstance(one, str) for one in value):
            return list(dict.fromkeys(value))  # the kinds of layers of a config that does not count them
        if _INDEXES.fullmatch(name) and all(isinstance(one, int) for one in value):
            return list(dict.fromkeys(max(min(one, layers - 1), -layers) for one in value))
        return [self.shrink(one) if isinstance(one, dict) else one for one in value]

    def _kept_layers(self, values: Mapping[str, Any]) -> dict[int, list[int]]:
        """Returns, by the number of layers, the indexes of those that are kept: one of each kind, and at least two."""
        kept = {}
        for name, count in values.items():
            if _LAYERS.fullmatch(name) and isinstance(count, int) and not isinstance(count, bool) and count > 1:
                lists = [v for v in values.values() if isinstance(v, list) and len(v) == count]
                lists = [v for v in lists if isinstance(v[0], str)]
                kinds: dict[Any, int] = {}
                for index in range(count):
                    kinds.setdefault(tuple(str(one[index]) for one in lists), index)
                chosen = list(kinds.values())
                kept[count] = sorted(chosen) if len(chosen) >= LAYERS else list(range(LAYERS))
        return kept


def _rope(rope: dict[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Rescales the parts of rotary positions, which share half the rotated dimensions of a head."""
    rope = dict(rope)
    half = int(HEAD * rope.get("partial_rotary_factor", values.get("partial_rotary_factor") or 1.0)) // 2
    if "mrope_section" in rope:
        rope["mrope_section"] = [half - 2 * (half // 3), half // 3, half // 3]
    for name in ("short_factor", "long_factor"):
        if name in rope:
            rope[name] = rope[name][:half]
    return rope


def merge(values: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns values with changes; a name such as `vision_config.depth` changes a value of a part."""
    made = dict(values)
    for name, value in changes.items():
        first, _, rest = name.partition(".")
        made[first] = merge(made.get(first) or {}, {rest: value}) if rest else value
    return made


def small_config(family: str, special: Mapping[str, int], changes: Mapping[str, Any]) -> PreTrainedConfig:
    """Returns a small config of a family.

    Args:
        family: The `model_type`.
        special: The ids of the tokenizer's special tokens.
        changes: Values that the family needs.
    """
    config_class = CONFIG_MAPPING[family]
    default = config_class()
    for name, part in getattr(config_class, "sub_configs", {}).items():  # a tower that is not built by default
        if name.startswith("vision") and getattr(default, name, None) is None and isinstance(part, type):
            setattr(default, name, part())
    values = Shrinker(special).shrink(default.to_dict())
    values = merge(values, {"tie_word_embeddings": False, **changes})
    values.pop("model_type", None)
    return config_class(**values)


def parts(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    """Yields a config and the configs in it."""
    yield config
    for value in vars(config).values():
        if isinstance(value, PreTrainedConfig):
            yield from parts(value)
