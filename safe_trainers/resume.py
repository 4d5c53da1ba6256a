"""The state of a trainer that upstream does not save: a run resumed at any step goes on as if it had never stopped.

Inside a generation window TRL's trainers hold rollouts that are still to be used, and start without them after a
resume. Averages that wait for the next log, the order of the epoch's data and a reference model that is trained along
are lost as well.
"""

import io
import logging
import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from accelerate.utils import gather_object
from PIL import Image
from torch import nn
from transformers import TrainerCallback

from .checkpoint_files import damaged
from .contract import trl_bases
from .errors import PrecisionWarning, warn
from .file_checks import replace_file


logger = logging.getLogger(__name__)

STATE_FILE = "safe_trainers_state_{rank}.pt"
REFERENCE_FILE = "safe_trainers_reference.pt"
WINDOW = ("_step", "_buffered_inputs")
"""Where TRL's trainers are inside a generation window: micro-batches so far, and the rollouts still to be used."""
_ANEW = {"_step": 0, "_buffered_inputs": None}
_GEOMETRY = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "steps_per_generation",
    "num_iterations",
    "num_generations",
    "loss_type",
    "use_vllm",
)
_PNG_MODES = {"1", "L", "LA", "P", "RGB", "RGBA", "I;16"}  # those that come back as they were


