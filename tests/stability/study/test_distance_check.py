"""`verify` finds distances of what is kept and left out that are not those of the files."""

from dataclasses import replace

import pytest
import torch

from stability.analysis.distance_check import other_distances
from stability.analysis.left_out import RULE
from stability.analysis.study_records import read_study
from stability.records.distances import read_distances, write_distances
from stability.records.paths import StudyPaths
from stability.records.protocol import LEAVES_OUT
from stability.records.sealed_json import write_sealed
from stability.study.distances import update_distances
from tests.stability.study.walked_runs import STATES, Notes, drop, seal, seed_of, walked


@pytest.fixture
def runs(tmp_path):
    """Return measured runs of a study of one seed."""
    config = {"name": "s", "question": "?", "base": {"train": {"steps": 9}}, "seeds": [0]}
    arms = [
        {"name": arm, "axis": "none", "diff": {}, "role": _role(arm), "until": 9} for arm in STATES
    ]
    write_sealed(StudyPaths(tmp_path).study, {"config": config, "arms": arms})
    runs = seed_of(tmp_path, *STATES)
    update_distances(tmp_path, 0, runs, Notes())
    return runs


def _role(arm):
    return arm if arm in ("reference", "nudge", "baseline") else "candidate"


def said(folder):
    return other_distances(read_study(folder), every=True)


def forge(folder, **parts):
    """Change what is left out at step 9."""
    found = read_distances(folder, 0)
    matrix = found.weights[9]
    left_out = replace(matrix.left_out, **parts) if parts else None
    weights = {**found.weights, 9: replace(matrix, left_out=left_out)}
    write_distances(folder, replace(found, weights=weights))


def times(factor, rows):
    return tuple(tuple(factor * x for x in row) for row in rows)


@pytest.mark.parametrize("is_dropped", [False, True])
@pytest.mark.parametrize(
    ("part", "what"), [("kept_rows", "less what is left out"), ("left_rows", "of what is left out")]
)
def test_a_forged_part_is_found(tmp_path, runs, part, what, is_dropped):
    """By the snapshots, and once they were dropped by the sketches."""
    if is_dropped:
        drop(runs, *STATES)
    assert said(tmp_path) == []
    left_out = read_distances(tmp_path, 0).weights[9].left_out
    forge(tmp_path, **{part: times(1.1, getattr(left_out, part))})
    (found,) = said(tmp_path)
    assert f"at step 9, {what}, is " in found
    assert found.endswith("by the sketches" if is_dropped else "from the files")


@pytest.mark.parametrize("is_dropped", [False, True])
@pytest.mark.parametrize("begin", [0, 21])
def test_other_blocks_than_noise_moves_are_found(tmp_path, runs, begin, is_dropped):
    """Of none and of another block, whose distances are what they must be, so that all fits."""
    other = {"values": {}, "kept_rows": (), "left_rows": ()}
    if begin:
        other = {"values": {"bias": ((begin, 37),)}, **rows_without(runs, begin)}
    if is_dropped:
        drop(runs, *STATES)
    forge(tmp_path, **other)
    (found,) = said(tmp_path)
    told = "values 21 to 36" if begin else "no values"
    assert f"leaves out {told} of bias, noise moves values 0 to 15 by the files" in found


def rows_without(runs, begin):
    """Return the distances of all weights but the bias from `begin` on, and of that alone."""
    ends = [walked(arm, 9) for arm in STATES]
    left = torch.stack([end["bias"][begin:].double() for end in ends])
    kept = torch.stack(
        [torch.cat([end["wide.weight"].flatten(), end["bias"][:begin]]).double() for end in ends]
    )
    return {
        name: tuple(tuple((a - b).norm().item() for b in each) for a in each)
        for name, each in (("kept_rows", kept), ("left_rows", left))
    }


def test_a_record_that_was_not_asked_is_found_where_the_protocol_asks(tmp_path, runs):
    seal(tmp_path, **{LEAVES_OUT: RULE})
    assert said(tmp_path) == []
    forge(tmp_path)
    (found,) = said(tmp_path)
    assert "noise moves values 0 to 15 by the files" in found
    # runs that were recorded one by one, perhaps by an older version
    StudyPaths(tmp_path).protocol.unlink()
    assert said(tmp_path) == []


def test_values_left_out_without_a_rule_in_the_protocol_are_found(tmp_path, runs):
    seal(tmp_path)
    (found,) = said(tmp_path)
    assert found.endswith("at step 0 leaves values out, which the protocol does not know")
