"""What the trainers log about the precision of their rollouts: sampler against trainer, token by token.

The sampler's log-probabilities come from `generate` itself (sampled.py) or are vLLM's own, which TRL keeps as
`sampling_per_token_logps`. The trainer's are TRL's old log-probabilities where it computes them, and else those of the
first loss of each slice of the batch, before the weights have changed: no model is run for any of it. mismatch.py has
the metrics with their formulas; beside them:

| metric | formula | unit |
|---|---|---|
| `precision/unrewarded_frac` | completions that no reward function gave a number (None or NaN) / completions | share |
| `precision/unrewarded_frac/<function>` | of several functions: those that this one gave none / completions | share |

Completions without any number have no advantage in TRL 1, and count as a reward of 0 before; a single function without
one is left out of the completion's sum.
"""

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from .contract import BUFFER_METHOD, trl_bases
from .errors import PrecisionError, refuse
from .mismatch import EPS, SIZE, Limits, combine, metrics, tally
from .sampled import RECORDED_MODES, SAMPLER_KEY, Turn, align
from .towers import unwrap


logger = logging.getLogger(__name__)

TRL_SAMPLER_KEY = "sampling_per_token_logps"
_OLD_KEYS = ("old_per_token_logps", "old_logps")  # GRPO's by token, RLOO's summed up
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


