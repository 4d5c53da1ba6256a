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
import struct
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from .errors import CheckpointError, refuse


logger = logging.getLogger(__name__)

MARKER = "safe_trainers_checkpoint.json"
"""The manifest of a checkpoint: format, step, whether it is complete, and the size of each file in bytes."""
TRAINER_STATE = "trainer_state.json"
FORMAT = 1
CUT_SHORT = "saving it was cut short"

_NAME = re.compile(r"checkpoint-(\d+)")
_ASIDE = "_replaced-"  # where a whole checkpoint waits while another of the same step is written
_TORCH = re.compile(
    r"(pytorch_model|adapter_model|optimizer|scheduler|scaler|rng_state|training_args|safe_trainers_)"
    r".*\.(bin|pt|pth)"
)
_WEIGHTS = re.compile(r"(adapter_|pytorch_)?model.*(?<!\.json)|global_step\d+")
_JSON = (TRAINER_STATE, "config.json", "adapter_config.json")
_EDITABLE = {".md", ".txt", ".jinja", ".json", ".yaml", ".yml"}  # what callbacks and users edit; no resume needs a size
_SAFETENSORS = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}


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


def replace_file(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Writes a file that is there as a whole or not at all, also after a power cut.

    Args:
        path: Its place.
        write: What writes the content into an open file.
    """
    temporary = path.with_name(f".{path.name}.part")
    with open(temporary, "wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


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
        content = json.loads(marker.read_text(encoding="utf-8"))
        finished, files = content["complete"] is True, dict(content.get("files") or {})
        newer = content["format"] > FORMAT
    except (ValueError, KeyError, TypeError) as error:
        return Checkpoint(folder, True, (f"{MARKER} is corrupt: {type(error).__name__}: {error}",))
    if newer:
        return Checkpoint(folder, True, (f"{MARKER} was written by a newer release of safe-trainers",))
    if not finished:
        return Checkpoint(folder, True, (CUT_SHORT,))
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
            kept = _free_name(folder)
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
    if inspect_checkpoint(folder).marked:
        files = {**_files_of(_read_json(folder / MARKER)), **_written(folder)}
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
        _put_back(output_dir)
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


def safetensors_dtypes(path: Path) -> dict[str, str]:
    """The dtype of each tensor of a safetensors file, from its header alone.

    Args:
        path: The file.

    Returns:
        Dtypes by tensor name: canonical names for floating dtypes, the file's own (`"U8"`) for others.

    Raises:
        ValueError: If the header does not fit the file.
    """
    size = path.stat().st_size
    with open(path, "rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
        if length + 8 > size:
            raise ValueError(f"{size:,} bytes are shorter than its header")
        header = json.loads(file.read(length))
    if not isinstance(header, dict):
        raise ValueError("its header is no mapping")
    tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
    end = 8 + length + max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
    if end != size:
        raise ValueError(f"{size:,} bytes, and its header promises {end:,}")
    return {name: _SAFETENSORS.get(entry["dtype"], entry["dtype"]) for name, entry in tensors.items()}


def _write_marker(folder: Path, content: dict[str, Any]) -> None:
    text = json.dumps(content, indent=1)
    replace_file(folder / MARKER, lambda file: file.write(text.encode()))


def _step(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else -1


def _put_back(output_dir: Path) -> None:
    """Returns checkpoints to their place that waited beside one that was never finished."""
    for aside in output_dir.glob(f"{_ASIDE}checkpoint-*"):
        place = aside.with_name(aside.name.removeprefix(_ASIDE))
        if place.is_dir() and inspect_checkpoint(place).complete:
            shutil.rmtree(aside, ignore_errors=True)
        else:
            logger.warning("%s is put back: the one that was to replace it was cut short", place.name)
            shutil.rmtree(place, ignore_errors=True)
            os.replace(aside, place)


def _faults(folder: Path, files: Mapping[str, int]) -> Iterator[str]:
    for name, size in files.items():
        path = folder / name
        if not path.is_file():
            yield f"{name} is missing"
        elif path.stat().st_size != size:
            yield f"{name} has {path.stat().st_size:,} bytes, and {size:,} were written"
        elif fault := _unreadable(path):
            yield f"{name} {fault}"


def _unmarked_faults(folder: Path) -> Iterator[str]:
    """What shows that a folder without a marker cannot be resumed from."""
    if not (folder / TRAINER_STATE).is_file():
        yield f"{TRAINER_STATE} is missing"  # written last by transformers
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and (fault := _unreadable(path)):
            yield f"{name} {fault}"
        if name.startswith("safe_trainers_"):
            yield f"{name} is there and {MARKER} is not: parts of the checkpoint were removed"
        if name.endswith(".index.json") and path.is_file() and not _unreadable(path):
            shards = json.loads(path.read_text(encoding="utf-8")).get("weight_map", {}).values()
            yield from (f"{shard} is missing" for shard in sorted(set(shards)) if not (path.parent / shard).is_file())


def _unreadable(path: Path) -> str | None:
    """Why a file cannot be what its name says, from its header or its end; `None` where nothing speaks against it."""
    try:
        if path.suffix == ".safetensors":
            safetensors_dtypes(path)
        elif _TORCH.fullmatch(path.name):
            with open(path, "rb") as file:
                legacy = file.read(1) == b"\x80"  # a pickle, as torch wrote before its zip format
            if not legacy and not zipfile.is_zipfile(path):
                return f"({path.stat().st_size:,} bytes) is truncated or corrupt: it is no file of torch.save"
        elif path.name in _JSON or path.name.endswith(".index.json"):
            json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        return f"is truncated or corrupt: {error}"
    return None
