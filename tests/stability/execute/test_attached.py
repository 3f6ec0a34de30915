"""What is told of runs that train elsewhere, by their records and whether their jobs are there."""

import pytest

from stability.execute import attached
from stability.execute.attached import wait_for, with_jobs_left
from stability.execute.standing import FINISH, Standing
from stability.records.metric_log import MetricLog
from tests.conftest import SilentObserver
from tests.stability.execute.runs import end, plain_runs

RUNNING, QUEUED = (Standing(id="7", state=state) for state in ("running", "queued"))


class Watcher(SilentObserver):
    """Remembers, too, which runs began and how far they came."""

    def __init__(self) -> None:
        super().__init__()
        self.began: list[tuple[str, int]] = []
        self.steps: list[int] = []

    def run_started(self, index, total, arm, seed, steps):
        self.began.append((arm, seed))

    def run_advanced(self, arm, seed, step, loss):
        self.steps.append(step)


@pytest.fixture
def watch(monkeypatch):
    """Return a function that waits through a list of looks, each a dict, None or an error."""
    monkeypatch.setattr(attached, "POLL_S", 0.0)

    def run(runs, looks):
        observer, left = Watcher(), list(looks)

        def look():
            found = left.pop(0)() if left else {}
            if isinstance(found, BaseException):
                raise found
            return found

        wait_for(runs, observer, look, lambda key: f"printed in {key[0]}.log")
        assert not left
        return observer

    return run


def test_runs_begin_advance_and_end_as_their_records_say(tmp_path, watch):
    baseline, nudge = plain_runs(tmp_path, ("baseline", "nudge"), (0,))

    def training():
        with_log = MetricLog(baseline.paths.metrics)
        with_log.append(3, {"train/loss": 2.5})
        with_log.close()
        return {("baseline", 0): RUNNING, ("nudge", 0): QUEUED, FINISH: QUEUED}

    def ended():
        end(baseline)
        end(nudge, "diverged", "loss is nan")
        return {FINISH: RUNNING}

    observer = watch([baseline, nudge], [training, lambda: None, ended, dict, dict])
    assert observer.began == [("baseline", 0)]
    assert observer.steps == [3]
    assert observer.ended == [
        ("baseline", 0, "finished", ""),
        ("nudge", 0, "diverged", "loss is nan"),
    ]


def test_a_job_that_is_gone_for_one_look_has_not_ended(tmp_path, watch):
    (run,) = plain_runs(tmp_path, ("baseline",), (0,))
    there = {("baseline", 0): RUNNING}

    def back():
        end(run)
        return there

    observer = watch([run], [lambda: there, dict, back])
    assert [state for *_, state, _ in observer.ended] == ["finished"]


def test_why_a_run_did_not_end_well_is_told(tmp_path, watch):
    baseline, nudge, fp32 = plain_runs(tmp_path, ("baseline", "nudge", "fp32"), (0,))
    end(baseline, "failed", "no memory")
    observer = watch([baseline, nudge, fp32], [])
    assert observer.ended == [
        ("baseline", 0, "failed", "no memory"),
        ("nudge", 0, "skipped", "its baseline did not finish"),
        ("fp32", 0, "skipped", "its baseline did not finish"),
    ]
    end(baseline)
    end(fp32, "running")
    observer = watch([nudge, fp32], [])
    assert observer.ended == [
        ("nudge", 0, "failed", "its job ended before it began to train; printed in nudge.log"),
        ("fp32", 0, "interrupted", "its job ended; printed in fp32.log"),
    ]


def test_ctrl_c_detaches(tmp_path, monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    observer = SilentObserver()
    with pytest.raises(KeyboardInterrupt):
        wait_for(plain_runs(tmp_path, ("baseline",), (0,)), observer, interrupted, str)
    assert observer.study_notes == [
        "detached: the jobs go on, and the same command attaches to them"
    ]


def test_runs_that_have_ended_need_no_job(tmp_path):
    runs = plain_runs(tmp_path, ("baseline", "nudge"), (0,))
    end(runs[0])
    observer = SilentObserver()
    assert with_jobs_left(runs, observer) == runs[1:]
    assert observer.ended == [("baseline", 0, "finished", "kept")]
