"""Measures the mismatch of a trainer's rollout and scoring, with chosen modules in float32.

The trainer itself generates, token by token with a cache, and computes its loss, so that a measurement is what a run
logs as `precision/logp_mismatch_mean`. Tokens that were sampled once are forced in later measurements, so that sets of
modules are compared on the same tokens.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, overload

import torch
from torch.utils.data import IterableDataset
from transformers import LogitsProcessor, LogitsProcessorList

from ..core.errors import RecipeError
from ..core.feature import Feature, Run
from ..core.trl import ROLLOUT_METHOD
from ..numerics.overflow_fix import computing_in_float32
from ..numerics.overflow_probe import OverflowProbe
from ..rollout.correction import OLD_KEYS, sampled_mask
from ..rollout.logprob_recorder import Turn
from ..rollout.mismatch_meter import old_logps, recorded_logps
from ..rollout.turn_recorder import TurnRecorder
from ..weights.fp32_modules import covers_head, find_modules
from .figures import Figures, summarize


Tokens = list[list[list[list[int]]]]
"""Sampled tokens by batch, turn and row."""


class Forced(LogitsProcessor):
    """Makes `generate` choose given tokens.

    Args:
        tokens: The tokens of each row, (B, T).
    """

    def __init__(self, tokens: torch.Tensor) -> None:
        self._tokens, self._step = tokens, 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Returns scores, (B, V), of which only that of the next given token is finite."""
        forced = torch.full_like(scores, -torch.inf)
        forced.scatter_(1, self._tokens[:, self._step : self._step + 1], 0.0)
        self._step += 1
        return forced


class RolloutProbe(Feature):
    """Forces the tokens of rollouts, keeps the trainer's log-probabilities, and skips the rewards."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.names: tuple[str, ...] = ()  # the modules that compute in float32 now
        self.forwards: list[torch.Tensor] = []
        self._rows = 0

    def begin(self, rows: int, forced: Sequence[Sequence[Sequence[int]]] | None) -> None:
        """Forgets the last batch.

        Args:
            rows: Number of rows of the next batch.
            forced: The tokens of each turn and row; by default they are sampled.
        """
        self.forwards, self._rows = [], rows
        device = self.run.accelerator.device
        turns = None if forced is None else [torch.tensor(turn, device=device) for turn in forced]

        def force(number: int) -> LogitsProcessorList:
            return LogitsProcessorList([Forced(turns[number])] if turns is not None else [])

        self.run.feature(TurnRecorder).processors = None if forced is None else force

    def around_scoring(self, call: Callable[[], Any]) -> Any:
        """Scores completions, and keeps the log-probabilities, with their graph if gradients are enabled."""
        result = call()
        logps = result[0] if isinstance(result, tuple) else result
        if isinstance(logps, torch.Tensor):
            self.forwards.append(logps)
        return result

    def around_rewards(self, call: Callable[[], Any]) -> Any:
        """Returns rewards of zero, without calling the reward functions."""
        trainer: Any = self.run.trainer
        return torch.zeros(self._rows, max(len(trainer.reward_funcs), 1), device=self.run.accelerator.device)


class _HeadIsFloat32:
    """Is true while the head of a trainer's model is one of the modules in float32.

    TRL's fused head multiplies with the head's weight instead of calling the head, and asks this in each forward pass.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def __bool__(self) -> bool:
        run: Run = self._trainer._run
        if not run.begun:
            return False
        return covers_head(run.model, [*run.weights.fp32_modules, *run.feature(RolloutProbe).names])


def measured(trainer_class: type) -> type:
    """Makes the subclass of a safe trainer whose instances can be measured.

    Args:
        trainer_class: A safe trainer with rollouts.

    Raises:
        RecipeError: If the class is another one.
    """
    bases: Any = trainer_class
    of_trl = (base for base in getattr(bases, "__mro__", ()) if not base.__module__.startswith("safe_trainers."))
    if not (hasattr(bases, "features") and any(ROLLOUT_METHOD in vars(base) for base in of_trl)):
        name = getattr(bases, "__name__", repr(bases))
        raise RecipeError(f"{name} is not a safe trainer with rollouts. Write: measured(SafeGRPOTrainer)(...)")

    class Measured(bases):
        # The overflow probe ends or repeats a pass that overflows, which is a result here.
        features = (*(feature for feature in bases.features if feature is not OverflowProbe), RolloutProbe)

        def _float32_head(self, model: Any, patterns: Sequence[str]) -> Any:
            return _HeadIsFloat32(self)

    Measured.__name__ = Measured.__qualname__ = trainer_class.__name__
    return Measured


