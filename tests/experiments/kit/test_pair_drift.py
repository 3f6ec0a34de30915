"""Drift of any two arms: the logged one where it is logged, refused where they are no pair."""

import math
import shutil

import pytest

from experiments.kit.study import at_step, log_scatter, over, pair_drift, slopes
from stability.analysis.study_records import read_study
from stability.config.load import load_study
from stability.records.paths import RunPaths


def test_against_the_baseline_it_is_what_the_run_logged(trained):
    rows = pair_drift(trained, "fp32", "baseline", [0, 1])
    assert [(row["seed"], row["step"]) for row in rows] == [
        (seed, step) for seed in (0, 1) for step in (0, 1, 2, 4, 6)
    ]
    arm = read_study(trained).arm("fp32")
    assert arm
    for metric in ("w1", "rel_l2", "max_abs"):
        for seed in (0, 1):
            logged = arm.runs[seed].drift(metric)
            assert {r["step"]: r[metric] for r in rows if r["seed"] == seed} == logged
            assert logged[6] > 0


def test_the_second_arm_is_the_reference(trained):
    forth, back = (
        [row["rel_l2"] for row in pair_drift(trained, *pair, [0])]
        for pair in (("baseline", "init_seed"), ("init_seed", "baseline"))
    )
    assert forth != back
    arm = read_study(trained).arm("init_seed")
    assert arm
    assert back == list(arm.runs[0].drift("rel_l2").values())


def test_arms_that_differ_in_two_axes_are_no_pair(trained, write_study, run_tiny, tmp_path):
    with pytest.raises(
        ValueError, match="flash_fa2 and fp32 must differ in one axis alone, seed 0: no pair"
    ):
        pair_drift(trained, "flash_fa2", "fp32", [0])

    def edit(content):
        flash = content["arms"]["flash_fa2"]
        content["arms"] = {"baseline": {}, "both": {"precision": "32-true", **flash}}
        content |= {"seeds": [0], "allow_many": True, "yardstick": ""}

    run_tiny(load_study(write_study(edit)), tmp_path)
    with pytest.raises(
        ValueError, match=r"one axis alone, seed 0: .*differ in attention, precision"
    ):
        pair_drift(tmp_path / "tiny", "both", "baseline", [0])


def test_a_damaged_record_is_no_pair(trained, tmp_path):
    study = tmp_path / "tiny"
    shutil.copytree(trained, study)
    snapshot = RunPaths.for_run(study, "fp32", 1).snapshot(2)
    snapshot.write_bytes(snapshot.read_bytes()[:-1] + b"\0")
    with pytest.raises(ValueError, match=r"seed 1: no pair: records of fp32"):
        pair_drift(study, "fp32", "baseline", [0, 1])


def test_rows_are_picked_by_pair_and_step_and_slopes_are_robust():
    rows = [
        {"pair": pair, "seed": seed, "step": step, "w1": rate * step + (100 if step == 3 else 0)}
        for pair, rate in (("a", 2.0), ("b", 5.0))
        for seed in (0, 1)
        for step in (4, 0, 1, 2, 3, 5, 6)
    ]
    assert at_step(rows, "b", "w1", 4) == {0: 20.0, 1: 20.0}
    assert slopes(rows, "a", "w1") == pytest.approx({0: 2.0, 1: 2.0})
    assert over(rows, "b", "a", "w1", 2) == {0: 2.5, 1: 2.5}


def test_log_scatter_is_each_seeds_distance_from_the_others():
    found = log_scatter({0: 1.0, 1: 1.0, 2: math.e})
    assert found == pytest.approx({0: 0.5, 1: 0.5, 2: 1.0})
