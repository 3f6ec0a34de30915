"""A script that trains with AdamW and a bias of keys: what noise moves there is found by itself."""

import sys
from pathlib import Path

import pytest

from stability.analysis.excess import excess_at
from stability.records.distances import read_distances
from tests.stability.recorder.recording import Recording

GPT = Path(__file__).parents[3] / "examples" / "gpt.py"
KEYS = {"blocks.0.qkv.bias": ((64, 128),), "blocks.1.qkv.bias": ((64, 128),)}
"""Of q, k and v of width 64 in one bias those of k."""


@pytest.mark.long
@pytest.mark.slow
def test_the_bias_of_keys_hides_no_error_of_an_attention(tmp_path: Path) -> None:
    study = Recording(tmp_path, [sys.executable, str(GPT)])
    steps = ("--snapshots", "10,30")
    assert study.record("baseline", "--bf16", options=steps) == 0
    assert study.record("reference", options=(*steps, "--role", "reference")) == 0
    assert study.record("nudge", "--bf16", options=(*steps, "--nudge", "1")) == 0
    fault = ("--attention", "flash:fa2+out_gain_1pct")
    assert study.record("broken", "--bf16", options=(*steps, *fault)) == 0
    found = read_distances(study.folder, 0)
    for step in (10, 30):
        matrix = found.weights[step]
        assert matrix.left_out is not None
        assert (matrix.left_out.values, matrix.left_out.asked) == (KEYS, ("baseline", "nudge"))
        excess = {arm: excess_at(matrix, arm, "reference") for arm in ("nudge", "broken")}
        assert excess["nudge"] == pytest.approx(1, abs=0.05)
        assert excess["broken"] is not None
        assert excess["broken"] > 1.6
        # with the noise that it is told from, nobody would see it
        own, unit = (matrix.between(arm, "reference") for arm in ("broken", "baseline"))
        assert own is not None
        assert unit
        assert own / unit == pytest.approx(1, abs=0.25)
