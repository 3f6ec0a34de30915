"""Runs in processes of their own end in the bits of runs one after another; a dead one is told."""

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from stability.config.load import load_study
from stability.records.atomic_files import DiskFullError
from stability.records.manifest import read_manifest, write_manifest
from stability.records.paths import RunPaths
from stability.study import fresh_process, rank_processes
from stability.study.fresh_process import Relay, call_alone
from stability.study.rank_processes import RankProcesses
from stability.study.run import RunConflictError
from stability.study.run_study import plan_study
from stability.study.train_run import TrainOptions
from tests.conftest import SilentObserver
from tests.stability.study.recorded_bits import recorded_bits


def _three(content):
    content["arms"] = {"baseline": {}, "fp32": {"precision": "32-true"}, "rerun": {}}
    content["seeds"] = [0]


@pytest.mark.slow
def test_two_at_once_end_in_the_same_bits(write_study, run_tiny, tmp_path):
    study = load_study(write_study(_three))
    together = run_tiny(study, tmp_path / "together", jobs=2)
    assert sorted(ended[:3] for ended in together.ended) == [
        (arm, 0, "finished") for arm in ("baseline", "fp32", "rerun")
    ]
    assert together.ended[0][0] == "baseline"
    assert len(together.losses) == 3 * 6
    run_tiny(study, tmp_path / "alone")
    alone = recorded_bits(tmp_path / "alone" / "tiny")
    assert recorded_bits(tmp_path / "together" / "tiny") == alone
    again = run_tiny(study, tmp_path / "together", jobs=2).ended
    assert [message for *_, message in again] == ["kept"] * 3


@pytest.mark.slow
def test_a_killed_child_is_a_failed_run_and_the_others_go_on(write_study, run_tiny, tmp_path):
    def edit(content):
        _three(content)
        own = {"implementation": "tests.stability.study.own_attentions:deadly"}
        content["arms"]["deadly"] = {"attention": own}

    ended = run_tiny(load_study(write_study(edit)), tmp_path, jobs=2).ended
    assert ("deadly", 0, "failed", "killed by signal 9") in ended
    assert sorted(arm for arm, _, state, _ in ended if state == "finished") == [
        "baseline",
        "fp32",
        "rerun",
    ]


@pytest.mark.slow
def test_candidates_of_a_failed_baseline_are_skipped(write_study, run_tiny, tmp_path):
    def edit(content):
        _three(content)
        own = {"implementation": "tests.stability.study.own_attentions:deadly"}
        content["base"]["attention"] = own

    ended = run_tiny(load_study(write_study(edit)), tmp_path, jobs=2).ended
    assert ended[0] == ("baseline", 0, "failed", "killed by signal 9")
    assert {ended[2:] for ended in ended[1:]} == {("skipped", "its baseline did not finish")}


