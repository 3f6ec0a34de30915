"""The colour, dash and marker of each arm, the same in every chart.

The colours are those of Okabe and Ito's palette, which the colour-blind tell apart as well. Grey is
the baseline's. Beyond seven arms the colours repeat with another dash and marker.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from stability.config.schema import BASELINE

__all__ = ["ArmStyle", "arm_styles"]

# vermilion and blue first: the candidates come first in a study and deserve the strongest two;
# yellow last, as it fades on white
OKABE_ITO = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#F0E442")
DASHES = ("solid", "dash", "dot", "dashdot")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "x", "star")
GREY = "#8C8C8C"


@dataclass(frozen=True, slots=True)
class ArmStyle:
    """How an arm is drawn, in every chart."""

    colour: str
    dash: str
    symbol: str


def arm_styles(arms: Sequence[str]) -> dict[str, ArmStyle]:
    """Return a style for each of `arms`, in the study's order."""
    styles = {BASELINE: ArmStyle(GREY, "solid", "circle")}
    for index, arm in enumerate(arm for arm in arms if arm != BASELINE):
        turn, place = divmod(index, len(OKABE_ITO))
        styles[arm] = ArmStyle(
            OKABE_ITO[place], DASHES[turn % len(DASHES)], SYMBOLS[place % len(SYMBOLS)]
        )
    return styles
