"""The table in the terminal: the ladder's numbers, at any width."""

import io
import re
import shutil
from dataclasses import replace

import pytest
from rich.console import Console

from stability.analysis.ladder import ladder_of
from stability.analysis.number_text import MISSING, times
from stability.analysis.study_records import read_study
from stability.records.metric_log import MetricLog
from stability.records.metric_names import EVAL_LOSS
from stability.records.paths import RunPaths
from stability.records.sealed_json import read_sealed, write_sealed
from stability.report.terminal.ladder import DriftSparks, print_ladder
from stability.report.terminal.sparkline import Sparks


def printed(study, width, *, with_sparks=True):
    console = Console(width=width, file=io.StringIO(), force_terminal=False)
    sparks = DriftSparks(read_study(study), Sparks.for_console(console)) if with_sparks else None
    print_ladder(ladder_of(read_study(study)), console, sparks)
    return console.file.getvalue()


def line_of(text, arm):
    return next(line for line in text.splitlines() if line.startswith(f"{arm} "))


@pytest.fixture(scope="module")
def five_seeds(synthetic, tmp_path_factory):
    """A finished study with seeds enough for intervals."""
    return synthetic.write_synthetic(tmp_path_factory.mktemp("five") / "five", seeds=[*range(5)])


@pytest.mark.parametrize("seeds", [2, 5])
@pytest.mark.parametrize("width", [80, 100, 124, 130, 150, 200])
def test_nothing_is_wider_than_the_terminal_or_cut_off(finished, five_seeds, width, seeds):
    study = finished if seeds == 2 else five_seeds
    text = printed(study, width)
    assert max(len(line) for line in text.splitlines()) <= width
    assert "…" not in text
    for row in ladder_of(read_study(study)).rows:
        assert line_of(text, row.arm)
        assert f"{row.final_loss.mean:.3f}" in line_of(text, row.arm)


def test_a_name_is_whole_at_80_columns_beside_a_yardstick_with_a_long_one(finished):
    study = read_study(finished)
    arms = tuple(
        replace(arm, name="reference") if arm.name == "fp32" else arm for arm in study.arms
    )
    renamed = replace(study, arms=arms, yardstick="reference")
    console = Console(width=80, file=io.StringIO(), force_terminal=False)
    print_ladder(ladder_of(renamed), console)
    text = console.file.getvalue()
    assert max(len(line) for line in text.splitlines()) <= 80
    table = text[: text.index("drift: distance")]
    for arm in arms:
        assert line_of(table, arm.name)


@pytest.mark.parametrize("yardstick", ["fp32", "reference", "fp32_with_a_name_longer_than_most"])
@pytest.mark.parametrize("width", [80, 100, 130])
def test_no_heading_has_more_than_two_lines(finished, width, yardstick):
    study = read_study(finished)
    arms = tuple(replace(arm, name=yardstick) if arm.name == "fp32" else arm for arm in study.arms)
    console = Console(width=width, file=io.StringIO(), force_terminal=False)
    print_ladder(ladder_of(replace(study, arms=arms, yardstick=yardstick)), console)
    head, _, below = console.file.getvalue().strip("\n").partition("\u2500")
    lines = head.rstrip("\n").split("\n")
    assert len(lines) == 2
    whole = yardstick if len(yardstick) <= 9 else yardstick[:6]
    assert re.search(rf" x {whole}", lines[0])
    assert f"x {yardstick}: drift over {yardstick}'s at the same step" in " ".join(below.split())


def test_the_sparkline_leaves_before_the_figures(finished):
    line = line_of(printed(finished, 200), "rerun")
    assert line.rstrip().endswith("000000000")
    assert line_of(printed(finished, 200), "init_seed").rstrip().endswith("^^^^^^^^^")
    assert line_of(printed(finished, 200), "flash_fa2").rstrip().endswith("0▄▄▄▅▅▆██")
    assert "log scale from" in printed(finished, 200)
    narrow = printed(finished, 80)
    assert "▄" not in narrow
    assert "scale" not in narrow


@pytest.mark.parametrize("width", [60, 80, 100, 124, 130, 150, 200])
def test_each_column_that_has_no_room_is_named(finished, width):
    text = printed(finished, width)
    table, _, below = text.partition("drift: distance")
    lead = f"no room in {width} columns for: "
    said = " ".join(below.split()).partition(lead)[2].partition(".")[0]
    named = said.split(", ") if said else []
    assert ("W1" in named) == ("W1" not in table)
    assert ("drift by step" in named) == ("by step" not in table)
    row = line_of(table, "fp32")
    for what, has_range in (("losses", r"2\.\d+ ±"), ("drifts", r"e-\d\d ±")):
        assert (f"ranges of the {what}" in named) == (not re.search(has_range, row))
    assert bool(named) == (width < 150)


def test_an_interval_shares_its_exponent(five_seeds):
    row = ladder_of(read_study(five_seeds)).row("flash_fa2")
    line = line_of(printed(five_seeds, 200), "flash_fa2")
    drift, ratio = row.rel_l2.early, row.ratio.early
    low, high = drift.interval.low * 1e3, drift.interval.high * 1e3
    assert f" {drift.mean * 1e3:.1f} [{low:.1f}, {high:.1f}]e-03 " in line
    low, high = (times(end)[:-1] for end in (ratio.interval.low, ratio.interval.high))
    assert f" {times(ratio.mean)} [{low}, {high}] " in line
    assert "[ ]: 90% interval of the mean" in printed(five_seeds, 200)


