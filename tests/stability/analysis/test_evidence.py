"""The evidence of a level has figures that the table of figures explains, and no others."""

import pytest

from stability.analysis.evidence import LEVELS, LevelEvidence
from stability.records.figure_table import FIGURES


def test_evidence_has_the_figures_of_its_own_level_alone():
    assert tuple(FIGURES) == LEVELS
    figures = {"difference": 0.1, "difference_seed_3": 0.1, "difference_step_20": 0.1}
    LevelEvidence(level="outcome", state="holds", sentence="", figures=figures)
    with pytest.raises(AssertionError, match=r"training: \{'difference'\} stand in no table"):
        LevelEvidence(level="training", state="holds", sentence="", figures=figures)
