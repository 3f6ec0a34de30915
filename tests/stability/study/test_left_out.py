"""What noise moves is measured apart, by what baseline and nudges did, whatever is kept of them."""

import itertools
from dataclasses import replace

import pytest
import torch

from stability.metrics.pieces import pieces_of
from stability.recorder.sketching import stored_sketch
from stability.records.distances import read_distances, with_parents, write_distances
from stability.records.manifest import read_manifest
from stability.records.paths import StudyPaths
from stability.records.run_files import RunFiles
from stability.records.sealed_json import read_sealed, write_sealed
from stability.records.snapshots import read_snapshot
from stability.records.weight_sketches import write_weight_sketch
from stability.study.distances import update_distances
from tests.stability.study.walked_runs import (
    NOISY,
    STATES,
    Notes,
    drop,
    seal,
    seed_of,
    walked,
    write,
)


def measured(folder, runs):
    notes = Notes()
    found = update_distances(folder, 0, runs, notes).weights[9]
    assert notes == []
    assert found == read_distances(folder, 0).weights[9]
    return found


def parted(one, other):
    """Return three distances of two arms: of all weights, of those kept, and of those left out."""
    a, b = walked(one, 9), walked(other, 9)
    wide, bias = (a[name].double() - b[name].double() for name in ("wide.weight", "bias"))
    parts = [wide.flatten(), bias], [wide.flatten(), bias[16:]], [bias[:16]]
    return [torch.cat(part).norm().item() for part in parts]


def test_what_noise_moves_is_measured_apart(tmp_path):
    runs = seed_of(tmp_path, *STATES)
    matrix = measured(tmp_path, runs)
    assert matrix.left_out.values == {"bias": (NOISY,)}
    assert (matrix.left_out.asked, matrix.left_out.count) == (("baseline", "nudge"), 16)
    for pair in itertools.permutations(STATES, 2):
        found = matrix.between(*pair), matrix.kept_between(*pair), matrix.left_between(*pair)
        assert found == pytest.approx(parted(*pair), rel=1e-12)
        # the walk is most of it: what this is for
        assert found[0] > 10 * found[1]
    assert matrix.kept_between("candidate", "nobody") is None
    at_start = read_distances(tmp_path, 0).weights[0]
    assert at_start.left_out.values == {}
    assert at_start.kept_between("candidate", "baseline") == 0.0
    assert at_start.left_between("candidate", "baseline") is None


def test_no_candidate_changes_what_is_left_out(tmp_path):
    """Not one that moves all of a bias, nor one that comes first."""
    alone = measured(tmp_path, seed_of(tmp_path, "baseline", "reference", "nudge"))
    runs = seed_of(tmp_path, *STATES)
    write(runs["candidate"], 9, {**walked("candidate", 9), "bias": torch.full((37,), 5.0)})
    later = measured(tmp_path, runs)
    assert later.left_out.values == alone.left_out.values == {"bias": (NOISY,)}
    assert later.kept_between("candidate", "baseline") > 20, "what it did to the rest of the bias"
    assert later.left_between("candidate", "baseline") > 19
    StudyPaths(tmp_path).distances(0).unlink()
    assert measured(tmp_path, {x: runs[x] for x in ("candidate", "baseline")}).left_out is None
    assert measured(tmp_path, runs) == later


def test_distances_are_symmetric_to_the_bit_however_many_arms(tmp_path, monkeypatch):
    """A vector loop and what it leaves over may round otherwise."""
    many = {f"arm_{i}": (10 + i, 1e-4 * (1 + i / 7)) for i in range(9)}
    for arm, how in many.items():
        monkeypatch.setitem(STATES, arm, how)
    matrix = measured(tmp_path, seed_of(tmp_path, *STATES))
    for rows in (matrix.rows, matrix.left_out.kept_rows, matrix.left_out.left_rows):
        assert all(a == b for a, b in zip(rows, zip(*rows, strict=True), strict=True))


