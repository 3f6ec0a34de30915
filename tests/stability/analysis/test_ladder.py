"""The ladder against numbers read straight from the records, and against records cut short."""

import json
from dataclasses import replace

import pytest
import torch

from stability.analysis.ladder import early_step_of, ladder_of, w1_floor
from stability.analysis.study_records import read_study
from stability.config.arms import INIT_SEED
from stability.config.axes import axes_of
from stability.metrics.drift import drift
from stability.records.manifest import read_manifest, write_manifest
from stability.records.metric_log import MetricLog
from stability.records.metric_names import EVAL_LOSS
from stability.records.paths import RunPaths, StudyPaths
from stability.records.sealed_json import read_sealed, write_sealed
from stability.records.window import WindowRecord, write_window
from tests.stability.sealing import seal


def logged(study_dir, arm, seed, name):
    """A metric by step, read without the code under test."""
    lines = (study_dir / arm / f"seed-{seed}" / "metrics.jsonl").read_text().splitlines()
    entries = [json.loads(line) for line in lines]
    return {entry["step"]: entry[name] for entry in entries if name in entry}


@pytest.fixture
def study(synthetic, tmp_path):
    """A finished study that a test may spoil."""
    return synthetic.write_synthetic(tmp_path / "quickstart")


@pytest.mark.parametrize("arm", ["flash_fa2", "fp32", "init_seed"])
def test_drift_loss_and_ratio_are_those_of_the_records(finished, arm):
    row = ladder_of(read_study(finished)).row(arm)
    for step, rel_l2, w1, ratio in [
        (20, row.rel_l2.early, row.w1.early, row.ratio.early),
        (200, row.rel_l2.last, row.w1.last, row.ratio.last),
    ]:
        mine = [logged(finished, arm, seed, "drift/all/rel_l2")[step] for seed in (0, 1)]
        yards = [logged(finished, "fp32", seed, "drift/all/rel_l2")[step] for seed in (0, 1)]
        assert dict(rel_l2.per_seed) == dict(enumerate(mine))
        assert (rel_l2.low, rel_l2.high) == (min(mine), max(mine))
        assert rel_l2.mean == pytest.approx(sum(mine) / 2, rel=1e-15)
        assert ratio.mean == pytest.approx((mine[0] / yards[0] + mine[1] / yards[1]) / 2, rel=1e-15)
        assert w1.per_seed[1] == logged(finished, arm, 1, "drift/all/w1")[step]
    losses = logged(finished, arm, 1, "train/loss")
    tail = [losses[step] for step in range(180, 200)]
    assert row.final_loss.per_seed[1] == pytest.approx(sum(tail) / 20, rel=1e-15)


def test_rows_climb_from_the_baseline_by_early_drift(finished):
    names = [row.arm for row in ladder_of(read_study(finished)).rows]
    assert names == [
        "baseline",
        "rerun",
        "nudge",
        "flash_fa2",
        "fp32",
        "flash_all_bf16",
        "init_seed",
    ]


def test_rerun_is_exactly_zero_and_the_baseline_has_no_drift(finished):
    ladder = ladder_of(read_study(finished))
    rerun = ladder.row("rerun")
    assert rerun.rel_l2.early.is_zero
    assert rerun.rel_l2.last.is_zero
    assert rerun.ratio.last.mean == 0
    baseline = ladder.row("baseline")
    assert (baseline.rel_l2.last.n, baseline.w1.early.n, baseline.ratio.last.n) == (0, 0, 0)


def test_changes_read_as_sentences(finished):
    said = {row.arm: row.change for row in ladder_of(read_study(finished)).rows}
    assert said == {
        "baseline": "baseline, bf16-mixed",
        "flash_all_bf16": "attention: baseline -> flash:all_bf16",
        "flash_fa2": "attention: baseline -> flash:fa2",
        "rerun": "nothing (A/A)",
        "nudge": "initial weights moved by 1 ULP",
        "fp32": "bf16-mixed -> 32-true",
        "init_seed": "other initial weights (seed +1000)",
    }


