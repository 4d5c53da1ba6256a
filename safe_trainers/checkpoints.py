"""Checkpoints that are whole or not there.

`ExactCheckpoints` sits above TRL's trainer: what it writes comes after everything that TRL and transformers write.
What is in a folder, and which one to resume from, is in checkpoint_files.py; what of a trainer's state upstream does
not save, in resume.py.
"""

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list
from transformers import PreTrainedModel, trainer_utils

from .adapter_files import another_base, misfit, saved_base
from .checkpoint_files import (
    begin_checkpoint,
    checkpoints_in,
    choose_checkpoint,
    finish_checkpoint,
    put_back,
    remove,
    renew_marker,
)
from .dtypes import from_torch, parse_dtype
from .errors import CheckpointError, PrecisionWarning
from .file_checks import safetensors_dtypes
from .resume import EpochBegins, ExactState
from .towers import adapter_parameters
from .weight_files import cast_weights, declare_dtype, load_as_saved, saved_under_other_names


logger = logging.getLogger(__name__)


class ExactCheckpoints(ExactState):
    """Above TRL: saves, rotates and resumes checkpoints; the base of `PrecisionMixin`."""

    # What the trainers bring, for the type checker.
    callback_handler: Any
    model: Any
    add_callback: Callable[[Any], None]
    _get_output_dir: Callable[..., str]

    _limit: int | None = None  # the `save_total_limit` of the run while a checkpoint is being written
    _saving = False
    _push: str | None = None
    _saves_later = False  # whether callbacks are still to be told of a checkpoint
    _written: tuple[Path, Path] | None = None  # folder of the run, and of the checkpoint that was just written

    # ---- Saving ----

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Writes a checkpoint, then its marker, and only when callbacks are done with it removes older ones.

        Args:
            model: The model, as the training loop has it.
            trial: The trial of a hyperparameter search.
        """
        run_dir = Path(self._get_output_dir(trial=trial))
        folder = run_dir / f"{trainer_utils.PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        if self.args.should_save:
            begin_checkpoint(folder)
        self.accelerator.wait_for_everyone()
        self._limit, self._saving, self._push = self.args.save_total_limit, True, None
        try:
            with self._save_total_limit(None):  # upstream rotates inside: the older checkpoints are still needed
                super()._save_checkpoint(model, trial)  # type: ignore[misc]
        finally:
            self._saving = False
        if not self.args.save_only_model:
            self._save_state(folder)
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            finish_checkpoint(folder, self.state.global_step)
        if self._push is not None:
            super()._push_from_checkpoint(self._push)  # type: ignore[misc]
        self._written = run_dir, folder
        if not self._saves_later:
            self._settle_saved(run_dir, folder)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Settles what was saved once the callbacks of `on_save` have seen it, which may rewrite files."""
        self._saves_later, self._written = True, None
        try:
            super()._maybe_log_save_evaluate(*args, **kwargs)
        finally:
            self._saves_later = False
        if self._written is not None:
            self.accelerator.wait_for_everyone()  # callbacks run on every process
            self._settle_saved(*self._written)

    def _settle_saved(self, run_dir: Path, folder: Path) -> None:
        """Marks a checkpoint as it is now, and removes older ones."""
        if not self.args.should_save:
            return
        if folder.is_dir():
            renew_marker(folder, self.state.global_step)
        put_back(run_dir)  # before a later run takes it for one of its own
        if folder.is_dir() and self.args.save_total_limit is not None and self.args.save_total_limit > 0:
            self._rotate(run_dir, folder)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Waits with the push until the checkpoint is whole: what is uploaded has its marker."""
        if self._saving:
            self._push = checkpoint_folder
        else:
            super()._push_from_checkpoint(checkpoint_folder)  # type: ignore[misc]

    def _rotate(self, run_dir: Path, current: Path) -> None:
        """Removes checkpoints as upstream does; those of this package that are not whole do not count."""
        best = self.state.best_model_checkpoint
        kept = {Path(path).resolve() for path in (current, best) if path is not None}
        for checkpoint in checkpoints_in(run_dir):
            if checkpoint.remains and checkpoint.path.resolve() not in kept:
                logger.info("removing %s", checkpoint)
                remove(checkpoint.path)
        if hasattr(self, "_rotate_checkpoints"):  # transformers 4
            latest = self._sorted_checkpoints(use_mtime=True, output_dir=str(run_dir))[-1]  # type: ignore[attr-defined]
            rotate = partial(self._rotate_checkpoints, use_mtime=True, output_dir=str(run_dir))
        else:
            latest = trainer_utils.sort_checkpoints(str(run_dir), use_mtime=True)[-1]
            rotate = partial(
                trainer_utils.rotate_checkpoints,
                output_dir=str(run_dir),
                save_total_limit=self.args.save_total_limit,
                best_model_checkpoint=best,
                use_mtime=True,
            )
        if Path(latest) == current:
            rotate()
        else:  # where times of modification cannot be relied on, upstream takes the highest number for the latest
            logger.warning("%s is from another run and counts as the latest: no checkpoint is removed", latest)

    @contextlib.contextmanager
    def _save_total_limit(self, limit: int | None) -> Iterator[None]:
        before, self.args.save_total_limit = self.args.save_total_limit, limit
        try:
            yield
        finally:
            self.args.save_total_limit = before

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Writes the weights: in a checkpoint the exact bits that are trained, elsewhere in `save_dtype`.

        Args:
            output_dir: The folder.
            state_dict: Weights by name, where they had to be gathered.

        Raises:
            CheckpointError: If a weight does not fit `save_dtype`; nothing was written then.
        """
        wanted = getattr(self.args, "save_dtype", None)
        if self._saving:
            with self._save_total_limit(self._limit):  # the arguments are saved with the weights
                super()._save(output_dir, state_dict=state_dict)  # type: ignore[misc]
        elif wanted is None or not self.args.should_save:
            super()._save(output_dir, state_dict=state_dict)  # type: ignore[misc]
        else:
            dtype = parse_dtype(wanted, field="save_dtype", allow_auto=False)
            state_dict = self.model.state_dict() if state_dict is None else state_dict
            weights, kept = cast_weights(self.model, state_dict, dtype)
            super()._save(output_dir, state_dict=weights)  # type: ignore[misc]
            folder = Path(self.args.output_dir if output_dir is None else output_dir)
            declare_dtype(folder / "config.json", dtype)
            logger.info("weights are saved in %s in %s%s", dtype, folder, f"; as held: {kept}" if kept else "")

    # ---- Resuming ----

    def train(
        self, resume_from_checkpoint: Any = None, trial: Any = None, ignore_keys_for_eval: Any = None, **kwargs: Any
    ) -> Any:
        """Trains, from the start or from a checkpoint.

        Args:
            resume_from_checkpoint: `True` for the latest complete checkpoint in `output_dir`, a folder, or `None`.
            trial: The trial of a hyperparameter search.
            ignore_keys_for_eval: Keys of the model's outputs that evaluation leaves out.
            **kwargs: Passed on.

        Returns:
            What upstream's `train` returns.

        Raises:
            CheckpointError: If there is no complete checkpoint among those that `True` finds, or the given one is cut
                short, damaged or unreadable. Nothing was loaded or written then.
        """
        self._batch_size = None
        chosen = self._agree(partial(choose_checkpoint, resume_from_checkpoint, Path(self.args.output_dir)))
        if chosen is not None and not isinstance(chosen, bool):
            self._check_adapters(Path(chosen))
            self._read = self._read_state(Path(chosen))
        if not any(isinstance(callback, EpochBegins) for callback in self.callback_handler.callbacks):
            self.add_callback(EpochBegins(self._epoch_begins))
        try:
            return super().train(chosen, trial, ignore_keys_for_eval, **kwargs)  # type: ignore[misc]
        finally:
            self._read = self._resumed = self._carried_loss = None

    def _check_adapters(self, folder: Path) -> None:
        """Refuses adapters of other shapes before anything is loaded, and warns of ones of another base."""
        problem = misfit(folder, self.model)
        if problem is not None:
            raise CheckpointError([problem])
        warning = another_base("default", saved_base(folder), self.model)
        if warning is not None and self.accelerator.is_main_process:
            warnings.warn(str(warning), PrecisionWarning, stacklevel=4)

    def _agree(self, decide: Callable[[], Any]) -> Any:
        """Lets the main process decide, and every process return or raise the same."""
        outcome: list[Any] = [None, None]
        failure: Exception | None = None
        if self.accelerator.is_main_process:
            try:
                outcome[0] = decide()
            except Exception as error:
                failure = error
                known = isinstance(error, CheckpointError)  # others may not survive the way to another process
                outcome[1] = error if known else RuntimeError(f"the main process failed: {error!r}")
        broadcast_object_list(outcome)
        if failure is not None or outcome[1] is not None:
            raise failure or outcome[1]
        return outcome[0]

    def _load_scaler(self, checkpoint: str | None) -> None:
        """Restores the loss scaler where there is one on both sides."""
        if checkpoint is not None:
            scaler, saved = getattr(self.accelerator, "scaler", None), Path(checkpoint, "scaler.pt").is_file()
            if saved and scaler is None:
                logger.info("scaler.pt of %s is not used: this run scales no loss", checkpoint)
                return
            if scaler is not None and not saved:
                logger.info("%s has no scaler.pt: loss scaling begins at %g", checkpoint, scaler.get_scale())
        super()._load_scaler(checkpoint)  # type: ignore[misc]

    def _load_from_checkpoint(self, resume_from_checkpoint: str, *args: Any, **kwargs: Any) -> None:
        if not self._load_renamed(Path(resume_from_checkpoint)):
            super()._load_from_checkpoint(resume_from_checkpoint, *args, **kwargs)  # type: ignore[misc]
        self._adapters_loaded(str(resume_from_checkpoint))

    def _load_best_model(self) -> None:
        if not self._load_renamed(Path(self.state.best_model_checkpoint)):
            super()._load_best_model()  # type: ignore[misc]
        self._adapters_loaded(str(self.state.best_model_checkpoint))

    def _load_renamed(self, checkpoint: Path) -> bool:
        """Loads a full model whose weights are saved under other names; `False` where upstream's way is right."""
        sharded = getattr(self, "is_deepspeed_enabled", False) or getattr(self, "is_fsdp_enabled", False)
        if (
            sharded
            or not isinstance(self.model, PreTrainedModel)
            or not saved_under_other_names(self.model, checkpoint)
        ):
            return False
        logger.info("loading the weights of %s by the names that they are saved under", checkpoint)
        load_as_saved(self.model, checkpoint)
        return True

    def _adapters_loaded(self, checkpoint: str) -> None:
        """The moment after adapters were read from a checkpoint, on resume and for the best model.

        Args:
            checkpoint: The folder.
        """
        live = sorted({from_torch(parameter.dtype) for parameter in adapter_parameters(self.model)})
        for file in sorted(Path(checkpoint).glob("**/adapter_model.safetensors")) if live else ():
            saved = sorted(set(safetensors_dtypes(file).values()))
            if saved != live:
                logger.info("%s holds %s; resumed as %s", file.name, " and ".join(saved), " and ".join(live))
