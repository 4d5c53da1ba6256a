r"""Extracts the final answer from a completion and compares answers, for the rewards for mathematics.

Strings, numbers with or without units, fractions and roots in LaTeX, percentages, and letters of choices are compared
by meaning. Algebra is not done: `x + 1` and `1 + x` are different answers.
"""

import math
import re
from collections.abc import Callable, Sequence


LONGEST = 200
"""The most characters of a string that is parsed as a number, because completions can be arbitrarily long."""
NEAR = 1e-6
"""The relative tolerance for equal numbers."""

_ANSWER = re.compile(r"<(answer|solution)>(.*?)</\1>", re.DOTALL | re.IGNORECASE)
_ANNOUNCED = re.compile(r"(?:final answer|answer)\s*(?:is|:|=)+\s*(.+)", re.IGNORECASE)
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
    r"""Extracts the answer from a completion.

    Args:
        text: A completion. Everything before `</think>` is ignored.

    Returns:
        The content of the last `<answer>` or `<solution>` tags, of the last `\boxed{}` (also inside such tags), or
        what follows the last "the answer is" or "Answer:", in this order of preference; otherwise the whole text.
    """
    text = text.rpartition("</think>")[2]
    tagged = [match[2] for match in _ANSWER.finditer(text)]
    text = tagged[-1] if tagged else text
    box = last_box(text)
    if box is not None:
        return box.strip()
    announced = _ANNOUNCED.findall(text) if not tagged else []
    return str(announced[-1] if announced else text).strip()


def last_box(text: str) -> str | None:
    r"""Returns the content of the last complete `\boxed{}` in a text; `None` if there is none."""
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
    """Whether an answer is correct.

    Args:
        given: The answer.
        right: The correct answer. If it is a decimal number, answers that round to its digits are correct; other
            numbers must be equal.
        choices: The strings of the choices, if the answer may be the letter of a choice.
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
    """Normalises an answer: removes case, spaces, LaTeX formatting, a final full stop, and degree signs."""
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
    r"""Parses an answer as a number with a unit.

    Args:
        text: An answer such as `12.5 cm`, `\frac{5 \sqrt 2}{2}`, `3\pi`, `2/3`, `1,200` or `50%`.

    Returns:
        The number, `None` if the text is not one, and the unit, which may be empty.
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
    """Returns the letter of a choice such as `B`, `(B)`, `B. 12 cm` or `Option B`; `None` if there is none."""
    match = _CHOICE.match(_WRAPPED.sub(r"\1", _DELIMITERS.sub("", text)).strip())
    return match[1].upper() if match else None


class _Reader:
    r"""Parses a number: digits, `+ - * / ^`, brackets, `\frac`, `\sqrt` and `\pi`, and products without a sign.

    Args:
        text: The result of `plain`.
    """

    def __init__(self, text: str) -> None:
        text = text.replace(r"\cdot", "*").replace(r"\times", "*")
        self.tokens = _TOKEN.findall(text)
        if not self.tokens or _TOKEN.sub("", text).strip():
            raise ValueError(f"{text!r} is not a number")
        self.position = 0

    def value(self) -> float:
        """Returns the number, or raises a ValueError."""
        value = self._sum()
        if self.position < len(self.tokens):
            raise ValueError("text follows the number")
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
        """Whether a factor follows without a sign, which numbers in digits never do."""
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
        r"""Parses an argument of `\frac`: a bracket, or one digit, as in LaTeX."""
        token = self._next
        if token.isdigit() and len(token) > 1:
            self.tokens[self.position : self.position + 1] = list(token)
        return self._atom()

    def _root(self) -> float:
        degree = 2.0
        if self._next == "[":
            degree = self._atom()
        return math.pow(self._atom() if self._next != "sqrt" else self._power(), 1 / degree)
