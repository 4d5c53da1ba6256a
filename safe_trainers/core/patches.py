"""Every attribute of an upstream object that this package replaces, and the only functions that replace one.

`patched` replaces attributes while a block runs, and restores them when it ends. `replace` replaces a method of one
instance (a module of the user's model, the trainer's own vLLM generation) as long as the instance lives, or until
`restore` restores what it replaced. Classes are never changed, and modules only with `patched`.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MethodType
from typing import Any


@dataclass(frozen=True)
class Patch:
    """Attributes that are replaced.

    Attributes:
        owner: The object that is changed.
        names: The attributes.
        lasts: How long they are replaced.
        why: Why no public interface does the same.
    """

    owner: str
    names: tuple[str, ...]
    lasts: str
    why: str


CONSTRUCTION, LIFETIME, BLOCK = "construction of the trainer", "lifetime of the object", "one block"
TRAINING = "a call of `train`"

PATCHES: Mapping[str, Patch] = {
    "peft-maker": Patch(
        "modules of TRL", ("get_peft_model",), CONSTRUCTION,
        "TRL casts the adapters of quantised models right after it creates them, with no hook in between",
    ),
    "given-adapter": Patch(
        "the model that was passed", ("add_adapter",), CONSTRUCTION,
        "TRL adds a reference adapter to it; PEFT may leave that adapter trainable, and TRL then casts it",
    ),
    "fused-head": Patch(
        "modules of TRL", ("add_fused_lm_head",), CONSTRUCTION,
        "the fused head multiplies with the head's weight and never calls the head; an argument selects float32",
    ),
    "chunked-head": Patch(
        "modules of TRL", ("_patch_chunked_ce_lm_head",), CONSTRUCTION,
        "some releases use it instead of the fused head; it has no argument for float32",
    ),
    "vllm-engine": Patch(
        "modules of TRL", ("LLM",), CONSTRUCTION, "TRL passes no dtype to the engine, and may quantise its weights",
    ),
    "model-preparation": Patch(
        "the trainer's accelerator", ("prepare_model",), LIFETIME,
        "accelerate leaves a model as another accelerator has prepared it, with the autocast of that one",
    ),
    "weight-sync": Patch(
        "the trainer's VLLMGeneration", ("sync_weights",), LIFETIME,
        "TRL merges adapters into the base in place, and does not support kernels that pack weights",
    ),
    "prompt-check": Patch(
        "the trainer's VLLMGeneration", ("generate",), LIFETIME,
        "TRL discards the prompt ids that vLLM returns",
    ),
    "gradient-norm": Patch(
        "the trainer's accelerator", ("clip_grad_norm_",), LIFETIME,
        "transformers passes the gradient norm to no hook before the optimizer's step",
    ),
    "replayed-loss": Patch(
        "the trainer's accelerator", ("gather", "gather_for_metrics", "pad_across_processes", "reduce"), BLOCK,
        "TRL gathers metrics of all ranks in a loss; one that is computed again may fail on one rank alone",
    ),
    "replayed-model": Patch(
        "the wrapped model (DDP)", ("forward",), BLOCK,
        "DDP's forward pass waits for all ranks, and one of them alone may compute a loss again",
    ),
    "native-adapter": Patch(
        "the engine", ("generate",), LIFETIME, "TRL passes no adapter to the engine",
    ),
    "returned-experts": Patch(
        "the engine", ("generate",), LIFETIME, "TRL discards the experts that vLLM returns with its completions",
    ),
    "image-places": Patch(
        "the engine's multimodal processor", ("_maybe_apply_prompt_updates",), LIFETIME,
        "vLLM replaces image tokens of prompts in which they are already complete, and no switch turns that off",
    ),
    "weight-names": Patch(
        "the engine's model", ("load_weights",), LIFETIME,
        "the weights of SigLIP and CLIP towers have other names in transformers 5 than in vLLM",
    ),
    "input-gradients": Patch(
        "the policy model", ("enable_input_require_grads",), LIFETIME,
        "TRL enables gradient checkpointing again after each rollout, and transformers adds hooks to those of before",
    ),
    "redirected-loss": Patch(
        "the trainer", ("_forward_redirection",), LIFETIME,
        "TRL redirects a loss through the model by replacing the forward pass that accelerate runs under autocast",
    ),
    "merged-view": Patch(
        "the PEFT model", ("merge_adapter", "unmerge_adapter", "parameters", "named_parameters"), BLOCK,
        "TRL's weight sync reads merged weights from the model; they are merged outside of it instead",
    ),
    "saved-virtual-tokens": Patch(
        "peft.peft_model", ("get_peft_model_state_dict",), BLOCK,
        "PEFT saves virtual tokens as the prompt encoder computes them, and not the weights that it is passed",
    ),
    "cast-of-all": Patch(
        "modules of the model", ("_apply",), BLOCK,
        "continuous batching and evaluations cast the model in place; some buffers and modules must not be cast",
    ),
    "float32-module": Patch(
        "modules in fp32_modules", ("forward", "_old_forward"), LIFETIME,
        "inputs must be cast, and autocast disabled, around the whole method",
    ),
    "float32-head": Patch(
        "TRL's cast_lm_head_to_fp32 head", ("forward",), LIFETIME, "autocast would round its matrix products again",
    ),
    "shared-features": Patch(
        "modules around the text model", ("get_image_features", "get_video_features", "get_audio_features"), LIFETIME,
        "equal images of a batch are computed once, and methods have no hooks",
    ),
    "frozen-towers": Patch(
        "modules around the text model", ("get_image_features", "get_video_features", "get_audio_features"), LIFETIME,
        "transformers lets embeddings of frozen towers require gradients, and methods have no hooks",
    ),
    "features": Patch(
        "modules around the text model", ("get_image_features", "get_video_features", "get_audio_features"), LIFETIME,
        "their outputs must be cast to the dtype of the embeddings, and methods have no hooks",
    ),
    "operations": Patch(
        "modules that contain operations between two dtypes", ("forward",), LIFETIME,
        "operations between layers have no hooks, and PEFT calls `forward` of the base model past its hooks",
    ),
    "lora-inputs": Patch(
        "PEFT's LoRA layers", ("_cast_input_dtype",), TRAINING,
        "the switch of PEFT leaves the cast out of forward passes without autocast too, which need it",
    ),
    "kept-weights": Patch(
        "4-bit layers of the model", ("forward",), BLOCK,
        "bitsandbytes dequantises their weights in each forward pass, and has no place to keep them",
    ),
    "rollout-cache": Patch(
        "the key-value cache of `generate`", ("update",), BLOCK,
        "each token copies the whole cache, and under autocast one of two dtypes is cast again; a cache has no hooks",
    ),
    "compiled-generate": Patch(
        "the policy model", ("generate",), BLOCK,
        "some releases of TRL pass `disable_compile` to each call, which wins over the generation config",
    ),
    "recorded-generate": Patch(
        "the policy model", ("generate",), BLOCK,
        "each call is to record log-probabilities, and the inputs of user code are not to be changed",
    ),
    "watched-generate": Patch(
        "the policy model", ("generate",), BLOCK,
        "`generate` may encode images before it calls the model, so that hooks do not see whose images they are",
    ),
    "cpu-packing": Patch(
        "4-bit layers of the model", ("support_avx512bf16_for_cpu",), LIFETIME,
        "bitsandbytes packs a layer in another order when it is evaluated on some CPUs, and then gives it no gradient",
    ),
    "prompt-reference": Patch(
        "the policy model, and the forward pass of its base", ("disable_adapter", "forward"), LIFETIME,
        "to disable virtual tokens, PEFT replaces the forward pass that accelerate runs under autocast",
    ),
    "dora-norm": Patch(
        "DoRA layers of the policy model", ("get_weight_norm",), BLOCK,
        "only a forward pass shows in which dtype PEFT computes the norms of weights, and methods have no hooks",
    ),
    "fsdp2-forward": Patch(
        "the policy model", ("forward", "_original_forward"), LIFETIME,
        "accelerate runs the forward pass under autocast, except with FSDP2",
    ),
}  # fmt: skip
"""Every patch of the package, by id."""


@contextlib.contextmanager
def patched(patch: str, owner: Any, **values: Any) -> Iterator[None]:
    """Replaces attributes of an object while the block runs.

    Args:
        patch: Key in `PATCHES`.
        owner: A module or an instance.
        **values: The new value of each attribute.
    """
    attributes = vars(owner)
    before = {name: attributes[name] for name in values if name in attributes}
    try:
        for name, value in values.items():
            _check(patch, name)
            attributes[name] = value
        yield
    finally:
        for name in values:
            attributes.pop(name, None)
        attributes.update(before)


def replace(patch: str, owner: Any, name: str, value: Any) -> None:
    """Replaces an attribute of an instance, and records what it replaces for `restore`.

    Args:
        patch: Key in `PATCHES`.
        owner: The instance.
        name: The attribute.
        value: Its new value.

    Raises:
        KeyError: If `PATCHES` has no such patch, or the patch does not list the attribute.
    """
    _check(patch, name)
    attributes = vars(owner)
    records = attributes.setdefault(_RECORDS, {})
    before = attributes.get(name, _ABSENT)
    records[name] = [_Record(patch, value, before), *_chain(owner, name, before)]
    attributes[name] = value


def has_replacements(owner: Any) -> bool:
    """Whether `replace` has replaced anything of an instance that was not restored."""
    return _RECORDS in vars(owner)


def replaced_by(owner: Any, name: str, kept_as: str | None = None) -> list[str]:
    """Returns the ids of the patches that replace an attribute of an instance, the last one first.

    Args:
        owner: The instance, or a `deepcopy` of it.
        name: The attribute.
        kept_as: The attribute that holds the replaced value if something else has replaced it since and kept it.
    """
    return [record.patch for record in _chain(owner, name, vars(owner).get(kept_as or name, _ABSENT))]


def restore(owner: Any, name: str, kept_as: str | None = None) -> bool:
    """Restores what `replace` has replaced, unless something else has replaced the attribute since.

    Args:
        owner: The instance, or a `deepcopy` of it.
        name: The attribute.
        kept_as: As in `replaced_by`.

    Returns:
        Whether the attribute had been replaced.
    """
    attributes, holder = vars(owner), kept_as or name
    chain = _chain(owner, name, attributes.get(holder, _ABSENT))
    if not chain:
        return False
    records = attributes[_RECORDS]
    del records[name]
    if not records:
        del attributes[_RECORDS]
    before = chain[-1].before
    if before is not _ABSENT:
        attributes[holder] = before
    elif kept_as is None:
        del attributes[holder]
    else:  # what keeps it calls it
        attributes[holder] = MethodType(getattr(type(owner), name), owner)
    return True


def keep(owner: Any, *names: str) -> Callable[[], None]:
    """Returns a function that restores attributes of an instance to what they are now, with their replacements.

    Args:
        owner: The instance.
        *names: The attributes. The instance need not have them.
    """
    attributes = vars(owner)
    held = {name: attributes[name] for name in names if name in attributes}
    if _RECORDS in attributes:
        held[_RECORDS] = dict(attributes[_RECORDS])

    def put_back() -> None:
        for name in (*names, _RECORDS):
            attributes.pop(name, None)
        attributes.update(held)

    return put_back


_RECORDS = "_safe_trainers_replaced"
"""Attribute of an instance with the records of what was replaced, by name, the last one first."""


class _Absent:
    """Stands for an attribute that an instance did not have; copies are the same object."""

    def __reduce__(self) -> str:
        return "_ABSENT"


_ABSENT = _Absent()


@dataclass(frozen=True)
class _Record:
    """One replacement.

    Attributes:
        patch: Key in `PATCHES`.
        value: The new value.
        before: The value before, or `_ABSENT`.
    """

    patch: str
    value: Any
    before: Any


def _check(patch: str, name: str) -> None:
    """Raises `KeyError` if `PATCHES` does not list an attribute."""
    if name not in PATCHES[patch].names:
        raise KeyError(f"the patch {patch!r} does not list {name!r}")


def _chain(owner: Any, name: str, value: Any) -> list[_Record]:
    """Returns the records that lead from a value of an attribute to what it was before all of them."""
    found = []
    for record in vars(owner).get(_RECORDS, {}).get(name, ()):
        if record.value is value or (isinstance(value, MethodType) and record.value == value):
            found.append(record)
            value = record.before
    return found
