"""What a vLLM engine is told, what a server is asked, and what neither can do."""

from collections.abc import Iterator, Mapping
from importlib import metadata
from typing import Any

from packaging.version import Version
from torch import nn

from .census import Census, quantization_method
from .device import Device
from .dtypes import FLOAT16, SHORT, parse_dtype
from .errors import PrecisionError, Problem, refuse, warn
from .policy import PrecisionPolicy
from .quantization import compute_of
from .towers import unwrap


FLOAT16_REFUSED = frozenset({"gemma2", "gemma3", "gemma3_text", "plamo2", "glm4"})
"""Model types that vLLM does not run in float16, for their numbers overflow: `_FLOAT16_NOT_SUPPORTED_MODELS` in its
vllm/config/model.py."""
CASCADE_ATTENTION_MENDED = Version("0.11.0")
"""Older engines may compute shared prompts wrongly on GPUs other than Hopper: vLLM issue 22103, mended by its pull
request 25537. Later ones leave cascade attention off by themselves (pull request 36318)."""
PACKED = "bitsandbytes"


def sampler_dtype(policy: PrecisionPolicy, census: Census) -> str:
    """The dtype that a sampler has to compute in to do as the trainer does.

    Args:
        policy: The policy of the run.
        census: What its model holds.

    Returns:
        `"float32"`, `"bfloat16"` or `"float16"`: the compute dtype; where weights of several dtypes meet without
        autocast, that of most of them.
    """
    if policy.compute.value in SHORT:
        return policy.compute.value
    weights = {dtype: count for dtype, count in census.elements["weights"].items() if dtype in SHORT}
    if census.quantization is not None or not weights:
        return compute_of(policy.autocast.value, weights)
    return max(weights, key=lambda dtype: weights[dtype])


def refuses_float16(model: nn.Module) -> bool:
    """Whether vLLM does not run a model in float16.

    Args:
        model: The model, wrapped or not.
    """
    return getattr(getattr(unwrap(model), "config", None), "model_type", None) in FLOAT16_REFUSED


def refused(model: nn.Module, dtype: str | None, colocated: bool, fsdp: bool = False) -> Iterator[Problem]:
    """What vLLM could not sample from, known before an engine is built.

    Args:
        model: The policy model.
        dtype: The dtype that it would sample in; `None` where that is left to upstream.
        colocated: Whether the engine is built from the model's own checkpoint, and not by a server.
        fsdp: Whether FSDP shards the model, so that TRL gathers and merges its layers in a way of its own.

    Yields:
        The refusals.
    """
    base: Any = unwrap(model)
    if dtype == FLOAT16 and refuses_float16(base):
        kind = base.config.model_type
        yield refuse("vllm-refuses-fp16", f"a {kind} model in float16 with use_vllm=True", kind=kind)
    method = quantization_method(base)
    packed = method in ("4bit", "8bit")
    if fsdp and packed:
        yield refuse("fsdp-sends-packed-weights", f"a model quantised to {method} under FSDP with use_vllm=True")
    prequantised = getattr(getattr(base, "hf_quantizer", None), "pre_quantized", False)
    if colocated and prequantised and packed:
        given = f"a checkpoint that bitsandbytes packed, {base.config._name_or_path!r}, with use_vllm=True"
        yield refuse("vllm-holds-packed-weights", given, fix="the unquantised checkpoint, with `quantization_config`")


def told(arguments: Mapping[str, Any], dtype: str | None, device: Device, version: str | None) -> dict[str, Any]:
    """Completes what TRL builds an engine with; what it passes itself is kept.

    Args:
        arguments: TRL's keywords for `vllm.LLM`.
        dtype: The dtype to sample in; `None` where that is left to upstream.
        device: The device of the run.
        version: The installed vLLM, `None` where unknown.

    Returns:
        New keywords: `dtype`; weights that are not packed, for what is pushed into them is not; and no cascade
        attention where it may compute wrongly.
    """
    complete = ({} if dtype is None else {"dtype": dtype}) | dict(arguments)
    if complete.get("quantization") == PACKED:
        complete["quantization"] = None
    if cascade_is_wrong(device, version):
        complete.setdefault("disable_cascade_attn", True)
    return complete


def cascade_is_wrong(device: Device, version: str | None) -> bool:
    """Whether the cascade attention of a vLLM may compute wrongly on a device.

    Args:
        device: The device of the run.
        version: The installed vLLM, `None` where unknown.
    """
    old = version is not None and Version(version) < CASCADE_ATTENTION_MENDED
    return old and device.capability is not None and device.capability[0] != 9


def installed_version() -> str | None:
    """The installed vLLM's version; `None` where there is none, or it does not say."""
    try:
        return metadata.version("vllm")
    except metadata.PackageNotFoundError:
        return None


def check_server(client: Any, dtype: str) -> Problem | None:
    """Compares what a vLLM server computes in with what the trainer does.

    Args:
        client: TRL's client of the server.
        dtype: The dtype that the trainer computes in.

    Returns:
        A warning where the server cannot be asked; older clients of TRL have no way.

    Raises:
        PrecisionError: If the server computes in another dtype, or holds packed weights.
    """
    model = client.get_server_info().get("model_config", {}) if hasattr(client, "get_server_info") else {}
    served = parse_dtype(str(model["dtype"]), field="the server's dtype") if model.get("dtype") else None
    problems = []
    if served is not None and served != dtype:
        given = f"a vLLM server that computes in {served}"
        problems.append(refuse("vllm-server-computes-otherwise", given, served=served, dtype=dtype))
    if model.get("quantization") == PACKED:
        fix = "start it without `--quantization`, from an unquantised checkpoint"
        problems.append(refuse("vllm-holds-packed-weights", "a vLLM server with 4-bit weights", fix=fix))
    if problems:
        raise PrecisionError(problems)
    return None if served else warn("vllm-server-not-asked", "vllm_mode='server'", dtype=dtype)