@pytest.mark.slow
def test_what_the_server_has_ready_can_be_imported_and_holds_what_a_run_needs():
    # multiprocessing leaves out, in silence, what it cannot import: each run would be slower
    code = (
        "import importlib, sys\n"
        f"importlib.import_module({fresh_process._READY!r})\n"
        "from stability.records import distributions\n"
        "assert distributions._distributions.cache_info().currsize == 1\n"
        "assert {'wandb', 'safetensors.torch', 'stability.study.train_run'} <= set(sys.modules)\n"
        "import torch\n"
        "assert not torch.cuda.is_initialized()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def _edit_own(module):
    def edit(content):
        own = {"implementation": f"tests.stability.study.{module}:attend"}
        content["base"]["precision"] = "32-true"
        content |= {"arms": {"own": {"attention": own}}, "yardstick": "", "seeds": [0, 1]}

    return edit


def _edit_alone(content):
    _edit_own("own_switches")(content)
    content |= {"arms": {}, "yardstick": ""}


def _of_baseline(folder, seed):
    return read_manifest(RunPaths.for_run(folder / "tiny", "baseline", seed).manifest)


@pytest.mark.parametrize(
    ("module", "said"),
    [
        pytest.param(
            "own_switches",
            "switch.cuda_matmul_fp32 must be the baseline's 'ieee', is 'tf32'",
            marks=pytest.mark.slow,
        ),
        ("own_threads", "threads must be the baseline's 1, is 3"),
    ],
)
def test_what_an_arms_module_does_to_its_process_reaches_no_other_run(
    write_study, run_tiny, tmp_path, module, said
):
    run_tiny(load_study(write_study(_edit_alone)), tmp_path / "alone", isolated=True)
    study = load_study(write_study(_edit_own(module)))
    before = dict(os.environ)
    beside = run_tiny(study, tmp_path / "beside", isolated=True)
    assert f"tests.stability.study.{module}" not in sys.modules, "nothing imports it here"
    assert os.environ == before
    assert [ended[:3] for ended in beside.ended] == [
        ("baseline", 0, "finished"),
        ("own", 0, "failed"),
        ("baseline", 1, "finished"),
        ("own", 1, "failed"),
    ]
    assert f"environment.{said}" in beside.ended[1][3]
    for seed in (0, 1):
        alone, other = (_of_baseline(tmp_path / one, seed) for one in ("alone", "beside"))
        assert other.hashes["final_weights"] == alone.hashes["final_weights"]
        assert other.environment == alone.environment
    # a run that was stopped goes on: the check before it has not changed this process either
    paths = RunPaths.for_run(tmp_path / "beside" / "tiny", "baseline", 0)
    write_manifest(paths.manifest, replace(read_manifest(paths.manifest), state="interrupted"))
    again = run_tiny(study, tmp_path / "beside", isolated=True)
    assert again.ended[0] == ("baseline", 0, "finished", "")


def test_a_module_that_ends_the_process_that_checks_it_is_told(write_study, run_tiny, tmp_path):
    (tmp_path / "own_end.py").write_text("import os\nos._exit(7)\n")
    sys.path.append(str(tmp_path))
    try:
        edit = _edit_own("x")

        def edit_end(content):
            edit(content)
            content["arms"]["own"]["attention"]["implementation"] = "own_end:attend"

        with pytest.raises(RuntimeError, match="gave no answer: ended with exit code 7"):
            run_tiny(load_study(write_study(edit_end)), tmp_path / "runs", isolated=True)
    finally:
        sys.path.remove(str(tmp_path))
    assert not (tmp_path / "runs").exists()


class _OddError(ValueError):
    def __init__(self, first, second):
        super().__init__(f"{first} {second}")


def _raise(kind, *values):
    raise kind(*values)


@pytest.mark.parametrize(
    ("kind", "values", "raised", "said"),
    [
        (DiskFullError, ["a"], DiskFullError, "a"),
        (RunConflictError, ["b"], RunConflictError, "b"),
        (_OddError, ["c", "d"], ValueError, "_OddError: c d"),
        (SystemExit, [3], SystemExit, "3"),
    ],
)
def test_an_error_elsewhere_is_raised_here(kind, values, raised, said):
    with pytest.raises(raised) as error:
        call_alone(_raise, kind, *values)
    assert (type(error.value), str(error.value)) == (raised, said)


def test_a_call_elsewhere_tells_the_observer_and_returns():
    observer = SilentObserver()
    assert call_alone(_end_one, "x", observer=observer) != os.getpid()
    assert observer.ended == [("x", 0, "finished", "said")]


def _end_one(arm, observer):
    observer.run_ended(arm, 0, "finished", "said")
    return os.getpid()


def test_no_jobs_are_refused(write_study, run_tiny, tmp_path):
    with pytest.raises(ValueError, match=r"^jobs must be >= 1, got 0"):
        run_tiny(load_study(write_study(_three)), tmp_path, jobs=0)
    assert not list(tmp_path.glob("tiny/*"))


def _linger(how, told):
    """Leave behind a thread or a process that would say after a while that it was waited for."""

    def wait_and_tell():
        time.sleep(60)
        told.touch()

    if how == "a thread":
        threading.Thread(target=wait_and_tell).start()
    elif os.fork() == 0:
        wait_and_tell()
        os._exit(0)
    if how == "a process of a killed one":
        os.kill(os.getpid(), signal.SIGKILL)
    return how


@pytest.mark.parametrize("how", ["a thread", "a process", "a process of a killed one"])
def test_what_a_process_leaves_behind_is_not_waited_for(how, tmp_path):
    if how == "a process of a killed one":
        with pytest.raises(RuntimeError, match=r"_linger: .*killed by signal 9"):
            call_alone(_linger, how, tmp_path / "told")
    else:
        assert call_alone(_linger, how, tmp_path / "told") == how
    assert not (tmp_path / "told").exists()


def test_where_one_process_has_missed_w_and_b_later_ones_are_started_without_it(
    write_study, tmp_path, monkeypatch
):
    """Two that run at once may both miss it, and it is said once."""
    given, theirs, observer = [], [], SilentObserver()

    def start(target, run, options, *_):
        ours, their_end = multiprocessing.Pipe(duplex=False)
        theirs.append(their_end)
        given.append(pickle.loads(pickle.dumps(options)).wandb_failures)
        return SimpleNamespace(sentinel=multiprocessing.Pipe()[0]), ours

    monkeypatch.setattr(rank_processes, "start_process", start)
    runs = plan_study(load_study(write_study(_three)), tmp_path)
    options = TrainOptions(wandb_mode="offline")
    together = [RankProcesses.start(run, options, 0) for run in runs[:2]]
    for one, their_end in zip(together, theirs, strict=True):
        Relay(their_end).wandb_failed(one.run.arm.name, 0, "no route")
        (connection,) = one.members
        one.listen(connection, observer)
    RankProcesses.start(runs[2], options, 0)
    assert observer.notes == ["no route"]
    assert given[:2] == [[], []]
    assert given[2]