class MismatchMetrics:
    """Above TRL: measures the mismatch of each rollout and adds it to the log; a base of `PrecisionMixin`.

    Overrides the turn of generation, the scoring of a rollout, of its tokens and of its rewards, the loss, and what
    logs. `precision_metrics=False` switches it off.
    """

    # What the trainers bring, for the type checker.
    args: Any
    control: Any
    model: Any

    _turn: Turn | None = None  # read by SampledRollouts, below TRL
    _mismatch_record: "MismatchRecord | None" = None

    @property
    def _mismatch(self) -> "MismatchRecord":
        if self._mismatch_record is None:
            self._mismatch_record = MismatchRecord(self)
        return self._mismatch_record

    @property
    def _mismatch_state(self) -> dict[str, torch.Tensor]:
        """What was counted since the last log, for `exact_state`."""
        return dict(self._mismatch.own)

    @_mismatch_state.setter
    def _mismatch_state(self, state: dict[str, torch.Tensor]) -> None:
        self._mismatch.own = dict(state)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Trains; see `ExactCheckpoints.train`. What an earlier run of this trainer left unlogged is dropped."""
        self._mismatch_record = None
        return super().train(*args, **kwargs)  # type: ignore[misc]

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        """Runs one turn of generation, and keeps what the sampler gave each token."""
        generate: Callable[..., Any] = super()._generate_single_turn  # type: ignore[misc]
        if self._mismatch.turns is None or not self._mismatch.recordable():
            return generate(*args, **kwargs)
        self._turn = turn = Turn(self.temperature, args[0] if args else kwargs["prompt_ids"])  # type: ignore[attr-defined]
        try:
            result = generate(*args, **kwargs)
        finally:
            self._turn = None
        turn.lengths = [len(ids) for ids in (result[0] if isinstance(result, tuple) else result)]
        self._mismatch.turns.append(turn)
        return result

    def _generate_and_score_completions(self, *args: Any, **kwargs: Any) -> Any:
        """Generates and scores a batch, and hands on what the sampler gave where the loss is what to compare with.

        Returns:
            TRL's batch, or a copy of its mapping with `SAMPLER_KEY`.

        Raises:
            PrecisionError: If what TRL makes of the sampler's log-probabilities would make the loss NaN.
        """
        score: Callable[..., Any] = super()._generate_and_score_completions  # type: ignore[misc]
        if not self._mismatch.measures():
            return _with_finite_weights(score(*args, **kwargs))
        return _with_finite_weights(self._mismatch.of_rollout(lambda: score(*args, **kwargs)))

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        """Scores tokens, and keeps a reference to the result while something is being measured."""
        result = super()._get_per_token_logps_and_entropies(*args, **kwargs)  # type: ignore[misc]
        if self._mismatch.forwards is not None:
            self._mismatch.forwards.append(result[0].detach())
        return result

    def _compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """Computes the loss, and counts a slice of the batch whose log-probabilities were not known before."""
        loss: Callable[..., Any] = super()._compute_loss  # type: ignore[misc]
        batch = args[1] if len(args) > 1 else kwargs.get("inputs")
        return self._mismatch.of_loss(lambda: loss(*args, **kwargs), batch if isinstance(batch, Mapping) else {})

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Scores completions, and counts those that no reward function gave a number.

        Returns:
            Rewards of all ranks by function, (N, F); NaN where a function gave None or NaN.

        Raises:
            PrecisionError: If a reward is infinite: TRL would give the whole group no advantage, or an infinite one.
        """
        rewards: torch.Tensor = super()._calculate_rewards(*args, **kwargs)  # type: ignore[misc]
        infinite = rewards.isinf()
        names: list[str] = self.reward_func_names  # type: ignore[attr-defined]
        if infinite.any():
            found = [(name, int(n)) for name, n in zip(names, infinite.sum(0).tolist(), strict=True) if n]
            given = ", ".join(f"{n} of {len(rewards)} rewards of {name} are infinite" for name, n in found)
            raise PrecisionError([refuse("infinite-rewards", given, function=found[0][0])])
        if self._mismatch.on:
            missing = rewards.isnan().cpu()
            columns = {"": missing.all(1)}
            if rewards.shape[1] > 1:  # a function that gives none is left out of the sum, and nothing would show it
                columns |= {f"/{name}": missing[:, number] for number, name in enumerate(names)}
            logged = self._metrics["train" if self.model.training else "eval"]  # type: ignore[attr-defined]
            for name, column in columns.items():  # one by one, since the last batch of an evaluation may be smaller
                logged[f"precision/unrewarded_frac{name}"].extend(column.double().tolist())
        return rewards

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Puts together what all ranks have measured, where a log follows."""
        if self.control.should_log or self.control.should_training_stop:  # alike on all ranks
            self._mismatch.gather("train")
        super()._maybe_log_save_evaluate(*args, **kwargs)  # type: ignore[misc]

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluates, and puts together what all ranks have measured."""
        self._mismatch.forget("eval")
        result = super().evaluation_loop(*args, **kwargs)  # type: ignore[misc]
        self._mismatch.gather("eval")
        return result

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Logs, with what was measured since the last log.

        Args:
            logs: What is logged; the metrics are added to it.
            *args: Passed on.
            **kwargs: Passed on.
        """
        logs.update(self._mismatch.metrics("train" if "train_loss" in logs else None))
        super().log(logs, *args, **kwargs)  # type: ignore[misc]


class MismatchRecord:
    """What is being measured, and what has been counted since the last log.

    Args:
        trainer: The trainer.

    Attributes:
        turns: The turns of the rollout that is going on; `None` outside.
        forwards: Log-probabilities of the forward passes of what is being measured, each (B, C); `None` outside.
        own: The tally of this rank since the last log, for `"train"` and `"eval"`.
        everyone: The tally of all ranks, for the next log.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.on: bool = getattr(trainer.args, "precision_metrics", True)
        self.turns: list[Turn] | None = None
        self.forwards: list[torch.Tensor] | None = None
        self.own: dict[str, torch.Tensor] = {}
        self.everyone: dict[str, torch.Tensor] = {}
        self._rolls_out = any(BUFFER_METHOD in vars(base) for base in trl_bases(type(trainer)))
        self._drops_out: bool | None = None
        self._said: set[str] = set()
        computed = trainer.precision_policy.compute.value
        self._dtype = max((name for name in EPS if name in computed), key=EPS.__getitem__, default="float32")
        self._limits = limits_of(trainer.args)

    # ---- One rollout, one loss ----

    def measures(self) -> bool:
        """Whether anything is measured now: dropout makes two passes differ by more than rounding ever does."""
        if not self.on or not self._trainer.model.training:
            return self.on
        if self._drops_out is None:
            self._drops_out = any(_drops_out(module) for module in self._trainer.model.modules())
        if self._drops_out:
            self._say_once("dropout is active in rollout and loss, and differs between them; evaluation measures")
        return not self._drops_out

    def recordable(self) -> bool:
        """Whether `generate` samples each token from one distribution, by the run's config and the model's own."""
        owners = (self._trainer, unwrap(self._trainer.model))
        configs = [getattr(owner, "generation_config", None) for owner in owners]
        return all(config is None or config.get_generation_mode() in RECORDED_MODES for config in configs)

    def of_rollout(self, score: Callable[[], Any]) -> Any:
        """Scores a rollout and counts it, or hands on what the sampler gave.

        Args:
            score: Generates and scores.

        Returns:
            The rollout batch.
        """
        turns: list[Turn] = []
        forwards: list[torch.Tensor] = []
        self.turns, self.forwards = turns, forwards
        try:
            batch = score()
        finally:
            self.turns = self.forwards = None
        recorded = batch.get(TRL_SAMPLER_KEY) is None
        sampler = align(turns, batch["completion_ids"]) if recorded else batch[TRL_SAMPLER_KEY]
        if sampler is None:
            self._say_once(self._why_absent())
        elif any(key in batch for key in _OLD_KEYS):
            self._count(old_logps(batch, forwards), sampler, batch)
        elif recorded:
            return {**batch, SAMPLER_KEY: sampler}
        return batch

    def of_loss(self, loss: Callable[[], Any], batch: Mapping[str, Any]) -> Any:
        """Computes a loss, and counts its slice of the batch unless that was known when it was scored.

        Args:
            loss: Computes it.
            batch: The slice.

        Returns:
            The loss.
        """
        sampler = batch.get(SAMPLER_KEY, batch.get(TRL_SAMPLER_KEY))
        if sampler is None or any(key in batch for key in _OLD_KEYS) or not self.measures():
            return loss()
        forwards: list[torch.Tensor] = []
        self.forwards = forwards
        try:
            value = loss()
        finally:
            self.forwards = None
        self._count(forwards[0] if forwards else None, sampler, batch)
        return value

    def _count(self, trainer: torch.Tensor | None, sampler: torch.Tensor, batch: Mapping[str, Any]) -> None:
        if trainer is None or trainer.shape != sampler.shape:
            self._say_once("this loss does not show its log-probabilities")
            return
        mask = batch["completion_mask"] * batch["tool_mask"] if "tool_mask" in batch else batch["completion_mask"]
        counted = tally(trainer, sampler, mask, self._limits)
        mode = self._mode()
        before = self.own.get(mode)
        self.own[mode] = counted if before is None else combine(torch.stack([before.to(counted.device), counted]))

    # ---- The log ----

    def gather(self, mode: str) -> None:
        """Puts the tallies of all ranks together; every rank has to come here.

        Args:
            mode: `"train"` or `"eval"`.
        """
        if not self.on or not self._rolls_out:
            return
        own = self.own.pop(mode, None)
        accelerator = self._trainer.accelerator
        device = torch.device("cpu") if accelerator.device.type == "mps" else accelerator.device
        own = torch.zeros(SIZE, dtype=torch.float64) if own is None else own
        tallies = accelerator.gather(own.to(device).unsqueeze(0))
        waiting = self.everyone.get(mode)
        self.everyone[mode] = combine(tallies if waiting is None else torch.cat([tallies, waiting.unsqueeze(0)]))

    def forget(self, mode: str) -> None:
        """Drops what was counted and not logged."""
        self.own.pop(mode, None)
        self.everyone.pop(mode, None)

    def metrics(self, mode: str | None = None) -> dict[str, float]:
        """The metrics of the log that is being written; what they are made of starts anew.

        Args:
            mode: `"train"` or `"eval"`; by default what the model is in, which the last log of a run may follow
                an evaluation in.
        """
        mode = mode or self._mode()
        total = self.everyone.pop(mode, None)
        found = {} if total is None else metrics(total, self._dtype, self._limits)
        return {f"eval_{name}": value for name, value in found.items()} if mode == "eval" else found

    def _mode(self) -> str:
        return "train" if self._trainer.model.training else "eval"  # as TRL decides it

    def _why_absent(self) -> str:
        args = self._trainer.args
        if getattr(args, "use_vllm", False):
            return "vLLM samples, and this trainer does not keep its log-probabilities"
        for name in ("use_transformers_continuous_batching", "use_transformers_paged"):
            if getattr(args, name, False):
                return f"{name}=True samples without giving log-probabilities"
        if not self.recordable():
            return "generation neither samples nor decodes greedily"
        return "the sampler's log-probabilities cannot be told from this rollout"

    def _say_once(self, why: str) -> None:
        if why not in self._said and self._trainer.args.process_index == 0:
            logger.warning("precision/logp_mismatch_* are absent: %s", why)
        self._said.add(why)


