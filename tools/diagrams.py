"""Draws the two diagrams of `docs/how-it-works.md`: where casts are placed, and the phases of a run."""

import ast
from collections import Counter
from itertools import pairwise
from pathlib import Path

import record_messages


ROOT = Path(__file__).parent.parent
BASE = ROOT / "safe_trainers" / "trainer" / "base.py"
STEPS = {
    "resolve": "policy",
    "prepare_weights": "weights",
    "place_boundaries": "boundaries",
    "check": "checks of\nfeatures",
    "unify_mixed_weights": "trial\nforward",
    "match_operations": "media\ntrial",
}
"""The steps of `construct`, as the diagram names them."""
BLUE, GREEN = "#0072b2", "#009e73"


def steps_of_construction() -> list[str]:
    """The steps of `construct` in the order in which the function calls them."""
    tree = ast.parse(BASE.read_text(encoding="utf-8"))
    (construct,) = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "construct")
    calls = []
    for node in ast.walk(construct):
        if isinstance(node, ast.Call):
            name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            owner = getattr(getattr(node.func, "value", None), "id", "")
            if name in STEPS and (name != "check" or owner == "feature"):
                calls.append((node.lineno, name))
    return [name for _, name in sorted(calls)]


def _text(
    x: float, y: float, words: str, *, size: int = 13, weight: str = "normal", anchor: str = "middle"
) -> list[str]:
    lines = words.split("\n")
    top = y - (len(lines) - 1) * size * 0.6
    return [
        f'<text x="{x:.0f}" y="{top + index * size * 1.2 + size * 0.35:.0f}" font-size="{size}" '
        f'font-weight="{weight}" '
        f'text-anchor="{anchor}" fill="currentColor">{line}</text>'
        for index, line in enumerate(lines)
    ]


def _box(
    x: float, y: float, width: float, height: float, words: str, colour: str = "currentColor", fill: str = "none"
) -> list[str]:
    return [
        f'<rect x="{x:.0f}" y="{y:.0f}" width="{width:.0f}" height="{height:.0f}" rx="6" fill="{fill}" '
        f'stroke="{colour}" '
        'stroke-width="1.5"/>',
        *_text(x + width / 2, y + height / 2, words),
    ]


def _arrow(x1: float, y1: float, x2: float, y2: float, name: str, *, dashed: bool = False) -> str:
    dash = ' stroke-dasharray="5 4"' if dashed else ""
    return (
        f'<line x1="{x1:.0f}" y1="{y1:.0f}" x2="{x2:.0f}" y2="{y2:.0f}" stroke="currentColor" '
        f'stroke-width="1.5"{dash} '
        f'marker-end="url(#{name}-tip)"/>'
    )


def _page(name: str, width: int, height: int, lines: list[str]) -> str:
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">',
            f'<defs><marker id="{name}-tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            'orient="auto">'
            '<path d="M0 0 8 4 0 8z" fill="currentColor"/></marker></defs>',
            *lines,
            "</svg>",
            "",
        ]
    )


def _number(x: float, y: float, number: int) -> list[str]:
    return [
        f'<circle cx="{x:.0f}" cy="{y:.0f}" r="11" fill="{BLUE}"/>',
        f'<text x="{x:.0f}" y="{y + 4.5:.0f}" font-size="13" font-weight="bold" text-anchor="middle" '
        f'fill="#fff">{number}</text>',
    ]


def casts() -> str:
    """Returns the diagram of the places where the trainers act on dtypes."""
    top, high = 66, 58
    boxes = [
        (4, 108, "processor\nfloat32 pixels", "none"),
        (166, 128, "vision tower\nbfloat16 weights", "#0072b222"),
        (350, 100, "embeddings\nfloat32", "none"),
        (496, 126, "language model\n+ adapters", "#0072b222"),
        (672, 80, "loss\nfloat32", "none"),
    ]
    lines: list[str] = []
    for x, width, words, fill in boxes:
        lines += _box(x, top, width, high, words, fill=fill)
    ends = [(x, x + width) for x, width, *_ in boxes]
    for (_, right), (left, _) in pairwise(ends):
        lines.append(_arrow(right + 2, top + high / 2, left - 3, top + high / 2, "casts"))
    lines += _number(138, top + 10, 1) + _text(138, top - 24, "media cast\nto bfloat16")
    lines += _number(230, top - 2, 2) + _text(230, top - 24, "layer inputs")
    lines += _number(322, top + 10, 3) + _text(322, top - 24, "features\nto float32")
    lines += _number(559, top - 2, 4) + _text(559, top - 24, "trained weights")
    lines += _number(712, top - 2, 5) + _text(712, top - 24, "loss scale")
    lines += _box(474, 202, 170, 50, "generate() under\nthe same autocast")
    lines += [_arrow(535, top + high + 2, 535, 199, "casts", dashed=True)]
    lines += [_arrow(583, 199, 583, top + high + 3, "casts", dashed=True)]
    lines += _number(474, 202, 6)
    lines += _text(
        450, 227, "sampler and trainer are compared for each\ntoken: precision/logp_mismatch_ulp", anchor="end"
    )
    return _page("casts", 760, 262, lines)


def timeline() -> str:
    """Returns the diagram of the phases of a run, with the number of refusals in each."""
    from safe_trainers.core.refusals import REFUSALS

    recorded = record_messages.read()
    counts = Counter(message["moment"] for finding, message in recorded.items() if finding in REFUSALS)
    rows = [
        [
            ("loading", "settings", ["config", "recipe"], "one error, before\na model is loaded"),
            (
                "construction",
                "construction",
                [STEPS[name] for name in steps_of_construction()],
                "one error, before an optimizer exists",
            ),
        ],
        [
            (
                "run",
                "run",
                ["resume", "first\nrollout", "first batch:\nmedia", "first step:\nmeasured", "all steps"],
                "the run stops with the line to write",
            ),
            ("end", "end", ["save", "merge"], "nothing is\noverwritten"),
        ],
    ]
    unit, gap, lines = 90, 18, []
    for down, row in enumerate(rows):
        y, x = 74 + 210 * down, 6.0
        for moment, name, steps, words in row:
            width = unit * len(steps)
            lines += [
                f'<rect x="{x:.0f}" y="{y - 40}" width="{width}" height="96" rx="8" fill="#0072b218" stroke="none"/>'
            ]
            lines += _text(x + width / 2, y - 56, name, size=15, weight="bold")
            lines += [_arrow(x + 6, y - 18, x + width - 4, y - 18, "time")]
            for index, step in enumerate(steps):
                middle = x + unit * (index + 0.5)
                lines += [
                    f'<circle cx="{middle:.0f}" cy="{y - 18}" r="5" fill="{GREEN}"/>',
                    *_text(middle, y + 20, step),
                ]
            lines += [_arrow(x + width / 2, y + 58, x + width / 2, y + 74, "time")]
            lines += _text(x + width / 2, y + 88, f"{counts[moment]} refusals", weight="bold")
            lines += _text(x + width / 2, y + 114, words)
            x += width + gap
    return _page("time", 760, 420, lines)
