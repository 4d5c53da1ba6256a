"""Decides which checkpoint folders are complete and readable, and which one to resume from.

A marker file makes checkpoints atomic. It is written with `"complete": false` before the first file, and with the list
of all files and their sizes after the last one. A checkpoint is complete if its marker contains `"complete": true` and
all listed files exist. Checkpoints of other trainers have no marker.

This module reads no tensors and unpickles nothing.
"""

import json
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.errors import CheckpointError, refuse
from ..core.files import is_file, read_json, replace_file
from .integrity import TRAINER_STATE, is_count, unreadable


logger = logging.getLogger(__name__)

MARKER = "safe_trainers_checkpoint.json"
"""Name of the marker file: format, step, whether the checkpoint is complete, and the size of each file in bytes."""
FORMAT = 1
INTERRUPTED = "saving was interrupted"
NOT_FINITE = "some trained weights are not finite"

_NAME = re.compile(r"checkpoint-(\d+)")
_REPLACED = "_replaced-"
"""Prefix of a complete checkpoint that is kept until a new one for the same step is complete."""
_WEIGHTS = re.compile(r"(adapter_|pytorch_)?model.*(?<!\.json)|global_step\d+")
_STATE = re.compile(r"optimizer.*|scheduler\.pt|scaler\.pt|safe_trainers_weights.*|" + re.escape(TRAINER_STATE))
_EDITABLE = {".md", ".txt", ".jinja", ".json", ".yaml", ".yml"}
"""Files that callbacks and users may edit, so that their sizes are not checked."""


@dataclass(frozen=True)
class Checkpoint:
    """The state of a checkpoint folder.

    Attributes:
        path: The folder.
        marked: Whether it has a marker.
        faults: One string for each file that is missing, unreadable or of another size, starting with its name.
    """

    path: Path
    marked: bool
    faults: tuple[str, ...]

    @property
    def complete(self) -> bool:
        """Whether all files are there, according to their names, sizes and headers."""
        return self.marked and not self.faults

    @property
    def remains(self) -> bool:
        """Whether the folder is left over from a save or a deletion by this package that was interrupted.

        False if the weights are there, because a user may have removed other files, or a newer release may have
        written the checkpoint.
        """
        if not self.faults:
            return False
        if not self.marked:
            return any(self.path.glob("safe_trainers_*"))
        return self.faults == (INTERRUPTED,) or not any(_WEIGHTS.fullmatch(path.name) for path in self.path.rglob("*"))

    def __str__(self) -> str:
        why = "; ".join(self.faults) or "complete" if self.marked else "; ".join(("no marker", *self.faults))
        return f"{self.path.name} ({why})"


def inspect_checkpoint(folder: Path) -> Checkpoint:
    """Checks the marker of a checkpoint folder, and the sizes and headers of the files that it lists.

    Files that the marker does not list are ignored, because they may have been added later.

    Args:
        folder: An existing folder.
    """
    marker = folder / MARKER
    if not marker.is_file():
        return Checkpoint(folder, False, tuple(_unmarked_faults(folder)))
    try:
        content = read_json(marker)
        if is_count(content["format"]) and content["format"] > FORMAT:
            return Checkpoint(folder, True, (f"{MARKER} was written by a newer release of safe-trainers",))
        if content["format"] is True or content["format"] != FORMAT:
            raise ValueError(f"unknown format {content['format']!r}")
        if content["complete"] is not True:
            return Checkpoint(folder, True, (str(content.get("fault", INTERRUPTED)),))
        files = _files_of(content)
    except (ValueError, KeyError, OSError) as error:
        return Checkpoint(folder, True, (f"{MARKER} is corrupt: {type(error).__name__}: {error}",))
    return Checkpoint(folder, True, tuple(_faults(folder, files)))


def begin_checkpoint(folder: Path) -> None:
    """Creates an empty folder with the marker of an incomplete checkpoint.

    Args:
        folder: The new folder. Remains of an interrupted save are removed; an existing checkpoint is renamed until the
            new one is complete; a folder that is not a checkpoint of this package is renamed and kept.
    """
    if os.path.lexists(folder):
        old = inspect_checkpoint(folder)
        if old.remains:
            logger.info("removing the remains of %s", old)
            remove(folder)
        elif old.faults and not old.marked:
            others = len(list(folder.parent.glob(f"_kept-*{folder.name}")))
            kept = folder.with_name(f"_kept-{others + 1}-{folder.name}")
            logger.warning("%s is not a checkpoint of safe-trainers and is kept as %s", old, kept.name)
            os.replace(folder, kept)
        else:
            replaced = folder.with_name(_REPLACED + folder.name)
            remove(replaced)
            os.replace(folder, replaced)
    folder.mkdir(parents=True, exist_ok=True)
    _write_marker(folder, {"format": FORMAT, "complete": False})


