"""Ranks as tasks of a scheduler: their places, the same bits, and whose failure is told."""

import multiprocessing
import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from stability.config.load import load_study
from stability.model.ranks import meeting_place
from stability.records.manifest import read_manifest, write_manifest
from stability.records.run_files import RunFiles
from stability.study.rank_processes import GRACE, RankProcesses
from stability.study.rank_tasks import Meeting, RankTask, failure_of, meeting, this_task
from stability.study.run_one import run_one
from stability.study.run_study import plan_study
from stability.study.train_run import TrainOptions
from tests.conftest import SilentObserver
from tests.stability.study.recorded_bits import recorded_bits

ROOT = Path(__file__).parents[3]
PLACE = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "20020",
}


def test_a_process_that_is_alone_has_no_place():
    assert this_task({}) is None
    assert this_task({"WORLD_SIZE": "1", "RANK": "0"}) is None
    task = this_task(dict(PLACE))
    assert task is not None
    assert (task.ranks.rank, task.ranks.count, task.ranks.port, task.local) == (1, 2, 20020, 0)


@pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"])
def test_a_variable_that_lacks_is_named(name):
    with pytest.raises(ValueError, match=f"{name} must be set where WORLD_SIZE is"):
        this_task({x: y for x, y in PLACE.items() if x != name})


def test_a_variable_that_is_no_number_is_named():
    with pytest.raises(ValueError, match="MASTER_PORT must be a whole number, got 'http'"):
        this_task(PLACE | {"MASTER_PORT": "http"})


def test_another_number_of_tasks_than_ranks_is_refused(write_layout, tmp_path):
    study, task = load_study(write_layout()), this_task(PLACE | {"WORLD_SIZE": "3", "RANK": "0"})
    with pytest.raises(ValueError, match="WORLD_SIZE must be 2, as many tasks as the run's layout"):
        run_one(
            study,
            tmp_path / "runs",
            "baseline",
            0,
            options=TrainOptions(wandb_mode="disabled"),
            observer=SilentObserver(),
            task=task,
        )
    assert not (tmp_path / "runs").exists()


def _free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


@pytest.fixture
def tasks() -> tuple[RankTask, RankTask]:
    """The first and the second task of a run."""
    port = {"MASTER_PORT": _free_port()}
    first, second = (this_task(PLACE | port | {"RANK": rank}) for rank in "01")
    assert first is not None
    assert second is not None
    return first, second


def test_what_names_the_tasks_is_kept_from_what_trains(tasks):
    variables = PLACE | {"SLURM_STEP_NUM_TASKS": "2", "HOME": "/root"}
    with meeting(tasks[0], variables) as first, meeting(tasks[1], dict(PLACE)) as second:
        assert variables == {"HOME": "/root"}
        first.tell("start", "train")
        assert second.hear("start") == "train"


def test_the_first_task_learns_what_has_failed_in_another(tasks):
    with meeting(tasks[0], {}) as first, meeting(tasks[1], {}) as second:
        second.tell(failure_of(1), "ValueError: no text")
        assert first.failures() == [(1, "ValueError: no text")]


def test_nobody_waits_for_a_failure_once_all_have_left(tasks, monkeypatch):
    monkeypatch.setattr("stability.study.rank_tasks.LEAVING_S", 3600.0)
    with meeting(tasks[0], {}) as first:
        with meeting(tasks[1], {}):
            pass
        assert first.failures() == []


LOST = "RuntimeError: [gloo/transport/tcp/pair.cc] Connection closed by peer"


@pytest.mark.parametrize(
    ("own", "others", "told"),
    [
        (LOST, [(1, "killed by signal 9")], "rank 1: killed by signal 9"),
        (LOST, [], LOST),
        ("ValueError: no text", [(1, "killed by signal 9")], "ValueError: no text"),
    ],
)
def test_a_lost_connection_is_told_by_its_cause_in_another_task(
    write_layout, tmp_path, own, others, told
):
    run, observer = plan_study(load_study(write_layout()), tmp_path)[0], SilentObserver()
    ours, theirs = multiprocessing.get_context("forkserver").Pipe(duplex=False)
    one = RankProcesses(run, 0, elsewhere=lambda: others)
    one.members[ours] = 0, ended_process()
    theirs.send(("run_ended", "baseline", 0, "failed", own))
    theirs.close()
    while one.members:
        one.listen(ours, observer)
    assert observer.ended == [("baseline", 0, "failed", told)]


def ended_process():
    """Return a process that has ended well."""
    process = multiprocessing.get_context("forkserver").Process(target=int)
    process.start()
    process.join()
    return process


def test_a_task_that_is_not_the_first_tells_of_its_own_failure_alone(write_layout, tmp_path):
    run = plan_study(load_study(write_layout()), tmp_path)[0]
    for said in ([], [("rank_failed", "ValueError: no text")]):
        observer = SilentObserver()
        ours, theirs = multiprocessing.get_context("forkserver").Pipe(duplex=False)
        one = RankProcesses(run, 0, is_first=False)
        one.members[ours] = 1, ended_process()
        for each in said:
            theirs.send(each)
        theirs.close()
        while one.members:
            one.listen(ours, observer)
        assert one.failures == [(1, text) for _, text in said]
        assert observer.ended == [("baseline", 0, "failed", f"rank 1: {text}") for _, text in said]


