"""`stability init --template`: the files of a first study, which run as they are."""

import shlex
from typing import get_args

import pytest

from stability.cli import demo
from stability.cli.main import main
from stability.cli.templates import Template
from stability.config.arms import expand
from stability.config.command_study import expand_commands, is_command_study, load_command_study
from stability.config.load import load_study
from stability.study.run_study import check_study, plan_study

FILES = {
    "kernel": ["my_kernel.py", "study.yaml"],
    "precision": ["study.yaml"],
    "script": ["study.yaml", "train.py"],
    "layouts": ["study.yaml"],
    "checkpoints": ["save_checkpoints.py"],
}
JUDGED = {"baseline", "candidate", "broken", "reference", "nudge"}
"""What a study needs to be able to pass a candidate."""


def code_of(*words):
    try:
        return main([*words])
    except SystemExit as stop:
        return stop.code


@pytest.fixture
def empty(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_template_is_known():
    assert sorted(get_args(Template)) == sorted(FILES)


@pytest.mark.parametrize("template", FILES)
def test_a_template_writes_a_study_that_can_end_in_a_verdict(template, empty, capsys):
    assert code_of("init", "--template", template, "--name", "asked", "--to", "sub/study.yaml") == 0
    assert sorted(path.name for path in (empty / "sub").iterdir()) == FILES[template]
    said = capsys.readouterr().out
    assert "next, in sub:" in said
    assert "runs/asked" in said
    assert all(len(line) <= 120 for line in said.splitlines())
    path = empty / "sub" / "study.yaml"
    if not path.exists():
        return
    if is_command_study(path):
        study = load_command_study(path, {})
        arms = expand_commands(study)
    else:
        study = load_study(path)
        arms = expand(study)
    assert study.name == "asked"
    assert {arm.role for arm in arms} >= JUDGED


def test_the_kernel_of_a_template_is_found_and_nothing_speaks_against_the_study(empty, capsys):
    assert code_of("init", "--template", "kernel") == 0
    first, *_ = [line for line in capsys.readouterr().out.splitlines() if "stability check" in line]
    assert shlex.split(first.split(" #")[0])[2] == "my_kernel:attend"
    study = load_study(empty / "study.yaml")
    assert check_study(plan_study(study, empty / "runs")) == []


def test_nothing_is_written_over_and_then_nothing_at_all(empty, capsys):
    (empty / "train.py").write_text("mine")
    assert code_of("init", "--template", "script") == 2
    assert "train.py: must not be there yet; choose another folder by --to" in (
        capsys.readouterr().err
    )
    assert [path.name for path in empty.iterdir()] == ["train.py"]
    assert (empty / "train.py").read_text() == "mine"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--template", "kernel", "--", "python", "x.py"), "either --template or a command"),
        (("--template", "kernels"), "kernels"),
        (("--template", "kernel", "--name", "a/b"), "must be 1 to 64 letters"),
    ],
)
def test_what_makes_no_sense_is_refused(words, said, empty, capsys):
    assert code_of("init", *words) == 2
    assert said in capsys.readouterr().err
    assert not list(empty.iterdir())


def test_the_demo_is_the_study_that_comes_with_the_package(empty, monkeypatch):
    asked = {}
    monkeypatch.setattr(demo, "run", lambda study, **rest: asked.update(study=study, **rest) or 0)
    assert code_of("demo", "--wandb", "disabled") == 0
    assert load_study(asked["study"]).name == "quickstart"
    assert (str(asked["out"]), asked["wandb"], asked["jobs"]) == ("runs", "disabled", 0)