def remove(folder: Path) -> None:
    """Removes a folder or a file, or the link if it is a link; ignores errors in a folder.

    Args:
        folder: The folder, which need not exist.
    """
    if folder.is_symlink() or folder.is_file():
        folder.unlink()
    else:
        shutil.rmtree(folder, ignore_errors=True)


def finish_checkpoint(
    folder: Path, step: int, fault: str | None = None, recipe: Mapping[str, Any] | None = None
) -> None:
    """Marks a checkpoint as complete after all its files have been written.

    Args:
        folder: The folder.
        step: The optimizer step of the checkpoint.
        fault: Why no run should resume from it; the checkpoint then counts as incomplete.
        recipe: The settings that a resumed run has to share, as values for JSON; `None` without a recipe.
    """
    if fault is not None:
        _write_marker(folder, {"format": FORMAT, "complete": False, "step": step, "fault": fault})
        return
    settings = {} if recipe is None else {"recipe": dict(recipe)}
    _write_marker(folder, {"format": FORMAT, "complete": True, "step": step, **settings, "files": _written(folder)})
    remove(folder.with_name(_REPLACED + folder.name))


def renew_marker(folder: Path, step: int) -> None:
    """Updates the marker of a complete checkpoint after callbacks may have changed its files.

    Args:
        folder: The folder. Deleted files stay in the list, so that the checkpoint counts as incomplete.
        step: The optimizer step of the checkpoint.
    """
    try:
        content = read_json(folder / MARKER)
        if "fault" in content:
            return
        listed = _files_of(content)
    except (ValueError, OSError) as error:
        logger.warning("%s of %s was changed and cannot be read: %s", MARKER, folder, error)
        return
    files = {**listed, **_written(folder)}
    _write_marker(folder, {**content, "complete": True, "step": step, "files": files})


def _written(folder: Path) -> dict[str, int]:
    """Flushes all files to disk, and returns the size in bytes of each one except the marker."""
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != MARKER:
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)  # the marker must not reach the disk before the files that it lists
            finally:
                os.close(descriptor)
            files[path.relative_to(folder).as_posix()] = path.stat().st_size
    return files


def checkpoints_in(folder: Path) -> list[Checkpoint]:
    """Inspects the checkpoints of a run.

    Args:
        folder: The `output_dir`, which need not exist.

    Returns:
        Each `checkpoint-N` folder, the latest step first.
    """
    found = [path for path in folder.glob("checkpoint-*") if path.is_dir() and _NAME.fullmatch(path.name)]
    return [inspect_checkpoint(path) for path in sorted(found, key=_step, reverse=True)]


def common_files(folder: Path) -> list[str]:
    """Returns the names in a checkpoint that every process reads to resume: weights, optimizer and trainer state.

    Args:
        folder: The checkpoint.
    """
    if not folder.is_dir():
        return []
    read = (path.name for path in folder.iterdir() if _WEIGHTS.fullmatch(path.name) or _STATE.fullmatch(path.name))
    return sorted(read)


def choose_checkpoint(given: Any, output_dir: Path) -> Any:
    """Chooses the checkpoint from which a run resumes.

    Args:
        given: `resume_from_checkpoint`: `True` for the latest complete checkpoint, a folder, `False` or `None`.
            Recipes pass `"true"` and `"false"` as strings, which are names of folders if such a folder exists.
        output_dir: The `output_dir` of the run.

    Returns:
        The folder to resume from, or `given` if there is nothing to choose.

    Raises:
        CheckpointError: If `True` finds checkpoints but none of them is complete, or if saving the given folder was
            interrupted, or the folder is damaged or unreadable.
    """
    if isinstance(given, str) and not Path(given).exists():
        given = {"true": True, "false": False}.get(given.lower(), given)
    if given is None or given is False:
        return given
    if given is True:
        restore_replaced(output_dir)
        found = checkpoints_in(output_dir)
        chosen = next((checkpoint for checkpoint in found if checkpoint.complete), None)
        if chosen is not None:
            for skipped in found[: found.index(chosen)]:
                logger.warning("skipping incomplete checkpoint: %s", skipped)
            logger.info("resuming from %s, the latest complete checkpoint", chosen.path)
            return str(chosen.path)
        if not found:
            return given  # transformers reports that there is none
        readable = next((c.path for c in found if not c.marked and not c.faults), None)
        fix = "`resume_from_checkpoint=None`, to start again"
        if readable is not None:
            fix = f"`resume_from_checkpoint={str(readable)!r}`, if you are sure that it is complete, or {fix}"
        what = f"resume_from_checkpoint=True with output_dir={str(output_dir)!r}"
        names = ", ".join(map(str, found))
        raise CheckpointError([refuse("no-complete-checkpoint", what, found=names, fix=fix)])
    folder = Path(given)
    restore_replaced(folder.absolute().parent, folder.name)
    if not folder.is_dir():
        return given  # transformers reports that it does not exist
    checkpoint = inspect_checkpoint(folder)
    if checkpoint.faults:
        raise damaged(given, "; ".join(checkpoint.faults), folder.absolute().parent, output_dir)
    if not checkpoint.marked:
        logger.warning("%s has no marker: its files are readable, but some may be missing", folder)
    return str(given)


