r"""The final answer of a text, and whether two answers mean the same: what the rewards for mathematics compare.

Texts, numbers with or without units, fractions and roots in LaTeX, percentages, and letters of choices are compared by
what they say. There is no algebra: `x + 1` and `1 + x` are two answers.
"""

import math
import re
from collections.abc import Callable, Sequence


LONGEST = 200
"""Characters beyond which a text is not read as a number: it comes from a model."""
NEAR = 1e-6
"""Relative distance of two numbers that are the same."""

_ANSWER = re.compile(r"<(answer|solution)>(.*?)</\1>", re.DOTALL | re.IGNORECASE)
_SAID = re.compile(r"(?:final answer|answer)\s*(?:is|:|=)+\s*(.+)", re.IGNORECASE)
_WRAPPED = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mathit|rm|bf|operatorname)\s*\{([^{}]*)\}")
_SPACES = re.compile(r"\\[,;:! ]|\\quad|\\qquad|~|\s+")
_DELIMITERS = re.compile(r"\\left|\\right|\\displaystyle|\\\(|\\\)|\\\[|\\\]|\\?\$|\*\*")
_DEGREES = re.compile(r"\^\{?\\circ\}?|\\degree|°|degrees?$")
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
_NAMED = re.compile(r"^[a-z](?:_\w)?\s*=\s*")
_CHOICE = re.compile(r"^(?:option|choice)?\s*\(?([A-H])(?:[).:].*|$)", re.DOTALL | re.IGNORECASE)
_UNIT = re.compile(r"(?<=[\d)}.])\s*([a-zµ]+(?:\s*(?:/|per)\s*[a-z]+)?(?:\^?\{?[23²³]\}?)?)$")
_SCIENTIFIC = re.compile(r"[-+]?\d+(?:\.\d+)?e[-+]?\d+")
_TOKEN = re.compile(r"\\?[a-z]+|\d+\.?\d*|\.\d+|[-+*/^(){}\[\]]")


def final_answer(text: str) -> str:
    r"""What a completion gives as its answer.

    Args:
        text: A completion. What stands before `</think>` is not looked at.

    Returns:
        The last of these that there is: what is between `<answer>` tags (or `<solution>`), `\boxed{}`, what follows
        "the answer is" or "Answer:", and else the whole text; within the tags, what is boxed.
    """
    text = text.rpartition("</think>")[2]
    tagged = [match[2] for match in _ANSWER.finditer(text)]
    text = tagged[-1] if tagged else text
    box = last_box(text)
    if box is not None:
        return box.strip()
    said = _SAID.findall(text) if not tagged else []
    return str(said[-1] if said else text).strip()


def last_box(text: str) -> str | None:
    r"""What the last complete `\boxed{}` of a text holds, `None` where there is none."""
    end = len(text)
    while (start := text.rfind(r"\boxed{", 0, end)) >= 0:
        depth, first = 0, start + len(r"\boxed{")
        for position in range(first - 1, len(text)):
            depth += {"{": 1, "}": -1}.get(text[position], 0)
            if depth == 0:
                return text[first:position]
        end = start
    return None


def same_answer(given: str, right: str, choices: Sequence[str] | None = None) -> bool:
    """Whether an answer is the right one.

    Args:
        given: The answer.
        right: The right one. A decimal number is met by what rounds to its digits, any other number by its value.
        choices: The texts of the choices, where the answer may name one by its letter.

    Returns:
        Whether they say the same.
    """
    if plain(given) == plain(right) and plain(right):
        return True
    letter, right_letter = _letter(given), _letter(right)
    if choices and letter is not None and right_letter is None:
        index = ord(letter) - ord("A")
        return index < len(choices) and same_answer(choices[index], right)
    if right_letter is not None:
        return letter == right_letter
    (value, unit), (right_value, right_unit) = quantity(given), quantity(right)
    if value is None or right_value is None or (unit and right_unit and unit != right_unit):
        return False
    decimals = re.fullmatch(r"-?\d*\.(\d+)", plain(right).removesuffix("%").removesuffix(right_unit).strip())
    half = 0.5 * 10.0 ** -len(decimals[1]) if decimals else 0.0
    return abs(value - right_value) <= max(half, 1e-9) * (1 + 1e-9) or math.isclose(value, right_value, rel_tol=NEAR)


