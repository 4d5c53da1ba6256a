"""Saves the state of a trainer that transformers and TRL do not save, so that a resumed run equals an uninterrupted
one.

This is the rollouts that TRL buffers for further steps, the sums for the next log, the order of the epoch's data, and
a reference model that is updated during training.
"""

import io
import logging
from collections import defaultdict, deque
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object
from PIL import Image
from torch import nn

from ..core.errors import CheckpointError, refuse, warn
from ..core.feature import Run
from ..core.files import replace_file
from ..core.trl import trl_bases
from .folder import damaged


logger = logging.getLogger(__name__)

STATE_FILE = "safe_trainers_state_{rank}.pt"
REFERENCE_FILE = "safe_trainers_reference.pt"
WINDOW = ("_step", "_buffered_inputs")
"""TRL's position in a generation window: the number of micro-batches so far, and the buffered rollouts."""
_NEW_WINDOW = {"_step": 0, "_buffered_inputs": None}
_GEOMETRY = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "steps_per_generation",
    "num_iterations",
    "num_generations",
    "loss_type",
    "use_vllm",
)
"""Settings on which buffered rollouts depend."""
_RANK_SCORES = ("ipt", "exp_avg_ipt", "exp_avg_unc")
"""Attributes of PEFT's rank allocator for AdaLoRA: tensors by name of a weight."""
_PNG_MODES = {"1", "L", "LA", "P", "RGB", "RGBA", "I;16"}
"""Image modes that PNG stores without loss."""


