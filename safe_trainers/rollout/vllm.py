"""vLLM: arguments of an engine, checks of a server, and refusals of models that vLLM cannot sample from."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any

import torch
from packaging.version import Version
from torch import nn
from transformers import AutoConfig, PretrainedConfig

from ..core.device import Device
from ..core.dtypes import FLOAT16, FLOAT32, HALVES, KBIT, SHORT, parse_dtype
from ..core.errors import PrecisionError, Problem, refuse, warn
from ..model.inventory import ModelInventory, declared_method, quantization_method
from ..model.parts import unwrap
from ..policy.resolve import PrecisionPolicy
from ..weights.bitsandbytes import compute_of


FLOAT16_REFUSED = frozenset({"gemma2", "gemma3", "gemma3_text", "glm4"})
"""Model types that vLLM does not run in float16, because their activations overflow: `_FLOAT16_NOT_SUPPORTED_MODELS`
in vllm/config/model.py."""
CASCADE_ATTENTION_FIXED = Version("0.11.0")
"""Older releases may compute shared prompts wrongly on GPUs other than Hopper (vLLM issue 22103, fixed by its pull
request 25537). Later releases turn cascade attention off by default (pull request 36318)."""
PACKED = "bitsandbytes"
SHAPE = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
"""Entries of a text model's config that decide the shapes of its weights."""


def sampler_dtype(policy: PrecisionPolicy, inventory: ModelInventory) -> str:
    """Returns the dtype in which a separate sampler must compute to match the trainer.

    Args:
        policy: The policy of the run.
        inventory: The inventory of the model.

    Returns:
        `"float32"`, `"bfloat16"` or `"float16"`: the run's compute dtype. If weights of several dtypes compute without
        autocast, the dtype of most of the weights.
    """
    if len(policy.compute.value) == 1:
        return next(iter(policy.compute.value))
    weights = {dtype: count for dtype, count in inventory.elements["weights"].items() if dtype in SHORT}
    if inventory.quantization is not None or not weights:
        return compute_of(policy.autocast.value, weights)
    return max(weights, key=lambda dtype: weights[dtype])


def rejects_float16(model: nn.Module) -> bool:
    """Whether vLLM does not run this model in float16."""
    return getattr(getattr(unwrap(model), "config", None), "model_type", None) in FLOAT16_REFUSED


def refusals(model: nn.Module, dtype: str | None, colocated: bool, fsdp: bool = False) -> Iterator[Problem]:
    """Refuses models that vLLM cannot sample from, before an engine is built.

    Args:
        model: The policy model.
        dtype: The dtype to sample in; `None` to keep TRL's.
        colocated: Whether this process builds the engine, from the model's own checkpoint.
        fsdp: Whether FSDP shards the model, in which case TRL gathers and merges its layers with its own code.

    Yields:
        The refusals.
    """
    base: Any = unwrap(model)
    if dtype == FLOAT16 and rejects_float16(base):
        kind = base.config.model_type
        yield refuse("vllm-refuses-fp16", f"a {kind} model in float16 with use_vllm=True", kind=kind)
    method = quantization_method(base)
    packed = method in KBIT
    other = None if packed else method or declared_method(base)
    if fsdp and (packed or other):
        yield refuse(
            "fsdp-sends-packed-weights", f"a model quantised to {method or other} under FSDP with use_vllm=True"
        )
    elif other is not None and not hasattr(model, "peft_config"):  # adapters of such a model cannot be merged
        given = f"a model quantised by {other} with use_vllm=True"
        yield refuse("vllm-holds-packed-weights", given, fix="`use_vllm=False`, or a base that is not quantised")
    prequantised = getattr(getattr(base, "hf_quantizer", None), "pre_quantized", False)
    if colocated and prequantised and packed:
        given = f"a checkpoint that bitsandbytes packed, {base.config._name_or_path!r}, with use_vllm=True"
        yield refuse("vllm-holds-packed-weights", given, fix="the unquantised checkpoint, with `quantization_config`")
    stored = _stored_quantization(base) if colocated and method is None and not prequantised else None
    if stored is not None:
        given = f"a model dequantised from {base.config._name_or_path!r}, a checkpoint of {stored}, with use_vllm=True"
        fix = "save it with `model.save_pretrained(folder)`, and pass the folder as `model`"
        yield refuse("vllm-holds-packed-weights", given, fix=fix)


