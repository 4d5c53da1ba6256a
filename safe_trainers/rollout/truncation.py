"""Importance weights under truncated sampling: both log-probabilities refer to the tokens that could be sampled.

With `top_k`, `top_p`, `min_p` or penalties, vLLM returns log-probabilities of the distribution that it samples from:
renormalised over the tokens that it keeps. TRL scores the whole vocabulary, so that its importance weight of a token
is smaller by the probability of the kept tokens. The weight of a sequence is the product, which is close to zero. Here
the trainer's log-probability is renormalised by the same rule, computed from the trainer's logits, before TRL compares
the two. The sampled token always counts as kept, because rounding can move it across a threshold.

Settings and models for which this is impossible are refused if TRL corrects with importance weights. Without the
correction only metrics compare the two. They are not logged for such a model. For such a setting they are measured
without the rule, and the warning about a large mismatch names the setting.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn

from ..core.errors import PrecisionError, Problem, raise_if, refuse
from ..core.feature import Feature, Run
from ..model.parts import find_parts, unwrap
from ..policy.distributed import shards_weights
from ..policy.sampling import CORRECTABLE, CORRECTION, changed_settings, uncorrectable
from .head_scaling import postprocessing


OLD_KEY = "old_per_token_logps"
ELEMENTS = 1 << 24
"""The largest number of logits that are processed at once."""
TOLERANCE = 0.1
"""The largest difference in nats between TRL's log-probability of a token and the one from the logits computed here. A
model whose head is followed by an unknown operation differs by more."""


@dataclass(frozen=True)
class SamplingRule:
    """How vLLM turns logits into the distribution that it samples from.

    Attributes:
        temperature: Divides the logits after biases and penalties.
        top_k: Number of most likely tokens that are kept; 0 keeps all.
        top_p: The kept tokens have at least this probability together.
        min_p: The kept tokens have at least this share of the largest probability.
        repetition_penalty: Divides positive logits, and multiplies negative ones, of tokens in prompt or completion.
        presence_penalty: Subtracted from the logits of tokens in the completion.
        frequency_penalty: Subtracted from the logits of tokens in the completion, times their count.
        logit_bias: Added to the logits of single tokens.
        allowed_token_ids: The only tokens that are kept; `None` for all.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None

    @classmethod
    def of(cls, temperature: float, get: Callable[[str], Any]) -> "SamplingRule":
        """Returns the rule of a run.

        Args:
            temperature: The temperature of the run.
            get: Returns the value of a setting by name, `None` if it is unset.
        """
        set_values = {name: get(name) for name in CORRECTABLE if get(name) is not None}
        biases = {int(token): float(bias) for token, bias in (set_values.pop("logit_bias", None) or {}).items()}
        allowed = set_values.pop("allowed_token_ids", None)
        top_k = max(int(set_values.pop("top_k", 0)), 0)  # -1 keeps all tokens too
        return cls(
            temperature=temperature,
            top_k=top_k,
            logit_bias=tuple(sorted(biases.items())),
            allowed_token_ids=None if allowed is None else tuple(allowed),
            **set_values,
        )

    @property
    def penalises(self) -> bool:
        """Whether a penalty depends on earlier tokens."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)

    def logps(self, logits: torch.Tensor, tokens: torch.Tensor, history: "History | None") -> torch.Tensor:
        """The log-probabilities of sampled tokens in the distribution that vLLM samples from.

        The operations and their order are those of `vllm/v1/sample/sampler.py`.

        Args:
            logits: The logits of the model, (N, V) float32.
            tokens: The sampled tokens, (N,).
            history: The tokens before each of them; `None` without penalties.

        Returns:
            Log-probabilities in nats, (N,).
        """
        column = tokens.unsqueeze(1)
        scores = logits.clone()
        if self.allowed_token_ids is not None:
            forbidden = torch.ones(scores.shape[1], dtype=torch.bool, device=scores.device)
            forbidden[list(self.allowed_token_ids)] = False
            scores.masked_fill_(forbidden, -torch.inf)
        for token, bias in self.logit_bias:
            scores[:, token] += bias
        if history is not None:
            seen, counts = history.seen, history.counts
            penalised = torch.where(scores > 0, scores / self.repetition_penalty, scores * self.repetition_penalty)
            scores = torch.where(seen, penalised, scores)
            scores -= self.frequency_penalty * counts + self.presence_penalty * (counts > 0)
        scores /= self.temperature
        sampled = scores.gather(1, column)
        if self.min_p > 0:
            likelihood = scores.softmax(1)
            scores.masked_fill_(likelihood < self.min_p * likelihood.amax(1, keepdim=True), -torch.inf)
        if 0 < self.top_k < scores.shape[1]:
            smallest = scores.topk(self.top_k, dim=1).values[:, -1:]
            scores.masked_fill_(scores < smallest, -torch.inf)
        if self.top_p < 1:
            ordered, order = scores.sort(dim=1)
            removed = ordered.softmax(1).cumsum(1) <= 1 - self.top_p
            removed[:, -1] = False  # one token is always kept
            scores.masked_fill_(torch.zeros_like(removed).scatter(1, order, removed), -torch.inf)
        scores.scatter_(1, column, sampled)
        return (sampled - scores.logsumexp(1, keepdim=True)).squeeze(1)


@dataclass(frozen=True)
class History:
    """The tokens before each of some positions.

    Attributes:
        seen: Whether a token is in the prompt or earlier in the completion, (N, V).
        counts: How often a token is earlier in the completion, (N, V) float32.
    """

    seen: torch.Tensor
    counts: torch.Tensor

    @classmethod
    def of(cls, prompt: torch.Tensor, completion: torch.Tensor, positions: torch.Tensor, size: int) -> "History":
        """Returns the history of positions of one completion.

        Args:
            prompt: The token ids of the prompt, (P,).
            completion: The token ids of the completion, (C,).
            positions: Positions in the completion, (N,).
            size: The size of the vocabulary.
        """
        earlier = torch.arange(len(completion), device=positions.device) < positions.unsqueeze(1)  # (N, C)
        counts = torch.zeros(len(positions), size, device=positions.device)
        counts.scatter_add_(1, completion.expand(len(positions), -1), earlier.float())
        in_prompt = torch.zeros(size, dtype=torch.bool, device=positions.device)
        in_prompt[prompt] = True
        return cls((counts > 0) | in_prompt, counts)


@dataclass
class _Scored:
    """What has been computed of a batch whose parts are scored one after the other.

    Attributes:
        full: Log-probabilities over the whole vocabulary, (B, C) float32.
        shift: Renormalised log-probabilities less those in `full`, (B, C) float32; 0 for padding.
        computed: Which tokens are computed, (B, C).
        rows: Number of rows that are computed.
    """

    full: torch.Tensor
    shift: torch.Tensor
    computed: torch.Tensor
    rows: int = 0

    @classmethod
    def empty(cls, rows: int, length: int, device: torch.device) -> "_Scored":
        """Returns the state before the first part of a batch of B rows and C tokens of completions."""
        zeros = torch.zeros(rows, length, device=device)  # (B, C)
        return cls(zeros, zeros.clone(), zeros.bool())


class TruncationCorrection(Feature):
    """Renormalises the trainer's log-probabilities for TRL's importance weights and for the mismatch metrics.

    TRL gets the renormalised old log-probabilities for its importance weights. The batch keeps those of the whole
    vocabulary, which the loss compares with the log-probabilities of the current weights.
    """

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._armed = False  # whether the next scoring is that of the policy on a rollout or a slice of one
        self._full: torch.Tensor | None = None  # TRL's own old log-probabilities, (B, C)
        self._inputs: Mapping[str, Any] = {}
        self._failed: str | None = None  # why no shift can be computed
        self.shift: torch.Tensor | None = None
        """What was added to the last scored log-probabilities, or is to be added for the metrics, (B, C)."""

    @property
    def _corrects(self) -> bool:
        return bool(getattr(self.run.args, CORRECTION, False))

    def _get(self, name: str) -> Any:
        generation = getattr(self.run.trainer, "vllm_generation", None)
        inner = (
            getattr(generation, "generation_kwargs", None) or getattr(self.run.args, "generation_kwargs", None) or {}
        )
        return inner[name] if name in inner else getattr(self.run.args, name, None)

    def check(self, model: nn.Module) -> Iterator[Problem]:
        """Refuses settings under which the trainer's log-probabilities cannot be renormalised."""
        problem = uncorrectable(self._setting)
        if problem is not None:
            yield problem
        elif self.active and self._corrects and self._hidden_head is not None:
            given = ", ".join(setting for setting, _ in changed_settings(self._setting))
            drop = f"{CORRECTION}=True"
            yield refuse("truncation-cannot-be-corrected", f"{given} with {drop}", reason=self._hidden_head)

    def _setting(self, name: str) -> Any:
        return getattr(self.run.args, name, None)

    @property
    def _hidden_head(self) -> str | None:
        """Why the inputs of the head cannot be passed to it again; `None` if they can."""
        reasons = {
            "FSDP or ZeRO-3 shards the head": shards_weights(self.run.args),
            "`torch_compile=True` hides the inputs of the head": self._setting("torch_compile"),
        }
        return next((text for text, applies in reasons.items() if applies), None)

    def ready(self) -> None:
        """Refuses penalties that count the tokens of one turn, if the run calls tools: TRL has set them by now."""
        if getattr(self.run.trainer, "tools", None):
            raise_if([uncorrectable(self._setting, tools=True)])

    @property
    def active(self) -> bool:
        """Whether vLLM's log-probabilities refer to a part of the vocabulary, or to changed logits."""
        return bool(self._setting("use_vllm") and changed_settings(self._setting))

    @property
    def why_no_shift(self) -> str | None:
        """Why a shift that the metrics need is missing; `None` if it is not needed or can be computed."""
        return (self._hidden_head or self._failed) if self.active else None

    # ---- Around what TRL does ----

    def around_batch(self, call: Callable[[], Any]) -> Any:
        """Generates and scores a rollout batch, and restores TRL's own old log-probabilities in a copy of it."""
        if not self.active:
            return call()
        self._armed, self._full, self.shift = True, None, None
        try:
            batch = call()
        finally:
            self._armed, self.shift = False, None
        return {**batch, OLD_KEY: self._full} if self._full is not None and OLD_KEY in batch else batch

    def measure_next(self) -> None:
        """Computes `shift` in the next scoring, for metrics that compare a loss with samples of vLLM."""
        self._armed, self.shift = self.active, None

    @property
    def _needed(self) -> bool:
        """Whether the shift is used; metrics alone do without it where it cannot be computed."""
        return self._corrects or (self.run.settings.precision_metrics and not (self._hidden_head or self._failed))

    def before_scoring(self, inputs: Mapping[str, Any]) -> None:
        """Keeps what is scored."""
        self._inputs = inputs

    def around_scoring(self, call: Callable[[], Any]) -> Any:
        """Scores completions; the first scoring of the policy after a rollout is that of the rollout."""
        inputs, self._inputs = self._inputs, {}
        if not self.run.scores_policy:
            return call()
        armed, self._armed = self._armed, False
        if not armed or not self._needed:
            return call()
        ids, count = inputs["input_ids"], int(inputs["logits_to_keep"])
        scored = _Scored.empty(len(ids), count, ids.device)

        def compute(text: nn.Module, args: Any, out: Any) -> None:
            with self._needed_for_weights():
                self._compute(out, inputs, scored)

        handle = find_parts(self.run.model).text.register_forward_hook(compute)
        try:
            result = call()
        finally:
            handle.remove()
        with self._needed_for_weights():
            self.shift = self._checked(scored, result[0].detach())
        if not self._corrects or result[0].requires_grad:  # a loss: only the metrics use the shift
            return result
        shift, self.shift = self.shift, None
        self._full = result[0]
        return (result[0] + shift, *result[1:])

    @contextlib.contextmanager
    def _needed_for_weights(self) -> Iterator[None]:
        """Keeps why the block fails if only metrics need the shift; they state why they are missing."""
        try:
            yield
        except Exception as error:
            if self._corrects:
                raise
            found = error.problems[0].why if isinstance(error, PrecisionError) else f"{type(error).__name__}: {error}"
            self._failed = self._failed or found.rstrip(".")

    def _compute(self, out: Any, inputs: Mapping[str, Any], scored: "_Scored") -> None:
        """Computes the next rows of `scored` from the text model's output for them.

        TRL scores a batch in parts to save memory, so that the hidden states of a part are not kept after it.
        """
        if self._failed and not self._corrects:
            return
        hidden = out[0] if isinstance(out, tuple) else getattr(out, "last_hidden_state", out)
        if not isinstance(hidden, torch.Tensor):
            self._refuse("its text model returns no hidden states")
        ids, mask, count = inputs["input_ids"], inputs["attention_mask"], scored.full.shape[1]
        rule = SamplingRule.of(float(self.run.trainer.temperature), self._get)
        for row, row_states in zip(range(scored.rows, len(ids)), hidden.detach(), strict=False):
            length = int(mask[row, -count:].sum())
            prompt = ids[row, :-count][mask[row, :-count].bool()]
            completion = ids[row, -count:][:length]
            states = row_states[-count - 1 : -1][:length]
            size = self._logits(states[:1]).shape[1] if length else 1
            step = max(1, ELEMENTS // size)
            for start in range(0, length, step):
                positions = torch.arange(start, min(start + step, length), device=ids.device)
                logits, tokens = self._logits(states[positions]), completion[positions]
                full = (logits / rule.temperature).log_softmax(1).gather(1, tokens.unsqueeze(1)).squeeze(1)
                history = History.of(prompt, completion, positions, logits.shape[1]) if rule.penalises else None
                scored.full[row, positions] = full
                scored.shift[row, positions] = rule.logps(logits, tokens, history) - full
                scored.computed[row, positions] = True
        scored.rows += len(hidden)

    def _checked(self, scored: "_Scored", logps: torch.Tensor) -> torch.Tensor | None:
        """Returns the shift of each token, (B, C), if TRL's log-probabilities are those of the head's logits."""
        if self._failed and not self._corrects:
            return None
        if scored.rows != len(logps):
            self._refuse(f"its text model returned hidden states of {scored.rows} sequences of {len(logps)}")
        differing = torch.where(scored.computed, (scored.full - logps).abs(), 0.0)
        worst = differing.max().item() if differing.numel() else 0.0
        if not worst <= TOLERANCE:  # NaN too
            self._refuse(f"its logits differ from those of its head, by {worst:.3g} nats for one token")
        return scored.shift

    def _logits(self, states: torch.Tensor) -> torch.Tensor:
        """Returns the logits of hidden states, (N, V) float32, scaled and capped as the model's config says.

        The grad mode is that of the scoring. Without gradients, autocast would store a cast of the head's weight that
        has no gradient, and TRL's loss would compute with it.
        """
        model: Any = unwrap(self.run.model)
        with self.run.trainer.compute_context():
            logits: torch.Tensor = model.get_output_embeddings()(states)
        process = postprocessing(model.config.get_text_config())
        logits = logits.detach().float()
        return logits if process is None else process(logits)

    def _refuse(self, reason: str) -> NoReturn:
        given = f"{type(unwrap(self.run.model)).__name__} with truncated sampling and {CORRECTION}=True"
        raise PrecisionError([refuse("truncation-cannot-be-corrected", given, reason=reason)])