def _with_finite_weights(batch: Any) -> Any:
    """A rollout batch whose importance weights are all finite.

    Raises:
        PrecisionError: If one is not.
    """
    weights = batch.get("importance_sampling_ratio")
    if weights is None or weights.isfinite().all():
        return batch
    what, fix = "infinite", "`vllm_importance_sampling_clip_max=3.0`"
    if weights.isnan().any():  # before TRL 1.16, which lets such a token weigh 1
        what, fix = "missing", "`vllm_importance_sampling_correction=False`, or pip install 'trl>=1.16'"
    given = f"{int((~weights.isfinite()).sum())} of {weights.numel()} importance weights are not finite"
    raise PrecisionError([refuse("importance-weights-not-finite", given, what=what, fix=fix)])


def check_reward_weights(args: Any) -> None:
    """Refuses weights of rewards that are no finite numbers.

    Args:
        args: The training arguments.

    Raises:
        PrecisionError: If there is one.
    """
    weights = getattr(args, "reward_weights", None) or []
    if not all(map(math.isfinite, weights)):
        fix = ", ".join("1.0" if not math.isfinite(weight) else f"{weight!r}" for weight in weights)
        raise PrecisionError([refuse("reward-weights-not-finite", f"reward_weights={weights!r}", fix=fix)])


