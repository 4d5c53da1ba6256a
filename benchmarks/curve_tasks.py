"""The tasks of `curves.py`: texts and images with ground truth, and long answers; their models and their scores.

Text: "what is red two square and blue one circle" has the answer "two red squares and one blue circle". There are 576
prompts; a quarter of them is held out. Images: the embedded task of `safe_trainers.tiny`. Both models are warmed up
by supervised training on answers of which 60 % name the first colour for everything, so that the most likely answer
is wrong in most cases and a reward can correct it.

Long answers: an untrained text model, whose distributions are almost uniform, is rewarded for the share of colour
words in answers of 48 tokens. Its score is the probability of a colour word after a held-out prompt.
"""

import itertools
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import trl
from datasets import Dataset
from policing import reset_accelerate
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer, LlamaConfig

from safe_trainers import tiny
from safe_trainers.tiny.grammar import COLOURS, COUNTS, SHAPES, phrase
from safe_trainers.tiny.models import finish, text_options
from safe_trainers.tiny.saving import write
from safe_trainers.tiny.shapes import split_of


BIAS, WARM_UP_STEPS, WARM_UP_RATE = 0.6, 500, 1.5e-3
IMAGE_FAMILY = "qwen2_5_vl"
LENGTH = {"text": 10, "image": 5, "long": 48}
"""The largest number of tokens of an answer."""
HIDDEN, LAYERS, HEADS = 128, 2, 4  # vLLM's attention on the CPU needs heads of at least 32


def _groups() -> list[tuple[str, str, str]]:
    return list(itertools.product(COUNTS, COLOURS, SHAPES))


def text_rows(split: str) -> list[tuple[str, list[tuple[str, str, str]]]]:
    """Returns every prompt of a split, and the two groups of words that it names.

    Args:
        split: `"train"` or `"heldout"`.
    """
    rows = []
    for pair in itertools.product(_groups(), repeat=2):
        words = " and ".join(f"{colour} {count} {shape}" for count, colour, shape in pair)
        if split_of(words.encode()) == split:
            rows.append((f"what is {words}", list(pair)))
    return rows


def _answer(groups: list[tuple[str, str, str]], biased: bool = False) -> str:
    return " and ".join(phrase(count, COLOURS[0] if biased else colour, shape) for count, colour, shape in groups)


