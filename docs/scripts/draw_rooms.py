"""Draws `docs/architecture.svg`: the rooms of both packages, from the contracts that lint checks.

The layers come from `[tool.importlinter]` in pyproject.toml and each room's sentence from the first
line of its docstring, so the picture can't show an arrow that `make lint` would refuse. `make docs`
runs it; a test compares the file with what this script draws.
"""

import ast
import sys
import textwrap
import tomllib
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[2]
PICTURE = ROOT / "docs" / "architecture.svg"
SOURCES = {"stability": ROOT / "stability", "attention_kernels": ROOT / "kernels/attention_kernels"}

WIDTH, MARGIN, GAP, TITLE = 1000, 24, 14, 34
LINE, PADDING = 17, 12
INK, FAINT, PAPER = "#1f2933", "#66727f", "#ffffff"
FILL = {"stability": "#e8f1fa", "attention_kernels": "#fdf0e0"}
EDGE = {"stability": "#3b7bb3", "attention_kernels": "#c07a1d"}


def layers(package: str) -> list[list[str]]:
    """Return the layers of `package` from top to bottom, each a list of rooms that are siblings."""
    linted = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (contract,) = (c for c in linted["contracts"] if c.get("containers") == [package])
    return [[room.strip() for room in layer.split("|")] for layer in contract["layers"]]


def sentence(package: str, room: str) -> str:
    """Return the first sentence of a room's docstring, be it a folder or a file."""
    folder = SOURCES[package] / room
    path = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    docstring = ast.get_docstring(ast.parse(path.read_text()))
    assert docstring, f"{path} has no docstring"
    return " ".join(docstring.split("\n\n")[0].split())


def draw() -> str:
    """Return the picture as SVG."""
    parts: list[str] = []
    y = MARGIN
    for package in SOURCES:
        parts.append(_text(MARGIN, y + 18, package, 17, bold=True))
        y += TITLE
        rows = layers(package)
        for index, rooms in enumerate(rows):
            height = _row(parts, package, rooms, y)
            y += height
            if index < len(rows) - 1:
                parts.append(_arrow(y))
                y += 20
        y += MARGIN
        if package == "stability":
            parts.append(_arrow(y - MARGIN + 2))
    words = (
        "What stands higher may import what stands lower, however far below; "
        "rooms side by side never import one another."
    )
    parts.append(_text(MARGIN, y + 6, words, 12, colour=FAINT))
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + MARGIN}" '
        f'font-family="Helvetica, Arial, sans-serif">'
    )
    paper = f'<rect width="{WIDTH}" height="{y + MARGIN}" fill="{PAPER}"/>'
    return "\n".join([head, paper, *parts, "</svg>", ""])


def _row(parts: list[str], package: str, rooms: list[str], y: int) -> int:
    """Draw one layer at height `y` and return how high it is."""
    width = (WIDTH - 2 * MARGIN - GAP * (len(rooms) - 1)) / len(rooms)
    fits = int((width - 2 * PADDING) / 6.1)  # letters of 12 px in a line
    lines = {room: textwrap.wrap(sentence(package, room), fits) for room in rooms}
    height = 2 * PADDING + LINE * (1 + max(len(wrapped) for wrapped in lines.values()))
    for index, room in enumerate(rooms):
        x = MARGIN + index * (width + GAP)
        parts.append(
            f'<rect x="{x:.0f}" y="{y}" width="{width:.0f}" height="{height}" rx="5" '
            f'fill="{FILL[package]}" stroke="{EDGE[package]}"/>'
        )
        parts.append(_text(x + PADDING, y + PADDING + 12, room, 14, bold=True))
        for row, line in enumerate(lines[room], 1):
            parts.append(_text(x + PADDING, y + PADDING + 12 + LINE * row, line, 12))
    return height


def _text(
    x: float, y: float, words: str, size: int, *, bold: bool = False, colour: str = INK
) -> str:
    weight = ' font-weight="bold"' if bold else ""
    place = f'x="{x:.0f}" y="{y:.0f}" font-size="{size}" fill="{colour}"{weight}'
    return f"<text {place}>{escape(words)}</text>"


def _arrow(y: float) -> str:
    x = WIDTH // 2
    return (
        f'<path d="M {x} {y + 2:.0f} v 11 m -5 -5 l 5 6 l 5 -6" fill="none" stroke="{FAINT}" '
        'stroke-width="1.6"/>'
    )


if __name__ == "__main__":
    PICTURE.write_text(draw())
    sys.stdout.write(f"drawn: {PICTURE.relative_to(ROOT)}\n")