@pytest.mark.parametrize("width", [80, 130])
def test_numbers_are_those_of_the_ladder(finished, width):
    row = ladder_of(read_study(finished)).row("flash_fa2")
    line = line_of(printed(finished, width), "flash_fa2")
    for spread in (row.rel_l2.early, row.rel_l2.last):
        assert f" {spread.mean:.1e}" in line
    assert f" {row.final_loss.mean:.3f}" in line
    assert f" {times(row.ratio.early.mean)}" in line


def test_wide_table_shows_w1_and_the_range_of_the_seeds(finished):
    row = ladder_of(read_study(finished)).row("flash_fa2")
    line = line_of(printed(finished, 130), "flash_fa2")
    share = 50 * (row.rel_l2.early.high - row.rel_l2.early.low) / row.rel_l2.early.mean
    assert f"{row.rel_l2.early.mean:.1e} ±{share:.0f}%" in line
    assert f"{row.w1.last.mean:.1e}" in line
    assert f"{row.w1.last.mean:.1e}" not in line_of(printed(finished, 80), "flash_fa2")


def test_zero_drift_is_exact_and_missing_drift_is_a_dash(finished):
    text = printed(finished, 130)
    assert line_of(text, "rerun").count("0 (exact)") == 3
    assert line_of(text, "baseline").count(MISSING) == 5


def test_candidates_get_their_sentence_and_controls_their_notes(finished):
    text = " ".join(printed(finished, 100).split())
    assert "flash_fa2 moves the weights" in text
    assert "note: A/A is zero" in text
    assert "mean of 2 seeds" in text


def test_of_a_study_in_training_no_mean_of_all_its_seeds_is_claimed(synthetic, tmp_path):
    study = synthetic.write_synthetic(tmp_path / "begun", seeds=[0, 1, 2])
    for arm in synthetic.ARMS:
        for seed in (1, 2):
            shutil.rmtree(RunPaths.for_run(study, arm["name"], seed).root)
    text = " ".join(printed(study, 100).split())
    assert "relative L2 over all of them, of 1 of 3 seeds." in text
    assert "mean of 3 seeds" not in text


def write_evaluated(synthetic, folder, **changes):
    """Write a finished study with a held-out loss for each run."""
    study = synthetic.write_synthetic(folder, **changes)
    for arm in synthetic.ARMS:
        for seed in synthetic.SEEDS:
            log = MetricLog(RunPaths.for_run(study, arm["name"], seed).metrics)
            log.append(synthetic.STEPS, {EVAL_LOSS: 1.25 + 0.5 * seed + 0.00004})
            log.close()
    return study


def test_the_early_column_is_the_judged_step_and_its_ratio_to_the_reference(synthetic, tmp_path):
    study = write_evaluated(synthetic, tmp_path / "judged", early_step=0, policy={"step": 10})
    content = read_sealed(study / "study.json", "")
    content["config"]["yardstick"] = ""
    content["arms"][5]["role"] = "reference"
    write_sealed(study / "study.json", content)
    ratio = times(ladder_of(read_study(study)).row("flash_fa2").ratio.early.mean)
    for width in (80, 130):
        table, _, below = printed(study, width).partition("drift: distance")
        *_, heads = table.partition("arm  ")[2].split("\n")[0].partition("what changed")
        steps = re.findall(r"step \d+", heads)
        assert steps[:2] == ["step 10", "step 200"]
        assert steps[-2:] == (["step 200", "step 10"] if width == 80 else ["step 10", "step 200"])
        assert f" {ratio}" in line_of(table, "flash_fa2")
        assert "x fp32: drift over fp32's at the same step" in " ".join(below.split())


def test_for_want_of_room_the_late_ratio_leaves_before_the_held_out_loss(synthetic, tmp_path):
    study = write_evaluated(synthetic, tmp_path / "evaluated")
    row = ladder_of(read_study(study)).row("flash_all_bf16")
    early, late = times(row.ratio.early.mean), times(row.ratio.last.mean)
    assert early != late
    for width in (80, 130):
        text = printed(study, width)
        said = " ".join(text.split())
        line = line_of(text, "flash_all_bf16")
        assert "1.50004" in line
        assert f" {early}" in line
        assert (f" {late}" in line) == (width == 130)
        assert ("x fp32 at step 200" in said) == (width != 130)


@pytest.mark.parametrize("width", [80, 130, 200])
def test_the_held_out_loss_stands_beside_the_final_one(synthetic, tmp_path, width):
    study = write_evaluated(synthetic, tmp_path / "evaluated")
    row = ladder_of(read_study(study)).row("flash_fa2")
    assert row.held_out_loss.per_seed == {0: 1.25004, 1: 1.75004}
    text = printed(study, width)
    assert max(len(line) for line in text.splitlines()) <= width
    assert "on text that no arm trains on" in " ".join(text.split())
    for arm in ("baseline", "flash_fa2"):
        assert "1.50004" in line_of(text, arm)


def test_names_and_messages_are_not_read_as_markup(synthetic, tmp_path):
    synthetic.write_study_json(tmp_path)
    synthetic.write_run(tmp_path, synthetic.ARMS[2], 0, state="failed", until=30)
    text = printed(tmp_path, 130)
    assert "[failed]" in text
    assert "note: flash_fa2: seed 0 failed: ValueError: loss is not finite." in text


def test_study_that_has_not_begun_prints(synthetic, tmp_path):
    synthetic.write_study_json(tmp_path)
    assert "[missing]" in " ".join(printed(tmp_path, 130, with_sparks=False).split())
