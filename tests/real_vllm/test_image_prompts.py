"""Prompts with several images, of several sizes, or none, and the images of tools, against an own forward pass."""

import pytest
import torch
from cells import Cell
from PIL import Image

from safe_trainers import PrecisionError


TOKENS = 8
FAMILIES = ("qwen2_5_vl", "idefics3", "llava", "gemma3", "pixtral")
ALWAYS = ("qwen2_5_vl", "idefics3")


def picture(seed, width, height):
    values = torch.randint(0, 256, (height, width, 3), generator=torch.Generator().manual_seed(seed))
    return Image.fromarray(values.to(torch.uint8).numpy())


def prompt(processor, mark, images, before="", after=""):
    """The inputs of a prompt with images in the middle of text, as the processor makes them."""
    text = f"{before}tell {' and '.join([mark] * len(images))} now{after}"
    return processor(text=[text], images=[images] if images else None, return_tensors="pt")


@pytest.fixture(params=[pytest.param(f, marks=() if f in ALWAYS else pytest.mark.slow) for f in FAMILIES])
def sampler(request, build):
    trainer = build(Cell(request.param, "grpo", "fp32", None), max_completion_length=TOKENS)
    trainer.vllm_generation.sync_weights()
    processor = trainer.processing_class
    mark = getattr(processor, "boi_token", None) or processor.image_token
    if request.param == "qwen2_5_vl":
        mark = f"<|vision_start|>{mark}<|vision_end|>"
    return trainer, mark


def differences(trainer, prompts, images):
    """The largest difference in nats between vLLM's log-probabilities and those of the model."""
    ids = [inputs["input_ids"][0].tolist() for inputs in prompts]
    computed, completions, logps, _ = trainer.vllm_generation.generate(ids, images, num_generations=1)
    assert [list(row) for row in computed] == ids
    worst = 0.0
    for inputs, completion, rows in zip(prompts, completions, logps, strict=True):
        own = score(trainer.model, dict(inputs), completion)
        worst = max(worst, (own - torch.tensor([row[0] for row in rows])).abs().max().item())
    return worst


@torch.no_grad()
def score(model, inputs, completion):
    """The log-probabilities of a completion by one forward pass over prompt and completion."""
    length = inputs["input_ids"].shape[1]
    added = torch.tensor([list(completion)])
    inputs["input_ids"] = torch.cat([inputs["input_ids"], added], 1)
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    for name in ("token_type_ids", "mm_token_type_ids"):
        if name in inputs:
            inputs[name] = torch.cat([inputs[name], torch.zeros_like(added)], 1)
    logits = model(**inputs).logits[0, length - 1 : -1].float()
    return logits.log_softmax(-1).gather(1, added[0].unsqueeze(1)).squeeze(1)


def test_several_images_of_several_sizes_and_prompts_without_any(sampler):
    trainer, mark = sampler
    images = [
        [picture(1, 32, 32)],
        [picture(2, 32, 32), picture(3, 64, 32)],
        None,
        [picture(4, 56, 84)],
        [picture(5, 32, 32), picture(6, 32, 32), picture(7, 32, 32)],
    ]
    prompts = [prompt(trainer.processing_class, mark, row or []) for row in images]
    assert differences(trainer, prompts, images) < 1e-5


def test_an_image_that_a_tool_returned(sampler):
    """In the second turn the prompt has the completion of the first, and an image after it."""
    trainer, mark = sampler
    processor = trainer.processing_class
    first = prompt(processor, mark, [picture(8, 32, 32)])
    ids, completions, *_ = trainer.vllm_generation.generate(
        [first["input_ids"][0].tolist()], [[picture(8, 32, 32)]], num_generations=1
    )
    suffix = prompt(processor, mark, [picture(9, 32, 32)], before=" result ")
    joined = dict(first)
    joined["input_ids"] = torch.cat([torch.tensor([list(ids[0]) + list(completions[0])]), suffix["input_ids"]], 1)
    for name in ("token_type_ids", "mm_token_type_ids"):
        if name in first:
            zeros = torch.zeros(1, len(completions[0]), dtype=torch.long)
            joined[name] = torch.cat([first[name], zeros, suffix[name]], 1)
    for name in set(first) - {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"}:
        joined[name] = torch.cat([first[name], suffix[name]])
    images = [[picture(8, 32, 32), picture(9, 32, 32)]]
    assert differences(trainer, [joined], images) < 1e-5


def test_an_image_without_its_tokens_ends_the_run(sampler):
    trainer, mark = sampler
    inputs = prompt(trainer.processing_class, mark, [picture(1, 32, 32)])
    with pytest.raises(PrecisionError, match="vllm-finds-no-place"):
        trainer.vllm_generation.generate(
            [inputs["input_ids"][0].tolist()], [[picture(1, 32, 32), picture(2, 32, 32)]], num_generations=1
        )