class TrainerState:
    """The state on which a trainer's next step depends, saved with each checkpoint and restored on resume.

    Args:
        run: The run.
        names: Attributes of the trainer that are saved, if it has them (`ExactCheckpoints.exact_state`).

    Attributes:
        stepped: Whether a step was computed since the training loop began.
    """

    def __init__(self, run: Run, names: tuple[str, ...]) -> None:
        self._run, self._trainer, self._names = run, run.trainer, names
        self.stepped = False
        self._batch_size: int | None = None
        self._running_loss: torch.Tensor | None = None
        self._order: dict[str, Any] | None = None
        self._sampler: Any = None
        self.forget()

    def forget(self) -> None:
        """Drops the state that was read from a checkpoint."""
        self._read: dict[str, Any] | None = None
        self._resumed: dict[str, Any] | None = None  # the same, until it is restored before the first step
        self._carried_loss: torch.Tensor | None = None

    # ---- Saving ----

    def note_loss(self, loss: torch.Tensor) -> None:
        """Stores the losses since the last log for `save`; releases of transformers keep them in different places.

        Args:
            loss: Their sum.
        """
        self._running_loss = loss

    def save(self, folder: Path) -> None:
        """Writes the state of this process.

        Args:
            folder: The checkpoint.
        """
        args = self._run.args
        attributes = {name: getattr(self._trainer, name) for name in self._names if hasattr(self._trainer, name)}
        if not getattr(args, "log_completions", False):
            attributes.pop("_logs", None)
        if self._window_ends():
            attributes.pop("_buffered_inputs", None)
        values: dict[str, Any] = {}
        problems: dict[str, str] = {}
        for name, value in attributes.items():
            try:
                values[name] = to_plain(value, name)
            except TypeError as error:
                problems[name] = str(error)
        if problems:
            fix = f"keep such objects out of {', '.join(f'`{name}`' for name in problems)}"
            self._run.warn_once(warn("state-not-saved", "; ".join(problems.values()), fix=fix))
        loss = self._running_loss
        content = {
            "geometry": self._geometry(),
            "values": values,
            "features": {f.name: to_plain(f.state_dict(), f.name) for f in self._run.having("state_dict")},
            "optimizer": _optimizer_name(self._trainer),
            "ranks": {name: dict(value) for name, value in self._rank_scores().items()},
            "loss": None if loss is None else loss.detach().cpu().clone(),
            "last_logged": getattr(self._trainer, "_globalstep_last_logged", None),
            "order": {**(self._order or {}), "now": _generator_state(self._sampler)},
        }
        replace_file(folder / STATE_FILE.format(rank=args.process_index), partial(torch.save, content))
        reference = self._synced_reference()
        if reference is not None and args.should_save:
            replace_file(folder / REFERENCE_FILE, partial(torch.save, reference.state_dict()))

    def _rank_scores(self) -> dict[str, dict[str, torch.Tensor]]:
        """Returns the scores by which AdaLoRA chooses ranks, which PEFT does not save; empty for other adapters."""
        allocator = getattr(getattr(self._trainer.model, "base_model", None), "rankallocator", None)
        return {name: getattr(allocator, name) for name in _RANK_SCORES if hasattr(allocator, name)}

    def _check_optimizer(self, checkpoint: str, saved: str | None) -> None:
        """Refuses the state of another optimizer, and reports that there is none."""
        what, used = f"resume_from_checkpoint={str(checkpoint)!r}", _optimizer_name(self._trainer)
        if not any(Path(checkpoint).glob("*optimizer*")) and not any(Path(checkpoint).glob("global_step*")):
            self._run.warn_once(warn("no-optimizer-state", what))
        elif saved is not None and used is not None and saved != used:
            raise CheckpointError([refuse("another-optimizer", what, saved=saved, used=used)])

    def _window_ends(self) -> bool:
        """Whether the next micro-batch generates new rollouts, so that the buffer is not needed."""
        args = self._run.args
        window = (getattr(args, "steps_per_generation", None) or 0) * getattr(args, "num_iterations", 1)
        return window > 0 and getattr(self._trainer, "_step", 1) % window == 0

    def _synced_reference(self) -> nn.Module | None:
        """Returns the reference model if training updates it; TRL would resume with the initial one."""
        trainer = self._trainer
        if not getattr(self._run.args, "sync_ref_model", False) or getattr(trainer, "ref_model", None) is None:
            return None
        if getattr(trainer, "is_deepspeed_enabled", False) or getattr(trainer, "is_fsdp_enabled", False):
            return None
        reference: nn.Module = self._run.accelerator.unwrap_model(trainer.ref_model)
        return reference

    def _geometry(self) -> dict[str, Any]:
        """Returns the settings on which buffered rollouts depend, by name."""
        args = self._run.args
        present = {name: getattr(args, name) for name in _GEOMETRY if hasattr(args, name)}
        beta = {"beta": "not 0" if args.beta else "0"} if hasattr(args, "beta") else {}
        bases = trl_bases(type(self._trainer))
        trainer = {"trainer": bases[0].__name__} if bases else {}
        return trainer | {"processes": args.world_size} | present | beta

    # ---- Resuming ----

    def read(self, checkpoint: Path) -> None:
        """Reads the state, and drops parts that do not match this run.

        Args:
            checkpoint: The checkpoint.

        Raises:
            CheckpointError: If a process cannot read its file.
        """
        args = self._run.args
        file = checkpoint / STATE_FILE.format(rank=args.process_index)
        state: dict[str, Any] | None = None
        fault, changes = "", [f"{file.name} of process {args.process_index} does not exist"]
        if file.is_file():
            device = args.device if args.device.type != "cpu" else "cpu"
            try:
                state = _checked(torch.load(file, map_location=device, weights_only=True))
            except Exception as error:  # unpickling damaged data can raise any error
                fault = f"{file.name} cannot be read: {str(error).partition(chr(10))[0] or type(error).__name__}"
        if state is not None:
            geometry = self._geometry()
            then = {name: state["geometry"].get(name) for name in geometry}
            changes = [f"{name} was {then[name]} and is {new}" for name, new in geometry.items() if new != then[name]]
            if args.ignore_data_skip:
                changes.append("ignore_data_skip=True starts again with the first data")
        everywhere = gather_object([(state is not None, changes, fault)])  # all processes must act alike
        faults = [fault for *_, fault in everywhere if fault]
        if faults:
            raise damaged(checkpoint, "; ".join(faults), checkpoint.absolute().parent)
        if not any(found for found, *_ in everywhere):
            logger.info(
                "%s has no state of safe-trainers: rollouts are generated again, and sums for logs restart", checkpoint
            )
        if state is None:
            self._read = {"values": _NEW_WINDOW, "features": {}, "order": {}, "loss": None}
            return
        all_changes = [change for _, found, _ in everywhere for change in found]
        if all_changes:
            buffered = state["values"].get("_buffered_inputs") is not None
            state |= {"values": {**state["values"], **_NEW_WINDOW}, "order": {}}
            if buffered:
                what = f"resume_from_checkpoint={str(checkpoint)!r}"
                joined = "; ".join(dict.fromkeys(all_changes))
                self._run.warn_once(warn("window-not-resumed", what, changes=joined))
        self._read = state

    def begin_loop(self, batch_size: int | None) -> None:
        """Called when the training loop begins, or begins again because transformers reduced the batch size.

        The features then discard what they know of the attempt that was given up.

        Args:
            batch_size: The batch size of the loop.
        """
        self._resumed, self._carried_loss, self.stepped = self._read, None, False
        if self._batch_size is not None:
            self._run.tell("on_train_exit")
            self._run.wake()
            self._run.gradient_norm.restore(unread=False)
            self._run.tell("on_train_begin")
        if self._read is not None and self._batch_size not in (None, batch_size):
            self._resumed = {**self._read, "values": {**self._read["values"], **_NEW_WINDOW}}
        self._batch_size = batch_size

    def begin_train(self) -> None:
        """Called when `train` begins."""
        self._batch_size = None

    def begin_epoch(self, loader: Any) -> None:
        """Restores the data order of the resumed epoch, and stores the current one for `save`.

        transformers resumes TRL's sampler in the state of the first epoch, and samplers without a seed
        (`group_by_length`) with a random state that it restores too late.

        Args:
            loader: The dataloader, before its first batch.
        """
        self._sampler = _sampler_of(loader)
        order = self._resumed["order"] if self._resumed is not None else {}
        if order:
            boundary = self._starts_epoch()
            generator = order.get("now" if boundary else "sampler")
            if generator is not None and _generator_state(self._sampler) is not None:
                self._sampler.generator.set_state(generator.cpu())
            if not boundary and "torch" in order:
                torch.set_rng_state(order["torch"].cpu())
        self._order = {"torch": torch.get_rng_state(), "sampler": _generator_state(self._sampler)}

    def _starts_epoch(self) -> bool:
        """Whether a resumed run starts with the first batch of an epoch; transformers restores the random state before
        that batch, and otherwise after it has skipped batches and read the next ones.
        """
        return self._run.args.ignore_data_skip or float(self._trainer.state.epoch or 0.0).is_integer()

    def restore(self, checkpoint: str | None) -> None:
        """Restores the trainer's attributes and the features, after transformers has restored its state.

        Args:
            checkpoint: The checkpoint.
        """
        state, self._resumed = self._resumed, None
        if self._read is not None:  # an attempt with a smaller batch needs the rest, and generates rollouts again
            again = getattr(self._run.args, "auto_find_batch_size", False)
            self._read = {**self._read, "values": {**self._read["values"], **_NEW_WINDOW}} if again else None
        if self._order is not None and self._starts_epoch():
            self._order["torch"] = torch.get_rng_state()  # the state that the epoch's sampler draws from
        if checkpoint is None or state is None:
            return
        trainer = self._trainer
        self._check_optimizer(checkpoint, state.get("optimizer"))
        for name, scores in self._rank_scores().items():
            scores.update(state.get("ranks", {}).get(name, {}))
        for name, value in state["values"].items():
            if hasattr(trainer, name):
                setattr(trainer, name, from_plain(value, getattr(trainer, name)))
        for feature in self._run.having("load_state_dict"):
            if feature.name in state["features"]:
                feature.load_state_dict(from_plain(state["features"][feature.name]))
        if state["loss"] is not None:
            carried = state["loss"].to(self._run.args.device)
            trainer._total_loss_scalar = -carried.item()  # `train_loss` covers only the steps of this call
            if hasattr(trainer, "_tr_loss"):
                trainer._tr_loss = trainer._tr_loss + carried
            else:  # transformers 4 sums losses in a local variable, so `carry` adds this to the first step's loss
                self._carried_loss = carried
            trainer._globalstep_last_logged = state["last_logged"]
        reference, file = self._synced_reference(), Path(checkpoint, REFERENCE_FILE)
        if reference is not None and file.is_file():
            reference.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))

    def carry(self, loss: torch.Tensor) -> torch.Tensor:
        """Adds the restored losses since the last log to the loss of the first step after a resume.

        Args:
            loss: The loss of a step.
        """
        self.stepped = True
        if self._carried_loss is not None:
            loss, self._carried_loss = self._carried_loss + loss, None
        return loss


