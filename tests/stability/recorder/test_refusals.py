"""Commands that are no training, or no pair: a sentence each, and nothing half-recorded counts."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stability.recorder.spooled import SpoolError, read_spool
from stability.records.sealed_json import write_sealed
from tests.stability.recorder.recording import SCRIPTS, Recording, code_of, words

TRAINS = """
import torch
torch.manual_seed({seed})
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def update(x):
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture
def said(capfd: pytest.CaptureFixture[str]):
    """Return what was printed since the last call, on both streams, as one line."""

    def read() -> str:
        captured = capfd.readouterr()
        return re.sub(r"\s+", " ", captured.out + captured.err)

    return read


def script(folder: Path, text: str, name: str = "train.py") -> list[str]:
    """Write a script and return the command that runs it; it takes any flags."""
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return [sys.executable, str(path)]


def study_of(tmp_path: Path, text: str) -> Recording:
    """Return a study of a script that is written now."""
    seeded = "import sys\nseed = int(sys.argv[sys.argv.index('--seed') + 1])\n" + text
    return Recording(tmp_path / "runs", script(tmp_path, seeded.replace("{seed}", "seed")))


@pytest.mark.slow
def test_a_script_without_an_optimizer_is_told_its_backward_calls(tmp_path: Path, said) -> None:
    study = study_of(
        tmp_path,
        """
import torch
w = torch.zeros(3, requires_grad=True)
for _ in range(20):
    (w - 1).square().sum().backward()
    with torch.no_grad():
        w -= 0.1 * w.grad
        w.grad = None
""",
    )
    assert study.record("baseline") == 1
    assert "20 backward calls, but no optimizer step" in said()
    assert study.manifest("baseline").state == "failed"
    assert not (study.folder / "study.json").exists()


@pytest.mark.slow
def test_an_optimizer_that_never_steps_is_told_its_backward_calls(tmp_path: Path, said) -> None:
    study = study_of(
        tmp_path, TRAINS.replace("optimizer.step()", "pass") + "update(torch.ones(1, 3))\n"
    )
    assert study.record("baseline") == 1
    assert "1 backward call, but no optimizer step" in said()


@pytest.mark.slow
def test_two_models_that_train_are_named(tmp_path: Path, said) -> None:
    text = TRAINS.replace(
        "optimizer = torch.optim.SGD(model.parameters()",
        "other = torch.nn.Sequential(torch.nn.Linear(3, 2))\n"
        "optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()]",
    ).replace("model(x)", "(model(x) + other(x))")
    study = study_of(tmp_path, text + "for _ in range(2): update(torch.ones(1, 3))\n")
    assert study.record("baseline") == 0
    assert "2 models train: Linear, Sequential" in said()
    assert "Linear.weight" in study.manifest("baseline").resolved["names"]


def test_a_script_that_trains_nothing_is_refused(tmp_path: Path, said) -> None:
    study = study_of(tmp_path, "import torch\ntorch.nn.Linear(2, 2)(torch.ones(1, 2))\n")
    assert study.record("baseline") == 1
    assert "no training was seen" in said()


@pytest.mark.slow
def test_a_command_that_dies_is_quoted(tmp_path: Path, said) -> None:
    study = study_of(tmp_path, TRAINS + "update(torch.ones(1, 3))\nraise ValueError('no disk')\n")
    assert study.record("baseline") == 1
    assert "the command ended with exit code 1" in (text := said())
    assert "ValueError: no disk" in text
    assert study.manifest("baseline").state == "failed"
    # what failed counts for nothing: the arm is recorded anew
    assert study.record("baseline") == 1
    assert "on record already" not in said()


@pytest.mark.slow
def test_a_process_that_is_killed_has_not_finished(tmp_path: Path, said) -> None:
    text = TRAINS + "import os, signal\nfor _ in range(40): update(torch.ones(1, 3))\n"
    study = study_of(tmp_path, text + "os.kill(os.getpid(), signal.SIGKILL)\n")
    assert study.record("baseline") == 1
    assert "exit code -9" in said()
    assert study.manifest("baseline").state == "failed"


