"""The one list of names of foreign objects that are replaced."""

import ast
import copy
import functools
import pickle
from pathlib import Path
from types import MethodType, ModuleType, SimpleNamespace

import pytest

import safe_trainers
from safe_trainers.core import patches
from safe_trainers.core.patches import PATCHES, patched, replace, replaced_by, restore


PACKAGE = Path(safe_trainers.__file__).parent


def used():
    """The ids with which something is replaced, wherever that is."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and node.value in PATCHES and path.name != "patches.py":
                found.add(node.value)
    return found


def test_every_patch_is_used():
    assert used() == set(PATCHES)


@pytest.mark.parametrize("patch", PATCHES.values(), ids=PATCHES)
def test_every_patch_says_what_for_how_long_and_why(patch):
    assert patch.owner
    assert patch.names
    assert patch.lasts in {patches.CONSTRUCTION, patches.TRAINING, patches.LIFETIME, patches.BLOCK}
    assert len(patch.why) > 20


def test_a_name_that_is_not_listed_cannot_be_replaced():
    with pytest.raises(KeyError):
        replace("no-such-patch", SimpleNamespace(), "LLM", None)
    with pytest.raises(KeyError, match="does not list 'forward'"):
        replace("vllm-engine", SimpleNamespace(), "forward", None)


@pytest.mark.parametrize("had", [True, False])
def test_a_block_restores_what_was_there_however_it_ends(had):
    module = ModuleType("upstream")
    if had:
        module.LLM = "upstream's"
    with patched("vllm-engine", module, LLM="ours"):
        assert module.LLM == "ours"
    assert getattr(module, "LLM", None) == ("upstream's" if had else None)

    def fail():
        with patched("vllm-engine", module, LLM="ours"):
            raise RuntimeError("in between")

    with pytest.raises(RuntimeError, match="in between"):
        fail()
    assert hasattr(module, "LLM") == had
    assert getattr(module, "LLM", None) == ("upstream's" if had else None)


def test_an_instance_gets_the_method_of_its_class_again():
    class Generation:
        def sync_weights(self):
            return "upstream's"

    one, other = Generation(), Generation()
    replace("weight-sync", one, "sync_weights", lambda: "ours")
    assert (one.sync_weights(), other.sync_weights()) == ("ours", "upstream's")
    assert restore(one, "sync_weights")
    assert one.sync_weights() == "upstream's"
    assert not restore(one, "sync_weights")


class Layer:
    """Has the methods that patches of modules replace."""

    def forward(self):
        return [self]


def wrapping(owner, name="forward"):
    """A bound method that adds its owner to what the current method returns."""
    function = getattr(getattr(owner, name), "__func__")  # noqa: B009

    @functools.wraps(function)
    def wrapper(self):
        return [self, *function(self)]

    return MethodType(wrapper, owner)


def test_replacements_of_replacements_are_restored_together_also_in_a_deepcopy():
    layer = Layer()
    replace("operations", layer, "forward", wrapping(layer))
    replace("float32-module", layer, "forward", wrapping(layer))
    twin = copy.deepcopy(layer)
    for one in (layer, twin):
        assert one.forward() == [one, one, one]
        assert replaced_by(one, "forward") == ["float32-module", "operations"]
    assert restore(twin, "forward")
    assert twin.forward() == [twin]
    assert layer.forward() == [layer, layer, layer]
    assert restore(layer, "forward")
    assert "forward" not in vars(layer)
    assert not restore(layer, "forward")


def test_what_others_have_replaced_stays():
    layer = Layer()
    layer.forward = wrapping(layer)
    replace("operations", layer, "forward", wrapping(layer))
    ours = layer.forward
    layer.forward = wrapping(layer)  # `functools.wraps` copies attributes of functions
    assert replaced_by(layer, "forward") == []
    assert not restore(layer, "forward")
    assert len(layer.forward()) == 4
    layer._original_forward = ours
    assert replaced_by(layer, "forward", kept_as="_original_forward") == ["operations"]
    layer.forward = ours
    assert restore(layer, "forward")
    assert layer.forward() == [layer, layer]


def test_an_absent_attribute_stays_absent_after_pickling():
    layer = Layer()
    replace("operations", layer, "forward", None)
    twin = pickle.loads(pickle.dumps(layer))
    assert restore(twin, "forward")
    assert "forward" not in vars(twin)
