"""The precision report of a run: the dtypes of each part of the model, and the differences from stock TRL.

The report has two phases. The planned report describes the model at the end of construction; dtypes of gradients and
optimizer state are derived. The confirmed report describes the model after the first optimizer step that is not
skipped, when gradients and optimizer state exist and engines have changed the weights. Each difference between them is
a warning.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..core.coverage import COVERED, UNCOVERED
from ..core.dtypes import BFLOAT16, FLOAT32, KBIT, SHORT, from_torch, join_dtypes
from ..core.errors import Fix, Problem, warn
from ..core.feature import Run
from ..experts.routes import ExpertRoutes
from ..media.frozen_towers import FrozenTowers
from ..media.inputs import MediaInputs
from ..media.shared_features import SharedFeatures
from ..model.inventory import BUFFERS, HEAD, CountContext, Group, count_groups
from ..model.parts import unwrap
from ..policy.distributed import Engine, engine_copies
from ..policy.resolve import PrecisionPolicy
from ..policy.settings import ALWAYS
from ..rollout.alignment import RolloutAlignment
from ..rollout.kept_casts import KeptCasts, float32_matrices, frozen
from ..rollout.scoring_inputs import ScoringInputs
from ..weights.cast import grouped
from ..weights.quantized_layers import AS_LOADED, IN_FLOAT32, layer_of
from .contract_watch import broken_guarantees
from .document import Cell, Report, Table


TITLE = "precision report"
FILE = "precision_report.json"
"""The file in `output_dir` with the whole report."""
PLANNED, CONFIRMED = "planned", "confirmed"

GROUPS, CHANGES, POLICY, COVERAGE = "module groups", "changed from stock", "policy", "coverage"
ROUTERS = "routers"
"""Titles of the tables."""
COLUMNS = (
    "part", "parameters", "trainable", "compute", "gradient", "optimizer state", "elements", "bytes",
    "optimizer bytes",
)  # fmt: skip
"""Columns of the table of module groups."""

_SUMMARY = {
    "part": "part", "parameters": "parameters", "compute": "compute", "gradient": "gradient",
    "optimizer state": "optimizer", "bytes": "bytes",
}  # fmt: skip
"""Columns of the table of module groups in a summary, and their names there."""
_CASTS = {
    "input": "cast to the dtype of the weights",
    "output": "outputs of towers are cast",
    "operations": "arguments are cast to one dtype",
}
"""What a boundary does, by its side."""

Seen = Mapping[tuple[str, str], frozenset[str]]
"""Output dtypes of the first layers, by part and by the dtype of their weights."""


def count(run: Run, gradients: Mapping[int, str] | None = None, states: Any = None) -> tuple[Group, ...]:
    """Groups the parameters of all models of a run: the policy, and reference, teacher and reward models.

    Args:
        run: The run.
        gradients: Dtypes of the gradients, by the `id` of their parameter.
        states: The result of `optimizer_states`.

    Returns:
        The groups, those of the policy first.
    """
    beside = _beside(run.trainer)
    circumstances = CountContext(_compute_of(run, beside), gradients or {}, states or {})
    groups = count_groups(run.model, circumstances)
    return (*groups, *(g for name, model in beside for g in count_groups(model, circumstances, name)))


def plan(run: Run) -> tuple[Group, ...]:
    """Groups the parameters before a run, and derives the dtypes of gradients and optimizer state.

    Args:
        run: The run.

    Returns:
        The groups. Dtypes that DeepSpeed or an optimizer other than torch's AdamW chooses are left empty.
    """
    engine = bool(getattr(run.trainer, "is_deepspeed_enabled", False))
    copies = engine_copies(run.args)
    made_so = any(hasattr(parameter, "ds_id") for parameter in run.model.parameters())
    given = getattr(run.trainer, "optimizer", None) is not None
    name = str(getattr(run.args.optim, "value", run.args.optim))
    torchs = name.startswith("adamw_torch") and "bit" not in name and "fp8" not in name
    return tuple(
        replace(
            group,
            gradient=frozenset() if engine else frozenset({group.held}),
            optimizer=frozenset({group.held}) if torchs and not (engine or given) else frozenset(),
        )
        if group.trainable
        else group
        for group in (_cast_by(copies, made_so, group) for group in count(run))
    )


def _cast_by(copies: str | None, made_so: bool, group: Group) -> Group:
    """Returns a group with the dtype that DeepSpeed casts it to, which is also its compute dtype.

    Args:
        copies: The half dtype that DeepSpeed casts all weights to; `None` without DeepSpeed.
        made_so: Whether ZeRO-3 created the model in that dtype; adapters are not cast then.
        group: The group; packed weights and buffers are not cast.
    """
    if copies is None or group.trainable is None or group.held not in SHORT:
        return group
    held = group.held if made_so else copies
    return replace(group, held=held, compute=frozenset({held}))


def confirm(groups: tuple[Group, ...], seen: Seen) -> tuple[Group, ...]:
    """Sets the compute dtypes of groups to the recorded ones.

    Args:
        groups: The groups after a step.
        seen: The recorded output dtypes.
    """
    return tuple(
        replace(group, compute=seen[group.part, group.held]) if (group.part, group.held) in seen else group
        for group in groups
    )


def contradictions(planned: tuple[Group, ...], found: tuple[Group, ...]) -> list[Problem]:
    """Compares the groups after a step with the planned ones.

    Args:
        planned: The planned groups.
        found: The groups after a step.

    Returns:
        A warning for each property of a part that differs. Dtypes that were not planned or not recorded do not differ.
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
            given = f"{what} of the {part}: planned {join_dtypes(wanted, 'none')}, found {join_dtypes(held, 'none')}"
            problems.append(warn("plan-not-kept", given))
    return problems


