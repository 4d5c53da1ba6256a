"""The trainers compare the sampler's log-probability of each sampled token with the trainer's, and log the mismatch.

The sampler's log-probabilities are recorded while `generate` samples, or are those that vLLM returns and TRL stores as
`sampling_per_token_logps`. The trainer's log-probabilities are the old log-probabilities, if TRL computes them, and
otherwise those of the first loss of each slice of the batch, before the weights have changed. No extra forward pass is
run. The formulas of these metrics are listed under "Mismatch of sampler and trainer". Two more metrics count
completions without a reward:

| metric | formula | unit |
|---|---|---|
| `precision/unrewarded_frac` | completions without any reward / completions | share |
| `precision/unrewarded_frac/<function>` | completions without this function's reward / completions | share |

A reward function that returns None or NaN gives no reward. The second metric is logged with several functions, if the
trainer names them in `reward_func_names`. TRL 1 gives a completion without any reward no advantage; older releases
count its reward as 0. If one of several functions gives no reward, the completion's reward is the sum of the others.
"""

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from ..core.device import float32_spacing
from ..core.errors import PrecisionError, Problem, refuse, warn
from ..core.feature import Feature, Run
from ..core.trl import has_rollouts
from ..experts.routes import ExpertRoutes
from ..model.rows import image_marks
from ..policy.sampling import CORRECTION
from .causes import not_rounding, samples_from_current_weights
from .correction import OLD_KEYS, check_weights, corrects_generate, sampled_mask
from .logprob_recorder import SAMPLER_KEY, Turn, align
from .mismatch import (
    EPS,
    PREFIX,
    SIZE,
    combine,
    joint_tally,
    limits_of,
    loss_tally,
    metrics,
    sequence_moments,
)
from .sequence_weights import vanishing
from .truncation import TruncationCorrection
from .turn_recorder import TurnRecorder


logger = logging.getLogger(__name__)

TRL_SAMPLER_KEY = "sampling_per_token_logps"
_COMPLETIONS = ("completion_ids", "completion_mask")
WAITING = 2**19
"""Number of tokens, padding included, at which batches are tallied before the next log, which takes some 0.1 GB."""
UNREWARDED = f"{PREFIX}unrewarded_frac"
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