def _optimizer_name(trainer: Any) -> str | None:
    """Returns the package and the class of a trainer's optimizer, for example `"torch.AdamW"`."""
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)  # accelerate wraps it
    return None if optimizer is None else f"{type(optimizer).__module__.split('.')[0]}.{type(optimizer).__name__}"


def _checked(state: Any) -> dict[str, Any]:
    """Returns the state if it has the format that `TrainerState.save` writes."""
    if not isinstance(state, dict):
        raise ValueError(f"it contains a {type(state).__name__}, not a mapping")
    state.setdefault("features", {})
    for name in ("geometry", "values", "features", "order"):
        if not isinstance(state.get(name), dict):
            raise ValueError(f"it has no {name!r}")
    if not isinstance(state.get("loss"), (torch.Tensor, type(None))) or "last_logged" not in state:
        raise ValueError("it has no 'loss' or no 'last_logged'")
    return state


def _sampler_of(loader: Any) -> Any:
    """Returns the sampler inside accelerate's batch samplers."""
    node: Any = getattr(loader, "batch_sampler", None)
    while hasattr(node, "batch_sampler"):
        node = node.batch_sampler
    return getattr(node, "sampler", None)


def _generator_state(sampler: Any) -> torch.Tensor | None:
    generator = getattr(sampler, "generator", None)
    return generator.get_state() if isinstance(generator, torch.Generator) else None


