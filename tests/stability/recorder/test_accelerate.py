"""Accelerate: its loop that tells of itself, and `accelerate launch` as the command of a study."""

import shlex
from difflib import unified_diff
from pathlib import Path
from typing import Any

import pytest
import yaml

from stability.analysis.arm_summary import groups_of_arm
from stability.analysis.study_records import read_study
from stability.records.manifest import read_manifest
from stability.records.paths import list_runs
from tests.stability.recorder.recording import (
    SCRIPTS,
    Calling,
    bits_of,
    code_of,
    launched,
    run_alone,
    words,
)


def test_the_call_changes_at_most_five_lines_of_accelerates_loop() -> None:
    plain, calls = (
        (SCRIPTS / name).read_text().splitlines()[2:]
        for name in ("accelerated.py", "accelerate_calls.py")
    )
    lines = list(unified_diff(plain, calls, n=0))[2:]
    changed = [line for line in lines if line[1:].strip() and not line.startswith("@@")]
    assert not [line for line in changed if line.startswith("-")]
    assert len(changed) == 5, changed
    assert all(line.endswith("# recorded") for line in changed)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.long)])
def test_the_call_in_accelerates_loop_changes_no_bit(
    ranks: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "accelerate_calls.py"
    study = Calling(tmp_path, words(name) if ranks == 1 else launched(name, ranks=ranks))
    given = ["--seed", "0", "--bf16"]
    alone = run_alone([*study.command, *given])
    assert run_alone([*study.command[:-1], str(SCRIPTS / "accelerated.py"), *given]) == alone
    capsys.readouterr()
    assert study.record("baseline", "--bf16") == 0
    assert bits_of(capsys.readouterr().out) == alone, "recording changed a bit"
    assert study.record("rerun", "--bf16") == 0
    assert study.record("fp32") == 0
    updates = 6 // ranks
    manifest = study.manifest("baseline")
    assert (manifest.step, manifest.ranks, len(study.batches("baseline"))) == (
        updates,
        ranks,
        updates,
    )
    assert set(study.drift("rerun").values()) == {0.0}
    assert study.drift("fp32")[updates] > 0
    assert study.batches("fp32") == study.batches("baseline")
    assert code_of("verify", str(study.folder)) == 0


def run_study(folder: Path, command: str, steps: int, arms: dict[str, Any]) -> int:
    """Run a study of commands of so many updates, in `folder`."""
    content = {
        "name": "launched",
        "question": "does it matter?",
        "base": {"command": command, "flags": {"bf16": True}, "train": {"steps": steps}},
        "arms": arms,
    }
    path = folder / "study.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return code_of("run", str(path), "--wandb", "disabled", "--out", str(folder / "runs"))


def command_of(ranks: int) -> str:
    """Return `accelerate launch` of the loop, as the `command` of a study."""
    start = [shlex.quote(word) for word in launched("accelerated.py", ranks=ranks)]
    return " ".join([*start, "--seed", "{seed}", "{flags}"])


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
def test_accelerate_launch_is_the_command_of_a_study(
    ranks: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        run_study(tmp_path, command_of(ranks), 6 // ranks, {"fp32": {"flags": {"bf16": False}}})
        == 0
    )
    folder = tmp_path / "runs" / "launched"
    study = read_study(folder)
    manifests = [read_manifest(x.manifest) for x in list_runs(folder)]
    assert [manifest.ranks for manifest in manifests] == [ranks, ranks]
    assert study.arm("fp32").axis == "flags.bf16"
    assert study.arm("fp32").runs[0].drift("rel_l2")[6 // ranks] > 0
    capsys.readouterr()
    assert code_of("verify", str(folder)) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "1 of 1 planned pairs keep the contract" in said
    assert "linear products: BF16 -> FP32" in said


@pytest.mark.long
def test_another_number_of_accelerates_processes_is_another_layout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    one, two = (command_of(ranks).replace("{flags}", "--split {flags}") for ranks in (1, 2))
    one = one.replace(" --cpu ", " ")  # the script says so too, and it is no layout
    assert run_study(tmp_path, one, 6, {"two": {"command": two}}) == 0
    study = read_study(tmp_path / "runs" / "launched")
    assert groups_of_arm(study, study.arm("two")) == ["layout"]
    # the same sum of gradients in another order
    assert 0 < study.arm("two").runs[0].drift("rel_l2")[6] < 1e-2
