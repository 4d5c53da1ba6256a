"""Audio data for the audio families: high and low tones with their answers."""

from __future__ import annotations

from typing import Any

import numpy as np
from datasets import Dataset


SAMPLING_RATE = 16000
SAMPLES = 1600
QUESTION = "what is it?"


def tones(n: int, seed: int = 0) -> tuple[list[np.ndarray], list[str]]:
    """Returns `n` tones with their answers; each has `SAMPLES` float32 values at `SAMPLING_RATE` hertz."""
    rng = np.random.default_rng(seed)
    answers = [("one red circle", "two blue squares")[index % 2] for index in range(n)]
    time = np.arange(SAMPLES) / SAMPLING_RATE
    pitch = {"one red circle": 400.0, "two blue squares": 1600.0}
    return [np.sin(2 * np.pi * pitch[a] * rng.uniform(0.9, 1.1) * time).astype(np.float32) for a in answers], answers


def dataset(task: str, rows: int) -> Dataset:
    """Builds rows of `audio` (samples) with a `prompt` (conversation), and `completion` or `solution`.

    TRL's trainers do not read `audio`; use `SoundCollator`.
    """
    sounds, answers = tones(rows)
    prompt = [{"role": "user", "content": [{"type": "audio"}, {"type": "text", "text": QUESTION}]}]
    columns: dict[str, list[Any]] = {
        "prompt": [prompt for _ in answers],
        "audio": [sound.tolist() for sound in sounds],
    }
    if task == "sft":
        columns["completion"] = [[{"role": "assistant", "content": [{"type": "text", "text": a}]}] for a in answers]
    else:
        columns["solution"] = list(answers)
    return Dataset.from_dict(columns)


class SoundCollator:
    """Makes batches from prompts with audio and their answers.

    Args:
        processor: A processor of an audio family.
    """

    def __init__(self, processor: Any) -> None:
        self.processor = processor

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """Returns model inputs with labels for the tokens of the answer only."""
        render = self.processor.apply_chat_template
        texts = [render(row["prompt"] + row["completion"], tokenize=False) for row in rows]
        answers = [text[len(render(row["prompt"], tokenize=False)) :] for row, text in zip(rows, texts, strict=True)]
        lengths = [len(ids) for ids in self.processor.tokenizer(answers, add_special_tokens=False)["input_ids"]]
        sounds = [np.asarray(row["audio"], dtype=np.float32) for row in rows]
        batch = self.processor(text=texts, audio=sounds, return_tensors="pt", padding=True)
        batch["labels"] = batch["input_ids"].clone()  # (B, T), padded on the left
        for labels, length in zip(batch["labels"], lengths, strict=True):
            labels[:-length] = -100
        return dict(batch)