def _stored_quantization(base: Any) -> str | None:
    """Returns the quantiser of the checkpoint that a model was loaded from, and from which vLLM loads its weights."""
    name = getattr(getattr(base, "config", None), "_name_or_path", "")
    if not name:
        return None
    try:
        stored = PretrainedConfig.get_config_dict(name, local_files_only=True)[0]
    except (OSError, ValueError):  # the engine cannot load such a checkpoint, and raises its own error
        return None
    quantization = stored.get("quantization_config")
    return None if not quantization else str(quantization.get("quant_method", "an unknown quantiser"))


def engine_kwargs(
    arguments: Mapping[str, Any], dtype: str | None, device: Device, version: str | None, float32_head: bool = False
) -> dict[str, Any]:
    """Completes the arguments with which TRL builds an engine; arguments that TRL passes are kept.

    Args:
        arguments: TRL's keyword arguments for `vllm.LLM`.
        dtype: The dtype to sample in; `None` to keep TRL's.
        device: The device of the run.
        version: The installed vLLM's version; `None` if unknown.
        float32_head: Whether the trainer's output head computes in float32.

    Returns:
        New keyword arguments: with `dtype`; without bitsandbytes quantisation, since the weights that are synced are
        not quantised; with the output head in float32 if the trainer's is; and with cascade attention disabled where
        it may compute wrongly.
    """
    complete = ({} if dtype is None else {"dtype": dtype}) | dict(arguments)
    if complete.get("quantization") == PACKED:
        complete["quantization"] = None
    overrides = complete.get("hf_overrides") or {}
    if float32_head and dtype in HALVES and isinstance(overrides, Mapping):  # it may be a function
        complete["hf_overrides"] = {"head_dtype": FLOAT32, **overrides}
    if cascade_attention_is_wrong(device, version):
        complete.setdefault("disable_cascade_attn", True)
    return complete


def cascade_attention_is_wrong(device: Device, version: str | None) -> bool:
    """Whether cascade attention of this vLLM version may compute wrongly on a device."""
    old = version is not None and Version(version) < CASCADE_ATTENTION_FIXED
    return old and device.capability is not None and device.capability[0] != 9  # 9 is Hopper


def has_float32_head(generation: Any) -> bool:
    """Whether the output head of vLLM computes in float32; `False` if that is unknown.

    Args:
        generation: TRL's `VLLMGeneration`, of the process that has the engine or the client of the server.
    """
    llm = getattr(generation, "llm", None)
    if llm is None:
        overrides = _server_info(generation.vllm_client).get("model_config", {}).get("hf_overrides")
        return isinstance(overrides, Mapping) and overrides.get("head_dtype") == FLOAT32
    kinds = [getattr(layer, "head_dtype", None) for layer in model_of(llm).modules() if hasattr(layer, "head_dtype")]
    return bool(kinds) and all(kind == torch.float32 for kind in kinds)


def _server_info(client: Any) -> dict[str, Any]:
    info = client.get_server_info() if hasattr(client, "get_server_info") else None
    return info or {}


def model_of(llm: Any) -> Any:
    """The model of an engine.

    Args:
        llm: A `vllm.LLM` in this process.
    """
    return llm.llm_engine.model_executor.driver_worker.model_runner.model


def check_server(client: Any, dtype: str) -> Problem | None:
    """Compares the dtypes of a vLLM server with the trainer's.

    Args:
        client: TRL's client of the server.
        dtype: The trainer's compute dtype.

    Returns:
        A warning if the client cannot query the server's dtype, as in older releases of TRL.

    Raises:
        PrecisionError: If the server computes in another dtype, or has quantised weights or a quantised KV cache.
    """
    info = _server_info(client)
    model, cache = info.get("model_config") or {}, info.get("cache_config") or {}
    served = parse_dtype(str(model["dtype"]), field="the server's dtype") if model.get("dtype") else None
    problems = []
    if served is not None and served != dtype:
        given = f"a vLLM server that computes in {served}"
        problems.append(refuse("vllm-server-computes-otherwise", given, served=served, dtype=dtype))
    if model.get("quantization") is not None:
        fix = "start it without `--quantization`, from an unquantised checkpoint"
        given = f"a vLLM server with weights quantised by {model['quantization']}"
        problems.append(refuse("vllm-holds-packed-weights", given, fix=fix))
    stored = cache.get("cache_dtype")
    if stored is not None and str(stored) not in ("auto", served or dtype):
        given = f"a vLLM server with a KV cache in {stored}"
        problems.append(refuse("vllm-quantises-its-cache", given, stored=stored, dtype=dtype))
    if problems:
        raise PrecisionError(problems)
    return None if served else warn("vllm-server-not-asked", "vllm_mode='server'", dtype=dtype)


