"""One launched process: `python -m safe_trainers.cli.launched TASK ...`.

torch records why it fails, in the file that its launcher assigns to each process (`TORCHELASTIC_ERROR_FILE`). The
process itself prints nothing, so that the launching process can print the first failure alone.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from ..core.errors import SafeTrainersError
from ..recipes.validate import check_recipe, split_config
from .launch_env import CRASHED, ERROR_FILE, REFUSED, RESUME_COMMAND, SHARED_FOLDER, STOPPED
from .main import build_parser, quieten
from .train import leave_at_exit, recipe_arguments, run_here


PARENT_CHECK = 1.0
"""Seconds between two checks whether the launching process still runs."""


def end_with_parent() -> None:
    """Starts a thread that kills this process when the launching process has ended without ending it.

    A launching process that is killed, for example for its memory, cannot end what it has launched. The processes of
    other machines then wait for this one.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_CHECK)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()


def main(argv: Sequence[str]) -> int:
    """Trains, records an exception, and turns it into an exit status.

    Args:
        argv: The command line without launch options.

    Returns:
        The exit status.
    """
    from torch.distributed.elastic.multiprocessing.errors import ErrorHandler, record  # imports torch

    class Recorder(ErrorHandler):
        """torch's recorder of exceptions without Python's fault handler, which prints a stack in aborted processes."""

        def initialize(self) -> None:
            """Does nothing; torch's own enables the fault handler."""

    quieten()

    def train() -> int:
        options, rest = build_parser(argv[0]).parse_known_args(list(argv))
        path, overrides = split_config(recipe_arguments(options, rest))
        checked = check_recipe(path, options.command, overrides)
        return run_here(options, checked, os.environ.get(RESUME_COMMAND, ""))

    try:
        status: int = record(train, Recorder())() or 0
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Exception as error:
        if not os.path.isfile(os.environ.get(ERROR_FILE, "")):
            raise  # the exception was not recorded
        return REFUSED if isinstance(error, SafeTrainersError) else CRASHED
    if status > 128:
        Path(os.environ[SHARED_FOLDER], STOPPED).write_text(str(status))
        return 0
    return status


if __name__ == "__main__":
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # while libraries are imported, an interrupt prints no traceback
    status = main(sys.argv[1:])
    leave_at_exit(status)
    sys.exit(status)
