"""Finds inputs with which a model of any family computes, by trying the forms that transformers' processors make."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from .shrink import FIRST_MEDIA_ID, IMAGE_SIZE, PATCH_SIZE, parts


Inputs = dict[str, Any]
WORDS = 6
FRAMES = 64
"""Frames of a sound, and the multiple of them that is tried if an encoder needs a fixed number."""
GUESSES = (16, 64)
"""Numbers of features that are tried if a model does not return them; its error then has the right number."""
BINS = ("input_size", "num_mel_bins", "n_mel_bins", "input_feat_size", "input_dim", "feature_size")
_COUNTS = re.compile(r"tokens:? \d+.*features:? (\d+)|value tensor of shape \[(\d+)", re.IGNORECASE | re.DOTALL)


def noise(*shape: int) -> torch.Tensor:
    """Random values, which bfloat16 does not hold exactly."""
    return torch.rand(shape) * 2 - 1


def value_of(config: PreTrainedConfig, *names: str, default: Any = None) -> Any:
    """Returns the first value of these names in a config or its parts."""
    for name in names:
        for part in parts(config):
            found = getattr(part, name, None)
            if found is not None:
                return found
    return default


def forward_names(model: nn.Module) -> list[str]:
    """Names of the arguments of a model's `forward`."""
    return [name for name in inspect.signature(model.forward).parameters if name != "self"]


