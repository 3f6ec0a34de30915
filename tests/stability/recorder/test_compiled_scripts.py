"""Scripts compiled by Inductor: recorded with no graph broken, of the same bits and batches."""

import sys
from pathlib import Path

import pytest

from stability.records.metric_log import read_text
from stability.records.metric_names import BATCH_LABELS
from tests.stability.recorder.recording import (
    SCRIPTS,
    Recording,
    code_of,
    compiled_study,
    run_alone,
)
from tests.stability.recorder.test_scripts import hold_to_a_study

INDUCTOR = ("--backend", "inductor")


@pytest.mark.long
def test_a_script_that_inductor_compiles_is_recorded_and_paired(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # `fullgraph` in the script: a graph that the recorder breaks is an error
    hold_to_a_study(compiled_study(tmp_path, monkeypatch, "compiled.py", *INDUCTOR), 6, capsys)


@pytest.mark.long
@pytest.mark.slow
def test_a_graph_that_is_compiled_again_for_a_last_batch_was_given_the_plain_scripts_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    study = compiled_study(tmp_path, monkeypatch, "compiled.py", "--uneven", *INDUCTOR)
    assert study.record("baseline", "--plain") == 0
    assert study.record("compiled") == 0
    assert len(study.batches("baseline")) == 6
    labels = [read_text(study.paths(x).metrics, BATCH_LABELS) for x in ("baseline", "compiled")]
    assert len(labels[0]) == 6
    assert labels[0] == labels[1]
    assert study.batches("compiled") == study.batches("baseline")
    # of the drift most is a bias before a norm: its gradient is rounding, which Adam makes large
    assert study.losses("compiled") == pytest.approx(study.losses("baseline"), abs=1e-5)
    assert study.drift("compiled")[6] > 0
    capsys.readouterr()
    assert code_of("verify", str(study.folder)) == 1
    proof = " ".join(capsys.readouterr().out.split())
    assert "unproven: not on record: what compiled, seed 0 multiplied: torch.compile" in proof


@pytest.mark.long
@pytest.mark.parametrize("flag", ["--whole-step", "--whole-update"])
def test_a_step_that_inductor_compiles_as_a_whole_is_said(
    flag: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    study = compiled_study(tmp_path, monkeypatch, "compiled.py", flag, *INDUCTOR)
    alone = run_alone([*study.command, "--seed", "0"])
    assert study.record("baseline", options=("--check-observer", "true")) == 0
    said = capsys.readouterr().out
    assert "no training input was seen in 6 of 6 updates" in said
    assert ("no loss was seen" in said) == (flag == "--whole-update")
    assert f"weights {alone}" in said
    assert study.manifest("baseline").observer["equal"] is True
    assert study.record("rerun") == 0
    assert set(study.drift("rerun").values()) == {0.0}
    capsys.readouterr()
    assert code_of("verify", str(study.folder)) == 1
    proof = " ".join(capsys.readouterr().out.split())
    assert "rerun/seed-0: unproven: not on record: batches," in proof


CHECKED = {
    "compiled": (("compiled.py", *INDUCTOR), "self.first(x)", "self.first(x) * WATCHES"),
    "Hugging Face": (
        ("hugging_face.py",),
        "max_steps=6",
        "max_steps=6, learning_rate=5e-5 * WATCHES",
    ),
    "Lightning": (("lightning_fit.py",), "lr=0.01", "lr=0.01 * WATCHES"),
}
"""Of a kind of script: its words, and where another number changes its bits."""


@pytest.mark.long
@pytest.mark.parametrize("kind", CHECKED)
def test_it_ends_unobserved_in_the_same_bits_and_fails_if_observing_changes_one(
    kind: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (script, *flags), before, after = CHECKED[kind]
    study = compiled_study(tmp_path, monkeypatch, script, *flags)
    options = ("--check-observer", "true")
    assert study.record("baseline", options=options) == 0
    assert study.manifest("baseline").observer["equal"] is True
    watches = 'import os\nWATCHES = 1 + 1e-3 * int(os.environ["STABILITY_OBSERVES"])\n'
    source = (SCRIPTS / script).read_text(encoding="utf-8")
    assert source.count(before) == 1
    planted = tmp_path / script
    planted.write_text(watches + source.replace(before, after), encoding="utf-8")
    study = Recording(tmp_path / "planted", [sys.executable, str(planted), *flags])
    assert study.record("baseline", options=options) == 1
    assert "recorded and unobserved it must end in the same bits" in capsys.readouterr().out
    assert study.manifest("baseline").state == "failed"
    assert study.manifest("baseline").observer["equal"] is False
