"""The image task: 32 x 32 images with one to three equal shapes, and the datasets made from them.

The hash of each image decides whether it belongs to the training or to the held-out split, so the two are disjoint for
all seeds. The same holds for the strings of the preference data.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from safe_trainers.tiny.families import IMAGE_SIZE, check_choice
from safe_trainers.tiny.grammar import ANSWERS, COLOURS, COUNTS, QUESTION, SHAPES, noun, parts, phrase


if TYPE_CHECKING:
    from datasets import Dataset

SPLITS: tuple[str, ...] = ("train", "heldout")

_CELL = IMAGE_SIZE // 2
_HELDOUT_SHARE = 0.25
_RGB: dict[str, tuple[int, int, int]] = {
    "red": (230, 40, 40),
    "green": (40, 200, 60),
    "blue": (50, 80, 240),
    "yellow": (235, 215, 40),
}


def split_of(content: bytes) -> str:
    """Return the split of an image or a string.

    Args:
        content: `H * W * 3` bytes of an RGB image, or an encoded string.

    Returns:
        `"heldout"` for a quarter of all contents, else `"train"`.
    """
    digest = hashlib.sha256(content).digest()
    return "heldout" if int.from_bytes(digest[:4], "big") < _HELDOUT_SHARE * 2**32 else "train"


def _draw_shape(pixels: np.ndarray, shape: str, colour: np.ndarray, cell: int, rng: np.random.Generator) -> None:
    """Paint one shape into one of the four cells of `pixels` (`(H, W, 3)`, float64)."""
    # Circles are smaller than squares, because a tiny tower takes long to learn to tell them apart by their corners.
    radius = rng.uniform(5.2, 6.2) if shape == "circle" else rng.uniform(6.2, 7.2)
    reach = _CELL / 2 - radius - 0.5
    row = (cell // 2) * _CELL + _CELL / 2 - 0.5 + rng.uniform(-reach, reach)
    column = (cell % 2) * _CELL + _CELL / 2 - 0.5 + rng.uniform(-reach, reach)
    rows, columns = np.ogrid[:IMAGE_SIZE, :IMAGE_SIZE]
    if shape == "circle":
        inside = (rows - row) ** 2 + (columns - column) ** 2 <= radius**2
    else:
        inside = (np.abs(rows - row) <= radius) & (np.abs(columns - column) <= radius)
    pixels[inside] = colour


def draw(answer: str, rng: np.random.Generator) -> Image.Image:
    """Draw an image for an answer.

    Cells, positions in the cells, sizes, brightness and background are random; the shapes of one image have the same
    colour and kind.

    Args:
        answer: One of `ANSWERS`.
        rng: Source of randomness.

    Returns:
        A 32 x 32 RGB image.

    Raises:
        ValueError: If it is not an answer of the task.
    """
    count, colour, shape = parts(answer)
    pixels = np.full((IMAGE_SIZE, IMAGE_SIZE, 3), rng.uniform(10, 50)) + rng.normal(0, 8, (IMAGE_SIZE, IMAGE_SIZE, 3))
    for cell in rng.permutation(4)[: COUNTS.index(count) + 1]:
        tint = np.array(_RGB[colour]) * rng.uniform(0.8, 1.0) + rng.normal(0, 8, 3)
        _draw_shape(pixels, shape, tint, int(cell), rng)
    pixels += rng.normal(0, 5, pixels.shape)
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def _check_size(n: int) -> None:
    if n < 1:
        raise ValueError(f"`n` must be at least 1, got {n}.")


def _balanced_answers(n: int, rng: np.random.Generator) -> list[str]:
    """Return `n` answers in random order, each equally often up to a difference of one."""
    rounds = [rng.permutation(len(ANSWERS)) for _ in range(-(-n // len(ANSWERS)))]
    return [ANSWERS[index] for index in np.concatenate(rounds)[:n]]


def draw_images(
    n: int, seed: int = 0, split: str = "train", *, shuffle_images: bool = False
) -> tuple[list[Image.Image], list[str]]:
    """Draw images with their answers.

    Args:
        n: Number of images.
        seed: Seed; the same seed gives the same images.
        split: `"train"` or `"heldout"`; no image is in both.
        shuffle_images: Permute the images among the answers, as a control from which nothing can be learnt.

    Returns:
        `n` 32 x 32 RGB images and `n` answers, all 24 answers equally often up to a difference of one.

    Raises:
        ValueError: If there is no such split, or `n < 1`.
    """
    check_choice("split", split, SPLITS)
    _check_size(n)
    rng = np.random.default_rng([seed, SPLITS.index(split)])
    answers = _balanced_answers(n, rng)
    images = []
    for answer in answers:
        image = draw(answer, rng)
        while split_of(image.tobytes()) != split:
            image = draw(answer, rng)
        images.append(image)
    if shuffle_images:
        images = [images[index] for index in rng.permutation(n)]
    return images, answers


def _image_dataset(columns: dict[str, list[Any]]) -> Dataset:
    """Build a dataset whose `image` column decodes to PIL images."""
    from datasets import Dataset
    from datasets import Image as ImageFeature

    return Dataset.from_dict(columns).cast_column("image", ImageFeature())


def _question() -> list[dict[str, str]]:
    return [{"role": "user", "content": QUESTION}]


def _answer(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


def prompt_dataset(n: int, seed: int = 0, split: str = "train", *, shuffle_images: bool = False) -> Dataset:
    """Build the dataset for GRPO, RLOO and evaluation.

    Args:
        n: Number of rows.
        seed: Seed of the images.
        split: `"train"` or `"heldout"`.
        shuffle_images: Permute the images among the rows, as a control.

    Returns:
        Columns `prompt` (conversation), `image` (32 x 32 RGB) and `solution` (str).

    Raises:
        ValueError: If there is no such split, or `n < 1`.
    """
    images, answers = draw_images(n, seed, split, shuffle_images=shuffle_images)
    return _image_dataset({"prompt": [_question() for _ in answers], "image": images, "solution": answers})


def sft_dataset(
    n: int,
    seed: int = 0,
    split: str = "train",
    *,
    shuffle_images: bool = False,
    bias: float = 0.0,
) -> Dataset:
    """Build the dataset for fine-tuning with `completion_only_loss`.

    Args:
        n: Number of rows.
        seed: Seed of the images.
        split: `"train"` or `"heldout"`.
        shuffle_images: Permute the images among the rows, as a control.
        bias: Share of the rows, 0 to 1, whose answer names the first colour whatever the image shows. A model trained
            on them prefers this colour but can still see the others, so a reward can correct it.

    Returns:
        Columns `prompt` and `completion` (conversations) and `image` (32 x 32 RGB).

    Raises:
        ValueError: If the split does not exist, `n < 1`, or `bias` is not between 0 and 1.
    """
    images, answers = draw_images(n, seed, split, shuffle_images=shuffle_images)
    if not 0 <= bias <= 1:
        raise ValueError(f"bias must be between 0 and 1, got {bias}")
    biased = np.random.default_rng([seed, SPLITS.index(split), len(answers)]).random(len(answers)) < bias
    for row in np.flatnonzero(biased):
        count, _, shape = parts(answers[row])
        answers[row] = phrase(count, COLOURS[0], shape)
    completions = [_answer(answer) for answer in answers]
    return _image_dataset({"prompt": [_question() for _ in answers], "completion": completions, "image": images})


def image_preference_dataset(n: int, seed: int = 0, split: str = "train", *, shuffle_images: bool = False) -> Dataset:
    """Build the dataset for DPO with images.

    Args:
        n: Number of pairs.
        seed: Seed of the images and of the wrong answers.
        split: `"train"` or `"heldout"`.
        shuffle_images: Permute the images among the rows, as a control.

    Returns:
        Columns `prompt`, `chosen` and `rejected` (conversations) and `image` (32 x 32 RGB). A rejected answer names
        another colour than the image has.

    Raises:
        ValueError: If there is no such split, or `n < 1`.
    """
    images, answers = draw_images(n, seed, split, shuffle_images=shuffle_images)
    return _image_dataset(
        {
            "prompt": [_question() for _ in answers],
            "chosen": [_answer(answer) for answer in answers],
            "rejected": [_answer(wrong) for wrong in _recoloured(answers, seed, split)],
            "image": images,
        }
    )


def unpaired_preference_dataset(
    n: int, seed: int = 0, split: str = "train", *, shuffle_images: bool = False
) -> Dataset:
    """Build the dataset for KTO with images.

    Args:
        n: Number of rows.
        seed: Seed of the images and of the wrong answers.
        split: `"train"` or `"heldout"`.
        shuffle_images: Permute the images among the rows, as a control.

    Returns:
        Columns `prompt` and `completion` (conversations), `label` (bool) and `image` (32 x 32 RGB). Every second
        answer is wrong: it names another colour than the image has.

    Raises:
        ValueError: If there is no such split, or `n < 1`.
    """
    images, answers = draw_images(n, seed, split, shuffle_images=shuffle_images)
    wrong = _recoloured(answers, seed, split)
    labels = [row % 2 == 0 for row in range(n)]
    completions = [right if label else other for right, other, label in zip(answers, wrong, labels, strict=True)]
    return _image_dataset(
        {
            "prompt": [_question() for _ in answers],
            "completion": [_answer(completion) for completion in completions],
            "label": labels,
            "image": images,
        }
    )


def _recoloured(answers: list[str], seed: int, split: str) -> list[str]:
    """Return the answers with another colour each, drawn at random."""
    rng = np.random.default_rng([seed, SPLITS.index(split), len(answers), 1])
    made = []
    for answer in answers:
        count, colour, shape = parts(answer)
        made.append(phrase(count, str(rng.choice([other for other in COLOURS if other != colour])), shape))
    return made


def _sentences(rng: np.random.Generator) -> tuple[str, str]:
    """Return a correct sentence, and one in which a noun disagrees with its number word."""
    right, wrong = [], []
    size = int(rng.integers(1, 3))
    broken = int(rng.integers(size))
    for index in range(size):
        count, colour, shape = (str(rng.choice(words)) for words in (COUNTS, COLOURS, SHAPES))
        # The wrong sentence has a plural after "one", or a singular after "two" or "three".
        other = COUNTS[1] if count == COUNTS[0] else COUNTS[0]
        right.append(f"{count} {colour} {noun(shape, count)}")
        wrong.append(f"{count} {colour} {noun(shape, other)}" if index == broken else right[-1])
    return " and ".join(right), " and ".join(wrong)


def preference_dataset(n: int, seed: int = 0, split: str = "train") -> Dataset:
    """Build the text-only dataset for reward modelling.

    The chosen answer describes one or two groups of shapes; in the rejected one a noun disagrees with its number
    word ("two red square", "one blue circles"). Single words do not distinguish the two, only combinations.

    Args:
        n: Number of pairs.
        seed: Seed of the pairs.
        split: `"train"` or `"heldout"`; no chosen answer is in both.

    Returns:
        Columns `chosen` and `rejected`, conversations of two messages.

    Raises:
        ValueError: If there is no such split, or `n < 1`.
    """
    from datasets import Dataset

    check_choice("split", split, SPLITS)
    _check_size(n)
    rng = np.random.default_rng([seed, SPLITS.index(split), len(SPLITS)])
    chosen: list[list[dict[str, str]]] = []
    rejected: list[list[dict[str, str]]] = []
    while len(chosen) < n:
        right, wrong = _sentences(rng)
        if split_of(right.encode()) != split:
            continue
        chosen.append([*_question(), {"role": "assistant", "content": right}])
        rejected.append([*_question(), {"role": "assistant", "content": wrong}])
    return Dataset.from_dict({"chosen": chosen, "rejected": rejected})
