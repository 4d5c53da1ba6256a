"""Names of the tiny model families, and the marker tokens of each.

This module does not import torch or transformers, so that a command line can list the families quickly.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field


IMAGE_SIZE = 32
"""Height and width of an image, in pixels."""

PATCH_SIZE = 8
"""Height and width of a patch of the vision towers, in pixels."""


@dataclass(frozen=True)
class Family:
    """The specification of one family.

    Args:
        name: Name of the family.
        image_token: The token that is replaced by image features; `None` for a text-only family.
        template_token: The text that the chat template writes for one image; the processor expands it.
        markers: Further marker tokens, by attribute name on the tokenizer.
        patch_tokens: Side length, in pixels, of the square that one image token represents.
    """

    name: str
    image_token: str | None = None
    template_token: str = ""
    markers: dict[str, str] = field(default_factory=dict)
    patch_tokens: int = PATCH_SIZE

    @property
    def special_tokens(self) -> dict[str, str]:
        """All multimodal tokens of the family, by attribute name on the tokenizer."""
        image = {} if self.image_token is None else {"image_token": self.image_token}
        return {**image, **self.markers}


_IDEFICS_MARKERS = {
    "fake_image_token": "<fake_token_around_image>",
    "global_image_token": "<global-img>",
    "end_of_utterance_token": "<end_of_utterance>",
}
_QWEN_MARKERS = {
    "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>",
    "video_token": "<|video_pad|>",
}

_SPECS: dict[str, Family] = {
    spec.name: spec
    for spec in (
        Family("llava", "<image>", "<image>"),
        Family("aria", "<image>", "<image>"),
        Family(
            "qwen2_5_vl",
            "<|image_pad|>",
            "<|vision_start|><|image_pad|><|vision_end|>",
            _QWEN_MARKERS,
            patch_tokens=2 * PATCH_SIZE,
        ),
        Family("smolvlm", "<image>", "<image>", _IDEFICS_MARKERS),
        Family("idefics3", "<image>", "<image>", _IDEFICS_MARKERS),
        Family(
            "gemma3",
            "<image_soft_token>",
            "<start_of_image>",
            {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
        ),
        Family(
            "llama4",
            "<|patch|>",
            "<|image_start|><|patch|><|image_end|>",
            {"boi_token": "<|image_start|>", "eoi_token": "<|image_end|>"},
            patch_tokens=2 * PATCH_SIZE,
        ),
        Family("nocast", "<image>", "<image>"),
        Family("gpt_oss"),
        Family("text"),
    )
}

FAMILIES: tuple[str, ...] = tuple(_SPECS)
"""Names of all families, the text-only ones last."""

VISION_FAMILIES: tuple[str, ...] = tuple(name for name, spec in _SPECS.items() if spec.image_token is not None)
"""Names of the families that take images."""


def check_choice(what: str, value: object, accepted: Sequence[str]) -> str:
    """Return `value` if it is one of `accepted`.

    Args:
        what: Description of the value for the message.
        value: The value to check.
        accepted: The accepted names.

    Returns:
        The value.

    Raises:
        ValueError: If the value is not accepted; the message lists the accepted names and the nearest one.
    """
    if isinstance(value, str) and value in accepted:
        return value
    nearest = difflib.get_close_matches(str(value), accepted, n=1, cutoff=0.0)
    hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
    raise ValueError(f"Unknown {what} {value!r}: it must be one of {', '.join(map(repr, accepted))}.{hint}")


def family_spec(family: str | Family) -> Family:
    """Return the specification of a family.

    Args:
        family: One of `FAMILIES`, or the specification of another family, which is returned.

    Raises:
        ValueError: If there is no such family.
    """
    return family if isinstance(family, Family) else _SPECS[check_choice("family", family, FAMILIES)]
