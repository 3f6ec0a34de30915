"""What a report's tables say of a study of commands, and what they keep to its user."""

import json
from copy import deepcopy
from dataclasses import replace
from types import SimpleNamespace

import pytest

from stability.analysis.study_records import RecordedArm
from stability.report.page.tables import changes, numerics_text
from tests.stability.analysis.test_advice import of


def study_of(kind, tmp_path, path, values):
    arm = RecordedArm(
        name="other", axis="x", diff={path: values}, role="candidate", until=1, runs={}
    )
    baseline = replace(arm, name="baseline", role="baseline", diff={})
    return replace(of(kind, tmp_path), arms=(baseline, arm))


@pytest.mark.parametrize(
    ("path", "values", "said"),
    [
        ("flags.bf16", (None, True), ("the script's own", "true")),
        ("flags.lr", (0.1, None), ("0.1", "the script's own")),
        ("flags.steps", (0, False), ("0", "false")),
        ("flags.prefix", (None, ""), ("the script's own", "empty")),
        ("config.model.name", ("", None), ("empty", "the script's own")),
        ("env.SEED_ALL", (None, "1"), ("not set", "1")),
        ("env.SEED_ALL", ("1", ""), ("1", "empty")),
        ("attention.implementation", ("", "sdpa:math"), ("the script's own", "sdpa:math")),
        ("attention.fault", ("", "dq_gain"), ("none", "dq_gain")),
    ],
)
def test_what_a_command_was_not_given_is_said_in_words(tmp_path, path, values, said):
    (row,) = changes(study_of("commands", tmp_path, path, values))
    assert (row.path, row.before, row.after) == (path, *said)


def test_of_our_own_trainer_a_value_is_shown_as_it_is_written(tmp_path):
    (row,) = changes(study_of("config", tmp_path, "attention.profile", ("", None)))
    assert (row.before, row.after) == ("", "null")


def test_no_variable_of_the_users_shell_is_shown():
    variables = {"MINE": "1f2e3d", "HOME": "94a6b4", "A_PASSWORD": "5ccefd", "MY_TOKEN": "7a8b9c"}
    launched = {"arguments": ["train.py"], "variables": variables}
    launched["set_on_the_way"] = ["MINE", "CLIENTS_NAME"]
    told = deepcopy(launched)
    manifest = SimpleNamespace(
        resolved={"models": ["GPT"], "launched": launched},
        config={"env": {"MINE": "2", "MY_TOKEN": "masked"}},
    )
    text = numerics_text(SimpleNamespace(runs={0: SimpleNamespace(manifest=manifest)}))
    assert "GPT" in text
    assert "train.py" in text
    assert '"MINE": "1f2e3d"' in text
    assert "HOME" not in text
    assert "94a6b4" not in text
    assert "A_PASSWORD" not in text
    assert json.loads(text)["launched"]["set_on_the_way"] == ["MINE"]
    assert "CLIENTS_NAME" not in text
    assert "7a8b9c" not in text, "the hash of a secret, though the study sets it"
    assert launched == told, "the record stays whole"


def test_what_is_resolved_by_our_own_trainer_is_shown_whole():
    manifest = SimpleNamespace(resolved={"engine": "twin"}, config={})
    text = numerics_text(SimpleNamespace(runs={0: SimpleNamespace(manifest=manifest)}))
    assert text == '{\n  "engine": "twin"\n}'
