"""Runs whose snapshots were dropped compare by sketch, with all else that holds weights."""

import math

import pytest
import torch
from safetensors.torch import save_file

from stability.analysis.sketch_comparison import compare_by_sketch, is_sketch_alone, sketch_of
from stability.metrics.drift import drift
from stability.metrics.weight_hash import weight_hash
from stability.metrics.weight_sketch import RELATIVE_SD, weight_sketch
from stability.records.run_files import RunFiles
from stability.records.weight_files import open_weights
from tests.stability.analysis.dropped_runs import run_with, state_of


@pytest.mark.parametrize("moved", [1e-7, 1e-3, 1.0])
def test_two_runs_without_snapshots_are_as_far_apart_as_their_weights(tmp_path, moved):
    a, b = state_of(1, moved), state_of(0)
    runs = run_with(tmp_path / "a", {4: a}), run_with(tmp_path / "b", {4: b})
    found = compare_by_sketch((runs[0], 4), (runs[1], 4))
    exact = drift({x: a[x] for x in a if x != "steps"}, {x: b[x] for x in b if x != "steps"})["all"]
    assert found.rel_l2 == pytest.approx(exact["rel_l2"], rel=5 * RELATIVE_SD)
    norm = math.sqrt(
        sum(float(x.double().square().sum()) for x in b.values() if x.dtype.is_floating_point)
    )
    assert found.l2 == pytest.approx(exact["rel_l2"] * norm, rel=5 * RELATIVE_SD)
    assert found.cosine == pytest.approx(exact["cosine"], abs=3 * found.cosine_sd)
    # near one another it is far nearer
    assert abs(found.cosine - exact["cosine"]) <= 0.05 * exact["rel_l2"] ** 2 + 1e-12
    assert not found.equal
    assert found.dropped == (f"{runs[0]}, step 4", f"{runs[1]}, step 4")


def test_the_same_bits_are_equal_and_nothing_apart(tmp_path):
    broken = {**state_of(0), "nan": torch.tensor([math.nan, 1.0])}
    for state, cosine in ((state_of(0), 1.0), (broken, 1.0)):
        where = tmp_path / str(len(state))
        runs = [run_with(where / name, {4: state}) for name in "ab"]
        found = compare_by_sketch(*((run, None) for run in runs))
        assert (found.equal, found.l2, found.rel_l2, found.cosine) == (True, 0.0, 0.0, cosine)
    other = run_with(tmp_path / "c", {4: {**broken, "nan": torch.zeros(2)}})
    found = compare_by_sketch((runs[0], None), (other, None))
    assert not found.equal
    assert math.isnan(found.l2)
    assert math.isnan(found.cosine)


def test_one_bit_that_no_length_shows_makes_them_unequal(tmp_path):
    zeros = {"w": torch.zeros(3)}
    runs = [run_with(tmp_path / x, {1: s}) for x, s in (("a", zeros), ("b", {"w": -zeros["w"]}))]
    found = compare_by_sketch((runs[0], 1), (runs[1], 1))
    assert (found.equal, found.l2, found.rel_l2) == (False, 0.0, 0.0)


def test_weights_that_are_there_are_sketched_file_folder_or_a_run_without_sketches(tmp_path):
    a, b = state_of(1, 0.1), state_of(0)
    run = run_with(tmp_path / "a", {0: b, 4: a}, keep=[0])
    expected = weight_sketch(a).distance(weight_sketch(b))
    (tmp_path / "hf").mkdir()
    save_file(b, tmp_path / "hf" / "model.safetensors")
    torch.save(b, tmp_path / "b.pt")
    old = run_with(tmp_path / "old", {4: b}, keep=[4], sketched=False)
    for other in (tmp_path / "hf", tmp_path / "b.pt", old):
        found = compare_by_sketch((run, None), (other, None))
        assert found.l2 == expected
        assert found.dropped == (f"{run}, step 4",)
        back = compare_by_sketch((other, None), (run, None))
        assert (back.l2, back.b) == (expected, f"{run}, step 4")


def test_weights_read_one_by_one_have_the_sketch_and_hash_of_the_whole(tmp_path):
    state = state_of(2, 0.1)
    save_file(state, tmp_path / "x.safetensors")
    found = sketch_of(open_weights(tmp_path / "x.safetensors"))
    whole = weight_sketch(state)
    assert found.weights == weight_hash(state)
    assert found.sketch.outline == whole.outline
    assert torch.equal(found.sketch.buckets, whole.buckets)


def test_other_models_are_refused_with_the_name_that_differs(tmp_path):
    a, b = state_of(1), state_of(0)
    run = run_with(tmp_path / "a", {0: a, 4: a}, keep=[0])
    wide = run_with(tmp_path / "b", {0: b, 4: {**b, "h.1.w": torch.zeros(3)}}, keep=[0, 4])
    with pytest.raises(ValueError, match=r"got h.1.w: \(60, 50\) and \(3,\); --retrain"):
        compare_by_sketch((run, 4), (wide, 4))
    other = {f"model.{name}": x for name, x in b.items()}
    save_file(other, tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match=r"got h.0.w: \(60, 50\) and nothing; --retrain"):
        compare_by_sketch((run, 4), (tmp_path / "x.safetensors", None))
    # without any snapshot there is no name to tell
    bare = run_with(tmp_path / "bare", {4: a})
    with pytest.raises(ValueError, match=r"got other ones: .*bare, step 4 and "):
        compare_by_sketch((bare, 4), (wide, 4))


def test_a_sketch_that_is_damaged_or_missing_is_named(tmp_path):
    run, other = (run_with(tmp_path / x, {4: state_of(0)}) for x in "ab")
    path = RunFiles.unnamed(run).paths.sketch(4)
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(ValueError, match=r"sketches/step-00000004\.safetensors: is damaged"):
        compare_by_sketch((run, 4), (other, 4))
    bare = run_with(tmp_path / "bare", {4: state_of(0)}, sketched=False)
    with pytest.raises(ValueError, match="was dropped, and there is no sketch of it; --retrain"):
        compare_by_sketch((other, 4), (bare, 4))


def test_a_sketch_is_asked_only_where_a_snapshot_was_dropped(tmp_path):
    run = run_with(tmp_path / "a", {0: state_of(0), 4: state_of(1)}, keep=[0])
    assert is_sketch_alone(run, 4)
    assert is_sketch_alone(run, None)
    assert not is_sketch_alone(run, 0)
    assert not is_sketch_alone(run, 3), "of which there never was one"
    assert not is_sketch_alone(tmp_path, None)
