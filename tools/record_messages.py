"""Records one real message of every refusal and warning, by running the tests that provoke them.

    python tools/record_messages.py             # records the messages of new ids, in seconds
    python tools/record_messages.py ID ...      # records these again
    python tools/record_messages.py --check     # runs every recorded test and compares; a minute
    .venv/vllm/bin/python tools/record_messages.py -m vllm ID ...    # ids that need the real vLLM

The result, `tools/messages.json`, is what `docs/refusals.md` prints. `moment` groups an entry on the page; a new entry
is "construction", and can be changed by hand.
"""

import argparse
import ast
import json
import re
import string
import sys
import warnings
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest


ROOT = Path(__file__).parent.parent
FILE = ROOT / "tools" / "messages.json"
Message = dict[str, str]
SHORTEST = 20
"""Characters of a part of an explanation by which a test is found."""


def read() -> dict[str, Message]:
    """Reads the recorded messages by id."""
    recorded: dict[str, Message] = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    return recorded


class Recorder:
    """A plugin of pytest that keeps every problem that a test makes.

    Attributes:
        found: Test and problem, for each id, in order.
        skipped: The tests that were skipped.
    """

    def __init__(self) -> None:
        self.found: dict[str, list[Message]] = defaultdict(list)
        self.skipped: set[str] = set()
        self._test = ""

    def pytest_configure(self, config: Any) -> None:
        """Wraps the function that makes all problems."""
        from safe_trainers.core import errors

        make = errors._problem

        def recorded(finding: Any, what: str, level: Any, details: Any) -> Any:
            problem = make(finding, what, level, details)
            message = {"test": self._test, "what": what, "why": problem.why, "fix": str(problem.fix)}
            self.found[finding.id].append({key: plain(value) for key, value in message.items()})
            return problem

        errors._problem = recorded

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Remembers the tests that are skipped here, such as those of older releases."""
        if report.skipped:
            self.skipped.add(report.nodeid.partition("[")[0])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Remembers the running test."""
        self._test = nodeid


def plain(text: str) -> str:
    """Returns a message without the temporary folders of a test."""
    text = re.sub(r"/tmp/pytest-of-\w+/pytest-\d+/[\w.-]+?\d+/", "", text)
    return re.sub(r"/tmp/safe-trainers-\w+-[\w]+/", "models/", text)


def tests_that_mention(ids: set[str]) -> list[str]:
    """Returns the tests whose source contains one of the ids, or a part of its explanation."""
    from safe_trainers import REFUSALS, WARNINGS

    findings = [own[finding] for own in (REFUSALS, WARNINGS) for finding in ids if finding in own]
    texts = {part for finding in findings for part in _fixed_parts(finding.why)} | ids
    found = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        name = path.relative_to(ROOT).as_posix()
        if name.startswith(("tests/explain/", "tests/core/test_errors.py", "tests/gpu/")):
            continue
        source = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                parts = [ast.get_source_segment(source, part) or "" for part in (node, *node.decorator_list)]
                if any(text in part for text in texts for part in parts):
                    found.append(f"{name}::{node.name}")
    return found


def _fixed_parts(template: str) -> list[str]:
    """The parts of a template between its fields, if they are long enough to identify it."""
    parts = (text for text, *_ in string.Formatter().parse(template))
    return [part.strip(" ,.:;") for part in parts if len(part) > SHORTEST]


def _quality(message: Message) -> tuple[bool, bool, int]:
    """Sorts messages: real runs before calls of a function, and short ones first."""
    text = message["what"] + message["why"] + message["fix"]
    return "/tmp" in text, "integration" not in message["test"], len(text)


def run(tests: list[str], markers: str) -> Recorder:
    """Runs tests, and returns what they made."""
    recorder = Recorder()
    chosen = ["-m", markers] if markers else []
    with warnings.catch_warnings():
        pytest.main(["-q", "-p", "no:cacheprovider", "--no-header", *chosen, *tests], plugins=[recorder])
    return recorder


def main() -> int:
    """Records, or compares."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ids", nargs="*", metavar="ID")
    parser.add_argument("--tests", nargs="*", default=[], help="tests to run; by default those that mention the ids")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("-m", dest="markers", default="", help="markers, as those of pytest")
    options = parser.parse_args()
    from safe_trainers import REFUSALS, WARNINGS

    recorded = read()
    if options.check:
        tests = sorted({m["test"].partition("[")[0] for m in recorded.values() if "real_vllm" not in m["test"]})
        ran = run(tests, options.markers)
        wrong = [
            finding
            for finding, message in recorded.items()
            if "real_vllm" not in message["test"] and message["test"].partition("[")[0] not in ran.skipped
            and not any(_blurred(message) == _blurred(other) for other in ran.found.get(finding, []))
        ]  # fmt: skip
        print("\n".join(f"differs: {finding}" for finding in wrong) or "all messages are as recorded")
        return 1 if wrong else 0
    wanted = set(options.ids) or (set(REFUSALS) | set(WARNINGS)) - set(recorded)
    if not wanted:
        print("no id is new")
        return 0
    found = run(options.tests or tests_that_mention(wanted), options.markers).found
    for finding in wanted & set(found):
        best = min(found[finding], key=_quality)
        recorded[finding] = {"moment": recorded.get(finding, {}).get("moment", "construction"), **best}
    order = [*REFUSALS, *WARNINGS]
    kept = {finding: recorded[finding] for finding in order if finding in recorded}
    FILE.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    missing = sorted(wanted - set(kept))
    print(f"recorded {len(wanted & set(found))}; missing: {', '.join(missing) or 'none'}")
    return 1 if missing else 0


def _blurred(message: Message) -> tuple[str, ...]:
    return tuple(re.sub(r"\d[\d.,e+-]*", "#", message[key]) for key in ("what", "why", "fix"))


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    raise SystemExit(main())
