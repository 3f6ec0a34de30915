"""What `stability run` makes of its command line, before anything is trained."""

from pathlib import Path

import pytest

from stability.cli import run as verb
from stability.cli.main import main
from stability.study.run_study import StudyError

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(("words", "keep"), [((), "none"), (("--keep", "all"), "all")])
def test_what_the_command_line_keeps_takes_the_place_of_the_studys(words, keep, monkeypatch):
    told = []
    monkeypatch.setattr(verb, "_run_configs", lambda *asked: told.append(asked) or 0)
    assert main(["run", str(ROOT / "configs" / "quickstart.yaml"), *words]) == 0
    ((asked, config),) = told
    assert config.keep == keep
    # a job elsewhere is told the same
    elsewhere = asked.words("offline")
    assert elsewhere == (*elsewhere[:6], *words)


def test_a_study_of_commands_keeps_all(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["run", str(ROOT / "examples" / "study.yaml"), "--keep", "none"])
    assert stop.value.code == 2
    assert "keep must be all for a study of commands, got none" in capsys.readouterr().err


def test_the_display_is_told_how_many_updates_each_run_makes(tmp_path, monkeypatch):
    told = []

    def stop(*_, observer, **__):
        told.append(observer._time_left)
        raise StudyError("seen")

    monkeypatch.setattr("stability.study.run_study.run_study", stop)
    with pytest.raises(ValueError, match="seen"):
        verb.run(ROOT / "configs" / "quickstart.yaml", out=tmp_path, wandb="disabled")
    (left,) = told
    assert left.total == len(left.updates) == 27
    assert left.updates["rerun", 0] == left.updates["rerun", 1] == 20
    assert left.updates["baseline", 0] == 40
    assert set(left.planted) == {("flash_fa2", 0), ("flash_all_bf16", 0)}
    assert left.report > 0


def test_snapshots_past_the_end_are_told_before_the_first_run(tmp_path, monkeypatch, capsys):
    def stop(*_, **__):
        raise StudyError("seen")

    monkeypatch.setattr("stability.study.run_study.run_study", stop)
    changes = {"train.snapshot_steps": "[5, 10, 20, 30, 60, 400]"}
    for given in (changes, {**changes, "train.snapshot_steps": "[5, 10, 20, 30]"}):
        with pytest.raises(ValueError, match="seen"):
            verb.run(
                ROOT / "configs" / "quickstart.yaml",
                out=tmp_path,
                wandb="disabled",
                overrides=given,
            )
        said = " ".join(capsys.readouterr().out.split())
        told = "train.snapshot_steps: no snapshot at 60, 400, past the end at step 40"
        assert (told in said) == (given is changes)