def test_a_first_task_that_is_refused_sends_the_others_home(tasks):
    heard = []
    with ThreadPoolExecutor(1) as other:

        def follow():
            with meeting(tasks[1], {}) as second:
                heard.extend([second.hear("start"), second.hear("end")])

        with suppress(ValueError), meeting(tasks[0], {}):
            done = other.submit(follow)
            raise ValueError("no baseline")
        done.result()
    assert heard == ["stop", "failed"]


def test_tasks_of_another_run_at_the_same_place_are_sent_away(tasks):
    with meeting(tasks[0], {}) as first:
        first.start("train", "s, a, seed 0, 12")
        with (
            pytest.raises(ValueError, match=r"must be those of s, a, seed 1, 12, at .* is s, a, s"),
            meeting(tasks[1], {}) as second,
        ):
            second.started("s, a, seed 1, 12")
        with meeting(tasks[1], {}) as second:
            assert second.started("s, a, seed 0, 12") == "train"
            assert first.store.add("left", 0) == 0, "one of another run has not been here"


def soon(holds):
    """Whether it holds within some seconds: a store does not tell when it has what it was sent."""
    end = time.monotonic() + 20
    while not holds() and time.monotonic() < end:
        time.sleep(0.01)
    return holds()


def test_a_rank_that_waits_for_one_that_is_gone_is_given_some_seconds(tasks, write_layout):
    with meeting(tasks[0], {}) as first, meeting(tasks[1], {}) as second:
        one = RankProcesses(None, 0, is_over=first.is_over)
        other = RankProcesses(None, 0, is_first=False, is_over=second.is_over)
        assert not first.is_over()
        assert not second.is_over()
        second.tell(failure_of(1), "killed by signal 9")
        assert soon(first.is_over)
        assert not second.is_over()
        first.tell("end", "failed")
        assert soon(second.is_over)
        for each in (one, other):
            each.run = SimpleNamespace(config=SimpleNamespace(parallel=SimpleNamespace(ranks=2)))
            assert each.remaining is None
            each.look_elsewhere()
            assert 0 < each.remaining <= GRACE


@pytest.mark.parametrize(
    ("said", "state"),
    [(LOST, "interrupted"), ("ValueError: no text", "failed")],
)
def test_a_lost_connection_does_not_hide_that_the_first_task_was_stopped(
    write_layout, tmp_path, said, state
):
    run, observer = plan_study(load_study(write_layout()), tmp_path)[0], SilentObserver()
    stopped = replace(RunFiles.unnamed(run.paths.root).manifest, state="interrupted")
    write_manifest(run.paths.manifest, replace(stopped, message="the disk is full"))
    ours, theirs = multiprocessing.get_context("forkserver").Pipe(duplex=False)
    one = RankProcesses(run, 0, is_first=False)
    one.members[ours] = 1, ended_process()
    theirs.send(("rank_failed", said))
    theirs.close()
    while one.members:
        one.listen(ours, observer)
    assert read_manifest(run.paths.manifest).state == state


def test_a_first_task_that_is_gone_says_nothing_more(tasks):
    store = meeting_place("127.0.0.1")
    second = Meeting(tasks[1], meeting_place("127.0.0.1", store.port))
    del store
    assert second.hear("end") == ""


@pytest.fixture
def write_layout(write_study):
    """Return a function that writes a study with a layout over two ranks as its baseline."""

    def write() -> Path:
        def edit(content: dict) -> None:
            content["base"]["parallel"] = {"data": 2}
            content["base"]["probe"] = {"every": 0}
            content["arms"] = {"baseline": {}, "fp32": {"precision": "32-true"}}

        return write_study(edit)

    return write


def _train(study: Path, out: Path, tasks: int, **variables: str) -> list[tuple[int, str]]:
    """Train the baseline in so many tasks; return their exit codes and what they print."""
    line = [sys.executable, "-m", "stability.cli.main", "run", str(study), "--out", str(out)]
    line += ["--wandb", "disabled", "--only", "baseline", "--seed", "0"]
    path = f"{ROOT}:{ROOT / 'kernels'}"
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **variables}
    port, started = _free_port(), []
    for rank in range(tasks):
        place = {"RANK": str(rank), "WORLD_SIZE": str(tasks), "MASTER_PORT": port}
        place = PLACE | place | {"SLURM_STEP_NUM_TASKS": str(tasks)} if tasks > 1 else {}
        started.append(
            subprocess.Popen(
                line,
                env=env | place,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    said = [each.communicate()[0] for each in started]
    return [(each.returncode, text) for each, text in zip(started, said, strict=True)]


@pytest.mark.long
@pytest.mark.slow
def test_ranks_that_are_tasks_end_in_the_bits_of_ranks_of_one_command(write_layout, tmp_path):
    study = write_layout()
    here, tasks = tmp_path / "here", tmp_path / "tasks"
    assert [code for code, _ in _train(study, here, 1)] == [0]
    assert [code for code, _ in _train(study, tasks, 2)] == [0, 0]
    assert recorded_bits(tasks / "tiny") == recorded_bits(here / "tiny")
    # who comes again finds that it has ended
    again = _train(study, tasks, 2)
    assert [code for code, _ in again] == [0, 0], again
    assert "kept" in again[0][1]
