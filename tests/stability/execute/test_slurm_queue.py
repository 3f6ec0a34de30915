"""What the queue says, by a `squeue` that prints what a real one printed."""

import pytest

from stability.execute.slurm_queue import QueueError, queued

PRINTED = """\
2_1|tiny.nudge.15dd|PENDING||N/A|2026-11-26T13:38:57|Dependency
2_0|tiny.nudge.15dd|PENDING||N/A|2026-11-26T13:38:57|DependencyNeverSatisfied
1_0|tiny.baseline.72|RUNNING|n1|2026-11-26T13:38:58|2026-11-26T13:38:57|None
7|another|RUNNING|n1|2026-11-26T13:38:58|2026-11-26T13:38:57|None
"""


@pytest.fixture
def squeue(tmp_path, monkeypatch):
    """Return a function that makes `squeue` a program of these lines."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    def make(script: str) -> None:
        path = tmp_path / "squeue"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    return make


def test_jobs_of_our_names_are_read_and_those_that_never_start_are_gone(squeue):
    squeue(f"cat <<'END'\n{PRINTED}END")
    found = queued(["tiny.nudge.15dd", "tiny.baseline.72", "tiny.fp32.9d"])
    assert list(found["tiny.nudge.15dd"]) == ["2_1"]
    assert found["tiny.fp32.9d"] == {}
    waiting, running = found["tiny.nudge.15dd"]["2_1"], found["tiny.baseline.72"]["1_0"]
    assert (waiting.state, waiting.reason, waiting.node) == ("queued", "Dependency", "")
    assert waiting.since == "2026-11-26T13:38:57"
    assert (running.state, running.node, running.since) == ("running", "n1", "2026-11-26T13:38:58")


def test_a_controller_that_gives_no_answer_is_told_from_an_empty_queue(squeue):
    squeue("echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1")
    with pytest.raises(QueueError, match="squeue: slurm_load_jobs error: Unable to contact"):
        queued(["tiny.nudge.15dd"])
    assert queued([]) == {}
