"""Saves and resumes atomic checkpoints.

`ExactCheckpoints` comes before TRL's trainer in the MRO, so that it writes after TRL and transformers.
"""

import contextlib
import logging
import socket
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from accelerate.utils import broadcast_object_list, gather_object
from transformers import PreTrainedModel, trainer_utils

from ..core.dtypes import from_torch, join_dtypes, parse_dtype
from ..core.errors import CheckpointError, raise_if, refuse, warn
from ..core.feature import Run
from ..core.files import set_config_dtype
from ..model.parts import adapter_parameters, local_shard
from ..weights.cast import apply_casts
from ..weights.trainables import another_base
from .adapters import (
    adapters_kept_active,
    forget_ranks,
    holds_all_trained,
    load_default_adapter,
    load_named_adapters,
    load_trained,
    misfit,
    not_written_by_peft,
    save_trained,
    saved_base,
)
from .folder import (
    NOT_FINITE,
    begin_checkpoint,
    checkpoints_in,
    choose_checkpoint,
    common_files,
    finish_checkpoint,
    remove,
    renew_marker,
    restore_replaced,
)
from .integrity import safetensors_dtypes
from .trainer_state import WINDOW, TrainerState
from .weights import cast_weights, load_as_saved, saved_under_other_names, virtual_tokens_cast


logger = logging.getLogger(__name__)


