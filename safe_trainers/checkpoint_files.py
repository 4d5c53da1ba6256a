"""Checkpoint folders as files: which of them are complete, which can be read, and which one to resume from.

A checkpoint is complete when its marker says so and its files are those that the marker lists. The marker is written
twice: before the first file, with `"complete": false`, and after the last, with the list. So a folder that was cut
short is told from one that another trainer wrote, which has no marker at all.

No tensor is read here, and nothing is unpickled.
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

from .errors import CheckpointError, refuse
from .file_checks import TRAINER_STATE, is_count, is_file, read_json, replace_file, unreadable


logger = logging.getLogger(__name__)

MARKER = "safe_trainers_checkpoint.json"
"""The manifest of a checkpoint: format, step, whether it is complete, and the size of each file in bytes."""
FORMAT = 1
CUT_SHORT = "saving it was cut short"

_NAME = re.compile(r"checkpoint-(\d+)")
_ASIDE = "_replaced-"  # where a whole checkpoint waits while another of the same step is written
_WEIGHTS = re.compile(r"(adapter_|pytorch_)?model.*(?<!\.json)|global_step\d+")
_EDITABLE = {
    ".md",
    ".txt",
    ".jinja",
    ".json",
    ".yaml",
    ".yml",
}  # what callbacks and users edit; no resume needs a size


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint folder, as it was found.

    Attributes:
        path: The folder.
        marked: Whether it has a marker.
        faults: What is missing, of another size than written, or unreadable; one text each, starting with the file.
    """

    path: Path
    marked: bool
    faults: tuple[str, ...]

    @property
    def complete(self) -> bool:
        """Whether the folder holds all that was written, as far as names, sizes and headers show."""
        return self.marked and not self.faults

    @property
    def remains(self) -> bool:
        """Whether the folder is what is left of a checkpoint of this package whose saving or deletion was cut short.

        One that a user trimmed, or that a newer release wrote, is none: its weights are there.
        """
        if not self.faults:
            return False
        if not self.marked:
            return any(self.path.glob("safe_trainers_*"))
        return self.faults == (CUT_SHORT,) or not any(_WEIGHTS.fullmatch(path.name) for path in self.path.rglob("*"))

    def __str__(self) -> str:
        why = "; ".join(self.faults) or "complete" if self.marked else "; ".join(("no marker", *self.faults))
        return f"{self.path.name} ({why})"


def inspect_checkpoint(folder: Path) -> Checkpoint:
    """Looks at a checkpoint folder: its marker, the sizes of its files, their headers.

    Args:
        folder: The folder; it exists.

    Returns:
        What was found. Files that the marker does not list are not looked at: others may add files later.
    """
    marker = folder / MARKER
    if not marker.is_file():
        return Checkpoint(folder, False, tuple(_unmarked_faults(folder)))
    try:
        content = read_json(marker)
        if is_count(content["format"]) and content["format"] > FORMAT:
            return Checkpoint(folder, True, (f"{MARKER} was written by a newer release of safe-trainers",))
        if content["format"] is True or content["format"] != FORMAT:
            raise ValueError(f"there is no format {content['format']!r}")
        if content["complete"] is not True:
            return Checkpoint(folder, True, (CUT_SHORT,))
        files = _files_of(content)
    except (ValueError, KeyError, OSError) as error:
        return Checkpoint(folder, True, (f"{MARKER} is corrupt: {type(error).__name__}: {error}",))
    return Checkpoint(folder, True, tuple(_faults(folder, files)))


def begin_checkpoint(folder: Path) -> None:
    """Makes an empty folder with the marker of an unfinished checkpoint.

    Args:
        folder: Where the checkpoint goes. Remains of one that was cut short are removed; another one waits beside it
            until the new one is whole; and what is no checkpoint is kept, under another name.
    """
    if os.path.lexists(folder):
        old = inspect_checkpoint(folder)
        if old.remains:
            logger.info("removing the remains of %s", old)
            remove(folder)
        elif old.faults and not old.marked:
            others = len(list(folder.parent.glob(f"_kept-*{folder.name}")))
            kept = folder.with_name(f"_kept-{others + 1}-{folder.name}")
            logger.warning("%s is no checkpoint of this package, and is kept as %s", old, kept.name)
            os.replace(folder, kept)
        else:
            aside = folder.with_name(_ASIDE + folder.name)
            remove(aside)
            os.replace(folder, aside)
    folder.mkdir(parents=True, exist_ok=True)
    _write_marker(folder, {"format": FORMAT, "complete": False})


