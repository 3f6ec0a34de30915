"""Studies of commands: what their YAML may say, and which words it makes of a command."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from stability.config.command_study import (
    CommandConfig,
    CommandTrain,
    expand_commands,
    is_command_study,
    load_command_study,
)
from stability.config.commands import (
    attention_name,
    attention_values,
    command_training,
    filled_in,
)
from stability.config.convert import ConfigError
from stability.config.flags import flag_words, parse_flags, setting_words

TRAIN = CommandTrain(steps=30)


def written(tmp_path: Path, **changes: Any) -> Path:
    content = {
        "name": "mine",
        "question": "does it matter?",
        "base": {
            "command": "python train.py --seed {seed} {flags}",
            "flags": {"lr": 0.001, "bf16": True},
            "train": {"steps": 30},
        },
        "arms": {"lr_x2": {"flags": {"lr": 0.002}}},
        "seeds": [0, 1],
        **changes,
    }
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


def test_an_attention_that_is_a_mapping_is_told_its_form(tmp_path: Path) -> None:
    """As it stands in a study of our own models."""
    attention = {"implementation": "mine:attend"}
    said = 'attention: must be a string, "module:function" or "module:function+fault", got {'
    with pytest.raises(ConfigError, match=f"arms.mine.{re.escape(said)}"):
        load_command_study(written(tmp_path, arms={"mine": {"attention": attention}}))


def test_a_fault_on_an_attention_is_a_value_of_its_own_and_makes_an_arm_broken(
    tmp_path: Path,
) -> None:
    arms = {"fa2": {"attention": "flash:fa2"}, "bad": {"attention": "flash:fa2+out_gain_1pct"}}
    _, right, bad = expand_commands(load_command_study(written(tmp_path, arms=arms)))
    assert (right.role, bad.role) == ("candidate", "broken")
    assert bad.diff == {
        "attention.implementation": ("", "flash:fa2"),
        "attention.fault": (None, "out_gain_1pct"),
    }
    assert right.config.recorded()["attention"] == {"implementation": "flash:fa2"}
    for name in ("", "flash:fa2", "mine:attend+dq_gain"):
        assert attention_name(attention_values(name)) == name


def test_an_arm_is_what_it_lays_over_the_base(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        arms={
            "fp32": {"role": "reference", "flags": {"bf16": False}},
            "again": {},
            "nudge": {"nudge": {"ulps": 1}},
        },
    )
    assert is_command_study(path)
    baseline, fp32, again, nudge = expand_commands(load_command_study(path))
    assert (baseline.role, fp32.role, again.role, nudge.role) == (
        "baseline",
        "reference",
        "rerun",
        "nudge",
    )
    assert baseline.config.words() == [
        *("python", "train.py", "--seed", "{seed}", "--lr", "0.001", "--bf16")
    ]
    assert fp32.config.words() == ["python", "train.py", "--seed", "{seed}", "--lr", "0.001"]
    # not given is one thing, however it is said
    assert fp32.diff == {"flags.bf16": (True, None)}
    assert nudge.diff == {"nudge.ulps": (0, 1)}
    assert baseline.config.recorded()["train"]["snapshot_steps"] == [1, 2, 5, 10, 20, 30]


def test_a_study_of_commands_has_one_reference(tmp_path: Path) -> None:
    fp32 = {"role": "reference", "flags": {"bf16": False}}
    path = written(tmp_path, arms={"fp32": fp32, "again": fp32})
    with pytest.raises(ConfigError, match="must be reference in one arm of a study, and fp32 is"):
        expand_commands(load_command_study(path))


def test_the_reference_is_in_no_question(tmp_path: Path) -> None:
    """FP32 that is no worse than BF16 would pass, however bad BF16 is."""
    path = written(tmp_path, arms={"fp32": {"role": "reference", "flags": {"bf16": False}}})
    content = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump({**content, "policy": {"candidates": ["fp32"]}}))
    with pytest.raises(ConfigError, match=r"must not be reference in an arm of policy\.candidates"):
        expand_commands(load_command_study(path))


def test_overrides_lie_over_the_base(tmp_path: Path) -> None:
    study = load_command_study(written(tmp_path), {"train.steps": "7", "flags.lr": "1e-3"})
    assert (study.base.train.steps, study.base.flags["lr"]) == (7, 1e-3)


def test_flags_are_put_where_the_command_says() -> None:
    given = {"a.b": 2, "on": True, "off": False, "none": None, "v": [1, 2]}
    as_flags = ["--a.b", "2", "--on", "-v", "1", "2"]
    for command in ("run {flags} x", "run x"):
        words = CommandConfig(command=command, flags=given, train=TRAIN).words()
        expected = ["run", *as_flags, "x"] if "{" in command else ["run", "x", *as_flags]
        assert words == expected
    settings = CommandConfig(command="run {settings}", flags=given, train=TRAIN).words()
    assert settings == ["run", "a.b=2", "on=true", "off=false", "v=1,2"]
    resumed = CommandConfig(command="run --from={resume}", start="a b.pt", train=TRAIN)
    assert resumed.words() == ["run", f"--from={Path.cwd() / 'a b.pt'}"], "it runs elsewhere"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"arms": {"x": {"flag": {}}}}, "arms.x.flag"),
        ({"arms": {"x": {"until": 3}}}, "arms.x.until: must not be given"),
        ({"arms": {"x": {"role": "refrence"}}}, "must be a role, got 'refrence'"),
        ({"yardstick": "y"}, "yardstick: must be an arm, got 'y'"),
        ({"seeds": [1, 1]}, "seed 1 is listed twice"),
        ({"early_step": 3}, "early_step: must be a step with a snapshot, got 3"),
        ({"base": {"command": "run {sed}", "train": {"steps": 1}}}, "{sed} must be a known"),
        ({"base": {"command": "run 'x", "train": {"steps": 1}}}, "must be words as of a shell"),
        ({"base": {"command": " ", "train": {"steps": 1}}}, "command must not be empty"),
        ({"base": {"command": "run", "train": {"steps": 0}}}, "steps must be >= 1, got 0"),
        ({"base": {"command": "run"}}, "base.train: missing"),
        (
            {"base": {"command": "x{flags}", "train": {"steps": 1}}},
            "{flags} must be a word of its own",
        ),
        (
            {"base": {"command": "run {resume}", "train": {"steps": 1}}},
            "start must be given where the command has {resume}",
        ),
        (
            {"base": {"command": "x", "python": "p", "env": {"PATH": "a"}, "train": {"steps": 1}}},
            "PATH must not be given with a python",
        ),
        (
            {"base": {"command": "run", "flags": {"a": {"b": 1}}, "train": {"steps": 1}}},
            "a must be a number, a text",
        ),
        (
            {"base": {"command": "run", "train": {"steps": 9, "snapshot_steps": [10]}}},
            "snapshot_steps must be from 1 to steps, 9",
        ),
    ],
)
def test_a_mistake_is_told_with_its_place(
    changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as error:
        load_command_study(written(tmp_path, **changes))
    assert said in str(error.value)
    assert "study.yaml" in str(error.value)


NAMES = st.from_regex(r"[a-z][a-z_.\-]{0,8}", fullmatch=True)
TEXTS = st.one_of(
    st.integers(0, 10**6).map(str),
    st.from_regex(r"[A-Za-z0-9/.,:]{1,12}", fullmatch=True),
)
VALUES = st.just(True) | TEXTS


@given(st.dictionaries(NAMES, VALUES, max_size=6))
def test_flags_are_read_as_they_are_written(flags: dict[str, Any]) -> None:
    assert parse_flags(flag_words(flags)) == flags


@given(st.dictionaries(NAMES, TEXTS, max_size=6))
def test_settings_are_read_as_they_are_written(flags: dict[str, Any]) -> None:
    assert parse_flags(setting_words(flags)) == flags


@given(st.lists(st.text(max_size=8), max_size=8))
def test_any_words_make_flags(words: list[str]) -> None:
    flags = parse_flags(words)
    assert all(isinstance(value, str) or value is True for value in flags.values())
    # nothing is lost: each word can be found in what was read
    said = " ".join([*flags, *(str(value) for value in flags.values())])
    assert all(word.lstrip("-").partition("=")[0] in said for word in words if word.strip("-"))


@pytest.mark.parametrize(
    ("words", "program", "flags"),
    [
        (["python", "train.py", "--lr=1", "-v"], "python train.py", {"lr": "1", "v": True}),
        (
            ["torchrun", "--nproc-per-node", "2", "train.py", "config.yaml", "--x", "1", "2"],
            "torchrun --nproc-per-node 2 train.py",
            {"argument_1": "config.yaml", "x": "1 2"},
        ),
        (["python", "-m", "pkg.train", "a.b=1"], "python -m pkg.train", {"a.b": "1"}),
        (["./train", "--x", "-1"], "./train", {"x": "-1"}),
        (["train", "--x", "1", "--x", "2"], "train", {"x": "1 2"}),
    ],
)
def test_a_command_is_its_program_and_its_flags(
    words: list[str], program: str, flags: dict[str, Any]
) -> None:
    training = command_training(words, {})
    assert (training["program"], training["flags"]) == (program, flags)


def test_braces_that_are_nobodys_are_left() -> None:
    assert filled_in('{"a": {seed}}', {"seed": 3}) == '{"a": 3}'


def _diff_of(tmp_path: Path, place: str, base: dict[str, Any], arm: dict[str, Any]) -> Any:
    content = {"command": f"run {place}", "flags": base, "train": {"steps": 30}}
    path = written(tmp_path, base=content, arms={"x": {"flags": arm}})
    return expand_commands(load_command_study(path))[1]


@pytest.mark.parametrize("value", [0, 0.0])
def test_a_flag_of_zero_is_a_change(tmp_path: Path, value: float) -> None:
    arm = _diff_of(tmp_path, "{flags}", {"lr": 0.1}, {"dropout": value})
    assert arm.config.words() == ["run", "--lr", "0.1", "--dropout", str(value)]
    assert (arm.diff, arm.role) == ({"flags.dropout": (None, value)}, "candidate")
    both = _diff_of(tmp_path, "{flags}", {"lr": 0.1}, {"lr": 0.2, "weight_decay": value})
    assert [*both.diff] == ["flags.lr", "flags.weight_decay"]


@pytest.mark.parametrize("place", ["{assigned}", "{settings}"])
def test_false_is_a_change_where_it_is_handed_on(tmp_path: Path, place: str) -> None:
    arm = _diff_of(tmp_path, place, {"lr": 0.1}, {"compile": False, "none": None})
    assert arm.config.words()[2:] in (["--compile=False"], ["compile=false"])
    assert (arm.diff, arm.role) == ({"flags.compile": (None, False)}, "candidate")
    unsaid = _diff_of(tmp_path, "{flags}", {"lr": 0.1}, {"compile": False, "none": None})
    assert (unsaid.diff, unsaid.role) == ({}, "rerun")


@pytest.mark.parametrize(("one", "other"), [(1, True), (0, False), ([1, 0], [True, False])])
def test_a_number_and_a_truth_value_are_two_things(tmp_path: Path, one: Any, other: Any) -> None:
    arm = _diff_of(tmp_path, "{assigned}", {"x": one}, {"x": other})
    assert arm.diff == {"flags.x": (one, other)}
    assert _diff_of(tmp_path, "{assigned}", {"x": one}, {"x": one}).diff == {}
