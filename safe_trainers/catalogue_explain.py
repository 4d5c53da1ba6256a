"""Finds in what a user pasted, a message or a whole log, what stopped the run, and explains it.

What surrounds a message is taken away first: colours, progress bars, the prefixes of ranks, the frames of tracebacks.
Then it is decided which error is the cause: of a chain of exceptions the first, of several chains the last one that is
not a launcher's, of several ranks that of the one that failed first.
"""

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from .catalogue import entries, hits
from .catalogue_entry import Entry, squeeze
from .report import Report, Table, Verdict


MOST = 4 * 2**20
"""Bytes of a log that are read: its end."""

_LONGEST = 20_000
"""Characters of one message that are looked at."""

_FIRST, _LAST = 300, 1000
"""Exceptions of a log that are looked at: its first, among them the rank that failed first, and its last."""

_ESCAPES = re.compile(r"\x1b\[[0-9;:?]*[ -/]*[@-~]|\x1b\][^\x07\x1b\n]*(?:\x07|\x1b\\)|[\x00\x07\x08]")
_PREFIX = re.compile(
    r"^(?:[>│┃|] ?|\[(?:rank|default)\d+\]:? ?|\[\d+,\d+\]<std(?:err|out)>:? ?|\(\w+(?: pid=\d+)?(?:, ip=[\d.]+)?\) "
    r"|(?:ERROR|INFO|WARNING) \d\d-\d\d \d\d:\d\d:\d\d \[[\w./]+:\d+\] |\d{1,4}: |E   )+",
    re.MULTILINE,
)
_BOX = re.compile(r"[│┃╭╮╰╯]|[─━]{2,}")
_FRAME = re.compile(r"^([ \t]+)File \"[^\"\n]*\", line \d+.*(?:\n\1[ \t]+.*)*", re.MULTILINE)
_EXCEPTION = re.compile(
    r"^(?:[A-Za-z_]\w*\.)*\w*(?:Error|Exception|Interrupt|SystemExit|Failure|Timeout)(?=:\s|:?$)", re.MULTILINE
)
_END = re.compile(r"\n[ \t]*\n|\n(?=Traceback \(most recent|[^\n]{0,80}\d+%\|)")
_LINK = re.compile(
    r"The above exception was the direct cause of the following exception"
    r"|During handling of the above exception, another exception occurred"
)
_RANK = re.compile(r"^\W*\[(?:rank|default)(\d+)\]")
_WORD = re.compile(r"[A-Za-z_]{3,}")
_FIX = r"fix: (.+?)\s*\[{}\]"


@dataclass(frozen=True)
class Found:
    """An entry whose text stands in what was given.

    Attributes:
        entry: The entry.
        line: Line of the place that counts, from 1.
        times: How often it stands there.
        fix: The line to write: the one of the message itself, where it has one.
    """

    entry: Entry
    line: int
    times: int
    fix: str


@dataclass(frozen=True)
class Explanation:
    """What a text says.

    Attributes:
        subject: The message of the error that is the cause, or the last line where there is none.
        found: Known texts, the cause first, then what happened beside it, then what only reports it.
        explained: Whether the cause is among them.
        near: Entries that resemble the cause, where it is not.
    """

    subject: str
    found: tuple[Found, ...]
    explained: bool
    near: tuple[Entry, ...]


@dataclass(frozen=True)
class _Raised:
    """An exception in a log: its message, and where it belongs."""

    message: str
    line: int
    chain: int
    rank: str | None
    known: tuple[Entry, ...]

    @property
    def launcher(self) -> bool:
        return bool(self.known) and all(entry.kind == "launcher" for entry in self.known)


def decode(raw: bytes) -> str:
    """The end of a log as text, whatever bytes it holds.

    Args:
        raw: Its bytes.

    Returns:
        Its last `MOST` bytes as text.
    """
    if raw[:2] in (b"\xff\xfe", b"\xfe\xff"):  # what PowerShell redirects
        return raw.decode("utf-16", errors="replace")[-MOST:]
    return raw[-MOST:].decode("utf-8", errors="replace")


def clean(text: str) -> str:
    """The text without colours, progress bars, prefixes of ranks and frames of tracebacks; lines keep their numbers.

    Args:
        text: A message or a log.
    """
    text = text.replace("\r\n", "\n")
    if "\r" in text:  # what a bar wrote over itself is gone from the screen, and what stands after it counts
        text = "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))
    text = _PREFIX.sub("", _ESCAPES.sub("", text))
    if "─" in text or "│" in text:
        text = _BOX.sub("", text)
    return _FRAME.sub(lambda frame: "\n" * frame[0].count("\n"), text)


def explain(text: str) -> Explanation:
    """Explains a message or a log.

    Args:
        text: What was pasted.

    Returns:
        The explanation; nothing is found where the text holds no known message.
    """
    plain = clean(text)
    raised = list(_raised(plain, text))
    cause = _cause(raised)
    told = {entry.id for error in raised for entry in error.known}
    loose = _loose(plain, told)
    ordered = _in_order(raised, cause)
    ordered += [found for found in loose if found.entry.kind == "error"]
    ordered += [found for found in loose if found.entry.kind == "warning"]
    ordered += [found for found in loose if found.entry.kind == "launcher"]
    ordered.sort(key=lambda found: found.entry.kind == "launcher")
    chain = [error for error in raised if cause is not None and error.chain == cause.chain]
    if cause is None or all(error.launcher for error in raised):
        explained = any(found.entry.kind != "launcher" for found in ordered)
    else:
        explained = any(entry.kind != "launcher" for error in chain for entry in error.known)
    lines = [line for line in plain.splitlines() if line.strip()]
    subject = cause.message if cause is not None else lines[-1].strip() if lines else ""
    near = () if explained else _near(subject)
    return Explanation(_short(subject), tuple(ordered), explained, near)


