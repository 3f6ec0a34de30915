"""A checkpoint under a right seal that does not say what one says is named, never a traceback."""

import copy
import re
import shutil
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch

from stability.config.load import load_study
from stability.recorder.writer import RunWriter
from stability.records.manifest import read_manifest
from stability.records.metric_log import MetricLog
from stability.records.paths import RunPaths
from stability.records.run_files import RunFiles
from stability.study.checkpoints import lay_fork, resume_from
from tests.conftest import train_edited
from tests.stability.fuzz.hostile import VALUES, change
from tests.stability.study.recorded_bits import recorded_bits

EARLIER, LATER = 2, 4
HUGE = [value for value in VALUES if not (isinstance(value, int) and abs(value) >= 2**63)]
"""Values that torch.save takes: a pickle of torch holds whole numbers of any size but not these."""


def _content(step: int, recorded: dict) -> dict:
    return {
        "callbacks": {"TrainerDoor": {**recorded, "stretches": []}},
        "global_step": step,
        "state_dict": {"weight": torch.zeros(2)},
        "optimizer_states": [{"state": {}, "param_groups": [{"eps": 1e-8}]}],
    }


@pytest.fixture
def files(tmp_path) -> RunFiles:
    """A run with a log and two checkpoints."""
    found = RunFiles.unnamed(tmp_path / "parent")
    log = MetricLog(found.paths.metrics)
    writer = RunWriter(found, log)
    for step in range(1, LATER + 1):
        writer.updated(step, 1.0, "ab")
        if step in (EARLIER, LATER):
            _save(found, step, _content(step, writer.state_dict()))
    log.close()
    return found


def _save(files: RunFiles, step: int, content: object) -> None:
    path = files.paths.checkpoint(step)
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(content, path)
    files.add(path)


def _load(files: RunFiles, step: int) -> dict:
    return torch.load(files.paths.checkpoint(step), weights_only=True)


def _resumed(files: RunFiles) -> tuple[int, list[str]]:
    notes: list[str] = []
    return resume_from(files.paths, files.manifest, notes.append)[0], notes


def _as_it_is(checkpoint):
    pass


def _without(*keys):
    def edit(content):
        for key in keys[:-1]:
            content = content[key]
        del content[keys[-1]]

    return edit


def _with(value, *keys):
    def edit(content):
        for key in keys[:-1]:
            content = content[key]
        content[keys[-1]] = value

    return edit


POSITION = ("callbacks", "TrainerDoor", "position")
EDITS = [
    (_without("callbacks"), "its content must have the key callbacks"),
    (_without("callbacks", "TrainerDoor"), "callbacks must have the key TrainerDoor"),
    (_without(*POSITION), "TrainerDoor must have the key position"),
    (_with(-1, *POSITION), "position must be >= 0, is -1"),
    (_with("4", *POSITION), "position must be of type int, is '4'"),
    (_with(None, *POSITION), "position must be of type int, is None"),
    (_with(True, *POSITION), "position must be of type int, is True"),
    (_with(2**62, *POSITION), "metrics.jsonl has lost its end"),
    (_with(5, "callbacks", "TrainerDoor", "sha256"), "sha256 must be of type str, is 5"),
    (_without("callbacks", "TrainerDoor", "sha256"), "TrainerDoor must have the key sha256"),
    (_with(None, "callbacks", "TrainerDoor", "batches"), "batches must be of type str, is None"),
    (_with({}, "callbacks", "TrainerDoor", "stretches"), "stretches must be of type list"),
    (_with([], "callbacks"), "callbacks must be of type dict"),
    (_with(7, "global_step"), "must be the checkpoint of step 4, is that of step 7"),
    (_with({}, "optimizer_states"), "optimizer_states must be of type list"),
    (_without("optimizer_states"), "must have the key optimizer_states"),
]


