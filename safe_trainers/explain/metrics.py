"""What the `precision/` metrics mean: which values are normal, and what to do about others."""

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from statistics import median
from typing import Any


PREFIX = "precision/"

_READING = re.compile(
    r"\bprecision/([a-z0-9_]+)(?:/\w+)?[\"']?\s*(?::|=|\bis\b)\s*[\"']?(-?\d[\d,]*\.?\d*(?:e[+-]?\d+)?|inf|nan)",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Metric:
    """One metric.

    Attributes:
        name: Its name without `precision/`.
        section: The group: `"mismatch"`, `"optimizer"`, `"experts"` or `"rollout"`.
        formula: Its definition.
        unit: Its unit.
        normal: Its normal values.
        source: Where the formula comes from.
        look: When to look at it, in words; empty if it has no limit.
        above: The largest value that is not looked at.
        below: The smallest value that is not looked at.
        last: Whether the limits are for the last value of a log, not for a typical one.
        per: A metric; the limit is for the share of this metric in the sum of both.
        least: The number of steps, with `per`, from which on the share counts.
        only_if: Metrics that must also exceed a number.
        cause: The likely cause of a value beyond the limit.
        write: What to write or to look at then.
        page: The page about it.
        shown_by: The benchmark's runs with a fault that passes the limit.
        names: The names that are logged, if there are several.
    """

    name: str
    section: str
    formula: str
    unit: str
    normal: str
    source: str = ""
    look: str = ""
    above: float | None = None
    below: float | None = None
    last: bool = False
    per: str = ""
    least: int = 0
    only_if: Mapping[str, float] = field(default_factory=dict)
    cause: str = ""
    write: str = ""
    page: str = ""
    shown_by: tuple[str, ...] = ()
    names: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """The name in a log."""
        return PREFIX + self.name

    def typical(self, values: Mapping[str, list[float]]) -> float | None:
        """Returns the value that the limits are for: the median of the last half of a log, or its last count.

        Args:
            values: The values of each metric, in order, by name.

        Returns:
            The value; `None` if the metric is not in the log, or not enough steps are.
        """
        own = values.get(self.name)
        if not own:
            return None
        if self.last:
            return own[-1]
        if not self.per:
            return median(own[len(own) // 2 :])
        steps = own[-1] + values.get(self.per, [0.0])[-1]
        return own[-1] / steps if steps >= max(self.least, 1) else None

    def is_beyond(self, values: Mapping[str, list[float]]) -> bool:
        """Whether a log has a value beyond the limit.

        Args:
            values: The values of each metric, in order, by name.
        """
        value = self.typical(values)
        if value is None or any(
            median(other[len(other) // 2 :]) <= number if (other := values.get(name)) else False
            for name, number in self.only_if.items()
        ):
            return False
        return (self.above is not None and not value <= self.above) or (self.below is not None and value < self.below)


@cache
def metrics() -> dict[str, Metric]:
    """Returns every metric by name."""
    text = (resources.files(__package__) / "metrics.toml").read_text(encoding="utf-8")
    return {name: _metric(name, entry) for name, entry in tomllib.loads(text).items()}


def _metric(name: str, entry: dict[str, Any]) -> Metric:
    fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()}
    return Metric(name, **fields)


@cache
def _by_logged_name() -> dict[str, str]:
    return {logged: name for name, metric in metrics().items() for logged in (metric.names or (metric.name,))}


def readings(text: str) -> dict[str, list[float]]:
    """Reads the values of the metrics in a log.

    Args:
        text: A `log.json`, the lines that a run prints, or `precision/NAME=VALUE`.

    Returns:
        The values of each metric, in order, by name without `precision/`.
    """
    found: dict[str, list[float]] = {}
    for name, value in _READING.findall(text):
        if name in _by_logged_name():
            found.setdefault(_by_logged_name()[name], []).append(float(value.replace(",", "")))
    return found


def out_of_range(values: Mapping[str, list[float]]) -> Iterator[tuple[Metric, float]]:
    """Yields the metrics with a value beyond their limit, and this value.

    Args:
        values: The values of each metric, in order, by name.
    """
    for metric in metrics().values():
        if metric.is_beyond(values):
            yield metric, metric.typical(values) or 0.0
