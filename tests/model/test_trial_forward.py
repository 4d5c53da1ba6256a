"""What a live model is asked at construction, and how its answer is read."""

from pathlib import Path

import cells
import pytest
import torch
from transformers import AutoModelForCausalLM

from safe_trainers import tiny
from safe_trainers.model.trial_forward import sample_inputs, trial_error
from safe_trainers.numerics.activations import extremes


ROOT = Path(__file__).parents[2]


class Joining(torch.nn.Module):
    """A norm that puts two parts together, as towers do with patches; autocast refuses the other half format there."""

    def forward(self, hidden):
        width = hidden.shape[-1] // 2
        return torch.cat([hidden[..., :width].to(torch.bfloat16), hidden[..., width:].to(torch.bfloat16)], dim=-1)


def test_an_error_of_autocast_about_dtypes_is_one():
    model = AutoModelForCausalLM.from_pretrained(cells.folder("text"), dtype=torch.bfloat16)
    model.model.norm = Joining()
    assert trial_error(model, None, None) is None
    assert trial_error(model, None, "bfloat16") is None
    assert "ScalarType" in trial_error(model, None, "float16")


def test_extremes_are_found_under_any_autocast():
    values = torch.tensor([1.0, -2.0, 0.5], dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.float16):
        with pytest.raises(RuntimeError, match="ScalarType"):
            torch.stack([values, values])
        assert extremes(values).tolist() == [-2.0, 1.0]


@pytest.mark.parametrize(
    ("family", "media"), [("text", []), ("llava", ["pixel_values"]), ("qwen2_audio", ["input_features"])]
)
def test_a_question_has_what_the_processor_takes(family, media, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import families

    if family in families.ABSENT:
        pytest.skip(families.ABSENT[family])
    build = tiny.build_processor if family in tiny.FAMILIES else families.build_processor
    inputs = sample_inputs(build(family))
    assert [name for name, value in inputs.items() if value.is_floating_point()] == media
    assert {value.shape[0] for value in inputs.values()} == {1}
