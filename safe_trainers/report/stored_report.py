"""Reports on files: models, adapters, checkpoints, folders of runs, repositories on the hub, saved reports."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..checkpoint.folder import MARKER, Checkpoint, checkpoints_in, inspect_checkpoint
from ..checkpoint.integrity import TRAINER_STATE, Stored
from ..core.device import Device, detect_device
from ..core.dtypes import BFLOAT16, FLOAT32, SHORT
from ..core.errors import Fix, Problem, RecipeError
from ..core.files import read_json
from ..policy.resolve import ModelFacts, Requested, resolve
from ..weights.bitsandbytes_loading import asked_quantization, checkpoint_config
from .document import Cell, Report, Table
from .run_report import FILE, GROUPS, TITLE
from .stored_weights import (
    Part,
    floating,
    load_problems,
    namer,
    read_plain,
    read_weights,
    stored_parts,
    weight_files,
)


logger = logging.getLogger(__name__)

STORED, PRECISIONS, OPTIMIZER, CHECKPOINTS = "stored weights", "precisions", "stored optimizer state", "checkpoints"
"""Titles of the tables."""
ADAPTER_CONFIG = "adapter_config.json"


def read_report(path: Path) -> Report:
    """Reads a report from JSON.

    Args:
        path: The file.

    Raises:
        RecipeError: If it is not a report.
    """
    try:
        return Report.from_dict(read_json(path))
    except OSError as error:
        raise RecipeError(f"{path} cannot be read: {error}") from error
    except ValueError as error:
        raise RecipeError(f"{path} is not a report of this package: {error}") from error


def report_on_folder(folder: Path) -> Report:
    """Reports on the folder of a model, an adapter, a checkpoint or a run.

    Args:
        folder: The folder.

    Returns:
        The report: stored dtypes, the policy for each precision, whether checkpoints are complete, and the saved
        report of the run.

    Raises:
        RecipeError: If the folder has no weights, checkpoint or run.
    """
    listed = checkpoints_in(folder)
    checkpoint = inspect_checkpoint(folder) if _is_checkpoint(folder) else None
    if not (listed or checkpoint or weight_files(folder) or (folder / "config.json").is_file()):
        raise RecipeError(f"{folder} has no weights, checkpoint or run")
    facts: dict[str, Cell] = {}
    tables: list[Table] = []
    verdicts: list[Problem] = []
    if listed:
        rows = tuple(
            (c.path.name, c.complete, "; ".join(c.faults) or ("complete" if c.marked else "no marker")) for c in listed
        )
        tables.append(Table(CHECKPOINTS, ("checkpoint", "complete", "state"), rows))
    described = folder
    if checkpoint is None and listed and not weight_files(folder):
        checkpoint = next((c for c in listed if c.complete), listed[0])
        described = checkpoint.path
    if checkpoint is not None:
        more, found = _checkpoint_facts(checkpoint)
        facts |= {"checkpoint": described.name} | more
        verdicts += found
    parts, found = stored_weights(described)
    verdicts += found
    loading = [] if found else _loading(described, checkpoint)
    more, unread = _weight_facts(described, parts)
    facts |= more
    if parts:
        tables.append(stored_table(parts))
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
        except RecipeError as error:  # the rest of the folder can be reported on
            verdicts += [replace(problem, level="warning") for problem in error.problems]
        else:
            facts["report of the run"] = str(report.facts.get("phase"))
            tables += [Table(f"{t.title} of the run", t.columns, t.rows) for t in report.tables if t.title == GROUPS]
            verdicts += [verdict for verdict in report.verdicts if verdict.level in ("warning", "error")]
    verdicts += [*unread, *(problem for problem in loading if problem.level != "ok")]
    if not verdicts:
        verdicts += loading or [Problem("the headers of all files can be read", level="ok")]
    return Report(TITLE, str(folder), facts, tuple(tables), tuple(verdicts))


def report_on_hub(name: str) -> Report:
    """Reports on a repository, from downloaded files or from the headers on the hub.

    Args:
        name: The name of the repository.

    Raises:
        RecipeError: If the repository cannot be read.
    """
    from huggingface_hub import get_safetensors_metadata, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError
    from transformers import AutoConfig

    try:
        folder = Path(snapshot_download(name, local_files_only=True))
        if weight_files(folder):
            made = report_on_folder(folder)
            return Report(made.title, name, made.facts, made.tables, made.verdicts)
    except (LocalEntryNotFoundError, OSError, ValueError) as error:
        logger.info("%s is not complete in the cache (%s); reading its headers on the hub", name, type(error).__name__)
    try:
        metadata = get_safetensors_metadata(name)
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # without a network, the type depends on the HTTP library of the hub client
        why = str(error).strip().partition("\n")[0]
        raise RecipeError(f"{name} is not a folder and cannot be read from the hub: {why}") from error
    names = {"F64": "float64", "F32": FLOAT32, "BF16": BFLOAT16, "F16": "float16"}
    tensors = {
        tensor: Stored(names.get(i.dtype, i.dtype), i.parameter_count, i.data_offsets[1] - i.data_offsets[0])
        for file in metadata.files_metadata.values()
        for tensor, i in file.tensors.items()
    }
    parts = stored_parts(tensors, namer(None, config))
    facts = {"weight elements": sum(p.elements for p in parts), "weight bytes": sum(p.bytes for p in parts)}
    tables = (stored_table(parts), _precisions(parts, asked_quantization(name, None)))
    return Report(TITLE, name, facts, tables, (Problem("read from the headers on the hub", level="ok"),))


def _loading(folder: Path, checkpoint: Checkpoint | None) -> list[Problem]:
    """Returns whether the weights of a folder can be loaded; nothing for adapters and for weights of an engine."""
    files = weight_files(folder)
    if files and not (folder / ADAPTER_CONFIG).is_file() and (folder / "config.json").is_file():
        return load_problems(folder)
    engine = any(folder.glob("global_step*")) or any(folder.glob("pytorch_model_fsdp*"))
    if files or engine or (checkpoint is not None and checkpoint.faults):  # the faults name missing weights
        return []
    return [Problem("there are no weights in this folder, so that no model can be loaded from it")]


def _is_checkpoint(folder: Path) -> bool:
    return (folder / MARKER).is_file() or (folder / TRAINER_STATE).is_file()


def _checkpoint_facts(checkpoint: Checkpoint) -> tuple[dict[str, Cell], list[Problem]]:
    facts: dict[str, Cell] = {"complete": checkpoint.complete}
    try:
        facts["step"] = read_json(checkpoint.path / TRAINER_STATE).get("global_step")
    except (OSError, ValueError):
        facts["step"] = None  # `checkpoint.faults` reports it
    verdicts = [Problem(fault) for fault in checkpoint.faults]
    if not checkpoint.marked:
        why = "its files can be read, but files may be missing"
        verdicts.append(Problem("the checkpoint has no completion marker", why, level="note"))
    return facts, verdicts


def stored_weights(folder: Path) -> tuple[list[Part], list[Problem]]:
    """Returns the stored weights of a folder by part, and a problem for each file that cannot be read.

    Args:
        folder: The folder.
    """
    tensors: dict[str, Stored] = {}
    verdicts = []
    for file in weight_files(folder):
        try:
            tensors |= read_weights(file)
        except (ValueError, OSError) as error:
            verdicts.append(Problem(str(error)))
    adapter = (folder / ADAPTER_CONFIG).is_file()
    part_of: Callable[[str], str] = (lambda name: "adapter") if adapter else namer(folder) if tensors else str
    return stored_parts(tensors, part_of), verdicts


def stored_table(parts: list[Part]) -> Table:
    """Returns the table of stored weights.

    Args:
        parts: The parts.
    """
    rows = tuple((p.name, p.dtype, p.tensors, p.elements, p.bytes) for p in parts)
    return Table(STORED, ("part", "stored in", "tensors", "elements", "bytes"), rows)


def _weight_facts(folder: Path, parts: list[Part]) -> tuple[dict[str, Cell], list[Problem]]:
    """Returns facts from the config and the weights of a folder, and a problem if the config is unreadable."""
    facts: dict[str, Cell] = {}
    problems = []
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
        problems.append(Problem(f"the config cannot be read: {error}"))
    facts |= {"weight elements": sum(p.elements for p in parts), "weight bytes": sum(p.bytes for p in parts)}
    return {name: value for name, value in facts.items() if value is not None}, problems


def _declared(folder: Path, parts: list[Part]) -> Iterator[Problem]:
    """Yields a warning if the dtype in the config is not stored in the files."""
    config = checkpoint_config(str(folder), None)
    declared, held = config.get("dtype") or config.get("torch_dtype"), floating(parts)
    if isinstance(declared, str) and declared in SHORT and held and declared not in held:
        text = f"config.json has dtype {declared}, but the weights are {' and '.join(sorted(held))}"
        fix = Fix(f'write `"dtype": "{sorted(held)[0]}"` in config.json')
        yield Problem(text, fix=fix, level="warning")


def _precisions(parts: list[Part], quantization: str | None) -> Table:
    """Returns the policy of each precision on this machine, for the stored dtype and for TRL's default load dtype."""
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
    known = ModelFacts(weights, quantization=quantization)
    policy = resolve(Requested(bf16=precision == "bf16", fp16=precision == "fp16"), device, known)
    elements = sum(part.elements for part in parts)
    alone = next(iter(weights)) if len(weights) == 1 else None
    width = {FLOAT32: 4, None: None}.get(alone, 2)
    size = sum(p.bytes for p in parts) if quantization is not None or width is None else elements * width
    # Weights, gradients and the two moments of AdamW, all in the dtype of the master weights.
    master = 4 if policy.loss_scale.value else width
    full = None if quantization is not None or master is None else elements * master * 4
    found = [str(problem.id) for problem in (*policy.problems, *policy.warnings)]
    return (
        precision, " and ".join(sorted(weights)) or None, policy.compute.text, policy.loss_scale.text,
        size, full, ", ".join(found) or "ok",
    )  # fmt: skip


def _optimizer(folder: Path) -> tuple[list[Table], list[Problem]]:
    """The dtypes of the optimizer state in a checkpoint, and the loss scale."""
    tables, verdicts = [], []
    for name, read in (("optimizer.pt", _optimizer_table), ("scaler.pt", _scaler_table)):
        if (folder / name).is_file():
            try:
                tables.append(read(read_plain(folder / name)))
            except ValueError as error:
                verdicts.append(Problem(str(error), level="warning"))
            except (KeyError, TypeError, AttributeError) as error:
                verdicts.append(Problem(f"{name} does not have torch's format: {error}", level="warning"))
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