def remove(folder: Path) -> None:
    """Removes a folder as far as that is possible; of a link, the link alone.

    Args:
        folder: Its place; there need not be anything.
    """
    if folder.is_symlink():
        folder.unlink()
    else:
        shutil.rmtree(folder, ignore_errors=True)


def finish_checkpoint(folder: Path, step: int) -> None:
    """Marks a checkpoint as complete, once everything in it has been written.

    Args:
        folder: The folder.
        step: The optimizer step that it was saved at.
    """
    _write_marker(folder, {"format": FORMAT, "complete": True, "step": step, "files": _written(folder)})
    remove(folder.with_name(_ASIDE + folder.name))


def renew_marker(folder: Path, step: int) -> None:
    """Marks a complete checkpoint again, after callbacks may have changed its files.

    Args:
        folder: The folder. Files that are gone stay in the list: without them it is not complete any more.
        step: The optimizer step that it was saved at.
    """
    try:
        listed = _files_of(read_json(folder / MARKER))
    except (ValueError, OSError) as error:
        logger.warning("%s of %s is not as it was written: %s", MARKER, folder, error)
        return
    files = {**listed, **_written(folder)}
    _write_marker(folder, {"format": FORMAT, "complete": True, "step": step, "files": files})


def _written(folder: Path) -> dict[str, int]:
    """The size in bytes of each file but the marker, once all of them are on the disk."""
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != MARKER:
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)  # the marker must not reach the disk before what it vouches for
            finally:
                os.close(descriptor)
            files[path.relative_to(folder).as_posix()] = path.stat().st_size
    return files


def checkpoints_in(folder: Path) -> list[Checkpoint]:
    """The checkpoints of a run.

    Args:
        folder: Its `output_dir`; it need not exist.

    Returns:
        Each `checkpoint-N` folder, the latest step first.
    """
    found = [path for path in folder.glob("checkpoint-*") if path.is_dir() and _NAME.fullmatch(path.name)]
    return [inspect_checkpoint(path) for path in sorted(found, key=_step, reverse=True)]


def choose_checkpoint(given: Any, output_dir: Path) -> Any:
    """Decides what a run resumes from.

    Args:
        given: `resume_from_checkpoint`: `True` for the latest complete checkpoint, a folder, `False` or `None`; the
            first and third as text too, as a recipe has them, unless there is a folder of that name.
        output_dir: Where the run saves.

    Returns:
        The folder to resume from, or `given`, where there is nothing to decide.

    Raises:
        CheckpointError: If `True` finds checkpoints and none of them is complete, or the folder given is cut short,
            damaged or unreadable.
    """
    if isinstance(given, str) and not Path(given).exists():
        given = {"true": True, "false": False}.get(given.lower(), given)
    if given is None or given is False:
        return given
    if given is True:
        put_back(output_dir)
        found = checkpoints_in(output_dir)
        chosen = next((checkpoint for checkpoint in found if checkpoint.complete), None)
        if chosen is not None:
            for passed in found[: found.index(chosen)]:
                logger.warning("not resumed from: %s", passed)
            logger.info("resuming from %s, the latest complete checkpoint", chosen.path)
            return str(chosen.path)
        if not found:
            return given  # upstream says that there is none
        readable = next((c.path for c in found if not c.marked and not c.faults), None)
        fix = "`resume_from_checkpoint=None`, to start anew"
        if readable is not None:
            fix = f"`resume_from_checkpoint={str(readable)!r}`, if you know that it is whole, or {fix}"
        where = f"resume_from_checkpoint=True with output_dir={str(output_dir)!r}"
        names = ", ".join(map(str, found))
        raise CheckpointError([refuse("no-complete-checkpoint", where, found=names, fix=fix)])
    folder = Path(given)
    put_back(folder.absolute().parent, folder.name)
    if not folder.is_dir():
        return given  # upstream says that it is not there
    checkpoint = inspect_checkpoint(folder)
    if checkpoint.faults:
        raise damaged(given, "; ".join(checkpoint.faults), folder.absolute().parent, output_dir)
    if not checkpoint.marked:
        logger.warning(
            "%s has no marker: its files can be read, and whether they are all that was saved cannot be known", folder
        )
    return str(given)


