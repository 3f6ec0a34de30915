"""The text of a study that `stability init` writes: the words of the command are kept in it."""

import shlex
from pathlib import Path

import pytest

from stability.cli.command_parts import with_seed
from stability.cli.init import _print_next
from stability.cli.study_text import study_text
from stability.config.command_study import load_command_study
from stability.config.study import PolicyConfig


def test_what_is_written_says_which_side_is_the_baseline_and_how_a_switch_is_given() -> None:
    command = ["python", "train.py", "--seed", "{seed}"]
    said = " ".join(study_text("mine", command, {}, 7).replace("#", "").split())
    assert "the base is the baseline: the low precision, as BF16, whose own error a verdict" in said
    assert "with FP32 as the baseline a nudge is as far as that error, and no step can be" in said
    assert "beside BF16 by autocast FP32, on weights of the same dtype reference:" in said
    assert "bf16: true for --bf16" in said
    # there a flag has a value: `bf16: true` is bf16=true
    assert "bf16: true" not in study_text("mine", ["python", "train.py", "lr=1"], {}, 7)


def test_a_candidate_that_can_not_be_judged_stands_below_what_to_do_instead(tmp_path: Path) -> None:
    command = ["python", "train.py", "--seed", "{seed}"]
    arms = {"candidate": {"dtype": "bf16"}}
    path = tmp_path / "study.yaml"
    path.write_text(study_text("mine", command, {}, 7, arms=arms, instead="stability init\n- a"))
    said, _, rest = path.read_text().partition("  candidate:\n")
    assert rest.startswith("    flags: {dtype: bf16}\n")
    assert "beside which no step can be judged: no PASS as it is" in said
    assert "  #   stability init - a\n" in said
    assert list(load_command_study(path).arms) == ["baseline", "candidate", "rerun", "nudge"]
    assert "no PASS as it is" not in study_text("mine", command, {}, 7, arms=arms)


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["--seed=1", "--lr=1e-3"], "python train.py --seed={seed} {assigned}"),
        (["seed=1", "optim.lr=1e-3"], "python train.py seed={seed} {settings}"),
        (["--seed", "1", "--lr=1e-3"], "python train.py --seed {seed} {flags}"),
        (["train", "seed=1", "lr=1e-3"], "python train.py train seed={seed} {settings}"),
        (["-s", "1", "data=wiki", "--lr", "1e-3"], "python train.py data=wiki {flags}"),
    ],
)
def test_a_seed_and_flags_are_given_in_the_form_that_the_command_has(
    words: list[str], command: str, tmp_path: Path
) -> None:
    given, _ = with_seed(["python", "train.py", *words])
    text = study_text("mine", given, {}, 7)
    assert f"command: {command}\n" in text
    path = tmp_path / "study.yaml"
    path.write_text(text)
    assert load_command_study(path).base.command == command


@pytest.mark.parametrize(
    "words",
    [
        ["python", "train.py", "--seed", "{seed}", "--lr", "1e-3", "--sizes", "1", "2"],
        ["torchrun", "--nproc-per-node", "2", "train.py", "config file.yaml", "--seed={seed}"],
        ["python", "-m", "pkg.train", "--name", "it's: {odd}", "--tag", "007"],
    ],
)
def test_the_words_of_a_command_are_kept(words: list[str], tmp_path: Path) -> None:
    path = tmp_path / "study.yaml"
    path.write_text(study_text("mine", words, {"A": "1"}, 7))
    study = load_command_study(path)
    made = study.base.words()
    assert sorted(" ".join(made).replace("=", " ").split()) == sorted(
        " ".join(words).replace("=", " ").split()
    ), shlex.join(made)
    assert study.base.env == {"A": "1"}
    assert study.base.train.steps == 7


@pytest.mark.parametrize(
    ("dtypes", "checked", "is_told"),
    [
        (["bfloat16"], " --dtype bf16", True),
        (["float16"], " --dtype fp16", True),
        (["float32"], " --dtype fp32", False),
        (["bfloat16", "float32"], " --dtype bf16,fp32", False),
        ([], "", True),
    ],
)
def test_a_kernel_is_checked_in_the_dtypes_of_the_script_and_a_wider_limit_told_not_taken(
    dtypes: list[str],
    checked: str,
    is_told: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _print_next(Path("study.yaml"), [], "mine:attend", dtypes)
    assert f"stability check mine:attend --quick{checked}\n" in capsys.readouterr().out
    line = "# policy: {max_error_ratio: 4.0}\n"
    for attention in ("mine:attend", "sdpa:math", ""):
        text = study_text("mine", ["python", "x.py"], {}, 20, attention=attention, dtypes=dtypes)
        assert (line in text) == (is_told and attention == "mine:attend")
        (tmp_path / "study.yaml").write_text(text)
        assert load_command_study(tmp_path / "study.yaml").policy == PolicyConfig()
        (tmp_path / "study.yaml").write_text(text.replace(line, line.removeprefix("# ")))
        wide = load_command_study(tmp_path / "study.yaml").policy.max_error_ratio
        assert (wide == 4.0) == (line in text)
