"""Images in a vLLM engine: where they belong in a prompt, which features are cached, and the names of their weights.

TRL tokenises prompts with the processor, which gives each image as many image tokens as it has features, and sends the
token ids. vLLM replaces the image tokens again, so that it computes another prompt: longer, or with features in the
wrong places. vLLM can also find the places of images in token ids that are already complete; a colocated engine is
made to do that. A server gets places and features from TRL, and replaces nothing.
"""

import dataclasses
import importlib.util
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from torch import nn

from ..core.errors import PrecisionError, Problem, refuse
from ..core.patches import replace
from ..model.parts import find_parts, unwrap


METHOD = "_maybe_apply_prompt_updates"
_USED = ("_find_mm_placeholders", "_validate_mm_kwargs", "_validate_mm_updates")
LOAD_FORMAT = "safe_trainers"
"""The name under which vLLM knows the loader of `name_loader`."""
INNER = "vision_model"
"""The only child of a SigLIP or CLIP tower in vLLM. transformers dropped it from the names of weights in release 5."""
SMALLEST_BIAS = -100.0
"""The smallest `logit_bias` of vLLM."""
MARKERS = ("image_token_id", "image_token_index", "video_token_id", "video_token_index", "audio_token_id")
"""Entries of a model's config that hold the token id which stands for one feature."""


# ---- Places of images in a prompt -----------------------------------------------------------------------------------


def keep_image_tokens(llm: Any) -> Problem | None:
    """Makes an engine find the places of images in the token ids that it is sent, and change none of them.

    Args:
        llm: A `vllm.LLM` in this process.

    Returns:
        The refusal of prompts with images, if the installed vLLM prepares them in an unknown way; `None` if the engine
        was changed, or does not accept images.
    """
    engine = getattr(llm, "llm_engine", None)
    if not getattr(getattr(engine, "model_config", None), "is_multimodal_model", False):
        return None
    processor = getattr(getattr(engine, "renderer", None), "mm_processor", None)
    function = getattr(getattr(processor, METHOD, None), "__func__", None)
    if not _is_known(processor, function):
        return refuse("vllm-prepares-prompts-otherwise", "prompts with images and use_vllm=True", method=METHOD)
    if function.__module__.startswith("vllm.multimodal."):  # a family may override it, and then finds places itself
        replace("image-places", processor, METHOD, partial(find_places, processor))
    return None


def _is_known(processor: Any, function: Any) -> bool:
    code = getattr(function, "__code__", None)
    known = code is not None and code.co_varnames[: code.co_argcount] == ("self", "mm_items", "mm_res")
    return known and all(callable(getattr(processor, name, None)) for name in _USED)


def find_places(processor: Any, mm_items: Any, mm_res: Any) -> tuple[list[int], Any]:
    """Finds where the features of images belong in a prompt whose image tokens are complete.

    Args:
        processor: vLLM's processor of the family.
        mm_items: The images of the prompt.
        mm_res: What vLLM prepared: `prompt_ids`, `prompt_updates` and `kwargs`.

    Returns:
        The same token ids, and the places by modality.

    Raises:
        PrecisionError: If an image has no complete run of image tokens, or an image token belongs to no image.
    """
    counts = mm_items.get_all_counts()
    processor._validate_mm_kwargs(mm_res.kwargs, counts)
    processor._validate_mm_updates(mm_res.prompt_updates, counts)
    ids = list(map(int, mm_res.prompt_ids))  # some processors return tensors
    places = processor._find_mm_placeholders(ids, mm_res.prompt_updates)
    for modality, count in counts.items():
        found = places.get(modality, [])
        features = {
            token
            for place in found
            for token, is_feature in zip(place.tokens, _feature_mask(place), strict=True)
            if is_feature
        }
        inside = {at for place in found for at in range(place.start_idx, place.start_idx + place.length)}
        outside = [at for at, token in enumerate(ids) if token in features and at not in inside]
        if len(found) != count or outside:
            given = f"a prompt of {len(ids)} token ids with {count} {modality}{'' if count == 1 else 's'}"
            where = f", and {len(outside)} {modality} tokens outside of them" if outside else ""
            raise PrecisionError([refuse("vllm-finds-no-place", given, found=len(found), count=count, where=where)])
    return ids, places


def _feature_mask(place: Any) -> Sequence[bool]:
    """Which tokens of a place stand for a feature; all of them if the place has no mask."""
    return [True] * place.length if place.is_embed is None else place.is_embed.tolist()


def forbid_markers(generation: Any) -> None:
    """Gives the tokens that stand for features no chance to be sampled.

    Scoring needs as many of these tokens as there are features, so a sampled one ends the run. vLLM does not read
    `suppress_tokens` of a generation config.

    Args:
        generation: TRL's `VLLMGeneration`; its `generation_kwargs` are replaced.
    """
    biases = dict.fromkeys(marker_ids(generation.model), SMALLEST_BIAS)
    if biases and hasattr(generation, "generation_kwargs"):
        kwargs = dict(generation.generation_kwargs or {})
        generation.generation_kwargs = kwargs | {"logit_bias": biases | dict(kwargs.get("logit_bias") or {})}