def limits_of(args: Any) -> Limits | None:
    """TRL's limits of importance sampling, which it applies to vLLM's samples alone.

    Args:
        args: The training arguments.

    Returns:
        The limits, `None` where the algorithm has none.
    """
    mode = getattr(args, "vllm_importance_sampling_mode", None)
    if mode is None:
        return None
    cap = getattr(args, "vllm_importance_sampling_cap", None)  # what the upper limit was called first
    high = getattr(args, "vllm_importance_sampling_clip_max", cap)
    return Limits(getattr(args, "vllm_importance_sampling_clip_min", None), high, str(mode).startswith("sequence"))


def old_logps(batch: Mapping[str, Any], forwards: list[torch.Tensor]) -> torch.Tensor | None:
    """The log-probabilities that TRL computed of its samples before the first update, by token.

    RLOO keeps their sums alone: the tokens' are those of the forward pass that has these sums.

    Args:
        batch: The rollout batch.
        forwards: What was scored for it, each (B, C).

    Returns:
        The log-probabilities, (B, C); `None` where they cannot be told.
    """
    if "old_per_token_logps" in batch:
        found: torch.Tensor = batch["old_per_token_logps"]
        return found
    mask, sums = batch["completion_mask"], batch["old_logps"]
    return next((logps for logps in forwards if torch.equal((logps * mask).sum(1), sums)), None)


def _drops_out(module: nn.Module) -> bool:
    """Whether a module drops out; some are no dropout but keep a rate for `nn.functional.dropout` (OPT, Bloom)."""
    rates = [module.p] if isinstance(module, _DROPOUTS) else [v for k, v in vars(module).items() if "dropout" in k]
    return module.training and any(isinstance(rate, float) and rate > 0 for rate in rates)
