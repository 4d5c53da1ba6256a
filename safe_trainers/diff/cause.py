"""Why two computations part: what differs at the first module whose output differs although its inputs do not.

Each possible cause is looked for in what was recorded, in a fixed order, and the first one that is found is named.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from . import storage
from .aligned import PARAMETERS, Pair, Side
from .digest import rounded_to, thinned, ulp_distance
from .names import parent_of, without_adapters
from .recorder import ARGUMENTS_NAME, LOSS_NAME, OPTIMIZER_NAME
from .storage import Event, Step


CAUSES = INPUTS, SHAPE, WEIGHTS, DTYPE, SETTING, RANDOM_STATE, STATE, KERNEL, UNRECORDED = (
    "inputs", "batch shape", "weights", "dtype", "setting", "random state", "optimizer state", "kernel",
    "not recorded",
)  # fmt: skip
"""The causes. `batch shape`: the same tokens in batches of another size, length or padding. `setting`: an attribute or
argument, such as `eps`. `kernel`: inputs, weights, dtypes and settings are equal, and the result is not. `not
recorded`: the same, but values inside the module are not recorded, of which one may differ first."""

_KERNEL_SETTINGS = ("_attn_implementation", "_experts_implementation")
_ENVIRONMENT = "environment"
Differs = Callable[[Pair], bool]
"""Whether a pair differs beyond noise."""


@dataclass(frozen=True)
class Cause:
    """The cause of a difference.

    Attributes:
        module: Canonical name of the module that is responsible; empty for the model, in parentheses for what is not
            a module: `(loss)`, `(optimizer)`.
        kind: One of `CAUSES`.
        text: What differs, in words.
    """

    module: str
    kind: str
    text: str


def explain(pair: Pair, aligned: list[Pair], first: Side, second: Side, differs: Differs) -> Cause:
    """Explains the first difference of two recordings.

    Args:
        pair: The first pair that differs.
        aligned: All pairs of the step.
        first: The first recording of the step.
        second: The second recording of the step.
        differs: Whether a pair differs beyond noise.
    """
    return _Explanation(aligned, first, second, differs).of(pair)


def explain_rollout(pair: Pair, side: Side) -> Cause:
    """Explains the first difference of a rollout and the training of the same tokens by the same weights.

    Args:
        pair: The first pair that differs.
        side: The recording of the step.
    """
    one, other = pair.first, pair.second
    if one.kind == storage.TOKEN_PRE:
        return Cause(one.name, INPUTS, f"`{one.slot}` of the same token differs")
    if one.training != other.training:
        return Cause(one.name, SETTING, f"training is {one.training} in the rollout and {other.training} in training")
    found = _dtypes(one, other)
    if found:
        return Cause(one.name, DTYPE, found)
    if one.training and "Dropout" in side.recording.model["kinds"].get(one.name, ""):
        return Cause(one.name, RANDOM_STATE, "dropout is active in the rollout, and draws other random numbers")
    missing = _dropped(side.step, one.phase) + _dropped(side.step, other.phase)
    if missing:
        return Cause(one.name, UNRECORDED, f"{missing} values of the step are not recorded")
    return Cause(one.name, KERNEL, "dtype and mode are equal; decoding uses other kernels, shapes or cached values")


class _Explanation:
    def __init__(self, aligned: list[Pair], first: Side, second: Side, differs: Differs) -> None:
        self._aligned, self._first, self._second, self._differs = aligned, first, second, differs
        self._at: dict[tuple[str, str, str, int], list[Pair]] = {}
        for pair in aligned:
            event = pair.first
            self._at.setdefault((event.phase, event.kind, event.name, event.call), []).append(pair)
        self._called = {(event.phase, event.name) for event in first.step.events if event.kind == storage.POST}

    def of(self, pair: Pair) -> Cause:
        """Explains a difference by the kind of its value."""
        event = pair.first
        earlier = self._earlier(pair)
        if earlier is not None:
            return earlier
        if event.kind == storage.PRE:
            return self._of_input(pair)
        if event.kind in (storage.TOKEN, storage.TOKEN_PRE):
            return self._of_module(pair) if event.kind == storage.TOKEN else self._of_batch(pair)
        if event.kind == storage.GRADIENT:
            return self._of_gradient(pair)
        if event.kind in (storage.STATE, storage.UPDATED):
            return self._of_optimizer(pair)
        if event.kind in PARAMETERS:
            return self._own_weights(event.name) or Cause(event.name, WEIGHTS, f"`{event.slot}` differs")
        if event.name == LOSS_NAME or (event.name == "" and event.slot.endswith("loss")):
            outputs = self._at[event.phase, event.kind, event.name, event.call]
            if not any(self._differs(other) for other in outputs if other is not pair):
                return self._of_loss(event)
        return self._of_module(pair)

    def _earlier(self, pair: Pair) -> Cause | None:
        """What follows from a difference in an earlier phase, if only a later phase is compared."""
        event = pair.first
        name = OPTIMIZER_NAME if event.kind == storage.UPDATED else event.name
        if event.kind not in (storage.GRADIENT, storage.UPDATED) and event.name != LOSS_NAME:
            return None  # the others have inputs in their own phase
        for other in self._aligned:
            if other is pair or other.first.phase == event.phase:
                return None
            if other.first.kind not in PARAMETERS and self._differs(other):
                phase, slot = other.first.phase, other.first.slot
                text = f"`{slot}` of {_shown(other.first.name)} differs before, in the phase {phase}"
                return Cause(name, INPUTS, f"{text}: compare all phases")
        return None

    # ---- Inputs ----

    def _of_batch(self, pair: Pair) -> Cause:
        """An input of the model or of the loss."""
        one, other = pair.first.value, pair.second.value
        slot, name = pair.first.slot, pair.first.name
        if one is None or other is None:
            return Cause(name, INPUTS, f"input `{slot}` differs")
        rows = [_sequences(side) for side in (self._first, self._second)]
        if rows[0] and rows[0] == rows[1] and (one.shape != other.shape or slot in ("input_ids", "attention_mask")):
            if one.shape != other.shape:
                text = f"the same tokens in batches of the shapes {list(one.shape)} and {list(other.shape)}"
            else:
                text = "the same tokens with the padding, or the order of the sequences, elsewhere"
            return Cause(name, SHAPE, text)
        if one.dtype != other.dtype and one.floating and other.floating:
            return Cause(name, DTYPE, f"input `{slot}` is {one.dtype} and {other.dtype}")
        if one.shape != other.shape and not (rows[0] and rows[0] != rows[1]) and one.floating:
            return Cause(name, SHAPE, f"input `{slot}` has the shapes {list(one.shape)} and {list(other.shape)}")
        return Cause(name, INPUTS, f"input `{slot}` differs{self._changed_arguments()}")

    def _changed_arguments(self) -> str:
        """The training arguments that differ, as the end of a sentence."""
        changed = _changed(*(self._of_side(side, ARGUMENTS_NAME) for side in (self._first, self._second)))
        return "".join(f"; `{key}` is {one} and {two}" for key, one, two in changed[:4])

    def _of_input(self, pair: Pair) -> Cause:
        """An input that the code between two modules computed: the code of the module around them."""
        event, name = pair.first, pair.first.name
        around = self._around(event.phase, name)
        if not name or name == LOSS_NAME or (not around and (event.phase, "") not in self._called):
            return self._of_batch(pair)
        one, other = pair.first.value, pair.second.value
        found = self._own_weights(around) or self._settings(around, event) or self._random(around, event)
        if found is not None:
            return found
        if (one is not None and other is not None and not one.floating) or _is_side(event.slot):
            return Cause(name, INPUTS, f"input `{event.slot}` differs, which {_shown(around)} computes")
        text = _dtypes(pair.first, pair.second)
        if text:
            return Cause(around, DTYPE, f"it computes input `{event.slot}` of {name}: {text}")
        return self._kernel(around, event, f"it computes input `{event.slot}` of {name}")

    def _around(self, phase: str, name: str) -> str:
        """The innermost module around a module that is called itself; lists of layers are not."""
        parent = parent_of(name)
        while parent and (phase, parent) not in self._called:
            parent = parent_of(parent)
        return parent

    # ---- A module's output ----

    def _of_module(self, pair: Pair) -> Cause:
        event, name = pair.first, pair.first.name
        return (
            self._missing_inputs(event)
            or self._own_weights(name)
            or self._settings(name, event, pair.second)
            or self._own_buffers(name)
            or self._rounding(pair)
            or self._random(name, event)
            or self._arguments(name, event)
            or self._kernel(name, event)
        )

    def _missing_inputs(self, event: Event) -> Cause | None:
        mine, theirs = (
            {e.slot for e in side.events(event.phase, storage.PRE, event.name, event.call)}
            for side in (self._first, self._second)
        )
        if mine and theirs and mine != theirs and not event.name:
            only = sorted(mine ^ theirs)[0]
            return Cause(event.name, INPUTS, f"only the {'first' if only in mine else 'second'} has an input `{only}`")
        return None

    def _own_weights(self, name: str) -> Cause | None:
        """A parameter of the module itself."""
        for pair in self._at.get((storage.START, storage.WEIGHT, name, 0), []):
            one, other = pair.first.value, pair.second.value
            if one is None or other is None or one.shape != other.shape or one.hash == other.hash:
                continue
            if one.dtype != other.dtype:
                return Cause(name, DTYPE, f"`{pair.first.slot}` is {one.dtype} and {other.dtype}")
            if self._differs(pair):
                half = rounded_to(other), rounded_to(one)
                rounding = "" if half[0] == half[1] else f"; one is rounded to {half[0] or half[1]}"
                kind = DTYPE if rounding and ulp_distance(one, other) < 2.0**17 else WEIGHTS
                return Cause(name, kind, f"`{pair.first.slot}` differs{rounding}{self._same_weight(pair)}")
        return None

    def _same_weight(self, pair: Pair) -> str:
        """Where the second recording's weight is in the first: in another module, or in an earlier step."""
        wanted = pair.second.value
        if wanted is None or not any(wanted.sample):
            return "; it is zero in the second" if wanted is not None and wanted.largest == 0 else ""
        for event in self._first.step.events:
            if event.kind == storage.WEIGHT and event.value is not None and event.value.hash == wanted.hash:
                return f"; the second has that of {event.name}"
        recording, number = self._first.recording, self._first.step.number
        for other, files in recording.steps.items():
            if other != number and self._first.step.rank in files:
                for event in recording.step(other, self._first.step.rank).events:
                    place = (event.kind, event.name, event.slot)
                    here = place == (storage.WEIGHT, pair.first.name, pair.first.slot)
                    if here and event.value is not None and event.value.hash == wanted.hash:
                        return f"; the second has that of step {other}"
        return ""

    def _own_buffers(self, name: str) -> Cause | None:
        for kind in (storage.BUFFER, storage.DERIVED):
            for pair in self._at.get((storage.START, kind, name, 0), []):
                one, other = pair.first.value, pair.second.value
                if one is not None and other is not None and self._differs(pair):
                    if one.dtype != other.dtype:
                        return Cause(name, DTYPE, f"buffer `{pair.first.slot}` is {one.dtype} and {other.dtype}")
                    rounded = rounded_to(one), rounded_to(other)
                    if rounded[0] != rounded[1]:
                        text = f"buffer `{pair.first.slot}` is rounded to {rounded[0] or rounded[1]} in one"
                        return Cause(name, DTYPE, text)
                    return Cause(name, WEIGHTS, f"buffer `{pair.first.slot}` differs")
        return None

    def _settings(self, name: str, event: Event, other: Event | None = None) -> Cause | None:
        mode = self._training(name, event) if other is None else (event.training, other.training)
        if mode[0] != mode[1]:
            return Cause(name, SETTING, f"training is {mode[0]} and {mode[1]}")
        changed = _changed(self._of_side(self._first, name), self._of_side(self._second, name))
        own = [item for item in changed if not item[0].startswith("config.")] or changed
        if not own:
            return None
        text = ", ".join(f"`{key}` is {one} and {two}" for key, one, two in own[:4])
        if all(key.endswith(_KERNEL_SETTINGS) for key, _, _ in own):
            return Cause(name, KERNEL, text)
        if all(key.endswith("dtype") for key, _, _ in own):
            return Cause(name, DTYPE, text)
        return Cause(name, SETTING, text)

    def _of_side(self, side: Side, name: str) -> dict[str, object]:
        known = side.settings
        return known.get(name, known.get(without_adapters(name), {}))

    def _training(self, name: str, event: Event) -> tuple[bool, bool]:
        modes = []
        for side in (self._first, self._second):
            events = side.events(event.phase, storage.PRE, name, event.call)
            modes.append(events[0].training if events else False)
        return modes[0], modes[1]

    def _rounding(self, pair: Pair) -> Cause | None:
        text = _dtypes(pair.first, pair.second)
        return Cause(pair.first.name, DTYPE, text) if text else None

    def _random(self, name: str, event: Event) -> Cause | None:
        mine, theirs = (
            [e.extra for e in side.events(event.phase, storage.RANDOM, name, event.call)]
            for side in (self._first, self._second)
        )
        if mine and theirs and mine != theirs:
            again = " repeats its forward pass, and" if event.phase == storage.BACKWARD else ""
            return Cause(name, RANDOM_STATE, f"it{again} draws random numbers from another random state")
        return None

    def _arguments(self, name: str, event: Event) -> Cause | None:
        mine, theirs = (
            [e.extra for e in side.events(event.phase, storage.ARGUMENTS, name, event.call)]
            for side in (self._first, self._second)
        )
        if mine != theirs and mine and theirs:
            return Cause(name, SETTING, f"it is called with {mine[0]} and {theirs[0]}")
        return None

    def _kernel(self, name: str, event: Event, text: str = "") -> Cause:
        missing = self._unrecorded(name, event)
        if missing:
            return Cause(name, UNRECORDED, f"{text}; {missing}" if text else missing)
        known = (side.recording.model.get(_ENVIRONMENT, {}) for side in (self._first, self._second))
        changed = [f"{key} is {one} and {two}" for key, one, two in _changed(*known)]
        mine, theirs = (side.recording.model["kinds"].get(name) for side in (self._first, self._second))
        if mine != theirs and mine and theirs:
            changed.insert(0, f"its class is {mine} and {theirs}")
        why = "; ".join(changed[:4]) or "inputs, weights, dtype and settings are equal: other code or another kernel"
        return Cause(name, KERNEL, f"{text}; {why}" if text else why)

    def _unrecorded(self, name: str, event: Event) -> str:
        """What is not recorded of a call of a module, or of all calls if the gradient of a parameter differs."""
        dropped = _dropped(self._first.step, event.phase) + _dropped(self._second.step, event.phase)
        if dropped:
            return f"{dropped} values of the phase {event.phase} are not recorded"
        every = event.slot.endswith(".grad")
        phases = (storage.FORWARD, storage.BACKWARD) if event.kind == storage.GRADIENT else (event.phase,)
        most, calls, left = storage.MOST_CALLS, {phase: self._calls(phase, name) for phase in phases}, 0
        for other in self._first.step.events:
            if other.kind == storage.LEFT_OUT and other.phase in phases:
                count = int(other.extra)
                inside = other.name != name and (not name or other.name.startswith(f"{name}."))
                # The calls inside are spread evenly over the calls of the module.
                left += count * (every or (inside and event.call * (most + count) >= most * calls[other.phase]))
        return f"{left} calls inside are not recorded: of each module the first {most} are" if left else ""

    def _calls(self, phase: str, name: str) -> int:
        """How often a module is called."""
        events = [event for event in self._first.step.events if (event.phase, event.name) == (phase, name)]
        recorded = {event.call for event in events if event.kind in (storage.PRE, storage.POST)}
        return len(recorded) + sum(int(event.extra) for event in events if event.kind == storage.LEFT_OUT)

    # ---- Loss, gradients and optimizer ----

    def _of_loss(self, event: Event) -> Cause:
        arguments = (self._of_side(side, ARGUMENTS_NAME) for side in (self._first, self._second))
        changed = _changed(*arguments)
        text = ", ".join(f"`{key}` is {one} and {two}" for key, one, two in changed[:4])
        given = self._arguments("", Event(storage.FORWARD, "", "", event.call, "", None, "", False, ""))
        given = given or self._arguments(LOSS_NAME, event)
        if given is not None:
            return Cause(LOSS_NAME, SETTING, f"{given.text}{'; ' if text else ''}{text}")
        if text:
            return Cause(LOSS_NAME, SETTING, f"the outputs of the model are equal, and {text}")
        text = "the outputs of the model are equal, and the loss is not"
        inside = event.kind == storage.POST and self._unrecorded(event.name, event)
        return self._kernel(event.name if inside else LOSS_NAME, event, text)

    def _of_gradient(self, pair: Pair) -> Cause:
        event = pair.first
        if event.slot.endswith(".grad"):
            return self._of_parameter_gradients(pair)
        gradients = [p for p in self._aligned if p.first.kind == storage.GRADIENT and p.first.call == event.call]
        if pair is gradients[0] or event.name == "":
            return self._of_loss(event)
        if not event.slot.startswith("output"):
            return self._of_module(pair)  # the gradient of its input
        consumers = list(self._consumers(event))
        for name in consumers:
            place = event._replace(phase=storage.FORWARD, name=name)
            found = self._settings(name, place) or self._random(name, place)
            if found is not None:
                return found
        if len(consumers) == 1:
            return self._kernel(consumers[0], event, "its backward pass returns another gradient")
        around = self._around(storage.FORWARD, event.name)
        text = f"the gradient of the output of {event.name} differs"
        return self._settings(around, event._replace(phase=storage.FORWARD)) or self._kernel(around, event, text)

    def _consumers(self, event: Event) -> Iterator[str]:
        """The innermost modules that receive an output."""
        outputs = self._first.events(storage.FORWARD, storage.POST, event.name, event.call)
        hashes = {e.value.hash for e in outputs if e.value is not None and e.slot == event.slot}
        names = [
            e.name
            for e in self._first.step.events
            if (e.kind, e.phase, e.call) == (storage.PRE, storage.FORWARD, event.call)
            and e.name != event.name
            and e.value is not None
            and e.value.hash in hashes
        ]
        yield from (name for name in dict.fromkeys(names) if not any(other.startswith(f"{name}.") for other in names))

    def _of_parameter_gradients(self, pair: Pair) -> Cause:
        every = [p for p in self._aligned if p.first.kind == storage.GRADIENT and p.first.slot.endswith(".grad")]
        differing = [p for p in every if self._differs(p)]
        factors = [_factor(p) for p in every]
        usual = sorted(factors)[len(factors) // 2]
        others = [p for p, factor in zip(every, factors, strict=True) if abs(factor - usual) > 1e-3 * abs(usual)]
        if usual != 1 and 0 < len(others) * 2 < len(every):
            text = (
                f"the gradient of `{others[0].first.slot.removesuffix('.grad')}` differs, and clipping scales the rest"
            )
            return self._kernel(others[0].first.name, pair.first, text)
        if len(differing) * 2 > len(every):
            arguments = (self._of_side(side, ARGUMENTS_NAME) for side in (self._first, self._second))
            changed = _changed(*arguments)
            text = ", ".join(f"`{key}` is {one} and {two}" for key, one, two in changed[:4])
            if text:
                return Cause("(gradients)", SETTING, f"the gradients of the outputs are equal, and {text}")
            text = f"{len(differing)} of {len(every)} gradients of parameters differ"
            return self._kernel("(gradients)", pair.first, text)
        name = pair.first.name
        place = pair.first._replace(phase=storage.FORWARD, call=0)
        text = f"only the gradient of `{pair.first.slot}` differs"
        return self._settings(name, place) or self._kernel(name, pair.first, text)

    def _of_optimizer(self, pair: Pair) -> Cause:
        changed = _changed(*(self._of_side(side, OPTIMIZER_NAME) for side in (self._first, self._second)))
        if changed:
            text = ", ".join(f"`{key}` is {one} and {two}" for key, one, two in changed[:4])
            return Cause(OPTIMIZER_NAME, SETTING, text)
        event = pair.first
        if event.kind == storage.STATE:
            return Cause(OPTIMIZER_NAME, STATE, f"{event.slot} of {event.name} differs before the step")
        mine, theirs = (
            [e for e in side.step.events if e.kind == storage.STATE] for side in (self._first, self._second)
        )
        if bool(mine) != bool(theirs):
            return Cause(OPTIMIZER_NAME, STATE, f"only the {'first' if mine else 'second'} has state before the step")
        found = self._own_weights(event.name)
        return found or self._kernel(OPTIMIZER_NAME, event, "gradients, state and settings are equal")


def _factor(pair: Pair) -> float:
    """The factor between the sampled values of two gradients, by least squares; 1 if they are equal or zero."""
    one, other = pair.first.value, pair.second.value
    if one is None or other is None or one.hash == other.hash or one.shape != other.shape:
        return 1.0
    size = max(1, min(len(one.sample), len(other.sample)))
    mine, theirs = (thinned(digest.sample, size).astype("float64") for digest in (one, other))
    squares = float(mine @ mine)
    if squares:
        return float(mine @ theirs) / squares
    return other.largest / one.largest if one.largest > 0 else 1.0  # embeddings have few gradients that are not zero


def _dropped(step: Step, phase: str) -> int:
    """The number of values of a phase that are missing because the file would have been too large."""
    return step.dropped.get(phase, 0)


def _sequences(side: Side) -> Counter[int]:
    """The sequences of all forward passes of a step, without padding."""
    rows = side.step.rows.items()
    return Counter(row for phase, hashes in rows if phase.startswith(storage.FORWARD) for row in hashes)


def _is_side(slot: str) -> bool:
    """Whether an input is not the hidden states but something that a module around computes for all layers."""
    return "mask" in slot or "position" in slot or "cu_seqlens" in slot


def _shown(name: str) -> str:
    return name or "the model"


def _changed(first: dict[str, object], second: dict[str, object]) -> list[tuple[str, object, object]]:
    """The settings that both have with different values."""
    return [(key, one, second[key]) for key, one in first.items() if key in second and second[key] != one]


def _dtypes(one: Event, other: Event) -> str:
    """How the dtypes of two values, or the dtypes that they were computed in, differ; empty if they do not."""
    if one.value is None or other.value is None or not (one.value.floating and other.value.floating):
        return ""
    if one.value.dtype != other.value.dtype:
        return f"{one.value.dtype} and {other.value.dtype}"
    if one.autocast != other.autocast:
        return f"autocast is {one.autocast or 'off'} and {other.autocast or 'off'}"
    mine, theirs = rounded_to(one.value), rounded_to(other.value)
    if mine != theirs:
        return f"values are rounded to {mine or one.value.dtype} and {theirs or other.value.dtype}"
    return ""
