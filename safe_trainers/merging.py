"""A checkpoint of base and adapters in one, and what became of the model on the way into its files."""

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

from .census import quantization_method
from .dtypes import from_torch, parse_dtype, to_torch
from .errors import CheckpointError, PrecisionWarning, refuse, warn
from .merged import active_configs, is_packed, merged_weights, packing_of, place_of, weights_of
from .probing import undisturbed
from .towers import unwrap
from .weight_files import declare_dtype


__all__ = ["CHECK_FILE", "UNCHANGED_LIMIT", "MergeCheck", "merge_and_save", "merged_weights"]

logger = logging.getLogger(__name__)

CHECK_FILE = "merge_check.json"
"""Written beside the merged weights: what `MergeCheck` holds."""
UNCHANGED_LIMIT = 0.25
"""Of the changes that round to nothing. The share is about the relative error of what is left (0.09, 0.26 and 0.61
stood for 8 %, 25 % and 62 % in bfloat16, and for 0.6 %, 5 % and 33 % of what the adapter moved in KL divergence)."""
NOISE = 2.0**-20
"""A change below this share of a layer's mean weight is float32's own rounding (a DoRA norm, a rotation), and none."""
ROWS, TOKENS = 4, 32
"""How many rows of how many tokens the default inputs have."""


@dataclass(frozen=True)
class MergeCheck:
    """What a merged checkpoint computes, beside the model that it was made from.

    Attributes:
        base: What the adapters were merged into, as `"dequantised nf4 of NAME"` where it was packed.
        adapters: By name, what each adapter says of itself: method, `r`, `lora_alpha`, and the base it was made for.
        dtype: Dtype of the merged weights; of most of them, where the base holds several.
        unchanged_share: Of the elements that the adapters change, the share that rounds to what it was in the base.
        inputs: What the two models were asked.
        compared: `"next-token log-probabilities"` in nats, or `"scores"` of a model without a vocabulary.
        max_difference: Largest absolute difference of what is compared.
        mean_difference: Mean absolute difference.
        kl: Mean Kullback-Leibler divergence of the merged model from the live one per position, over the whole
            vocabulary, in nats; `None` for scores.
        top1_agreement: Share of positions at which both find the same token most likely; `None` for one score.
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
        """The check as plain values, ready for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        names = ", ".join(self.adapters)
        lines = [
            f"{names} merged into {self.base}, in {self.dtype}",
            f"of what the adapters change, {self.unchanged_share:.1%} rounds to nothing",
            f"{self.compared} differ by {self.mean_difference:.3g} on average, {self.max_difference:.3g} at most "
            f"({self.inputs})",
        ]
        if self.kl is not None:
            lines.append(f"KL divergence {self.kl:.3g} nats per token")
        if self.top1_agreement is not None:
            lines.append(f"most likely token the same at {self.top1_agreement:.1%} of positions")
        return "\n".join(lines)


