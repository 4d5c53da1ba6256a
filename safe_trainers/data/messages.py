"""Changes the messages of a conversation: their form, the places of images, and the system message."""

from typing import Any

from ..core.errors import RecipeError


PLACEHOLDER = "<image>"
"""The place of an image in a text; in a text without it, the images come first."""


def with_roles(column: str, messages: list[Any]) -> list[Any]:
    """Messages with `role` and `content`; TRL's trainers read `from` and `value` as these."""
    if not any(isinstance(message, dict) and "from" in message for message in messages):
        return messages
    from trl import maybe_convert_to_chatml

    converted: list[Any] = maybe_convert_to_chatml({column: [dict(message) for message in messages]})[column]
    return converted


def in_parts(messages: list[dict[str, Any]], count: int, where: str) -> list[dict[str, Any]]:
    """Messages whose contents are parts of text and images, as chat templates of processors read them.

    What an assistant writes is text: images are in what it is asked.
    """
    asked = [message for message in messages if message.get("role") != "assistant"]
    strings = [message["content"] for message in asked if isinstance(message.get("content"), str)]
    marks = sum(string.count(PLACEHOLDER) for string in strings)
    lists = [message["content"] for message in messages if isinstance(message.get("content"), list)]
    placed = sum(part.get("type") == "image" for parts in lists for part in parts)
    if marks and marks + placed != count:
        raise RecipeError(f"{where}: the text has {marks} times {PLACEHOLDER!r}, but the row has {count} images")
    first = None if marks or placed else next((m for m in messages if m.get("role") == "user"), None)

    def content(message: dict[str, Any]) -> Any:
        text = message.get("content")
        if not isinstance(text, str):
            return text
        pieces = [text] if message.get("role") == "assistant" else text.split(PLACEHOLDER)
        if message is first:
            pieces = [""] * count + pieces
        parts: list[dict[str, str | None]] = []
        for index, piece in enumerate(pieces):
            parts += [{"type": "image", "text": None}] if index else []
            parts += [{"type": "text", "text": piece}] if piece.strip() or len(pieces) == 1 else []
        return parts

    return [{**message, "content": content(message)} for message in messages]


def with_system(messages: list[dict[str, Any]], text: str | None) -> list[dict[str, Any]]:
    """Messages that begin with a system message; their own one is kept."""
    if text is None or (messages and messages[0]["role"] == "system"):
        return messages
    in_parts = bool(messages) and isinstance(messages[0]["content"], list)
    return [{"role": "system", "content": [{"type": "text", "text": text}] if in_parts else text}, *messages]