def test_a_nudge_that_comes_later_is_asked_too(tmp_path, monkeypatch):
    runs = seed_of(tmp_path, *STATES)
    measured(tmp_path, runs)
    monkeypatch.setitem(STATES, "nudge_b", (7, 1e-5))
    runs |= seed_of(tmp_path, "nudge_b")
    RunFiles(runs["nudge_b"], read_manifest(runs["nudge_b"].manifest)).update(role="nudge")
    # elsewhere in all of the bias
    write(runs["nudge_b"], 9, {**walked("nudge_b", 9), "bias": -0.1 * torch.ones(37)})
    found = measured(tmp_path, runs)
    assert found.left_out.asked == ("baseline", "nudge", "nudge_b")
    assert found.left_out.values == {"bias": ((0, 37),)}


@pytest.mark.parametrize("lacking", ["nudge", "start", "sealed"])
def test_where_it_was_not_asked_nothing_is_parted(tmp_path, lacking):
    """No nudge; no start on record; or a study that was sealed before values were left out."""
    runs = seed_of(tmp_path, *STATES)
    if lacking == "nudge":
        del runs["nudge"]
    elif lacking == "start":
        runs["nudge"].sketch(0).unlink()
        runs["nudge"].snapshot(0).unlink()
    else:
        seal(tmp_path)
    matrix = update_distances(tmp_path, 0, runs, Notes()).weights[9]
    assert matrix.left_out is None
    pair = ("candidate", "reference")
    assert matrix.kept_between(*pair) == matrix.between(*pair) > 0.1
    assert matrix.left_between(*pair) is None


def test_what_could_not_be_asked_at_first_is_asked_once_it_can(tmp_path):
    """A start that had not been copied yet, or a record of before: the parents are the same."""
    runs = seed_of(tmp_path, *STATES)
    expected = measured(tmp_path, runs)
    path = StudyPaths(tmp_path).distances(0)
    content = read_sealed(path, "")
    for step in content["steps"]:
        del step["weights"]["left_out"]
    write_sealed(path, content)
    assert read_distances(tmp_path, 0).weights[9].left_out is None
    assert measured(tmp_path, runs) == expected


def test_once_snapshots_are_dropped_a_later_arm_is_parted_by_sketch(tmp_path, monkeypatch):
    runs = seed_of(tmp_path, *STATES)
    before = measured(tmp_path, runs)
    drop(runs, *STATES)
    monkeypatch.setitem(STATES, "late", (8, 3e-4))
    runs |= seed_of(tmp_path, "late")
    after = measured(tmp_path, runs)
    assert (after.left_out.values, after.left_out.asked) == (
        before.left_out.values,
        before.left_out.asked,
    )
    for pair in itertools.combinations(before.arms, 2):
        assert after.between(*pair) == before.between(*pair), "what was exact stays exact"
        assert after.kept_between(*pair) == before.kept_between(*pair)
        assert after.left_between(*pair) == before.left_between(*pair)
    for other in before.arms:
        whole, kept, left = parted("late", other)
        assert after.between("late", other) == pytest.approx(whole, rel=0.014)
        assert after.kept_between("late", other) == pytest.approx(kept, rel=0.014)
        assert after.left_between("late", other) == pytest.approx(left, rel=1e-12)
    assert {*after.sketched} == {(arm, "late") for arm in before.arms}


def test_what_is_left_out_is_found_again_after_the_record_is_lost(tmp_path):
    runs = seed_of(tmp_path, *STATES)
    before = measured(tmp_path, runs)
    drop(runs, *STATES)
    StudyPaths(tmp_path).distances(0).unlink()
    after = measured(tmp_path, runs)
    assert after.left_out.values == before.left_out.values
    pair = ("candidate", "reference")
    assert after.kept_between(*pair) == pytest.approx(before.kept_between(*pair), rel=0.014)


def test_a_nudge_that_is_added_costs_no_exact_distance(tmp_path, monkeypatch):
    """Of all weights they are known, whatever is left out from now on."""
    controls = seed_of(tmp_path, "baseline", "reference", "candidate")
    before = measured(tmp_path, controls)
    drop(controls, *controls)
    after = measured(tmp_path, {**controls, **seed_of(tmp_path, "nudge")})
    assert after.left_out.values == {"bias": (NOISY,)}
    for pair in itertools.combinations(before.arms, 2):
        assert after.between(*pair) == before.between(*pair)
        assert pair not in after.sketched
    kept = after.kept_between("candidate", "reference")
    assert kept == pytest.approx(parted("candidate", "reference")[1], rel=0.014)


