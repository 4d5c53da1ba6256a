"""Which sampling settings are corrected, and which are refused, from plain values."""

import pytest
import torch

from safe_trainers.core.errors import PrecisionError
from safe_trainers.policy.sampling import changed_settings, uncorrectable
from safe_trainers.rollout.vllm import check_prompts


VLLM = {"use_vllm": True, "vllm_importance_sampling_correction": True, "temperature": 0.9}


@pytest.mark.parametrize(
    ("changes", "given"),
    [
        ({"top_k": 10}, ["top_k=10"]),
        ({"top_p": 0.8, "min_p": 0.05}, ["top_p=0.8", "min_p=0.05"]),
        ({"repetition_penalty": 1.1}, ["repetition_penalty=1.1"]),
        ({"generation_kwargs": {"presence_penalty": 0.5}}, ["generation_kwargs={'presence_penalty': 0.5}"]),
        ({"generation_kwargs": {"logit_bias": {3: 1.0}}}, ["generation_kwargs={'logit_bias': {3: 1.0}}"]),
        ({"top_k": 0, "generation_kwargs": {"top_k": 5}}, ["generation_kwargs={'top_k': 5}"]),
        ({}, []),
        ({"top_k": 0, "top_p": 1.0, "min_p": None, "repetition_penalty": 1.0}, []),
        ({"top_k": 5, "generation_kwargs": {"top_k": 0}}, []),  # overridden
        ({"generation_kwargs": {"temperature": 0.9, "seed": 3, "logit_bias": {}}}, []),
    ],
)
def test_settings_that_truncate_are_found_and_not_refused(changes, given):
    assert [setting for setting, _ in changed_settings({**VLLM, **changes}.get)] == given
    assert uncorrectable({**VLLM, **changes}.get) is None


@pytest.mark.parametrize(
    ("changes", "given"),
    [
        ({"generation_kwargs": {"temperature": 0.7}}, "generation_kwargs={'temperature': 0.7} with"),
        ({"generation_kwargs": {"min_tokens": 4}}, "generation_kwargs={'min_tokens': 4} with"),
        ({"vllm_structured_outputs_regex": "[a-z]+"}, "vllm_structured_outputs_regex='[a-z]+' with"),
    ],
)
def test_what_cannot_be_corrected_is_refused(changes, given):
    problem = uncorrectable({**VLLM, **changes}.get)
    assert problem.id == "truncated-sampling-with-correction"
    assert problem.what.startswith(given)
    assert "or write `vllm_importance_sampling_correction=False`" in str(problem.fix)


def test_penalties_of_one_turn_are_refused_with_tools():
    get = {**VLLM, "generation_kwargs": {"presence_penalty": 0.5}}.get
    assert uncorrectable(get) is None
    assert "presence_penalty" in uncorrectable(get, tools=True).what


@pytest.mark.parametrize(
    "changes",
    [
        {"vllm_importance_sampling_correction": False},
        {"use_vllm": False},
        {"vllm_importance_sampling_correction": None},  # RLOO has no correction
    ],
)
def test_without_the_correction_nothing_is_refused(changes):
    assert uncorrectable({**VLLM, "vllm_structured_outputs_regex": "a", **changes}.get) is None


@pytest.mark.parametrize(
    ("computed", "message"),
    [
        ([[1, 2, 3], [4, 4, 4, 5]], "prompt 1 with 2 images"),
        ([[1, 2, 3], [4, 4, 4, 5]], "from position 1 on, 2 token ids were sent (... [5] ...) and 4 were computed"),
        ([[1, 2], [4, 5]], "from position 2 on, 3 token ids were sent (... [3] ...) and 2 were computed (... [] ...)"),
        ([[1, 2, 3]], "2 prompts were sent and 1 were returned"),
    ],
)
def test_a_prompt_that_vllm_computed_otherwise_is_an_error(computed, message):
    with pytest.raises(PrecisionError, match="vllm-computed-another-prompt") as caught:
        check_prompts([[1, 2, 3], [4, 5]], computed, [[], ["an image", "another"]])
    assert message in str(caught.value)


@pytest.mark.parametrize("container", [list, tuple, torch.tensor])
def test_prompts_are_compared_in_any_container(container):
    assert check_prompts([[1, 2, 3]], [container([1, 2, 3])], None) is None
    assert check_prompts([container([1, 2, 3])], [[1, 2, 3]], None) is None
    with pytest.raises(PrecisionError, match="from position 2 on"):
        check_prompts([container([1, 2, 3])], [container([1, 2, 4])], None)
