"""`stability init --template`: the files of a first study, which run as they are."""

import shlex
import sys
from dataclasses import replace
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


@pytest.mark.parametrize("template", sorted(set(FILES) - {"checkpoints"}))
def test_a_study_under_another_name_says_its_own_in_what_it_tells_to_run(template, empty, capsys):
    assert code_of("init", "--template", template, "--to", "my study.yaml") == 0
    assert "stability run 'my study.yaml'" in capsys.readouterr().out
    written = (empty / "my study.yaml").read_text()
    assert "stability run 'my study.yaml'" in written
    assert "study.yaml" not in written.replace("'my study.yaml'", "")


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


def test_a_kernel_is_judged_beyond_the_warm_up(empty):
    assert code_of("init", "--template", "kernel") == 0
    study = load_study(empty / "study.yaml")
    assert study.base.optimizer.warmup_steps < study.policy.step <= study.base.train.steps


OWN = """
from torch.nn.functional import scaled_dot_product_attention

def my_attention(q, k, v, *, causal, scale=None):
    return scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)

def of_two(q, k): ...
"""


@pytest.fixture
def own(empty, monkeypatch):
    """A kernel of the user's in the current folder, under a name that no other test imports."""
    monkeypatch.syspath_prepend(str(empty))
    (empty / "myattn_of_templates.py").write_text(OWN)
    yield "myattn_of_templates:my_attention"
    sys.modules.pop("myattn_of_templates", None)


@pytest.mark.parametrize("to", ["mine.yaml", "sub/mine.yaml"])
def test_the_study_of_a_kernel_that_is_there_names_it_and_writes_no_other(to, own, empty, capsys):
    assert code_of("init", "--template", "kernel", "--attention", own, "--to", to) == 0
    said = capsys.readouterr().out
    assert [path.name for path in (empty / to).parent.glob("*.yaml")] == ["mine.yaml"]
    assert not list(empty.rglob("my_kernel.py"))
    commands = [line.split(" #")[0].strip() for line in said.splitlines() if "stability" in line]
    # of this folder, where the kernel was found, wherever the study lies
    assert "next:\n" in said
    assert commands == [
        f"stability check {own} --quick --dtype bf16",
        f"stability estimate {to}",
        f"stability run {to}",
        "stability verdict runs/my_kernel",
        "explained, step by step: stability docs my_kernel",
    ]
    text = (empty / to).read_text()
    assert "my_kernel:" not in text
    assert "my_kernel.py" not in text
    assert f"# Run:   stability run {to}\n" in text
    study = load_study(empty / to)
    arms = {arm.role: arm.config.attention for arm in expand(study)}
    assert (arms["candidate"].implementation, arms["candidate"].fault) == (own, "")
    assert (arms["broken"].implementation, arms["broken"].fault) == (own, "out_gain_1pct")
    assert arms["baseline"].implementation == arms["reference"].implementation == "baseline"
    assert check_study(plan_study(study, empty / "runs")) == []


def test_an_attention_of_ours_may_be_in_the_kernels_place(empty, capsys):
    assert code_of("init", "--template", "kernel", "--attention", "flash:fa2") == 0
    assert "stability check flash:fa2 --quick" in capsys.readouterr().out
    study = load_study(empty / "study.yaml")
    arms = {arm.role: arm.config.attention for arm in expand(study)}
    assert (arms["candidate"].implementation, arms["candidate"].profile) == ("flash", "fa2")
    assert arms["broken"] == replace(arms["candidate"], fault="out_gain_1pct")
    assert check_study(plan_study(study, empty / "runs")) == []


@pytest.mark.parametrize(
    ("template", "attention", "why"),
    [
        ("kernel", "myattn_of_templates:my_atention", "got 'my_atention'; nearest: my_attention"),
        ("kernel", "myattn_of_templates.py:f", "did you mean myattn_of_templates:f"),
        ("kernel", "absent_of_templates:f", "a module that imports, got 'absent_of_templates:f'"),
        ("kernel", "myattn_of_templates:of_two", "must be a function of (q, k, v, *, causal, sc"),
        ("kernel", "my_attention", "must be registered or MODULE:FUNCTION, got 'my_attention'"),
        ("kernel", "flash:fa22", "must be one of its profiles, got 'fa22'"),
        ("kernel", "baseline", "must be another one than the baseline's, got 'baseline'"),
        ("kernel", "flash:fa2+dq_gain", "must be given without a planted fault"),
        (
            "script",
            "myattn_of_templates:my_attention",
            "attention must be given with a command or with --template kernel, got "
            "'myattn_of_templates:my_attention' with --template script",
        ),
    ],
)
def test_an_attention_that_can_not_be_the_kernel_is_told_and_nothing_written(
    template, attention, why, own, empty, capsys
):
    assert code_of("init", "--template", template, "--attention", attention) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert why in said
    assert "Traceback" not in said
    assert [path.name for path in empty.iterdir() if path.suffix] == ["myattn_of_templates.py"]


def test_a_study_is_not_written_over_by_that_of_a_kernel_that_is_there(own, empty, capsys):
    (empty / "study.yaml").write_text("mine")
    assert code_of("init", "--template", "kernel", "--attention", own) == 2
    assert "study.yaml: must not be there yet; choose another file by --to" in (
        capsys.readouterr().err
    )
    assert (empty / "study.yaml").read_text() == "mine"


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
