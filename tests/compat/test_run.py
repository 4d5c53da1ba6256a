"""What `make compat` counts and pins."""

import run
from packaging.version import Version

from safe_trainers.core.versions import SUPPORTED


CASES = """<testsuites><testsuite>
<testcase classname="tests.test_a" name="test_one" />
<testcase classname="tests.test_a" name="test_two"><failure message="no">no</failure></testcase>
<testcase classname="tests.test_a" name="test_three"><error message="no">no</error></testcase>
<testcase classname="tests.test_a" name="test_four"><skipped message="this TRL has no streams">x</skipped></testcase>
<testcase classname="tests.test_b" name="test_five[1]"><skipped message="Skipped: this TRL has no streams">x</skipped>
</testcase></testsuite></testsuites>"""


def test_every_outcome_is_counted_and_each_skip_says_why(tmp_path):
    (tmp_path / "junit.xml").write_text(CASES)
    assert run.tally(tmp_path / "junit.xml") == {
        "passed": 1,
        "failed": 2,
        "skipped": 2,
        "failures": ["tests/test_a.py::test_two", "tests/test_a.py::test_three"],
        "skips": {"this TRL has no streams": 2},
    }


def test_a_pair_has_its_own_stack_and_everything_else_as_it_is_pinned():
    oldest, newest = run.PAIRS[0], run.PAIRS[-1]
    pins = dict(line.split("==") for line in run.constraints(oldest).splitlines())
    assert pins["trl"] == "0.29.1"
    assert f"torch=={pins['torch']}" == run.TORCH
    assert not set(run.STACK) & dict(line.split("==") for line in run.constraints(newest).splitlines()).keys()


def test_the_pairs_are_in_the_range_and_one_is_at_its_lower_end():
    for package, (first, end) in SUPPORTED.items():
        numbers = [Version(pair.pins[package]) for pair in run.PAIRS if package in pair.pins]
        assert all(Version(first).release <= number.release < Version(end).release for number in numbers)
        assert min(numbers).release[:2] == Version(first).release[:2]


def test_what_is_left_out_exists():
    assert all((run.ROOT / path).exists() for path in run.NOT_CORE)
