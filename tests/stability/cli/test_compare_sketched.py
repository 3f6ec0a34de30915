"""`stability compare` of runs whose snapshots were dropped: what it knows, and how surely."""

import json

import pytest
from safetensors.torch import save_file

from stability.cli.main import main
from stability.records.paths import RunPaths
from tests.stability.analysis.dropped_runs import run_with, state_of

STATES = {0: state_of(0), 2: state_of(1, 0.1), 4: state_of(2, 0.2)}


@pytest.fixture
def shown(capsys):
    def run(*words, code=0):
        if code == 0:
            assert main(["compare", *map(str, words)]) == 0
            return capsys.readouterr().out
        with pytest.raises(SystemExit) as stop:
            main(["compare", *map(str, words)])
        assert stop.value.code == code
        return capsys.readouterr().err

    return run


@pytest.fixture
def runs(tmp_path):
    """Two runs, of studies of their own, that keep their first snapshot alone."""
    other = {0: STATES[0], 2: STATES[4], 4: STATES[4], 6: STATES[4]}
    return run_with(tmp_path / "a", STATES, keep=[0]), run_with(tmp_path / "b", other, keep=[0])


def test_the_answer_is_of_the_last_step_that_both_had_and_says_what_is_not_known(shown, runs):
    text = shown(*runs)
    flat = " ".join(text.split())
    assert f"{runs[0]}, step 4 against {runs[1]}, step 4" in flat
    assert "equal, by their hash yes" in flat
    assert "|a - b| 0 (exact)" in flat
    assert "cosine 1 (exact)" in flat
    assert f"has dropped the snapshot of {runs[0]}, step 4 and {runs[1]}, step 4" in flat
    assert "a distance is 0.28% off (one sd, at most), the cosine 0.0055" in flat
    assert "Single parameters, W1 and sign flips are not known" in flat
    assert text.rstrip().endswith(f"stability compare {runs[0]} {runs[1]} --step 4 --retrain")
    found = json.loads(shown(*runs, "--step", 2, "--json"))
    assert found["by_sketch"]["equal"] is False
    assert found["drift"]["all"]["rel_l2"] > 0
    assert found["drift"]["all"].keys() == {"rel_l2", "cosine"}
    assert found["contract"].startswith("unproven: ")
    assert "equal, by their hash no" in " ".join(shown(*runs, "--step", 2).split())


def test_a_step_whose_snapshots_are_there_is_compared_as_ever(shown, runs):
    found = json.loads(shown(*runs, "--step", 0, "--json"))
    assert found["drift"]["h.0.w"]["rel_l2"] == 0
    assert "by_sketch" not in found


def test_a_run_and_a_file_meet_at_the_runs_last_step(shown, runs, tmp_path):
    save_file(STATES[4], tmp_path / "x.safetensors")
    found = json.loads(shown(tmp_path / "x.safetensors", runs[0], "--json"))
    assert found["by_sketch"]["equal"]
    assert found["by_sketch"]["dropped"] == [f"{runs[0]}, step 4"]
    assert (
        shown(tmp_path / "x.safetensors", runs[0])
        .rstrip()
        .endswith(f".safetensors {runs[0]} --retrain")
    )
    assert not json.loads(shown(tmp_path / "x.safetensors", runs[0], "--step", 2, "--json"))[
        "by_sketch"
    ]["equal"]


def test_what_can_not_be_compared_is_one_line_with_exit_code_2(shown, runs, tmp_path):
    assert "must have a snapshot of step 3; nearest: 0, 2, 4" in shown(*runs, "--step", 3, code=2)
    save_file({"other": STATES[0]["h.0.w"]}, tmp_path / "x.safetensors")
    assert "got h.0.w: (60, 50) and nothing" in shown(runs[0], tmp_path / "x.safetensors", code=2)
    RunPaths(runs[0]).sketch(4).write_bytes(b"torn")
    assert "sketches/step-00000004.safetensors: is damaged" in shown(*runs, code=2)


def test_whoever_starts_from_dropped_weights_is_told_how_to_have_them(runs):
    from stability.records.weight_files import open_weights

    with pytest.raises(ValueError, match="of step 4 was dropped by the study's keep; `stability c"):
        open_weights(runs[0])
    assert open_weights(runs[0], 0).label.endswith("step 0")
