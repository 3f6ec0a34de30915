"""What a reader is told of a recorded study's arms, each by itself."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stability.analysis.drift_notes import drift_notes
from stability.analysis.study_records import RecordedArm, RecordedStudy, read_study


@pytest.fixture
def study(synthetic: Any, tmp_path: Path) -> RecordedStudy:
    """A study of a command whose records are from before there were witnesses."""
    found = read_study(synthetic.write_synthetic(tmp_path / "quickstart"))
    return replace(found, base={"program": "train.py"})


def with_witness(arm: RecordedArm, *seeds: int, gap: str = "") -> RecordedArm:
    """Return the arm as if the runs of `seeds` had a witness."""
    runs = dict(arm.runs)
    for seed in seeds:
        manifest = runs[seed].manifest
        assert manifest is not None
        manifest = replace(manifest, files={**manifest.files, "witness.json": "0" * 64})
        runs[seed] = replace(runs[seed], manifest=manifest, unwitnessed=gap)
    return replace(arm, runs=runs)


def unproven(study: RecordedStudy, *arms: RecordedArm) -> list[str]:
    return [note for note in drift_notes(study, arms) if note.startswith("Unproven: what")]


def test_an_arm_without_a_witness_is_named_beside_one_that_has_it(study: RecordedStudy) -> None:
    first, second, third, *_ = study.candidates
    seeds = tuple(first.runs)
    said = (
        f"Unproven: what {second.name}, {third.name} executed has no witness, as in records of an "
        "older version and in checkpoints that were adopted."
    )
    assert unproven(study, with_witness(first, *seeds), second, third) == [said]
    whole = [with_witness(arm, *arm.runs) for arm in (first, second, third)]
    assert unproven(study, *whole) == []


def test_one_seed_without_a_witness_is_enough_to_name_an_arm(study: RecordedStudy) -> None:
    first = study.candidates[0]
    seeds = [seed for seed, run in first.runs.items() if run.state == "finished"]
    assert len(seeds) > 1
    (said,) = unproven(study, with_witness(first, *seeds[1:]))
    assert said.startswith(f"Unproven: what {first.name} executed has no witness")


def test_a_gap_is_said_once_and_a_run_that_still_trains_has_none(study: RecordedStudy) -> None:
    first = study.candidates[0]
    gap = "what it executed, which has no witness"
    lacking = replace(
        first, runs={seed: replace(run, unwitnessed=gap) for seed, run in first.runs.items()}
    )
    said = drift_notes(study, [lacking])
    assert sum(first.name in note and "executed" in note for note in said) == 1
    assert f"Unproven: not all is on record of what {first.name} executed: {gap}." in said
    running = {
        seed: replace(run, manifest=run.manifest and replace(run.manifest, state="running"))
        for seed, run in first.runs.items()
    }
    assert unproven(study, replace(first, runs=running)) == []


def with_note(arm: RecordedArm, note: str) -> RecordedArm:
    """Return the arm as if the recorder had told something of each of its runs."""
    runs = {
        seed: replace(
            run, manifest=run.manifest and replace(run.manifest, resolved={"notes": [note]})
        )
        for seed, run in arm.runs.items()
    }
    return replace(arm, runs=runs)


def test_what_holds_for_every_arm_names_none(study: RecordedStudy) -> None:
    arms = tuple(with_note(arm, "held out: 64 samples") for arm in study.arms)
    everywhere = replace(study, arms=arms)
    assert "Of every arm: held out: 64 samples." in drift_notes(everywhere)
    all_but_one = replace(study, arms=(*arms[:-1], study.arms[-1]))
    (said,) = [note for note in drift_notes(all_but_one) if "held out" in note]
    assert said == f"Of {', '.join(arm.name for arm in arms[:-1])}: held out: 64 samples."
    (said,) = [note for note in drift_notes(everywhere, arms[1:2]) if "held out" in note]
    assert said == f"Of baseline, {arms[1].name}: held out: 64 samples.", "two of seven are asked"


def test_an_arm_whose_change_adds_weights_is_said_to_drift_over_the_others(
    study: RecordedStudy,
) -> None:
    first, second, *_ = study.candidates
    other = replace(first, diff={"model.qk_norm": [False, True]})
    said = (
        f"Drift of {first.name} is over the weights that the baseline has too: qk_norm is a scale "
        "more for the queries of a layer and one for its keys."
    )
    assert said in drift_notes(study, [other, second])
    assert not any(note.startswith("Drift of") for note in drift_notes(study, [first, second]))
