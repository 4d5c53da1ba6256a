"""Checks of quantised models before they are loaded, and of new heads on quantised models.

transformers quantises every `nn.Linear` that is not listed in `llm_int8_skip_modules`. If the list is not set,
transformers excludes the output layer, unless it has a bias. A head that the checkpoint does not contain must be in
the list; otherwise it becomes a quantised layer whose weight is never packed.
"""

import copy
import json
from collections.abc import Iterator, Mapping
from importlib import metadata, util
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from packaging.version import Version
from torch import nn

from ..core.dtypes import parse_dtype
from ..core.errors import Problem, refuse
from ..model.inventory import BITSANDBYTES, bits
from ..model.parts import HEADS, is_quantized, unwrap


MINIMUM = "0.46.1"
"""The oldest bitsandbytes that transformers 5 supports."""


SKIP = "llm_int8_skip_modules"


def missing_backend(model: Any, args: Any, quantization_config: Any = None) -> Problem | None:
    """Refuses a model that needs bitsandbytes if it is not installed or too old, without loading the model.

    Args:
        model: The trainer's `model`: a name, a folder, or a loaded model, which is not checked.
        args: The training arguments, with `model_init_kwargs`; `None` if there are none yet.
        quantization_config: The trainer's `quantization_config`.

    Returns:
        The refusal with the command to run; `None` if bitsandbytes is not needed, or can be imported.
    """
    requests = _requests(model, args, quantization_config) if isinstance(model, str) else ()
    where = next((where for where, config in requests if _is_bitsandbytes(config)), None)
    installed = None if where is None else _installed()
    if where is None or (installed is not None and Version(installed) >= Version(MINIMUM)):
        return None
    state = "not installed" if installed is None else f"installed as {installed}, which is too old"
    return refuse("bitsandbytes-missing", where, state=state, minimum=MINIMUM)


def asked_quantization(model: Any, args: Any, quantization_config: Any = None) -> str | None:
    """Returns how bitsandbytes will quantise a model that is not loaded yet.

    Args:
        model: A name or a folder.
        args: The training arguments, with `model_init_kwargs`.
        quantization_config: The trainer's `quantization_config`.

    Returns:
        `"4bit"`, `"8bit"`, or `None` if the model will not be quantised by bitsandbytes.
    """
    configs = (config for _, config in _requests(model, args, quantization_config) if _is_bitsandbytes(config))
    return next(("8bit" if _field(config, "load_in_8bit") else "4bit" for config in configs), None)


def contradiction(asked: str | None, compute: str) -> Problem | None:
    """Refuses a `bnb_4bit_compute_dtype` that differs from the compute dtype of the run.

    Args:
        asked: The value, in any spelling of `parse_dtype`; `None` if unset.
        compute: The compute dtype of the run.

    Returns:
        The refusal; `None` if the two agree.

    Raises:
        PrecisionError: If `asked` is not a dtype.
    """
    field = "bnb_4bit_compute_dtype"
    if asked is None or parse_dtype(asked, field=field, allow_auto=False) == compute:
        return None
    return refuse("bnb-compute-dtype-contradicts", f"{field}={asked!r} in a run that computes in {compute}")


def skip_heads(quantization_config: Any) -> Any:
    """Excludes new heads from quantisation.

    Args:
        quantization_config: A `BitsAndBytesConfig`, the mapping of one, or anything else.

    Returns:
        A copy whose `llm_int8_skip_modules` also contains `HEADS`; anything else is returned unchanged.
    """
    if not _is_bitsandbytes(quantization_config):
        return quantization_config
    given = _field(quantization_config, SKIP)
    # Without a list, transformers excludes the output layer.
    skipped = list(dict.fromkeys([*(("lm_head",) if given is None else given), *HEADS]))
    if isinstance(quantization_config, Mapping):
        return {**quantization_config, SKIP: skipped}
    completed = copy.copy(quantization_config)
    setattr(completed, SKIP, skipped)
    return completed


def unloadable_head(model: Any, args: Any) -> Problem | None:
    """Refuses a pre-quantised checkpoint that cannot be loaded with a new head.

    The `llm_int8_skip_modules` of the checkpoint override those that the user passes. If they do not contain the head,
    loading fails when transformers initialises the head's packed bytes with random numbers.

    Args:
        model: The `model` of a trainer that adds a new head (`RewardTrainer`).
        args: The training arguments.

    Returns:
        The refusal with the lines that load the checkpoint; `None` if it can be loaded.
    """
    config = checkpoint_config(model, args) if isinstance(model, str) else {}
    quantized = _quantization_of(config)
    skipped = _field(quantized, SKIP)
    has_head = any(
        name.endswith(("Classification", "QuestionAnswering")) for name in config.get("architectures") or ()
    )
    if not _is_bitsandbytes(quantized) or skipped is None or set(skipped) & set(HEADS) or has_head:
        return None
    fix = (
        f"`config = AutoConfig.from_pretrained({model!r}, num_labels=1)`, "
        f"`config.quantization_config['{SKIP}'].append('score')`, and pass "
        f"`AutoModelForSequenceClassification.from_pretrained({model!r}, config=config)` as the model"
    )
    what = f"a new head on {model}, whose config has {SKIP}={list(skipped)!r}"
    return refuse("quantised-head", what, fix=fix)