@pytest.mark.long
@pytest.mark.slow
def test_two_trainings_that_are_no_group_are_refused(tmp_path: Path, said) -> None:
    inner = script(tmp_path, TRAINS.replace("{seed}", "0") + "update(torch.ones(1, 3))\n", "one.py")
    text = f"import subprocess\nfor _ in range(2): subprocess.run({inner!r}, check=True)\n"
    study = study_of(tmp_path, text)
    assert study.record("baseline") == 1
    assert "2 processes trained, and they are no group of torch.distributed" in said()


def test_two_trainings_of_several_ranks_each_are_refused_as_two(tmp_path: Path) -> None:
    for number, rank in enumerate([0, 1, 0, 1]):
        line = json.dumps({"kind": "begin", "rank": rank, "world": 2})
        (tmp_path / f"rank-{number}.jsonl").write_text(f"{line}\n", encoding="utf-8")
    with pytest.raises(SpoolError, match="2 trainings of 2 ranks each ran: record one training"):
        read_spool(tmp_path)
    (tmp_path / "rank-3.jsonl").unlink()
    with pytest.raises(SpoolError, match="ranks 0 to 1 must have trained, got 0, 0, 1"):
        read_spool(tmp_path)


@pytest.mark.slow
def test_other_batches_are_refused_with_the_step(tmp_path: Path, said) -> None:
    text = TRAINS + (
        "for step in range(8):\n"
        "    x = torch.ones(2, 3)\n"
        "    x[1] += step + ('--other' in sys.argv) * (step == 5)\n"
        "    update(x)\n"
    )
    study = study_of(tmp_path, text)
    assert study.record("baseline") == 0
    assert study.record("other", "--other") == 1
    assert "pair contract: other: batch 6 differs from the baseline's" in said()
    assert study.manifest("other").state == "failed"
    options = ("--may-change", "batches")
    assert study.record("other", "--other", options=options) == 0, "that is a declared change"


@pytest.mark.slow
def test_another_start_is_refused(tmp_path: Path, said) -> None:
    text = TRAINS + "if '--other' in sys.argv:\n    torch.nn.init.ones_(model.weight)\n"
    study = study_of(tmp_path, text + "for _ in range(3): update(torch.ones(1, 3))\n")
    assert study.record("baseline") == 0
    assert study.record("other", "--other") == 1
    assert "pair contract" in (seen := said())
    assert "init_weights" in seen
    assert study.record("other", "--other", options=("--may-change", "init")) == 0


def test_two_changes_are_refused_before_the_command_starts(tmp_path: Path, said) -> None:
    study = study_of(tmp_path, TRAINS + "update(torch.ones(1, 3))\nprint('it ran')\n")
    assert study.record("baseline") == 0
    assert "it ran" in said()
    assert study.record("both", "--lr", "2", "--beta", "3") == 2
    assert "it ran" not in (seen := said())
    assert "flags.lr" in seen
    assert "flags.beta" in seen
    assert not study.paths("both").root.exists()


@pytest.mark.slow
def test_weights_of_other_shapes_are_refused(tmp_path: Path, said) -> None:
    study = Recording(tmp_path, words("plain.py"))
    assert study.record("baseline", "--width", "16") == 0
    assert study.record("wide", "--width", "8", options=("--may-change", "init")) == 1
    assert re.search(r"must have the baseline's shape \(.*16.*\), has \(.*8.*\)", said())


@pytest.mark.long
@pytest.mark.slow
def test_weights_of_other_names_are_refused(tmp_path: Path, said) -> None:
    text = TRAINS.replace(
        "torch.nn.Linear(3, 2)", "torch.nn.Linear(3, 2, bias='--no-bias' not in sys.argv)"
    )
    study = study_of(tmp_path, text + "for _ in range(3): update(torch.ones(1, 3))\n")
    assert study.record("baseline") == 0
    assert study.record("bare", "--no-bias", options=("--may-change", "init")) == 1
    assert "weights must be those of the baseline, this run has no bias" in said()


@pytest.mark.long
@pytest.mark.slow
def test_a_run_that_is_shorter_than_the_baseline_is_refused(tmp_path: Path, said) -> None:
    study = Recording(tmp_path, words("plain.py"))
    assert study.record("baseline", "--steps", "6") == 0
    assert study.record("short", "--steps", "4") == 1
    assert "training ended after 4 updates of 6" in said()
    assert study.record("long", "--steps", "9") == 0, "it is ended where the baseline ended"
    assert study.manifest("long").step == 6


