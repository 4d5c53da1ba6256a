"""Finds the error that stopped a run in a message or a log, and explains it.

First, everything around the messages is removed: colours, progress bars, the prefixes of ranks, the frames of
tracebacks, and in the summary of torch's launcher the processes that it ended after the first had failed. Then one
exception is chosen as the cause: the first of a chain, the last of several chains that is not a launcher's, and with
several ranks that of the rank that failed first.
"""

import re
from bisect import bisect_right
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from ..core.errors import Fix, Problem
from ..report.document import Report, Table
from .catalogue import entries, families, hits
from .entry import Case, Entry, squeeze
from .metrics import Metric, out_of_range, readings


MAX_BYTES = 4 * 2**20
"""Bytes that are read from the end of a log."""

_MAX_MESSAGE = 20_000
"""Characters of one message that are searched."""

_MAX_CONTEXT = 20_000
"""Characters before the end of a message that are searched for evidence of its cause."""

_SHORT = 4
"""The most lines of a text without an exception that is taken for one message."""

_FIRST, _LAST = 300, 1000
"""How many exceptions of a log are searched: the first, which include the rank that failed first, and the last."""

_ESCAPES = re.compile(r"\x1b\[[0-9;:?]*[ -/]*[@-~]|\x1b\][^\x07\x1b\n]*(?:\x07|\x1b\\)|[\x00\x07\x08]")
_PREFIX = re.compile(
    r"^(?:[>│┃|] ?|\[(?:rank|default)\d+\]:? ?|\[\d+,\d+\]<std(?:err|out)>:? ?|\(\w+(?: pid=\d+)?(?:, ip=[\d.]+)?\) "
    r"|(?:ERROR|INFO|WARNING) \d\d-\d\d \d\d:\d\d:\d\d \[[\w./]+:\d+\] |\d{1,4}: |E   )+",
    re.MULTILINE,
)
_BOX = re.compile(r"[│┃╭╮╰╯]|[─━]{2,}")
_QUOTES = str.maketrans("‘’“”", "''\"\"")
_FRAME = re.compile(r"^([ \t]+)File \"[^\"\n]*\", line \d+.*(?:\n\1[ \t]+.*)*", re.MULTILINE)
_LATER_FAILURES = re.compile(
    r"^Failures:\n(?:(?!Root Cause)[^\n]*\n)*(?=Root Cause \(first observed failure\):)", re.MULTILINE
)
"""The part of torch's launcher's summary about the processes that it ended after one had failed."""
_EXCEPTION = re.compile(
    r"^(?:[A-Za-z_]\w*\.)*\w*(?:Error|Exception|Interrupt|SystemExit|Failure|Failed|Timeout|Unsupported|OutOfResources)(?=:\s|:?$)",
    re.MULTILINE,
)
_BUILT_IN = re.compile(
    r"(?:(?:Assertion|Attribute|Import|Index|Key|Name|NotImplemented|OS|Runtime|Type|Value)?Error:?|Exception:?)"
)
_ASSERTED = re.compile(r"(?:^|\s)(assert\b.*)")
_END = re.compile(r"\n[ \t]*\n|\n(?=Traceback \(most recent|[IWEF]\d{4} \d\d:\d\d:\d\d|[^\n]{0,80}\d+%\|)")
_RAISE = re.compile(r"^[ \t>]+raise ((?:\w+\.)*\w+)\([rbuf]?(['\"])((?:(?!\2).)+)\2", re.MULTILINE)
"""A line of source that raises an exception, which ends a traceback that was pasted without its message."""
_LINK = re.compile(
    r"The above exception was the direct cause of the following exception"
    r"|During handling of the above exception, another exception occurred"
)
_WEIGHTS = {"message": 3, "family": 2, "wording": 1}
_RANK = re.compile(r"^\W*\[(?:rank|default)(\d+)\]")
_WORD = re.compile(r"[A-Za-z_]{3,}")
_FIX = r"fix: (.+?)\s*\[{}\]"
_OPEN = " The text does not tell which of the possible causes it has, or whether it has another."
"""Follows what a message means, if its cause is open."""