def merge_and_save(
    model: nn.Module,
    output_dir: str | Path,
    *,
    dtype: str | torch.dtype | None = None,
    processing_class: Any = None,
    inputs: Mapping[str, torch.Tensor] | None = None,
) -> MergeCheck:
    """Writes one checkpoint of base and active adapters, unquantised, and measures what it computes.

    The files are loaded back and asked the same as the live model before anything stands in `output_dir`; the live
    model keeps its bytes, its mode and its random state, and trains on. Beside it, the merged weights are held twice
    for a moment: on their way into the files, and loaded from them.

    Args:
        model: A transformers model with PEFT adapters, all of it in this process.
        output_dir: A folder that is absent or empty, and not the working folder.
        dtype: As in `merged_weights`; `None` for the dtype in which the base holds its weights.
        processing_class: The tokenizer or processor, saved beside the weights.
        inputs: Model inputs with `input_ids` (B, T), and `attention_mask` (B, T) where rows are padded. By default 4
            rows of 32 pseudo-random tokens, always the same for one size of vocabulary: they show what is lost in the
            weights, not how much of it matters for your texts.

    Returns:
        The check, which is in `merge_check.json` beside the weights too.

    Raises:
        PrecisionError: If there is no adapter, if it cannot be merged, if the dtype is unknown, or if float16 cannot
            hold a merged weight.
        CheckpointError: If the folder is not empty, or if the files give other weights back. Whatever fails, nothing
            is left behind.

    Warns:
        PrecisionWarning: If more than a quarter of what the adapters change rounds to nothing.
    """
    output = Path(output_dir).resolve()
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise CheckpointError([refuse("output-not-empty", f"output_dir={str(output_dir)!r}")])
    if output == Path.cwd():
        raise CheckpointError([refuse("output-is-working-folder", f"output_dir={str(output_dir)!r}")])
    target = None if dtype is None else to_torch(parse_dtype(dtype, allow_auto=False))
    base = unwrap(model)
    merged = _Merged(model, target)
    asked = _inputs_of(base, inputs)
    before = _ask(model, asked)
    if before.ndim == 3 and not _predicted(asked).any():
        raise CheckpointError([refuse("nothing-to-compare", "inputs={...}")])
    standing = next(folder for folder in output.parents if folder.is_dir())
    part = standing / f".{output.name}.{uuid.uuid4().hex[:8]}.part"  # on the disk that it is renamed on
    try:
        _write(base, merged, part, processing_class)
        after = _ask(_load(base, merged, part), asked)
        check = MergeCheck(
            base=_name(base),
            adapters={name: _describe(config) for name, config in active_configs(model).items()},
            dtype=from_torch(merged.dtype),
            unchanged_share=merged.unchanged_share,
            inputs="the inputs that were given" if inputs is not None else f"{ROWS} rows of pseudo-random tokens",
            **_compare(before, after, asked),
        )
        (part / CHECK_FILE).write_text(json.dumps(check.to_dict(), indent=2) + "\n", encoding="utf-8")
        output.parent.mkdir(parents=True, exist_ok=True)
        os.replace(part, output)  # over an empty folder too, in one step
    finally:
        shutil.rmtree(part, ignore_errors=True)
    if check.unchanged_share > UNCHANGED_LIMIT:
        given = f"adapters merged in {check.dtype}"
        problem = warn("merge-loses-the-adapter", given, share=f"{check.unchanged_share:.0%}", dtype=check.dtype)
        warnings.warn(str(problem), PrecisionWarning, stacklevel=2)
    return check


class _Merged:
    """The merged weights by name, in memory: those of the live model where nothing changes them."""

    def __init__(self, model: nn.Module, target: torch.dtype | None) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.untied = False
        names = Counter(place_of(tensor) for _, tensor in unwrap(model).named_parameters(remove_duplicate=False))
        tied: dict[tuple[Any, ...], tuple[torch.Tensor, torch.Tensor]] = {}
        elements: Counter[torch.dtype] = Counter()
        changed = lost = 0
        for weight in weights_of(model, target):
            exact = weight.load()
            made = weight.rounded(exact, target)
            if weight.before is not None and exact.is_floating_point():
                held = weight.before().to(exact)
                moved = _differ(exact, held)
                changed += int(moved.sum())
                lost += int((moved & (made == held.to(made.dtype))).sum())
            made = made.cpu()
            if names[weight.place] > 1:
                first, kept = tied.setdefault(weight.place, (exact, made))
                apart = first is not exact and bool(_differ(exact, first).any())
                self.untied |= apart
                made = made if apart else kept
            self.tensors[weight.name] = made
            if made.is_floating_point() and not weight.fixed:
                elements[made.dtype] += made.numel()
        self.unchanged_share = lost / changed if changed else 0.0
        self.dtype = max(elements, key=elements.__getitem__)