@pytest.mark.parametrize(("edit", "said"), EDITS)
def test_an_odd_checkpoint_is_passed_over_for_an_older_one_and_not_forked(files, edit, said):
    assert _resumed(files) == (LATER, [])
    content = _load(files, LATER)
    edit(content)
    _save(files, LATER, content)
    at, notes = _resumed(files)
    assert at == EARLIER
    assert said in notes[0]
    assert notes[1:] == [f"going on from step {EARLIER}"]
    with pytest.raises(ValueError, match=re.escape(said)) as caught:
        lay_fork(files.paths, RunPaths(files.paths.root.parent / "fork"), LATER, _as_it_is)
    assert "\n" not in notes[0] + str(caught.value)


@pytest.mark.parametrize("content", [[], {}, None, "text", torch.zeros(2)])
def test_without_any_sound_checkpoint_a_run_begins_anew(files, content):
    for step in (EARLIER, LATER):
        _save(files, step, content)
    at, notes = _resumed(files)
    assert at == 0
    assert [note.partition(": ")[0] for note in notes[:2]] == [
        str(files.paths.checkpoint(step)) for step in (LATER, EARLIER)
    ]
    assert notes[2:] == ["starting anew"]


def test_whatever_a_checkpoint_says_it_is_taken_or_told_in_a_line(files, tmp_path):
    sound = _load(files, LATER)
    taken = 0
    for seed in range(150):
        content = copy.deepcopy(sound)
        change(content, Random(seed), HUGE)
        _save(files, LATER, content)
        at, notes = _resumed(files)
        taken += at == LATER
        assert at in (EARLIER, LATER)
        assert all("\n" not in note for note in notes)
        said = _of_fork(files, tmp_path / "fork")
        assert (at == LATER) == (not said)
        assert "\n" not in said
    assert 0 < taken < 150


def _of_fork(files: RunFiles, folder: Path) -> str:
    """Return why a run is not forked; empty if it is."""
    try:
        lay_fork(files.paths, RunPaths(folder), LATER, _as_it_is)
    except ValueError as error:
        return str(error)
    return ""


@pytest.fixture(scope="module")
def stopped(tmp_path_factory, text_file):
    """A study's YAML, and its folder: one run, with checkpoints of steps 2 and 4, its last."""

    def edit(content):
        content |= {"arms": {}, "seeds": [0], "yardstick": ""}
        content["base"]["train"] |= {"steps": 4, "checkpoint_every": 2, "keep_checkpoints": 0}

    study, folder = train_edited(tmp_path_factory.mktemp("stopped"), text_file, edit)
    return study, folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "edit",
    [
        _without("state_dict"),
        _without("loops"),
        _with([{"state": 3, "param_groups": []}], "optimizer_states"),
        _with({"odd": 1}, "callbacks", "DeviationProbe"),
        _with("3", "loops", "fit_loop"),
    ],
    ids=["no-weights", "no-loops", "odd-optimizer", "odd-callback", "odd-loop"],
)
def test_a_checkpoint_that_can_not_be_restored_is_named_and_the_same_command_then_ends_the_run(
    stopped, run_tiny, tmp_path, edit
):
    study, whole = stopped
    folder = shutil.copytree(whole, tmp_path / "runs" / whole.name)
    run = RunPaths.for_run(folder, "baseline", 0)
    files = RunFiles(run, replace(read_manifest(run.manifest), state="interrupted"))
    files.remove(run.checkpoint(4))
    content = _load(files, 2)
    edit(content)
    _save(files, 2, content)
    (ended,) = run_tiny(load_study(study), tmp_path / "runs").ended
    assert ended[2] == "failed"
    assert f"CheckpointError: {run.checkpoint(2)}: the run can't go on from it: " in ended[3]
    assert "\n" not in ended[3]
    assert "it is dropped, and the same command goes on" in ended[3]
    assert run_tiny(load_study(study), tmp_path / "runs").ended[0][2] == "finished"
    assert recorded_bits(folder) == recorded_bits(whole)
