"""Where the towers are found, and how dtypes are counted, on real models of every embedded family."""

import json

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from safe_trainers import tiny
from safe_trainers.model.inventory import first_dtype, take_inventory
from safe_trainers.model.parts import adapter_parameters, find_parts, floating_parameters, is_quantized, unwrap


TOWERS = {
    "llava": {"vision_tower", "multi_modal_projector"},
    "aria": {"vision_tower", "multi_modal_projector"},
    "qwen2_5_vl": {"visual"},
    "smolvlm": {"vision_model", "connector"},
    "idefics3": {"vision_model", "connector"},
    "gemma3": {"vision_tower", "multi_modal_projector"},
    "llama4": {"vision_model", "multi_modal_projector"},
    "nocast": {"vision_tower", "projector"},
    "text": set(),
    "gpt_oss": set(),
}


def test_the_table_has_every_family():
    assert set(TOWERS) == set(tiny.FAMILIES)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_towers_are_found_from_structure(family):
    model = tiny.build_model(family)
    parts = find_parts(model)
    assert set(parts.towers) == TOWERS[family]
    assert parts.embeddings is model.get_input_embeddings()
    head = model.get_output_embeddings()
    text = {id(p) for p in parts.text.parameters()} | {id(p) for p in head.parameters()}
    in_towers = {id(p) for tower in parts.towers.values() for p in tower.parameters()}
    assert not text & in_towers
    # What is in neither hangs directly on a container, such as LLaVA-Next's `image_newline`.
    assert {id(p) for p in model.parameters()} == text | in_towers


def test_wrappers_are_looked_through():
    model = tiny.build_model("llava")
    wrapped = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    assert unwrap(wrapped) is model
    assert unwrap(torch.compile(model)) is model
    assert set(find_parts(wrapped).towers) == TOWERS["llava"]


def test_embeddings_that_move_are_found_again():
    """Where a search found them is kept for each model."""
    model = tiny.build_model("llava")
    before = find_parts(model)
    model.set_input_embeddings(nn.Embedding(7, 4))
    assert find_parts(model).embeddings is model.get_input_embeddings()
    assert find_parts(model).text is before.text

    wrapper = nn.Module()
    wrapper.inner = tiny.build_model("text")
    wrapper.get_input_embeddings = wrapper.inner.get_input_embeddings
    assert find_parts(wrapper).text is wrapper.inner.model
    wrapper.other = nn.Module()
    wrapper.other.inner = wrapper.inner
    del wrapper.inner
    wrapper.get_input_embeddings = wrapper.other.inner.get_input_embeddings
    found = find_parts(wrapper)
    assert found.text is wrapper.other.inner.model
    assert found.containers == (wrapper, wrapper.other, wrapper.other.inner)


def test_embeddings_inside_of_a_scripted_module_are_found_each_time():
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.layers = nn.Embedding(4, 2), nn.ModuleList([nn.Linear(2, 2)])

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.embed(ids)

    model = nn.Module()
    model.inner = torch.jit.script(Inner())
    model.get_input_embeddings = lambda: model.inner.embed
    assert find_parts(model).embeddings is find_parts(model).embeddings


def test_a_model_without_layers_under_its_embeddings_counts_as_text():
    class Flat(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(4, 2), nn.Linear(2, 4)

        def get_input_embeddings(self):
            return self.embed

        def get_output_embeddings(self):
            raise NotImplementedError

    parts = find_parts(Flat())
    assert parts.towers == {}
    assert take_inventory(nn.Linear(2, 2)).embeddings is None


def test_census_counts_every_element_once():
    model = get_peft_model(tiny.build_model("aria", dtype=torch.bfloat16), LoraConfig(r=4, target_modules=["q_proj"]))
    census = take_inventory(model)
    base = sum(p.numel() for n, p in model.named_parameters() if "lora_" not in n)
    lora = sum(p.numel() for n, p in model.named_parameters() if "lora_" in n)
    assert census.elements["weights"] == {"bfloat16": base}
    assert census.elements["adapters"] == {"float32": lora}
    assert census.elements["quantized"] == {}
    assert sum(census.elements["buffers"].values()) == sum(b.numel() for b in model.buffers())
    assert census.trainable == {"float32": lora}
    assert census.weights == {"bfloat16"}
    assert census.embeddings == "bfloat16"
    assert {tower.name: tower.dtype for tower in census.towers} == dict.fromkeys(TOWERS["aria"], "bfloat16")
    assert json.loads(json.dumps(census.to_dict()))["trainable"] == {"float32": lora}


def test_a_mixed_tower_reports_its_first_weight_and_all_dtypes():
    model = tiny.build_model("llava", dtype=torch.bfloat16)
    model.model.multi_modal_projector.float()
    census = take_inventory(model)
    by_name = {tower.name: tower for tower in census.towers}
    assert by_name["multi_modal_projector"].dtypes == {"float32"}
    assert by_name["vision_tower"].dtypes == {"bfloat16"}
    assert census.weights == {"bfloat16", "float32"}
    assert census.text == {"bfloat16"}


def test_census_reads_meta_tensors_and_leaves_the_model_alone():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3), nn.Embedding(5, 3))
    assert take_inventory(model).elements["weights"] == {"float32": 12 + 15}


@pytest.fixture(scope="module")
def quantized(tmp_path_factory):
    """A 4-bit LoRA model, packed weights stored as bfloat16 the way FSDP wants it, through the real bitsandbytes."""
    pytest.importorskip("bitsandbytes")
    from transformers import AutoModelForImageTextToText, BitsAndBytesConfig

    folder = tiny.save("llava", tmp_path_factory.mktemp("quantized") / "llava")
    config = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_storage=torch.bfloat16, bnb_4bit_compute_dtype=torch.float16
    )
    model = AutoModelForImageTextToText.from_pretrained(folder, quantization_config=config, dtype=torch.float16)
    return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))


def test_no_dtype_is_taken_from_a_packed_weight(quantized):
    packed = [p for p in quantized.parameters() if type(p).__name__ == "Params4bit"]
    assert packed
    assert all(p.dtype == torch.bfloat16 and p.is_floating_point() for p in packed)  # it looks like a bf16 weight
    assert all(map(is_quantized, packed))
    census = take_inventory(quantized)
    assert census.quantization == "4bit"
    assert census.elements["quantized"] == {"bfloat16": sum(p.numel() for p in packed)}
    assert census.weights == {"float16"}
    # A naive reading takes the packed storage for the tower's dtype, or the adapter's.
    tower = find_parts(quantized).towers["vision_tower"]
    assert {p.dtype for p in tower.parameters()} == {torch.bfloat16, torch.float16, torch.float32}
    assert first_dtype(tower) == torch.float16
    assert {p.dtype for p in floating_parameters(tower)} == {torch.float16}


def test_adapters_are_what_peft_added(quantized):
    added = {id(p) for n, p in quantized.named_parameters() if "lora_" in n}
    assert {id(p) for p in adapter_parameters(quantized)} == added
    saved = get_peft_model(
        tiny.build_model("text"),
        LoraConfig(r=2, use_dora=True, target_modules=["q_proj"], modules_to_save=["lm_head"]),
    )
    added = {id(p) for n, p in saved.named_parameters() if "lora_" in n or "modules_to_save" in n}
    assert {id(p) for p in adapter_parameters(saved)} == added
    assert any("lora_magnitude" in n for n, _ in saved.named_parameters())