def make_report(run: Run, groups: tuple[Group, ...], planned: tuple[Group, ...] | None = None) -> Report:
    """Creates the report of a run.

    Args:
        run: The run.
        groups: The groups of its models.
        planned: The planned groups, if `groups` were counted after a step; `None` for the planned report.

    Returns:
        The report.
    """
    policy, inventory, trainer = run.policy, run.inventory, run.trainer
    contract, base = run.coverage, unwrap(run.model)
    own = [group for group in groups if not group.part.startswith(BUFFERS)]
    optimizer = getattr(trainer, "optimizer", None)
    optimizer = getattr(optimizer, "optimizer", optimizer)
    facts: dict[str, Cell] = {
        "media trial": None if run.media_trial is None else str(run.media_trial),
        "phase": CONFIRMED if planned is not None else PLANNED,
        "model": type(base).__name__,
        "device": str(type(trainer).precision_device(run.args)),
        "engine": run.engine.summary,
        "compute": policy.compute.text,
        "autocast": policy.autocast.text,
        "loss scale": policy.loss_scale.text,
        "quantisation": inventory.quantization,
        "attention": inventory.attn_implementation,
        "sampler": run.feature(RolloutAlignment).sampler_dtype if getattr(run.args, "use_vllm", False) else None,
        "optimizer": type(optimizer).__name__
        if optimizer is not None
        else str(getattr(run.args.optim, "value", run.args.optim)),
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
            Table(CHANGES, ("what", "change", "why"), tuple(_changes(run))),
            Table(POLICY, ("decision", "value", "why"), tuple(_policy(policy, run.engine, own))),
            Table(
                COVERAGE,
                ("area", "state", "detail", "fired"),
                tuple(
                    (c.area, c.state, c.detail, contract.fired[c.hook] if c.hook and c.state == COVERED else None)
                    for c in contract.coverage
                ),
            ),
            *_routers(run),
        ),
        tuple(_verdicts(run, groups, planned)),
    )


def _routers(run: Run) -> Iterator[Table]:
    """Yields the table of the routers of a mixture of experts, with what the first compared pass has shown."""
    routes = next((feature for feature in run.features if isinstance(feature, ExpertRoutes)), None)
    if routes is None or not routes.routers.found:
        return
    rows: list[tuple[Cell, ...]] = []
    for number, router in enumerate(routes.routers.found):
        near, tokens = routes.ties.get(number, (0, 0))
        differed = f"{routes.differed[number]:.2%}" if routes.differed else None
        ties = f"{near / tokens:.2%}" if tokens else None
        rows.append((router.name, router.compute, f"{router.chosen} of {router.experts}", ties, differed))
    yield Table(ROUTERS, ("router", "compute", "experts", "near ties", "not as in the rollout"), tuple(rows))


def summarize(report: Report) -> Report:
    """Returns the part of a report that fits a screen: parts with their dtypes and sizes, and changes without reasons.

    Args:
        report: The report of a run.
    """
    groups, changes = report.table(GROUPS), report.table(CHANGES)
    part, *others = (groups.columns.index(column) for column in _SUMMARY)
    # The name of the module is left out of `vision tower (model.vision_tower)`.
    rows = [(str(row[part]).partition(" (")[0], *(row[index] for index in others)) for row in groups.rows]
    tables = [Table(GROUPS, tuple(_SUMMARY.values()), tuple(rows))]
    tables.append(Table(CHANGES, changes.columns[:2], tuple(row[:2] for row in changes.rows)))
    facts = {name: value for name, value in report.facts.items() if name != "media trial"}
    return replace(report, facts=facts, tables=tuple(tables))