class MismatchMeter(Feature):
    """Measures the mismatch between sampler and trainer in each rollout, unless `precision_metrics=False`.

    Attributes:
        own: The tally of this rank since the last log, by mode (`"train"` or `"eval"`).
        gathered: The tally of all ranks for the next log, by mode.
    """

    name = "mismatch"

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._forwards: list[torch.Tensor] | None = None  # log-probabilities of forward passes to measure, each (B, C)
        self._has_rollouts = has_rollouts(type(run.trainer))
        self._limits = limits_of(run.args)
        self._in_batch = False  # whether a rollout batch is being made
        self._infinite: Problem | None = None  # the refusal of its infinite rewards
        self._synced = True  # whether the sampler had the weights of the last batch's step
        self._float32: str | None = None  # the dtype with the spacing of the device's float32 products
        self.on_train_begin()

    def on_train_begin(self) -> None:
        """Discards tallies that an earlier call of `train` has not logged."""
        self.own: dict[str, torch.Tensor] = {}
        # The batches of each mode that are not tallied yet: log-probabilities of trainer and sampler, and the mask.
        self._waiting: dict[str, list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]] = {}
        self._elements: Counter[str] = Counter()
        self.gathered: dict[str, torch.Tensor] = {}
        self._dropout: bool | None = None  # whether dropout is active in training; `None` if unknown
        self._logged: set[str] = set()
        if not self._has_rollouts:
            self.rest("around_loss")

    # ---- Around what TRL does ----

    def around_batch(self, call: Callable[[], Any]) -> Any:
        """Generates and scores a rollout batch, and measures it or stores the sampler's log-probabilities in it.

        Returns:
            TRL's batch, or a copy of the mapping with `SAMPLER_KEY`.

        Raises:
            PrecisionError: If an importance weight of TRL is not finite, which would make the loss NaN, or an infinite
                reward made an advantage infinite.
        """
        self._in_batch, self._infinite = True, None
        try:
            batch = self._measured(call)
        finally:
            self._in_batch = False
        if self._infinite is not None:
            self._check_advantages(batch, self._infinite)
        return batch

    def _measured(self, call: Callable[[], Any]) -> Any:
        """Makes a rollout batch, and measures it; see `around_batch`."""
        measures = self._measures()
        if not measures and not corrects_generate(self.run):
            return _with_finite_weights(call())
        forwards: list[torch.Tensor] = []
        self._forwards = forwards
        try:
            with self.run.feature(TurnRecorder).recording() as turns:
                batch = call()
        finally:
            self._forwards = None
        self._synced = samples_from_current_weights(self.run)
        if not _has_completions(batch):
            self._log_once(f"the rollout batches of this trainer do not have {' and '.join(_COMPLETIONS)}")
            return _with_finite_weights(batch)
        recorded = batch.get(TRL_SAMPLER_KEY) is None
        sampler = batch.get(TRL_SAMPLER_KEY)
        if recorded:
            sampler = recorded_logps(turns, batch)
        if sampler is None:
            self._log_once(self._why_absent())
        else:
            if measures and any(key in batch for key in OLD_KEYS):
                self._count(old_logps(batch, forwards), sampler, batch)
            if recorded and OLD_KEYS[1] not in batch:  # RLOO's loss has no log-probabilities of tokens
                batch = {**batch, SAMPLER_KEY: sampler}
        return _with_finite_weights(batch)

    def around_scoring(self, call: Callable[[], Any]) -> Any:
        """Scores completions, and keeps the policy's log-probabilities during a measurement."""
        result = call()
        logps = result[0] if isinstance(result, tuple) and result else result
        if self._forwards is not None and self.run.scores_policy and isinstance(logps, torch.Tensor):
            self._forwards.append(logps.detach())
        return result

    def around_loss(self, call: Callable[[], Any]) -> Any:
        """Computes a loss, and measures its slice of the batch unless `around_batch` has measured it."""
        batch = self.run.loss_inputs
        sampler = batch.get(SAMPLER_KEY, batch.get(TRL_SAMPLER_KEY))
        scored = any(key in batch for key in OLD_KEYS)
        if (sampler is None and not scored) or not _has_completions(batch) or not self._measures():
            return call()
        forwards: list[torch.Tensor] = []
        self._forwards = forwards
        if self._truncation is not None and TRL_SAMPLER_KEY in batch and not scored:
            self._truncation.measure_next()
        try:
            value = call()
        finally:
            self._forwards = None
        now = forwards[0] if forwards else None
        if scored:
            self._count_change(now, batch)
        else:
            self._count(now, sampler, batch)
        return value

    def around_rewards(self, call: Callable[[], Any]) -> Any:
        """Computes the rewards, and counts completions without any.

        Returns:
            What the trainer computes: rewards of all ranks by function, (N, F), or their sum, (N,). A reward is NaN if
            its function returned None or NaN.

        Raises:
            PrecisionError: If a reward is infinite, and the advantages that follow from it will not be known.
        """
        rewards = call()
        if not isinstance(rewards, torch.Tensor) or rewards.dim() not in (1, 2):
            self._log_once("this trainer does not return rewards as a tensor", f"{UNREWARDED} is")
            return rewards
        columns = rewards.detach().cpu()  # one transfer for all checks
        columns = columns.unsqueeze(1) if columns.dim() == 1 else columns
        names = getattr(self.run.trainer, "reward_func_names", None) or ()
        names = list(names) if len(names) == columns.shape[1] else []
        self._check_rewards(columns, names)
        if self.run.settings.precision_metrics:
            missing = columns.isnan()
            counted = {"": missing.all(1)}
            if not names:
                self._log_once("this trainer does not name its reward functions", f"{UNREWARDED}/<function> is")
            elif len(names) > 1:  # TRL silently leaves a function's missing reward out of the sum
                counted |= {f"/{name}": missing[:, number] for number, name in enumerate(names)}
            for name, column in counted.items():  # one value per completion, so that TRL's mean weighs them equally
                self.run.log_metric(f"{UNREWARDED}{name}", column.double().tolist())
        return rewards

    def _check_rewards(self, rewards: torch.Tensor, names: list[str]) -> None:
        """Refuses rewards, (N, F), that are infinite, or whose standard deviation overflows float32."""
        weights: Any = getattr(self.run.trainer, "reward_weights", None)
        applies = weights is not None and len(weights) == rewards.shape[1]  # else the trainer returns their sum
        total = (rewards * weights.to(rewards.device) if applies else rewards).nansum(1)
        if (rewards.nansum(1).square() + total.square()).sum().isfinite():
            return  # then every reward is finite, and the squares of every group's spread are below this sum
        infinite = rewards.isinf()
        if not infinite.any():
            self._check_spread(total)
        elif getattr(self.run.trainer, "reward_clip_range", None) is None:  # else TRL clips them
            known = names or ["the reward functions"] * rewards.shape[1]
            found = [(name, int(n)) for name, n in zip(known, infinite.sum(0).tolist(), strict=True) if n]
            given = ", ".join(f"{n} of {len(rewards)} rewards of {name} are infinite" for name, n in found)
            self._infinite = refuse("infinite-rewards", given, function=found[0][0])
            if not self._in_batch:
                raise PrecisionError([self._infinite])

    def _check_advantages(self, batch: Any, refusal: Problem) -> None:
        """Refuses a batch with an infinite reward, unless TRL gave its group, or the batch, no advantage at all."""
        advantages = batch.get("advantages") if isinstance(batch, Mapping) else None
        limit = torch.finfo(torch.float32).max  # by which TRL replaces infinity
        sound = isinstance(advantages, torch.Tensor) and bool((advantages.abs() < limit).all())
        everywhere = self.run.trainer.accelerator.gather(torch.tensor([sound], device=self.run.trainer.args.device))
        if not bool(everywhere.all()):
            raise PrecisionError([refusal])
        self.run.warn_once(warn("infinite-rewards-ignored", refusal.what))

    def _check_spread(self, total: torch.Tensor) -> None:
        """Refuses sums of rewards, (N,), whose standard deviation overflows float32, if TRL divides by it."""
        trainer: Any = self.run.trainer
        scale, size = getattr(trainer, "scale_rewards", "none"), getattr(trainer, "num_generations", 0)
        if scale in ("none", False):
            return
        size = size if size and scale != "batch" and len(total) % size == 0 else len(total)
        groups = total.view(-1, size)
        if not (groups - groups.mean(1, keepdim=True)).square().sum(1).isfinite().all():
            given = f"rewards up to {total.abs().max().item():.3g} in a group"
            raise PrecisionError([refuse("rewards-overflow", given)])

    def around_evaluation(self, call: Callable[[], Any]) -> Any:
        """Evaluates, and gathers the tallies of all ranks."""
        self.own.pop("eval", None)
        self._waiting.pop("eval", None)
        del self._elements["eval"]
        self.gathered.pop("eval", None)
        result = call()
        self.before_log("eval")
        return result

    # ---- Measuring ----

    @property
    def _truncation(self) -> TruncationCorrection | None:
        return next((f for f in self.run.features if isinstance(f, TruncationCorrection)), None)

    def _measures(self) -> bool:
        """Whether to measure now; with active dropout two forward passes differ by far more than rounding."""
        on = self.run.settings.precision_metrics
        if not on or not self.run.model.training:
            return on
        if self._dropout is None:
            self._dropout = any(_has_active_dropout(module) for module in self.run.model.modules())
        if self._dropout:
            self._log_once("dropout is active, and differs between rollout and loss; evaluations are still measured")
        return not self._dropout

    def _count(self, trainer: torch.Tensor | None, sampler: torch.Tensor, batch: Mapping[str, Any]) -> None:
        if trainer is None or trainer.shape != sampler.shape:
            self._log_once("this trainer's loss does not compute per-token log-probabilities")
            return
        missing = None if self._truncation is None else self._truncation.why_no_shift
        if missing is not None:
            self._log_once(missing)
            return
        shift = None if self._truncation is None else self._truncation.shift
        if shift is not None:  # the sampler's log-probabilities are renormalised over the tokens that it keeps
            trainer = trainer + shift
        mode, mask = self.run.mode, sampled_mask(batch)
        routes = next((f for f in self.run.features if isinstance(f, ExpertRoutes)), None)
        if routes is not None and routes.follows:
            routes.count(trainer - sampler, mask)
        waiting = self._waiting.setdefault(mode, [])
        waiting.append((trainer.detach(), sampler.detach(), mask))
        self._elements[mode] += mask.numel()
        if self._elements[mode] > WAITING:
            self._tally(mode)

    def _count_change(self, now: torch.Tensor | None, batch: Mapping[str, Any]) -> None:
        """Counts how far the log-probabilities of a loss are from those that TRL computed before the first update."""
        trainer, step = batch.get(OLD_KEYS[0]), self.run.scored_at.get(self.run.mode)
        if now is None or trainer is None or step is None or now.shape != trainer.shape:
            return
        truncated = self._truncation is not None and self._truncation.active
        sampler = None if truncated else batch.get(SAMPLER_KEY, batch.get(TRL_SAMPLER_KEY))
        self._add(loss_tally(now, trainer, sampler, sampled_mask(batch), moved=self.run.step != step), self.run.mode)

    def _tally(self, mode: str) -> None:
        """Tallies the batches that wait."""
        waiting = self._waiting.pop(mode, [])
        del self._elements[mode]
        if waiting:
            self._add(joint_tally(waiting, self._limits), mode)

    def _add(self, counted: torch.Tensor, mode: str) -> None:
        before = self.own.get(mode)
        self.own[mode] = counted if before is None else combine(torch.stack([before.to(counted.device), counted]))

    # ---- Logs and checkpoints ----

    def before_log(self, mode: str) -> None:
        """Gathers the tallies of all ranks."""
        if not self.run.settings.precision_metrics or not self._has_rollouts:
            return
        self._tally(mode)
        own = self.own.pop(mode, None)
        accelerator = self.run.accelerator
        device = torch.device("cpu") if accelerator.device.type == "mps" else accelerator.device
        own = torch.zeros(SIZE, dtype=torch.float64) if own is None else own
        tallies = accelerator.gather(own.to(device).unsqueeze(0))
        earlier = self.gathered.get(mode)
        self.gathered[mode] = combine(tallies if earlier is None else torch.cat([tallies, earlier.unsqueeze(0)]))

    def on_log(self, logs: Mapping[str, float], mode: str) -> dict[str, float]:
        """The metrics since the last log."""
        total = self.gathered.pop(mode, None)
        found = {} if total is None else metrics(total, self._coarsest_dtype(), self._limits)
        if total is not None:
            self._warn_of(found, total)
        return {f"eval_{name}": value for name, value in found.items()} if mode == "eval" else found

    def _warn_of(self, found: Mapping[str, float], total: torch.Tensor) -> None:
        ulp, mean = found.get(f"{PREFIX}logp_mismatch_ulp", 0.0), found.get(f"{PREFIX}logp_mismatch_mean", 0.0)
        problem = not_rounding(self.run, ulp, mean, self._synced)
        args = self.run.args
        corrects = getattr(args, "use_vllm", False) and getattr(args, CORRECTION, False)
        corrects = corrects or corrects_generate(self.run)
        weights = vanishing(args, self._limits, sequence_moments(total)) if corrects else None
        for warning in filter(None, (problem, weights)):
            self.run.warn_once(warning)

    def _coarsest_dtype(self) -> str:
        dtypes = self.run.policy.compute.value & EPS.keys()
        coarsest = max(dtypes, key=EPS.__getitem__, default="float32")
        if coarsest != "float32":
            return coarsest
        if self._float32 is None:  # products may be computed in TF32
            spacing = float32_spacing(self.run.accelerator.device)
            self._float32 = next(dtype for dtype, eps in EPS.items() if eps == spacing)
        return self._float32

    def state_dict(self) -> dict[str, Any]:
        """The tallies since the last log."""
        for mode in list(self._waiting):
            self._tally(mode)
        return dict(self.own)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the tallies, unless a version with other metrics has saved them."""
        self.own = {mode: total for mode, total in state.items() if getattr(total, "shape", None) == (SIZE,)}

    def _why_absent(self) -> str:
        args = self.run.args
        if getattr(args, "use_vllm", False):
            return "this trainer does not keep the log-probabilities that vLLM returns"
        for name in ("use_transformers_continuous_batching", "use_transformers_paged"):
            if getattr(args, name, False):
                return f"{name}=True does not return log-probabilities"
        if getattr(self.run.trainer, "temperature", None) is None:
            return "this trainer has no temperature"
        why = self.run.feature(TurnRecorder).why_not_recordable()
        return why or "the sampler's log-probabilities could not be matched to the batch"

    def _log_once(self, why: str, what: str = f"{PREFIX}logp_mismatch_* are") -> None:
        if why not in self._logged and self.run.is_main:
            logger.warning("%s not logged: %s", what, why)
        self._logged.add(why)


def _has_completions(batch: Any) -> bool:
    """Whether a batch has what the measurement needs under TRL's names."""
    return isinstance(batch, Mapping) and all(isinstance(batch.get(key), torch.Tensor) for key in _COMPLETIONS)