def test_a_sketch_without_vectors_tells_nothing_of_the_parts(tmp_path, monkeypatch):
    """Of an older version; what was measured before is kept."""
    runs = seed_of(tmp_path, *STATES)
    before = measured(tmp_path, runs)
    drop(runs, "nudge", "reference")
    monkeypatch.setitem(STATES, "late", (8, 3e-4))
    runs |= seed_of(tmp_path, "late")
    for paths in runs.values():
        _forget_vectors(paths)
    after = update_distances(tmp_path, 0, runs, Notes()).weights[9]
    assert after.left_out.values == before.left_out.values, "of the same controls"
    assert after.kept_between("late", "reference") is None
    assert after.between("late", "reference") > 0.1
    late = parted("late", "baseline")[1]
    assert after.kept_between("late", "baseline") == pytest.approx(late, rel=1e-12)
    pair = ("candidate", "reference")
    assert after.kept_between(*pair) == before.kept_between(*pair)
    # of a nudge that comes now nobody can say what it moved, so nor what all of them did
    monkeypatch.setitem(STATES, "nudge_b", (9, 1e-5))
    runs |= seed_of(tmp_path, "nudge_b")
    files = RunFiles(runs["nudge_b"], read_manifest(runs["nudge_b"].manifest))
    files.update(role="nudge")
    assert update_distances(tmp_path, 0, runs, Notes()).weights[9].left_out is None


def _forget_vectors(paths):
    for step in (0, 9):
        state = walked(paths.arm, step)
        found = replace(stored_sketch(pieces_of(state)), vectors=None)
        write_weight_sketch(paths.sketch(step), found)
        RunFiles(paths, read_manifest(paths.manifest)).add(paths.sketch(step))


def test_a_stale_nudge_takes_what_is_left_out_with_it(tmp_path):
    runs = seed_of(tmp_path, *STATES)
    measured(tmp_path, runs)
    write(runs["nudge"], 9, {name: x + 1 for name, x in walked("nudge", 9).items()})
    listed = {arm: (paths, read_manifest(paths.manifest)) for arm, paths in runs.items()}
    matrix = with_parents(read_distances(tmp_path, 0), listed).weights[9]
    assert (matrix.left_out, "nudge" in matrix.arms) == (None, False)
    listed["candidate"][0].manifest.unlink()
    write(runs["nudge"], 9, walked("nudge", 9))
    del listed["candidate"]
    listed["nudge"] = runs["nudge"], read_manifest(runs["nudge"].manifest)
    matrix = with_parents(read_distances(tmp_path, 0), listed).weights[9]
    assert len(matrix.left_out.kept_rows) == len(matrix.left_out.left_rows) == len(matrix.arms) == 3
    assert matrix.kept_between("nudge", "reference") == pytest.approx(
        parted("nudge", "reference")[1]
    )


@pytest.mark.parametrize("edit", ["row", "asymmetric", "unknown", "ranges"])
def test_a_record_of_other_shape_is_refused(tmp_path, edit):
    measured(tmp_path, seed_of(tmp_path, *STATES))
    path = StudyPaths(tmp_path).distances(0)
    content = read_sealed(path, "")
    left_out = content["steps"][1]["weights"]["left_out"]
    if edit == "row":
        left_out["kept_rows"] = left_out["kept_rows"][:-1]
    elif edit == "asymmetric":
        left_out["left_rows"][0][1] = 7.0
    elif edit == "ranges":
        left_out["values"]["bias"] = [[4, 4]]
    else:
        left_out["asked"] = ["baseline", "nobody"]
    write_sealed(path, content)
    said = {"unknown": "by nobody, which is none", "ranges": "which are no ranges"}
    with pytest.raises(ValueError, match=said.get(edit, "is not square and symmetric")):
        read_distances(tmp_path, 0)


def test_what_is_read_is_what_was_written(tmp_path):
    runs = seed_of(tmp_path, *STATES)
    measured(tmp_path, runs)
    found = read_distances(tmp_path, 0)
    write_distances(tmp_path, found)
    assert read_distances(tmp_path, 0) == found
    assert read_snapshot(runs["nudge"].snapshot(9)).keys() == walked("nudge", 9).keys()