class ExactState:
    """Saves and restores what the next step of a trainer depends on; the base of `ExactCheckpoints`.

    A new trainer whose next step depends on more than is listed here extends the list:
    `exact_state = (*ExactState.exact_state, "replay")`. Such attributes hold tensors, numbers, texts, lists and
    mappings.

    Attributes:
        exact_state: Attributes of the trainer that are saved with each checkpoint and restored on resume, where it has
            them. `_last_loaded_step` is not: a vLLM engine is new after a resume and has to get the weights.
    """

    exact_state: ClassVar[tuple[str, ...]] = (
        *WINDOW,
        "_metrics",  # averaged in the next log
        "_logs",  # the completions of the next log
        "_total_train_tokens",
        "_current_train_step_time",
        "_mismatch_state",  # sampler against trainer, for the next log
        "_step_record",  # skipped steps, and the metrics of the optimizer for the next log
    )

    # What the trainers bring, for the type checker.
    args: Any
    accelerator: Any
    state: Any
    _tr_loss: Any

    _read: dict[str, Any] | None = None  # what the checkpoint says
    _resumed: dict[str, Any] | None = None  # the same, until the first step has it
    _batch_size: int | None = None
    _warned: frozenset[str] = frozenset()
    _running_loss: torch.Tensor | None = None
    _carried_loss: torch.Tensor | None = None
    _order: dict[str, Any] | None = None
    _sampler: Any = None

    def _maybe_log_save_evaluate(self, tr_loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Keeps the losses since the last log where they can be saved: releases differ in where they are."""
        self._running_loss = tr_loss
        super()._maybe_log_save_evaluate(tr_loss, *args, **kwargs)  # type: ignore[misc]

    def _save_state(self, folder: Path) -> None:
        """Writes what this process needs to go on exactly, and upstream does not save."""
        values: dict[str, Any] = {}
        problems: dict[str, str] = {}
        for name in self.exact_state:
            unused = name == "_logs" and not getattr(self.args, "log_completions", False)
            if hasattr(self, name) and not unused and not (name == "_buffered_inputs" and self._window_ends()):
                try:
                    values[name] = to_plain(getattr(self, name), name)
                except TypeError as error:
                    problems[name] = str(error)
        if problems:
            fix = f"keep such objects out of {', '.join(f'`{name}`' for name in problems)}"
            self._warn(warn("state-not-saved", "; ".join(problems.values()), fix=fix))
        loss = self._running_loss
        content = {
            "geometry": self._geometry(),
            "values": values,
            "loss": None if loss is None else loss.detach().cpu().clone(),
            "last_logged": getattr(self, "_globalstep_last_logged", None),
            "order": {**(self._order or {}), "now": _generator_state(self._sampler)},
        }
        replace_file(folder / STATE_FILE.format(rank=self.args.process_index), partial(torch.save, content))
        reference = self._synced_reference()
        if reference is not None and self.args.should_save:
            replace_file(folder / REFERENCE_FILE, partial(torch.save, reference.state_dict()))

    def _window_ends(self) -> bool:
        """Whether the next micro-batch generates, so that nothing of the buffer is used again."""
        window = (getattr(self.args, "steps_per_generation", None) or 0) * getattr(self.args, "num_iterations", 1)
        return window > 0 and getattr(self, "_step", 1) % window == 0

    def _synced_reference(self) -> nn.Module | None:
        """The reference model, where training changes it; upstream begins with the first one after each resume."""
        if not getattr(self.args, "sync_ref_model", False) or getattr(self, "ref_model", None) is None:
            return None
        if getattr(self, "is_deepspeed_enabled", False) or getattr(self, "is_fsdp_enabled", False):
            return None
        reference: nn.Module = self.accelerator.unwrap_model(self.ref_model)  # type: ignore[attr-defined]
        return reference

    def _geometry(self) -> dict[str, Any]:
        """What buffered rollouts depend on, by the name of the setting."""
        present = {name: getattr(self.args, name) for name in _GEOMETRY if hasattr(self.args, name)}
        beta = {"beta": "not 0" if self.args.beta else "0"} if hasattr(self.args, "beta") else {}
        bases = trl_bases(type(self))
        trainer = {"trainer": bases[0].__name__} if bases else {}
        return trainer | {"processes": self.args.world_size} | present | beta

    def _read_state(self, checkpoint: Path) -> dict[str, Any]:
        """Reads what `_save_state` wrote, and keeps the part of it that fits this run."""
        file = checkpoint / STATE_FILE.format(rank=self.args.process_index)
        state: dict[str, Any] | None = None
        fault, changes = "", [f"process {self.args.process_index} finds no {file.name}"]
        if file.is_file():
            device = self.args.device if self.args.device.type != "cpu" else "cpu"
            try:
                state = _checked(torch.load(file, map_location=device, weights_only=True))
            except Exception as error:  # what unpickling damaged bytes ends in is anything
                fault = f"{file.name} cannot be read: {str(error).partition(chr(10))[0] or type(error).__name__}"
        if state is not None:
            geometry = self._geometry()
            then = {name: state["geometry"].get(name) for name in geometry}
            changes = [f"{name} was {then[name]} and is {new}" for name, new in geometry.items() if new != then[name]]
            if self.args.ignore_data_skip:
                changes.append("ignore_data_skip=True begins the data anew")
        everywhere = gather_object([(state is not None, changes, fault)])  # no process may go on without the others
        faults = [fault for *_, fault in everywhere if fault]
        if faults:
            raise damaged(checkpoint, "; ".join(faults), checkpoint.absolute().parent)
        if not any(found for found, *_ in everywhere):
            logger.info("%s has no state of safe-trainers: rollouts and averages of the log begin anew", checkpoint)
        if state is None:
            return {"values": _ANEW, "order": {}, "loss": None}
        misfits = [change for _, found, _ in everywhere for change in found]
        if misfits:
            buffered = state["values"].get("_buffered_inputs") is not None
            state |= {"values": {**state["values"], **_ANEW}, "order": {}}
            if buffered:
                given = f"resume_from_checkpoint={str(checkpoint)!r}"
                self._warn(warn("window-not-resumed", given, changes="; ".join(dict.fromkeys(misfits))))
        return state

    def _epoch_begins(self, loader: Any) -> None:
        """Begins an epoch in the order that it had in the run that is resumed, and remembers how it began.

        Upstream begins a resume with TRL's sampler as it is in the first epoch, and draws the order of samplers
        without a seed (`group_by_length`) from a random state that it restores too late.
        """
        self._sampler = _sampler_of(loader)
        order = self._resumed["order"] if self._resumed is not None else {}
        if order:
            boundary = float(self.state.epoch or 0.0).is_integer()
            generator = order.get("now" if boundary else "sampler")
            if generator is not None and _generator_state(self._sampler) is not None:
                self._sampler.generator.set_state(generator.cpu())
            if not boundary and "torch" in order:
                torch.set_rng_state(order["torch"].cpu())
        self._order = {"torch": torch.get_rng_state(), "sampler": _generator_state(self._sampler)}

    def _inner_training_loop(self, batch_size: int | None = None, *args: Any, **kwargs: Any) -> Any:
        """Begins at the checkpoint, also once more after upstream found the batch too large for the memory."""
        self._resumed, self._carried_loss = self._read, None
        if self._read is not None and self._batch_size not in (None, batch_size):
            self._resumed = {**self._read, "values": {**self._read["values"], **_ANEW}}
        self._batch_size = batch_size
        return super()._inner_training_loop(batch_size, *args, **kwargs)  # type: ignore[misc]

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Restores the last of the trainer's state: upstream calls this once, before the first step after a resume."""
        super()._load_rng_state(checkpoint)  # type: ignore[misc]
        state, self._resumed = self._resumed, None
        if checkpoint is None or state is None:
            return
        for name, value in state["values"].items():
            if hasattr(self, name):
                setattr(self, name, from_plain(value, getattr(self, name)))
        if state["loss"] is not None:
            carried = state["loss"].to(self.args.device)
            self._total_loss_scalar = -carried.item()  # `train_loss` is of this call's steps alone
            if hasattr(self, "_tr_loss"):
                self._tr_loss = self._tr_loss + carried
            else:  # transformers 4 has it in a variable of its loop, to which the first step's loss is added
                self._carried_loss = carried
            self._globalstep_last_logged = state["last_logged"]
        reference, file = self._synced_reference(), Path(checkpoint, REFERENCE_FILE)
        if reference is not None and file.is_file():
            reference.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Does one step; the first one after a resume may also return the losses since the last log."""
        loss: torch.Tensor = super().training_step(*args, **kwargs)  # type: ignore[misc]
        if self._carried_loss is not None:
            loss, self._carried_loss = self._carried_loss + loss, None
        return loss

    def _warn(self, problem: Any) -> None:
        """Warns, of each kind of problem once."""
        if self.accelerator.is_main_process and problem.id not in self._warned:
            self._warned |= {problem.id}
            warnings.warn(str(problem), PrecisionWarning, stacklevel=3)


class EpochBegins(TrainerCallback):
    """Tells the trainer that an epoch begins, before the first batch of it is drawn.

    Args:
        begins: What is called with the dataloader.
    """

    def __init__(self, begins: Callable[[Any], None]) -> None:
        self.begins = begins

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Hands on the dataloader."""
        self.begins(kwargs.get("train_dataloader"))


def _checked(state: Any) -> dict[str, Any]:
    """What was read, if it is what `_save_state` writes."""
    if not isinstance(state, dict):
        raise ValueError(f"it holds a {type(state).__name__}, and no mapping")
    for name in ("geometry", "values", "order"):
        if not isinstance(state.get(name), dict):
            raise ValueError(f"it holds no {name}")
    if not isinstance(state.get("loss"), (torch.Tensor, type(None))) or "last_logged" not in state:
        raise ValueError("it holds no loss since the last log")
    return state


def _sampler_of(loader: Any) -> Any:
    """The sampler below the layers of batch samplers that accelerate puts around it."""
    node: Any = getattr(loader, "batch_sampler", None)
    while hasattr(node, "batch_sampler"):
        node = node.batch_sampler
    return getattr(node, "sampler", None)


def _generator_state(sampler: Any) -> torch.Tensor | None:
    generator = getattr(sampler, "generator", None)
    return generator.get_state() if isinstance(generator, torch.Generator) else None


def to_plain(value: Any, where: str) -> Any:
    """Turns a value into what `torch.load(weights_only=True)` reads back: tensors, numbers, texts, lists, mappings.

    Args:
        value: Any nesting of these; pictures become PNG bytes, which keep every pixel.
        where: Its name, for the error text.

    Returns:
        The plain value; tensors are the same objects.

    Raises:
        TypeError: For anything else, naming the place.
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
    raise TypeError(f"{where} holds {type(value).__module__}.{type(value).__name__}")


def from_plain(plain: Any, like: Any = None) -> Any:
    """Makes the value again that `to_plain` was given.

    Args:
        plain: What was read.
        like: The value that it replaces, whose kinds of containers it gets (`defaultdict`, bounded `deque`).

    Returns:
        The value.
    """
    if isinstance(plain, dict):
        if plain.keys() == {"__png__"}:
            return Image.open(io.BytesIO(plain["__png__"]), formats=["PNG"])
        if isinstance(like, defaultdict):
            made: defaultdict[Any, Any] = defaultdict(like.default_factory)
            made.update({key: from_plain(entry, like[key]) for key, entry in plain.items()})
            return made
        inside = like if isinstance(like, dict) else {}
        return {key: from_plain(entry, inside.get(key)) for key, entry in plain.items()}
    if isinstance(plain, (list, tuple)):
        entries = [from_plain(entry) for entry in plain]
        if isinstance(like, deque):
            return deque(entries, maxlen=like.maxlen)
        return tuple(entries) if isinstance(plain, tuple) else entries
    return plain