def _policy(policy: PrecisionPolicy, engine: Engine, groups: list[Group]) -> Iterator[tuple[Cell, ...]]:
    """Yields the decisions of the policy; for master weights, the dtypes of the trained parameters."""
    trained = join_dtypes({group.held for group in groups if group.trainable})
    for name, choice in policy.choices():
        changed = name == "master" and trained not in ("", choice.text)
        yield (name, trained, "dtypes of the trained parameters") if changed else (name, choice.text, choice.reason)
    for name, choice in engine.choices():
        yield name, choice.text, choice.reason


def _row(group: Group) -> tuple[Cell, ...]:
    return (
        group.part, group.held, group.trainable, *(join_dtypes(d) or None for d in (group.compute, group.gradient,
        group.optimizer)), group.elements, group.bytes, group.optimizer_bytes,
    )  # fmt: skip


def _values(groups: list[Group], key: str) -> set[str]:
    """Returns the values of a property in the groups of a part, without `None`."""
    if key == "trainable":
        return {"trained" if group.trainable else "frozen" for group in groups if group.trainable is not None}
    if key == "held":
        return {group.held for group in groups}
    return {dtype for group in groups for dtype in getattr(group, key)}


def _total(values: Any) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _compute_of(run: Run, beside: list[tuple[str, nn.Module]]) -> Any:
    """Returns a function that gives the compute dtype of a parameter; `None` if the policy does not determine it."""
    autocast = run.policy.autocast.value
    wide: set[int] = set()
    if run.weights.fp32_modules:
        for model in (run.model, *(model for _, model in beside)):
            named = dict(unwrap(model).named_modules())
            for name in run.weights.fp32_modules:
                wide |= {id(p) for p in named[name].parameters()} if name in named else set()
    for group in run.weights.layers:
        if group.treatment == IN_FLOAT32:
            wide |= {id(p) for name in group.names for p in layer_of(run.model, name).parameters()}
    float32_head = bool(getattr(run.args, "cast_lm_head_to_fp32", False))

    def compute(part: str, parameter: nn.Parameter, held: str) -> str | None:
        if id(parameter) in wide or (float32_head and part == HEAD):
            return FLOAT32
        if autocast is not None and parameter.dtype != torch.float64:  # which autocast does not cast
            return autocast
        return held if parameter.is_floating_point() and parameter.element_size() > 1 else None

    return compute


def _beside(trainer: Any) -> list[tuple[str, nn.Module]]:
    """Returns the names and the other transformers models of a trainer, such as the reference model."""
    policy, first_of_policy = unwrap(trainer.model), next(trainer.model.parameters(), None)
    rewards = getattr(trainer, "reward_funcs", None)
    rewards = rewards if isinstance(rewards, (list, tuple)) else [rewards]  # some trainers keep a single one
    models = [model for model in rewards if isinstance(model, nn.Module)]
    named = [(f"reward model {number}", model) for number, model in enumerate(models, 1)]
    named += [(name.replace("_", " ").strip(), value) for name, value in vars(trainer).items()]
    found: dict[int, tuple[str, nn.Module]] = {}
    for name, value in named:
        if not isinstance(value, nn.Module) or not hasattr(unwrap(value), "get_input_embeddings"):
            continue
        first = next(value.parameters(), None)
        # Engines wrap the policy, so that the same model can have several attributes.
        if first is not None and first is not first_of_policy and unwrap(value) is not policy:
            found.setdefault(id(first), ("reference model" if name == "ref model" else name, value))
    return list(found.values())


