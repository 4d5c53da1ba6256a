"""Writes the pages of refusals and of known errors."""

import json
import re
import string
from collections import Counter
from pathlib import Path

import record_messages
from evidence_page import crash_kinds

from safe_trainers.core.errors import REFUSALS, WARNINGS, Finding, Problem
from safe_trainers.core.errors import Fix as Line
from safe_trainers.explain.catalogue import hits, own_entries
from safe_trainers.explain.entry import Case, Entry, squeeze
from safe_trainers.explain.known_errors import upstream_entries


MOMENTS = {
    "loading": ("before the model is loaded", "From the settings alone: the fastest to fix."),
    "construction": ("while the trainer is built", "From the loaded model, before an optimizer exists."),
    "run": ("in the run", "While it resumes, samples, or steps."),
    "end": ("at the end, when saving or merging", "Nothing is overwritten."),
}
"""The moments of `tools/messages.json`, with the words of a heading and a sentence about them."""

SAMPLE = "precision-contradicts-flag"
LONGEST = 70
"""Characters of a message in a heading."""
SWAP = (
    "swap the trainer for its safe one, `from safe_trainers import SafeGRPOTrainer`, which places a cast where two "
    "dtypes meet"
)
"""The fix of many entries, which the page explains once."""


def refusals_page() -> str:
    """Returns `refusals.md`: all refusals and warnings, each with a real message.

    An id without one is left out; a test reports it, with the command that records its message.
    """
    recorded = record_messages.read()
    lines = [
        "# Refusals and warnings of this package",
        "",
        "A run is refused if stock TRL would crash, would silently train something else than you asked for, or would",
        "emulate its precision many times slower. It is also refused if two settings contradict each other. All",
        "problems come in one `PrecisionError`:",
        "",
        "```text",
        "1 problem with the precision of this run:",
        *f"- {_problem(SAMPLE)}".splitlines(),
        "```",
        "",
        "The first line shows what was passed. `why` tells why it fails. `fix` is the line to write. The word in",
        "brackets is the id: it never changes, and it is the heading of an entry on this page. The messages",
        "below were produced by the tests. Where one names a GPU or a server, the test simulates it.",
        "",
    ]
    for heading, findings in (("Refused", REFUSALS), ("Warning", WARNINGS)):
        for moment, (words, about) in MOMENTS.items():
            own = [finding for finding in findings.values() if finding.id in recorded]
            own = [finding for finding in own if findings is REFUSALS or finding.id not in REFUSALS]
            group = [finding for finding in own if recorded[finding.id]["moment"] == moment]
            if group:
                lines += [
                    f"## {heading} {words}",
                    "",
                    about if heading == "Refused" else "Given once for each trainer.",
                    "",
                ]
                lines += _contents([finding.id for finding in group])
                lines += [line for finding in group for line in _entry(finding)]
    return "\n".join([*lines, *_foot("`REFUSALS`, `WARNINGS` and `tools/messages.json`")]) + "\n"


def _plain(text: str) -> str:
    """A message as text of a heading, in which markdown sees nothing else."""
    return re.sub(r"([\\*_\[\]<>#])", r"\\\1", text)


def _contents(ids: list[str]) -> list[str]:
    """A list of the entries of a group, since narrow screens show no contents beside the page."""
    return [", ".join(f"[`{finding}`](#{finding})" for finding in ids) + ".", ""]


def _problem(finding: str) -> str:
    message = record_messages.read()[finding]
    return str(Problem(message["what"], message["why"], Line(message["fix"]), finding))


def _entry(finding: Finding) -> list[str]:
    what = record_messages.read()[finding.id]["what"].replace("`", "")
    title = what if len(what) <= LONGEST else what[:LONGEST].rpartition(" ")[0] + " …"
    return [
        f"({finding.id})=",
        f"### {finding.id}: {_plain(title)}",
        "",
        "```text",
        *_problem(finding.id).splitlines(),
        "```",
        "",
    ]


ERRORS = {
    "errors_torch": ("of torch", ("torch",)),
    "errors_transformers": ("of transformers", ("transformers",)),
    "errors_python": ("of Python and the system", ("python", "system", "network", "pip", "pillow", "linker")),
    "errors_libraries": ("of other libraries", ()),
}
"""The pages of known errors: what they are of, and their packages; the last has all others."""


def errors_page() -> str:
    """Returns `errors.md`: how to find an error of another package, and the errors of this one."""
    listed = {page: ", ".join(f"`{name}`" for name in _packages(page)) for page in ERRORS}
    lines = [
        "# Error messages",
        "",
        "Search the site for a part of your message, or let the command find it in a log:",
        "",
        "```console",
        'safe-trainers explain "ValueError: Attempting to unscale FP16 gradients."',
        "```",
        "",
        "It reads a message, a log file or a pipe (`python train.py 2>&1 | safe-trainers explain`), removes colours,",
        "ranks and tracebacks, and prints the error that stopped the run, its cause and its fix. If the text does not",
        "tell the cause, it prints the possible ones. Messages with an id in brackets are of this package:",
        "[refusals and warnings](refusals.md).",
        "",
        "| messages | packages |",
        "|---|---|",
        *(f"| [{name[0].upper()}{name[1:]}]({page}.md) | {listed[page]} |" for page, (name, _) in ERRORS.items()),
        "",
        "**Dtype errors of stock TRL.** Most errors about two dtypes are fixed by replacing the trainer:",
        "`from safe_trainers import SafeGRPOTrainer`. It places a cast where two dtypes meet. Entries of these pages",
        "give the line for stock trainers too.",
        "",
        "## The most frequent",
        "",
        "In the [comparison with stock TRL](evidence.md), by the number of combinations that crash:",
        "",
        "| message | combinations |",
        "|---|---|",
        *(f"| {_linked(message)} | {count} |" for message, count in _frequent()),
        "",
        "## Of safe-trainers",
        "",
        "Other errors of this package end with the line to write:",
        "",
    ]
    lines += [
        f"- `{key}`: {entry.cause}"
        for key, entry in sorted(own_entries().items())
        if key not in REFUSALS and key not in WARNINGS
    ]
    return "\n".join([*lines, *_foot("the catalogue of `safe-trainers explain`")]) + "\n"


