"""Arms of a command that begin late, from one trained state; and one that is given to them."""

import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from stability.records.manifest import Manifest, read_manifest
from stability.records.metric_log import read_metrics
from stability.records.metric_names import drift_name
from stability.records.paths import RunPaths
from tests.stability.recorder.recording import SCRIPTS, code_of


class Late:
    """A study of the script that goes on from a checkpoint."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def checkpoint(self, *flags: str, name: str = "late.pt") -> Path:
        """Train for a while and save."""
        path = self.folder / name
        command = [sys.executable, str(SCRIPTS / "resumes.py"), "--save", str(path), *flags]
        subprocess.run(command, check=True, capture_output=True)
        return path

    def run(self, arms: dict[str, Any], start: str = "late.pt", **base: Any) -> int:
        """Run the study, whose arms begin from `start`."""
        script = shlex.quote(str(SCRIPTS / "resumes.py"))
        python = shlex.quote(sys.executable)
        content = {
            "name": "late",
            "question": "does it matter late?",
            "base": {
                "command": f"{python} {script} --resume {{resume}} --seed {{seed}} {{flags}}",
                "start": start,
                "train": {"steps": 4},
                **base,
            },
            "arms": arms,
        }
        path = self.folder / "study.yaml"
        path.write_text(yaml.safe_dump(content, sort_keys=False))
        return code_of("run", str(path), "--wandb", "disabled")

    def manifest(self, arm: str) -> Manifest:
        """The run's manifest."""
        return read_manifest(self.paths(arm).manifest)

    def paths(self, arm: str) -> RunPaths:
        """The run's files."""
        return RunPaths.for_run(self.folder / "runs" / "late", arm, 0)

    def drift(self, arm: str) -> list[float]:
        """The drift from the baseline, by snapshot."""
        return read_metrics(self.paths(arm).metrics)[drift_name("all", "rel_l2")].values


@pytest.fixture
def late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Late:
    monkeypatch.chdir(tmp_path)
    return Late(tmp_path)


def test_a_checkpoint_that_is_not_there_is_told_before_anything_runs(
    late: Late, capsys: pytest.CaptureFixture[str]
) -> None:
    assert late.run({"rerun": {}}, start="nowhere.pt") == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "start: must be a checkpoint, 'nowhere.pt' is no file and no folder" in said
    assert not (late.folder / "runs").exists()


@pytest.mark.long
def test_an_arm_that_overwrites_the_checkpoint_fails_the_next_one_alone(
    late: Late, capsys: pytest.CaptureFixture[str]
) -> None:
    path = late.checkpoint()
    arms = {
        "overwrites": {"flags": {"save": str(path)}},
        "spoiled": {"flags": {"lr": 0.02}},
        "from_another": {"start": "other.pt"},
    }
    late.checkpoint(name="other.pt")
    assert late.run(arms, flags={"steps": 4}) == 1
    states = {arm: late.manifest(arm).state for arm in ("baseline", *arms)}
    assert states == {
        "baseline": "finished",
        "overwrites": "finished",
        "spoiled": "failed",
        "from_another": "finished",
    }
    assert "must hold what the baseline began from" in late.manifest("spoiled").message
    assert "it was written since" in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
def test_all_arms_begin_from_one_trained_state(
    late: Late, capsys: pytest.CaptureFixture[str]
) -> None:
    late.checkpoint()
    arms = {"rerun": {}, "nudge": {"nudge": {"ulps": 1}}, "lr": {"flags": {"lr": 0.02}}}
    assert late.run(arms) == 0
    assert "step 6" in late.paths("baseline").output.read_text(), "it went on from there"
    assert set(late.drift("rerun")) == {0.0}
    assert 0 < late.drift("nudge")[-1] < late.drift("lr")[-1]
    starts = {arm: late.manifest(arm).environment["start"] for arm in ("baseline", *arms)}
    assert len(set(starts.values())) == 1
    capsys.readouterr()

    # another state under the same path is another start: nothing runs on it
    late.checkpoint("--seed", "5")
    more = {**arms, "later": {"flags": {"lr": 0.03}}}
    assert late.run(more) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "must hold what the baseline began from" in said
    assert "it was written since" in said
    assert not late.paths("later").root.exists()


@pytest.mark.long
@pytest.mark.slow
def test_another_checkpoint_is_a_change_of_its_own(late: Late) -> None:
    late.checkpoint()
    late.checkpoint("--steps", "9", name="later.pt")
    later = {"start": "later.pt", "changes": {"batches": True}}
    assert late.run({"later": later}) == 0
    assert late.manifest("later").axis == "start"