@pytest.mark.parametrize(
    ("diff", "said"),
    [
        (
            {"attention.numerics.block_k": [None, 32], "attention.implementation": ["x", "flash"]},
            "attention: baseline -> flash (block_k=32)",
        ),
        ({"seed.order_offset": [0, 7]}, "other batch order (seed +7)"),
        ({"model.init": ["gpt2", "xavier"]}, "initialisation: gpt2 -> xavier"),
        ({"optimizer.lr": [0.1, 0.2]}, "optimizer.lr: 0.1 -> 0.2"),
    ],
    ids=["numerics", "order", "init", "anything"],
)
def test_every_axis_has_a_sentence(finished, study, diff, said):
    path = study / "study.json"
    content = read_sealed(path, "")
    content["arms"][1].update(diff=diff, axis=axes_of(diff)[0])
    write_sealed(path, content)
    assert ladder_of(read_study(study)).row("flash_all_bf16").change == said


@pytest.mark.parametrize(
    ("asked", "read"), [(0, 1), (1, 1), (20, 20), (49, 20), (200, 100), (999, 100)], ids=str
)
def test_early_step_is_a_planned_snapshot(synthetic, tmp_path, asked, read):
    synthetic.write_study_json(tmp_path, early_step=asked)
    assert ladder_of(read_study(tmp_path)).early_step == read


def freeze(study_dir, step):
    """Freeze the judged step as the first look does."""
    record = WindowRecord(
        step=step,
        reason="?",
        limit=0.04,
        reference="fp32",
        controls=["nudge"],
        seeds=[0, 1],
        log_excess=[],
        parents=[],
    )
    return write_window(study_dir, record)


def test_a_study_that_names_no_early_step_is_read_at_the_frozen_one(synthetic, tmp_path):
    study = synthetic.write_synthetic(tmp_path / "quickstart", early_step=0)
    assert ladder_of(read_study(study)).early_step == 1, "nothing is frozen yet"
    freeze(study, 10)
    ladder = ladder_of(read_study(study))
    assert ladder.early_step == json.loads(ladder.to_json())["early_step"] == 10
    row = ladder.row("flash_fa2")
    mine, yards = (logged(study, arm, 0, "drift/all/rel_l2")[10] for arm in ("flash_fa2", "fp32"))
    assert row.rel_l2.early.per_seed[0] == mine
    assert row.ratio.early.per_seed[0] == mine / yards, "both are read at the same step"


@pytest.mark.parametrize(
    ("asked", "named", "frozen", "read"),
    [(20, 0, 10, 20), (20, 5, 0, 20), (0, 5, 10, 5), (0, 0, 0, 1), (0, 0, 200, 100)],
    ids=["asked", "asked, named", "named before frozen", "frozen without any", "the last"],
)
def test_the_step_asked_for_goes_before_the_judged_one(
    synthetic, tmp_path, asked, named, frozen, read
):
    synthetic.write_study_json(tmp_path, early_step=asked, policy={"step": named})
    freeze(tmp_path, frozen)
    assert ladder_of(read_study(tmp_path)).early_step == read


def test_a_step_that_the_rerun_does_not_reach_is_no_early_one(synthetic, tmp_path):
    """Else nothing would say that A/A is zero."""
    synthetic.write_study_json(tmp_path, early_step=0, policy={"step": 20})
    study = read_study(tmp_path)
    arms = tuple(replace(x, until=10) if x.role == "rerun" else x for x in study.arms)
    assert any(arm.until == 10 for arm in arms)
    assert early_step_of(study) == 20
    assert early_step_of(replace(study, arms=arms)) == 10


def test_a_damaged_window_does_not_take_the_ladder_away(synthetic, tmp_path):
    synthetic.write_study_json(tmp_path, early_step=0)
    freeze(tmp_path, 10)
    StudyPaths(tmp_path).window.write_text("{")
    assert ladder_of(read_study(tmp_path)).early_step == 1


def with_reference(study, arm):
    return replace(
        study,
        yardstick="",
        arms=tuple(replace(x, role="reference") if x.name == arm else x for x in study.arms),
    )