class ExactCheckpoints:
    """Saves, rotates and resumes checkpoints; a base class of `PrecisionMixin`.

    A trainer whose next step depends on other attributes adds them:
    `exact_state = (*ExactCheckpoints.exact_state, "replay")`. They may contain tensors, numbers, strings, lists and
    mappings.

    Attributes:
        exact_state: Attributes of the trainer that are saved with each checkpoint and restored on resume, if it has
            them. `_last_loaded_step` must not be restored, because a new vLLM engine needs the weights.
        recipe: Settings that the marker of each checkpoint stores, so that the training commands refuse to resume
            with others; `None` for a trainer without a recipe.
    """

    recipe: dict[str, Any] | None = None

    exact_state: ClassVar[tuple[str, ...]] = (
        *WINDOW,
        "_metrics",  # averaged in the next log
        "_logs",  # the completions of the next log
        "_total_train_tokens",
        "_current_train_step_time",
    )

    # Attributes of the trainers, for the type checker.
    args: Any
    accelerator: Any
    state: Any
    model: Any
    control: Any
    _run: Run
    _get_output_dir: Callable[..., str]

    _trainer_state: TrainerState
    _limit: int | None = None  # the `save_total_limit` of the run while a checkpoint is being written
    _saving = False
    _push: str | None = None  # the checkpoint to push when it is complete
    _saves_later = False  # whether the callbacks of `on_save` have yet to run
    _written: tuple[Path, Path] | None = None  # folder of the run, and of the checkpoint that was just written

    # ---- Saving ----

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Writes a checkpoint, then its marker, and removes older checkpoints after the callbacks of `on_save`.

        Args:
            model: The model of the training loop.
            trial: The trial of a hyperparameter search.
        """
        run_dir = Path(self._get_output_dir(trial=trial))
        folder = run_dir / f"{trainer_utils.PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        if self.args.should_save:
            begin_checkpoint(folder)
        self.accelerator.wait_for_everyone()
        self._limit, self._saving, self._push = self.args.save_total_limit, True, None
        try:
            with self._save_total_limit(None):  # older checkpoints are needed until this one is complete
                super()._save_checkpoint(model, trial)  # type: ignore[misc]
        finally:
            self._saving = False
        if self.args.save_only_model:
            logger.info("%s has no state of the optimizer: save_only_model=True", folder.name)
        else:
            self._trainer_state.save(folder)
        if self._saves_trained():
            save_trained(folder, self.model, self.args.should_save)
        self.accelerator.wait_for_everyone()
        fault = None if self._has_finite_weights() else NOT_FINITE
        if fault is not None:
            self._run.warn_once(warn("checkpoint-not-finite", folder.name))
        if self.args.should_save:
            finish_checkpoint(folder, self.state.global_step, fault, self.recipe)
        if self._push is not None:
            super()._push_from_checkpoint(self._push)  # type: ignore[misc]
        self._written = run_dir, folder
        if not self._saves_later:
            self._finish_save(run_dir, folder)

    def _saves_trained(self) -> bool:
        """Whether weights that PEFT does not write are saved here: DeepSpeed saves them itself, FSDP1 joins them."""
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        joined = plugin is not None and plugin.fsdp_version == 1
        return not joined and not self._has_deepspeed()

    def _has_deepspeed(self) -> bool:
        return bool(getattr(self, "is_deepspeed_enabled", False))

    def _has_finite_weights(self) -> bool:
        """Whether the trained weights are finite on every process."""
        trained = (getattr(p, "ds_tensor", p) for p in self.model.parameters() if p.requires_grad)  # ZeRO-3 shards it
        flags = [local_shard(weight).isfinite().all().to(self.accelerator.device) for weight in trained]
        finite = torch.stack(flags).all() if flags else torch.tensor(True, device=self.accelerator.device)
        return bool(self.accelerator.gather(finite.reshape(1)).all())

    def _maybe_log_save_evaluate(self, tr_loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Finishes a save after the callbacks of `on_save`, which may rewrite files."""
        self._trainer_state.note_loss(tr_loss)
        self._saves_later, self._written = True, None
        try:
            super()._maybe_log_save_evaluate(tr_loss, *args, **kwargs)  # type: ignore[misc]
        finally:
            self._saves_later = False
        if self._written is not None:
            self.accelerator.wait_for_everyone()  # callbacks run on every process
            self._finish_save(*self._written)

    def _finish_save(self, run_dir: Path, folder: Path) -> None:
        """Updates the marker of a checkpoint, and removes older checkpoints."""
        if not self.args.should_save:
            return
        if folder.is_dir():
            renew_marker(folder, self.state.global_step)
        restore_replaced(run_dir)
        if folder.is_dir() and self.args.save_total_limit is not None and self.args.save_total_limit > 0:
            self._rotate(run_dir, folder)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Delays a push until the checkpoint is complete, so that the uploaded files include the marker."""
        if self._saving:
            self._push = checkpoint_folder
        else:
            super()._push_from_checkpoint(checkpoint_folder)  # type: ignore[misc]

    def _rotate(self, run_dir: Path, current: Path) -> None:
        """Removes checkpoints as transformers does, after remains of interrupted saves, which do not count."""
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
        else:  # if modification times are unreliable, transformers takes the highest number for the latest checkpoint
            logger.warning("%s is from another run and counts as the latest; no checkpoint is removed", latest)

    @contextlib.contextmanager
    def _save_total_limit(self, limit: int | None) -> Iterator[None]:
        before, self.args.save_total_limit = self.args.save_total_limit, limit
        try:
            yield
        finally:
            self.args.save_total_limit = before

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Writes the weights: exactly as they are trained in a checkpoint, in `save_dtype` otherwise.

        Args:
            output_dir: The folder.
            state_dict: Weights by name, if they had to be gathered.

        Raises:
            CheckpointError: If a weight overflows `save_dtype`; nothing has been written.
        """
        save_dtype = getattr(self.args, "save_dtype", None)
        if self._saving:
            with self._save_total_limit(self._limit):  # the arguments are saved with the weights
                super()._save(output_dir, state_dict=state_dict)  # type: ignore[misc]
        elif save_dtype is None or not self.args.should_save:
            super()._save(output_dir, state_dict=state_dict)  # type: ignore[misc]
        else:
            dtype = parse_dtype(save_dtype, field="save_dtype", allow_auto=False)
            state_dict = self.model.state_dict() if state_dict is None else state_dict
            weights, kept = cast_weights(self.model, state_dict, dtype)
            with virtual_tokens_cast(self.model, dtype):
                super()._save(output_dir, state_dict=weights)  # type: ignore[misc]
            folder = Path(self.args.output_dir if output_dir is None else output_dir)
            set_config_dtype(folder / "config.json", dtype)
            logger.info("saved weights in %s in %s%s", dtype, folder, f", except {kept}" if kept else "")

    # ---- Resuming ----

    def _choose_checkpoint(self, resume_from_checkpoint: Any) -> Any:
        """Chooses the checkpoint from which `train` resumes, and reads its state without restoring it.

        Args:
            resume_from_checkpoint: `True` for the latest complete checkpoint in `output_dir`, a folder, or `None`.

        Returns:
            The argument for transformers' `train`.

        Raises:
            CheckpointError: As in `choose_checkpoint`, or if its adapters do not match the model.
        """
        self._trainer_state.begin_train()
        # FSDP1 has joined the weights of a model that is trained again.
        joined = hasattr(self.model, "_fsdp_wrapped_module")
        skipped = joined or self._saves_trained() or self._has_deepspeed()
        lacking = {} if skipped else not_written_by_peft(self.model)
        if lacking:
            what = f"{len(lacking)} trained tensors, such as {next(iter(lacking))}, under FSDP1"
            self._run.warn_once(warn("trained-weights-not-saved", what))
        chosen = self._agree(partial(choose_checkpoint, resume_from_checkpoint, Path(self.args.output_dir)))
        if chosen is not None and not isinstance(chosen, bool):
            self._check_everywhere(Path(chosen))
            self._check_adapters(Path(chosen))
            self._trainer_state.read(Path(chosen))
        return chosen

    def _inner_training_loop(self, batch_size: int | None = None, *args: Any, **kwargs: Any) -> Any:
        self._trainer_state.begin_loop(batch_size)
        return super()._inner_training_loop(batch_size, *args, **kwargs)  # type: ignore[misc]

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> tuple[list[Any], Any]:
        """Returns the batches of a step: none if the run is resumed after its last step, where stock trains one more.

        Args:
            *args: Passed to `Trainer.get_batch_samples`.
            **kwargs: Passed to `Trainer.get_batch_samples`.
        """
        step, last = self.state.global_step, self.state.max_steps
        if 0 < last <= step and not self._trainer_state.stepped:
            self._run.warn_once(warn("run-is-finished", f"the checkpoint is of step {step} of {last}"))
            self.control.should_training_stop = True
            return [], None
        return super().get_batch_samples(*args, **kwargs)  # type: ignore[misc]

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Restores the trainer's state; transformers calls this once, before the first step after a resume."""
        super()._load_rng_state(checkpoint)  # type: ignore[misc]
        self._trainer_state.restore(checkpoint)
        if checkpoint is not None and not self._has_finite_weights():
            self._run.warn_once(warn("resumes-weights-not-finite", f"resume_from_checkpoint={str(checkpoint)!r}"))

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Runs one step; after a resume, the first step also returns the losses since the last log."""
        return self._trainer_state.carry(super().training_step(*args, **kwargs))  # type: ignore[misc]

    def _check_everywhere(self, folder: Path) -> None:
        """Refuses a checkpoint whose common files are missing for some processes, because their machine lacks them."""
        if self.args.world_size == 1:
            return
        names = [common_files(folder) if self.accelerator.is_main_process else []]
        broadcast_object_list(names)
        missing = [name for name in names[0] if not (folder / name).exists()]
        place = (self.args.process_index, socket.gethostname(), missing)
        lacking = [found for found in gather_object([place]) if found[2]]
        if lacking:
            rank, host, files = lacking[0]
            shown = ", ".join(files[:3]) + (f" and {len(files) - 3} more" if len(files) > 3 else "")
            who = (
                f"rank {rank} ({host}), and {len(lacking) - 1} more," if len(lacking) > 1 else f"rank {rank} ({host})"
            )
            what = f"resume_from_checkpoint={str(folder)!r}: {who} cannot find {shown}"
            raise CheckpointError([refuse("checkpoint-on-another-machine", what, folder=folder)])

    def _check_adapters(self, folder: Path) -> None:
        """Refuses adapters that do not match the model, and warns about adapters of another base."""
        raise_if([misfit(folder, self.model)], CheckpointError)
        warning = another_base("default", saved_base(folder), self.model)
        if warning is not None:
            self._run.warn_once(warning)

    def _agree(self, decide: Callable[[], Any]) -> Any:
        """Calls a function on the main process; every process returns its result or raises its error."""
        outcome: list[Any] = [None, None]
        failure: Exception | None = None
        if self.accelerator.is_main_process:
            try:
                outcome[0] = decide()
            except Exception as error:
                failure = error
                picklable = isinstance(error, CheckpointError)  # other errors may fail to unpickle
                outcome[1] = error if picklable else RuntimeError(f"the main process failed: {error!r}")
        broadcast_object_list(outcome)
        if failure is not None or outcome[1] is not None:
            raise failure or outcome[1]
        return outcome[0]

    def _load_scaler(self, checkpoint: str | None) -> None:
        """Restores the loss scaler if the run and the checkpoint have one."""
        if checkpoint is not None:
            scaler, saved = getattr(self.accelerator, "scaler", None), Path(checkpoint, "scaler.pt").is_file()
            if saved and scaler is None:
                logger.info("ignoring scaler.pt of %s: this run does not scale the loss", checkpoint)
                return
            if scaler is not None and not saved:
                logger.info("%s has no scaler.pt: the loss scale starts at %g", checkpoint, scaler.get_scale())
        super()._load_scaler(checkpoint)  # type: ignore[misc]

    def _load_from_checkpoint(self, resume_from_checkpoint: str, *args: Any, **kwargs: Any) -> None:
        if not self._loads_itself(Path(resume_from_checkpoint)):
            with adapters_kept_active(self.model):
                super()._load_from_checkpoint(resume_from_checkpoint, *args, **kwargs)  # type: ignore[misc]
                if not (self._has_deepspeed() or getattr(self, "is_fsdp_enabled", False)):
                    load_default_adapter(Path(resume_from_checkpoint), self.model)
        self._adapters_loaded(str(resume_from_checkpoint))

    def _load_best_model(self) -> None:
        folder = Path(self.state.best_model_checkpoint)
        if not self._loads_itself(folder):
            sharded = self._has_deepspeed() or getattr(self, "is_fsdp_enabled", False)
            with adapters_kept_active(self.model):
                if sharded or not load_named_adapters(folder, self.model):
                    super()._load_best_model()  # type: ignore[misc]
                    if not sharded:
                        load_default_adapter(folder, self.model)
        self._adapters_loaded(str(self.state.best_model_checkpoint))

    def _loads_itself(self, checkpoint: Path) -> bool:
        """Loads a full model whose weights have other names in the file.

        Returns:
            `False` if transformers has to load the weights. It need not if `_adapters_loaded` loads all trained ones.
        """
        if self._has_deepspeed() or getattr(self, "is_fsdp_enabled", False):
            return False
        if holds_all_trained(checkpoint, self.model):
            return True
        forget_ranks(self.model)  # `load_trained` restores them
        if not isinstance(self.model, PreTrainedModel) or not saved_under_other_names(self.model, checkpoint):
            return False
        logger.info("loading the weights of %s with `from_pretrained`, because their names differ", checkpoint)
        load_as_saved(self.model, checkpoint)
        return True

    def _adapters_loaded(self, checkpoint: str) -> None:
        """Restores the dtypes of adapters after they were loaded, and what PEFT did not write, on resume and for the
        best model.

        Args:
            checkpoint: The folder.
        """
        apply_casts(self.model, self._run.weights.decisions)  # PEFT upcasts adapters that it loads
        if self._saves_trained():
            lacking = load_trained(Path(checkpoint), self.model)
            if lacking:
                what = f"{checkpoint!r} lacks {len(lacking)} trained tensors, such as {lacking[0]}"
                self._run.warn_once(warn("trained-weights-not-in-checkpoint", what))
        live = sorted({from_torch(parameter.dtype) for parameter in adapter_parameters(self.model)})
        for file in sorted(Path(checkpoint).glob("**/adapter_model.safetensors")) if live else ():
            saved = sorted(set(safetensors_dtypes(file).values()))
            if saved != live:
                logger.info("cast the adapters of %s from %s to %s", file.name, join_dtypes(saved), join_dtypes(live))