@pytest.mark.long
@pytest.mark.slow
def test_a_seed_that_is_not_passed_on_is_no_repetition(tmp_path: Path, said) -> None:
    study = study_of(tmp_path, TRAINS.replace("{seed}", "7") + "update(torch.ones(1, 3))\n")
    assert study.record("baseline") == 0
    assert study.record("baseline", seed=1) == 1
    assert "the command does not take its seed" in said()


@pytest.mark.slow
def test_a_nudge_that_the_script_undoes_is_refused(tmp_path: Path, said) -> None:
    text = TRAINS + (
        "model(torch.ones(1, 3))\n"  # a trial pass, then the weights of a checkpoint
        "torch.nn.init.ones_(model.weight)\n"
        "torch.nn.init.ones_(model.bias)\n"
        "for _ in range(3): update(torch.ones(1, 3))\n"
    )
    study = study_of(tmp_path, text)
    assert study.record("baseline") == 0
    assert study.record("nudge", options=("--nudge", "1")) == 1
    assert "the nudge was undone: weight was set anew after the start" in said()


@pytest.mark.long
@pytest.mark.slow
def test_a_step_that_is_compiled_as_a_whole_is_said(tmp_path: Path, said) -> None:
    study = Recording(tmp_path, words("compiled.py", "--whole-step", "--backend", "eager"))
    assert study.record("baseline") == 0
    assert "no training input was seen" in said()
    assert study.record("rerun") == 0
    assert code_of("verify", str(study.folder)) == 1
    assert "rerun/seed-0: unproven: not on record: batches," in said()


@pytest.mark.slow
def test_a_diverged_run_is_recorded_as_such(tmp_path: Path, said) -> None:
    study = Recording(tmp_path, words("plain.py", "--blow-up"))
    assert study.record("baseline") == 0
    assert "the loss is not finite from step" in said()
    assert study.manifest("baseline").state == "diverged"


@pytest.mark.slow
def test_what_an_optimizer_does_not_own_is_said(tmp_path: Path, said) -> None:
    text = TRAINS.replace(
        "optimizer = torch.optim.SGD(model.parameters()",
        (
            "head = torch.nn.Linear(2, 2)\nmodel = torch.nn.Sequential(model, head)\n"
            "optimizer = torch.optim.SGD(model[0].parameters()"
        ),
    )
    study = study_of(tmp_path, text + "for _ in range(2): update(torch.ones(1, 3))\n")
    assert study.record("baseline") == 0
    assert "2 weights belong to no optimizer: 1.bias, 1.weight" in said()


def test_an_arm_needs_its_baseline(tmp_path: Path, said) -> None:
    study = Recording(tmp_path, words("plain.py"))
    assert study.record("bf16", "--bf16") == 2
    assert "baseline, seed 0, of study study must be on record before bf16" in said()
    assert not study.folder.exists()


def test_a_study_of_our_own_trainer_is_not_overwritten(tmp_path: Path, said) -> None:
    folder = tmp_path / "ours"
    folder.mkdir()
    write_sealed(folder / "study.json", {"config": {"base": {"model": {"layers": 2}}}, "arms": []})
    before = (folder / "study.json").read_bytes()
    given = ["--study", folder.name, "--arm", "baseline", "--out", str(folder.parent)]
    assert code_of("record", *given, "--", sys.executable, "train.py") == 2
    assert "holds a study of `stability run`" in said()
    assert (folder / "study.json").read_bytes() == before


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--arm", "baseline"], "--study must be given"),
        (["--study", "s"], "--arm must be given"),
        (["--study", "a/b", "--arm", "baseline"], "a/b"),
        (["--study", "s", "--arm", "../x"], "../x"),
        (["--study", "s", "--arm", "baseline", "--seed", "-1"], "seed must be >= 0, got -1"),
        (["--study", "s", "--arm", "baseline", "--steps", "-1"], "steps must be >= 0, got -1"),
        (["--study", "s", "--arm", "baseline", "--snapshots", "0,2"], "got '0,2'"),
        (["--study", "s", "--arm", "baseline", "--role", "refrence"], "nearest: reference"),
        (["--study", "s", "--arm", "baseline", "--may-change", "loss"], "got loss"),
        (["--study", "s", "--arm", "baseline", "--env", "X"], "--env must be NAME=VALUE, got 'X'"),
    ],
)
def test_wrong_options_are_refused_before_anything_runs(
    options: list[str], sentence: str, tmp_path: Path, said
) -> None:
    command = [sys.executable, "-c", "print('it ran')"]
    assert code_of("record", *options, "--out", str(tmp_path / "runs"), "--", *command) == 2
    assert sentence in (seen := said())
    assert "it ran" not in seen
    assert not (tmp_path / "runs").exists()