@dataclass(frozen=True)
class Found:
    """A known error in a log.

    Attributes:
        entry: Its entry.
        line: The line that it is reported at, from 1.
        times: How often it occurs.
        cause: The cause, by the evidence around the message.
        fix: The line to write: that of the message itself if it has one, else that of the cause.
        possible: The causes that the text cannot tell apart; empty if the cause is known.
    """

    entry: Entry
    line: int
    times: int
    cause: str
    fix: str
    possible: tuple[Case, ...] = ()


@dataclass(frozen=True)
class Explanation:
    """The explanation of a log.

    Attributes:
        subject: The message of the cause; the last line without an exception.
        found: The known errors: the cause first, then others, then warnings, then those that only report the cause.
        explained: Whether the cause is known.
        near: Entries that resemble the cause, if it is not known.
        metrics: Number of `precision/` metrics in the log.
        beyond: Those with a value beyond their limit, and this value.
    """

    subject: str
    found: tuple[Found, ...]
    explained: bool
    near: tuple[Entry, ...]
    metrics: int = 0
    beyond: tuple[tuple[Metric, float], ...] = ()


@dataclass(frozen=True)
class _Raised:
    """An exception in a log, with its traceback, its line, its chain of exceptions, its rank and its entries."""

    message: str
    context: str
    line: int
    chain: int
    rank: str | None
    known: tuple[Entry, ...]

    @property
    def launcher(self) -> bool:
        """Whether the exception only reports another one."""
        return bool(self.known) and all(entry.kind == "launcher" for entry in self.known)

    @property
    def weight(self) -> int:
        """How well its entries explain the exception."""
        return max((_WEIGHTS[entry.level] for entry in self.known), default=0)


def decode(raw: bytes) -> str:
    """Decodes the end of a log.

    Args:
        raw: The bytes of the log, in UTF-8 or UTF-16; others become U+FFFD.

    Returns:
        Its last `MAX_BYTES` bytes as text.
    """
    if raw[:2] in (b"\xff\xfe", b"\xfe\xff"):  # PowerShell's redirection writes UTF-16
        return raw.decode("utf-16", errors="replace")[-MAX_BYTES:]
    return raw[-MAX_BYTES:].decode("utf-8", errors="replace")


def clean(text: str) -> str:
    """Removes colours, progress bars, prefixes of ranks, frames of tracebacks, and what followed a first failure.

    Args:
        text: A message or a log.

    Returns:
        The text; its lines keep their numbers.
    """
    text = text.replace("\r\n", "\n").translate(_QUOTES)  # forums and word processors change quotation marks
    if "\r" in text:  # a progress bar overwrites its line: only the text after the last carriage return was visible
        text = "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))
    text = _PREFIX.sub("", _ESCAPES.sub("", text))
    if "─" in text or "│" in text:
        text = _BOX.sub("", text)
    text = _LATER_FAILURES.sub(lambda later: "-\n" * later[0].count("\n"), text)  # an empty line would end the message
    return _FRAME.sub(lambda frame: "\n" * frame[0].count("\n"), text)


def explain(text: str) -> Explanation:
    """Explains a message or a log.

    Args:
        text: The message or the log.

    Returns:
        The explanation; `found` is empty if the text contains no known message.
    """
    plain = clean(text)
    if not _EXCEPTION.search(plain):
        text += "".join(f"\n{name}: {message}" for name, _, message in _RAISE.findall(text)[-1:])
        plain = clean(text)
    general = families(text)
    raised = list(_raised(plain, text, general))
    cause = _cause(raised)
    seen = {entry.id for error in raised for entry in error.known}
    outside = _outside_exceptions(plain, text.casefold(), seen, _of_lines(general, plain) if cause is None else ())
    ordered = _known_exceptions(raised, cause)
    errors = [found for found in outside if found.entry.kind != "warning"]
    warnings = [found for found in outside if found.entry.kind == "warning"]
    # A line that an entry knows says more than a general entry, such as a line before an assertion without text.
    is_general = bool(ordered) and ordered[0].entry.general
    ordered = [*errors, *ordered, *warnings] if is_general else [*ordered, *errors, *warnings]
    ordered.sort(key=lambda found: found.entry.kind == "launcher")
    chain = [error for error in raised if cause is not None and error.chain == cause.chain]
    if cause is None or all(error.launcher for error in raised):
        explained = any(found.entry.explains for found in ordered)
    else:
        explained = any(entry.explains for error in chain for entry in error.known)
    measured = readings(plain)
    explained = explained or (cause is None and bool(measured))
    lines = [line for line in plain.splitlines() if line.strip()]
    subject = cause.message if cause is not None else lines[-1].strip() if lines else ""
    near = () if explained else _near(subject)
    beyond = tuple(out_of_range(measured))
    return Explanation(_shorten(subject), tuple(ordered), explained, near, len(measured), beyond)


