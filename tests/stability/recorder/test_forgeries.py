"""A recorded study proves itself, and no longer does once anything in it was forged."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stability.records.manifest import read_manifest, write_manifest
from stability.records.paths import RunPaths, StudyPaths
from stability.records.run_files import RunFiles
from stability.records.snapshots import read_snapshot, write_snapshot
from tests.stability.recorder.recording import Recording, code_of, recorded_plain, words
from tests.stability.sealing import change_witness, seal

pytestmark = pytest.mark.slow

ARMS = {
    "baseline": (("--bf16",), ()),
    "rerun": (("--bf16",), ()),
    "fp32": ((), ("--role", "reference")),
}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study of three arms, that tests only read."""
    return recorded_plain(tmp_path_factory.mktemp("recorded"), ARMS)


@pytest.fixture
def study(recorded: Path, tmp_path: Path) -> Path:
    """A copy of it, to be spoiled."""
    return shutil.copytree(recorded, tmp_path / "study")


def run_of(study: Path, arm: str) -> RunPaths:
    return RunPaths.for_run(study, arm, 0)


def verify(study: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Return the exit code of `verify --all`, and all that it says as one line."""
    capsys.readouterr()
    code = code_of("verify", str(study), "--all", "true")
    captured = capsys.readouterr()
    return code, re.sub(r"\s+", " ", captured.out + captured.err)


def test_a_sound_study_proves_itself(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = verify(study, capsys)
    assert code == 0, said
    assert "2 of 2 planned pairs keep the contract" in said
    assert "nothing else that was seen; linear products: BF16 -> FP32" in said
    assert "an A/A pair" in said
    assert "recorded run by run, without a sealed plan: a run that was taken away is not" in said
    assert "8 drifts computed anew from snapshots, as on record" in said
    assert code_of("show", str(study)) == 0
    assert "Unproven" not in capsys.readouterr().out


def change(study: Path, arm: str, **changes: Any) -> None:
    path = run_of(study, arm).manifest
    write_manifest(path, replace(read_manifest(path), **changes))


def with_hash(name: str, arm: str) -> Callable[[Path], None]:
    def forge(study: Path) -> None:
        hashes = read_manifest(run_of(study, arm).manifest).hashes
        change(study, arm, hashes={**hashes, name: "f" * 64})

    return forge


def another_flag(study: Path) -> None:
    config = read_manifest(run_of(study, "rerun").manifest).config
    change(study, "rerun", config={**config, "flags": {**config["flags"], "lr": "1"}})


def another_change(study: Path) -> None:
    change(study, "fp32", diff={"flags.lr": ["0.01", "1"]})


def an_edited_byte(file: Callable[[RunPaths], Path]) -> Callable[[Path], None]:
    def forge(study: Path) -> None:
        path = file(run_of(study, "rerun"))
        content = bytearray(path.read_bytes())
        content[-3] ^= 1
        path.write_bytes(content)

    return forge


def without(name: str) -> Callable[[Path], None]:
    def forge(study: Path) -> None:
        files = read_manifest(run_of(study, "rerun").manifest).files
        change(study, "rerun", files={n: sha for n, sha in files.items() if n != name})

    return forge


def other_products(stretch: dict[str, Any]) -> None:
    for row in stretch["executed"]:
        row[4] = ["float32" for _ in row[4]]


def another_answer(stretch: dict[str, Any]) -> None:
    for answers in stretch["answers"].values():
        answers["gemm_fp32"] = "0" * 16


def another_switch(stretch: dict[str, Any]) -> None:
    stretch["switches"]["at_end"]["mkldnn"] = False


def shorter(stretch: dict[str, Any]) -> None:
    stretch["last"] = 3


def witness(edit: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    return lambda study: change_witness(run_of(study, "rerun"), edit)


def another_snapshot(study: Path) -> None:
    run = run_of(study, "fp32")
    state = read_snapshot(run.snapshot(2))
    write_snapshot(run.snapshot(2), {name: value + 1 for name, value in state.items()})
    RunFiles(run, read_manifest(run.manifest)).add(run.snapshot(2))


def a_smaller_drift(study: Path) -> None:
    run = run_of(study, "fp32")
    lines = [json.loads(line) for line in run.metrics.read_text(encoding="utf-8").splitlines()]
    for line in lines:
        drifts = [name for name in line if name.startswith("drift/all/")]
        line.update({name: line[name] / 10 for name in drifts})
    run.metrics.write_text("".join(map(seal, lines)), encoding="utf-8")
    RunFiles(run, read_manifest(run.manifest)).add(run.metrics)


def another_role(study: Path) -> None:
    path = StudyPaths(study).study
    path.write_text(path.read_text(encoding="utf-8").replace('"reference"', '"candidate"'))


FORGED: dict[str, tuple[Callable[[Path], None], str]] = {
    "a flag": (another_flag, "no pair: config.flags.lr"),
    "the change": (another_change, "no pair: it was trained with the change"),
    "the start": (with_hash("init_weights", "fp32"), "hashes.init_weights"),
    "the batches": (with_hash("batches", "fp32"), "hashes.batches must be the baseline's"),
    "the end": (with_hash("final_weights", "rerun"), "ends in other weights than"),
    "a byte of the witness": (an_edited_byte(lambda run: run.witness), "witness.json"),
    "a byte of a snapshot": (an_edited_byte(lambda run: run.snapshot(1)), "is damaged: its SHA"),
    "a byte of the log": (an_edited_byte(lambda run: run.metrics), "metrics.jsonl"),
    "no witness": (without("witness.json"), "what rerun, seed 0 executed, which has no witness"),
    "dtypes": (witness(other_products), "what is executed in linear differs, first in 1, backward"),
    "a known answer": (witness(another_answer), "known answer gemm_fp32 is "),
    "a switch": (witness(another_switch), "switch mkldnn is True in one, True, False in the other"),
    "updates": (witness(shorter), "nothing is on record of updates 3 to 5"),
    "a snapshot": (another_snapshot, "step 2"),
    "a drift": (a_smaller_drift, "fp32/seed-0: "),
    "a role": (another_role, "study.json"),
}


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_record_does_not_verify(
    name: str, study: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    forge, expected = FORGED[name]
    forge(study)
    code, said = verify(study, capsys)
    assert code != 0, said
    assert expected in said
    assert "2 of 2 planned pairs" not in said


def test_a_flag_that_does_nothing_is_found_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (Path(words("plain.py")[1])).read_text(encoding="utf-8")
    assert "enabled=asked.bf16" in text
    script = tmp_path / "says.py"
    script.write_text(text.replace("enabled=asked.bf16", "enabled=False"), encoding="utf-8")
    study = Recording(tmp_path / "runs", [words("plain.py")[0], str(script), "--steps", "5"])
    assert study.record("baseline") == 0
    assert study.record("bf16", "--bf16") == 0
    code, said = verify(study.folder, capsys)
    assert code == 0
    assert (
        "that was seen; the change had no effect on the weights: both end in the same bits" in said
    )
    assert code_of("show", str(study.folder)) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert (
        "The change had no effect on the weights: bf16 changes flags.bf16 and ends in the "
        "baseline's" in shown
    )