def _changes(run: Run) -> Iterator[tuple[Cell, ...]]:
    """Yields the differences from stock TRL: place, change and reason."""
    preparation = run.weights
    packed = run.inventory.quantization in KBIT
    trained = {name for name, parameter in run.model.named_parameters() if parameter.requires_grad}
    for (source, target, reason), members in grouped(preparation.decisions).items():
        for casts in (True, False):  # TRL casts the trainable parameters of a quantised model to bfloat16
            names = [d.name for d in members if (packed and d.name in trained) == casts]
            stock = BFLOAT16 if casts else source
            if names and target != stock:
                yield _tensors(names), f"{target}; stock: {stock}", reason
    kinds: dict[tuple[str, str, str, str], list[str]] = {}
    for change in preparation.quantized.changes if preparation.quantized is not None else ():
        kinds.setdefault((change.kind, change.source, change.target, change.reason), []).append(change.name)
    for (kind, source, target, reason), places in kinds.items():
        yield _tensors(places, "places"), f"{kind.replace('_', ' ')}: {source} -> {target}", reason
    for group in preparation.layers:
        if group.treatment is not None and group.treatment != AS_LOADED:
            yield _tensors([*group.names], "layers"), group.treatment, f"as loaded, {group.kind} fails in this run"
    if preparation.layout is not None:
        if preparation.layout.guarded:
            why = "weights of several dtypes meet"
            yield f"{preparation.layout.guarded} modules", "inputs are cast to the dtype of the weights", why
        for (_, _, reason), members in grouped(preparation.layout.casts).items():
            yield _tensors([d.name for d in members]), _to(members), reason
    for name in preparation.fp32_modules:
        yield name, "computes in float32", "fp32_modules"
    if preparation.renewed:
        why = "new DoRA adapters compute what the base model computes"
        yield _tensors([*preparation.renewed]), "set to the norms of the forward pass", why
    for boundary in run.boundaries.boundaries:
        yield f"{boundary.side} of {boundary.module or 'the model'}", _CASTS[boundary.side], boundary.reason
    if run.coverage["rollout"].state == COVERED and run.policy.autocast.value is not None:
        yield "rollout", f"computes in {run.policy.compute.text}", "the compute dtype of training and scoring"
    for decision in run.feature(MediaInputs).decisions:
        if decision.dtype is not None:
            yield decision.key, f"cast to {decision.dtype}", decision.reason
    kept = run.feature(KeptCasts)
    if kept.nbytes:
        text = f"autocast keeps {_megabytes(kept.nbytes)} of casts of frozen weights"
        yield "rollout", text, "stock casts these weights for every token"
    if kept.dequantised:
        text = f"keeps {_megabytes(kept.dequantised)} of dequantised 4-bit weights"
        yield "rollout", text, "stock dequantises these weights for every token"
    if run.settings.compile_decode:
        yield "rollout", "has a static cache and a compiled pass from the second one on", "compile_decode"
    if run.feature(RolloutAlignment).scale is not None:
        yield "rollout", "scales logits as scoring does", "the forward pass leaves out the scale of the text model"
    scoring = run.feature(ScoringInputs)
    if scoring.positions:
        yield "scoring", "gets position_ids without the padding", "the model has absolute positions"
    if scoring.answers:
        yield "scoring", "answers get the token type 1", "tokens of type 0 attend to later ones"
    if run.feature(FrozenTowers).passes:
        yield "towers", "run without a graph for gradients", "none of their weights is trained; bit-identical features"
    if run.feature(SharedFeatures).shares:
        same = run.settings.share_media_features != ALWAYS
        yield "towers", "run once for equal images of a batch", "bit-identical features" if same else "asked for"


def _megabytes(nbytes: int) -> str:
    """Formats a number of bytes."""
    return f"{nbytes / 2**20:,.1f} MB"


def _frozen_in_float32(run: Run) -> Iterator[Problem]:
    """Notes the memory of frozen float32 matrices of which autocast computes with rounded copies."""
    autocast = run.policy.autocast.value
    nbytes = (
        0 if autocast is None else sum(4 * weight.numel() for weight in frozen(float32_matrices(unwrap(run.model))))
    )
    if nbytes:
        text = f"{_megabytes(nbytes)} of frozen float32 matrices compute in {autocast}; stored in it, they take half"
        by_name = Fix(settings=(("model_init_kwargs", {"dtype": autocast}),))
        live = Fix(f"`dtype=torch.{autocast}` in `from_pretrained`")
        yield Problem(text, fix=live if run.model_is_live else by_name, level="note")


def _to(members: list[Any]) -> str:
    return f"{members[0].source} -> {members[0].target}"


def _tensors(names: list[str], what: str = "tensors") -> str:
    first = names[0].removeprefix("base_model.model.")
    return first if len(names) == 1 else f"{len(names)} {what}, such as {first}"


def _verdicts(run: Run, groups: tuple[Group, ...], planned: tuple[Group, ...] | None) -> Iterator[Problem]:
    found = [] if planned is None else contradictions(planned, groups)
    yield from (replace(problem, why="") for problem in found)
    yield from (*run.policy.warnings, *run.weights.warnings, *run.feature(RolloutAlignment).warnings)
    for coverage in run.coverage.coverage:
        if coverage.state == UNCOVERED:
            yield Problem(f"{coverage.area} is not covered: {coverage.detail}", level="note")
    if planned is not None:
        yield from (replace(problem, why="") for problem in broken_guarantees(run.coverage))
    yield from (replace(problem, why="") for problem in run.findings)
    yield from _frozen_in_float32(run)
    if planned is None:
        yield Problem("planned; the first optimizer step that is not skipped confirms it", level="note")
        return
    trained = [group for group in groups if group.trainable]
    for group in trained:
        if not group.gradient and not run.trainer.is_deepspeed_enabled:
            text = f"{group.part} ({group.held}) is trainable, but had no gradient in the first step"
            yield Problem(text, level="note")
    if not found:
        yield Problem("parameters, compute dtypes, gradients and optimizer state are as planned", level="ok")


def gradient_dtypes(model: nn.Module) -> dict[int, str]:
    """Returns the dtypes of all gradients, by the `id` of their parameter.

    Args:
        model: The model, directly before an optimizer step.
    """
    return {id(p): from_torch(p.grad.dtype) for p in model.parameters() if p.grad is not None}
