"""Reports on what is not running: a model, a checkpoint, the folder of a run, a recipe, a report that was saved."""

import dataclasses
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .checkpoint_files import MARKER, Checkpoint, checkpoints_in, inspect_checkpoint
from .device import Device, detect_device
from .dtypes import BFLOAT16, FLOAT32, SHORT
from .errors import RecipeError
from .file_checks import TRAINER_STATE, Stored, read_json
from .policy import Flags, Model, PrecisionPolicy, resolve
from .precision_report import FILE, GROUPS, POLICY, TITLE
from .quantized_loading import asked_quantization, checkpoint_config
from .report import Cell, Level, Report, Table, Verdict
from .stored_weights import Part, floating, namer, read_plain, read_weights, stored_parts, weight_files


logger = logging.getLogger(__name__)

STORED, PRECISIONS, OPTIMIZER, CHECKPOINTS = "stored weights", "precisions", "stored optimizer state", "checkpoints"
"""Titles of the tables."""
ADAPTER_CONFIG = "adapter_config.json"


def report_on(target: str, task: str | None = None) -> Report:
    """Reports on whatever a name stands for.

    Args:
        target: A recipe (`*.yaml`), a saved report (`*.json`), an embedded model (`tiny:llava`), the folder of a
            model, an adapter, a checkpoint or a run, or the name of a repository on the hub.
        task: What a recipe is for, where it does not say it: `"grpo"`, `"rloo"`, `"sft"` or `"reward"`.

    Returns:
        The report.

    Raises:
        RecipeError: If there is nothing of that name, or it cannot be read.
    """
    from .recipes import embedded_name

    path = Path(target)
    if path.suffix in (".yaml", ".yml"):
        return report_on_recipe(path, task)
    if path.suffix == ".json":
        return read_report(path)
    family = embedded_name(target)
    if family is not None:
        return _report_on_embedded(target, family)
    if os.path.isdir(path):
        return report_on_folder(path)
    if os.path.exists(path) or target.startswith((".", "/", "~")) or target.count("/") > 1:
        raise RecipeError(f"{target} is no recipe, report, model, checkpoint or run")
    return _report_on_hub(target)


def read_report(path: Path) -> Report:
    """Reads a report that was written as JSON.

    Args:
        path: The file.

    Raises:
        RecipeError: If it is none.
    """
    try:
        return Report.from_dict(read_json(path))
    except OSError as error:
        raise RecipeError(f"{path} cannot be read: {error}") from error
    except ValueError as error:
        raise RecipeError(f"{path} is no report of this package: {error}") from error


def report_on_folder(folder: Path) -> Report:
    """Reports on a folder with weights: of a model, an adapter, a checkpoint or a run.

    Args:
        folder: The folder.

    Returns:
        The report: what the files hold, what each precision would make of it, whether a checkpoint is complete, and
        the report that its run saved.

    Raises:
        RecipeError: If it holds none of them.
    """
    listed = checkpoints_in(folder)
    checkpoint = inspect_checkpoint(folder) if _is_checkpoint(folder) else None
    if not (listed or checkpoint or weight_files(folder) or (folder / "config.json").is_file()):
        raise RecipeError(f"{folder} holds no weights, no checkpoint and no run")
    facts: dict[str, Cell] = {}
    tables: list[Table] = []
    verdicts: list[Verdict] = []
    if listed:
        rows = tuple((c.path.name, c.complete, "; ".join(c.faults) or _marked(c)) for c in listed)
        tables.append(Table(CHECKPOINTS, ("checkpoint", "complete", "state"), rows))
    described = folder
    if checkpoint is None and listed and not weight_files(folder):
        whole = next((c for c in listed if c.complete), listed[0])
        described, checkpoint = whole.path, whole
    if checkpoint is not None:
        more, verdict = _checkpoint_facts(checkpoint)
        facts |= {"checkpoint": described.name} | more
        verdicts += verdict
    parts, found = _stored(described)
    verdicts += found
    facts |= _weight_facts(described, parts)
    if parts:
        tables.append(_stored_table(parts))
    adapter_alone = (described / ADAPTER_CONFIG).is_file()
    if parts and not adapter_alone and checkpoint is None:
        tables.append(_precisions(parts, asked_quantization(str(described), None)))
        verdicts += _declared(described, parts)
    if checkpoint is not None:
        states, found = _optimizer(described)
        tables += states
        verdicts += found
    saved = next((place / FILE for place in (folder, folder.parent) if (place / FILE).is_file()), None)
    if saved is not None and (checkpoint is not None or listed or saved.parent == folder):
        try:
            report = read_report(saved)
        except RecipeError as error:  # of all there is, this alone is not known
            verdicts.append(Verdict("warning", str(error)))
        else:
            facts["report of the run"] = str(report.facts.get("phase"))
            tables += [Table(f"{t.title} of the run", t.columns, t.rows) for t in report.tables if t.title == GROUPS]
            verdicts += [verdict for verdict in report.verdicts if verdict.level in ("warning", "error")]
    if "config" in facts:
        verdicts.append(Verdict("error", f"the config {facts['config']}"))
    if not verdicts:
        verdicts.append(Verdict("ok", "all files can be read"))
    return Report(TITLE, str(folder), facts, tuple(tables), tuple(verdicts))


