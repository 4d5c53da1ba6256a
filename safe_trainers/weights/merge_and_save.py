"""Saves a merged checkpoint of base and adapters, and measures how much it differs from the model in memory."""

import copy
import json
import logging
import os
import shutil
import uuid
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..core.dtypes import from_torch, parse_dtype, to_torch
from ..core.errors import CheckpointError, PrecisionWarning, refuse, warn
from ..core.files import set_config_dtype
from ..model.inventory import quantization_method
from ..model.parts import unwrap
from ..model.trial_forward import undisturbed
from .merged import active_configs, is_packed, merged_weights, packing_of, place_of, weights_of


__all__ = ["CHECK_FILE", "UNCHANGED_LIMIT", "MergeCheck", "merge_and_save", "merged_weights"]

logger = logging.getLogger(__name__)

CHECK_FILE = "merge_check.json"
"""File in the merged checkpoint with the values of `MergeCheck`."""
UNCHANGED_LIMIT = 0.25
"""Share of changes that round to zero above which a warning is given. The share approximates the relative error of the
merged changes: in measurements in bfloat16, shares of 0.09, 0.26 and 0.61 had errors of 8 %, 25 % and 62 %, and lost
0.6 %, 5 % and 33 % of the adapter's KL divergence from the base."""
NOISE = 2.0**-20
"""Changes below this share of a layer's mean weight are float32 rounding errors (a DoRA norm, a rotation)."""
ROWS, TOKENS = 4, 32
"""Number of rows, and of tokens in each row, of the default inputs."""


