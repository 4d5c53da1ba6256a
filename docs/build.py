"""Writes the pages of this folder that are made from the code: `make docs`."""

import string
from pathlib import Path

from safe_trainers.errors import REFUSALS, WARNINGS, Finding


def refusals_page() -> str:
    """The page of everything that is refused or warned about, as it is written to `refusals.md`."""
    lines = [
        "# Refusals and warnings",
        "",
        "Made from `safe_trainers.REFUSALS` and `safe_trainers.WARNINGS` by `make docs`. Names in *italics* are",
        "filled in with what was passed.",
        "",
        "A run is refused only where stock TRL would crash, or would train something else than what was asked for.",
        "All refusals of a run come in one `PrecisionError`, at construction. What stock trains correctly trains.",
        "",
        "## Refused",
        "",
        *(line for finding in REFUSALS.values() for line in _entry(finding)),
        "## Warned about, once for each trainer",
        "",
        *(line for finding in WARNINGS.values() for line in _entry(finding)),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _entry(finding: Finding) -> list[str]:
    return [f"### {finding.id}", "", f"- why: {_readable(finding.why)}", f"- fix: {_readable(finding.fix)}", ""]


def _readable(template: str) -> str:
    names = {name for _, name, _, _ in string.Formatter().parse(template) if name}
    return template.replace("!r}", "}").format(**{name: f"*{name}*" for name in names})


if __name__ == "__main__":
    Path(__file__).with_name("refusals.md").write_text(refusals_page(), encoding="utf-8")