def check_measured(trainer: Any) -> None:
    """Raises `RecipeError` if a trainer is not of a class that `measured` has made, or has modules in float32."""
    if RolloutProbe not in getattr(type(trainer), "features", ()):
        raise RecipeError(
            f"the function returned an instance of {type(trainer).__name__}, which cannot be measured. Write: "
            "return measured(SafeGRPOTrainer)(...)"
        )
    modules = trainer.precision.settings.fp32_modules
    if modules:
        raise RecipeError(
            f"the function returned a trainer with fp32_modules={modules!r}, with which all sets would be measured, "
            "and which the lines of the result would replace. Write: fp32_modules=None"
        )


class Bench:
    """Measures a trainer before its training.

    Args:
        trainer: An instance of a class that `measured` has made.
        batches: The rows of each batch, as the trainer's dataloader returns them. The last one may have fewer.
    """

    def __init__(self, trainer: Any, batches: Sequence[Sequence[Mapping[str, Any]]]) -> None:
        self.trainer, self.batches = trainer, batches
        self._probe: RolloutProbe = trainer._run.feature(RolloutProbe)
        trainer.accelerator.prepare_model(trainer.model, evaluation_mode=True)
        trainer.model.eval()  # dropout would differ between the two sides
        trainer.mask_truncated_completions = False  # a setting of the loss: their tokens are sampled too

    @property
    def model(self) -> Any:
        """The policy model."""
        return self.trainer.model

    def sample(self, names: Iterable[str], seed: int) -> Tokens:
        """Samples the tokens of all batches.

        Args:
            names: The modules that compute in float32.
            seed: The seed of torch's generators, whose state is restored.
        """
        return [tokens for *_, tokens in self.run(names, None, seed, self.batches)]

    def measure(self, names: Iterable[str], tokens: Tokens | None, seed: int = 0) -> Figures:
        """Measures the mismatch.

        Args:
            names: The modules that compute in float32.
            tokens: The tokens of all batches; `None` to sample them.
            seed: The seed of sampling.
        """
        pairs, seconds = [], 0.0
        for trainer, sampler, mask, spent, _ in self.run(names, tokens, seed, self.batches):
            pairs.append((trainer, sampler, mask))
            seconds += spent
        return summarize(pairs, seconds)

    def gradients(self, names: Iterable[str], tokens: Tokens, scale: float) -> list[torch.Tensor]:
        """Computes the gradients of the mean negative log-probability of the first batch.

        Args:
            names: The modules that compute in float32.
            tokens: The tokens of all batches.
            scale: The loss scale.

        Returns:
            The gradients of the trainable parameters that have one, times the loss scale.
        """
        batch, _ = self._batch(names, tokens[0], self.batches[0], 0)
        mask = sampled_mask(batch)
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        with torch.enable_grad(), self._computing(names):
            self._probe.begin(len(self.batches[0]), None)
            self._loss(batch)
            loss = -(self._probe.forwards[0] * mask).sum() / mask.sum()
            found = torch.autograd.grad(loss * scale, trained, allow_unused=True)
        return [gradient for gradient in found if gradient is not None]

    def run(
        self, names: Iterable[str], tokens: Tokens | None, seed: int, batches: Sequence[Sequence[Mapping[str, Any]]]
    ) -> Iterator[tuple[Any, ...]]:
        """Generates and scores batches, one after the other.

        Args:
            names: The modules that compute in float32.
            tokens: The tokens of all batches; `None` to sample them.
            seed: The seed of sampling; each batch has the next one.
            batches: The rows of each batch.

        Yields:
            For each batch the log-probabilities of trainer and sampler in nats, (B, C), the mask of the tokens that
            count, (B, C), the time in seconds, and the tokens of each turn and row.
        """
        names = tuple(names)
        for number, rows in enumerate(batches):
            begun = self._clock()
            batch, turns = self._batch(names, None if tokens is None else tokens[number], rows, seed + number)
            sampler = recorded_logps(turns, batch)
            if any(key in batch for key in OLD_KEYS):
                scored = old_logps(batch, self._probe.forwards)
            else:
                self._probe.forwards = []
                with torch.no_grad(), self._computing(names):
                    self._loss(batch)
                scored = self._probe.forwards[0]
            spent = self._clock() - begun
            if sampler is None or scored is None or sampler.shape != scored.shape:
                raise RuntimeError("the log-probabilities of sampler and trainer cannot be matched")
            yield scored, sampler, sampled_mask(batch), spent, [turn.tokens.tolist() for turn in turns]

    def _batch(
        self, names: Iterable[str], forced: Any, rows: Sequence[Mapping[str, Any]], seed: int
    ) -> tuple[Any, list[Turn]]:
        trainer, device = self.trainer, self.trainer.accelerator.device
        devices = [device] if device.type not in {"cpu", "meta"} else []
        self._probe.begin(len(rows), forced)
        # The rows are prompts of their own; their advantages are not used.
        trainer.num_generations = trainer.num_generations_eval = len(rows)
        with torch.no_grad(), self._computing(names), torch.random.fork_rng(devices):
            torch.manual_seed(seed)
            with trainer._run.feature(TurnRecorder).recording() as turns:
                return trainer._generate_and_score_completions([dict(row) for row in rows]), turns

    def _loss(self, batch: Any) -> None:
        with self.trainer.compute_loss_context_manager():
            self.trainer.compute_loss(self.trainer.model, batch)

    @contextlib.contextmanager
    def _computing(self, names: Iterable[str]) -> Iterator[None]:
        self._probe.names = tuple(find_modules(self.model, names))
        try:
            with computing_in_float32(self.model, self._probe.names):
                yield
        finally:
            self._probe.names = ()

    def _clock(self) -> float:
        device = self.trainer.accelerator.device
        if device.type == "cpu":
            return time.process_time()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()