def test_a_study_without_a_yardstick_is_measured_by_its_reference(finished):
    study = read_study(finished)
    named, own = ladder_of(study), ladder_of(with_reference(study, "fp32"))
    assert own.yardstick == "fp32"
    assert [row.ratio for row in own.rows] == [row.ratio for row in named.rows]
    other = ladder_of(replace(with_reference(study, "fp32"), yardstick="nudge"))
    assert other.yardstick == "nudge", "the one that is named"
    assert other.row("nudge").ratio.early.mean == 1
    neither = ladder_of(replace(study, yardstick=""))
    assert neither.yardstick == ""
    assert not any(row.ratio.early.n or row.ratio.last.n for row in neither.rows)


def test_study_that_has_not_begun_has_rows_without_numbers(synthetic, tmp_path):
    synthetic.write_study_json(tmp_path)
    ladder = ladder_of(read_study(tmp_path))
    assert [row.state for row in ladder.rows] == ["missing"] * 7
    assert all(row.rel_l2.early.n == row.final_loss.n == 0 for row in ladder.rows)
    assert "NaN" not in ladder.to_json()


def test_run_cut_short_counts_only_at_steps_it_reached(synthetic, study):
    arm = synthetic.ARMS[2]
    (RunPaths.for_run(study, "flash_fa2", 1).metrics).unlink()
    synthetic.write_run(study, arm, 1, state="failed", until=60)
    row = ladder_of(read_study(study)).row("flash_fa2")
    assert (row.state, row.rel_l2.early.n, row.rel_l2.last.n, row.final_loss.n) == (
        "failed",
        2,
        1,
        1,
    )
    assert row.message == ("seed 1 failed: ValueError: loss is not finite (1 of 2 seeds finished)")


def test_ratio_leaves_out_a_seed_that_the_yardstick_lacks(study):
    metrics = RunPaths.for_run(study, "fp32", 1).metrics
    metrics.write_text('{"step": 0, "train/loss": 5.5}\n')
    row = ladder_of(read_study(study)).row("flash_fa2")
    assert set(row.ratio.early.per_seed) == {0}
    assert set(row.rel_l2.early.per_seed) == {0, 1}


def test_last_step_is_the_last_that_any_arm_reached(synthetic, tmp_path):
    synthetic.write_study_json(tmp_path)
    for arm in synthetic.ARMS[:2]:
        synthetic.write_run(tmp_path, arm, 0, state="running", until=70)
    ladder = ladder_of(read_study(tmp_path))
    assert (ladder.early_step, ladder.last_step) == (20, 50)
    assert ladder.row("flash_all_bf16").rel_l2.last.n == 1


@pytest.mark.parametrize("spoiled", ["manifest.json", "metrics.jsonl"])
def test_unreadable_record_fails_its_run_and_spares_the_others(study, spoiled):
    (study / "flash_fa2" / "seed-1" / spoiled).write_text('{"step"\n{"step": 1}\n')
    row = ladder_of(read_study(study)).row("flash_fa2")
    assert row.state == "failed"
    assert "seed 1 failed: records can't be read" in row.message
    assert row.rel_l2.last.n == 1
    assert ladder_of(read_study(study)).row("fp32").state == "finished"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "study.json: there is no such file; `stability run` writes it"),
        ("{", "must be JSON, is torn"),
        ("{}", "must have the checksum of what it says"),
        ({}, "missing key config, arms"),
    ],
    ids=["missing", "torn", "edited", "empty"],
)
def test_folder_without_a_study_is_refused(tmp_path, text, message):
    if isinstance(text, str):
        (tmp_path / "study.json").write_text(text)
    elif text is not None:
        write_sealed(tmp_path / "study.json", text)
    with pytest.raises(ValueError, match=message):
        ladder_of(read_study(tmp_path))


def test_diverged_run_is_shown_as_not_a_number(study):
    with (study / "fp32" / "seed-0" / "metrics.jsonl").open("a") as log:
        log.write(seal({"step": 200, "drift/all/rel_l2": "nan", "drift/all/w1": "inf"}))
    ladder = ladder_of(read_study(study))
    row = ladder.row("fp32")
    assert str(row.rel_l2.last.mean) == str(row.rel_l2.last.low) == "nan"
    content = json.loads(ladder.to_json())
    last = next(r for r in content["rows"] if r["arm"] == "fp32")["rel_l2"]["last"]
    assert last["mean"] == "nan"