def plain(text: str) -> str:
    """An answer without what its meaning does not depend on: case, spaces, LaTeX's wrappers, a full stop, degrees."""
    text = _DELIMITERS.sub("", text)
    while (unwrapped := _WRAPPED.sub(r"\1", text)) != text:
        text = unwrapped
    text = text.replace(r"\dfrac", r"\frac").replace(r"\tfrac", r"\frac").replace("−", "-").replace(r"\%", "%")
    text = _SPACES.sub(" ", text).strip().rstrip(".").strip().lower()
    text = _DEGREES.sub("", text).strip()
    text = _THOUSANDS.sub(lambda match: match[0].replace(",", ""), text)
    text = _NAMED.sub("", text)
    return re.sub(r"\s*([-+*/^(){}\[\],=])\s*", r"\1", text)


def quantity(text: str) -> tuple[float | None, str]:
    r"""The number that an answer is, and its unit.

    Args:
        text: Such as `12.5 cm`, `\frac{5 \sqrt 2}{2}`, `3\pi`, `2/3`, `1,200` or `50%`.

    Returns:
        The number, `None` where it is none, and the unit, empty where there is none.
    """
    text = plain(text)
    if len(text) > LONGEST:
        return None, ""
    text = text.removesuffix("%")
    unit = None if _SCIENTIFIC.fullmatch(text) else _UNIT.search(text)
    number = text[: unit.start()] if unit else text
    try:
        value = float(number) if _SCIENTIFIC.fullmatch(number) else _Reader(number).value()
    except (ValueError, ArithmeticError, RecursionError):
        return None, ""
    return (value, re.sub(r"[ {}]", "", unit[1]) if unit else "") if math.isfinite(value) else (None, "")


def _letter(text: str) -> str | None:
    """The letter of a choice, such as of `B`, `(B)`, `B. 12 cm` or `Option B`."""
    match = _CHOICE.match(_WRAPPED.sub(r"\1", _DELIMITERS.sub("", text)).strip())
    return match[1].upper() if match else None


class _Reader:
    r"""Reads a number: digits, `+ - * / ^`, brackets, `\frac`, `\sqrt` and `\pi`, and products without a sign.

    Args:
        text: What `plain` gives.
    """

    def __init__(self, text: str) -> None:
        text = text.replace(r"\cdot", "*").replace(r"\times", "*")
        self.tokens = _TOKEN.findall(text)
        if not self.tokens or _TOKEN.sub("", text).strip():
            raise ValueError(f"{text!r} is no number")
        self.position = 0

    def value(self) -> float:
        """The number."""
        value = self._sum()
        if self.position < len(self.tokens):
            raise ValueError("something follows the number")
        return value

    @property
    def _next(self) -> str:
        return self.tokens[self.position] if self.position < len(self.tokens) else ""

    def _take(self) -> str:
        token = self._next
        self.position += 1
        return token

    def _sum(self) -> float:
        value = self._product()
        while self._next in ("+", "-"):
            value = value + self._product() if self._take() == "+" else value - self._product()
        return value

    def _product(self) -> float:
        value = self._power()
        while self._next in ("*", "/") or self._begins_factor():
            if self._next not in ("*", "/") or self._take() == "*":
                value *= self._power()
            else:
                value /= self._power()
        return value

    def _begins_factor(self) -> bool:
        """Whether a factor follows without a sign; a number in digits never does."""
        return self._next in ("(", "{", "[") or self._next.lstrip("\\") in ("frac", "sqrt", "pi")

    def _power(self) -> float:
        if self._next in ("-", "+"):
            return -self._power() if self._take() == "-" else self._power()
        value = self._atom()
        if self._next == "^":
            self._take()
            value = float(value ** self._power()) if value >= 0 else math.pow(value, self._power())
        return value

    def _atom(self) -> float:
        token = self._take()
        word = token.lstrip("\\")
        readers: dict[str, Callable[[], float]] = {
            "frac": lambda: self._argument() / self._argument(),
            "sqrt": self._root,
            "pi": lambda: math.pi,
            "π": lambda: math.pi,
        }
        if word in readers:
            return readers[word]()
        closing = {"(": ")", "{": "}", "[": "]"}.get(token)
        if closing is not None:
            value = self._sum()
            if self._take() != closing:
                raise ValueError("a bracket is not closed")
            return value
        return float(token)

    def _argument(self) -> float:
        r"""What follows `\frac`: a bracket, or one digit, as LaTeX reads it."""
        token = self._next
        if token.isdigit() and len(token) > 1:
            self.tokens[self.position : self.position + 1] = list(token)
        return self._atom()

    def _root(self) -> float:
        degree = 2.0
        if self._next == "[":
            degree = self._atom()
        return math.pow(self._atom() if self._next != "sqrt" else self._power(), 1 / degree)
