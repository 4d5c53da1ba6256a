"""Why a mismatch of sampler and trainer is larger than rounding: the known causes in order, each checked."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..core.dtypes import from_torch
from ..core.errors import Problem, warn
from ..core.feature import Run
from ..model.parts import unwrap
from ..policy.sampling import uncorrectable_settings
from .alignment import RolloutAlignment
from .vllm import sampler_dtype


LARGEST_ROUNDING = 3.0
"""A larger `precision/logp_mismatch_ulp` is not due to rounding. Text and image models have at most 1.3 if sampler and
trainer compute the same, and 7 if image tokens are expanded twice."""
SMALLEST_MISMATCH = 1e-4
"""A smaller mean mismatch, in nats, is not reported: in float32 the order of additions exceeds `LARGEST_ROUNDING`."""
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


@dataclass(frozen=True)
class Cause:
    """A possible cause of a mismatch.

    Attributes:
        name: The cause, as a message lists it if it is excluded.
        found: How the run shows it; empty if the cause is excluded.
        fix: What to write, if it was found; empty if no setting prevents it.
    """

    name: str
    found: str = ""
    fix: str = ""


def not_rounding(run: Run, ulp: float, mean: float, synced: bool) -> Problem | None:
    """Returns the warning of a mismatch that rounding does not explain.

    Args:
        run: The run.
        ulp: The value of `precision/logp_mismatch_ulp`.
        mean: The mean mismatch in nats.
        synced: Whether vLLM had the weights of the step in which it sampled.

    Returns:
        The warning; `None` if the mismatch is small.
    """
    if ulp <= LARGEST_ROUNDING or mean <= SMALLEST_MISMATCH:
        return None
    causes = list(_causes(run, synced))
    likely = [cause for cause in causes if cause.found]
    excluded = ", ".join(cause.name for cause in causes if not cause.found)
    vllm = getattr(run.args, "use_vllm", False)
    other = "`use_vllm=False`, to see whether the model's own `generate` agrees with scoring" if vllm else (
        "`precision='fp32'`, to see whether the mismatch remains: then `generate` and scoring of this model differ"
    )  # fmt: skip
    return warn(
        "mismatch-is-not-rounding",
        f"precision/logp_mismatch_ulp={ulp:.3g}, a mean of {mean:.2g} nats",
        cause="; ".join(cause.found for cause in likely) or "none of the known ones",
        excluded=excluded or "none",
        fix=next((cause.fix for cause in likely if cause.fix), other),
    )


def samples_from_current_weights(run: Run) -> bool:
    """Whether the sampler has the weights of the current step; a separate sampler has those of its last sync."""
    steps = (feature.synced_step for feature in run.features if isinstance(feature, RolloutAlignment))
    return next(steps, None) in (None, run.step)


def _causes(run: Run, synced: bool) -> Iterator[Cause]:
    if getattr(run.args, "use_vllm", False):
        yield Cause("other prompt ids")  # they are compared in every batch, and a difference ends the run
        yield _truncation(run)
        yield _old_weights(synced)
        yield from _engine(run)
        modules = run.weights.fp32_modules
        found = f"vLLM computes {modules[0]} in its own dtype, and the trainer in float32" if modules else ""
        yield Cause("modules in float32", found, "drop `fp32_modules`, or `use_vllm=False`")
    else:
        stock = run.settings.rollout_compute == "stock"
        found = "`rollout_compute='stock'` samples in another dtype than the trainer scores in" if stock else ""
        yield Cause("another dtype", found, "drop `rollout_compute='stock'`")
    config: Any = getattr(unwrap(run.model), "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    experts = any((getattr(text, name, None) or 0) > 1 for name in _EXPERTS)
    found = "routers near a tie choose other experts in decoding than in scoring" if experts else ""
    yield Cause("other experts", found)


def _truncation(run: Run) -> Cause:
    tools = bool(getattr(run.trainer, "tools", None))
    changed = uncorrectable_settings(lambda name: getattr(run.args, name, None), tools)
    names = " and ".join(name for _, name in changed)
    found = f"vLLM's log-probabilities depend on {names}" if names else ""
    return Cause("truncated sampling", found, f"drop {names}")


def _old_weights(synced: bool) -> Cause:
    found = "" if synced else "vLLM sampled with the weights of an earlier step"
    return Cause("old weights", found, "call `sync_weights` before each rollout, as TRL does")


def _engine(run: Run) -> Iterator[Cause]:
    """The dtype and the quantisation of a colocated engine; those of a server are checked at construction."""
    engine: Any = getattr(getattr(run.trainer, "vllm_generation", None), "llm", None)
    config = getattr(getattr(engine, "llm_engine", None), "model_config", None)
    dtype = None if config is None else from_torch(config.dtype)
    own = sampler_dtype(run.policy, run.inventory)
    found = f"vLLM computes in {dtype}, and the trainer in {own}" if dtype not in (None, own) else ""
    yield Cause("another dtype", found, "drop `rollout_compute='stock'`")
    method = getattr(config, "quantization", None)
    found = f"vLLM's weights are quantised by {method}" if method is not None else ""
    yield Cause("quantised weights", found, "drop `quantization` from the arguments of the engine")
