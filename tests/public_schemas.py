"""Local files with the columns of the public datasets that the recipes name: a few rows, with pictures of our own.

The features are those of the datasets' cards; what the rows say is made up in their form.
"""

import io
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, Features, Image, List, Value
from PIL import Image as Pillow


TEXT = Value("string")


def picture(width: int = 32, height: int = 32, mode: str = "RGB", seed: int = 0) -> Pillow.Image:
    """A picture of noise."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Pillow.fromarray(pixels).convert(mode)


def encoded(image: Pillow.Image, kind: str = "PNG") -> dict[str, Any]:
    """A picture as a dataset holds it."""
    buffer = io.BytesIO()
    image.save(buffer, format=kind)
    return {"bytes": buffer.getvalue(), "path": None}


def _rows(n: int, modes: tuple[str, ...] = ("RGB", "L", "RGBA", "P")) -> list[dict[str, Any]]:
    """Encoded pictures of several modes and sizes."""
    return [encoded(picture(32 + 8 * (i % 3), 32, modes[i % len(modes)], seed=i)) for i in range(n)]


def open_r1(n: int = 8) -> Dataset:
    """`lmms-lab/multimodal-open-r1-8k-verified`."""
    columns = {
        "image": _rows(n),
        "problem": [f"how many squares? {i}" for i in range(n)],
        "solution": [f"<think>\nI count {i}.\n</think>\n\n<answer>{i}</answer>" for i in range(n)],
        "original_question": [f"how many squares? {i}" for i in range(n)],
        "original_answer": [f"Answer: {i}" for i in range(n)],
    }
    return Dataset.from_dict(columns, Features(image=Image(), **dict.fromkeys(list(columns)[1:], TEXT)))


def geometry3k(n: int = 8) -> Dataset:
    """`hiyouga/geometry3k`: lists of pictures, and their places in the text."""
    columns = {
        "images": [[one] for one in _rows(n, ("RGB", "RGBA"))],
        "problem": [f"<image>what is x? {i}" for i in range(n)],
        "answer": [r"2 \sqrt { 221 }" if i % 2 else str(i) for i in range(n)],
    }
    return Dataset.from_dict(columns, Features(images=List(Image()), problem=TEXT, answer=TEXT))


def mathvista(n: int = 8) -> Dataset:
    """`AI4Math/MathVista`: the pictures are in `decoded_image`, and `image` is a path."""
    kinds = ["integer", "text", "float", "text"]
    columns: dict[str, list[Any]] = {
        "pid": [str(i) for i in range(n)],
        "question": [f"how many circles? {i}" for i in range(n)],
        "image": [f"images/{i}.jpg" for i in range(n)],
        "decoded_image": [encoded(picture(40, 24, seed=i), "JPEG") for i in range(n)],
        "choices": [["yes", "no"] if kinds[i % 4] == "text" else None for i in range(n)],
        "unit": [None] * n,
        "precision": [1.0 if kinds[i % 4] == "float" else None for i in range(n)],
        "answer": [
            "yes" if kinds[i % 4] == "text" else f"{i}.5" if kinds[i % 4] == "float" else str(i) for i in range(n)
        ],
        "question_type": ["multi_choice" if kinds[i % 4] == "text" else "free_form" for i in range(n)],
        "answer_type": [kinds[i % 4] for i in range(n)],
        "query": [f"Hint: ... Question: how many circles? {i}" for i in range(n)],
    }
    features = {
        **dict.fromkeys(columns, TEXT),
        "decoded_image": Image(),
        "choices": List(TEXT),
        "precision": Value("float64"),
    }
    return Dataset.from_dict(columns, Features(features))


def llava_vsft(n: int = 8) -> Dataset:
    """`HuggingFaceH4/llava-instruct-mix-vsft`: conversations in parts, with the places of the pictures."""

    def said(role: str, text: str, index: int | None = None) -> dict[str, Any]:
        parts = [{"index": None, "text": text, "type": "text"}]
        return {
            "role": role,
            "content": parts + ([{"index": index, "text": None, "type": "image"}] if index is not None else []),
        }

    messages = [
        [said("user", "what is in the picture?", 0), said("assistant", "one red square"),
         said("user", "and its color?"), said("assistant", "red")]
        for _ in range(n)
    ]  # fmt: skip
    part = {"index": Value("int64"), "text": TEXT, "type": TEXT}
    features = Features(messages=List({"content": List(part), "role": TEXT}), images=List(Image()))
    return Dataset.from_dict({"messages": messages, "images": [[one] for one in _rows(n, ("RGB", "L"))]}, features)


def llava_mix(n: int = 8) -> Dataset:
    """`trl-lib/llava-instruct-mix`: a prompt and its completion."""
    columns = {
        "images": [[one] for one in _rows(n, ("RGB", "L"))],
        "prompt": [[{"content": "what is in the picture?", "role": "user"}] for _ in range(n)],
        "completion": [[{"content": "two blue circles", "role": "assistant"}] for _ in range(n)],
    }
    message = List({"content": TEXT, "role": TEXT})
    return Dataset.from_dict(columns, Features(images=List(Image()), prompt=message, completion=message))


def ultrafeedback(n: int = 16) -> Dataset:
    """`trl-lib/ultrafeedback_binarized`: pairs with an implicit prompt, and their scores."""

    def pair(answer: str) -> list[dict[str, str]]:
        return [{"content": "name a color", "role": "user"}, {"content": answer, "role": "assistant"}]

    columns = {
        "chosen": [pair(f"red {i}") for i in range(n)],
        "rejected": [pair(f"square {i}") for i in range(n)],
        "score_chosen": [9.0] * n,
        "score_rejected": [2.0] * n,
    }
    message = List({"content": TEXT, "role": TEXT})
    score = Value("float64")
    return Dataset.from_dict(
        columns, Features(chosen=message, rejected=message, score_chosen=score, score_rejected=score)
    )


PUBLIC = {
    "lmms-lab/multimodal-open-r1-8k-verified": (open_r1, ("train",)),
    "hiyouga/geometry3k": (geometry3k, ("train", "validation", "test")),
    "AI4Math/MathVista": (mathvista, ("testmini", "test")),
    "HuggingFaceH4/llava-instruct-mix-vsft": (llava_vsft, ("train", "test")),
    "trl-lib/llava-instruct-mix": (llava_mix, ("train",)),
    "trl-lib/ultrafeedback_binarized": (ultrafeedback, ("train", "test")),
}
"""The public datasets by name: what makes one like it, and its splits."""


def write(name: str, folder: Path) -> Path:
    """Writes files like those of a public dataset.

    Args:
        name: A key of `PUBLIC`.
        folder: Where to.

    Returns:
        The folder to load.
    """
    make, splits = PUBLIC[name]
    data = folder / name.replace("/", "--") / "data"
    if not data.exists():
        data.mkdir(parents=True)
        for split in splits:
            make().to_parquet(str(data / f"{split}-00000-of-00001.parquet"))
    return data.parent


def alternating_reward(completions: list[Any], **kwargs: Any) -> list[float]:
    """A reward that differs within each group, whatever a random model says."""
    return [float(index % 2) for index in range(len(completions))]
