"""On a real Slurm: arrays that depend on one another, requeues, a lost node, and the same bits."""

import re
from pathlib import Path

import pytest

from stability.execute.job_record import read_arrays
from tests.clusters import slurm_host
from tests.clusters.conftest import ARMS, Command, is_under_way, variables
from tests.stability.study.recorded_bits import recorded_bits

pytestmark = pytest.mark.clusters


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """The folder of a Slurm that runs meanwhile."""
    pytest.importorskip("submitit")
    lacking = slurm_host.lacking()
    if lacking:
        pytest.skip(lacking)
    folder = tmp_path_factory.mktemp("slurm")
    try:
        slurm_host.start(folder)
        with pytest.MonkeyPatch.context() as patch:
            for name in ("SLURM_CONF", "PATH"):  # this process asks the queue, too
                patch.setenv(name, slurm_host.variables(folder)[name])
            yield folder
    finally:
        slurm_host.stop(folder)


class Story:
    """What is done to a study while it trains, and what was seen."""

    def __init__(self, slurm: Path, study: Path) -> None:
        self.slurm = slurm
        self.env = {**slurm_host.variables(slurm), "PYTHONPATH": variables()["PYTHONPATH"]}
        self.env["OMP_NUM_THREADS"] = "1"
        self.command = Command(study, "--executor", "slurm", env=self.env)

    def ask(self, *words: str) -> str:
        return slurm_host.ask(self.slurm, *words)

    def restarts(self, job: str) -> int:
        said = self.ask("scontrol", "show", "job", job, "--oneliner")
        return int(said.partition("Restarts=")[2].split()[0])

    def start_again(self) -> None:
        """Let requeued jobs start as soon as they have died: Slurm waits two minutes by itself."""
        said = self.ask("squeue", "-h", "--array", "--states=pending", "-o", "%i %A %r")
        for job, number, reason in (line.split(maxsplit=2) for line in said.splitlines()):
            if reason != "BeginTime":
                continue
            self.command.until(lambda runs, x=number: slurm_host.has_died(x))
            self.ask("scontrol", "update", f"jobid={job}", "starttime=now")


@pytest.fixture(scope="module")
def story(slurm, write_long) -> Story:
    """Train the study: detach, requeue a baseline, lose the node of a candidate, attach again."""
    story = Story(slurm, write_long())
    first = story.command
    story.queued = first.until(lambda runs: runs if ("", 0) in runs else None)
    story.code_of_ctrl_c = first.interrupt()
    key = "baseline", 0
    story.requeued = first.until(lambda runs: runs[key] if is_under_way(runs[key]) else None)
    story.ask("scontrol", "requeue", story.requeued.job)
    story.start_again()
    # while the job is away the same command finds it, and submits nothing
    story.command = first = Command(first.study, "--executor", "slurm", env=story.env)

    def lost(runs):
        return next((r for r in runs.values() if r.arm in ARMS[1:] and is_under_way(r)), None)

    story.lost = first.until(lost)
    story.ask("scontrol", "update", f"nodename={story.lost.node}", "state=down", "reason=test")
    first.until(lambda runs: runs[story.lost.arm, story.lost.seed].state != "training")
    story.ask("scontrol", "update", f"nodename={story.lost.node}", "state=resume")
    story.start_again()
    story.code = first.ended()
    return story


def test_ctrl_c_leaves_jobs_and_the_same_command_attaches(story):
    text = story.command.log.read_text()
    assert story.code_of_ctrl_c == 130
    assert "9 jobs submitted to Slurm, 0 under way" in text
    assert re.search(r"0 jobs submitted to Slurm, [89] under way", text)
    assert story.code == 0, text
    assert len(read_arrays(story.command.folder)) == len(ARMS) + 1


def test_candidates_wait_for_their_baseline_in_arrays(story):
    candidates = [run for (arm, _), run in story.queued.items() if arm in ARMS[1:]]
    assert [run.state for run in candidates] == ["queued"] * 6
    # a job that has only just come to the queue has no reason yet
    assert {run.message for run in candidates} <= {"Dependency", "None"}
    assert {run.job.partition("_")[2] for run in candidates} == {"0", "1"}


def test_a_requeue_and_a_lost_node_change_no_bit(story, trained_here):
    assert story.restarts(story.requeued.job) == 1
    assert story.restarts(story.lost.job) == 1
    found, expected = recorded_bits(story.command.folder), recorded_bits(trained_here)
    assert found.keys() == expected.keys()
    assert [name for name in found if found[name] != expected[name]] == []


def test_what_follows_the_runs_was_measured_by_the_last_job(story, trained_here):
    last = next(array for array in read_arrays(story.command.folder) if not array.arm)
    printed = story.command.folder / "jobs" / "slurm" / f"{last.id}_0_log.out"
    assert "report: " in printed.read_text()
    for name in ("distances/seed-0.json", "distances/seed-1.json"):
        assert (story.command.folder / name).read_bytes() == (trained_here / name).read_bytes()
