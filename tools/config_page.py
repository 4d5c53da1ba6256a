"""Writes the reference of precision settings, from `PrecisionSettings`."""

import ast
import re
from dataclasses import fields
from pathlib import Path

from safe_trainers.policy import settings
from safe_trainers.policy.settings import ACCEPTED, PrecisionSettings, Range


CHANGES = {
    "precision": "yes: it is the precision of the run",
    "rollout_compute": "yes, sampled tokens under autocast",
    "adapter_dtype": "yes",
    "upcast_trainables": "yes: weights become float32, or are refused",
    "fp32_modules": "yes",
    "loss_scale_init": "only which steps are skipped",
    "loss_scale_growth_interval": "only which steps are skipped",
    "loss_scale_growth_factor": "only which steps are skipped",
    "loss_scale_backoff_factor": "only which steps are skipped",
    "max_consecutive_skips": "no: only when a run stops",
    "overflow_probe_steps": "no",
    "rollout_correction": "yes: losses are weighted",
    "old_logps": "yes, with `loss`: the ratio is exactly 1",
    "sync_lost_limit": "no: only a warning",
    "adapter_sync": "rounding of the sampler's weights",
    "media_trial": "no, unless the model needs casts to compute",
    "share_media_features": "no with `identical`; with `always`, where a tower rounds otherwise for another batch",
    "router_replay": "yes, with `rollout`: scoring and losses use the experts of the rollout",
    "keep_frozen_casts": "no",
    "compile_decode": "yes: other tokens may be sampled",
    "precision_metrics": "no",
    "record_steps": "no",
    "precision_report": "no",
    "profile": "no",
    "save_dtype": "only saved weights",
}
"""Whether a setting changes a loss, a gradient or a weight. A test compares the names with the settings."""
PAGES = {
    "precision": "hardware", "rollout_compute": "rollouts", "adapter_dtype": "lora",
    "upcast_trainables": "fp16", "fp32_modules": "fp16", "loss_scale_init": "fp16",
    "loss_scale_growth_interval": "fp16", "loss_scale_growth_factor": "fp16",
    "loss_scale_backoff_factor": "fp16", "max_consecutive_skips": "fp16", "overflow_probe_steps": "fp16",
    "rollout_correction": "rollouts", "old_logps": "rollouts", "sync_lost_limit": "vllm",
    "adapter_sync": "vllm", "media_trial": "media", "share_media_features": "media",
    "router_replay": "experts", "compile_decode": "rollouts",
    "keep_frozen_casts": "cost", "precision_metrics": "metrics", "precision_report": "how-it-works",
    "profile": "cost", "save_dtype": "checkpoints", "record_steps": "diff",
}  # fmt: skip
"""The page about each setting."""


def described() -> dict[str, str]:
    """The description of each setting in the docstring of the class."""
    text = ast.get_docstring(next(
        node for node in ast.parse(Path(settings.__file__).read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and node.name == "PrecisionSettings"
    )) or ""  # fmt: skip
    parts = re.split(r"^    (\w+): ", text.partition("Attributes:\n")[2], flags=re.M)[1:]
    return {name: " ".join(words.split()) for name, words in zip(parts[::2], parts[1::2], strict=True)}


def _accepted(name: str) -> str:
    accepts = ACCEPTED.get(name)
    if accepts is None:
        return ""
    if isinstance(accepts.values, Range):
        return f"{accepts.values}" + (", or unset" if accepts.unset else "")
    return ", ".join(f"`{value!r}`" for value in accepts.values)


def _type(value: object) -> str:
    return value.__name__ if isinstance(value, type) else str(value)


def _default(value: object) -> str:
    return "unset" if value is None else f"`{value!r}`"


def config_page() -> str:
    """Returns `config.md`."""
    words = described()
    lines = [
        "# Settings",
        "",
        "Every Safe config (`SafeGRPOConfig`, `SafeSFTConfig`, ...) is TRL's config with these fields. They are "
        "keys of recipes",
        "and options of the training commands too. `PrecisionArguments` adds them to [your own "
        "config](new-algorithm.md).",
        "",
        "| field | default | changes numbers? |",
        "|---|---|---|",
        *(
            f"| [`{one.name}`](#{one.name.replace('_', '-')}) | {_default(one.default)} | "
            f"{CHANGES.get(one.name, '')} |"
            for one in fields(PrecisionSettings)
        ),
        "",
    ]
    for one in fields(PrecisionSettings):
        accepted = _accepted(one.name)
        facts = [f"Type: `{_type(one.type)}`.", f"Default: {_default(one.default)}."]
        facts += [f"Accepts: {accepted}."] if accepted else []
        facts += [f"Changes numbers: {CHANGES[one.name]}."] if one.name in CHANGES else []
        page = PAGES.get(one.name)
        lines += [f"({one.name.replace('_', '-')})=", f"## {one.name}", "", words[one.name], "", " ".join(facts)]
        lines += [f"See [{page}]({page}.md).", ""] if page else [""]
    lines += [
        "## Dtypes",
        "",
        'A dtype is written `"fp32"`, `"float32"`, `"torch.float32"`, the same for bf16 (`"bfloat16"`) and fp16 '
        '(`"float16"`),',
        'or as a `torch.dtype`; `"auto"` where the setting accepts it. Anything else raises an error.',
        "",
        "## Flags of TRL's configs",
        "",
        "`bf16=True` and `fp16=True` work as in TRL. With a plain TRL config that sets neither, TRL enables `bf16`, "
        "and fails on",
        "machines without it. A flag that contradicts `precision` is refused, with the flag to remove. Weights that "
        "contradict",
        "`precision` are refused too. Under `bf16=True` or `fp16=True` alone, weights in the other half-precision "
        "format cause a",
        "warning; frozen weights that would crash are cast, and trained weights that would crash are refused.",
        "",
        "`model.to(torch.bfloat16)` also rounds the rotary frequencies; you get the warning",
        "[`rotary-frequencies-in-half`](refusals.md#rotary-frequencies-in-half). Load the model in its dtype with",
        "`from_pretrained(..., dtype=...)`.",
        "",
        "With a plain TRL config the loss scaler keeps torch's growth interval of 2,000 steps, which is longer than "
        "many RL runs.",
        "",
        "*Made from `safe_trainers/policy/settings.py` by `make docs`.*",
    ]
    return "\n".join(lines) + "\n"
