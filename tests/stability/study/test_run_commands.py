"""`stability run` of a study of commands: arms are flags, variables, commits and environments."""

import json
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from stability.records.distances import read_distances
from stability.records.manifest import Manifest, read_manifest, write_manifest
from stability.records.metric_log import read_metrics
from stability.records.metric_names import drift_name
from stability.records.paths import RunPaths, StudyPaths
from stability.study import run_commands
from tests.stability.recorder.recording import SCRIPTS, code_of

GIT = ["git", "-c", "user.email=a@example.org", "-c", "user.name=a"]


class Commands:
    """A study of a script in a repository of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.script = folder / "train.py"
        self.script.write_text((SCRIPTS / "plain.py").read_text())

    def commit(self, source: str = "") -> None:
        if source:
            self.script.write_text(source)
        for words in (["init", "-q"], ["add", "train.py"], ["commit", "-qm", "x"]):
            subprocess.run([*GIT, *words], cwd=self.folder, check=True, capture_output=True)

    def run(self, arms: dict[str, Any], *, base: dict[str, Any] | None = None, **more: Any) -> int:
        content = {
            "name": "mine",
            "question": "does it matter?",
            "base": {
                "command": f"{shlex.quote(sys.executable)} train.py --seed {{seed}} {{flags}}",
                "flags": {"lr": 0.01, "bf16": True},
                "train": {"steps": 12},
                **(base or {}),
            },
            "arms": arms,
            **more,
        }
        path = self.folder / "study.yaml"
        path.write_text(yaml.safe_dump(content, sort_keys=False))
        return code_of("run", str(path), "--wandb", "disabled")

    def manifest(self, arm: str, seed: int = 0) -> Manifest:
        return read_manifest(self.paths(arm, seed).manifest)

    def paths(self, arm: str, seed: int = 0) -> RunPaths:
        return RunPaths.for_run(self.folder / "runs" / "mine", arm, seed)

    def drift(self, arm: str) -> list[float]:
        return read_metrics(self.paths(arm).metrics)[drift_name("all", "rel_l2")].values


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Commands:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Commands(tmp_path)


@pytest.mark.slow
def test_a_study_of_flags_is_sealed_run_shown_and_kept(
    commands: Commands, capsys: pytest.CaptureFixture[str]
) -> None:
    arms = {
        "fp32": {"role": "reference", "flags": {"bf16": False}},
        "lr_x2": {"role": "yardstick", "flags": {"lr": 0.02}},
        "rerun": {},
    }
    assert commands.run(arms, seeds=[0, 1], yardstick="lr_x2") == 0
    shown = capsys.readouterr().out
    assert "--bf16: given -> not" in shown
    assert "A/A is zero" in shown
    assert set(commands.drift("rerun")) == {0.0}
    assert commands.drift("lr_x2")[-1] > commands.drift("fp32")[-1] > 0
    assert "step 11 loss" in commands.paths("fp32").output.read_text()
    study = commands.folder / "runs" / "mine"
    protocol = json.loads((study / "protocol.json").read_text())
    assert protocol["window"]["steps"] == [1, 2, 5, 10, 12]
    assert code_of("verify", str(study)) == 0
    assert "6 of 6 planned pairs keep the contract" in (said := capsys.readouterr().out)
    assert "without a sealed plan" not in said
    path = commands.paths("lr_x2", 1).manifest
    was = path.read_bytes()
    told = read_manifest(path)
    command = [word.replace("0.02", "0.9") for word in told.resolved["command"]]
    write_manifest(path, replace(told, resolved={**told.resolved, "command": command}))
    assert code_of("verify", str(study)) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "--lr 0.02 --bf16, the command that was run is" in said
    path.write_bytes(was)
    before = commands.paths("lr_x2", 1).manifest.stat().st_mtime_ns
    assert commands.run({**arms, "later": {"flags": {"lr": 0.03}}}, yardstick="lr_x2") == 0
    assert commands.paths("lr_x2", 1).manifest.stat().st_mtime_ns == before, "it was kept"
    said = capsys.readouterr().out
    assert "EXPLORATORY: arm later was added" in said
    # none of them counts as one that is yet to come: the report alone is
    assert "kept  4 runs" in said
    assert said.partition("finished  later")[2].splitlines()[0].endswith("left 0:00:03")


@pytest.mark.slow
def test_a_run_that_ended_is_no_answer_once_its_script_was_edited(
    commands: Commands, capsys: pytest.CaptureFixture[str]
) -> None:
    """It would be kept, and what it says be taken for what the script does now."""
    helper = commands.folder / "helper.py"
    helper.write_text("FACTOR = 1.0\n")
    script = "import helper\n" + commands.script.read_text()
    commands.script.write_text(script)
    arms: dict[str, Any] = {"rerun": {}}
    assert commands.run(arms, seeds=[0]) == 0
    before = commands.paths("rerun").manifest.read_bytes()
    for file, was in ((commands.script, script), (helper, helper.read_text())):
        file.write_text(was + "# another\n")
        capsys.readouterr()
        assert commands.run(arms, seeds=[0]) == 2
        said = capsys.readouterr().err
        assert f"seed-0: has ended, and {file.name} was edited since; use --out" in said
        words = [sys.executable, "train.py", "--seed", "{seed}", "--lr", "0.01", "--bf16"]
        asked = ["--study", "mine", "--arm", "rerun", "--steps", "12", "--wandb", "disabled"]
        assert code_of("record", *asked, "--", *words) == 2
        file.write_text(was)
    assert commands.run(arms, seeds=[0]) == 0
    assert commands.paths("rerun").manifest.read_bytes() == before
    capsys.readouterr()
    assert commands.run(arms, seeds=[0], base={"flags": {"lr": 0.02, "bf16": True}}) == 2
    said = capsys.readouterr().err
    assert "give the changed study another `name:`, where all its runs train anew, or use" in said
    assert "another arm" not in said


def test_two_changes_in_one_arm_are_refused_before_anything_runs(
    commands: Commands, capsys: pytest.CaptureFixture[str]
) -> None:
    arms = {"both": {"flags": {"lr": 0.02}, "env": {"A": "1"}}}
    assert commands.run(arms) == 2
    assert "arms.both: must differ in one axis, differs in" in capsys.readouterr().err
    # as far away as another learning rate is, all seem as far from it as the baseline
    far = {"role": "reference", "flags": {"lr": 0.02, "bf16": False}}
    assert commands.run({"far": far}, allow_many=True) == 2
    assert "arms.far: must differ in one axis, differs in" in capsys.readouterr().err
    assert not (commands.folder / "runs").exists()


@pytest.mark.slow
def test_a_variable_is_an_arm(commands: Commands) -> None:
    commands.script.write_text(
        commands.script.read_text().replace("asked.lr)", 'float(__import__("os").environ["LR"]))')
    )
    base = {"env": {"LR": "0.01"}, "flags": {}}
    assert commands.run({"lr": {"env": {"LR": "0.02"}}}, base=base) == 0
    assert commands.manifest("lr").axis == "env.LR"
    assert commands.drift("lr")[-1] > 0.01


DETERMINISM = ("deterministic_algorithms", "cudnn_deterministic")


@pytest.mark.long
def test_the_lack_of_deterministic_algorithms_is_an_arm(
    commands: Commands, capsys: pytest.CaptureFixture[str]
) -> None:
    assert commands.run({"free": {"deterministic": False}}) == 0
    assert commands.manifest("free").axis == "deterministic"
    environment = commands.manifest("free").environment
    assert [environment[f"switch.{name}"] for name in DETERMINISM] == [False, False]
    assert code_of("verify", str(commands.folder / "runs" / "mine")) == 0
    # another switch is no part of that change
    source = commands.script.read_text()
    turned = 'torch.set_float32_matmul_precision("high")'
    line = f"torch.are_deterministic_algorithms_enabled() or {turned}\ntorch.manual_seed"
    commands.script.write_text(source.replace("torch.manual_seed", line))
    assert commands.run({"free": {"deterministic": False}}, name="other") == 1
    found = RunPaths.for_run(commands.folder / "runs" / "other", "free", 0)
    said = read_manifest(found.manifest).message
    assert "environment.switch.cuda_matmul_fp32 must be the baseline's 'ieee', is 'tf32'" in said
    capsys.readouterr()


@pytest.mark.slow
def test_a_commit_is_an_arm_and_the_checkout_stays_as_it_is(
    commands: Commands, capsys: pytest.CaptureFixture[str]
) -> None:
    source = commands.script.read_text()
    commands.commit()
    commands.commit(source.replace("nn.Tanh()", "nn.GELU()"))
    commands.script.write_text(source.replace("nn.Tanh()", "nn.ReLU()"))
    (commands.folder / "built").write_text("")
    base = {"ref": "HEAD", "setup": "touch built_here"}
    assert commands.run({"before": {"ref": "HEAD~1"}, "same": {}}, base=base) == 0
    assert set(commands.drift("same")) == {0.0}
    assert commands.drift("before")[-1] > 1e-3
    assert len(commands.manifest("before").config["ref"]) == 40  # pyright: ignore
    assert "ReLU" in commands.script.read_text()
    assert "commit: " in capsys.readouterr().out
    made = list((commands.folder / "cache").rglob("built_here"))
    assert len(made) == 2


@pytest.mark.long
@pytest.mark.slow
def test_a_commit_whose_sources_are_the_working_trees_does_not_count(
    commands: Commands, capsys: pytest.CaptureFixture[str]
) -> None:
    (commands.folder / "layers.py").write_text("WIDTH = 16\n")
    # as an editable install does: the folder of the working tree comes first
    source = f"import sys\nsys.path.insert(0, {str(commands.folder)!r})\nimport layers\n"
    commands.commit(source + commands.script.read_text())
    assert commands.run({"before": {"ref": "HEAD"}}) == 1
    said = commands.manifest("before").message
    assert "all sources must be those of" in said
    assert "layers.py of the working tree was executed" in said
    capsys.readouterr()


@pytest.mark.parametrize(
    ("arm", "said"),
    [
        ({"ref": "no-such-branch"}, "arms.x.ref: must be a commit of"),
        ({"ref": "no-such-branch"}, "got 'no-such-branch'"),
        ({"python": "/no/python"}, "arms.x.python: must be an interpreter"),
    ],
)
def test_what_is_not_there_is_refused_before_anything_runs(
    arm: dict[str, Any], said: str, commands: Commands, capsys: pytest.CaptureFixture[str]
) -> None:
    commands.commit()
    assert commands.run({"x": arm}) == 2
    assert said in capsys.readouterr().err
    assert not (commands.folder / "runs").exists()


def test_a_setup_that_fails_is_told_before_anything_runs(
    commands: Commands, capsys: pytest.CaptureFixture[str]
) -> None:
    commands.commit()
    assert commands.run({"x": {"ref": "HEAD"}}, base={"setup": "ls no-such-file"}) == 2
    assert "setup: 'ls no-such-file' ended with exit code" in capsys.readouterr().err


@pytest.mark.slow
def test_another_environment_is_an_arm(commands: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:/usr/bin:/bin")
    other = commands.folder / "other" / "bin" / "python"
    other.parent.mkdir(parents=True)
    other.write_text(f'#!/bin/sh\nOTHER=1 exec {shlex.quote(sys.executable)} "$@"\n')
    other.chmod(0o755)
    base = {"command": "python train.py --seed {seed} {flags}"}
    commands.script.write_text(
        commands.script.read_text() + 'print("other", "OTHER" in __import__("os").environ)\n'
    )
    assert commands.run({"other": {"python": str(other)}}, base=base) == 0
    assert "other False" in commands.paths("baseline").output.read_text()
    assert "other True" in commands.paths("other").output.read_text()
    assert commands.manifest("other").axis == "python"


@pytest.mark.slow
def test_an_arm_that_fails_is_told_and_the_others_go_on(
    commands: Commands, capsys: pytest.CaptureFixture[str]
) -> None:
    arms = {"broken": {"flags": {"no-such-flag": True}}, "lr": {"flags": {"lr": 0.02}}}
    assert commands.run(arms) == 1
    assert commands.manifest("broken").state == "failed"
    assert "unrecognized arguments" in commands.manifest("broken").message
    assert commands.manifest("lr").state == "finished"
    assert "output.txt" in capsys.readouterr().out.replace("\n", "").replace(" ", "")
    assert commands.run({}, base={"flags": {"no-such-flag": True}}) == 2, "another baseline"


@pytest.mark.slow
def test_two_changes_that_are_allowed_are_called_confounded(
    commands: Commands, capsys: pytest.CaptureFixture[str]
) -> None:
    both = {"both": {"flags": {"lr": 0.02, "bf16": False}}}
    assert commands.run(both, seeds=[0], allow_many=True) == 0
    assert commands.manifest("both").axis == "many"
    assert set(commands.manifest("both").diff) == {"flags.lr", "flags.bf16"}
    capsys.readouterr()
    assert code_of("show", str(commands.folder / "runs" / "mine"), "both") == 0
    assert "confounded" in capsys.readouterr().out


@pytest.mark.long
@pytest.mark.slow
def test_what_a_verdict_lacks_is_said_in_words_that_fit_a_command(
    commands: Commands, capsys: pytest.CaptureFixture[str]
) -> None:
    assert commands.run({"lr": {"flags": {"lr": 0.02}}}, seeds=[0, 1, 2]) == 0
    capsys.readouterr()
    assert code_of("verdict", str(commands.folder / "runs" / "mine")) == 3
    said = " ".join(capsys.readouterr().out.split())
    assert "add an arm like `reference: {role: reference, flags: {dtype: fp32}}`" in said
    assert "no run has a held-out loss: the script evaluates nothing" in said
    assert "held_out.share" not in said


def test_what_a_pass_lacks_and_what_takes_long_is_said_before_the_first_run(
    commands: Commands, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_commands, "record_planned", lambda *_, **__: ("failed", "not run"))
    probe = {"candidate": "flash:fa2", "every": 2, "gradient_every": 1}
    arms = {"fa2": {"attention": "flash:fa2", "probe": probe}}
    assert commands.run(arms, base={"train": {"steps": 30}}, seeds=[0, 1, 2]) == 1
    said, _, rest = " ".join(capsys.readouterr().out.split()).partition("failed baseline, seed 0")
    assert rest, "all of it is said before"
    assert "no PASS as it stands: there is no reference" in said
    assert "no PASS as it stands: no arm is broken on purpose" in said
    assert "looks" not in said
    assert "interrupt now, edit the study's file and move runs/mine away" in said
    assert "with seed 0 alone the whole model's gradient is looked at: there fa2 may take" in said
    # a whole one has nothing to be told
    arms["broken"] = {"attention": "flash:fa2+out_gain_1pct", "probe": probe}
    arms["reference"] = {"role": "reference", "flags": {"bf16": False}}
    arms["nudge"] = {"nudge": {"ulps": 1}}
    shutil.rmtree(commands.folder / "runs")
    assert commands.run(arms, base={"train": {"steps": 30}}, seeds=[0, 1, 2]) == 1
    said = capsys.readouterr().out
    assert "no PASS" not in said
    assert "interrupt now" not in said


@pytest.mark.slow
def test_a_study_of_commands_comes_to_a_verdict_and_to_wandb(
    commands: Commands, capsys: pytest.CaptureFixture[str]
) -> None:
    commands.script.write_text((SCRIPTS / "evaluates.py").read_text())
    arms = {
        "reference": {"role": "reference", "flags": {"bf16": False}},
        "nudge": {"nudge": {"ulps": 1}},
        "broken": {"role": "broken", "flags": {"lr": 0.05}},
        "tiny": {"flags": {"lr": 0.0100000001}},
    }
    train = {"steps": 8, "snapshot_steps": [1, 4, 8]}
    assert commands.run(arms, base={"train": train}, seeds=[0, 1, 2]) == 0
    assert "planting" not in capsys.readouterr().out, "no arm is an attention"
    study = commands.folder / "runs" / "mine"
    assert code_of("verdict", str(study), "--json") == 0
    verdict = json.loads(capsys.readouterr().out)
    tiny = next(arm for arm in verdict["arms"] if arm["arm"] == "tiny")
    states = {level: evidence["state"] for level, evidence in tiny["levels"].items()}
    assert tiny["outcome"] == "PASS", tiny
    assert states == {
        "operator": "not applicable",
        "gradient": "not applicable",
        "training": "holds",
        "outcome": "holds",
    }
    assert "its intervals exclude E" in tiny["sentence"]
    broken = next(arm for arm in verdict["arms"] if arm["arm"] == "broken")
    assert broken["answer"] == "FAIL, as it must"
    assert not (study / "wandb").exists()
    # the same command again keeps the runs, measures what is missing, and publishes them
    was = read_distances(study, 1)
    StudyPaths(study).distances(1).unlink()
    assert code_of("run", str(commands.folder / "study.yaml"), "--wandb", "offline") == 0
    assert (study / "wandb" / "published-offline.sha256").exists()
    again = read_distances(study, 1).weights[8]
    pair = ("tiny", "reference")
    assert 0 < again.kept_between(*pair) == pytest.approx(was.weights[8].kept_between(*pair))
    runs = list((study / "tiny" / "seed-0" / "wandb").glob("offline-run-*/*.wandb"))
    assert len(runs) == 1
    assert b"eval/loss" in runs[0].read_bytes()
    page = (study / "report.html").read_text(encoding="utf-8")
    assert "Held-out loss" in page


def test_a_held_out_name_or_probe_in_a_study_that_can_not_be_is_told(
    commands: Commands, capsys: pytest.CaptureFixture[str]
) -> None:
    assert commands.run({}, base={"held_out": "mine.loss"}) == 2
    assert "held_out must be MODULE:FUNCTION, all or none" in capsys.readouterr().err
    assert commands.run({"other": {"held_out": "all"}}) == 2
    assert "held_out must be None as in the baseline, is 'all'" in capsys.readouterr().err
    assert commands.run({}, base={"probe": {"gradient_every": 2}}) == 2
    assert "a candidate must be given where gradient_every is" in capsys.readouterr().err


def test_several_jobs_are_refused_with_the_reason(
    commands: Commands, capsys: pytest.CaptureFixture[str]
) -> None:
    assert commands.run({"rerun": {}}, base={"command": "nowhere"}) == 2
    capsys.readouterr()
    assert code_of("run", str(commands.folder / "study.yaml"), "--jobs", "2") == 2
    said = capsys.readouterr().err
    assert (
        "jobs must be 1 for a study of commands, got 2: a command takes as many processes" in said
    )
    assert "its number of threads is part of what decides its bits" in said
