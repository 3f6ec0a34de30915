"""All about one arm, at any width: the records' figures, how each seed went, and its growth."""

import io
import json
import math
from dataclasses import replace

import pytest
from rich.console import Console

from stability.analysis.arm_growth import ArmGrowth, Dynamics
from stability.analysis.arm_summary import summarise_arm
from stability.analysis.intervals import Interval
from stability.analysis.ladder import ladder_of
from stability.analysis.number_text import MISSING
from stability.analysis.study_records import read_study
from stability.cli.main import main
from stability.records.events import Event, log_event
from stability.records.manifest import read_manifest, write_manifest
from stability.records.metric_log import MetricLog
from stability.records.metric_names import EVAL_LOSS, TRAIN_LOSS, deviation_name, drift_name
from stability.records.paths import RunPaths
from stability.report.terminal.arm import print_arm, print_growth

FORWARD_AND_BACKWARD = ("out", "dq", "dk", "dv")
GROWN = ["init", "layout"]
LONG = "blocks." + "x" * 290 + ".weight"


def viewed(folder, arm):
    study = read_study(folder)
    return summarise_arm(study, ladder_of(study), arm)


def printed(folder, arm, width=80):
    console = Console(width=width, file=io.StringIO(), force_terminal=False)
    print_arm(viewed(folder, arm), console)
    return console.file.getvalue()


@pytest.fixture
def ill(synthetic, tmp_path):
    """A study of which each seed of one arm went another way, with names that are not nice."""
    synthetic.write_study_json(tmp_path, seeds=[0, 1, 2, 3, 4])
    arms = {arm["name"]: arm for arm in synthetic.ARMS}
    arm = arms["flash_fa2"]
    for seed in range(4):  # that drifts may be taken from it
        synthetic.write_run(tmp_path, arms["baseline"], seed)
    states = ["finished", "failed", "diverged", "interrupted"]
    for seed, state in enumerate(states):
        paths = synthetic.write_run(
            tmp_path, arm, seed, state=state, until=200 if state == "finished" else 60 + seed
        )
        manifest = read_manifest(paths.manifest)
        log = MetricLog(paths.metrics)
        log.append(50, {drift_name(LONG, "rel_l2"): math.nan if seed else 0.5})
        log.append(50, {drift_name("[bold]b\x1b[31m", "rel_l2"): 0.25})
        log.append(50, {deviation_name("layer_0", "out", "bias_ulp"): 1e31})
        log_event(log, Event(40, "alert", "layer_1", "<script>alert(1)</script> [red]x[/]"))
        log.close()
        write_manifest(paths.manifest, manifest)
    return tmp_path


@pytest.mark.parametrize("width", [80, 124])
@pytest.mark.parametrize("arm", ["flash_fa2", "rerun", "baseline", "init_seed"])
def test_nothing_is_wider_than_the_terminal_or_cut_off(finished, ill, arm, width):
    for folder in (finished, ill):
        text = printed(folder, arm, width)
        assert max(len(line) for line in text.splitlines()) <= width
        assert "…" not in text


def test_figures_are_those_of_the_records(finished):
    study = read_study(finished)
    runs = study.arm("flash_fa2").runs
    text = printed(finished, "flash_fa2")
    for metric in ("rel_l2", "w1", "mean_abs", "max_abs", "sign_flips"):
        values = [run.drift(metric)[50] for run in runs.values()]
        assert f" {sum(values) / len(values):.1e}" in text
    name = deviation_name("layer_3", "out", "error_ratio")
    line = next(line for line in text.splitlines() if line.startswith("layer_3"))
    last = [run.series(name)[180] for run in runs.values()]
    assert f" {sum(last) / len(last):#.2g}x" in line
    assert '"flash"' in text
    assert "attention.profile" in text
    assert "0▄" in text.replace(" ", "") or "0▁" in text, "the drift at step 0 is exactly 0"


def test_each_seed_is_shown_as_what_it_is(ill):
    lines = printed(ill, "flash_fa2", 100).splitlines()
    said = [" ".join(line.split()) for line in lines]
    loss = viewed(ill, "flash_fa2").row.final_loss.per_seed[0]
    assert f"0 200 of 200 {loss:.3f} finished" in said
    assert f"1 61 of 200 {MISSING} failed ValueError: loss is not finite" in said
    assert f"2 62 of 200 {MISSING} diverged" in said
    assert f"3 63 of 200 {MISSING} interrupted" in said
    assert f"4 0 of 200 {MISSING} missing" in said


def test_the_most_drifted_parameters_come_first_and_whole(finished, ill):
    view = viewed(ill, "flash_fa2")
    assert view.last_step == 200
    assert [name for name, _ in view.parameters] == ["blocks.0.qkv.weight"]
    text = printed(finished, "flash_fa2")
    mean = viewed(finished, "flash_fa2").parameters[0][1].mean
    assert f"{mean:.1e}" in text.split("most drifted parameters at step 200")[1]
    assert "all 1 are exactly the baseline's" in printed(finished, "rerun")


