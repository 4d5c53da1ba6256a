"""The words of the image task: 4 colours x 2 shapes x 3 counts."""

from __future__ import annotations

from safe_trainers.tiny.families import check_choice


COUNTS: tuple[str, ...] = ("one", "two", "three")
COLOURS: tuple[str, ...] = ("red", "green", "blue", "yellow")
SHAPES: tuple[str, ...] = ("square", "circle")
QUESTION = "what is in the picture?"

# Common words, so that short prompts of users have few tokens; other words are encoded as bytes.
_OTHER_WORDS = (
    "a an and are as at be by can color colour colours colors count describe do does for from given has have how i "
    "image in is it its kind many me name no not number of on only or picture please say see shape shapes shown that "
    "the there these they this to using what which with words yes you your answer question left right top bottom"
)


def noun(shape: str, count: str) -> str:
    """Return the shape's noun in the number that agrees with the count.

    Args:
        shape: One of `SHAPES`.
        count: One of `COUNTS`.

    Returns:
        The noun, e.g. `"squares"`.
    """
    return shape if count == COUNTS[0] else f"{shape}s"


def phrase(count: str, colour: str, shape: str) -> str:
    """Return the answer for an image, e.g. `"two red squares"`.

    Args:
        count: One of `COUNTS`.
        colour: One of `COLOURS`.
        shape: One of `SHAPES`.

    Returns:
        Three words, the noun agreeing with the count.
    """
    return f"{count} {colour} {noun(shape, count)}"


_PARTS: dict[str, tuple[str, str, str]] = {
    phrase(count, colour, shape): (count, colour, shape) for count in COUNTS for colour in COLOURS for shape in SHAPES
}

ANSWERS: tuple[str, ...] = tuple(_PARTS)
"""All 24 answers."""


def parts(answer: str) -> tuple[str, str, str]:
    """Return count, colour and shape of an answer.

    Args:
        answer: One of `ANSWERS`.

    Returns:
        `(count, colour, shape)`, the shape in the singular.

    Raises:
        ValueError: If it is not an answer of the task; the message suggests the most similar one.
    """
    return _PARTS[check_choice("answer", answer, ANSWERS)]


def task_words() -> list[str]:
    """Return the words that are single tokens, without duplicates, in a fixed order.

    Returns:
        Lower-case words.
    """
    nouns = [noun(shape, count) for shape in SHAPES for count in COUNTS[:2]]
    return list(dict.fromkeys([*COUNTS, *COLOURS, *nouns, *QUESTION.rstrip("?").split(), *_OTHER_WORDS.split()]))
