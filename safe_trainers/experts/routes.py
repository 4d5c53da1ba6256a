"""Compares the experts that a rollout chose with those that scoring and losses choose, and replays them if asked to.

In half precision a router near a tie may choose other experts for the same token, because the sampler computes tokens
one by one and the trainer all at once. The log-probability of such a token jumps. With `router_replay="rollout"` the
choices of the rollout are used in scoring, in losses, and where gradient checkpointing computes layers again. The
weights of the chosen experts are computed from the live router's scores, so its gradient is that of the experts that
were used. A reference model chooses its own experts, and the auxiliary loss of a model counts the live choices: the
model computes it from all scores, outside of its routers.

| metric | formula | unit |
|---|---|---|
| `precision/router_flip_frac` | choices of other experts than in the rollout / choices, of all routers | share |
| `precision/router_flip_frac/<n>` | the same for the n-th router, from 0, if it is not 0 | share |
| `precision/router_flip_any_frac` | tokens for which any router chose other experts / tokens | share |
| `precision/router_replayed_frac` | choices that replay replaced / choices | share |
| `precision/logp_mismatch_flip` | mean of abs(D) of the tokens for which any router chose other experts | nats |
| `precision/logp_mismatch_no_flip` | mean of abs(D) of the other tokens | nats |

A completion token counts with the choices for the token before it, from which it is predicted. D is defined under
"Mismatch of sampler and trainer".
"""

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ..core.coverage import COVERED, UNCOVERED, Coverage
from ..core.dtypes import to_torch
from ..core.errors import PrecisionError, Problem, refuse
from ..core.feature import Feature, Run
from ..core.trl import has_rollouts, uses_continuous_batching
from ..model.routers import Routers, find_routers
from ..policy.settings import ROLLOUT
from . import from_vllm
from .tape import Follower, Recorder, Tape
from .turns import RoutedTurn, arrange


logger = logging.getLogger(__name__)

ROUTES_KEY = "precision_routes"
"""Key of the rollout's choices in a rollout batch, (B, P + C, K), in the smallest dtype of integers."""
PREFIX = "precision/"
_OLD_KEYS = ("old_per_token_logps", "old_logps")
_COUNTS = (
    "choices", "flips", "replayed", "tokens", "flipped", "abs_flipped", "scored_flipped", "abs_other", "scored_other",
)  # fmt: skip