def test_a_drift_that_is_no_number_comes_first_and_names_are_text(synthetic, ill):
    for seed in (0,):  # let every seed end at step 50
        (ill / "flash_fa2" / f"seed-{seed}" / "metrics.jsonl").unlink()
        (ill / "flash_fa2" / f"seed-{seed}" / "manifest.json").unlink()
    view = viewed(ill, "flash_fa2")
    assert [name for name, _ in view.parameters[:2]] == [LONG, "[bold]b\x1b[31m"]
    text = printed(ill, "flash_fa2")
    assert "[bold]b\\x1b[31m" in text
    assert "\x1b" not in text
    assert LONG in "".join(line.split(" ")[0] for line in text.splitlines())
    assert "layer_1: <script>alert(1)</script> [red]x[/]" in " ".join(text.split())


def test_json_holds_every_seed_and_no_number_that_json_has_not(ill, finished, capsys):
    assert main(["show", str(ill), "flash_fa2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [seed["state"] for seed in found["seeds"]][1:3] == ["failed", "diverged"]
    run = read_study(ill).arm("flash_fa2").runs[0]
    assert found["drift"]["rel_l2"]["50"]["per_seed"]["0"] == run.drift("rel_l2")[50]
    assert main(["show", str(finished), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"][0]["arm"] == "baseline"


def test_an_unknown_arm_is_refused_with_the_nearest(finished, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["show", str(finished), "flash_fa3"])
    assert stop.value.code == 2
    said = "stability: arm must be one of the study's 7, got 'flash_fa3'; nearest: flash_fa2"
    assert capsys.readouterr().err.startswith(said)


def test_the_baseline_and_an_arm_that_has_not_begun_are_shown(synthetic, finished, tmp_path):
    text = printed(finished, "baseline")
    assert "drift from" not in text
    assert f"{viewed(finished, 'baseline').row.final_loss.per_seed[0]:.3f}" in text
    synthetic.write_study_json(tmp_path)
    assert "no drift on record yet" in printed(tmp_path, "nudge")
    assert TRAIN_LOSS not in printed(tmp_path, "nudge")
    assert "worst place" not in printed(tmp_path, "nudge")


def interval(low, mean, high):
    return Interval(low=low, mean=mean, high=high, n=5, level=0.9)


def dynamics(rate, reason=""):
    return Dynamics(rate=rate, phase=(1, 20), seeds=5, reason=reason)


def growth(arm, rate, **changes):
    values = {
        "arm": arm,
        "dynamics": dynamics(rate),
        "offset": interval(9.1, 12.3, 15.2),
        "slope": interval(2.46e-6, 2.7e-6, 2.91e-6),
        "lost_in_chaos": None,
    }
    return ArmGrowth(**{**values, **changes})


def grown(rows):
    console = Console(width=80, record=True, file=io.StringIO())
    print_growth(rows, console)
    return console.export_text()


def test_figures_have_their_intervals_and_fit_80_columns():
    rate = interval(0.0542, math.log(2) / 10.9, 0.07)
    shown = grown([growth("flash_all_bf16", rate, lost_in_chaos=100)])
    assert "A tiny difference doubles in 10.9 [9.9, 12.8] steps, from step 1 to 20" in shown
    assert "12x [9.1, 15]" in shown
    assert "2.7 [2.5, 2.9]e-06" in shown
    assert " 100" in shown
    assert "90% interval] of 5 seeds" in shown
    assert "\N{HORIZONTAL ELLIPSIS}" not in shown


def test_arms_that_do_not_drift_are_left_out():
    still = growth("rerun", interval(0.2, 0.3, 0.4), slope=interval(0.0, 0.0, 0.0))
    moving = growth("fast", interval(-0.1, 0.1, 0.2))
    shown = grown([moving, still])
    assert "fast" in shown
    assert "rerun" not in shown
    assert "6.93 [3.47, inf]" in shown
    assert grown([still]) == ""


def test_without_a_rate_the_reason_stands_in_its_place():
    nan = math.nan
    nothing = Interval(low=nan, mean=nan, high=nan, n=0, level=0.9)
    row = growth("flash_fa2", nothing, dynamics=dynamics(nothing, "there is no nudge"))
    shown = grown([ArmGrowth(**{**_values(row), "offset": nothing})])
    assert "No rate of growth is stated: there is no nudge." in shown
    assert "2.7 [2.5, 2.9]e-06" in shown


def _values(row):
    return {name: getattr(row, name) for name in row.__slots__}


def test_a_seed_s_held_out_loss_stands_beside_its_final_one(synthetic, tmp_path):
    study = synthetic.write_synthetic(tmp_path / "evaluated")
    log = MetricLog(RunPaths.for_run(study, "flash_fa2", 1).metrics)
    log.append(synthetic.STEPS, {EVAL_LOSS: 1.23456})
    log.close()
    said = [" ".join(line.split()) for line in printed(study, "flash_fa2", 120).splitlines()]
    losses = viewed(study, "flash_fa2").row.final_loss.per_seed
    assert "seed step final loss held-out loss state" in said
    assert f"0 200 of 200 {losses[0]:.3f} {MISSING} finished" in said
    assert f"1 200 of 200 {losses[1]:.3f} 1.23456 finished" in said


def test_an_arm_that_trained_in_other_processes_has_another_layout(synthetic, tmp_path):
    folder = synthetic.write_synthetic(tmp_path / "quickstart", seeds=[0])
    arms = ("baseline", "nudge")
    assert viewed(folder, "nudge").to_dict()["groups"] == ["init"]
    for arm in arms:  # a baseline of two ranks as well is no other layout
        path = RunPaths.for_run(folder, arm, 0).manifest
        assert viewed(folder, "nudge").groups == (["init"] if arm == arms[0] else GROWN)
        manifest = read_manifest(path)
        write_manifest(path, replace(manifest, resolved={**manifest.resolved, "ranks": 2}))
    assert viewed(folder, "nudge").groups == ["init"]
    assert viewed(folder, "baseline").groups == []


@pytest.fixture
def looked_at(synthetic, tmp_path):
    """Write a study in which flash_fa2 was looked at ten times; its figures by (result, metric)."""

    def write(figures, **changes):
        folder = synthetic.write_synthetic(tmp_path / "looked_at", seeds=[0], **changes)
        log = MetricLog(RunPaths.for_run(folder, "flash_fa2", 0).metrics)
        for step in range(0, 100, 10):
            wave = 1 if step % 20 else -1
            log.append(
                step,
                {
                    deviation_name(f"layer_{layer}", what, metric): value * (1 + 0.02 * wave)
                    for layer in range(synthetic.LAYERS)
                    for what in FORWARD_AND_BACKWARD
                    for metric, value in {
                        "error_ratio": 0.95,
                        "gain": 1e-6,
                        "gain_baseline": 1e-6,
                        "golden_bias_ulp": 1e-3,
                        "golden_bias_ulp_baseline": 1e-3,
                        **figures.get((layer, what), {}),
                    }.items()
                },
            )
        log.close()
        return folder

    return write


def rows_of(text):
    body = text.split("worst place of each result")[1].split("error: that of plain")[0]
    return [line.split() for line in body.splitlines()[3:] if line.strip()]


def test_the_result_that_is_wrong_comes_first_with_its_layer_and_step(looked_at):
    folder = looked_at({(1, "dq"): {"gain": 5e-3}})
    text = printed(folder, "flash_fa2")
    rows = rows_of(text)
    assert rows[0] == ["dq", "gain", "+0.5%", "0.1%", "+0.51%", "10", "layer_1"]
    assert {row[0] for row in rows} == set(FORWARD_AND_BACKWARD)
    assert "seed 0: layer_1: a wrong factor since step 0: dq is 1.0050" in text
    assert max(map(len, text.splitlines())) <= 80


DQ = {(layer, "dq"): {"error_ratio": 2.75} for layer in range(5)}
"""As of a kernel that takes delta from the rounded output."""


def test_an_error_beyond_its_limit_stands_out(looked_at, capsys):
    folder = looked_at(DQ)
    text = printed(folder, "flash_fa2")
    assert rows_of(text)[0][:4] == ["dq", "error", "2.75x", "2.00x"]
    said = "every layer: error ratio is beyond its limit since step 0: dq 2.75"
    assert f"seed 0: {said}" in " ".join(text.split())
    assert main(["show", str(folder)]) == 0
    assert f"flash_fa2, seed 0: {said}" in " ".join(capsys.readouterr().out.split())


def test_an_error_that_the_policy_allows_is_shown_and_does_not_stand_out(looked_at, capsys):
    folder = looked_at(DQ, policy={"max_error_ratio": 4.0})
    view = viewed(folder, "flash_fa2")
    assert view.found == ()
    assert rows_of(printed(folder, "flash_fa2"))[0][:4] == ["dq", "error", "2.75x", "4.00x"]
    assert main(["show", str(folder)]) == 0
    assert "beyond its limit since" not in " ".join(capsys.readouterr().out.split())
    assert view.to_dict()["worst"][0] == {
        "result": "dq",
        "figure": "error_ratio",
        "place": view.worst[0].where,
        "mean": pytest.approx(2.75, rel=1e-3),
        "limit": 4.0,
        "of_limit": pytest.approx(2.75 / 4, rel=1e-3),
        "largest": pytest.approx(2.75 * 1.02),
        "largest_at": 10,
    }