def test_no_command_and_no_such_command_are_refused(tmp_path: Path, said) -> None:
    given = ["record", "--study", "s", "--arm", "baseline", "--out", str(tmp_path)]
    assert code_of(*given) == 2
    assert "a command must follow --" in said()
    assert code_of(*given, "--", "pythons", "train.py") == 2
    assert "pythons: No such file or directory" in said()


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_does_not_count_and_is_recorded_anew(
    number: signal.Signals, tmp_path: Path, said
) -> None:
    text = TRAINS + (
        "import time\n"
        "for _ in range(30):\n"
        "    update(torch.ones(1, 3))\n"
        "    print('step', flush=True)\n"
        "    time.sleep(0.0 if '--quick' in sys.argv else 1)\n"
    )
    study = study_of(tmp_path, text)
    given = ["--study", "study", "--arm", "baseline", "--out", str(study.out)]
    command = [sys.executable, "-m", "stability.cli.main", "record", *given, "--"]
    process = subprocess.Popen(
        [*command, *study.command, "--seed", "{seed}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    with process.stdout:
        assert any(line.startswith("step") for line in process.stdout)
        # a terminal tells all processes of it, a scheduler the first one
        (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
        process.stdout.read()
        assert process.wait() == 130
    assert study.manifest("baseline").state == "interrupted"
    assert not list(study.paths("baseline").root.glob(".spool-*"))


@pytest.mark.slow
def test_what_a_killed_recorder_has_left_is_removed(tmp_path: Path) -> None:
    study = Recording(tmp_path, words("plain.py"))
    left = study.paths("baseline").root / ".spool-left"
    left.mkdir(parents=True)
    (left / "rank-0-1.jsonl").write_text('{"kind": "begin"}\n', encoding="utf-8")
    assert study.record("baseline") == 0
    assert not left.exists()


@pytest.mark.slow
def test_a_run_on_record_is_kept(tmp_path: Path, said) -> None:
    study = Recording(tmp_path, words("plain.py"))
    assert study.record("baseline") == 0
    before = {path: path.stat().st_mtime_ns for path in study.folder.rglob("*") if path.is_file()}
    time.sleep(0.01)
    said()
    assert study.record("baseline") == 0
    assert "on record already" in said()
    assert {x: x.stat().st_mtime_ns for x in study.folder.rglob("*") if x.is_file()} == before
    assert study.record("baseline", "--bf16") == 2
    assert "its baseline has flags.bf16" in said()


@pytest.mark.slow
def test_a_training_is_run_once_more_unobserved_and_ends_in_the_same_bits(tmp_path: Path) -> None:
    study = Recording(tmp_path, words("plain.py"))
    assert study.record("baseline", options=("--check-observer", "true")) == 0
    observer = study.manifest("baseline").observer
    assert observer["equal"] is True
    assert observer["watched"] == study.manifest("baseline").hashes["final_weights"]
    planned = Recording(tmp_path / "planned", words("averaged.py"))
    options = ("--check-observer", "true", "--steps", "3")
    assert planned.record("baseline", options=options) == 0
    assert planned.manifest("baseline").observer["steps"] == 3


@pytest.mark.slow
def test_a_training_that_observing_changes_does_not_count(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    source = (SCRIPTS / "plain.py").read_text()
    watched = '1 + int(__import__("os").environ["STABILITY_OBSERVES"])'
    script.write_text(source.replace("lr=asked.lr", f"lr=asked.lr * ({watched})"))
    study = Recording(tmp_path, [sys.executable, str(script)])
    assert study.record("baseline", options=("--check-observer", "true")) == 1
    assert "recorded and unobserved it must end in the same bits" in capsys.readouterr().out
    assert study.manifest("baseline").state == "failed"
    assert study.manifest("baseline").observer["equal"] is False