def to_plain(value: Any, where: str) -> Any:
    """Converts a value to types that `torch.load(weights_only=True)` reads: tensors, numbers, strings, lists,
    mappings.

    Args:
        value: Any nesting of these types, and of images, which become PNG bytes without loss.
        where: Name of the value for the error message.

    Returns:
        The plain value; tensors are not copied.

    Raises:
        TypeError: If the value contains anything else; the message says where.
    """
    if value is None or type(value) in (bool, int, float, str, bytes, torch.Tensor):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {key: to_plain(entry, f"{where}[{key!r}]") for key, entry in value.items()}
    if isinstance(value, (list, tuple, deque)):
        entries = [to_plain(entry, f"{where}[{index}]") for index, entry in enumerate(value)]
        return tuple(entries) if isinstance(value, tuple) else entries
    if isinstance(value, Image.Image) and value.mode in _PNG_MODES:
        buffer = io.BytesIO()
        value.save(buffer, format="PNG")
        return {"__png__": buffer.getvalue()}
    raise TypeError(f"{where} is a {type(value).__module__}.{type(value).__name__}")


def from_plain(plain: Any, like: Any = None) -> Any:
    """Reverses `to_plain`.

    Args:
        plain: The plain value.
        like: The value that is replaced, whose container types (`defaultdict`, bounded `deque`) are used.

    Returns:
        The value.
    """
    if isinstance(plain, dict):
        if plain.keys() == {"__png__"}:
            return Image.open(io.BytesIO(plain["__png__"]), formats=["PNG"])
        if isinstance(like, defaultdict):
            entries_by_key = {key: from_plain(entry, like[key]) for key, entry in plain.items()}
            return defaultdict(like.default_factory, entries_by_key)
        inside = like if isinstance(like, dict) else {}
        return {key: from_plain(entry, inside.get(key)) for key, entry in plain.items()}
    if isinstance(plain, (list, tuple)):
        entries = [from_plain(entry) for entry in plain]
        if isinstance(like, deque):
            return deque(entries, maxlen=like.maxlen)
        return tuple(entries) if isinstance(plain, tuple) else entries
    return plain