def report_on_recipe(path: Path, task: str | None = None) -> Report:
    """Reports on what the run of a recipe would be, as far as it can be known without loading its model.

    Args:
        path: The recipe.
        task: What it is for; by default what its folder, its header or its keys say, the first where they fit several.

    Returns:
        The report.

    Raises:
        RecipeError: If it cannot be run.
        PrecisionError: If its precision settings contradict each other.
    """
    from trl import get_quantization_config

    import safe_trainers

    from .declared import declared_policy
    from .recipes import TASKS, embedded_name

    recipe = _read_recipe(path, task)
    arguments, model = recipe.training, recipe.model
    trainer_class = getattr(safe_trainers, TASKS[recipe.task].trainer)
    loaded = {"dtype": model.dtype, "attn_implementation": model.attn_implementation}
    arguments.model_init_kwargs = {k: v for k, v in loaded.items() if v is not None} | dict(
        arguments.model_init_kwargs or {}
    )
    quantization = get_quantization_config(dataclasses.replace(model, dtype=FLOAT32))
    policy = declared_policy(arguments, model.model_name_or_path, trainer_class, quantization)
    facts: dict[str, Cell] = {
        "phase": "declared",
        "task": recipe.task,
        "model": model.model_name_or_path,
        "device": str(trainer_class.precision_device(arguments)),
        "compute": policy.compute.value,
        "autocast": policy.autocast.value,
        "loss scale": policy.loss_scale.value,
        "quantisation": asked_quantization(model.model_name_or_path, arguments, quantization),
        "adapter": f"LoRA of rank {model.lora_r}" if model.use_peft else None,
        "optimizer": str(getattr(arguments.optim, "value", arguments.optim)),
    }
    choices = dict(policy.choices()) | ({"master": policy.adapter} if model.use_peft else {})
    rows = tuple((decision, choice.value, choice.reason) for decision, choice in choices.items())
    tables = [Table(POLICY, ("decision", "value", "why"), rows)]
    name = str(model.model_name_or_path)
    if embedded_name(name) is None and Path(name).is_dir():
        parts, _ = _stored(Path(name))
        tables += [_stored_table(parts)] if parts else []
    verdicts = list(_policy_verdicts(policy)) or [
        Verdict("ok", "nothing speaks against it before the model is loaded")
    ]
    return Report(TITLE, str(path), {k: v for k, v in facts.items() if v is not None}, tuple(tables), tuple(verdicts))


def _read_recipe(path: Path, task: str | None) -> Any:
    from .recipe_file import read_file
    from .recipes import find_recipe, read_recipe
    from .validation import tasks_of

    path = path if os.path.isfile(path) else find_recipe(path.as_posix())
    return read_recipe(task or tasks_of(read_file(path))[0], ["--config", str(path)])


def _report_on_embedded(target: str, family: str) -> Report:
    from . import tiny
    from .recipes import EMBEDDED_MODELS

    if family not in EMBEDDED_MODELS:
        raise RecipeError(f"there is no embedded model {target}; there are {', '.join(EMBEDDED_MODELS)}")
    with tempfile.TemporaryDirectory() as scratch:
        made = report_on_folder(tiny.save(family, Path(scratch) / "model"))
    return Report(made.title, target, made.facts, made.tables, made.verdicts)


