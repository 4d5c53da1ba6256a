"""The families of the evidence: complete, offline, and trained by stock TRL in float32, or said why not."""

from __future__ import annotations

import functools
import math
import tempfile
from pathlib import Path

import cells
import pytest
import torch
import transformers
from cells import Cell
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForImageTextToText, AutoProcessor

from benchmarks import families
from benchmarks.families import sounds
from safe_trainers import tiny
from safe_trainers.tiny.shapes import draw_images


OWN = [family for family in families.FAMILIES if family not in tiny.FAMILIES]
NAMED = {
    "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "smolvlm", "idefics3", "llava", "llava_next", "llava_onevision", "gemma3",
    "gemma4", "paligemma", "internvl", "lfm2_vl", "mllama", "pixtral", "aria", "llama4",
}  # fmt: skip
SLICE = {("gemma4", "sft"), ("lfm2_vl", "grpo"), ("mistral3", "rloo"), ("qwen2_audio", "sft"), ("mllama", "grpo")}
"""Cells of the default suite; the others run with `make matrix`."""


@functools.cache
def saved(family: str) -> Path:
    return families.save(family, Path(_root().name) / family, seed=1)


@functools.cache
def _root() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="safe-trainers-families-")


def media_inputs(family: str, processor, seed: int, each: int = 1) -> dict[str, torch.Tensor]:
    """Inputs of two prompts, with pictures or sounds of `seed` where the family takes them."""
    modality = families.family_spec(family).modality
    medium = [] if modality == "text" else [{"type": modality}] * each
    content = [*medium, {"type": "text", "text": tiny.QUESTION}]
    text = [processor.apply_chat_template([{"role": "user", "content": content}], tokenize=False)] * 2
    options = {"text": text, "padding": True, "return_tensors": "pt"}
    if modality == "image":
        drawn, _ = draw_images(2 * each, seed=seed)
        options["images"] = [drawn[:each], drawn[each:]]
    if modality == "audio":
        options["audio"] = sounds.tones(2 * each, seed=seed)[0]
    return dict(processor(**options))


def logits(model, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        return model(**inputs).logits


def load(family: str):
    if families.family_spec(family).modality == "image":
        return AutoModelForImageTextToText.from_pretrained(saved(family))
    return getattr(transformers, type(families.build_model(family)).__name__).from_pretrained(saved(family))


def test_the_families_cover_what_the_evidence_is_about() -> None:
    multimodal = set(families.VISION_FAMILIES + families.AUDIO_FAMILIES) - {"nocast"}
    assert len(multimodal) >= 24
    assert multimodal >= NAMED
    assert len(families.AUDIO_FAMILIES) >= 1
    assert set(families.TEXT_FAMILIES) == {"text", "gpt_oss", "gemma2"}
    assert set(families.FAMILIES) >= set(tiny.FAMILIES)
    with pytest.raises(ValueError, match="Did you mean 'gemma4'"):
        families.build_model("gemma5")


@pytest.mark.parametrize("family", OWN)
def test_family_saves_loads_and_looks_at_its_media(family: str) -> None:
    built = families.build_model(family, seed=1)
    assert sum(parameter.numel() for parameter in built.parameters()) < 400_000
    model, processor = load(family), AutoProcessor.from_pretrained(saved(family))
    assert type(model) is type(built)
    assert type(processor) is type(families.build_processor(family))
    inputs = media_inputs(family, processor, seed=3)
    before = logits(built, media_inputs(family, families.build_processor(family), seed=3))
    assert torch.isfinite(before).all()
    assert torch.equal(logits(model, inputs), before)
    if families.family_spec(family).modality != "text":
        other = media_inputs(family, processor, seed=4)
        assert torch.equal(other["input_ids"], inputs["input_ids"])
        assert not torch.equal(logits(model, other)[:, -1], before[:, -1])


def test_seeds_decide_the_weights_and_leave_the_global_state_alone() -> None:
    before = torch.random.get_rng_state()
    heads = [families.build_model("qwen2_vl", seed=seed).lm_head.weight for seed in (0, 0, 1)]
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], heads[2])
    assert torch.equal(torch.random.get_rng_state(), before)
    assert {p.dtype for p in families.build_model("gemma4", dtype="bfloat16").parameters()} == {torch.bfloat16}


