"""The lists of refusals and warnings, and the error tree."""

import ast
import pickle
import string
from pathlib import Path

import pytest

import safe_trainers
from safe_trainers.core.errors import REFUSALS, WARNINGS, PrecisionError, RecipeError, nearest, refuse


PACKAGE = Path(safe_trainers.__file__).parent


def _ids_used() -> set[str]:
    """Every string of the package outside the lists themselves."""
    return {
        node.value
        for path in PACKAGE.rglob("*.py")
        if path.name != "messages.py"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


def _ids_made(function: str) -> set[str]:
    """The first argument of every call of `function` in the package."""
    made = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == function:
                made |= {a.value for a in node.args[:1] if isinstance(a, ast.Constant) and isinstance(a.value, str)}
    return made


def test_the_list_of_refusals_is_the_committed_one():
    # A new refusal is a decision: something that was built before is not built any more. It is made here, too.
    assert set(REFUSALS) == {
        "unknown-dtype",
        "ranks-differ",
        "checkpoint-on-another-machine",
        "two-load-dtypes",
        "unknown-choice",
        "truncation-cannot-be-corrected",
        "vllm-finds-no-place",
        "vllm-keeps-image-features",
        "vllm-ignores-the-adapter",
        "another-optimizer",
        "rewards-overflow",
        "gradients-not-finite",
        "no-step-taken",
        "vllm-serves-another-model",
        "rollout-cannot-be-corrected",
        "vllm-prepares-prompts-otherwise",
        "vllm-quantises-its-cache",
        "precision-contradicts-flag",
        "half-weights-under-other-precision",
        "fused-head-is-not-float32",
        "two-half-formats",
        "bf16-is-emulated",
        "flash-attention-needs-half",
        "half-trainables-under-loss-scaling",
        "media-cannot-compute",
        "mixed-weights-cannot-meet",
        "media-cast-to-packed-dtype",
        "weights-overflow",
        "quantised-weights-overflow-fp16",
        "repacked-in-evaluation",
        "dora-on-int8-on-cpu",
        "quantised-layers-do-not-train",
        "bitsandbytes-missing",
        "quantised-head",
        "bnb-compute-dtype-contradicts",
        "accelerator-disagrees",
        "launched-with-another-precision",
        "deepspeed-scales-the-loss",
        "deepspeed-casts-every-weight",
        "fsdp1-flattens-one-dtype",
        "adapter-dtype-cannot-be-scaled",
        "adapters-not-captured",
        "infinite-rewards",
        "reward-weights-not-finite",
        "importance-weights-not-finite",
        "loss-scale-out-of-range",
        "steps-out-of-range",
        "optimizer-steps-skipped",
        "activations-overflow-fp16",
        "weights-not-finite",
        "rollout-not-finite",
        "no-such-module",
        "not-a-list-of-patterns",
        "learning-rate-out-of-range",
        "adapter-does-not-fit",
        "not-a-peft-config",
        "int8-cannot-compute-in-float32",
        "no-complete-checkpoint",
        "checkpoint-damaged",
        "checkpoint-of-another-recipe",
        "checkpoint-of-other-weights",
        "save-dtype-overflows",
        "nothing-to-merge",
        "adapter-cannot-be-merged",
        "merged-weights-overflow",
        "output-not-empty",
        "output-is-working-folder",
        "nothing-to-compare",
        "merge-not-kept",
        "no-routers",
        "routes-not-reached",
        "decode-cannot-be-compiled",
        "routes-not-recorded",
        "routes-do-not-fit",
        "share-out-of-range",
        "continuous-batching-casts-packed-weights",
        "vllm-refuses-fp16",
        "vllm-server-computes-otherwise",
        "vllm-holds-packed-weights",
        "fsdp-sends-packed-weights",
        "truncated-sampling-with-correction",
        "vllm-computed-another-prompt",
    }


@pytest.mark.parametrize(("function", "listed"), [("refuse", REFUSALS), ("warn", WARNINGS)])
def test_every_listed_finding_is_used_and_every_used_one_listed(function, listed):
    assert _ids_made(function) <= set(listed) <= _ids_used()


@pytest.mark.parametrize("finding", [*REFUSALS.values(), *WARNINGS.values()], ids=lambda f: f.id)
def test_templates_are_complete(finding):
    names = {name for text in (finding.why, finding.fix) for _, name, _, _ in string.Formatter().parse(text) if name}
    filled = {name.removesuffix("!r"): "x" for name in names}
    assert "{" not in finding.why.format(**filled).replace("{'", "").replace("'}", "")
    assert finding.fix


def test_an_unlisted_refusal_cannot_be_made():
    with pytest.raises(KeyError):
        refuse("because-i-say-so", "anything")


def test_errors_survive_pickling():
    error = PrecisionError([refuse("flash-attention-needs-half", "attn_implementation='flash_attention_2'")])
    copied = pickle.loads(pickle.dumps(error))
    assert str(copied) == str(error)
    assert copied.problems == error.problems


def test_recipe_errors_hold_all_problems():
    assert [problem.what for problem in RecipeError(["one", "two"]).problems] == ["one", "two"]
    assert str(RecipeError("one")) == "one"


def test_errors_are_what_a_reader_would_catch():
    assert issubclass(PrecisionError, ValueError)
    assert issubclass(safe_trainers.ContractError, TypeError)
    assert issubclass(safe_trainers.UnsupportedVersionError, ImportError)


@pytest.mark.parametrize(
    ("value", "expected"),
    [("learning_rte", "learning_rate"), ("Learning-Rate", "learning_rate"), ("zzz", None), ("bf_16", "bf16")],
)
def test_nearest(value, expected):
    assert nearest(value, ["learning_rate", "bf16", "fp16", "max_steps"]) == expected