class ExpertRoutes(Feature):
    """Measures how often routers choose other experts than in the rollout, and replays the choices of the rollout.

    Attributes:
        routers: The routers of the model; none if the trainer has no rollouts.
        ties: Of each router, its near ties in the first compared pass and the number of tokens, by its number.
        differed: Of each router, the share of tokens in the first compared pass for which its own choice was not that
            of the rollout.
        own: The tally of this rank since the last log, by mode.
    """

    name = "experts"

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.routers = Routers()
        self.ties: dict[int, tuple[int, int]] = {}
        self.differed: tuple[float, ...] = ()
        self.own: dict[str, torch.Tensor] = {}
        self.gathered: dict[str, torch.Tensor] = {}
        self._tape: Tape | None = None
        self._engine: from_vllm.EngineRoutes | None = None
        self._prompts: Any = ()
        self._scored: Mapping[str, Any] = {}  # the arguments of the next scoring
        self._turns: list[RoutedTurn] | None = None  # the turns of the batch that is made
        self._in_loss = False
        self._pass: Follower | None = None  # the last pass that was compared
        self._said: set[str] = set()

    @property
    def replays(self) -> bool:
        """Whether the choices of the rollout are used in scoring and losses."""
        return bool(self.run.settings.router_replay == ROLLOUT)

    @property
    def follows(self) -> bool:
        """Whether the choices of rollouts are recorded."""
        return bool(self.routers.found) and self._tape is not None

    # ---- Construction ----

    def check(self, model: nn.Module) -> Iterator[Problem]:
        """Finds the routers; refuses a replay that cannot reach all experts."""
        if not self.replays and not self.run.settings.precision_metrics:
            return
        reason = self._why_not()
        if reason is None:
            self._find(model)
            reason = self._unreached()
            if reason is None and self._uses_vllm:
                reason = from_vllm.why_not(self.run.args, self.routers)
        self._cover(reason)
        if self.replays and reason is not None:
            yield refuse("routes-not-reached", "router_replay='rollout'", reason=reason)

    @property
    def _uses_vllm(self) -> bool:
        return bool(getattr(self.run.args, "use_vllm", False))

    def engine_kwargs(self, module: str, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Makes vLLM return the experts, if they are replayed."""
        return from_vllm.engine_kwargs(arguments) if self.replays and self.follows else arguments

    def ready(self) -> None:
        """Keeps what vLLM returns."""
        llm = getattr(getattr(self.run.trainer, "vllm_generation", None), "llm", None)
        if llm is not None and self.replays and self.follows:
            self._engine = from_vllm.EngineRoutes(llm, self.routers)

    def _cover(self, reason: str | None) -> None:
        """Adds a row on a model with experts to the contract."""
        if not self.routers.found and not self.routers.unreached:
            return
        if reason is not None:
            row = Coverage("experts", UNCOVERED, reason)
        elif self.replays:
            nbytes = f"{self.routers.bytes_per_token} bytes per token"
            detail = f"{len(self.routers.found)} routers choose the experts of the rollout again, {nbytes}"
            row = Coverage("experts", COVERED, detail)
        else:
            detail = f"router_replay='off': {len(self.routers.found)} routers choose again in scoring and losses"
            row = Coverage("experts", UNCOVERED, detail)
        contract = self.run.coverage
        contract.coverage = (*(c for c in contract.coverage if c.area != row.area), row)

    def _why_not(self) -> str | None:
        """Why the choices of a rollout cannot be recorded, whatever the model is."""
        run, args = self.run, self.run.args
        trainer = type(run.trainer)
        generation = getattr(args, "generation_kwargs", None) or {}
        reasons = {
            f"{trainer.__name__} has no rollouts": not has_rollouts(trainer),
            "the user's rollout_func generates": getattr(run.trainer, "rollout_func", None) is not None,
            "vLLM is asked for them only with `router_replay='rollout'`": self._uses_vllm and not self.replays,
            "beam search changes the order of sequences": (generation.get("num_beams") or 1) > 1,
            "`prefill_chunk_size` divides the prompts": bool(generation.get("prefill_chunk_size")),
            "continuous batching computes in its own order": uses_continuous_batching(args),
            "`torch_compile=True` compiles the choice into the model": getattr(args, "torch_compile", False),
            "`compile_decode=True` compiles the choice into the rollout": run.settings.compile_decode,
            "`nn.DataParallel` runs copies of the model": args.n_gpu > 1,
        }
        return next((text for text, applies in reasons.items() if applies), None)

    def _find(self, model: nn.Module) -> None:
        autocast = self.run.policy.autocast.value
        self.routers = find_routers(model, None if autocast is None else to_torch(autocast))
        self._tape = Tape(model, self.routers) if self.routers.found else None

    def _unreached(self) -> str | None:
        """Why not all experts can be replayed; `None` if they can."""
        if self.routers.why:
            return f"the trial forward pass failed ({self.routers.why})"
        if self.routers.unreached:
            return f"{self.routers.unreached[0]} gets experts that no call of `torch.topk` chose"
        return None if self.routers.found else "no module of the model chooses experts"

    # ---- Rollouts ----

    def before_rollout(self, prompt_ids: Any) -> None:
        """Keeps the prompts of the turn."""
        self._prompts = prompt_ids

    def around_rollout(self, call: Callable[[], Any]) -> Any:
        """Generates one turn, and records the choices."""
        if self._turns is None or self._tape is None:
            return call()
        turn, recorder = RoutedTurn(self._prompts), Recorder(self.routers, len(self._prompts))
        with self._following(recorder) if self._engine is None else contextlib.nullcontext():
            result = call()
        turn.completions = [list(ids) for ids in (result[0] if isinstance(result, tuple) else result)]
        if self._engine is None:
            turn.record = recorder.finish()
            turn.width = recorder.width
        else:
            turn.record = self._engine.record(turn.prompts, turn.completions)
            turn.width = max(map(len, turn.prompts), default=0)
        self._turns.append(turn)
        return result

    def around_batch(self, call: Callable[[], Any]) -> Any:
        """Generates and scores a rollout batch, and adds the choices to it if a loss needs them.

        Returns:
            TRL's batch, or a copy of the mapping with `ROUTES_KEY`.
        """
        if not self.follows:
            return call()
        self._turns, self._pass = [], None
        try:
            batch = call()
            needed = self.replays or not any(key in batch for key in _OLD_KEYS)
            if needed and "prompt_ids" in batch:
                ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
                record = self._arranged(ids, batch["completion_ids"].shape[1])
                if record is not None:
                    batch = {**batch, ROUTES_KEY: record}
        finally:
            self._turns = None
        return batch

    def _arranged(self, input_ids: torch.Tensor, length: int) -> torch.Tensor | None:
        """Returns the record in the shape of the batch; raises `PrecisionError` if a replay needs it."""
        record = arrange(self._turns or [], input_ids, length)
        if record is not None:
            return record.to(input_ids.device)
        if self.replays:
            raise PrecisionError([refuse("routes-not-recorded", f"a rollout of {len(input_ids)} sequences")])
        self._say("the choices of the rollout could not be matched to its batch")
        return None

    # ---- Scoring and losses ----

    def before_scoring(self, inputs: Mapping[str, Any]) -> None:
        """Keeps the tokens that are scored."""
        self._scored = inputs

    def around_scoring(self, call: Callable[[], Any]) -> Any:
        """Scores a rollout with the policy, and compares or replays the choices. A reference makes its own."""
        scored, self._scored = self._scored, {}
        if self._in_loss or not self._turns or "logits_to_keep" not in scored or not self.run.scores_policy:
            return call()
        record = self._arranged(scored["input_ids"], scored["logits_to_keep"])
        if record is None:
            return call()
        follower = self._follower(record)
        with self._following(follower):
            result = call()
        self._keep(follower)
        return result

    def around_loss(self, call: Callable[[], Any]) -> Any:
        """Computes a loss, and compares or replays the choices, in its backward pass too."""
        record = self.run.loss_inputs.get(ROUTES_KEY)
        if record is None or self._tape is None:
            return call()
        follower = self._follower(record)
        self._in_loss = True
        try:
            with self._following(follower):
                value = call()
        finally:
            self._in_loss = False
        self._keep(follower)
        if self.replays and torch.is_grad_enabled():
            self._tape.follow(follower)  # gradient checkpointing computes layers again
        return value

    def before_step(self) -> None:
        """Ends the last backward pass."""
        if self._tape is not None:
            self._tape.follow(None)

    def on_train_exit(self) -> None:
        """Ends the backward pass in which an error occurred."""
        self.before_step()

    def on_train_begin(self) -> None:
        """Forgets what an earlier call of `train` has measured."""
        self.own, self.gathered = {}, {}
        if not self.follows:
            self.rest("before_rollout", "around_rollout", "around_batch", "before_scoring", "around_scoring")
            self.rest("around_loss", "before_step")

    def _follower(self, record: torch.Tensor) -> Follower:
        return Follower(self.routers, record, self.replays, counts_ties=not self.ties)

    @contextlib.contextmanager
    def _following(self, taken: Recorder | Follower) -> Iterator[None]:
        """Passes the choices of the routers to an object while the block runs."""
        if self._tape is None:
            yield
            return
        self._tape.follow(taken)
        try:
            yield
        finally:
            self._tape.follow(None)

    def _keep(self, follower: Follower) -> None:
        self._pass = follower
        if not self.ties:
            self.ties = {number: (int(near), int(of)) for number, (near, of) in follower.ties.items()}

    # ---- Measuring ----

    def count(self, difference: torch.Tensor, mask: torch.Tensor) -> None:
        """Counts the choices of the last compared pass.

        Args:
            difference: log p_trainer - log p_sampler of each token in nats, (B, C); not finite if unknown.
            mask: 1 for sampled tokens and 0 for others, (B, C).
        """
        follower, self._pass = self._pass, None
        differing = None if follower is None else follower.differing()
        if follower is None or differing is None or differing.shape[0] != len(mask):
            return
        device = torch.device("cpu") if mask.device.type == "mps" else mask.device
        places = slice(differing.shape[1] - mask.shape[1] - 1, differing.shape[1] - 1)
        counted = (mask != 0) & follower.known[:, places]  # (B, C)
        differing = (differing[:, places] & counted.unsqueeze(-1)).to(device)  # (B, C, R)
        flips = torch.zeros_like(differing) if self.replays else differing
        if not self.differed:
            self.differed = tuple((differing.sum((0, 1)) / counted.sum().clamp(min=1).to(device)).tolist())
        size = difference.detach().to(device, torch.float64).abs()
        counted, scored = counted.to(device), (counted & difference.isfinite()).to(device)
        any_flip = flips.any(-1)
        size = size.where(scored, 0.0)
        by_router = flips.sum((0, 1))
        tokens = counted.sum()
        found = [
            tokens * differing.shape[-1], by_router.sum(), differing.sum() - by_router.sum(), tokens, any_flip.sum(),
            (size * any_flip).sum(), (scored & any_flip).sum(), (size * ~any_flip).sum(), (scored & ~any_flip).sum(),
        ]  # fmt: skip
        total = torch.cat([torch.stack([value.double() for value in found]), by_router.double()])
        mode = self.run.mode
        before = self.own.get(mode)
        self.own[mode] = total if before is None else before.to(device) + total

    def before_log(self, mode: str) -> None:
        """Adds up the tallies of all ranks."""
        if not self.follows or not self.run.settings.precision_metrics:
            return
        accelerator = self.run.accelerator
        device = torch.device("cpu") if accelerator.device.type == "mps" else accelerator.device
        size = len(_COUNTS) + len(self.routers.found)
        own = self.own.pop(mode, torch.zeros(size, dtype=torch.float64))
        total = accelerator.gather(own.to(device).unsqueeze(0)).sum(0)
        self.gathered[mode] = total + self.gathered[mode] if mode in self.gathered else total

    def around_evaluation(self, call: Callable[[], Any]) -> Any:
        """Evaluates, and adds up the tallies of all ranks."""
        self.own.pop("eval", None)
        self.gathered.pop("eval", None)
        result = call()
        self.before_log("eval")
        return result

    def on_log(self, logs: Mapping[str, float], mode: str) -> dict[str, float]:
        """The metrics since the last log."""
        total = self.gathered.pop(mode, None)
        found = {} if total is None else metrics(total.tolist(), self.replays)
        return {f"eval_{name}": value for name, value in found.items()} if mode == "eval" else found

    def state_dict(self) -> dict[str, Any]:
        """The tallies since the last log."""
        return dict(self.own)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the tallies, unless they are of another model."""
        size = (len(_COUNTS) + len(self.routers.found),)
        self.own = {mode: total for mode, total in state.items() if getattr(total, "shape", None) == size}

    def _say(self, why: str) -> None:
        if why not in self._said and self.run.is_main:
            logger.warning("%srouter_* are not logged: %s", PREFIX, why)
        self._said.add(why)


def metrics(total: list[float], replays: bool) -> dict[str, float]:
    """Computes the metrics from a tally.

    Args:
        total: The tally of all ranks: `_COUNTS`, and then the flips of each router.
        replays: Whether the choices were replayed.

    Returns:
        The metrics by name. A metric without data is absent.
    """
    seen = dict(zip(_COUNTS, total, strict=False))
    if not seen["tokens"]:
        return {}
    found = {
        "router_flip_frac": seen["flips"] / seen["choices"],
        "router_flip_any_frac": seen["flipped"] / seen["tokens"],
    }
    by_router = total[len(_COUNTS) :]
    found |= {f"router_flip_frac/{n}": flips / seen["tokens"] for n, flips in enumerate(by_router) if flips}
    if replays:
        found["router_replayed_frac"] = seen["replayed"] / seen["choices"]
    for name, part in (("logp_mismatch_flip", "flipped"), ("logp_mismatch_no_flip", "other")):
        if seen[f"scored_{part}"]:
            found[name] = seen[f"abs_{part}"] / seen[f"scored_{part}"]
    return {PREFIX + name: value for name, value in found.items()}
