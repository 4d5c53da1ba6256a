"""The structure of the package keeps its targets, and the tool that measures it finds what breaks them."""

import ast
import sys
from pathlib import Path

import pytest

import safe_trainers


sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
import house  # a script of this repository, not a package


@pytest.fixture(scope="module")
def counts():
    return house.static_counts()


@pytest.mark.parametrize("row", ["files in the root", "import circles", "arrows between packages",
                                 "overrides of train", "tests that read a private name of a trainer"])  # fmt: skip
def test_a_target_of_the_structure_is_met(row, counts):
    assert counts[row] <= house.TARGETS[row]


@pytest.mark.parametrize("name", ["SafeGRPOTrainer", "SafeRLOOTrainer", "SafeSFTTrainer", "SafeRewardTrainer"])
def test_a_trainer_has_at_most_four_classes_of_the_package_in_its_mro(name):
    own = [cls for cls in getattr(safe_trainers, name).__mro__ if cls.__module__.startswith("safe_trainers")]
    assert len(own) <= house.TARGETS["own classes in the MRO"]


def test_a_circle_of_imports_is_found():
    graph = {"p.a": {"p.b"}, "p.b": {"p.c"}, "p.c": {"p.a", "p.d"}, "p.d": set()}
    assert house.circles(graph) == [["p.a", "p.b", "p.c"]]
    assert house.circles(graph | {"p.c": {"p.d"}}) == []


def test_an_import_inside_a_function_counts_and_one_for_type_checkers_does_not():
    trees = {
        "safe_trainers.core.a": ast.parse("def f():\n    from ..policy.b import g\n"),
        "safe_trainers.policy.b": ast.parse("if TYPE_CHECKING:\n    from ..core.a import f\n"),
    }
    assert house.imports(trees) == {
        "safe_trainers.core.a": {"safe_trainers.policy.b"},
        "safe_trainers.policy.b": set(),
    }