@dataclass(frozen=True)
class MergeCheck:
    """Comparison of a merged checkpoint with the model that it was made from.

    Attributes:
        base: The base model; `"dequantised nf4 of NAME"` if it was quantised.
        adapters: By name, the config of each adapter: method, `r`, `lora_alpha`, and the base that it was trained on.
        dtype: Dtype of the merged weights; of most elements if there are several.
        unchanged_share: Share of the elements changed by the adapters that round to their value in the base.
        inputs: Description of the inputs of the comparison.
        compared: `"next-token log-probabilities"` in nats, or `"scores"` of a model without a vocabulary.
        max_difference: Largest absolute difference.
        mean_difference: Mean absolute difference.
        kl: Mean Kullback-Leibler divergence of the merged model from the model in memory per position, over the whole
            vocabulary, in nats; `None` for scores.
        top1_agreement: Share of positions at which both models predict the same token; `None` for a single score.
    """

    base: str
    adapters: Mapping[str, Mapping[str, Any]]
    dtype: str
    unchanged_share: float
    inputs: str
    compared: str
    max_difference: float
    mean_difference: float
    kl: float | None
    top1_agreement: float | None

    def to_dict(self) -> dict[str, Any]:
        """Returns the comparison as plain values for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        names = ", ".join(self.adapters)
        lines = [
            f"{names} merged into {self.base}, in {self.dtype}",
            f"{self.unchanged_share:.1%} of the adapters' changes round to zero",
            f"{self.compared} differ by {self.mean_difference:.3g} on average, {self.max_difference:.3g} at most "
            f"({self.inputs})",
        ]
        if self.kl is not None:
            lines.append(f"KL divergence {self.kl:.3g} nats per token")
        if self.top1_agreement is not None:
            lines.append(f"same most likely token at {self.top1_agreement:.1%} of positions")
        return "\n".join(lines)


def merge_and_save(
    model: nn.Module,
    output_dir: str | Path,
    *,
    dtype: str | torch.dtype | None = None,
    processing_class: Any = None,
    inputs: Mapping[str, torch.Tensor] | None = None,
) -> MergeCheck:
    """Saves base and active adapters as one unquantised checkpoint, and compares it with the model.

    The saved files are loaded and compared with the model before `output_dir` is created. The weights, training mode
    and random state of the model do not change, so training can continue. In addition to the model, up to two copies
    of the merged weights are in memory.

    Args:
        model: A transformers model with PEFT adapters, completely in this process.
        output_dir: A folder that does not exist or is empty, and is not the working directory.
        dtype: Dtype of the merged weights, as in `merged_weights`; by default the dtype of the base's weights.
        processing_class: The tokenizer or processor, which is also saved.
        inputs: Model inputs for the comparison, with `input_ids` (B, T), and `attention_mask` (B, T) if rows are
            padded. By default 4 rows of 32 pseudo-random tokens that depend only on the size of the vocabulary. They
            show how much the weights changed; pass your own data to measure the effect on it.

    Returns:
        The comparison, which is also saved as `merge_check.json`.

    Raises:
        PrecisionError: If the model has no adapter, the adapter cannot be merged, the dtype is unknown, or a merged
            weight overflows float16.
        CheckpointError: If the folder is not empty, or if the saved files do not contain the merged weights. After an
            error no files remain.

    Warns:
        PrecisionWarning: If more than a quarter of the adapters' changes round to zero.
    """
    output = Path(output_dir).resolve()
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise CheckpointError([refuse("output-not-empty", f"output_dir={str(output_dir)!r}")])
    if output == Path.cwd():
        raise CheckpointError([refuse("output-is-working-folder", f"output_dir={str(output_dir)!r}")])
    target = None if dtype is None else to_torch(parse_dtype(dtype, allow_auto=False))
    base = unwrap(model)
    merged = _Merged(model, target)
    compared = _inputs_of(base, inputs)
    before = _logits(model, compared)
    if before.ndim == 3 and not _predicted(compared).any():
        raise CheckpointError([refuse("nothing-to-compare", "inputs={...}")])
    existing = next(folder for folder in output.parents if folder.is_dir())
    part = existing / f".{output.name}.{uuid.uuid4().hex[:8]}.part"  # on the same file system, so it can be renamed
    try:
        _write(base, merged, part, processing_class)
        after = _logits(_load(base, merged, part), compared)
        check = MergeCheck(
            base=_name(base),
            adapters={name: _describe(config) for name, config in active_configs(model).items()},
            dtype=from_torch(merged.dtype),
            unchanged_share=merged.unchanged_share,
            inputs="the inputs passed" if inputs is not None else f"{ROWS} rows of pseudo-random tokens",
            **_compare(before, after, compared),
        )
        (part / CHECK_FILE).write_text(json.dumps(check.to_dict(), indent=2) + "\n", encoding="utf-8")
        output.parent.mkdir(parents=True, exist_ok=True)
        os.replace(part, output)  # atomic, also if an empty folder exists
    finally:
        shutil.rmtree(part, ignore_errors=True)
    if check.unchanged_share > UNCHANGED_LIMIT:
        what, share = f"adapters merged in {check.dtype}", f"{check.unchanged_share:.0%}"
        problem = warn("merge-loses-the-adapter", what, share=share, dtype=check.dtype)
        warnings.warn(str(problem), PrecisionWarning, stacklevel=2)
    return check


class _Merged:
    """The merged weights by name, on the CPU."""

    def __init__(self, model: nn.Module, target: torch.dtype | None) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.untied = False
        names = Counter(place_of(tensor) for _, tensor in unwrap(model).named_parameters(remove_duplicate=False))
        tied: dict[tuple[Any, ...], tuple[torch.Tensor, torch.Tensor]] = {}
        elements: Counter[torch.dtype] = Counter()
        changed = lost = 0
        for weight in weights_of(model, target):
            exact = weight.load()
            rounded = weight.rounded(exact, target)
            if weight.before is not None and exact.is_floating_point():
                before = weight.before().to(exact)
                moved = _differ(exact, before)
                changed += int(moved.sum())
                lost += int((moved & (rounded == before.to(rounded.dtype))).sum())
            rounded = rounded.cpu()
            if names[weight.place] > 1:
                first, kept = tied.setdefault(weight.place, (exact, rounded))
                untied = first is not exact and bool(_differ(exact, first).any())
                self.untied |= untied
                rounded = rounded if untied else kept
            self.tensors[weight.name] = rounded
            if rounded.is_floating_point() and not weight.fixed:
                elements[rounded.dtype] += rounded.numel()
        self.unchanged_share = lost / changed if changed else 0.0
        self.dtype = max(elements, key=elements.__getitem__)


def _differ(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Returns where two tensors differ by more than float32 rounding errors."""
    return (one - other).abs() > other.abs().mean() * NOISE