def damaged(given: Any, faults: str, *folders: Path) -> CheckpointError:
    """The refusal of a checkpoint that is not whole.

    Args:
        given: `resume_from_checkpoint`.
        faults: What is wrong with which file.
        *folders: Where to look for a complete checkpoint to name instead.
    """
    fix = "a checkpoint that is whole, or `resume_from_checkpoint=None`, to start anew"
    newest = next((other.path for folder in folders for other in checkpoints_in(folder) if other.complete), None)
    if newest is not None and newest.resolve() != Path(given).resolve():
        fix = f"`resume_from_checkpoint={str(newest)!r}`, the latest complete one"
    return CheckpointError(
        [refuse("checkpoint-damaged", f"resume_from_checkpoint={str(given)!r}", faults=faults, fix=fix)]
    )


def _write_marker(folder: Path, content: dict[str, Any]) -> None:
    text = json.dumps(content, indent=1)
    replace_file(folder / MARKER, lambda file: file.write(text.encode()))


def _step(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else -1


def put_back(output_dir: Path, name: str = "*") -> None:
    """Returns checkpoints to their place that waited beside one that was never finished.

    Args:
        output_dir: Where the run saves.
        name: The one to return; by default all.
    """
    for aside in output_dir.glob(f"{_ASIDE}checkpoint-*"):
        place = aside.with_name(aside.name.removeprefix(_ASIDE))
        if name not in ("*", place.name):
            continue
        there = inspect_checkpoint(place) if os.path.lexists(place) else None
        if there is not None and not there.remains:
            remove(aside)
            continue
        logger.warning("%s is put back: the one that was to replace it was cut short", place.name)
        remove(place)
        os.replace(aside, place)


def _files_of(content: Mapping[str, Any]) -> dict[str, int]:
    """The files that a marker lists, with their sizes in bytes."""
    files = content.get("files")
    if not isinstance(files, dict) or not all(is_count(size) for size in files.values()):
        raise ValueError("its files are no mapping of names to sizes")
    if TRAINER_STATE not in files:
        raise ValueError(f"it lists no {TRAINER_STATE}")
    return files


def _faults(folder: Path, files: Mapping[str, int]) -> Iterator[str]:
    for name, size in files.items():
        path = folder / name
        edited = path.suffix in _EDITABLE and path.name != TRAINER_STATE
        if not is_file(path):
            yield f"{name} is missing"
        elif not edited and path.stat().st_size != size:
            yield f"{name} has {path.stat().st_size:,} bytes, and {size:,} were written"
        elif fault := unreadable(path):
            yield f"{name} {fault}"


def _unmarked_faults(folder: Path) -> Iterator[str]:
    """What shows that a folder without a marker cannot be resumed from."""
    if not (folder / TRAINER_STATE).is_file():
        yield f"{TRAINER_STATE} is missing"  # written last by transformers
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        fault = unreadable(path) if path.is_file() else None
        if fault:
            yield f"{name} {fault}"
        if name.startswith("safe_trainers_"):
            yield f"{name} is there and {MARKER} is not: parts of the checkpoint were removed"
        if name.endswith(".index.json") and path.is_file() and not fault:
            shards = sorted(set(read_json(path)["weight_map"].values()))
            yield from (f"{shard} is missing" for shard in shards if not is_file(path.parent / shard))
