"""`stability.record`: what a loop tells of itself, and what is refused before any work is lost."""

import argparse
import json
import re
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import stability
from stability.analysis.ladder import ladder_of
from stability.analysis.study_records import read_study
from stability.config.commands import call_training
from stability.recorder.spooled import has_ended
from stability.records.manifest import Manifest, read_manifest
from stability.records.metric_log import read_metrics, read_text
from stability.records.metric_names import BATCH_HASH, EVAL_LOSS, TRAIN_LOSS, drift_name
from stability.records.paths import RunPaths
from stability.study.call_variables import Told
from stability.study.record_call import IdleRecorder, Recorder
from tests.stability.recorder.recording import Recording, bits_of, code_of, words

Train = Callable[..., Any]


@pytest.fixture
def train(tmp_path: Path) -> Train:
    def run(arm: str = "baseline", *, lr: float = 0.1, updates: int = 4, **given: Any) -> Any:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        data = torch.Generator().manual_seed(given.pop("data_seed", 0))
        told = {"study": "mine", "arm": arm, "out": tmp_path, "config": {"lr": lr}, **given}
        with stability.record(model, optimizer, **told) as recorder:
            for _ in range(updates):
                x = torch.randn(4, 3, generator=data)
                recorder.batch(x)
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                recorder.step(loss)
        return recorder

    return run


def manifest_of(out: Path, arm: str) -> Manifest:
    return read_manifest(RunPaths.for_run(out / "mine", arm, 0).manifest)


def test_a_loop_is_recorded_as_it_tells_of_itself(train: Train, tmp_path: Path) -> None:
    train()
    train("again")
    train("lr_x2", lr=0.2)
    paths = RunPaths.for_run(tmp_path / "mine", "lr_x2", 0)
    assert manifest_of(tmp_path, "lr_x2").diff == {"config.lr": [0.1, 0.2]}
    assert manifest_of(tmp_path, "lr_x2").axis == "config.lr"
    metrics = read_metrics(paths.metrics)
    assert len(metrics[TRAIN_LOSS].values) == 4
    assert metrics[drift_name("all", "rel_l2")].values[-1] > 1e-4
    again = RunPaths.for_run(tmp_path / "mine", "again", 0)
    assert set(read_metrics(again.metrics)[drift_name("all", "rel_l2")].values) == {0.0}
    assert len(read_text(paths.metrics, BATCH_HASH)) == 4
    assert not list((tmp_path / "mine").rglob(".spool-*"))


@pytest.mark.slow
def test_an_arm_ends_where_its_baseline_did(train: Train, tmp_path: Path) -> None:
    train()
    train("longer", updates=9, lr=0.2)
    assert manifest_of(tmp_path, "longer").step == 4
    train("steps", updates=9, lr=0.3, steps=4)
    assert manifest_of(tmp_path, "steps").state == "finished"


@pytest.mark.parametrize("given", [{"updates": 6}, {"updates": 9, "steps": 6}])
def test_what_is_kept_unasked_is_planned_so_that_a_ladder_has_an_early_step(
    given: dict[str, int], train: Train, tmp_path: Path
) -> None:
    train(**given)
    train("lr_x2", lr=0.2, **given)
    recorded = read_study(tmp_path / "mine")
    assert recorded.planned_snapshots == recorded.drift_steps == [0, 1, 2, 5, 6]
    ladder = ladder_of(recorded)
    assert (ladder.early_step, ladder.last_step) == (1, 6)


