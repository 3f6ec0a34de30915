"""Advice names what the study's own kind has: keys of its file, flags, or nothing at all."""

import inspect
import re
from dataclasses import fields
from types import SimpleNamespace
from typing import get_args

import pytest

from stability.analysis.advice import StudyKind, Topic, advice, attention_is_not_its, kind_of
from stability.analysis.study_records import RecordedStudy
from stability.cli import record
from stability.config.command_study import CommandConfig, CommandProbe
from stability.config.commands import GRADIENT_NEEDS
from stability.config.schema import ArmConfig, ProbeConfig
from stability.config.study import PolicyConfig

BASES = {
    "config": {"train": {}},
    "commands": {"program": "python a.py", "setup": "", "train": {}},
    "recorded": {"program": "python a.py", "train": {}},
    "adopted": {"program": "checkpoints", "train": {}},
}


def of(kind, tmp_path) -> RecordedStudy:
    return RecordedStudy(
        name="",
        question="",
        yardstick="",
        base=BASES[kind],
        seeds=(0,),
        steps=1,
        early_step=0,
        policy=PolicyConfig(),
        arms=(),
        folder=tmp_path,
    )


@pytest.mark.parametrize("kind", get_args(StudyKind))
def test_a_study_is_told_by_its_base(kind, tmp_path):
    assert kind_of(of(kind, tmp_path)) == kind


@pytest.mark.parametrize("topic", get_args(Topic))
def test_every_option_that_is_advised_exists(topic, tmp_path):
    said = advice(of("recorded", tmp_path), topic)
    assert said
    options = inspect.signature(record.record).parameters
    for option in re.findall(r"--([a-z-]+)", said):
        assert option.replace("-", "_") in options
    assert not re.search(r"`[a-z_]+: ", said), "it has no file with keys"


@pytest.mark.parametrize(
    ("kind", "known"),
    [
        ("commands", (CommandConfig, CommandProbe)),
        ("config", (ArmConfig, ProbeConfig)),
    ],
)
def test_every_key_that_is_advised_exists(kind, known, tmp_path):
    names = {field.name for each in known for field in fields(each)}
    names |= {"role", "ulps", "reference", "share"}  # of an arm's entry, a nudge, and held_out
    names |= {"dtype"}  # a flag of the script
    for topic in get_args(Topic):
        said = " ".join(re.findall(r"`([^`]*)`", advice(of(kind, tmp_path), topic)))
        for key in re.findall(r"([a-z_]+)(?=: )", said) if "module:" not in said else ():
            assert key in names, said


@pytest.mark.parametrize("kind", ["commands", "recorded"])
def test_what_a_look_at_the_gradient_needs_of_a_script_is_said(kind, tmp_path):
    assert advice(of(kind, tmp_path), "gradient").endswith(f"20 looks, for which {GRADIENT_NEEDS}")


@pytest.mark.parametrize("kind", get_args(StudyKind))
def test_of_a_script_it_is_not_said_that_its_attention_is_the_same(kind, tmp_path):
    """Its flag may be `--attention naive`."""
    said = attention_is_not_its(of(kind, tmp_path), SimpleNamespace(name="naive"))
    assert ("does not change the attention" in said) == (kind == "config")
    assert said.startswith("naive ")


def test_of_checkpoints_nothing_is_asked_that_they_cannot_give(tmp_path):
    study = of("adopted", tmp_path)
    assert advice(study, "held_out") == advice(study, "nudge") == advice(study, "operator") == ""
    assert "--role NAME=reference" in advice(study, "reference")
