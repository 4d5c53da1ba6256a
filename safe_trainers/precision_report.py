"""The precision report of a run: what each part of the model holds and computes in, what was changed, and what of it
was seen to be so.

It has two phases. Planned: as the model is at the end of construction, with what follows from it. Confirmed: after
the first optimizer step that was taken, when gradients and optimizer state exist and engines have changed what they
change. What was planned and is not so is a warning.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from .contract import COVERED, HOOKS, UNCOVERED
from .decisions import grouped
from .dtypes import BFLOAT16, FLOAT32, SHORT, from_torch
from .engines import Engine, engine_copies
from .errors import Problem, warn
from .inventory import BUFFERS, HEAD, Circumstances, Group, listed, take_inventory
from .policy import OFF, PrecisionPolicy
from .report import Cell, Report, Table, Verdict
from .towers import unwrap


TITLE = "precision report"
FILE = "precision_report.json"
"""What `precision_report="file"` writes, in `output_dir`."""
PLANNED, CONFIRMED = "planned", "confirmed"

GROUPS, CHANGES, POLICY, COVERAGE = "module groups", "changed from stock", "policy", "coverage"
"""Titles of the tables."""
COLUMNS = (
    "part", "parameters", "trainable", "compute", "gradient", "optimizer state", "elements", "bytes",
    "optimizer bytes",
)  # fmt: skip
"""Columns of the table of module groups."""

Seen = Mapping[tuple[str, str], frozenset[str]]
"""Dtypes that first layers gave, by their part and the dtype that they hold."""


def count(trainer: Any, gradients: Mapping[int, str] | None = None, states: Any = None) -> tuple[Group, ...]:
    """Counts what the models of a run hold: the policy, and reference, teacher and reward models beside it.

    Args:
        trainer: A safe trainer.
        gradients: Dtype of the gradient of each parameter that has one, by its `id`.
        states: What `optimizer_states` found.

    Returns:
        The groups, those of the policy first.
    """
    beside = _beside(trainer)
    circumstances = Circumstances(_compute_of(trainer, beside), gradients or {}, states or {})
    groups = take_inventory(trainer.model, circumstances)
    return (*groups, *(g for name, model in beside for g in take_inventory(model, circumstances, name)))


def plan(trainer: Any) -> tuple[Group, ...]:
    """What a run is to hold, counted before it: gradients and optimizer state as they follow from the parameters.

    Args:
        trainer: A safe trainer.

    Returns:
        The groups. What an engine or an optimizer of its own kind decides is left open.
    """
    engine = bool(getattr(trainer, "is_deepspeed_enabled", False))
    copies = engine_copies(trainer.args)
    made_so = any(hasattr(parameter, "ds_id") for parameter in trainer.model.parameters())
    given = getattr(trainer, "optimizer", None) is not None
    name = str(getattr(trainer.args.optim, "value", trainer.args.optim))
    torchs = name.startswith("adamw_torch") and "bit" not in name and "fp8" not in name
    return tuple(
        replace(
            group,
            gradient=None if engine else group.held,
            optimizer=group.held if torchs and not (engine or given) else None,
        )
        if group.trainable
        else group
        for group in (_cast_by(copies, made_so, group) for group in count(trainer))
    )


def _cast_by(copies: str | None, made_so: bool, group: Group) -> Group:
    """A group as DeepSpeed will hold it: without autocast, so that it computes in what it holds.

    Args:
        copies: The half dtype that the engine casts every weight to.
        made_so: Whether ZeRO-3 made the model in that dtype; nothing is cast later then, adapters are not.
        group: The group as counted; packed weights and buffers stay as they are.
    """
    if copies is None or group.trainable is None or group.held not in SHORT:
        return group
    held = group.held if made_so else copies
    return replace(group, held=held, compute=held)


def confirm(groups: tuple[Group, ...], seen: Seen) -> tuple[Group, ...]:
    """Puts what layers were seen to compute in into the groups.

    Args:
        groups: What was counted after a step.
        seen: What was seen.
    """
    return tuple(
        replace(group, compute=listed(seen[group.part, group.held])) if (group.part, group.held) in seen else group
        for group in groups
    )


def contradictions(planned: tuple[Group, ...], found: tuple[Group, ...]) -> list[Problem]:
    """What was planned and is not so.

    Args:
        planned: The groups as planned.
        found: The groups as found after a step.

    Returns:
        One warning for each part and each of its properties. What was not planned, or could not be seen, contradicts
        nothing.
    """
    problems = []
    for part in dict.fromkeys(group.part for group in (*planned, *found)):
        before = [group for group in planned if group.part == part]
        after = [group for group in found if group.part == part]
        for what, key in (
            ("parameters", "held"), ("trainable", "trainable"), ("compute dtype", "compute"),
            ("gradients", "gradient"), ("optimizer state", "optimizer"),
        ):  # fmt: skip
            wanted, held = _values(before, key), _values(after, key)
            seen_alone = key in ("gradient", "optimizer", "compute")
            if wanted == held or (seen_alone and (not wanted or held <= wanted)):
                continue
            given = f"{what} of the {part}: planned {listed(wanted) or 'none'}, found {listed(held) or 'none'}"
            problems.append(warn("plan-not-kept", given))
    return problems


def make_report(trainer: Any, groups: tuple[Group, ...], planned: tuple[Group, ...] | None = None) -> Report:
    """Makes the report of a run.

    Args:
        trainer: A safe trainer.
        groups: What its models hold.
        planned: What was planned, where `groups` were found after a step; `None` for the planned report.

    Returns:
        The report.
    """
    policy, census = trainer.precision_policy, trainer.precision_census
    contract, base = trainer.safety_contract, unwrap(trainer.model)
    own = [group for group in groups if not group.part.startswith(BUFFERS)]
    optimizer = getattr(trainer, "optimizer", None)
    optimizer = getattr(optimizer, "optimizer", optimizer)
    facts: dict[str, Cell] = {
        "phase": CONFIRMED if planned is not None else PLANNED,
        "model": type(base).__name__,
        "device": str(trainer.precision_device(trainer.args)),
        "engine": trainer.precision_engine.summary,
        "compute": policy.compute.value,
        "autocast": policy.autocast.value,
        "loss scale": policy.loss_scale.value,
        "quantisation": census.quantization,
        "attention": census.attn_implementation,
        "sampler": trainer.sampler_dtype if getattr(trainer.args, "use_vllm", False) else None,
        "optimizer": type(optimizer).__name__ if optimizer is not None else str(trainer.args.optim),
        "trained elements": sum(group.elements for group in own if group.trainable),
        "weight bytes": sum(group.bytes for group in own),
        "optimizer bytes": _total(group.optimizer_bytes for group in own),
    }
    return Report(
        TITLE,
        type(trainer).__name__,
        {name: value for name, value in facts.items() if value is not None},
        (
            Table(GROUPS, COLUMNS, tuple(_row(group) for group in groups)),
            Table(CHANGES, ("what", "change", "why"), tuple(_changes(trainer))),
            Table(POLICY, ("decision", "value", "why"), tuple(_policy(policy, trainer.precision_engine, own))),
            Table(
                COVERAGE,
                ("area", "state", "detail", "fired"),
                tuple(
                    (c.area, c.state, c.detail, contract.fired[c.hook] if c.hook and c.state == COVERED else None)
                    for c in contract.coverage
                ),
            ),
        ),
        tuple(_verdicts(trainer, groups, planned)),
    )


def _policy(policy: PrecisionPolicy, engine: Engine, groups: list[Group]) -> Iterator[tuple[Cell, ...]]:
    """The decisions of the policy, the one about trainables as it was carried out for each of them."""
    trained = listed({group.held for group in groups if group.trainable})
    for name, choice in policy.choices():
        changed = name == "master" and trained not in (None, choice.value)
        yield (name, trained, "what is trained, as brought to it") if changed else (name, choice.value, choice.reason)
    for name, choice in engine.choices():
        yield name, choice.value, choice.reason


def _row(group: Group) -> tuple[Cell, ...]:
    return (
        group.part, group.held, group.trainable, group.compute, group.gradient, group.optimizer, group.elements,
        group.bytes, group.optimizer_bytes,
    )  # fmt: skip


def _values(groups: list[Group], key: str) -> set[str]:
    """The values of one property over the groups of a part; `None` says nothing."""
    values = {getattr(group, key) for group in groups} - {None}
    if key == "trainable":
        return {"trained" if value else "frozen" for value in values}
    return {part for value in values for part in value.split(" and ")}


def _total(values: Any) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _compute_of(trainer: Any, beside: list[tuple[str, nn.Module]]) -> Any:
    """Says what operations on a parameter compute in, as far as the policy decides it."""
    autocast = trainer.precision_policy.autocast.value
    wide: set[int] = set()
    if trainer.precision_preparation.fp32_modules:
        for model in (trainer.model, *(model for _, model in beside)):
            named = dict(unwrap(model).named_modules())
            for name in trainer.precision_preparation.fp32_modules:
                wide |= {id(p) for p in named[name].parameters()} if name in named else set()
    float32_head = bool(getattr(trainer.args, "cast_lm_head_to_fp32", False))

    def compute(part: str, parameter: nn.Parameter, held: str) -> str | None:
        if id(parameter) in wide or (float32_head and part == HEAD):
            return FLOAT32
        if autocast != OFF:
            return str(autocast)
        return held if parameter.is_floating_point() and parameter.element_size() > 1 else None

    return compute


def _beside(trainer: Any) -> list[tuple[str, nn.Module]]:
    """The transformers models of a trainer beside the policy, by what they are called."""
    policy, first_of_policy = unwrap(trainer.model), next(trainer.model.parameters(), None)
    rewards = [model for model in getattr(trainer, "reward_funcs", None) or () if isinstance(model, nn.Module)]
    named = [(name.replace("_", " ").strip(), value) for name, value in vars(trainer).items()]
    named += [(f"reward model {number}", model) for number, model in enumerate(rewards, 1)]
    found: dict[int, tuple[str, nn.Module]] = {}
    for name, value in named:
        if not isinstance(value, nn.Module) or not hasattr(unwrap(value), "get_input_embeddings"):
            continue
        first = next(value.parameters(), None)
        # Engines wrap the policy again.
        if first is not None and first is not first_of_policy and unwrap(value) is not policy:
            found.setdefault(id(first), ("reference model" if name == "ref model" else name, value))
    return list(found.values())


def _changes(trainer: Any) -> Iterator[tuple[Cell, ...]]:
    """What is otherwise than in stock TRL, and why."""
    preparation = trainer.precision_preparation
    packed = preparation.quantized is not None
    trained = {name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad}
    for (source, target, reason), members in grouped(preparation.decisions).items():
        for casts in (True, False):  # TRL casts what is trained of a quantised model
            names = [d.name for d in members if (packed and d.name in trained) == casts]
            stock = BFLOAT16 if casts else source
            if names and target != stock:
                yield _tensors(names), f"{target}; stock: {stock}", reason
    kinds: dict[tuple[str, str, str, str], list[str]] = {}
    for change in preparation.quantized.changes if packed else ():
        kinds.setdefault((change.kind, change.source, change.target, change.reason), []).append(change.name)
    for (kind, source, target, reason), places in kinds.items():
        yield _tensors(places, "places"), f"{kind.replace('_', ' ')}: {source} -> {target}", reason
    if preparation.layout is not None:
        if preparation.layout.guarded:
            why = "weights of several dtypes meet"
            yield f"{preparation.layout.guarded} modules", "what enters follows their weights", why
        for (_, _, reason), members in grouped(preparation.layout.casts).items():
            yield _tensors([d.name for d in members]), _to(members), reason
    for name in preparation.fp32_modules:
        yield name, "computes in float32", "fp32_modules"
    for boundary in trainer.precision_settlement.boundaries:
        where = "what enters follows the weights" if boundary.side == "input" else "what towers give is cast"
        yield f"{boundary.side} of {boundary.module}", where, boundary.reason
    if trainer.safety_contract["rollout"].state == COVERED and trainer.precision_policy.autocast.value != OFF:
        yield "rollout", f"computes in {trainer.precision_policy.compute.value}", "as training and scoring do"
    for decision in trainer.media_decisions:
        if decision.dtype is not None:
            yield decision.key, f"cast to {decision.dtype}", decision.reason


def _to(members: list[Any]) -> str:
    return f"{members[0].source} -> {members[0].target}"


def _tensors(names: list[str], what: str = "tensors") -> str:
    first = names[0].removeprefix("base_model.model.")
    return first if len(names) == 1 else f"{len(names)} {what}, such as {first}"


def _verdicts(trainer: Any, groups: tuple[Group, ...], planned: tuple[Group, ...] | None) -> Iterator[Verdict]:
    found = [] if planned is None else contradictions(planned, groups)
    known = (
        *trainer.precision_policy.warnings, *trainer.precision_preparation.warnings, *trainer._rollout_warnings,
    )  # fmt: skip
    for problem in (*found, *known):
        why = problem.why if problem in known else ""
        yield Verdict("warning", f"{problem.given}{': ' if why else ''}{why}", problem.fix, problem.id)
    for coverage in trainer.safety_contract.coverage:
        if coverage.state == UNCOVERED:
            yield Verdict("note", f"{coverage.area} is not covered: {coverage.detail}")
        elif planned is not None and coverage.area == "adapters" and not trainer.safety_contract.fired[coverage.hook]:
            yield Verdict("warning", f"{coverage.area}: {HOOKS[str(coverage.hook)]} never came")
    if planned is None:
        yield Verdict("note", "planned; confirmed after the first optimizer step that is taken")
        return
    trained = [group for group in groups if group.trainable]
    for group in trained:
        if group.gradient is None and not trainer.is_deepspeed_enabled:
            yield Verdict("note", f"{group.part} ({group.held}) is trained, and had no gradient in the first step")
    if not found:
        yield Verdict("ok", "parameters, compute dtypes, gradients and optimizer state are as planned")


def gradient_dtypes(model: nn.Module) -> dict[int, str]:
    """Dtypes of the gradients that are there, by the `id` of their parameter.

    Args:
        model: The model, right before the optimizer steps.
    """
    return {id(p): from_torch(p.grad.dtype) for p in model.parameters() if p.grad is not None}
