"""What a finding is: some input that is wrong, why, and the line that mends it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One entry of `REFUSALS` or `WARNINGS`: what is wrong with some input, and the line that mends it.

    Attributes:
        id: Stable slug, the same in every release.
        why: Why it fails, as a template.
        fix: The line to write instead, as a template.
    """

    id: str
    why: str
    fix: str


def index(*findings: Finding) -> dict[str, Finding]:
    """The findings by their id."""
    return {finding.id: finding for finding in findings}
