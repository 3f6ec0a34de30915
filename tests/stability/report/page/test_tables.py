"""What a report's tables say of a study of commands, and what they keep to its user."""

import json
from copy import deepcopy
from dataclasses import replace
from types import SimpleNamespace

import pytest

from stability.analysis.study_hashes import shown_hashes
from stability.analysis.study_records import RecordedArm, read_study
from stability.report.page.tables import MARKS, changes, hash_lines, numerics_text, proof_legend
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


def with_hashes(study, **values):
    """Return the study as if each run had other hashes besides."""
    arms = []
    for arm in study.arms:
        runs = {
            seed: replace(
                run, manifest=replace(run.manifest, hashes={**run.manifest.hashes, **values})
            )
            for seed, run in arm.runs.items()
        }
        arms.append(replace(arm, runs=runs))
    return replace(study, arms=tuple(arms))


def test_of_a_command_no_hash_is_shown_that_it_can_not_have(finished):
    ours = read_study(finished)
    command = replace(ours, base={"program": "python train.py", "train": ours.base["train"]})
    assert shown_hashes(ours) == ("init_weights", "text", "held_out", "batches", "final_weights")
    assert shown_hashes(command) == ("init_weights", "batches", "final_weights")
    evaluated = with_hashes(command, held_out="5" * 64)
    assert shown_hashes(evaluated) == ("init_weights", "held_out", "batches", "final_weights")
    for study in (ours, command, evaluated):
        assert {len(line.cells) for line in hash_lines(study)} == {len(shown_hashes(study))}
    (first, *_) = hash_lines(command)[0].cells[1]
    assert first.title == command.arms[0].runs[0].manifest.hashes["batches"], "under its own head"


def test_each_mark_that_is_shown_is_explained_and_no_other(finished):
    def shown(study):
        cells = [cell for line in hash_lines(study)[1:] for of in line.cells for cell in of]
        return {cell.text.split()[0] for cell in cells}

    def explained(study):
        return {mark for mark in MARKS.values() if f"{mark} " in proof_legend(study)}

    ours = read_study(finished)
    whole = with_hashes(ours, held_out="5" * 64)
    arms = [replace(arm, diff={}) if arm.name == "init_seed" else arm for arm in whole.arms]
    broken = replace(whole, arms=tuple(arms))
    assert explained(ours) == shown(ours) == {"✓", "≠", "?"}
    assert explained(whole) == shown(whole) == {"✓", "≠"}
    assert explained(broken) == shown(broken) == {"✓", "≠", "✗"}
    assert "? unknown: one of the two runs has none on record" in proof_legend(ours)
    assert proof_legend(replace(ours, arms=ours.arms[:1])) == ""