def report(explanation: Explanation) -> Report:
    """Builds the report that `safe-trainers explain` prints, the cause of the end of the run first.

    It has the cause and the fix of each known error, and of each metric that is beyond its limit.

    Args:
        explanation: The explanation.

    Returns:
        The report; its exit status is 0 if the cause is known, else 1.
    """
    verdicts = []
    if not explanation.explained:
        near = ", ".join(f"{entry.id} ({entry.messages[0]!r})" for entry in explanation.near)
        verdicts.append(
            Problem(
                "this error is not in the catalogue" + (f"; the nearest are {near}" if near else ", nor one like it"),
                fix=Fix("safe-trainers doctor, and the first traceback of the log"),
                level="warning",
            )
        )
    for found in explanation.found:
        link = f" See {found.entry.link}" if found.entry.link else ""
        text = f"{found.entry.id} ({found.entry.package}): {found.cause}{_OPEN if found.possible else ''}{link}"
        verdicts.append(Problem(text, fix=Fix(found.fix), id=found.entry.id, level="note"))
        for case in found.possible:
            verdicts.append(
                Problem(f"possible cause: {case.cause}", fix=Fix(case.fix), id=found.entry.id, level="note")
            )
    for metric, value in explanation.beyond:
        given = f"{metric.key}={value:.3g} (normal: {metric.normal}; look when: {metric.look})"
        verdicts.append(Problem(given, metric.cause, Fix(metric.write), level="note"))
    if explanation.metrics and not explanation.beyond:
        verdicts.append(Problem(f"{explanation.metrics} metrics are within their limits", level="ok"))
    rows = tuple((found.entry.id, found.entry.package, found.line, found.times) for found in explanation.found)
    tables = (Table("known errors", ("id", "package", "line", "times"), rows),) if rows else ()
    return Report("explanation", explanation.subject, tables=tables, verdicts=tuple(verdicts))


def _raised(plain: str, original: str, general: Collection[Entry]) -> Iterator[_Raised]:
    """Yields the exceptions of a log in order, each with the entries of its message."""
    originals = original.replace("\r\n", "\n").split("\n")
    starts = [match.start() for match in _EXCEPTION.finditer(plain)]
    if len(starts) > _FIRST + _LAST:
        starts = starts[:_FIRST] + starts[-_LAST:]
    known: dict[str, tuple[Entry, ...]] = {}
    chain, line, last, traceback = 0, 1, 0, 0
    for start, following in pairwise([*starts, len(plain)]):
        end = min(following, start + _MAX_MESSAGE)
        stop = _END.search(plain, start, end)
        if last and not _LINK.search(plain, last, start):
            chain += 1
            traceback = line
        line += plain.count("\n", last, start)
        rank = _rank(originals[line - 1])
        lines = plain[start : stop.start() if stop else end].split("\n")
        message = "\n".join(_of_rank(lines, originals, line - 1, rank)).strip()
        context = "\n".join(originals[traceback : line - 1 + len(lines)])[-_MAX_CONTEXT:]
        # An assertion without a message has its condition in the line above.
        condition = _ASSERTED.findall(context)[-1:] if message == "AssertionError" else []
        squeezed = squeeze("\n".join([message, *condition]))
        if squeezed not in known:
            built_in = _BUILT_IN.match(message)
            name = built_in.end() if built_in else 0
            known[squeezed] = tuple(dict.fromkeys(hit.entry for hit in hits(squeezed, general, name)))
        yield _Raised(message, context.casefold(), line, chain, rank, known[squeezed])
        last = start


