"""What can be said about a quantised model before it is loaded, and the heads that are made while it is.

transformers quantises every `nn.Linear` that `llm_int8_skip_modules` does not name; where the list is not set, it
finds the output layer by itself, unless that has a bias. A head that the checkpoint lacks must be in the list: else it
becomes a quantised layer whose weight nobody packs.
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

from .census import BITSANDBYTES, bits
from .dtypes import parse_dtype
from .errors import Problem, refuse
from .towers import is_quantized, unwrap


MINIMUM = "0.46.1"
"""The oldest bitsandbytes that transformers 5 takes."""

HEADS = ("score", "classifier", "classification_head", "qa_outputs", "v_head")
"""Names of heads that are made for a task, and trained, on a base that has none. The head of a language model is none
of them: its checkpoint holds it."""

SKIP = "llm_int8_skip_modules"


def missing_backend(model: Any, args: Any, quantization_config: Any = None) -> Problem | None:
    """The refusal of a model that asks for bitsandbytes where it is not installed; nothing is loaded for it.

    Args:
        model: What the trainer takes as its model: a name, a folder, or a live model, which needs nothing any more.
        args: The training arguments, with their `model_init_kwargs`; `None` where there are none yet.
        quantization_config: What the trainer takes as `quantization_config`.

    Returns:
        The problem with the line to run; `None` where nothing asks for it, or where it can be imported.
    """
    asked = _asked(model, args, quantization_config) if isinstance(model, str) else ()
    where = next((where for where, config in asked if _is_bitsandbytes(config)), None)
    installed = None if where is None else _installed()
    if where is None or (installed is not None and Version(installed) >= Version(MINIMUM)):
        return None
    state = "not installed" if installed is None else f"installed as {installed}, which is too old"
    return refuse("bitsandbytes-missing", where, state=state, minimum=MINIMUM)


def asked_quantization(model: Any, args: Any, quantization_config: Any = None) -> str | None:
    """How bitsandbytes will quantise a model that is not loaded yet.

    Args:
        model: A name or a folder.
        args: The training arguments, with their `model_init_kwargs`.
        quantization_config: What the trainer takes as `quantization_config`.

    Returns:
        `"4bit"`, `"8bit"`, or `None` where nothing asks for it.
    """
    asked = (config for _, config in _asked(model, args, quantization_config) if _is_bitsandbytes(config))
    return next(("8bit" if _field(config, "load_in_8bit") else "4bit" for config in asked), None)


def contradiction(asked: str | None, compute: str) -> Problem | None:
    """The refusal of a `bnb_4bit_compute_dtype` that says something else than the run.

    Args:
        asked: What was written, in any spelling of `parse_dtype`; `None` where nothing was.
        compute: The compute dtype of the run.

    Returns:
        The problem, `None` where the two agree.

    Raises:
        PrecisionError: If `asked` names no dtype.
    """
    field = "bnb_4bit_compute_dtype"
    if asked is None or parse_dtype(asked, field=field, allow_auto=False) == compute:
        return None
    return refuse("bnb-compute-dtype-contradicts", f"{field}={asked!r} in a run that computes in {compute}")


def skip_heads(quantization_config: Any) -> Any:
    """Completes a quantization config for a model whose head is made while it is loaded.

    Args:
        quantization_config: A `BitsAndBytesConfig`, the mapping of one, or anything else.

    Returns:
        A copy whose `llm_int8_skip_modules` names every head of `HEADS`; what is not bitsandbytes', as it is.
    """
    if not _is_bitsandbytes(quantization_config):
        return quantization_config
    given = _field(quantization_config, SKIP)
    # Without a list transformers would spare the output layer, which a model with one of these heads does not have.
    skipped = list(dict.fromkeys([*(("lm_head",) if given is None else given), *HEADS]))
    if isinstance(quantization_config, Mapping):
        return {**quantization_config, SKIP: skipped}
    completed = copy.copy(quantization_config)
    setattr(completed, SKIP, skipped)
    return completed


def unloadable_head(model: Any, args: Any) -> Problem | None:
    """The refusal of a pre-quantised checkpoint that cannot be loaded with a fresh head.

    The list in the checkpoint wins over any that is passed. Where it names no head, loading fails while the head is
    drawn as packed bytes.

    Args:
        model: What a trainer of a model with a fresh head (`RewardTrainer`) takes as its model.
        args: Its training arguments.

    Returns:
        The problem with the lines that load it; `None` where there is none.
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
    given = f"a head on {model}, whose own {SKIP} are {list(skipped)!r}"
    return refuse("quantised-head", given, fix=fix)