def known_errors_page(page: str) -> str:
    """Returns a page of the errors that `safe-trainers explain` recognises.

    Args:
        page: Its key in `ERRORS`.
    """
    entries = [entry for entry in upstream_entries().values() if entry.level != "wording"]
    lines = [
        f"# Error messages {ERRORS[page][0]}",
        "",
        "What [`safe-trainers explain`](errors.md) prints. *Possible causes* are those of a message that does not",
        "tell its cause. *A safe trainer* stands for",
        "`from safe_trainers import SafeGRPOTrainer`, which places a cast where two dtypes meet.",
        "",
    ]
    for package in _packages(page):
        lines += [f"## {package}", ""]
        lines += [line for entry in entries if entry.package == package for line in _error(entry)]
    if page == "errors_python":
        wordings = [entry for entry in upstream_entries().values() if entry.level == "wording"]
        lines += [
            "## Wordings",
            "",
            "Sentences of any package of this field, where no other entry has the message:",
            "",
        ]
        lines += [line for entry in wordings for line in _error(entry)]
    return "\n".join([*lines, *_foot("the catalogue of `safe-trainers explain`")]) + "\n"


def _packages(page: str) -> list[str]:
    """Returns the packages whose errors a page has."""
    every = sorted({entry.package for entry in upstream_entries().values() if entry.level != "wording"})
    named = [package for _, packages in ERRORS.values() for package in packages]
    return [package for package in every if package in ERRORS[page][1] or not (ERRORS[page][1] or package in named)]


def _page_of(entry: Entry) -> str:
    """Returns the page of an error."""
    return "errors_python" if entry.level == "wording" else next(p for p in ERRORS if entry.package in _packages(p))


def _frequent() -> list[tuple[str, int]]:
    counts: Counter[str] = Counter({message: len(families) for message, families in crash_kinds().items()})
    return counts.most_common(10)


def _linked(message: str) -> str:
    """A message as code, linked to the entry that explains it."""
    found = hits(squeeze(message.replace("...", "x")))
    code = _code(message.replace("|", "\\|"))
    return f"[{code}]({_page_of(found[0].entry)}.md#{found[0].entry.id})" if found else code


def _code(text: str) -> str:
    return f"`` {text} ``" if "`" in text else f"`{text}`"


def _error(entry: Entry) -> list[str]:
    first, *others = entry.messages
    lines = [f"({entry.id})=", f"### {_code(first)}", ""]
    if others:
        lines += ["Also: " + ", ".join(map(_code, others)) + ".", ""]
    lines += _answers(entry)
    link = re.sub(r"https://github.com/[\w-]+/([\w.-]+)/(?:issues|pull)/(\d+).*", r"\1#\2", entry.link or "")
    upstream = f"; upstream: [{link}]({entry.link})" if entry.link else ""
    return [*lines, f"Id: `{entry.id}`{upstream}.", ""]


def _answers(said: Entry | Case) -> list[str]:
    """What an entry or a case means, its possible causes, and its cases with evidence."""
    lines = [f"**Means:** {_sentence(said.cause)}", "", f"**Write:** {_written(said.fix)}", ""]
    possible = [case for case in said.cases if not case.evidence]
    if possible:
        lines += ["Possible causes, the most frequent first:", ""]
        lines += [f"- {_sentence(case.cause)} **Write:** {_written(case.fix)}" for case in possible]
        lines += [""]
    for case in said.cases:
        if case.evidence:
            lines += ["With " + " or ".join(_code(text.strip()) for text in case.evidence) + " in the text:", ""]
            lines += _answers(case)
    return lines


def _sentence(cause: str) -> str:
    return cause[:1].upper() + cause[1:]


def _written(fix: str) -> str:
    return fix.replace(SWAP, "a safe trainer")


def _foot(source: str) -> list[str]:
    return ["", f"*Made from {source} by `make docs`.*"]


def fixed_parts(template: str) -> str:
    """Returns a regular expression for the messages that a template makes."""
    parts = []
    for text, field, _, _ in string.Formatter().parse(template):
        parts.append(re.escape(text))
        parts += [".*"] if field else []
    return "".join(parts)


def recorded_tests() -> dict[str, str]:
    """Returns the test that provokes each message."""
    recorded: dict[str, dict[str, str]] = json.loads(Path(record_messages.FILE).read_text(encoding="utf-8"))
    return {finding: message["test"] for finding, message in recorded.items()}