def image_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Returns the config of the vision tower, or the whole config if there is none."""
    for name in ("vision_config", "vision_tower_config", "vq_config", "mm_config", "encoder", "vision_tower"):
        found = getattr(config, name, None)
        if isinstance(found, PreTrainedConfig):
            return found
    for part in list(parts(config))[1:]:
        for name in ("vision_config", "vq_config"):
            if isinstance(getattr(part, name, None), PreTrainedConfig):
                return getattr(part, name)
    return config


def image_forms(model: PreTrainedModel, batch: int) -> Iterator[Inputs]:
    """Yields the image inputs to try, one image for each row.

    Args:
        model: The model.
        batch: Number of rows.
    """
    config, names = model.config, forward_names(model)
    vision = image_config(config)
    size = value_of(vision, "image_size", "img_size", "resolution", default=IMAGE_SIZE)
    size = max(size) if isinstance(size, list | tuple) else size
    patch = value_of(vision, "patch_size", "spatial_patch_size", default=PATCH_SIZE)
    patch = patch[-1] if isinstance(patch, list | tuple) else patch
    channels = value_of(vision, "in_channels", "num_channels", "in_chans")
    channels = channels if isinstance(channels, int) else 3
    side = size // patch
    times = value_of(vision, "temporal_patch_size", default=1)
    key = next((k for k in ("pixel_values", "image_pixel_values", "flattened_patches") if k in names), None)
    if key is None:
        return
    flat = channels * patch * patch
    if key == "flattened_patches":  # each patch begins with its row and column
        yield {key: torch.cat([torch.ones(batch, side**2, 2), noise(batch, side**2, flat)], -1)}
        return
    if "image_token_pooling" in names:  # tokens are means of patches, whose indexes are passed
        groups = torch.arange(batch * side**2).reshape(-1, 4)
        grids = torch.tensor([[side // 2, side // 2, 0, 0]] * batch)
        yield {
            key: noise(batch, side**2, flat),
            "image_token_pooling": groups,
            "image_grids": grids,
            "image_num_crops": torch.ones(batch, dtype=torch.long),
        }
        return
    pixels = [noise(batch, 3, size, size), noise(batch, 1, 3, size, size), noise(batch, 2, 3, size, size)]
    pixels.append(noise(batch, 1, value_of(vision, "max_num_tiles", default=1), 3, size, size))
    grid = torch.tensor([[1, side, side]] * batch)
    patches = [noise(batch * side**2, flat * n) for n in dict.fromkeys((times, 1, 2))]
    merged = value_of(vision, "pooling_kernel_size", default=1)
    wide = [noise(batch, (side // merged) ** 2, flat * merged**2)] if isinstance(merged, int) else []
    block = value_of(vision, "spatial_merge_size", default=1) * patch
    patches += [noise(batch * side**2, block, block, channels)]
    patches += [noise(batch * side**2, channels, patch, patch), noise(batch * side**2, channels, times, patch, patch)]
    rows = [noise(batch, side**2, flat), noise(batch, 1, side**2, flat)]
    where = torch.stack(torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij"), -1).reshape(1, -1, 2)
    shape = torch.tensor([[side, side]] * batch)
    known: dict[str, list[Any]] = {
        "image_grid_thw": [grid],
        "image_grid_hw": [shape],
        "spatial_shapes": [shape],
        "target_sizes": [shape],
        "image_sizes": [torch.tensor([[size, size]] * batch)],
        "image_merge_sizes": [torch.ones(batch, dtype=torch.long), torch.full((batch,), 2)],
        "pixel_mask": [torch.ones(batch, size, size, dtype=torch.bool)],
        "aspect_ratio_ids": [torch.ones(batch, 1, dtype=torch.long)],
        "aspect_ratio_mask": [torch.ones(batch, 1, value_of(vision, "max_num_tiles", default=1), dtype=torch.long)],
        "high_res_pixel_values": [noise(batch, 3, size, size)],
        "qformer_input_ids": [torch.full((batch, 4), 5)],
        "qformer_attention_mask": [torch.ones(batch, 4, dtype=torch.long)],
        "image_attention_mask": [],
        "num_local_patches": [torch.zeros(batch, dtype=torch.long), [0] * batch],
    }
    masks = {
        4: torch.ones(batch, 1, size, size, dtype=torch.bool),
        5: torch.ones(batch, 1, size, size, dtype=torch.bool),
        3: torch.ones(batch, side**2, dtype=torch.bool),
    }
    more = {name: known[name][0] for name in known if name in names and known[name]}
    gridded = {"image_grid_thw", "image_grid_hw", "spatial_shapes", "image_position_ids", "target_sizes"} & set(names)
    rows += wide
    forms = [*patches, *rows, *pixels] if gridded else [*pixels, *rows, *patches]
    for form in forms:
        mask = masks.get(form.ndim)
        if "image_position_ids" in names:
            at = where if form.ndim != 3 or form.shape[1] == side**2 else where[:, : form.shape[1]]
            more["image_position_ids"] = at.repeat(batch, 1, 1)
        if "pixel_attention_mask" in names and mask is not None:
            yield {key: form, **more, "pixel_attention_mask": mask}
            if form.ndim == 5:
                yield {key: form, **more, "pixel_attention_mask": torch.ones(form.shape[:2], dtype=torch.bool)}
        if key == "image_pixel_values" and form.ndim == 5 and form.shape[1] == 2:
            tiles = torch.ones(batch, 2, side, side, dtype=torch.long)
            yield {key: form, **more, "image_attention_mask": tiles}
        yield {key: form, **more}
        if more.keys() - gridded:
            yield {key: form, **{name: more[name] for name in gridded}}


def sound_forms(model: PreTrainedModel, batch: int) -> Iterator[Inputs]:
    """Yields the sound inputs to try, one sound for each row."""
    config, names = model.config, forward_names(model)
    key = next((k for k in ("input_features", "audio_input_features", "input_values") if k in names), None)
    if key is None:
        return
    bins = value_of(config, *BINS, default=80)
    longest = value_of(config, "max_source_positions", default=FRAMES)
    for frames in dict.fromkeys((FRAMES, 2 * longest, 200, 400, 8 * (WORDS + 1))):
        samples = frames * 100
        for shape in ((batch, bins, frames), (batch, frames, bins), (batch, 1, samples), (batch, samples)):
            form = noise(*shape)
            length = samples if shape[-1] == samples else frames
            mask = torch.ones(batch, length, dtype=torch.long)
            masks = {
                n: mask.bool() if n.startswith("input_features") else mask
                for n in ("input_features_mask", "feature_attention_mask", "padding_mask", "audio_attention_mask")
                if n in names
            }
            yield {key: form, **masks}
            if masks:
                yield {key: form}


def media_tokens(config: PreTrainedConfig, kind: str) -> tuple[list[int], int | None, list[int]]:
    """Returns the ids before, the id of one feature, and the ids after an image or a sound."""
    image = ("image_token_id", "image_token_index", "image_patch_id", "media_placeholder_token_id", "im_patch_id")
    names = image if kind == "image" else ("audio_token_id", "audio_token_index")
    before = ("vision_start_token_id", "image_start_token_id", "boi_token_id", "boi_token_index")
    after = ("vision_end_token_id", "image_end_token_id", "eoi_token_id", "eoi_token_index")
    if kind != "image":
        before = after = ()
    if kind == "image":
        names += ("video_token_id", "video_token_index")
    found = [value_of(config, *group) if group else None for group in (before, names, after)]
    start, token, end = found
    return ([start] if isinstance(start, int) else []), token, ([end] if isinstance(end, int) else [])


def feature_count(model: PreTrainedModel, kind: str, media: Inputs) -> int | None:
    """Returns the number of features of all images or sounds; `None` if the model has no method that returns them."""
    method = f"get_{'image' if kind == 'image' else 'audio'}_features"
    if kind == "image" and not hasattr(model, method) and hasattr(model, "get_video_features"):
        method = "get_video_features"  # a model of videos, whose frames are images
    owners = [m for m in (getattr(model, "model", None), model) if hasattr(m, method)]
    if not owners:
        return None
    function = getattr(owners[0], method)
    accepted = inspect.signature(function).parameters
    given = {name: value for name, value in media.items() if "args" in accepted or name in accepted}
    with torch.no_grad():
        found = function(**given)
    found = getattr(found, "pooler_output", None) if hasattr(found, "pooler_output") else found
    if found is None:
        return None
    if isinstance(found, list | tuple):
        return sum(one.numel() // one.shape[-1] for one in found if isinstance(one, torch.Tensor))
    return found.numel() // found.shape[-1]


def with_text(model: PreTrainedModel, kind: str, media: Inputs, count: int, batch: int) -> Inputs:
    """Adds token ids with `count` feature tokens in each row, and what depends on them."""
    config, names = model.config, forward_names(model)
    before, token, after = media_tokens(config, kind)
    if "image_embeds_position_mask" in names:
        before, token, after = [], 4, []  # a mask marks the features
    marked = [*before, *[token] * count, *after] if token is not None else []
    words = torch.randint(5, 100, (batch, WORDS)).tolist()
    ids = torch.tensor([[1, *row[:2], *marked, *row[2:]] for row in words])
    at = ids == token if token is not None else torch.zeros_like(ids, dtype=torch.bool)
    made = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **media}
    for name in ("mm_token_type_ids", "token_type_ids", "moe_mm_token_type_ids"):
        if name in names:
            made[name] = at.long() * (3 if kind != "image" and name == "mm_token_type_ids" else 1)
    length = ids.shape[1]
    if "image_attention_mask" in names and "image_attention_mask" not in media:
        made["image_attention_mask"] = torch.ones(batch, length, 1, dtype=torch.long)
    if "cross_attention_mask" in names:
        tiles = value_of(config, "max_num_tiles", default=1)
        made["cross_attention_mask"] = torch.ones(batch, length, 1, tiles, dtype=torch.long)
    if "image_embeds_position_mask" in names:
        made["image_embeds_position_mask"] = (torch.arange(length) < count).long().expand(batch, -1).clone()
    if "protein_input_ids" in names:
        made["protein_input_ids"] = torch.randint(5, 30, (batch, 2 * WORDS))
        made["protein_attention_mask"] = torch.ones(batch, 2 * WORDS, dtype=torch.long)
    if "bbox" in names:
        made["bbox"] = torch.zeros(batch, length, 4, dtype=torch.long)
    made["labels"] = ids.masked_fill(ids >= FIRST_MEDIA_ID, -100)
    if kind == "text" and getattr(config, "num_codebooks", None):  # tokens of sounds beside each token of text
        made["input_ids"] = torch.stack([ids] * (config.num_codebooks + 1), -1)
    return made


def compute(model: PreTrainedModel, inputs: Mapping[str, Any]) -> torch.Tensor:
    """Returns the logits of a model; raises an error if there are none, or if they are not finite.

    Args:
        model: A float32 model.
        inputs: The inputs, with labels.
    """
    output = model(**inputs)
    if getattr(output, "logits", None) is None:
        raise ValueError("forward returns no logits")
    if not torch.isfinite(output.logits).all():
        raise ValueError("the logits are not finite")
    return output.logits


def find_inputs(model: PreTrainedModel, batch: int = 2, seed: int = 0) -> tuple[str, Inputs]:
    """Finds inputs with which a model computes logits that depend on an image or a sound.

    Args:
        model: A float32 model in evaluation mode.
        batch: Number of rows.
        seed: Seed of the values.

    Returns:
        `"image"` or `"sound"`, and the inputs with labels.

    Raises:
        ValueError: If none of the forms works, with the most common error.
    """
    torch.manual_seed(seed)
    errors: list[str] = []
    for kind, forms in (("image", image_forms), ("sound", sound_forms)):
        for media in forms(model, batch):
            counts: list[int] = []
            try:
                total = feature_count(model, kind, media)
                counts = [total // batch] if total else []
            except Exception as error:  # the form does not fit
                errors.append(f"{shapes(media)}: {type(error).__name__}: {first_line(error)}")
                continue
            if "image_embeds_position_mask" in forward_names(model):
                counts = [value_of(model.config, "latent_query_num")]
            if not counts:
                counts = [0] if media_tokens(model.config, kind)[1] is None else list(GUESSES)
            while counts:
                count = counts.pop(0)
                try:
                    inputs = with_text(model, kind, media, count, batch)
                    compute(model, inputs)
                    if not depends_on_media(model, inputs, media):
                        raise ValueError("the logits do not depend on the media")
                    return kind, inputs
                except Exception as error:
                    errors.append(f"{shapes(media)}, {count}: {type(error).__name__}: {first_line(error)}")
                    match = _COUNTS.search(str(error))
                    found = int(match[1] or match[2]) if match else 0
                    if found % batch == 0 and found // batch not in (0, count) and count in GUESSES:
                        counts = [found // batch]
    if not errors:  # neither an image nor a sound is an argument of `forward`
        inputs = with_text(model, "text", {}, 0, batch)
        compute(model, inputs)
        return "text", inputs
    (common, number), *_ = Counter(error.partition(": ")[2] for error in errors).most_common(1)
    raise ValueError(f"none of {len(errors)} forms of inputs works; {number} times {common}")


def depends_on_media(model: PreTrainedModel, inputs: Inputs, media: Inputs) -> bool:
    """Whether the logits change with the image or sound."""
    key = next(name for name, value in media.items() if isinstance(value, torch.Tensor) and value.is_floating_point())
    with torch.no_grad():
        one = model(**inputs).logits
        other = model(**{**inputs, key: inputs[key] * 0.5 + 0.1}).logits
    return not torch.equal(one, other)


def shapes(inputs: Inputs) -> str:
    """Names of inputs with their shapes."""
    return " ".join(f"{name}{list(v.shape) if isinstance(v, torch.Tensor) else v}" for name, v in inputs.items())


def first_line(error: Exception) -> str:
    """The first line of an error."""
    return (str(error).strip().splitlines() or [""])[0][:160]
