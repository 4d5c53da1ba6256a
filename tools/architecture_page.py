"""Writes the generated parts of docs/architecture.md: the packages, the diagram of their imports, and the traces."""

import ast
import json
import re
from pathlib import Path

import fragments
import house

from safe_trainers.trainer.mixin import PrecisionMixin


ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "architecture.md"
WAYS = ROOT / "benchmarks" / "results" / "ways.json"
LAYERS = re.search(r"^layers = \[\n(.*?)^\]", (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.M | re.S)


def layers() -> list[list[str]]:
    """The packages of each layer, from the top, as in the contract of import-linter."""
    if LAYERS is None:
        raise ValueError("pyproject.toml has no layers for import-linter")
    return [line.strip(' ",').split(" | ") for line in LAYERS[1].splitlines()]


def summary(package: str) -> str:
    """The first paragraph of the docstring of a package, or of a module of the root."""
    folder = ROOT / "safe_trainers" / package
    path = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return text.partition("\n\n")[0].replace("\n", " ")


def packages_table() -> str:
    """The table of packages, from the top layer down."""
    rows = [f"| {number} | `{name}` | {summary(name)} |" for number, group in enumerate(layers(), 1) for name in group]
    return "\n".join(["| layer | package | content |", "|---|---|---|", *rows])


def direct_arrows() -> list[tuple[str, str]]:
    """The imports between packages that are not implied by others."""
    arrows = house.package_arrows(house.imports(house.sources()))
    reach: dict[str, set[str]] = {}

    def below(name: str) -> set[str]:
        if name not in reach:
            reach[name] = set()
            targets = {b for a, b in arrows if a == name}
            reach[name] = targets.union(*map(below, targets))
        return reach[name]

    return sorted((a, b) for a, b in arrows if not any(b in below(c) for x, c in arrows if x == a and c != b))


def draw(path: Path) -> None:
    """Draws the packages layer by layer, with the imports that are not implied by others.

    Args:
        path: The SVG to write.
    """
    width, height, box = 860, 62, 118
    rows = layers()
    place = {
        name: (width * (index + 1) / (len(group) + 1), 34 + height * row)
        for row, group in enumerate(rows)
        for index, name in enumerate(group)
    }
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height * len(rows) + 10}" '
        'font-family="sans-serif" font-size="14">',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0 8 4 0 8z" fill="#777"/></marker></defs>',
    ]
    for above, below in direct_arrows():
        (x1, y1), (x2, y2) = place[above], place[below]
        lines.append(
            f'<line x1="{x1:.0f}" y1="{y1 + 14:.0f}" x2="{x2:.0f}" y2="{y2 - 15:.0f}" stroke="#888" '
            'marker-end="url(#tip)"/>'
        )
    for name, (x, y) in place.items():
        lines.append(
            f'<rect x="{x - box / 2:.0f}" y="{y - 14:.0f}" width="{box}" height="28" rx="4" fill="#0072b222" '
            f'stroke="#56b4e9"/><text x="{x:.0f}" y="{y + 5:.0f}" text-anchor="middle" '
            f'fill="currentColor">{name}</text>'
        )
    path.write_text("\n".join([*lines, "</svg>", ""]), encoding="utf-8")


def ways_table() -> str:
    """The table of the files that each traced value enters."""
    ways = json.loads(WAYS.read_text(encoding="utf-8"))
    rows = [f"| {name} | {len(files)} | {', '.join(f'`{file}`' for file in files)} |" for name, files in ways.items()]
    return "\n".join(["| value | files | in the order of the run |", "|---|---|---|", *rows])


def features_table() -> str:
    """The table of the features of a run, outermost first."""
    rows = [
        f"| `{feature.__module__.removeprefix('safe_trainers.')}.{feature.__name__}` | "
        f"{(feature.__doc__ or '').splitlines()[0]} |"
        for feature in PrecisionMixin.features
    ]
    return "\n".join(["| feature | purpose |", "|---|---|", *rows])


PARTS = {"packages": packages_table, "features": features_table, "ways": ways_table}


def architecture_page() -> str:
    """The page with its generated parts up to date."""
    return fragments.fill(f"docs/{PAGE.name}", PARTS)
