"""Figures of the pages: SVG that is part of the page, so that its letters follow light and dark themes and are "
"selectable.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any


TEXT = "#111213"
"""The colour that stands for the text colour of the page while a figure is drawn."""
BLUE, ORANGE, GREEN, YELLOW, RED, SKY = "#0072b2", "#e69f00", "#009e73", "#f0e442", "#d55e00", "#56b4e9"
"""The colour-blind palette of Okabe and Ito. Lines differ in marker and dash too."""
STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 11,
    "text.color": TEXT,
    "axes.labelcolor": TEXT,
    "axes.edgecolor": TEXT,
    "xtick.color": TEXT,
    "ytick.color": TEXT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "legend.frameon": False,
}


def plot(file: Path, draw: Callable[[Any], None], size: tuple[float, float]) -> None:
    """Draws a figure with matplotlib.

    Args:
        file: The SVG to write.
        draw: Draws into a figure.
        size: Width and height in inches.
    """
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with mpl.rc_context({**STYLE, "svg.hashsalt": file.stem}):
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasAgg(figure)
        draw(figure)
        figure.savefig(file, metadata={"Date": None, "Creator": None})
    inline(file)


def inline(file: Path) -> None:
    """Makes an SVG of matplotlib fit for a page: no declaration, the page's text colour, identifiers of its own.

    Args:
        file: The file, which is written again.
    """
    text = file.read_text(encoding="utf-8")
    text = text[text.index("<svg") :].replace(TEXT, "currentColor")
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.S)
    text = re.sub(
        r'(<svg[^>]*?) width="[^"]*"', r"\1", re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1), count=1
    )
    text = re.sub(r'\bid="', f'id="{file.stem}-', text)
    text = re.sub(r'(href="#|url\(#)', rf"\1{file.stem}-", text)
    text = "\n".join(line.rstrip() for line in text.splitlines())
    file.write_text(text.rstrip() + "\n", encoding="utf-8")


def embed(name: str, caption: str, *, described: str, wide: bool = True) -> list[str]:
    """Returns the lines of a page that show a figure.

    Args:
        name: The file below `docs/`.
        caption: The finding of the figure.
        described: What the figure shows, for readers who cannot see it.
        wide: Whether it scrolls on a phone, so that its letters stay legible.
    """
    kind = "plot scrolls" if wide else "plot"
    return [
        "```{raw} html",
        f'<figure class="{kind}"><div class="frame" role="img" aria-label="{described}" tabindex="0">',
        "```",
        "",
        "```{raw} html",
        f":file: {name}",
        "```",
        "",
        "```{raw} html",
        f"</div><figcaption>{caption}</figcaption></figure>",
        "```",
    ]