def check_served_model(client: Any, model: nn.Module) -> Problem | None:
    """Compares the model of a vLLM server with the trainer's, whose weights the server will load.

    Args:
        client: TRL's client of the server.
        model: The policy model, wrapped or not.

    Returns:
        A warning if the names differ, and the config of the server's model is not on this machine.

    Raises:
        PrecisionError: If the configs have another architecture, vocabulary or size.
    """
    config: Any = getattr(unwrap(model), "config", None)
    served, own = _server_info(client).get("model_config", {}).get("model"), getattr(config, "_name_or_path", "")
    if not served or not own or served == own:
        return None
    given = f"a vLLM server of {served!r}"
    try:
        other = AutoConfig.from_pretrained(served, local_files_only=True)
    except (OSError, ValueError):  # not on this machine, or a class of the server's own code
        same = PurePath(served).name == PurePath(own).name
        return None if same else warn("vllm-server-of-unknown-model", given, served=served, own=own)
    pairs = {"model_type": (other.model_type, config.model_type)}
    text, own_text = other.get_text_config(), config.get_text_config()
    pairs |= {name: (getattr(text, name, None), getattr(own_text, name, None)) for name in SHAPE}
    for name, (theirs, ours) in pairs.items():
        if theirs != ours:
            problem = refuse("vllm-serves-another-model", given, name=name, theirs=theirs, ours=ours, own=own)
            raise PrecisionError([problem])
    return None


@contextlib.contextmanager
def weights_reloaded(generation: Any) -> Iterator[None]:
    """Makes the parameters of a colocated CPU engine loadable while the block runs, and packs them again.

    vLLM's CPU kernels replace a layer's weight by a packed copy and an empty parameter, which cannot be loaded into.
    vLLM's layerwise reload restores the parameters, and packs each layer once it is loaded.

    Args:
        generation: TRL's `VLLMGeneration`.
    """
    llm = getattr(generation, "llm", None)
    if llm is None:  # a server packs its own weights
        yield
        return
    model = model_of(llm)
    if not isinstance(model, nn.Module) or all(parameter.numel() for parameter in model.parameters()):
        yield
        return
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    initialize_layerwise_reload(model)
    yield
    finalize_layerwise_reload(model, llm.llm_engine.model_config)


def check_prompts(
    sent: Sequence[Sequence[int]], computed: Sequence[Sequence[int]], images: Sequence[Sequence[Any] | None] | None
) -> None:
    """Compares the prompts that vLLM reports it computed with the prompts that were sent.

    Args:
        sent: Token ids of each prompt, as the trainer scores them.
        computed: Token ids of each prompt that vLLM returned.
        images: The images of each prompt; `None` without images.

    Raises:
        PrecisionError: If a prompt differs, with the first differing position.
    """
    if len(sent) != len(computed):
        difference = f"{len(sent)} prompts were sent and {len(computed)} were returned"
        raise PrecisionError([_another_prompt("prompts for vLLM", difference)])
    for row, (own, other) in enumerate(zip(sent, computed, strict=True)):
        if list(own) == list(other):
            continue
        pairs = zip(own, other, strict=False)  # one may be a prefix of the other
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(own), len(other)))
        count = len((images[row] if images is not None else None) or ())
        difference = (
            f"from position {at} on, {len(own)} token ids were sent (... {list(own[at : at + 4])} ...) and "
            f"{len(other)} were computed (... {list(other[at : at + 4])} ...)"
        )
        given = f"prompt {row} with {count} image{'' if count == 1 else 's'}"
        cause = "" if not count else " vLLM expanded image tokens that the processor had already expanded."
        raise PrecisionError([_another_prompt(given, difference, cause)])


def _another_prompt(given: str, difference: str, cause: str = "") -> Problem:
    return refuse("vllm-computed-another-prompt", given, difference=difference, cause=cause)