def _report_on_hub(name: str) -> Report:
    """Reports on a repository: from the files that were downloaded before, else from its headers on the hub."""
    from huggingface_hub import get_safetensors_metadata, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError
    from transformers import AutoConfig

    try:
        folder = Path(snapshot_download(name, local_files_only=True))
        if weight_files(folder):
            made = report_on_folder(folder)
            return Report(made.title, name, made.facts, made.tables, made.verdicts)
    except (LocalEntryNotFoundError, OSError, ValueError) as error:
        logger.info("%s is not here as a whole (%s); its headers are read on the hub", name, type(error).__name__)
    try:
        metadata = get_safetensors_metadata(name)
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # what is raised without a network depends on the hub client's own library
        why = str(error).strip().partition("\n")[0]
        raise RecipeError(f"{name} is no folder, and cannot be read from the hub: {why}") from error
    names = {"F64": "float64", "F32": FLOAT32, "BF16": BFLOAT16, "F16": "float16"}
    tensors = {
        tensor: Stored(names.get(i.dtype, i.dtype), i.parameter_count, i.data_offsets[1] - i.data_offsets[0])
        for file in metadata.files_metadata.values()
        for tensor, i in file.tensors.items()
    }
    parts = stored_parts(tensors, namer(None, config))
    facts = {"weight elements": sum(p.elements for p in parts), "weight bytes": sum(p.bytes for p in parts)}
    tables = (_stored_table(parts), _precisions(parts, asked_quantization(name, None)))
    return Report(TITLE, name, facts, tables, (Verdict("ok", "read from the headers on the hub"),))


def _is_checkpoint(folder: Path) -> bool:
    return (folder / MARKER).is_file() or (folder / TRAINER_STATE).is_file()


def _marked(checkpoint: Checkpoint) -> str:
    return "whole" if checkpoint.marked else "no marker"


def _checkpoint_facts(checkpoint: Checkpoint) -> tuple[dict[str, Cell], list[Verdict]]:
    facts: dict[str, Cell] = {"complete": checkpoint.complete}
    try:
        facts["step"] = read_json(checkpoint.path / TRAINER_STATE).get("global_step")
    except (OSError, ValueError):
        facts["step"] = None  # said below: it is one of the faults
    verdicts = [Verdict("error", fault) for fault in checkpoint.faults]
    if not checkpoint.marked:
        why = "it has no marker: its files can be read, and whether they are all that was saved cannot be known"
        verdicts.append(Verdict("note", why))
    return facts, verdicts


def _stored(folder: Path) -> tuple[list[Part], list[Verdict]]:
    """What the weight files of a folder hold, and what of them cannot be read."""
    tensors: dict[str, Stored] = {}
    verdicts = []
    for file in weight_files(folder):
        try:
            tensors |= read_weights(file)
        except (ValueError, OSError) as error:
            verdicts.append(Verdict("error", str(error)))
    adapter = (folder / ADAPTER_CONFIG).is_file()
    part_of: Callable[[str], str] = (lambda name: "adapter") if adapter else namer(folder) if tensors else str
    return stored_parts(tensors, part_of), verdicts


def _stored_table(parts: list[Part]) -> Table:
    rows = tuple((p.name, p.dtype, p.tensors, p.elements, p.bytes) for p in parts)
    return Table(STORED, ("part", "stored in", "tensors", "elements", "bytes"), rows)


def _weight_facts(folder: Path, parts: list[Part]) -> dict[str, Cell]:
    facts: dict[str, Cell] = {}
    try:
        if (folder / ADAPTER_CONFIG).is_file():
            adapter = read_json(folder / ADAPTER_CONFIG)
            facts["adapter"] = str(adapter.get("peft_type"))
            facts["base"] = str(adapter.get("base_model_name_or_path"))
        elif (folder / "config.json").is_file():
            config = read_json(folder / "config.json")
            facts["model"] = str(next(iter(config.get("architectures") or ["unknown"])))
            declared = config.get("dtype") or config.get("torch_dtype")
            facts["declared dtype"] = None if declared is None else str(declared)
            facts["quantisation"] = asked_quantization(str(folder), None)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        facts["config"] = f"cannot be read: {error}"
    facts |= {"weight elements": sum(p.elements for p in parts), "weight bytes": sum(p.bytes for p in parts)}
    return {name: value for name, value in facts.items() if value is not None}