def stock_losses(family: str, task: str, beta: float = 0.0) -> list[float]:
    """Losses and norms of gradients of two steps of the stock trainer in float32."""
    torch.manual_seed(0)
    cell = Cell(family, task, "fp32", None, beta=beta)
    rewards = {} if task == "sft" else {"reward_funcs": cells.token_reward}
    options = cells.settings(cell, **families.settings(task, family))
    trainer = cells.STOCK[task](
        model=str(saved(family)),
        args=cells.PLAIN[task](**options, model_init_kwargs={"dtype": "float32"}),
        **families.trainer_inputs(task, family),
        **rewards,
    )
    trainer.train()
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    return [value for entry in log for value in (entry["loss"], entry["grad_norm"])]


@pytest.mark.parametrize(
    ("family", "task"),
    [
        pytest.param(family, task, marks=() if (family, task) in SLICE else pytest.mark.matrix)
        for family in families.FAMILIES
        for task in families.TASKS
    ],
)
def test_stock_trains_it_in_float32_or_the_family_says_why_not(family: str, task: str) -> None:
    betas = (0.0, 0.1) if task == "grpo" and (family, task) not in SLICE else (0.0,)
    for beta in betas:
        reason = families.family_spec(family).why_not(task, scoring=beta > 0)
        if reason is None:
            found = stock_losses(family, task, beta)
            assert len(found) == 4
            assert all(map(math.isfinite, found))
            assert max(found[1::2]) > 0
            continue
        with pytest.raises((AttributeError, TypeError, ValueError)) as error:
            stock_losses(family, task, beta)
        assert reason.split("; ")[0] in str(error.value)
        cells.reset_autocast()


def rollout_mismatch(family: str) -> float:
    """The largest difference, in nats, between log-probabilities of the sampler and of the safe trainer in float32."""
    torch.manual_seed(0)
    options = cells.settings(Cell(family, "grpo", "fp32", None), steps=1)
    trainer = cells.SAFE["grpo"](
        model=str(saved(family)),
        args=cells.SAFE_CONFIG["grpo"](**options, model_init_kwargs={"dtype": "float32"}),
        reward_funcs=cells.token_reward,
        **families.trainer_inputs("grpo", family),
    )
    trainer.train()
    return next(e["precision/logp_mismatch_max"] for e in trainer.state.log_history if "loss" in e)


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=() if family == "aya_vision" else pytest.mark.matrix)
        for family in families.FAMILIES
        if families.family_spec(family).why_not("grpo") is None
    ],
)
def test_what_is_sampled_is_scored_in_every_family(family: str) -> None:
    """`tests/rollout/test_scoring_inputs.py` shows that stock trainers fail where `wrong_in_stock` says so."""
    assert rollout_mismatch(family) < 1e-5


@pytest.mark.matrix
def test_answers_see_their_own_future_where_the_family_says_so() -> None:
    """PaliGemma's processor gives every token of a conversation that TRL fine-tunes on 0, a prompt's token type."""
    model, processor = families.build_model("paligemma"), families.build_processor("paligemma")
    inputs = media_inputs("paligemma", processor, seed=3)
    assert not inputs["token_type_ids"].any()
    changed = {**inputs, "input_ids": inputs["input_ids"].clone()}
    changed["input_ids"][:, -1] = processor.tokenizer.eos_token_id
    assert not torch.equal(logits(model, changed)[:, -2], logits(model, inputs)[:, -2])
    assert "sft" in families.family_spec("paligemma").wrong_in_stock


@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=() if f == "gemma4" else pytest.mark.matrix) for f in families.FAMILIES]
)
def test_lora_targets_are_layers_that_peft_takes(family: str) -> None:
    targets = families.family_spec(family).lora_targets
    model = get_peft_model(
        families.build_model(family),
        LoraConfig(r=2, target_modules=targets if isinstance(targets, str) else [*targets]),
    )
    assert model.get_nb_trainable_parameters()[0] > 0
