"""The rules by which a check finds a fault, read from rules.toml. torch is not imported."""

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files


@dataclass(frozen=True)
class Rule:
    """What a check measures, and when the result is a fault.

    Attributes:
        id: The name in results.
        check: The name of the check.
        measured: What is read from the trainer.
        limit: The largest value that is not a fault, in words.
        why: What goes wrong beyond the limit.
        reference: Links, separated by commas.
        value: The number of the limit, if there is one.
        values: The numbers of the limit by compute dtype, if they differ.
    """

    id: str
    check: str
    measured: str
    limit: str
    why: str
    reference: str
    value: float | None = None
    values: Mapping[str, float] = field(default_factory=dict)


@functools.cache
def rules() -> Mapping[str, Rule]:
    """The rules by id, in the order of the file."""
    content = tomllib.loads(files(__package__).joinpath("rules.toml").read_text(encoding="utf-8"))
    return {entry["id"]: Rule(**entry) for entry in content["rule"]}


def limit_of(rule: str) -> float:
    """The number of a rule's limit.

    Args:
        rule: The id of a rule that has one.
    """
    value = rules()[rule].value
    if value is None:
        raise ValueError(f"rule {rule} does not have a value")
    return value