def report(explanation: Explanation) -> Report:
    """What `safe-trainers explain` prints: a verdict with cause and fix for each known text, the cause first.

    Args:
        explanation: Of `explain`.

    Returns:
        The report; its exit status is 0 where the cause is known, else 1.
    """
    verdicts = []
    if not explanation.explained:
        near = ", ".join(f"{entry.id} ({entry.texts[0]!r})" for entry in explanation.near)
        verdicts.append(
            Verdict(
                "warning",
                "this error is not in the catalogue" + (f"; the nearest are {near}" if near else ", nor one like it"),
                "safe-trainers doctor, and the first traceback of the log",
            )
        )
    for found in explanation.found:
        link = f" See {found.entry.link}" if found.entry.link else ""
        text = f"{found.entry.id} ({found.entry.package}): {found.entry.cause}{link}"
        verdicts.append(Verdict("note", text, found.fix, found.entry.id))
    rows = tuple((found.entry.id, found.entry.package, found.line, found.times) for found in explanation.found)
    tables = (Table("known texts", ("id", "package", "line", "times"), rows),) if rows else ()
    return Report("explanation", explanation.subject, tables=tables, verdicts=tuple(verdicts))


def _raised(plain: str, original: str) -> Iterator[_Raised]:
    """The exceptions of a log in their order, each with what the catalogue knows of its message."""
    originals = original.replace("\r\n", "\n").split("\n")
    starts = [match.start() for match in _EXCEPTION.finditer(plain)]
    if len(starts) > _FIRST + _LAST:
        starts = starts[:_FIRST] + starts[-_LAST:]
    known: dict[str, tuple[Entry, ...]] = {}
    chain, line, last = 0, 1, 0
    for start, following in pairwise([*starts, len(plain)]):
        end = min(following, start + _LONGEST)
        stop = _END.search(plain, start, end)
        message = plain[start : stop.start() if stop else end].strip()
        if last and not _LINK.search(plain, last, start):
            chain += 1
        line += plain.count("\n", last, start)
        squeezed = squeeze(message)
        if squeezed not in known:
            known[squeezed] = tuple(dict.fromkeys(hit.entry for hit in hits(squeezed)))
        rank = _RANK.match(originals[line - 1])
        yield _Raised(message, line, chain, rank[1] if rank else None, known[squeezed])
        last = start


def _cause(raised: Sequence[_Raised]) -> _Raised | None:
    """The exception that stopped the run, `None` where there is none."""
    own = [error for error in raised if not error.launcher] or list(raised)
    if not own:
        return None
    ranked = [error for error in own if error.rank is not None]
    # Where one rank fails the others lose their connection to it, later.
    several = len({error.rank for error in ranked}) > 1
    chosen = ranked[0].chain if several else own[-1].chain
    chain = [error for error in own if error.chain == chosen]
    return next((error for error in chain if error.known), chain[0])


def _in_order(raised: Sequence[_Raised], cause: _Raised | None) -> list[Found]:
    """The known exceptions: those of the cause's chain from the inside out, then the others, the last first."""
    if cause is None:
        return []
    chain = [error for error in raised if error.chain == cause.chain]
    others = [error for error in reversed(raised) if error.chain != cause.chain]
    found: dict[str, Found] = {}
    for error in (*chain, *others):
        for entry in error.known:
            if entry.id in found:
                continue
            own = re.search(_FIX.format(re.escape(entry.id)), error.message, re.DOTALL)
            times = sum(entry in other.known for other in raised)
            found[entry.id] = Found(entry, error.line, times, " ".join(own[1].split()) if own else entry.fix)
    return list(found.values())


def _loose(plain: str, told: set[str]) -> list[Found]:
    """What stands outside of exceptions: warnings, lines of loggers, messages without their class; the last first."""
    lines = plain.split("\n")
    squeezed = [squeeze(line) for line in lines]
    offsets = list(accumulate((len(line) for line in squeezed), initial=0))
    found: dict[str, Found] = {}
    for hit in reversed(hits("".join(squeezed))):
        if hit.entry.id in told:
            continue
        before = found.get(hit.entry.id)
        # A line that holds nothing starts where the next one does: the last of them is the one that holds it.
        line = before.line if before else bisect_right(offsets, hit.start)
        times = before.times + 1 if before else 1
        found[hit.entry.id] = Found(hit.entry, line, times, hit.entry.fix)
    return list(found.values())


def _near(subject: str, most: int = 3) -> tuple[Entry, ...]:
    """The entries whose texts share the most of their words with a message."""
    words = set(_WORD.findall(subject))

    def likeness(entry: Entry) -> float:
        return max((_share(set(_WORD.findall(text)), words) for text in entry.texts), default=0.0)

    scored = sorted(((likeness(entry), entry) for entry in entries().values()), key=lambda pair: -pair[0])
    return tuple(entry for score, entry in scored[:most] if score >= 0.4)


def _share(words: set[str], given: set[str]) -> float:
    common = len(words & given)
    return common / len(words) if common > 1 else 0.0


def _short(message: str, most: int = 200) -> str:
    line = " ".join("".join(c if c.isprintable() or c.isspace() else "\ufffd" for c in message[:_LONGEST]).split())
    return line if len(line) <= most else line[: most - 1] + "…"
