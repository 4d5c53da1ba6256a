"""Writes the gallery of recipes, from their headers and keys."""

import re
from typing import Any

import yaml

from safe_trainers.core.tasks import TASKS
from safe_trainers.recipes.packaged import Packaged, packaged


def recipes_page() -> str:
    """Returns `recipes.md`."""
    found = [one for one in packaged("recipes") if not one.name.rpartition("/")[2].startswith("tiny_")]
    tiny = [one for one in packaged("recipes") if one.name.rpartition("/")[2].startswith("tiny_")]
    lines = [
        "# Recipes by model and GPU",
        "",
        "Copy a recipe, check it, run it. `--config` also takes the name of a packaged recipe, such as",
        "`grpo/tiny_vlm_bf16`.",
        "",
        "```console",
        "safe-trainers copy grpo/tiny_vlm_bf16",
        "safe-trainers validate tiny_vlm_bf16.yaml",
        "safe-trainers grpo --config tiny_vlm_bf16.yaml --max_steps 20",
        "```",
        "",
        "`safe-trainers list` prints the names. Every key is also an option, which overrides the file. A run writes "
        "the",
        "checkpoint, `log.json` and a plot into its `output_dir`; `--dry-run` builds everything, does not train, "
        "and prints the",
        "precision report; `--resume` resumes.",
        "",
        "## Without a GPU",
        "",
        "| recipe | task | precision | time on 2 CPU cores |",
        "|---|---|---|---|",
        *(
            f"| `{_name(one)}` | {_task(one)} | {_precision(one)} | {_short(one.paragraph('Hardware'))} |"
            for one in tiny
        ),
        "",
        "These train embedded models on embedded data, and were [run with three seeds](tiny_task.md).",
        "",
        "## With a GPU",
        "",
        "| recipe | model | task | trains | precision |",
        "|---|---|---|---|---|",
    ]
    for one in found:
        keys = _keys(one)
        model = keys["model_name_or_path"].rpartition("/")[2]
        lines.append(
            f"| [`{_name(one)}`](#{_anchor(one)}) | {model} | {_task(one)} | {_trains(keys)} | {_precision(one)} |"
        )
    lines += [
        "",
        "None of these has been run on a GPU yet. The tests validate each, and train a tiny version of it (the same "
        "keys, an",
        "embedded model, data with the same columns) for two steps on a CPU.",
        "",
    ]
    for one in found:
        lines += [f"({_anchor(one)})=", f"### {_name(one)}", "", one.summary, ""]
        lines += [f"- Hardware: {one.paragraph('Hardware')}", f"- Memory: {_memory(_keys(one))}"]
        lines += [f"- Data: `{_keys(one).get('dataset_name')}`", ""]
    lines += [
        "*Made from the headers of `recipes/` by `make docs`. Memory is the weights as loaded, the adapters and their"
    ]
    lines += [
        "optimizer state, from the number of parameters in the model's name; activations and rollouts come on top.*"
    ]
    return "\n".join(lines) + "\n"


def _name(one: Packaged) -> str:
    return one.name.removesuffix(".yaml")


def _anchor(one: Packaged) -> str:
    return "recipe-" + re.sub(r"[^a-z0-9]+", "-", _name(one))


def _keys(one: Packaged) -> dict[str, Any]:
    keys: dict[str, Any] = yaml.safe_load(one.path.read_text(encoding="utf-8"))
    return keys


def _task(one: Packaged) -> str:
    return TASKS[one.name.partition("/")[0]].algorithm


def _precision(one: Packaged) -> str:
    keys = _keys(one)
    flag = "fp16" if keys.get("fp16") else "bf16" if keys.get("bf16") else str(keys.get("precision", "fp32"))
    return f"{flag}, T4 or V100" if flag == "fp16" else flag


def _trains(keys: dict[str, Any]) -> str:
    if keys.get("load_in_4bit"):
        return "QLoRA, 4 bits"
    return "LoRA" if keys.get("use_peft") else "all weights"


def _memory(keys: dict[str, Any]) -> str:
    """The bytes of weights and optimizer state, from the size in the model's name."""
    name = keys["model_name_or_path"]
    size = re.search(r"([\d.]+)b\b", name, re.I)
    if size is None:
        return "not estimated, because the name of the model has no size"
    billions = float(size[1])
    if keys.get("load_in_4bit"):
        return f"about {billions * 0.6:.1f} GB of weights"
    half = str(keys.get("dtype", "float32")) in ("bfloat16", "float16", "bf16", "fp16")
    if keys.get("use_peft"):
        return f"about {billions * (2 if half else 4):.1f} GB of weights"
    return f"about {billions * (8 if half else 16):.0f} GB of weights, gradients and optimizer state"


def _short(text: str | None) -> str:
    return (text or "").removeprefix("2 CPU cores, ").rstrip(".").partition(". ")[0]