def _write(base: Any, merged: _Merged, folder: Path, processing_class: Any) -> None:
    """Saves weights, config and processor with `save_pretrained` of an empty model of the same class."""
    config = copy.deepcopy(base.config)
    for part in (config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", ()))):
        for name in {"quantization_config", "_pre_quantization_dtype"} & vars(part or nn.Identity()).keys():
            delattr(part, name)
        if merged.untied and getattr(part, "tie_word_embeddings", False):
            part.tie_word_embeddings = False
    with torch.device("meta"):
        empty = type(base)(config)
    differing = sorted(empty.state_dict().keys() ^ merged.tensors.keys())
    if differing:
        _refuse_files(f"{type(base).__name__} does not have the same weights as this model, such as {differing[0]}")
    if getattr(base, "generation_config", None) is not None:
        empty.generation_config = copy.deepcopy(base.generation_config)
    # transformers 5 saves with the names of the original checkpoint, but must not quantise again.
    if hasattr(base, "_weight_conversions"):
        empty._weight_conversions = [c for c in base._weight_conversions or () if not _unpacks(c)]
    empty.save_pretrained(folder, state_dict=dict(merged.tensors))
    set_config_dtype(folder / "config.json", from_torch(merged.dtype))
    if processing_class is not None:
        processing_class.save_pretrained(folder)


def _unpacks(conversion: Any) -> bool:
    return any("bitsandbytes" in type(step).__module__ for step in getattr(conversion, "operations", None) or ())


def _load(base: Any, merged: _Merged, folder: Path) -> nn.Module:
    """Loads the saved files, compares all weights, and moves the model to the device of the base if it fits."""
    attention = getattr(base.config, "_attn_implementation", None)
    loaded: Any = type(base).from_pretrained(folder, dtype=merged.dtype, attn_implementation=attention)
    for name, tensor in loaded.state_dict().items():
        expected = merged.tensors[name].to(tensor.dtype)
        if tensor.shape != expected.shape or not torch.allclose(tensor, expected, rtol=0, atol=0, equal_nan=True):
            _refuse_files(f"{name} has other values")
    device = next(base.parameters()).device
    size = sum(parameter.numel() * parameter.element_size() for parameter in loaded.parameters())
    if device.type == "cuda" and size > 0.8 * torch.cuda.mem_get_info(device)[0]:
        return loaded
    return loaded.to(device)


def _refuse_files(what: str) -> None:
    raise CheckpointError([refuse("merge-not-kept", "a merged model", what=what)])


def _inputs_of(base: Any, inputs: Mapping[str, torch.Tensor] | None) -> dict[str, torch.Tensor]:
    if inputs is not None:
        return dict(inputs)
    vocabulary = base.config.get_text_config().vocab_size
    tokens = torch.randint(vocabulary, (ROWS, TOKENS), generator=torch.Generator().manual_seed(0))  # (B, T)
    default = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    return default | {"decoder_input_ids": tokens} if base.config.is_encoder_decoder else default


def _logits(model: nn.Module, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Returns the logits of a model, (B, T, V) or (B, L), in float32 on the CPU.

    accelerate's autocast around the forward pass is bypassed, because its rounding is not an effect of the merge.
    """
    device = next(model.parameters()).device
    moved = {name: value.to(device) for name, value in inputs.items()}
    plain = vars(model).get("_original_forward", model)
    with undisturbed(model):
        try:
            outputs = plain(**moved)
        except RuntimeError as error:
            if plain is model:
                raise
            logger.info("the forward pass without autocast failed, so it is run under autocast: %s", error)
            outputs = model(**moved)
    return outputs.logits.float().cpu()


def _compare(before: torch.Tensor, after: torch.Tensor, inputs: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Returns the numbers of a `MergeCheck` from the logits of both models."""
    if before.ndim < 3:
        difference = (before - after).abs()
        agreement = (before.argmax(-1) == after.argmax(-1)).float().mean().item() if before.shape[-1] > 1 else None
        return {"compared": "scores", "max_difference": difference.max().item(),
                "mean_difference": difference.mean().item(), "kl": None, "top1_agreement": agreement}  # fmt: skip
    live, merged = (logits[:, :-1].double().log_softmax(-1) for logits in (before, after))  # (B, T - 1, V)
    tokens = inputs[f"{_side(inputs)}input_ids"][:, 1:].cpu()  # (B, T - 1)
    mask = _predicted(inputs)  # (B, T - 1)
    difference = (live - merged).gather(-1, tokens[..., None])[..., 0].abs()[mask]
    divergence = nn.functional.kl_div(merged, live, reduction="none", log_target=True).sum(-1)[mask]
    return {
        "compared": "next-token log-probabilities",
        "max_difference": difference.max().item(),
        "mean_difference": difference.mean().item(),
        "kl": divergence.mean().item(),
        "top1_agreement": (live.argmax(-1) == merged.argmax(-1))[mask].float().mean().item(),
    }


def _side(inputs: Mapping[str, torch.Tensor]) -> str:
    return "decoder_" if "decoder_input_ids" in inputs else ""


def _predicted(inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Returns the positions where both a token and its successor are not padding; (B, T - 1), bool."""
    side = _side(inputs)
    padding = inputs.get(f"{side}attention_mask")
    present = (torch.ones_like(inputs[f"{side}input_ids"]) if padding is None else padding).cpu().bool()  # (B, T)
    return present[:, 1:] & present[:, :-1]


def _name(base: Any) -> str:
    """Returns the description of the base model for `MergeCheck`."""
    name = getattr(base.config, "_name_or_path", "") or type(base).__name__
    method = quantization_method(base)
    if method is None:
        return name
    packing = {packing_of(part) for part in base.modules() if is_packed(part)}
    return f"dequantised {' and '.join(sorted(packing))} of {name}"


def _describe(config: Any) -> dict[str, Any]:
    method = getattr(config.peft_type, "value", config.peft_type)
    values = {key: getattr(config, key, None) for key in ("r", "lora_alpha", "use_rslora", "use_dora")}
    return {
        "method": method,
        "base": config.base_model_name_or_path,
        **{key: value for key, value in values.items() if value is not None},
    }
