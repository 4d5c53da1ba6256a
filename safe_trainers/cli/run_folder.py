"""The output folder of a training command: one run at a time, what it already contains, and where a run resumes.

Nothing here imports torch.
"""

import contextlib
import dataclasses
import errno
import os
import shlex
import socket
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from safetensors import SafetensorError

from ..checkpoint.folder import MARKER, checkpoints_in, choose_checkpoint
from ..core.errors import CheckpointError, Fix, Problem, RecipeError, SafeTrainersError, refuse
from ..core.files import read_json
from ..recipes.identity import differences, identity
from ..recipes.validate import Checked
from .phases import show_phase
from .plot import FILES
from .streams import was_printing


LOCK = "_run.lock"
"""Name of the file that a run locks. The hub client does not upload names with a leading underscore."""
_NO_SPACE = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG))


def folder_of(checked: Checked) -> Path:
    """Returns the output folder of a recipe.

    Args:
        checked: The recipe.
    """
    return Path(checked.values.get("output_dir") or "trainer_output")  # the default of transformers


@contextlib.contextmanager
def claim(folder: Path) -> Iterator[None]:
    """Makes and locks the output folder of a run; the lock ends with the process, however that ends.

    Args:
        folder: The folder; removed at the end if it was made here and is empty.

    Raises:
        RecipeError: If another run has locked it, or it cannot be written.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]  # innermost first
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _not_writable(folder, error) from error
    try:
        with _locked(folder):
            yield
    finally:
        for path in missing:
            if path.is_dir() and not any(path.iterdir()):  # another run may have written to it meanwhile
                path.rmdir()


def _not_writable(folder: Path, error: OSError) -> RecipeError:
    what = f"output_dir {folder} cannot be written: {error.strerror}"
    return RecipeError(Problem(what, fix=Fix("set `--output_dir` to a writable folder")))


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    path = folder / LOCK
    while True:
        try:
            opened = path.open("a+b")
        except OSError as error:
            raise _not_writable(folder, error) from error
        with opened as file:
            _lock(file, folder)
            if not path.exists() or not os.path.samestat(os.fstat(file.fileno()), path.stat()):
                continue  # the run that had locked it has removed it
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
            file.flush()
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return


def _lock(file: BinaryIO, folder: Path) -> None:
    try:
        import fcntl
    except ImportError:  # Windows
        show_phase(f"note: output_dir {folder} is not locked on this system; a second run would not be noticed")
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        holder = file.read().decode() or "another process"
        raise RecipeError(
            f"output_dir {folder} is in use by another run ({holder}). Wait until it ends, or write: "
            f"--output_dir {shlex.quote(str(_unused(folder)))}"
        ) from None
    except OSError as error:  # some network file systems have no locks
        show_phase(f"note: output_dir {folder} cannot be locked ({error.strerror}); a second run would not be noticed")


def _unused(folder: Path) -> Path:
    number = 2
    while (found := folder.with_name(f"{folder.name}-{number}")).exists():
        number += 1
    return found


@contextlib.contextmanager
def explain_full_disk(folder: Path) -> Iterator[None]:
    """Replaces an error inside the `with` block by one line if the disk is full.

    torch and safetensors raise errors of their own, without the number of the system's error, so that a small file is
    written to find out.

    Args:
        folder: The output folder of the run.

    Raises:
        RecipeError: If the disk is full, a quota is used up, or files must not be so large.
    """
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        if isinstance(error, OSError) and was_printing(error, show_phase.__module__):
            raise  # it is about the output of the command, and not about the folder
        why = _disk_error(error) or _refused_write(folder)
        if why is None or isinstance(error, SafeTrainersError):
            raise
        found = next((checkpoint.path for checkpoint in checkpoints_in(folder) if checkpoint.complete), None)
        resume = "" if found is None else f"; {found} is complete, and --resume continues from it"
        raise RecipeError(
            f"output_dir {folder} cannot be written: {why}. Free space, write: save_total_limit: 2, or another "
            f"--output_dir{resume}"
        ) from error


def _disk_error(error: BaseException | None) -> str | None:
    """The system's description of an error because of too little space, in a chain of exceptions."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _NO_SPACE:
            return os.strerror(error.errno)
        error = error.__cause__ or error.__context__
    return None


def _refused_write(folder: Path) -> str | None:
    """The system's description of why there is no space for a file of 1 MiB."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(2**20))
            file.flush()
    except OSError as error:
        return _disk_error(error)
    return None


def choose_start(checked: Checked, accept_changes: bool = False) -> Checked:
    """Chooses the checkpoint that a run resumes from, and prints it.

    Args:
        checked: The recipe.
        accept_changes: Whether the recipe may differ from that of the checkpoint.

    Returns:
        The recipe with the checkpoint's folder as `resume_from_checkpoint`; the same object if it does not resume.

    Raises:
        RecipeError: If the newest checkpoint is requested and there is none.
        CheckpointError: If the checkpoint is damaged, no checkpoint is complete, or it is of another recipe.
    """
    folder, given = folder_of(checked), checked.values.get("resume_from_checkpoint")
    newest = str(given).lower() == "true" and not Path("true").is_dir()
    if newest and not checkpoints_in(folder):
        raise RecipeError(
            f"output_dir {folder} has no checkpoint to resume from. Drop --resume, or write: --resume FOLDER"
        )
    chosen = choose_checkpoint(True if newest else given, folder)
    if not isinstance(chosen, str):
        return checked
    _check_recipe(Path(chosen), checked, accept_changes)
    show_phase(f"resuming from {chosen}")
    return dataclasses.replace(checked, values={**checked.values, "resume_from_checkpoint": chosen})


def _check_recipe(checkpoint: Path, checked: Checked, accept_changes: bool) -> None:
    """Refuses a checkpoint whose marker has another recipe, or prints the differences if they are accepted."""
    marker = checkpoint / MARKER
    saved = read_json(marker).get("recipe") if marker.is_file() else None
    if not isinstance(saved, Mapping):
        return
    defaults = {} if checked.schema is None else {key: known.default for key, known in checked.schema.keys.items()}
    changed = differences(saved, identity(checked.task, checked.values), defaults)
    if not changed:
        return
    found = "; ".join(f"{key}: {there!r} there, {here!r} here" for key, there, here in changed)
    if not accept_changes:
        what = f"resume_from_checkpoint={str(checkpoint)!r}"
        raise CheckpointError([refuse("checkpoint-of-another-recipe", what, changes=found)])
    show_phase(f"note: {checkpoint} is of another recipe: {found}")


def note_earlier_run(folder: Path) -> None:
    """Prints what a folder has of an earlier run, if it has anything.

    Args:
        folder: The output folder of a run that does not resume.
    """
    found = checkpoints_in(folder)
    if not found and not any((folder / name).is_file() for name in FILES):
        return
    held = _join([checkpoint.path.name for checkpoint in found]) or "no checkpoint"
    resume = "To continue it, write: --resume. " if any(checkpoint.complete for checkpoint in found) else ""
    show_phase(
        f"note: output_dir {folder} contains an earlier run ({held}), whose log and plot are replaced. {resume}"
        f"To keep it, write: --output_dir {shlex.quote(str(_unused(folder)))}"
    )


def _join(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) < 4 else f"{names[0]} and {len(names) - 1} older ones"
