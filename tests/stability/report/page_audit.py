"""What a reader's eye would complain about on an open page: small, faint, clipped or crowded text.

Looks at every text that is on the page, in tables as in charts. Leaves out taste.
"""

from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from tests.stability.report.browser import Browser

__all__ = ["Text", "crowded_ticks", "texts"]

AUDIT = (Path(__file__).parent / "page_audit.js").read_text(encoding="utf-8")
SLACK = 1.5
"""Pixels that a rounded box may stick out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Text:
    """One text on the page; boxes are (left, top, right, bottom) in px of the whole page."""

    text: str
    where: str
    plot: str
    """The chart that it is part of, or ""."""
    size: float
    contrast: float
    off: bool
    """Whether it names a line that is hidden until somebody clicks here: plotly dims those."""
    box: list[float]
    frame: list[float] | None
    """What cuts it off: its drawing, or an ancestor that hides what sticks out."""
    scrolls: bool
    """Whether a reader can bring it into sight by moving a table sideways."""

    def __str__(self) -> str:
        place = ", ".join(f"{edge:.0f}" for edge in self.box)
        return (
            f"{self.text!r} in {self.where} {self.plot}: {self.size:g} px, "
            f"contrast {self.contrast:.1f}, at {place}"
        )

    def is_clipped(self, width: int) -> bool:
        """Return whether part of it lies outside its frame, or outside a page of this width."""
        left, top, right, bottom = self.box
        if self.frame and not self.scrolls:
            inside = self.frame[0] - SLACK <= left and right <= self.frame[2] + SLACK
            if self.plot:
                inside &= self.frame[1] - SLACK <= top and bottom <= self.frame[3] + SLACK
            if not inside:
                return True
        return not self.scrolls and (left < -SLACK or right > width + SLACK)


def texts(browser: Browser) -> list[Text]:
    """Return every text on the page that can be seen now, charts' included."""
    return [Text(**found) for found in browser.run(f"{AUDIT} return texts()")]


def crowded_ticks(browser: Browser) -> list[str]:
    """Return the tick labels that lie on one another, axis by axis."""
    axes: list[tuple[str, list[list[Any]]]] = browser.run(f"{AUDIT} return ticks()")
    return [
        f"{plot}: {a[0]!r} on {b[0]!r}"
        for plot, labels in axes
        for a, b in combinations(labels, 2)
        if _overlap(a[1:], b[1:])
    ]


def _overlap(a: list[float], b: list[float]) -> bool:
    return all(min(a[i + 2], b[i + 2]) - max(a[i], b[i]) > SLACK for i in (0, 1))