def _declared(folder: Path, parts: list[Part]) -> Iterator[Verdict]:
    """Whether the config says what the files hold."""
    config = checkpoint_config(str(folder), None)
    declared, held = config.get("dtype") or config.get("torch_dtype"), floating(parts)
    if isinstance(declared, str) and declared in SHORT and held and declared not in held:
        text = f"config.json says {declared}, and the files hold {' and '.join(sorted(held))}"
        yield Verdict("warning", text, f'"dtype": "{sorted(held)[0]}" in config.json')


def _precisions(parts: list[Part], quantization: str | None) -> Table:
    """What each precision would make of a model on this machine, as stored and as TRL loads it by default."""
    device = detect_device()
    held = floating(parts)
    loads = [held] if quantization is not None else list(dict.fromkeys([frozenset({FLOAT32}), held]))
    rows = [_precision(name, weights, parts, device, quantization) for name in SHORT.values() for weights in loads]
    columns = (
        "precision", "weights", "compute", "loss scale", "weight bytes", "full fine-tuning bytes", "verdict",
    )  # fmt: skip
    return Table(PRECISIONS, columns, tuple(rows))


def _precision(
    precision: str, weights: frozenset[str], parts: list[Part], device: Device, quantization: str | None
) -> tuple[Cell, ...]:
    known = Model(weights, quantization=quantization)
    policy = resolve(Flags(bf16=precision == "bf16", fp16=precision == "fp16"), device, known)
    elements = sum(part.elements for part in parts)
    alone = next(iter(weights)) if len(weights) == 1 else None
    width = {FLOAT32: 4, None: None}.get(alone, 2)
    size = sum(p.bytes for p in parts) if quantization is not None or width is None else elements * width
    # Weights, gradients and AdamW's two moments, all in the dtype of the master weights.
    master = 4 if policy.loss_scale.value != "off" else width
    full = None if quantization is not None or master is None else elements * master * 4
    found = [problem.id for problem in (*policy.problems, *policy.warnings)]
    return (
        precision, " and ".join(sorted(weights)) or None, policy.compute.value, policy.loss_scale.value,
        size, full, ", ".join(found) or "ok",
    )  # fmt: skip


def _policy_verdicts(policy: PrecisionPolicy) -> Iterator[Verdict]:
    for problem in (*policy.problems, *policy.warnings):
        level: Level = "error" if problem in policy.problems else "warning"
        yield Verdict(level, f"{problem.given}: {problem.why}", problem.fix, problem.id)


def _optimizer(folder: Path) -> tuple[list[Table], list[Verdict]]:
    """What the optimizer's state in a checkpoint is held in, and the loss scale."""
    tables, verdicts = [], []
    for name, read in (("optimizer.pt", _optimizer_table), ("scaler.pt", _scaler_table)):
        if (folder / name).is_file():
            try:
                tables.append(read(read_plain(folder / name)))
            except ValueError as error:
                verdicts.append(Verdict("warning", str(error)))
            except (KeyError, TypeError, AttributeError) as error:
                verdicts.append(Verdict("warning", f"{name} is not as torch writes it: {error}"))
    return tables, verdicts


def _optimizer_table(content: Any) -> Table:
    found: dict[tuple[str, str], list[int]] = {}
    for state in content["state"].values():
        for key, value in state.items():
            if hasattr(value, "element_size"):
                row = found.setdefault((key, str(value.dtype).removeprefix("torch.")), [0, 0, 0])
                row[0] += 1
                row[1] += value.numel()
                row[2] += value.numel() * value.element_size()
    rows = tuple((key, dtype, n, elements, size) for (key, dtype), (n, elements, size) in found.items())
    return Table(OPTIMIZER, ("state", "stored in", "tensors", "elements", "bytes"), rows)


def _scaler_table(content: Any) -> Table:
    keys = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")
    return Table("loss scaler", ("setting", "value"), tuple((k.strip("_"), content[k]) for k in keys if k in content))
