"""How a figure for a paper looks on every machine: its width, type, colours and ticks.

A figure is drawn and saved inside `paper_style`. That takes nothing from a user's own matplotlib
configuration and leaves nothing of ours behind. Names are text: no mathtext, no TeX. Leaves out
what is drawn.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import findfont, get_font
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from stability.config.schema import BASELINE
from stability.report.paper.figure_options import WIDTHS
from stability.report.view.palette import OKABE_ITO, SYMBOLS, arm_styles
from stability.report.view.plain_text import readable, shortened

__all__ = [
    "GREY",
    "PrintStyle",
    "log_axis",
    "new_figure",
    "paper_style",
    "print_styles",
    "shown",
]

GREY = "#666666"
_FONT = "DejaVu Sans"
"""It comes with matplotlib, so every machine has it."""
_STYLE: dict[Any, Any] = {
    "axes.axisbelow": True,
    "axes.edgecolor": GREY,
    "axes.grid": True,
    "axes.grid.axis": "x",
    "axes.labelsize": 8,
    "axes.linewidth": 0.6,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 8,
    "figure.dpi": 300,
    "font.family": _FONT,
    "font.size": 8,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.5,
    "hatch.linewidth": 0.6,
    "legend.fontsize": 7,
    "legend.frameon": False,
    "lines.linewidth": 1.2,
    "pdf.fonttype": 42,
    "savefig.dpi": 300,
    "svg.fonttype": "none",
    "svg.hashsalt": "stability",
    "text.parse_math": False,
    "xtick.labelsize": 7,
    "xtick.major.width": 0.6,
    "ytick.labelsize": 7,
    "ytick.major.width": 0.6,
}
_MARKERS: dict[str, str] = dict(zip(SYMBOLS, ("o", "s", "D", "^", "P", "X", "*"), strict=True))
_DASHES: tuple[Any, ...] = ("-", (0, (4, 1.5)), (0, (1, 1.2)), (0, (5, 1.5, 1, 1.5)))
_ON_PAPER = {OKABE_ITO[-1]: "#000000"}
"""Yellow fades on white paper; black is the palette's eighth."""


@dataclass(frozen=True, slots=True)
class PrintStyle:
    """How an arm is drawn. Marker and dash tell arms apart in print without colour as well."""

    colour: str
    dash: Any
    marker: str


@contextmanager
def paper_style() -> Iterator[None]:
    """Draw and save inside this context: matplotlib's own defaults with the style above."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        yield


def new_figure(width: str, height: float) -> Figure:
    """Return an empty figure of a width of `WIDTHS` and `height` inches."""
    return Figure(figsize=(WIDTHS[width], height), layout="constrained")


def print_styles(arms: Sequence[str]) -> dict[str, PrintStyle]:
    """Return a style for each of `arms`: the report's colours and symbols, dashes for print."""
    others = [arm for arm in arms if arm != BASELINE]
    return {
        arm: PrintStyle(
            _ON_PAPER.get(style.colour, style.colour),
            _DASHES[others.index(arm) % len(_DASHES)] if arm in others else "-",
            _MARKERS[style.symbol],
        )
        for arm, style in arm_styles(arms).items()
    }


def shown(name: str, most: int) -> str:
    """Return `name` in at most `most` letters, one that the font lacks written as its escape."""
    font = get_font(findfont(_FONT, fallback_to_default=False))
    letters = (
        letter if font.get_char_index(ord(letter)) else ascii(letter)[1:-1]
        for letter in readable(name.replace("\n", " "))
    )
    return shortened("".join(letters), most)


def log_axis(axes: Axes, which: Literal["x", "y"]) -> None:
    """Make the x or y axis of `axes` logarithmic, with ticks written as in the report: 2e-4."""
    axis = axes.xaxis if which == "x" else axes.yaxis
    (axes.set_xscale if which == "x" else axes.set_yscale)("log")
    low, high = sorted(axis.get_view_interval())
    decades = math.log10(high / low) if low > 0 else 0.0
    # labels stand side by side along x, above one another along y
    digits = (1.0, 2.0, 5.0) if decades < (1.5 if which == "x" else 2.5) else (1.0,)
    axis.set_major_locator(LogLocator(base=10, subs=digits, numticks=9))
    axis.set_major_formatter(FuncFormatter(_power))
    axis.set_minor_formatter(NullFormatter())


def _power(value: float, _: float) -> str:
    if 1 <= value < 1e4:  # steps
        return f"{value:g}"
    exponent = math.floor(math.log10(value) + 1e-9)
    return f"{value / 10.0**exponent:.0f}e{exponent}".replace("-", "\N{MINUS SIGN}")
