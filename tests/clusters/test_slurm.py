"""On a real Slurm: arrays that depend on one another, a requeue, a preemption, a lost node."""

import re
import subprocess
from pathlib import Path

import pytest

from stability.execute.job_record import read_arrays
from stability.execute.status import RunStatus
from tests.clusters import slurm_host
from tests.clusters.conftest import ARMS, PROGRAM, Command, is_under_way, variables
from tests.pages import blocks_for, commands_of, in_short
from tests.stability.study.recorded_bits import recorded_bits

pytestmark = pytest.mark.clusters
TUTORIAL = blocks_for(
    "clusters/test_slurm.py::test_the_tutorial_is_gone_through", "docs/slurm.md", "sh"
)


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
        self.study = study
        self.command = self.run()
        self.disturbed: list[RunStatus] = []

    def run(self) -> Command:
        # a node has room for one rank, so a run over two is two tasks on two nodes
        words = "--executor", "slurm", "--slurm.ntasks-per-node=1"
        return Command(self.study, *words, env=self.env)

    def ask(self, *words: str) -> str:
        return slurm_host.ask(self.slurm, *words)

    def restarts(self, job: str) -> int:
        said = self.ask("scontrol", "show", "job", job, "--oneliner")
        return int(said.partition("Restarts=")[2].split()[0])

    def under_way(self, arms: tuple[str, ...] = ARMS) -> RunStatus:
        """Wait until a run to which nothing was done yet is in the middle; return it."""
        done = [(run.arm, run.seed) for run in self.disturbed]

        def found(runs: dict[tuple[str, int], RunStatus]) -> RunStatus | None:
            left = (run for key, run in runs.items() if key not in done and run.arm in arms)
            return next(filter(is_under_way, left), None)

        self.disturbed.append(self.command.until(found))
        return self.disturbed[-1]

    def start_again(self, *runs: RunStatus) -> None:
        """Let requeued jobs start as soon as they have died: Slurm waits two minutes by itself."""
        for run in runs:
            number = self.command.until(lambda _, run=run: self._pending(run.job))
            self.command.until(lambda _, number=number: slurm_host.has_died(number))
            self.ask("scontrol", "update", f"jobid={run.job}", "starttime=now")

    def _pending(self, job: str) -> str:
        """Return the number of a job that is pending; empty while its last turn still ends."""
        said = self.ask("squeue", "-h", "--array", f"--job={job}", "-o", "%T %A")
        state, _, number = said.strip().partition(" ")
        return number if state == "PENDING" else ""


@pytest.fixture(scope="module")
def story(slurm, write_long) -> Story:
    """Train the study: detach, requeue a run, preempt one, attach again, lose a node of one."""
    story = Story(slurm, write_long())
    first = story.command
    story.queued = first.until(lambda runs: runs if ("", 0) in runs else None)
    story.code_of_ctrl_c = first.interrupt()
    requeued = story.under_way(ARMS[:1])
    story.ask("scontrol", "requeue", requeued.job)
    preempted = story.under_way()
    urgent = ["--partition=urgent", f"--nodelist={preempted.node}", "--output=/dev/null"]
    story.ask("sbatch", *urgent, "--wrap=true")
    first.until(lambda runs: story.restarts(preempted.job))
    story.start_again(requeued, preempted)
    # while jobs are away the same command finds them, and submits nothing
    story.command = first = story.run()
    lost = story.under_way(("ranks",))
    assert story.ask("scontrol", "show", "hostnames", lost.node).split() == [*slurm_host.NODES]
    node = f"nodename={slurm_host.NODES[1]}"  # that of the second rank
    story.ask("scontrol", "update", node, "state=down", "reason=test")
    first.until(lambda runs: runs[lost.arm, lost.seed].state != "training")
    story.ask("scontrol", "update", node, "state=resume")
    story.start_again(lost)
    story.code = first.ended()
    return story


def test_ctrl_c_leaves_jobs_and_the_same_command_attaches(story):
    text = story.command.log.read_text()
    assert story.code_of_ctrl_c == 130
    assert "9 jobs submitted to Slurm, 0 under way" in text
    assert re.search(r"0 jobs submitted to Slurm, [5-9] under way", text)
    assert story.code == 0, text
    assert len(read_arrays(story.command.folder)) == len(ARMS) + 1


def test_candidates_wait_for_their_baseline_in_arrays(story):
    candidates = [run for (arm, _), run in story.queued.items() if arm in ARMS[1:]]
    assert [run.state for run in candidates] == ["queued"] * 6
    # a job that has only just come to the queue has no reason yet
    assert {run.message for run in candidates} <= {"Dependency", "None"}
    assert {run.job.partition("_")[2] for run in candidates} == {"0", "1"}


def test_a_requeue_a_preemption_and_a_lost_node_change_no_bit(story, trained_here):
    assert len({(run.arm, run.seed) for run in story.disturbed}) == 3
    assert [story.restarts(run.job) for run in story.disturbed] == [1, 1, 1]
    found, expected = recorded_bits(story.command.folder), recorded_bits(trained_here)
    assert found.keys() == expected.keys()
    assert [name for name in found if found[name] != expected[name]] == []


def test_what_follows_the_runs_was_measured_by_the_last_job(story, trained_here):
    last = next(array for array in read_arrays(story.command.folder) if not array.arm)
    printed = story.command.folder / "jobs" / "slurm" / f"{last.id}_0_log.out"
    assert "report: " in printed.read_text()
    for name in ("distances/seed-0.json", "distances/seed-1.json"):
        assert (story.command.folder / name).read_bytes() == (trained_here / name).read_bytes()


def test_the_tutorial_is_gone_through(slurm, tmp_path):
    """docs/slurm.md, with a study of fewer steps."""
    env = {**slurm_host.variables(slurm), "PYTHONPATH": variables()["PYTHONPATH"]}
    env |= {"OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled"}
    lines = commands_of(TUTORIAL)
    assert [line.split()[1] for line in lines] == ["init", "estimate", "run", "status", "verdict"]
    for line in lines:
        words = [*PROGRAM, *line.split()[1:]]
        done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True)
        allowed = (0, 1, 3) if " verdict " in line else (0,)
        assert done.returncode in allowed, (line, done.stdout, done.stderr)
        if " init " in line:
            study = tmp_path / "study.yaml"
            study.write_text(in_short(study.read_text()))
        elif " status " in line:
            assert done.stdout.startswith("my_precision: 8 finished of 8 runs"), done.stdout