def unusable_head(model: nn.Module) -> Problem | None:
    """The refusal of a layer that became a quantised one and can neither compute nor be trained.

    A head that the checkpoint lacks holds a weight that was never packed, and fails in the first forward pass. One
    that is packed gets no gradient, also where PEFT trains a copy of it: with `bnb_4bit_quant_storage` in a floating
    dtype nothing says so.

    Args:
        model: The model, wrapped by PEFT or not.

    Returns:
        The problem, which names the layers; `None` where there is none.
    """
    names = [name for name, module in unwrap(model).named_modules() if bits(module) is not None and _unusable(module)]
    if not names:
        return None
    parts = [part for part in names[0].split(".") if part not in ("modules_to_save", "original_module", "default")]
    head = next((part for part in parts if part in HEADS), parts[-1])
    skip = list(dict.fromkeys(["lm_head", head]))
    given = f"{', '.join(names[:3])}{', ...' if len(names) > 3 else ''} as {len(names)} quantised layers"
    return refuse("quantised-head", given, fix=f"`BitsAndBytesConfig(..., {SKIP}={skip!r})`")


def fresh_heads(model: nn.Module) -> list[str]:
    """The parameters of heads that were made for a task. They start from nothing, and belong into float32.

    Args:
        model: The model, wrapped by PEFT or not.

    Returns:
        Their names in `model`, PEFT's trained copies and the originals beside them included; packed ones left out.
    """
    heads = {id(p) for name, child in unwrap(model).named_children() if name in HEADS for p in child.parameters()}
    return [name for name, p in model.named_parameters() if id(p) in heads and not is_quantized(p)]


def checkpoint_config(model: str, args: Any) -> Mapping[str, Any]:
    """The `config.json` of a checkpoint, without a network.

    Args:
        model: A folder, or the name of a repository, of which only what was downloaded before is read.
        args: The training arguments, whose `model_init_kwargs` may name a revision.

    Returns:
        Its values; empty where there is no such file.
    """
    try:
        path: Any = Path(model) / "config.json"
        if not path.is_file():
            path = try_to_load_from_cache(model, "config.json", revision=_init_kwargs(args).get("revision"))
        values = json.loads(Path(path).read_text(encoding="utf-8")) if isinstance(path, (str, Path)) else {}
    except (OSError, ValueError):  # neither a folder nor a repository, or no JSON: transformers says it as it loads
        return {}
    return values if isinstance(values, dict) else {}


def _asked(model: str, args: Any, quantization_config: Any) -> Iterator[tuple[str, Any]]:
    """Every place that can ask for a quantised model, and what it says."""
    yield "quantization_config=", quantization_config
    declared = _init_kwargs(args)
    yield "model_init_kwargs['quantization_config']", declared.get("quantization_config")
    yield "model_init_kwargs", declared  # transformers 4 takes `load_in_4bit` as an argument of its own
    yield f"the quantised checkpoint {model}", _quantization_of(checkpoint_config(model, args))


def _quantization_of(config: Mapping[str, Any]) -> Any:
    """What a `config.json` says about quantisation, for the whole model or for the text model in it."""
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
    """The version of bitsandbytes that can be imported, `None` where there is none; it is not imported for it."""
    try:
        return None if util.find_spec(BITSANDBYTES) is None else metadata.version(BITSANDBYTES)
    except metadata.PackageNotFoundError:  # a folder of that name on the path, and no package
        return None


def _unusable(layer: nn.Module) -> bool:
    """Whether the weight of a quantised layer was never packed, or is packed and has to be trained."""
    weight = getattr(layer, "weight", None)
    if not isinstance(weight, nn.Parameter):
        return False
    trained = weight.requires_grad and not getattr(weight, "has_fp16_weights", False)
    return trained or not is_quantized(weight)