def _with_finite_weights(batch: Any) -> Any:
    """Returns the batch, or raises `PrecisionError` if an importance weight is not finite."""
    weights = batch.get("importance_sampling_ratio") if isinstance(batch, Mapping) else None
    if weights is not None:
        check_weights(weights)
    return batch


def check_reward_weights(args: Any) -> None:
    """Raises `PrecisionError` if `reward_weights` contains a value that is not a finite number."""
    weights = getattr(args, "reward_weights", None) or []
    if not all(map(math.isfinite, weights)):
        fix = ", ".join("1.0" if not math.isfinite(weight) else f"{weight!r}" for weight in weights)
        raise PrecisionError([refuse("reward-weights-not-finite", f"reward_weights={weights!r}", fix=fix)])


def recorded_logps(turns: Sequence[Turn], batch: Mapping[str, Any]) -> torch.Tensor | None:
    """Returns what `align` arranges for a rollout batch with `completion_ids`."""
    prompts = batch.get("prompt_ids"), batch.get("prompt_mask")
    return align(turns, batch["completion_ids"], *prompts, partial(image_marks, batch))


def old_logps(batch: Mapping[str, Any], forwards: list[torch.Tensor]) -> torch.Tensor | None:
    """Returns the per-token log-probabilities that TRL computed before the first update.

    RLOO stores only their sums over each sequence, so the forward pass with these sums is searched.

    Args:
        batch: The rollout batch.
        forwards: The log-probabilities of the batch's forward passes, each (B, C).

    Returns:
        The log-probabilities in nats, (B, C); `None` if no forward pass has these sums.
    """
    if "old_per_token_logps" in batch:
        found: torch.Tensor = batch["old_per_token_logps"]
        return found
    mask, sums = batch["completion_mask"], batch["old_logps"]
    return next((logps for logps in forwards if torch.equal((logps * mask).sum(1), sums)), None)


def _has_active_dropout(module: nn.Module) -> bool:
    """Whether a module applies dropout; some call `nn.functional.dropout` with a rate of their own (OPT, Bloom)."""
    rates = [module.p] if isinstance(module, _DROPOUTS) else [v for k, v in vars(module).items() if "dropout" in k]
    return module.training and any(isinstance(rate, float) and rate > 0 for rate in rates)