def _differ(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Where two tensors differ by more than float32's rounding."""
    return (one - other).abs() > other.abs().mean() * NOISE


def _write(base: Any, merged: _Merged, folder: Path, processing_class: Any) -> None:
    """Writes weights, config and processor by the model's own class, from an empty model beside the live one."""
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
    if hasattr(base, "_weight_conversions"):  # the names that the hub has; unpacking is not undone
        empty._weight_conversions = [c for c in base._weight_conversions or () if not _unpacks(c)]
    empty.save_pretrained(folder, state_dict=dict(merged.tensors))
    declare_dtype(folder / "config.json", from_torch(merged.dtype))
    if processing_class is not None:
        processing_class.save_pretrained(folder)


def _unpacks(conversion: Any) -> bool:
    return any("bitsandbytes" in type(step).__module__ for step in getattr(conversion, "operations", None) or ())


def _load(base: Any, merged: _Merged, folder: Path) -> nn.Module:
    """The model that anyone gets from the files, on the device of the live one; refused if it is another one."""
    attention = getattr(base.config, "_attn_implementation", None)
    loaded: Any = type(base).from_pretrained(folder, dtype=merged.dtype, attn_implementation=attention)
    for name, tensor in loaded.state_dict().items():
        wanted = merged.tensors[name].to(tensor.dtype)
        if tensor.shape != wanted.shape or not torch.allclose(tensor, wanted, rtol=0, atol=0, equal_nan=True):
            _refuse_files(f"{name} comes back as something else")
    device = next(base.parameters()).device
    size = sum(parameter.numel() * parameter.element_size() for parameter in loaded.parameters())
    if device.type == "cuda" and size > 0.8 * torch.cuda.mem_get_info(device)[0]:
        return loaded  # asked where there is room for it
    return loaded.to(device)


def _refuse_files(what: str) -> None:
    raise CheckpointError([refuse("merge-not-kept", "a merged model", what=what)])


def _inputs_of(base: Any, inputs: Mapping[str, torch.Tensor] | None) -> dict[str, torch.Tensor]:
    if inputs is not None:
        return dict(inputs)
    vocabulary = base.config.get_text_config().vocab_size
    tokens = torch.randint(vocabulary, (ROWS, TOKENS), generator=torch.Generator().manual_seed(0))  # (B, T)
    made = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    return made | {"decoder_input_ids": tokens} if base.config.is_encoder_decoder else made


def _ask(model: nn.Module, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The logits of a model, (B, T, V) or (B, L), in float32 on the CPU.

    A model that accelerate wrapped in autocast is asked without it: its rounding is none of the merged weights'.
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
            logger.info("asked under the autocast of its run, which it needs: %s", error)
            outputs = model(**moved)
    return outputs.logits.float().cpu()


def _compare(before: torch.Tensor, after: torch.Tensor, inputs: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """The numbers of a check from the logits of both models."""
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
    """The next tokens that are predicted from a token, both of them no padding; (B, T - 1), bool."""
    side = _side(inputs)
    padding = inputs.get(f"{side}attention_mask")
    present = (torch.ones_like(inputs[f"{side}input_ids"]) if padding is None else padding).cpu().bool()  # (B, T)
    return present[:, 1:] & present[:, :-1]


def _name(base: Any) -> str:
    """What the adapters are merged into, in words."""
    name = getattr(base.config, "_name_or_path", "") or type(base).__name__
    method = quantization_method(base)
    if method is None:
        return name
    packing = {packing_of(part) for part in base.modules() if is_packed(part)}
    return f"dequantised {' and '.join(sorted(packing))} of {name}"


def _describe(config: Any) -> dict[str, Any]:
    method = getattr(config.peft_type, "value", config.peft_type)
    said = {key: getattr(config, key, None) for key in ("r", "lora_alpha", "use_rslora", "use_dora")}
    return {
        "method": method,
        "base": config.base_model_name_or_path,
        **{k: v for k, v in said.items() if v is not None},
    }
