"""A function that a study of commands names wrongly is found before its first run."""

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from stability.config.command_study import load_command_study
from stability.study.named_functions import check_named_functions
from stability.study.run_commands import plan_commands
from tests.stability.recorder.recording import SCRIPTS, code_of

LOSSES = """
from math import inf as infinity
try:
    import nowhere
except ImportError:
    nowhere = None
if True:
    def of_text(model): return 1.0
class Loss:
    def of_method(self, model): return 1.0
made, (other, *more) = 1, (2, 3)
async def waits(): pass
def makes():
    global later
    later = makes
match [1, 2]:
    case [first, *rest]: pass
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a script in `src`, and a module beside it and one where it is started."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    (tmp_path / "src" / "own").mkdir(parents=True)
    (tmp_path / "src" / "train.py").write_text(
        (SCRIPTS / "evaluates.py").read_text(encoding="utf-8"), encoding="utf-8"
    )
    (tmp_path / "src" / "losses.py").write_text(LOSSES)
    (tmp_path / "src" / "own" / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (tmp_path / "src" / "own" / "parts.py").write_text("def loss(model): return 1.0\n")
    (tmp_path / "my_kernel.py").write_text(
        "raise RuntimeError('imported')\ndef flash_attention(q, k, v, *, causal, scale): ...\n"
    )
    return tmp_path


def study_of(folder: Path, base: dict[str, Any], arms: dict[str, Any]) -> Path:
    path = folder / "study.yaml"
    command = {"command": f"{sys.executable} src/train.py --seed {{seed}}", "train": {"steps": 6}}
    content = {
        "name": "mine",
        "question": "?",
        "base": {**command, **base},
        "arms": arms,
        "seeds": [0, 1, 2],
    }
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


def check(folder: Path, base: dict[str, Any], arms: dict[str, Any] | None = None) -> None:
    runs = plan_commands(load_command_study(study_of(folder, base, arms or {})), Path("runs"))
    check_named_functions(runs, dict.fromkeys((run.arm for run in runs), None))


@pytest.mark.parametrize(
    "name",
    [
        "losses:of_text",
        "losses:Loss",
        "losses:infinity",
        "losses:nowhere",
        "losses:more",
        "losses:waits",
        "losses:later",
        "losses:first",
        "losses:rest",
        "train:of_held_out",
        "own.parts:loss",
        "my_kernel:flash_attention",
        # of a library: what a source binds is known, and of a builtin nothing is
        "torch.nn.functional:cross_entropy",
        "math:sqrt",
        "all",
    ],
)
def test_a_function_that_may_be_there_is_taken_and_nothing_is_imported(
    folder: Path, name: str
) -> None:
    check(folder, {"held_out": name})


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("losses:of_txt", "losses.py has no of_txt; nearest: of_text"),
        ("losses:of_method", "losses.py has no of_method; nearest: "),
        ("train:of_heldout", "train.py has no of_heldout; nearest: of_held_out"),
        ("loses:of_text", "no module loses where the script looks; nearest in its folder: losses"),
        ("my_kernl:f", "no module my_kernl where the script looks; nearest in .*: my_kernel$"),
        ("own.part:loss", "no module own.part where the script looks"),
        ("losses.py:of_text", r"held_out must be MODULE:FUNCTION|no module losses\.py"),
        (
            "torch.nn.functional:crossentropy",
            "functional.py has no crossentropy; nearest: cross_en",
        ),
    ],
)
def test_a_function_that_can_not_be_there_is_told_with_the_nearest(
    folder: Path, name: str, why: str
) -> None:
    with pytest.raises(ValueError, match=why) as told:
        check(folder, {"held_out": name})
    assert str(told.value).startswith("base.held_out: must be MODULE:FUNCTION")
    assert f"got '{name}'; " in str(told.value)


@pytest.mark.parametrize(
    ("arm", "where"),
    [
        ({"attention": "my_kernel:flash_atention"}, "attention"),
        ({"attention": "my_kernel:flash_atention+dq_gain"}, "attention"),
        ({"probe": {"candidate": "my_kernel:flash_atention"}}, "probe.candidate"),
    ],
)
def test_a_misspelt_attention_of_an_arm_is_told_by_its_arm(
    folder: Path, arm: dict[str, Any], where: str
) -> None:
    arms = {"right": {"attention": "my_kernel:flash_attention"}, "wrong": arm}
    why = f"^arms.wrong.{where}: .* my_kernel.py has no flash_atention; nearest: flash_attention$"
    with pytest.raises(ValueError, match=why):
        check(folder, {}, arms)


def test_where_a_script_may_find_more_than_is_known_the_first_run_tells(folder: Path) -> None:
    """Its own path, a module deeper in the tree, names that are made, a program that is unknown."""
    wrong = {"held_out": "loses:of_text"}
    source = (folder / "src" / "train.py").read_text()
    (folder / "src" / "train.py").write_text("import sys\nsys.path.insert(0, 'lib')\n" + source)
    check(folder, wrong)
    (folder / "src" / "train.py").write_text(source)
    (folder / "train.sh").write_text(f"exec {sys.executable} src/train.py --seed $1\n")
    check(folder, {**wrong, "command": "bash train.sh {seed}"})
    (folder / "lib").mkdir()
    (folder / "lib" / "loses.py").write_text("")
    check(folder, wrong)
    for made in (
        "vars()['of_txt'] = 1\n",
        "globals()['of_txt'] = 1\n",
        "from math import *\n",
        "def __getattr__(x): ...\n",
    ):
        (folder / "src" / "losses.py").write_text(made)
        check(folder, {"held_out": "losses:of_txt"})
    (folder / "src" / "losses.py").write_text("def of_txt(:\n")
    check(folder, {"held_out": "losses:of_txt"})


def test_what_lies_beside_the_file_that_a_script_is_a_link_to_is_found(folder: Path) -> None:
    (folder / "far" / "repo" / "code").mkdir(parents=True)
    target = (folder / "src" / "train.py").rename(folder / "far" / "repo" / "code" / "train.py")
    (target.parent / "beside.py").write_text("def loss(model): ...\n")
    (folder / "src" / "train.py").symlink_to(target)
    check(folder, {"held_out": "beside:loss"})


def test_a_helper_of_the_users_may_set_the_path(folder: Path) -> None:
    (folder / "src" / "setup_path.py").write_text("import sys\nsys.path.append('/a/b/c')\n")
    check(folder, {"held_out": "afar:loss"})


def test_the_path_of_the_arm_is_looked_through(folder: Path) -> None:
    (folder / "elsewhere" / "deeper" / "still").mkdir(parents=True)
    (folder / "elsewhere" / "deeper" / "still" / "afar.py").write_text("def loss(model): ...\n")
    with pytest.raises(ValueError, match="there is no module afar where the script looks"):
        check(folder, {"held_out": "afar:loss"})
    check(folder, {"held_out": "afar:loss", "env": {"PYTHONPATH": "elsewhere/deeper/still"}})


@pytest.mark.parametrize("verb", ["run", "estimate"])
def test_a_wrong_name_is_told_before_anything_is_started(
    folder: Path, verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "src" / "train.py").write_text("raise SystemExit('it was started')\n")
    path = study_of(folder, {"held_out": "losses:of_txt"}, {"rerun": {}})
    assert code_of(verb, str(path)) == 2
    printed = capsys.readouterr()
    said = " ".join(printed.err.split())
    assert "stability: base.held_out: must be MODULE:FUNCTION, a function that the script" in said
    assert "got 'losses:of_txt'; losses.py has no of_txt; nearest: of_text" in said
    assert "it was started" not in printed.out + said
    assert not (folder / "runs").exists()


def test_a_held_out_loss_that_raises_ends_the_study_at_its_first_run(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "src" / "losses.py").write_text("def loss(model):\n    return model.absent\n")
    path = study_of(
        folder, {"held_out": "losses:loss"}, {"rerun": {}, "nudge": {"nudge": {"ulps": 1}}}
    )
    assert code_of("run", str(path), "--wandb", "disabled") == 2
    printed = capsys.readouterr()
    said = " ".join(printed.err.split())
    assert (
        "base.held_out: must be MODULE:FUNCTION that takes the model and returns its mean" in said
    )
    assert (
        "got 'losses:loss', in which baseline, seed 0, has failed; no other run was begun" in said
    )
    shown = " ".join(printed.out.split())
    assert "raised AttributeError: 'Model' object has no attribute 'absent'" in shown
    begun = [path.parent.name for path in (folder / "runs" / "mine").rglob("manifest.json")]
    assert begun == ["seed-0"]
