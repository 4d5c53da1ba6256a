"""The tiny models, processors and picture task: complete, offline, reproducible, and breaking where they should."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

from safe_trainers import tiny
from safe_trainers.tiny.grammar import ANSWERS
from safe_trainers.tiny.shapes import draw_images, split_of


TRAIN, HELDOUT = "train", "heldout"


def picture_inputs(processor, n: int = 2, images: int = 1) -> dict[str, torch.Tensor]:
    """Inputs of `n` prompts with `images` pictures each."""
    drawn, _ = draw_images(n * images, seed=3)
    content = [{"type": "image"}] * images + [{"type": "text", "text": tiny.QUESTION}]
    text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    groups = [drawn[i * images : (i + 1) * images] for i in range(n)]
    return dict(processor(images=groups, text=[text] * n, padding=True, return_tensors="pt"))


@pytest.mark.parametrize("family", tiny.VISION_FAMILIES)
def test_family_saves_reloads_and_generates(family: str, tmp_path: Path) -> None:
    folder = tiny.save(family, tmp_path / family, seed=1)
    model = AutoModelForImageTextToText.from_pretrained(folder)
    processor = AutoProcessor.from_pretrained(folder)
    assert model.dtype == torch.float32
    assert sum(p.numel() for p in model.parameters()) < 400_000
    built = tiny.build_model(family, seed=1).state_dict()
    assert all(torch.equal(value, built[name]) for name, value in model.state_dict().items())
    for images in (1, 2):
        inputs = picture_inputs(processor, images=images)
        assert inputs["pixel_values"].dtype == torch.float32
        ids = model.generate(**inputs, max_new_tokens=2, do_sample=False)
        new = ids[:, inputs["input_ids"].shape[1] :]
        assert 1 <= new.shape[1] <= 2
        assert not set(new.flatten().tolist()) & set(model.generation_config.suppress_tokens) - {
            processor.tokenizer.pad_token_id
        }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_gpt_oss_has_fused_experts_and_declares_its_norms(dtype: str, tmp_path: Path) -> None:
    folder = tiny.save("gpt_oss", tmp_path / "gpt_oss", seed=1, dtype=dtype)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    experts = model.model.layers[0].mlp.experts
    assert experts.gate_up_proj.ndim == experts.down_proj.ndim == 3
    assert not list(experts.children())
    wide = {name for name, p in model.named_parameters() if p.dtype != getattr(torch, dtype)}
    norms = {name for name, _ in model.named_parameters() if "norm" in name}
    assert wide == (norms if dtype == "float16" else set())  # what `_keep_in_fp32_modules` of the family says
    built = tiny.build_model("gpt_oss", seed=1, dtype=dtype).state_dict()
    assert all(torch.equal(value, built[name]) for name, value in model.state_dict().items())
    inputs = AutoTokenizer.from_pretrained(folder)(["what is it?"], return_tensors="pt")
    ids = model.generate(**inputs, max_new_tokens=3, do_sample=False)
    assert not set(ids[0, inputs["input_ids"].shape[1] :].tolist()) & set(model.generation_config.suppress_tokens)


@pytest.mark.parametrize("family", tiny.VISION_FAMILIES)
def test_the_pictures_reach_the_text_model(family: str) -> None:
    model, processor = tiny.build_model(family), tiny.build_processor(family)
    inputs = picture_inputs(processor)
    with torch.no_grad():
        logits = model(**inputs).logits[:, -1]
    assert not torch.equal(logits[0], logits[1])


def test_saving_replaces_a_checkpoint_but_nothing_else(tmp_path: Path) -> None:
    first = tiny.save("text", tmp_path / "model", seed=0)
    weights = (first / "model.safetensors").read_bytes()
    assert tiny.save("text", tmp_path / "model", seed=1) == first
    assert (first / "model.safetensors").read_bytes() != weights
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    with pytest.raises(FileExistsError):
        tiny.save("text", tmp_path / "mine")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "model"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtypes(dtype: torch.dtype) -> None:
    model = tiny.build_model("llava", dtype=dtype)
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert tiny.build_reward_model(dtype=dtype).score.weight.dtype == dtype


def test_seeds_decide_the_weights_and_leave_the_global_state_alone() -> None:
    before = torch.random.get_rng_state()
    weights = [tiny.build_model("aria", seed=seed).lm_head.weight for seed in (0, 0, 1)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("family", ["aria", "nocast", "llama4"])
def test_towers_that_do_not_cast_crash_with_half_weights(family: str) -> None:
    model = tiny.build_model(family, dtype=torch.bfloat16)
    inputs = picture_inputs(tiny.build_processor(family))
    with pytest.raises(RuntimeError, match=r"(?i)type"):
        model(**inputs)
    inputs["pixel_values"] = inputs["pixel_values"].to(torch.bfloat16)
    assert model(**inputs).logits.dtype == torch.bfloat16


def test_nocast_crashes_at_the_merge_under_autocast() -> None:
    model, inputs = tiny.build_model("nocast"), picture_inputs(tiny.build_processor("nocast"))
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(RuntimeError, match="Index put requires"):
        model(**inputs)


def test_any_text_survives_the_tokenizer() -> None:
    tokenizer = tiny.build_tokenizer("llava")
    for text in ["two red squares", "Größe: 漢字\n\t{x: 1}  🙂", "reddish squares?!", ""]:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.unk_token_id not in ids
        assert tokenizer.decode(ids) == text
    for answer in ANSWERS:
        assert len(tokenizer(answer, add_special_tokens=False)["input_ids"]) == 3


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_the_prompt_is_a_prefix_of_the_conversation(family: str) -> None:
    processor = tiny.build_processor(family)
    prompt = [{"role": "user", "content": [{"type": "text", "text": tiny.QUESTION}]}]
    answer = [{"role": "assistant", "content": [{"type": "text", "text": ANSWERS[0]}]}]
    start = processor.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
    whole = processor.apply_chat_template(prompt + answer, tokenize=False)
    tokenizer = getattr(processor, "tokenizer", processor)
    assert whole == start + ANSWERS[0] + tokenizer.eos_token


def test_suppressed_tokens_are_the_markers() -> None:
    processor = tiny.build_processor("qwen2_5_vl")
    suppressed = tiny.generation_kwargs(processor)["suppress_tokens"]
    tokenizer = processor.tokenizer
    markers = tokenizer.convert_tokens_to_ids(
        ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<pad>", "<|user|>"]
    )
    assert set(markers) <= set(suppressed)
    assert tokenizer.eos_token_id not in suppressed
    assert not set(suppressed) & {i for a in ANSWERS for i in tokenizer(a)["input_ids"]}


def test_train_and_heldout_pictures_are_disjoint() -> None:
    images = {split: [i.tobytes() for i in draw_images(240, seed=0, split=split)[0]] for split in (TRAIN, HELDOUT)}
    assert not set(images[TRAIN]) & set(images[HELDOUT])
    for split, contents in images.items():
        assert len(set(contents)) == 240
        assert {split_of(content) for content in contents} == {split}


def test_pictures_are_deterministic_balanced_and_shown() -> None:
    first, again, other = (tiny.prompt_dataset(48, seed) for seed in (0, 0, 1))
    assert [i.tobytes() for i in first["image"]] == [i.tobytes() for i in again["image"]]
    assert [i.tobytes() for i in first["image"]] != [i.tobytes() for i in other["image"]]
    assert first[0]["image"].size == (32, 32)
    assert first[0]["image"].mode == "RGB"
    assert sorted(first["solution"]) == sorted([*ANSWERS, *ANSWERS])
    assert tiny.constant_baseline(first) == pytest.approx(1 / 24)
    assert max(sum(tiny.attribute_match([a] * 48, first["solution"])) / 48 for a in ANSWERS) < 0.5
    assert tiny.constant_baseline(tiny.prompt_dataset(100)) < 0.3


def test_shuffling_moves_the_pictures_only() -> None:
    plain, shuffled = draw_images(96, seed=0), draw_images(96, seed=0, shuffle_images=True)
    assert plain[1] == shuffled[1]
    assert sorted(i.tobytes() for i in plain[0]) == sorted(i.tobytes() for i in shuffled[0])
    truth = dict(zip((i.tobytes() for i in plain[0]), plain[1], strict=True))
    agree = [truth[i.tobytes()] == a for i, a in zip(*shuffled, strict=True)]
    assert sum(agree) / len(agree) < 0.2


def test_sft_and_preference_rows() -> None:
    row = tiny.sft_dataset(24)[0]
    assert set(row) == {"prompt", "completion", "image"}
    assert row["completion"][0]["content"] in ANSWERS
    sides = [tiny.preference_dataset(200, seed=0, split=split) for split in (TRAIN, HELDOUT)]
    chosen = [{row["chosen"][-1]["content"] for row in side} for side in sides]
    rejected = {row["rejected"][-1]["content"] for side in sides for row in side}
    assert not chosen[0] & chosen[1]
    assert not (chosen[0] | chosen[1]) & rejected


def test_rewards() -> None:
    right = "two red squares"
    said = ["two red squares", " Two RED squares \n", [{"role": "assistant", "content": right}], "two red square"]
    assert tiny.exact_match(said, [right] * 4) == [1.0, 1.0, 1.0, 0.0]
    said = ["two red squares", "two red square", "two blue", "red two squares", "", "two red squares red", []]
    expected = [1, 2 / 3, 1 / 3, 1 / 3, 0, 0, 0]
    assert tiny.attribute_match(said, [right] * 7) == pytest.approx(expected)


@pytest.mark.parametrize(
    "malformed",
    [None, 3, [], [None], [{}], [{"role": "assistant"}], [{"content": None}], {"content": [{"type": "image"}]}],
)
def test_malformed_completions_earn_nothing(malformed: object) -> None:
    assert tiny.exact_match([malformed], ["one red circle"], prompts=None) == [0.0]
    assert tiny.attribute_match([malformed], ["one red circle"], trainer_state=None) == [0.0]


def test_evaluation_restores_the_mode_and_works_with_half_weights() -> None:
    model, processor = tiny.build_model("nocast", dtype="bfloat16"), tiny.build_processor("nocast")
    model.train()
    model.model.vision_tower.eval()
    assert 0 <= tiny.exact_match_rate(model, processor, tiny.prompt_dataset(8), batch_size=3) <= 1
    assert model.training
    assert model.lm_head.training
    assert not model.model.vision_tower.training
    tokenizer = tiny.build_tokenizer("text")
    accuracy = tiny.preference_accuracy(tiny.build_reward_model(), tokenizer, tiny.preference_dataset(32))
    assert 0.1 < accuracy < 0.9


def test_errors_list_the_names_and_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"'llava'.*Did you mean 'llava'"):
        tiny.build_model("lava")
    with pytest.raises(ValueError, match="Did you mean 'heldout'"):
        tiny.prompt_dataset(4, split="held-out")
    with pytest.raises(ValueError, match="Did you mean 'bfloat16'"):
        tiny.build_model("text", dtype="bf16")
    with pytest.raises(ValueError, match="2 completions for 1 solutions"):
        tiny.exact_match(["a", "b"], ["c"])
    with pytest.raises(ValueError, match="at least 1"):
        tiny.prompt_dataset(0)


def test_importing_is_light() -> None:
    code = "import sys; from safe_trainers import tiny; tiny.FAMILIES; dir(tiny); print(*sys.modules)"
    out = subprocess.run(
        [sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2], capture_output=True, text=True
    )
    assert not {"torch", "transformers"} & set(out.stdout.split())
    assert "safe_trainers.tiny.families" in out.stdout.split()


def test_every_public_name_exists() -> None:
    assert all(getattr(tiny, name) is not None for name in tiny.__all__)
    with pytest.raises(AttributeError):
        _ = tiny.nothing_of_the_kind


def test_a_biased_answer_names_the_first_colour_and_keeps_the_rest() -> None:
    plain, biased = (tiny.sft_dataset(200, seed=3, bias=bias) for bias in (0.0, 0.6))
    answers = [[row[0]["content"].split() for row in made["completion"]] for made in (plain, biased)]
    said = list(zip(*answers, strict=True))
    assert all((a[0], a[2]) == (b[0], b[2]) for a, b in said)
    changed = [(a[1], b[1]) for a, b in said if a[1] != b[1]]
    assert {colour for _, colour in changed} == {"red"}
    # 60 % are biased, and a quarter of those named the colour anyway.
    assert 0.35 < len(changed) / len(said) < 0.55
    with pytest.raises(ValueError, match=r"bias must be between 0 and 1, got 1\.5"):
        tiny.sft_dataset(2, bias=1.5)