def text_data(split: str, seed: int, size: int | None = None, *, bias: float | None = None) -> Dataset:
    """Returns rows of the text task.

    Args:
        split: `"train"` or `"heldout"`.
        seed: Seed of the order, and of the biased answers.
        size: Number of rows; by default each prompt once.
        bias: Share of the answers that name the first colour for everything. If it is given, the rows are those of
            supervised training; otherwise those of a rollout.
    """
    rng = np.random.default_rng([seed, len(split)])
    rows = text_rows(split)
    size = size or len(rows)
    order = np.concatenate([rng.permutation(len(rows)) for _ in range(-(-size // len(rows)))])[:size]
    prompts = [[{"role": "user", "content": rows[index][0]}] for index in order]
    if bias is None:
        return Dataset.from_dict({"prompt": prompts, "solution": [_answer(rows[index][1]) for index in order]})
    answers = [_answer(rows[index][1], bool(rng.random() < bias)) for index in order]
    completions = [[{"role": "assistant", "content": answer}] for answer in answers]
    return Dataset.from_dict({"prompt": prompts, "completion": completions})


def colour_words(tokenizer: Any) -> list[int]:
    """Returns the tokens that are colour words, with and without a leading space."""
    return sorted({ids[0] for word in COLOURS for text in (word, f" {word}") if (ids := tokenizer.encode(text))})


def colour_reward(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    """Rewards the share of colour words in an answer, times two as the rewards of the other tasks."""
    rewarded = set(colour_words(tiny.build_tokenizer("text")))
    return [2 * sum(token in rewarded for token in ids) / max(len(ids), 1) for ids in completion_ids]


def rewards(task: str) -> list[Any]:
    """Returns the reward functions of a task."""
    return [colour_reward] if task == "long" else [tiny.exact_match, tiny.attribute_match]


def data(task: str, kind: str, seed: int) -> Dataset:
    """Returns the training set of a task.

    Args:
        task: `"text"`, `"image"` or `"long"`.
        kind: `"grpo"`, `"sft"`, or `"warm-up"` for biased answers.
        seed: Its seed.
    """
    bias = {"grpo": None, "sft": 0.0, "warm-up": BIAS}[kind]
    if task != "image":
        return text_data("train", seed, 4000, bias=bias)
    return tiny.prompt_dataset(2000, seed) if bias is None else tiny.sft_dataset(2000, seed, bias=bias)


@cache
def held_out(task: str) -> Dataset:
    """Returns the held-out rows of a task, the same for all seeds."""
    return tiny.prompt_dataset(192, 0, split="heldout") if task == "image" else text_data("heldout", 0)


@torch.no_grad()
def score(model: Any, processor: Any, task: str) -> float:
    """Returns the share of held-out prompts that a model answers exactly right, decoding greedily.

    With long answers it is the mean probability of a colour word after a prompt. The mode of the model
    stays as it is, because bitsandbytes packs 4-bit weights for the CPU in evaluation mode.
    """
    rows = held_out(task)
    if task == "image":
        return tiny.exact_match_rate(model, processor, rows)
    prompts = processor.apply_chat_template(list(rows["prompt"]), add_generation_prompt=True, tokenize=False)
    inputs = processor(prompts, padding=True, padding_side="left", add_special_tokens=False, return_tensors="pt")
    ids, mask = inputs["input_ids"], inputs["attention_mask"]  # (B, T)
    length = ids.shape[1]
    if task == "long":
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, -1].float()
        return float(logits.softmax(-1)[:, colour_words(processor)].sum(-1).mean())
    for _ in range(LENGTH["text"]):
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        logits = model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
        ids = torch.cat([ids, logits[:, -1:].float().argmax(-1)], 1)
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
    replies = [processor.decode(row).split(processor.eos_token)[0] for row in ids[:, length:]]
    return sum(tiny.exact_match(replies, rows["solution"])) / len(replies)


def make_model(task: str, seed: int, root: Path) -> Path:
    """Returns the folder of a float32 model, which is made on first use.

    Except for long answers, stock TRL's SFT trainer warms it up without any precision flag. All runs of a seed begin
    with this model.

    Args:
        task: `"text"`, `"image"` or `"long"`.
        seed: Seed of the weights, and of the warm-up.
        root: Where the models are.
    """
    folder = root / f"{task}-{seed}"
    if (folder / "done").is_file():
        return folder
    if task != "image":
        tokenizer = tiny.build_tokenizer("text")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            options = {"hidden_size": HIDDEN, "intermediate_size": 2 * HIDDEN, "num_hidden_layers": LAYERS}
            heads = {"num_attention_heads": HEADS, "num_key_value_heads": HEADS}
            model = AutoModelForCausalLM.from_config(LlamaConfig(**text_options(tokenizer, **options, **heads)))
        write(finish(model, tokenizer, "float32"), tokenizer, folder)
    else:
        import image_families

        image_families.save(IMAGE_FAMILY, folder, seed)
    if task == "long":
        (folder / "done").touch()
        return folder
    reset_accelerate()
    arguments = trl.SFTConfig(
        output_dir=str(root / "out"), bf16=False, use_cpu=True, max_steps=WARM_UP_STEPS, save_strategy="no",
        per_device_train_batch_size=32, learning_rate=WARM_UP_RATE, completion_only_loss=True, max_length=None,
        gradient_checkpointing=False, report_to=[], disable_tqdm=True, logging_steps=WARM_UP_STEPS, seed=seed,
    )  # fmt: skip
    trainer = trl.SFTTrainer(model=str(folder), args=arguments, train_dataset=data(task, "warm-up", seed))
    trainer.train()
    trainer.save_model(str(folder))
    reset_accelerate()
    (folder / "done").touch()
    return folder


def load(task: str, folder: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    """Loads a saved model and its processor."""
    loader = AutoModelForImageTextToText if task == "image" else AutoModelForCausalLM
    return loader.from_pretrained(folder, dtype=dtype), AutoTokenizer.from_pretrained(folder)