def test_json_holds_what_the_ladder_holds(finished):
    ladder = ladder_of(read_study(finished))
    content = json.loads(ladder.to_json())
    assert [row["arm"] for row in content["rows"]] == [row.arm for row in ladder.rows]
    found = next(row for row in content["rows"] if row["arm"] == "flash_fa2")
    early = ladder.row("flash_fa2").rel_l2.early
    assert found["rel_l2"]["early"] == {
        "n": 2,
        "mean": early.mean,
        "min": early.low,
        "max": early.high,
        "interval": None,
        "per_seed": {"0": early.per_seed[0], "1": early.per_seed[1]},
    }
    assert content["yardstick"] == "fp32"


def test_with_five_seeds_each_figure_has_its_interval(synthetic, tmp_path):
    study = synthetic.write_synthetic(tmp_path / "five", seeds=[0, 1, 2, 3, 4])
    ladder = ladder_of(read_study(study))
    content = json.loads(ladder.to_json())
    found = next(row for row in content["rows"] if row["arm"] == "flash_fa2")
    low, high = found["ratio"]["early"]["interval"]
    ratio = ladder.row("flash_fa2").ratio.early
    assert ratio.low <= low < ratio.mean < high <= ratio.high


def test_sampling_floor_is_what_two_draws_differ_by_before_the_first_update(finished):
    study = read_study(finished)
    run = study.arm("init_seed").runs[0]
    assert w1_floor(study, 0) == run.drift("w1")[0] > 0
    ladder = ladder_of(study)
    assert ladder.row("init_seed").w1_floor.last.n == 2
    assert ladder.row("init_seed").w1_floor.early == ladder.row("init_seed").w1_floor.last
    assert ladder.row("fp32").w1_floor.last.n == 0
    without = replace(study, arms=tuple(arm for arm in study.arms if arm.axis != INIT_SEED))
    assert w1_floor(without, 0) is None


def test_the_pooled_sigma_is_no_measure_of_what_two_draws_differ_by():
    """Why the floor is measured: gains that every draw sets to 1 widen sigma and add no noise."""

    def draw(seed):
        dice = torch.Generator().manual_seed(seed)
        return {"matrices": 0.02 * torch.randn(30_000, generator=dice), "gains": torch.ones(100)}

    found = [drift(draw(2 * seed), draw(2 * seed + 1))["all"] for seed in range(10)]
    measured = sum(one["w1"] for one in found) / 10
    pooled = sum(one["w1"] / one["w1_over_std"] for one in found) / 10 * 1.8 / 30_100**0.5
    assert measured < pooled / 2.5


def test_final_loss_needs_a_finished_run(study):
    paths = RunPaths.for_run(study, "nudge", 0)
    write_manifest(paths.manifest, replace(read_manifest(paths.manifest), state="interrupted"))
    row = ladder_of(read_study(study)).row("nudge")
    assert set(row.final_loss.per_seed) == {1}
    assert row.state == "interrupted"


def test_study_of_one_step_reads_that_step_twice(synthetic, tmp_path):
    base = synthetic.CONFIG["base"]
    synthetic.write_study_json(tmp_path, base={**base, "train": {**base["train"], "steps": 1}})
    ladder = ladder_of(read_study(tmp_path))
    assert (ladder.early_step, ladder.last_step) == (1, 1)


def test_an_arm_that_ends_early_has_no_final_and_no_held_out_loss(synthetic, study):
    for arm in ("baseline", "flash_fa2"):
        for seed in synthetic.SEEDS:
            log = MetricLog(RunPaths.for_run(study, arm, seed).metrics)
            for step in (100, 200):
                log.append(step, {EVAL_LOSS: 1.0})
            log.close()
    read = read_study(study)
    assert ladder_of(read).row("flash_fa2").held_out_loss.per_seed == {0: 1.0, 1: 1.0}
    early = [replace(arm, until=100) if arm.name == "flash_fa2" else arm for arm in read.arms]
    row = ladder_of(replace(read, arms=tuple(early))).row("flash_fa2")
    assert not row.final_loss.per_seed
    assert not row.held_out_loss.per_seed, "it is that of fewer updates"