def _rank(line: str) -> str | None:
    """Returns the rank in the prefix of a line, as torch prints it."""
    match = _RANK.match(line)
    return match[1] if match else None


def _of_rank(lines: Sequence[str], originals: Sequence[str], first: int, rank: str | None) -> Iterator[str]:
    """Yields the lines of a message, which begins at line `first` of a log, up to the first of another rank."""
    for number, line in enumerate(lines):
        if _rank(originals[first + number]) not in (None, rank):
            return
        yield line


def _cause(raised: Sequence[_Raised]) -> _Raised | None:
    """Returns the exception that stopped the run; `None` if the log has no exception."""
    own = [error for error in raised if not error.launcher] or list(raised)
    if not own:
        return None
    ranked = [error for error in own if error.rank is not None]
    # After one rank fails, the others lose their connection to it.
    several = len({error.rank for error in ranked}) > 1
    chosen = ranked[0].chain if several else own[-1].chain
    chain = [error for error in own if error.chain == chosen]
    return max(chain, key=lambda error: error.weight)


def _known_exceptions(raised: Sequence[_Raised], cause: _Raised | None) -> list[Found]:
    """Returns the known errors in exceptions: first the cause's chain from the inside out, then others, last first."""
    if cause is None:
        return []
    chain = [error for error in raised if error.chain == cause.chain]
    others = [error for error in reversed(raised) if error.chain != cause.chain]
    found: dict[str, Found] = {}
    for error in (*chain, *others):
        for entry in error.known:
            if entry.id in found or (entry.general and error is not cause):
                continue
            own = re.search(_FIX.format(re.escape(entry.id)), error.message, re.DOTALL)
            times = sum(entry in other.known for other in raised)
            answer = entry.answer(error.context)
            fix = " ".join(own[1].split()) if own else answer.fix
            found[entry.id] = Found(entry, error.line, times, answer.cause, fix, answer.possible)
    return list(found.values())


def _of_lines(general: Collection[Entry], plain: str) -> list[Entry]:
    """Returns the general entries for a text without an exception: wordings only if it is one message of an error."""
    short = sum(bool(line.strip()) for line in plain.split("\n")) <= _SHORT and "Warning:" not in plain
    return [entry for entry in general if short or entry.level != "wording"]


def _outside_exceptions(plain: str, text: str, seen: set[str], general: Collection[Entry]) -> list[Found]:
    """Returns known errors outside exceptions (warnings, logger lines, messages without a class), last first."""
    lines = plain.split("\n")
    squeezed = [squeeze(line) for line in lines]
    offsets = list(accumulate((len(line) for line in squeezed), initial=0))
    found: dict[str, Found] = {}
    for hit in reversed(hits("".join(squeezed), general)):
        if hit.entry.id in seen:
            continue
        before = found.get(hit.entry.id)
        # Empty lines start where the next line does; the last line that starts there contains the match.
        line = before.line if before else bisect_right(offsets, hit.start)
        times = before.times + 1 if before else 1
        found[hit.entry.id] = Found(hit.entry, line, times, *hit.entry.answer(text))
    return list(found.values())


def _near(subject: str, most: int = 3) -> tuple[Entry, ...]:
    """Returns the entries whose messages share most of their words with a message."""
    words = set(_WORD.findall(subject))

    def likeness(entry: Entry) -> float:
        return max((_share(set(_WORD.findall(text)), words) for text in entry.messages), default=0.0)

    whole = [entry for entry in entries().values() if entry.level != "wording"]
    scored = sorted(((likeness(entry), entry) for entry in whole), key=lambda pair: -pair[0])
    return tuple(entry for score, entry in scored[:most] if score >= 0.4)


def _share(words: set[str], given: set[str]) -> float:
    """Returns the share of `words` that are in `given`; 0 if they share at most one word."""
    common = len(words & given)
    return common / len(words) if common > 1 else 0.0


def _shorten(message: str, most: int = 200) -> str:
    """Returns the message in one line of at most `most` characters."""
    line = " ".join("".join(c if c.isprintable() or c.isspace() else "\ufffd" for c in message[:_MAX_MESSAGE]).split())
    return line if len(line) <= most else line[: most - 1] + "…"