@pytest.mark.parametrize("watch", [False, True])
@pytest.mark.slow
def test_the_held_out_loss_after_the_loop_is_taken_of_every_arm(
    watch: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arm in ("baseline", "rerun"):  # the second one's updates are planned by the first one
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        told: Any = {"study": "mine", "arm": arm, "out": tmp_path, "config": {}, "watch": watch}
        with stability.record(model, optimizer, **told) as recorder:
            for x in torch.ones(4, 2, 3):
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                recorder.step(loss)
            assert isinstance(recorder, Recorder)
            assert recorder._record is not None
            # the first of several ranks waits for this: nobody may have more to tell by then
            assert not has_ended(recorder._record.spool)
            recorder.held_out(0.25, torch.ones(1, 3))
        found = read_metrics(RunPaths.for_run(tmp_path / "mine", arm, 0).metrics)[EVAL_LOSS]
        assert dict(zip(found.steps, found.values, strict=True)) == {4: 0.25}
        assert "no held-out loss" not in capsys.readouterr().out
        with pytest.raises(RuntimeError, match="held_out was called after the record's end"):
            recorder.held_out(0.25)


@pytest.mark.parametrize("watch", [False, True])
def test_a_loop_that_goes_on_is_ended_at_its_next_update(watch: bool, tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    told: Any = {"study": "mine", "arm": "baseline", "out": tmp_path, "config": {}}
    made = 0
    with stability.record(model, optimizer, steps=2, watch=watch, **told) as recorder:
        while True:
            if not watch:
                recorder.batch(torch.ones(2, 3))
            model(torch.ones(2, 3)).square().mean().backward()
            optimizer.step()
            recorder.step()
            made += 1
    assert made == 2
    assert manifest_of(tmp_path, "baseline").step == 2


@pytest.mark.slow
def test_other_batches_than_the_baselines_do_not_count(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train()
    recorder = train("other", lr=0.2, data_seed=1)
    assert "batch 1 differs" in recorder.failure
    assert "stability: FAILED: other, seed 0: pair contract" in capsys.readouterr().err
    assert manifest_of(tmp_path, "other").state == "failed"
    train("meant", data_seed=1, lr=0.2, may_change=["batches"], change="config.lr")


def test_an_error_in_the_loop_is_passed_on_and_does_not_count(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def loop() -> None:
        told: Any = {"study": "mine", "arm": "baseline", "out": tmp_path, "config": {}}
        with stability.record(nn.Linear(3, 2), **told) as recorder:
            recorder.step(torch.zeros(()))
            raise RuntimeError("the disk is full")

    with pytest.raises(RuntimeError, match="the disk is full"):
        loop()
    manifest = manifest_of(tmp_path, "baseline")
    assert (manifest.state, manifest.message) == ("failed", "RuntimeError: the disk is full")
    assert "the disk is full" in capsys.readouterr().err


@pytest.mark.parametrize(("code", "state"), [(None, "finished"), (0, "finished"), (3, "failed")])
def test_a_script_may_leave_the_block_by_exit(code: int | None, state: str, tmp_path: Path) -> None:
    told: Any = {"study": "mine", "arm": "baseline", "out": tmp_path, "config": {}}

    def leave() -> None:
        with stability.record(nn.Linear(3, 2), **told) as recorder:
            recorder.step(1.0)
            raise SystemExit(code)

    with pytest.raises(SystemExit) as left:
        leave()
    assert left.value.code == code
    assert manifest_of(tmp_path, "baseline").state == state


def test_a_loop_that_never_steps_does_not_count(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = nn.Linear(3, 2)
    told: Any = {"study": "mine", "arm": "baseline", "out": tmp_path, "config": {}}
    with stability.record(model, **told) as recorder:
        recorder.batch(torch.zeros(2, 3))
    assert "no training was seen" in recorder.failure
    with pytest.raises(RuntimeError, match="after the record's end"):
        recorder.step()
    capsys.readouterr()


def test_weights_that_no_optimizer_owns_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD([model.weight], lr=0.1)
    told: Any = {"study": "mine", "arm": "baseline", "out": tmp_path, "config": {}}
    with stability.record(model, optimizer, **told) as recorder:
        recorder.step(1.0)
    assert "1 weights belong to no optimizer: bias" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"study": ""}, "study must be given, by study= or by STABILITY_STUDY"),
        ({"arm": ""}, "arm must be given"),
        ({"seed": -1}, "seed must be >= 0, got -1"),
        ({"steps": -1}, "steps must be >= 0, got -1"),
        ({"snapshots": [0]}, "snapshots must be >= 1, got 0"),
        ({"nudge": (-1, 0)}, "nudge must be >= 0, got -1"),
        ({"arm": "bf16"}, "baseline, seed 0, of study mine must be on record before bf16"),
        ({"config": {"dtype": torch.bfloat16}}, "config.dtype must be a number"),
        ({"role": "canddate"}, "nearest: candidate"),
        ({"may_change": ["loss"]}, "may-change must be of init, batches, got loss"),
    ],
)
def test_what_cannot_be_is_refused_before_the_first_update(
    given: dict[str, Any], said: str, tmp_path: Path
) -> None:
    told = {"study": "mine", "arm": "baseline", "out": tmp_path, "config": {}, **given}
    with pytest.raises(ValueError, match="(?s)" + said.replace("(", r"\(")):
        stability.record(nn.Linear(3, 2), **told)
    assert not list(tmp_path.rglob("manifest.json"))


def test_a_run_on_record_is_not_overwritten(train: Train) -> None:
    train()
    with pytest.raises(ValueError, match="is on record; name another arm or seed"):
        train()


def test_two_changes_are_refused_before_the_first_update(train: Train, tmp_path: Path) -> None:
    train()
    with pytest.raises(ValueError, match=r"config\.lr"):
        train("both", lr=0.2, nudge=(1, 0))
    assert not RunPaths.for_run(tmp_path / "mine", "both", 0).manifest.exists()


@pytest.mark.slow
def test_variables_go_before_arguments(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train()
    monkeypatch.setenv("STABILITY_ARM", "nudged")
    monkeypatch.setenv("STABILITY_NUDGE", "1 2")
    train("named by the script")
    assert manifest_of(tmp_path, "nudged").config["nudge"] == {"ulps": 1, "draw": 2}  # pyright: ignore


@pytest.mark.slow
def test_every_argument_has_a_variable(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = signature(stability.record).parameters.keys() - {"model", "optimizer"}
    assert set(Told._fields) == arguments
    monkeypatch.setenv("STABILITY_SNAPSHOTS", "2, 3 4")
    monkeypatch.setenv("STABILITY_QUESTION", "Does a doubled rate matter?")
    train(out=tmp_path / "elsewhere")
    monkeypatch.setenv("STABILITY_OUT", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("STABILITY_CONFIG", '{"lr": 0.2, "data": 2}')
    monkeypatch.setenv("STABILITY_CHANGE", "config")
    monkeypatch.setenv("STABILITY_MAY_CHANGE", "batches, init")
    train("other", data_seed=1)
    run = RunPaths.for_run(tmp_path / "elsewhere" / "mine", "other", 0)
    manifest = read_manifest(run.manifest)
    assert manifest.diff["config.lr"] == [0.1, 0.2]
    assert read_study(tmp_path / "elsewhere" / "mine").question == "Does a doubled rate matter?"
    assert manifest.state == "finished"
    assert sorted(read_metrics(run.metrics)[drift_name("all", "rel_l2")].steps) == [0, 2, 3, 4]


@pytest.mark.parametrize("asked", ["0", "1"])
def test_a_variable_says_whether_a_loop_is_watched(
    asked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STABILITY_WATCH", asked)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    told: Any = {"study": "mine", "arm": "baseline", "out": tmp_path, "config": {}}
    with stability.record(model, optimizer, **told) as recorder:
        for x in torch.ones(4, 2, 3):
            model(x).square().mean().backward()
            optimizer.step()
    assert bool(recorder.failure) == (asked == "0"), "nothing was told of"


@pytest.mark.parametrize(
    ("name", "text", "what"),
    [
        ("STEPS", "many", "a whole number"),
        ("SNAPSHOTS", "1 two", "whole numbers"),
        ("CONFIG", "lr=0.1", "a mapping in JSON"),
        ("CONFIG", "[1]", "a mapping in JSON"),
        ("OPTIONAL", "yes", "1 or 0"),
    ],
)
def test_a_variable_that_can_not_be_read_is_refused(
    name: str, text: str, what: str, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"STABILITY_{name}", text)
    with pytest.raises(
        ValueError, match=re.escape(f"STABILITY_{name} must be {what}, got {text!r}")
    ):
        train()


def test_a_variable_makes_a_call_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STABILITY_OPTIONAL", "1")
    assert type(stability.record(nn.Linear(3, 2))) is IdleRecorder
    monkeypatch.setenv("STABILITY_OPTIONAL", "0")
    with pytest.raises(ValueError, match="study must be given"):
        stability.record(nn.Linear(3, 2), optional=True)


def test_nothing_is_recorded_outside_of_a_study_if_asked_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    recorder = stability.record(nn.Linear(3, 2), optional=True)
    assert type(recorder) is IdleRecorder
    with recorder:
        recorder.batch(torch.zeros(2, 3))
        recorder.step(torch.zeros(()))
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_launcher_records_a_script_that_calls(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = Recording(tmp_path, words("calls.py"))
    assert study.record("baseline") == 0
    assert study.manifest("baseline").step == 6
    assert len(bits_of(capsys.readouterr().out)) == 64


def test_the_config_of_a_call_is_its_flags_less_what_names_the_run() -> None:
    told = call_training(None, ["/home/me/train.py", "--seed", "3", "--lr", "0.1", "--arm", "x"])
    assert told == {"program": "train.py", "flags": {"lr": "0.1"}, "env": {}}
    space = argparse.Namespace(lr=0.1, out=Path("runs"), data=Path("a") / "b", seed=3)
    told = call_training(space, ["train.py"])
    assert told == {"program": "train.py", "config": {"lr": 0.1, "data": "a/b"}, "env": {}}
    assert json.loads(json.dumps(told)) == told


@pytest.mark.slow
def test_runs_that_a_script_has_recorded_itself_are_published_with_their_report(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train()
    train("other", lr=0.2)
    study = tmp_path / "mine"
    assert not list(study.rglob("*.wandb"))
    assert code_of("report", str(study), "--wandb", "offline") == 0
    assert f"{study / 'wandb'} and each run's: W&B, offline" in capsys.readouterr().out
    assert (study / "wandb" / "published-offline.sha256").exists()
    for arm in ("baseline", "other"):
        folder = RunPaths.for_run(study, arm, 0).wandb_dir
        (log,) = folder.glob("offline-run-*/*.wandb")
        content = log.read_bytes()
        assert TRAIN_LOSS.encode() in content
        assert (drift_name("all", "rel_l2").encode() in content) == (arm == "other")