def marker_ids(model: nn.Module) -> tuple[int, ...]:
    """The token ids that stand for a feature of an image, a video or audio.

    Args:
        model: The policy model, wrapped or not.
    """
    config: Any = getattr(unwrap(model), "config", None)
    found = (getattr(config, name, None) for name in MARKERS)
    return tuple(sorted({token for token in found if isinstance(token, int) and token >= 0}))


# ---- Features in the engine's cache ---------------------------------------------------------------------------------


def trains_features(model: nn.Module) -> bool:
    """Whether weights of a tower or a projector are trained.

    Args:
        model: The policy model, wrapped or not.
    """
    return any(p.requires_grad for tower in find_parts(model).towers.values() for p in tower.parameters())


def forget_features(generation: Any) -> None:
    """Clears the features of images that an engine computed with the weights before a sync.

    vLLM caches the outputs of towers by image. TRL resets only the cache of prefixes.

    Args:
        generation: TRL's `VLLMGeneration`.

    Raises:
        PrecisionError: If the engine has no such method, or the server no such endpoint.
    """
    client = getattr(generation, "vllm_client", None)
    if getattr(generation, "llm", None) is not None:
        reset = getattr(getattr(generation.llm, "llm_engine", None), "reset_encoder_cache", None)
        if reset is None:
            raise PrecisionError([refuse("vllm-keeps-image-features", "a tower that trains, with use_vllm=True")])
        reset()
    elif client is not None and generation.accelerator.is_main_process:
        answer = client.session.post(f"{client.base_url}/reset_encoder_cache")
        if answer.status_code != 200:
            given = f"a tower that trains, with a vLLM server at {client.base_url}"
            raise PrecisionError([refuse("vllm-keeps-image-features", given)])


# ---- Names of weights -----------------------------------------------------------------------------------------------


def drops_inner_name(model: Any) -> bool:
    """Whether a model has a vision tower whose weights lack the name that SigLIP and CLIP towers have in vLLM.

    Args:
        model: The policy model; `None` if it is not loaded.
    """
    if not isinstance(model, nn.Module):
        return False
    towers = (module for name, module in unwrap(model).named_modules() if name.rpartition(".")[2] == "vision_tower")
    return any(hasattr(tower, "embeddings") and not hasattr(tower, INNER) for tower in towers)


def name_loader() -> str | None:
    """Registers a loader that names weights as vLLM's model does, in checkpoints and in each weight sync.

    Returns:
        The load format to build an engine with; `None` if the installed vLLM has no registry of loaders.
    """
    if importlib.util.find_spec("vllm") is None or importlib.util.find_spec("vllm.model_executor") is None:
        return None
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    class NamingLoader(DefaultModelLoader):
        """vLLM's default loader, for models whose weights have other names in transformers."""

        def __init__(self, load_config: Any) -> None:
            super().__init__(dataclasses.replace(load_config, load_format="auto"))

        def load_weights(self, model: nn.Module, model_config: Any) -> None:
            accept_names(model)
            super().load_weights(model, model_config)

    register_model_loader(LOAD_FORMAT)(NamingLoader)
    return LOAD_FORMAT


def accept_names(model: nn.Module) -> None:
    """Makes a model of vLLM load weights under the names of transformers too.

    Args:
        model: A model of vLLM with `load_weights`.
    """
    wrapped = {
        name.rpartition(".")[0].rpartition(".")[2]
        for name, module in model.named_modules()
        if name.rpartition(".")[2] == INNER and len(list(model.get_submodule(name.rpartition(".")[0]).children())) == 1
    } - {""}
    if not wrapped:
        return
    towers = "|".join(map(re.escape, sorted(wrapped)))
    missing = re.compile(rf"((?:^|\.)(?:{towers})\.)(?!{INNER}\.)")
    original: Any = model.load_weights

    def named(weights: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        for name, weight in weights:
            yield missing.sub(rf"\g<1>{INNER}.", name, count=1), weight

    replace("weight-names", model, "load_weights", lambda weights, *a, **k: original(named(weights), *a, **k))


def engine_kwargs(arguments: Mapping[str, Any], model: Any) -> dict[str, Any]:
    """Completes the arguments with which TRL builds an engine of an image model; arguments that TRL passes are kept.

    Args:
        arguments: Keyword arguments for `vllm.LLM`.
        model: The policy model; `None` if it is not loaded.
    """
    load_format = name_loader() if "load_format" not in arguments and drops_inner_name(model) else None
    return dict(arguments) | ({} if load_format is None else {"load_format": load_format})