class RowBatches(Sequence[list[Any]]):
    """Batches of rows of a dataset, which are read when they are used: images of many prompts fill the memory.

    Args:
        dataset: The dataset, which has a length and reads a row by its number.
        size: Rows of a batch; the last one may have fewer.
        rows: The numbers of the rows.
    """

    def __init__(self, dataset: Any, size: int, rows: range) -> None:
        self._dataset, self._size, self._rows = dataset, size, rows

    def __len__(self) -> int:
        """Returns the number of batches."""
        return math.ceil(len(self._rows) / self._size)

    @overload
    def __getitem__(self, index: int) -> list[Any]: ...

    @overload
    def __getitem__(self, index: slice) -> "RowBatches": ...

    def __getitem__(self, index: int | slice) -> "list[Any] | RowBatches":
        """Returns the rows of a batch, or some of the batches."""
        if isinstance(index, slice):
            first, last, _ = index.indices(len(self))
            return RowBatches(self._dataset, self._size, self._rows[first * self._size : last * self._size])
        first = range(len(self))[index] * self._size
        return [self._dataset[row] for row in self._rows[first : first + self._size]]


def batches_of(dataset: Any, size: int, sequences: int, skip: int = 0) -> RowBatches:
    """Takes batches of rows from a dataset.

    Args:
        dataset: The dataset. If it is read only in order, the rows are kept in memory.
        size: Rows of a batch.
        sequences: The least number of rows; the last batch is full unless the dataset ends.
        skip: Number of rows at the beginning that are left out.

    Returns:
        The batches; empty if the dataset has no more than `skip` rows.
    """
    last = skip + math.ceil(sequences / size) * size
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        dataset = list(islice(dataset, last))
    return RowBatches(dataset, size, range(skip, max(skip, min(last, len(dataset)))))