def unusable_head(model: nn.Module) -> Problem | None:
    """Refuses a model with quantised layers that cannot compute or cannot be trained.

    The weight of a head that the checkpoint does not contain was never packed, and its layer fails in the first
    forward pass. A packed weight gets no gradient, even as a copy that PEFT trains; with a floating-point
    `bnb_4bit_quant_storage`, torch does not report an error.

    Args:
        model: The model, possibly wrapped by PEFT.

    Returns:
        The refusal, which names the layers; `None` if there are none.
    """
    names = [name for name, module in unwrap(model).named_modules() if bits(module) is not None and _unusable(module)]
    if not names:
        return None
    parts = [part for part in names[0].split(".") if part not in ("modules_to_save", "original_module", "default")]
    head = next((part for part in parts if part in HEADS), parts[-1])
    skip = list(dict.fromkeys(["lm_head", head]))
    what = f"{len(names)} quantised layers, {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}"
    return refuse("quantised-head", what, fix=f"`BitsAndBytesConfig(..., {SKIP}={skip!r})`")


def fresh_heads(model: nn.Module) -> list[str]:
    """Finds the parameters of randomly initialised heads, which are trained in float32.

    Args:
        model: The model, possibly wrapped by PEFT.

    Returns:
        Their names in `model`, including the copies that PEFT trains and their originals, without packed parameters.
    """
    heads = {id(p) for name, child in unwrap(model).named_children() if name in HEADS for p in child.parameters()}
    return [name for name, p in model.named_parameters() if id(p) in heads and not is_quantized(p)]


def checkpoint_config(model: str, args: Any) -> Mapping[str, Any]:
    """Reads the `config.json` of a checkpoint without network access.

    Args:
        model: A folder, or the name of a Hub repository that is read from the local cache.
        args: The training arguments, whose `model_init_kwargs` may contain a revision.

    Returns:
        The values; empty if the file is not found or is not valid JSON.
    """
    try:
        path: Any = Path(model) / "config.json"
        if not path.is_file():
            path = try_to_load_from_cache(model, "config.json", revision=_init_kwargs(args).get("revision"))
        values = json.loads(Path(path).read_text(encoding="utf-8")) if isinstance(path, (str, Path)) else {}
    except (OSError, ValueError):  # transformers reports this error when it loads the model
        return {}
    return values if isinstance(values, dict) else {}


def _requests(model: str, args: Any, quantization_config: Any) -> Iterator[tuple[str, Any]]:
    """Yields each place that can request a quantised model, with the config found there."""
    yield "quantization_config=", quantization_config
    declared = _init_kwargs(args)
    yield "model_init_kwargs['quantization_config']", declared.get("quantization_config")
    yield "model_init_kwargs", declared  # transformers 4 accepts `load_in_4bit` as an argument of `from_pretrained`
    if isinstance(model, str):
        yield f"the quantised checkpoint {model}", _quantization_of(checkpoint_config(model, args))


def _quantization_of(config: Mapping[str, Any]) -> Any:
    """Returns the quantisation config of a `config.json`, of the whole model or of its text model."""
    return config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config")


def _init_kwargs(args: Any) -> Mapping[str, Any]:
    declared = getattr(args, "model_init_kwargs", None)
    return declared if isinstance(declared, Mapping) else {}


def _is_bitsandbytes(config: Any) -> bool:
    method = _field(config, "quant_method")
    named = getattr(method, "value", method) == BITSANDBYTES
    return named or bool(_field(config, "load_in_4bit") or _field(config, "load_in_8bit"))


def _field(config: Any, name: str) -> Any:
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)


def _installed() -> str | None:
    """Returns the installed version of bitsandbytes without importing it; `None` if it is not installed."""
    try:
        return None if util.find_spec(BITSANDBYTES) is None else metadata.version(BITSANDBYTES)
    except metadata.PackageNotFoundError:  # only a folder of that name is on the path
        return None


def _unusable(layer: nn.Module) -> bool:
    """Whether the weight of a quantised layer was never packed, or is packed but should be trained."""
    weight = getattr(layer, "weight", None)
    if not isinstance(weight, nn.Parameter):
        return False
    trained = weight.requires_grad and not getattr(weight, "has_fp16_weights", False)
    return trained or not is_quantized(weight)