def damaged(given: Any, faults: str, *folders: Path) -> CheckpointError:
    """Makes the refusal of a damaged checkpoint.

    Args:
        given: `resume_from_checkpoint`.
        faults: The faults of its files.
        *folders: Where to look for a complete checkpoint to recommend.
    """
    fix = "another checkpoint, or `resume_from_checkpoint=None`, to start again"
    newest = next((other.path for folder in folders for other in checkpoints_in(folder) if other.complete), None)
    if newest is not None and newest.resolve() != Path(given).resolve():
        fix = f"`resume_from_checkpoint={str(newest)!r}`, the latest complete checkpoint"
    what = f"resume_from_checkpoint={str(given)!r}"
    return CheckpointError([refuse("checkpoint-damaged", what, faults=faults, fix=fix)])


def _write_marker(folder: Path, content: dict[str, Any]) -> None:
    text = json.dumps(content, indent=1)
    replace_file(folder / MARKER, lambda file: file.write(text.encode()))


def _step(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else -1


def restore_replaced(output_dir: Path, name: str = "*") -> None:
    """Restores checkpoints whose replacement was never completed.

    Args:
        output_dir: The `output_dir` of the run.
        name: The name of one checkpoint; by default all.
    """
    for replaced in output_dir.glob(f"{_REPLACED}checkpoint-*"):
        folder = replaced.with_name(replaced.name.removeprefix(_REPLACED))
        if name not in ("*", folder.name):
            continue
        new = inspect_checkpoint(folder) if os.path.lexists(folder) else None
        if new is not None and not new.remains and new.faults != (NOT_FINITE,):
            remove(replaced)
            continue
        logger.warning("restoring %s, because its replacement is not complete", folder.name)
        remove(folder)
        os.replace(replaced, folder)


def _files_of(content: Mapping[str, Any]) -> dict[str, int]:
    """Returns the files that a marker lists, with their sizes in bytes."""
    files = content.get("files")
    if not isinstance(files, dict) or not all(is_count(size) for size in files.values()):
        raise ValueError("`files` must map names to sizes")
    if TRAINER_STATE not in files:
        raise ValueError(f"`files` does not contain {TRAINER_STATE}")
    return files


def _faults(folder: Path, files: Mapping[str, int]) -> Iterator[str]:
    for name, size in files.items():
        path = folder / name
        edited = path.suffix in _EDITABLE and path.name != TRAINER_STATE
        if not is_file(path):
            yield f"{name} is missing"
        elif not edited and path.stat().st_size != size:
            yield f"{name} has {path.stat().st_size:,} bytes, but {size:,} were written"
        elif fault := unreadable(path):
            yield f"{name} {fault}"


def _unmarked_faults(folder: Path) -> Iterator[str]:
    """Yields reasons why a folder without a marker cannot be resumed."""
    if not (folder / TRAINER_STATE).is_file():  # transformers writes it last
        yield f"{TRAINER_STATE} is missing"
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        fault = unreadable(path) if path.is_file() else None
        if fault:
            yield f"{name} {fault}"
        if name.startswith("safe_trainers_"):
            yield f"{name} exists but {MARKER} does not: parts of the checkpoint were removed"
        if name.endswith(".index.json") and path.is_file() and not fault:
            shards = sorted(set(read_json(path)["weight_map"].values()))
            yield from (f"{shard} is missing" for shard in shards if not is_file(path.parent / shard))
