"""The estimate of a study of commands: what slows a run down is found, and nothing is left."""

import json
import os
import shlex
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from stability.cli.estimate import _NOTHING_MISSING
from stability.config.command_study import load_command_study
from stability.recorder.held_out import HeldOut
from stability.recorder.spooled import _memory
from stability.study import command_cost, run_commands
from stability.study.command_cost import CommandTrial, cost_of_commands, time_command
from stability.study.foreign import RunFailedError
from stability.study.foreign_assay import planted_updates
from stability.study.measuring_cost import REPORT_S, USUAL
from stability.study.run_commands import plan_commands
from tests.conftest import SilentObserver
from tests.stability.recorder.recording import SCRIPTS, code_of

SLOW = """
import time
from torch.nn.functional import scaled_dot_product_attention

def attend(q, k, v, **_):
    time.sleep(1)
    return scaled_dot_product_attention(q, k, v, is_causal=True)
"""
ENDS_AFTER_3 = "import sys\nsys.argv += ['--steps', '3']\n"
LARGE = 300 * 2**20


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "slow.py").write_text(SLOW)
    yield tmp_path
    sys.modules.pop("slow", None)


def study_of(folder, script, arms, *, seeds=(0,), probe=None, snapshots=(2, 6), steps=8, before=""):
    """Write a study of a script of ours, which `before` is put in front of."""
    source = (SCRIPTS / script).read_text()
    (folder / "train.py").write_text(before + source)
    base = {
        "command": f"{shlex.quote(sys.executable)} train.py --seed {{seed}} {{flags}}",
        "flags": {"bf16": True, **({"kind": "tuple"} if script == "evaluates.py" else {})},
        "train": {"steps": steps, "snapshot_steps": list(snapshots)},
        **({"probe": probe} if probe else {}),
    }
    content = {"name": "mine", "question": "?", "base": base, "arms": arms, "seeds": [*seeds]}
    path = folder / "study.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


def planned(path):
    return plan_commands(load_command_study(path), Path("runs"))


def left(*folders):
    return sum(x.stat().st_size for folder in folders for x in folder.rglob("*") if x.is_file())


@pytest.mark.long
@pytest.mark.slow
def test_disk_and_memory_are_those_of_the_runs_and_nothing_is_left(folder, capsys):
    held = f"import torch\nheld = torch.ones({LARGE // 4})\n"
    arms = {"lr": {"flags": {"lr": 0.02}}, "nudge": {"nudge": {"ulps": 1}}, "rerun": {}}
    path = study_of(folder, "plain.py", arms, seeds=(0, 1), before=held)
    before = sorted(folder.iterdir())
    assert code_of("estimate", str(path), "--json") == 0
    printed = capsys.readouterr()
    assert sorted(folder.iterdir()) == before
    assert printed.err.splitlines()[1:] == [
        "timing 1 of 2: baseline, up to 8 updates",
        "timing 2 of 2: lr, up to 8 updates",
    ], "of two that differ in the nudge alone one is timed"
    cost = json.loads(printed.out)
    assert cost["runs"] == 8
    assert 0 < sum(cost["hours_by_arm"].values()) == pytest.approx(cost["hours_of_runs"])
    assert cost["hours"] > cost["hours_of_runs"]
    assert cost["hours_by_arm"]["nudge"] == cost["hours_by_arm"]["baseline"]
    # this process holds more than the script's: what it has must not be counted
    assert LARGE < cost["memory"]["host"] < LARGE + 2**30
    assert code_of("run", str(path), "--wandb", "disabled") == 0
    runs = folder / "runs" / "mine"
    kept = left(*runs.rglob("snapshots"), *runs.rglob("sketches"))
    assert abs(cost["disk"]["snapshots"] / kept - 1) < 0.05


@pytest.mark.slow
def test_a_look_is_told_from_an_update(folder):
    """The candidate takes a second: it is called at looks alone, of both kinds."""
    probe = {"candidate": "slow:attend", "every": 2, "gradient_every": 4}
    (run,) = planned(study_of(folder, "evaluates.py", {}, probe=probe))
    trial = time_command(run)
    assert trial.update_seconds < 0.9 <= trial.look_seconds
    assert trial.gradient_seconds >= 0.9
    probe = {**probe, "gradient_every": 0}
    (run,) = planned(study_of(folder, "evaluates.py", {}, probe=probe))
    assert time_command(run).gradient_seconds == 0.0


def trial_of(folder, probe, updates, *, whole, monkeypatch, kept=(), asked=24):
    """Return what a trial says whose `updates` took so many seconds; a state is kept in 2."""
    (run,) = planned(study_of(folder, "evaluates.py", {}, probe=probe, steps=asked))
    run = replace(run, folder=folder / "trial")
    times, ended, now = {}, [], 100.0
    for step, took in enumerate(updates, start=1):
        now += took
        ended.append(now)
        if step in (*kept, len(updates)):
            times[step] = (now + 0.25, now + 2.25)
            now += 2.25
    for place, step in enumerate((0, *times)):
        for path, size in ((run.paths.snapshot(step), 1000), (run.paths.sketch(step), 50)):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"x" * size)
            # each takes half a second to be recorded
            os.utime(path, (place / 2, place / 2))
    run.paths.metrics.write_bytes(b"x" * 10 * len(updates))
    run.paths.manifest.write_bytes(b"x" * 7)
    spooled = SimpleNamespace(
        step=len(updates),
        times=times,
        clock={"ended": ended},
        memory={"host": 3},
        held_out=HeldOut(),
        buffers=(),
    )
    monkeypatch.setattr(command_cost, "time_distance", lambda one, other: 3.0)
    monkeypatch.setattr(command_cost, "snapshot_dtypes", lambda path: {})
    return command_cost._trial(run, spooled, whole)


def test_a_look_and_keeping_a_state_are_no_part_of_an_update(folder, monkeypatch):
    """An update takes 1 s, a look adds 10 and one at the gradient 100; a state is kept in 2."""
    probe = {"candidate": "flash:fa2", "every": 2, "gradient_every": 4}
    looked = {1: 50, **dict.fromkeys((4, 7, 10), 11), 6: 101, 12: 101}
    updates = [looked.get(step, 1) for step in range(1, 13)]
    found = trial_of(folder, probe, updates, whole=500, monkeypatch=monkeypatch, kept=(1, 3))
    assert (found.update_seconds, found.look_seconds, found.gradient_seconds) == (1, 10, 100)
    assert found.state_seconds == 2 + 0.5
    # less what updates and states have taken: the first update, which warms up, is in it
    assert found.start_seconds == 500 - (11 + 3 * 10 + 2 * 100) - 3 * 2.5
    assert (found.state_bytes, found.update_bytes, found.fixed_bytes) == (1050, 10, 7)
    assert (found.updates, found.distance_seconds) == (12, 3.0)


@pytest.mark.parametrize("busy", [0, 5], ids=["idle", "busy now and then"])
def test_what_warms_up_counts_once_and_a_busy_moment_not_at_every_update(folder, monkeypatch, busy):
    """The first BF16 updates were slow, three of four were timed: 2.4 times what a run took."""
    updates = [9, 6, 5, 4, 3, *([1] * 19)]
    updates[17] += busy
    found = trial_of(folder, None, updates, whole=100, monkeypatch=monkeypatch)
    assert found.update_seconds == 1
    assert found.start_seconds == 100 - 23 - 2.5
    assert (found.look_seconds, found.gradient_seconds) == (0, 0)
    assert found.update_bytes == 10


@pytest.mark.parametrize(
    ("updates", "update"), [([5, 2, 2, 2], 2), ([9, 6, 5, 4, 3, 1, 1, 1], 1)], ids=["4", "8"]
)
def test_of_a_short_trial_the_later_half_counts_less_the_states_that_are_kept(
    folder, monkeypatch, updates, update
):
    found = trial_of(folder, None, updates, whole=100, monkeypatch=monkeypatch, kept=(1, 3))
    assert found.update_seconds == update


def test_of_a_first_look_at_the_gradient_no_other_is_judged(folder, monkeypatch):
    """It chooses its code, too: in a run it comes once."""
    probe = {"candidate": "flash:fa2", "every": 0, "gradient_every": 4}
    updates = [30 if step == 6 else 3 if step % 6 == 0 else 1 for step in range(1, 25)]
    found = trial_of(folder, probe, updates, whole=100, monkeypatch=monkeypatch)
    assert (found.update_seconds, found.gradient_seconds) == (1, 2)


def test_a_trial_makes_no_more_updates_than_its_run(folder):
    for steps, most in ((8, 8), (2, 4), (100, 24)):
        path = study_of(folder, "plain.py", {}, steps=steps, snapshots=(1,))
        assert command_cost._updates(*planned(path)) == (4, most)


def test_what_a_run_takes_is_counted_by_its_own_looks(folder, monkeypatch):
    trial = CommandTrial(
        updates=8,
        update_seconds=1.0,
        look_seconds=10.0,
        gradient_seconds=100.0,
        state_seconds=1000.0,
        start_seconds=10_000.0,
        distance_seconds=0.5,
        state_bytes=7,
        update_bytes=2.0,
        fixed_bytes=5,
        memory={"host": 3},
    )
    monkeypatch.setattr(command_cost, "time_command", lambda run: trial)
    probe = {"candidate": "flash:fa2", "every": 3, "gradient_every": 5}
    arms = {"lr": {"flags": {"lr": 0.02}, "probe": {"candidate": "", "gradient_every": 0}}}
    told = []
    path = study_of(folder, "evaluates.py", arms, seeds=(3, 4), probe=probe)
    cost = cost_of_commands(planned(path), told=told.append)
    # 8 updates, of which the first is in the start; looks at 3 and 6, at the gradient after 5
    plain = 10_000 + 7 + 3 * 1000
    assert cost.seconds_by_seed == {3: plain + 20 + 100 + plain, 4: plain + 20 + plain}
    assert cost.seconds_by_arm == {"baseline": 2 * plain + 140, "lr": 2 * plain}
    assert cost.run_seconds == 4 * plain + 140
    # half a second for a pair of files: the four states of both arms, in two seeds
    assert cost.measuring.distances == 2 * 4 * 2 * 0.5 / 2
    assert cost.seconds == cost.run_seconds + cost.measuring.distances + REPORT_S
    assert cost.measuring.planted == 0, "no arm is broken"
    assert cost.look_seconds == 140
    # the states: the start, 2, 6 and the end
    assert cost.disk["snapshots"] == 4 * 4 * 7
    assert cost.disk["records"] == 4 * (5 + 8 * 2)
    assert cost.memory == {"host": 3}
    assert told == [
        "4 runs are of 2 kinds: up to 16 updates are timed in all; of each no further one is begun "
        "8 seconds after the first",
        "timing 1 of 2: baseline, up to 8 updates",
        "timing 2 of 2: lr, up to 8 updates",
    ]


def test_planted_faults_are_counted_as_they_usually_are_and_at_most(folder, monkeypatch):
    """The command runs again for 24 updates; where no fault is settled once more, for 96."""
    trial = replace(TRIAL, start_seconds=10.0, gradient_seconds=6.0)
    monkeypatch.setattr(command_cost, "time_command", lambda run: trial)
    probe = {"candidate": "flash:fa2", "gradient_every": 1}
    attention = {"attention": "flash:fa2", "probe": probe}
    broken = {**attention, "attention": "flash:fa2+out_gain_1pct", "role": "broken"}
    arms = {"fa2": attention, "blind": {"attention": "sdpa:math"}, "broken": broken}
    path = study_of(folder, "evaluates.py", arms, seeds=(0, 1), steps=200)
    measuring = cost_of_commands(planned(path)).measuring
    assert measuring.planted == 10 + 24 + USUAL, "once, on the candidate that is looked at"
    gradients = (24 + 96) * (3 + 7) + 3 * 12
    assert measuring.planted_most == (10 + 24) + (10 + 96) + gradients
    del arms["broken"]
    path = study_of(folder, "evaluates.py", arms, seeds=(0, 1), steps=200)
    assert cost_of_commands(planned(path)).measuring.planted_most == 0


def test_a_planted_fault_and_a_commit_are_timed_as_what_they_are_planted_on(folder, monkeypatch):
    attention = {"attention": "flash:fa2", "probe": {"candidate": "flash:fa2"}}
    faulty = {**attention, "attention": "flash:fa2+out_gain_1pct", "role": "broken"}
    other = {"attention": "sdpa:math"}
    path = study_of(folder, "evaluates.py", {"a": attention, "b": faulty, "c": other})
    told = []
    monkeypatch.setattr(command_cost, "time_command", lambda run: told.append(run.arm) or TRIAL)
    cost_of_commands(planned(path))
    assert sorted(told) == ["a", "baseline", "c"]


def test_a_display_is_told_how_long_faults_take_and_on_which_they_are_planted(folder, monkeypatch):
    probe = {"candidate": "flash:fa2", "gradient_every": 3}
    attention = {"attention": "flash:fa2", "probe": probe}
    broken = {**attention, "attention": "flash:fa2+out_gain_1pct", "role": "broken"}
    path = study_of(folder, "evaluates.py", {"fa2": attention, "broken": broken}, seeds=(5, 6))
    # its command runs again for its 8 updates; six gradients are a look, each third update one
    expected = {("fa2", 5): pytest.approx(8 + USUAL * 3 / (1 + 6 * 3 / 3))}
    assert planted_updates(planned(path)) == expected
    observer = SilentObserver()
    monkeypatch.setattr(run_commands, "record_planned", lambda *_, **__: ("finished", ""))
    monkeypatch.setattr(run_commands, "measure_study", lambda run: [])
    monkeypatch.setattr(run_commands, "assay_commands", lambda *given: given[-1](["fa2"]))
    study = load_command_study(path)
    run_commands.run_commands(study, folder / "runs", observer=observer)
    assert observer.planned == [["fa2"]]


TRIAL = CommandTrial(
    updates=4,
    update_seconds=1.0,
    look_seconds=0.0,
    gradient_seconds=0.0,
    state_seconds=0.0,
    start_seconds=0.0,
    distance_seconds=0.0,
    state_bytes=1,
    update_bytes=1.0,
    fixed_bytes=1,
    memory={},
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"no-such": 1}, "arm lr: its trial of 8 updates: the command ended with exit code 2"),
        ({"steps": 3}, "arm lr: its trial of 8 updates: training ended after 3 updates of 8"),
        ({"steps": 7}, "arm lr: its trial of 8 updates: training ended after 7 updates of 8"),
    ],
)
def test_an_arm_that_can_not_be_timed_is_named(folder, capsys, flags, said):
    """Before the first run, not after that of its baseline."""
    path = study_of(folder, "plain.py", {"lr": {"flags": flags}})
    assert code_of("estimate", str(path)) == 2
    assert said in " ".join(capsys.readouterr().err.split())
    assert not (folder / "runs").exists()


@pytest.mark.slow
def test_a_run_shorter_than_a_trial_is_timed_whole(folder):
    path = study_of(folder, "plain.py", {}, steps=3, snapshots=(1,), before=ENDS_AFTER_3)
    assert time_command(*planned(path)).updates == 3


@pytest.mark.slow
def test_a_slow_command_makes_the_least_of_updates(folder, monkeypatch):
    monkeypatch.setattr(command_cost, "_LONGEST_S", 0.0)
    path = study_of(folder, "plain.py", {}, steps=100)
    assert time_command(*planned(path)).updates == 4


@pytest.mark.slow
def test_an_arm_on_weights_of_another_dtype_is_told_before_the_first_run(folder, capsys):
    wide = "import torch, sys\nif '--lr' in sys.argv: torch.set_default_dtype(torch.float64)\n"
    path = study_of(folder, "plain.py", {"wide": {"flags": {"lr": 0.1}}}, before=wide)
    assert code_of("estimate", str(path)) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "arm wide: start weights must have the baseline's dtypes, " in said
    assert "is float64 and not float32" in said


@pytest.mark.parametrize("seconds", [60.0, 3600.0])
def test_it_is_said_in_lines_of_80_columns(folder, monkeypatch, capsys, seconds):
    probe = {"candidate": "flash:fa2", "every": 1, "gradient_every": 1}
    path = study_of(folder, "evaluates.py", {"rerun": {}}, seeds=range(4), probe=probe)
    monkeypatch.setattr(
        command_cost,
        "time_command",
        lambda run: replace(
            TRIAL,
            start_seconds=seconds / 8,
            gradient_seconds=seconds / 8,
            memory={"host": 2**30, "gpu": 2**33},
        ),
    )
    assert code_of("estimate", str(path)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    said = " ".join(" ".join(lines).split())
    assert "mine: 8 runs time" in said
    assert "what a script evaluates after 4 updates comes on top" in said
    assert "8 runs, one after another 3 seconds the report" in said, "no fault is planted"
    assert "seed 0, where the gradient is looked at, takes" in said
    assert "1.0 GiB of the host's and 8.0 GiB of a GPU's of one run, in its" in said
    assert ("- seeds, 4 now." in said) == (seconds > 600)
    assert "report W&B's offline files are not counted: `--wandb disabled` writes none" in said
    assert "PASS none, as the study is planned: - no arm is in question, so that the" in said
    assert "probe: {seeds: first}" not in said, "no study of commands has that"


def test_what_a_pass_lacks_is_said_before_anything_runs(folder, monkeypatch, capsys):
    monkeypatch.setattr(command_cost, "time_command", lambda run: TRIAL)
    arms = {"lr": {"flags": {"lr": 0.02}}, "nudge": {"nudge": {"ulps": 1}}}
    path = study_of(folder, "plain.py", arms, seeds=(0, 1, 2))
    assert code_of("estimate", str(path)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    said = " ".join(" ".join(lines).split())
    found = said.partition("PASS none, as the study is planned: - there is no reference")[2]
    assert " - no arm is broken on purpose" in found
    assert "seeds of the first look" not in found
    assert not (folder / "runs").exists()
    path = study_of(folder, "plain.py", arms, seeds=(0, 1))
    assert code_of("estimate", str(path), "--json") == 0
    lacks = json.loads(capsys.readouterr().out)["lacks"]
    assert len(lacks) == 3
    assert "it has 2 of the 3 seeds of the first look" in lacks[-1]


def test_that_nothing_was_evaluated_is_said_of_a_study_that_lacks_nothing_else(
    folder, monkeypatch, capsys
):
    unseen = replace(TRIAL, evaluates=False)
    monkeypatch.setattr(command_cost, "time_command", lambda run: unseen)
    arms = {
        "lr": {"flags": {"lr": 0.02}},
        "nudge": {"nudge": {"ulps": 1}},
        "reference": {"role": "reference", "flags": {"bf16": False}},
        "broken": {"role": "broken", "flags": {"lr": 1.0}},
    }
    path = study_of(folder, "plain.py", arms, seeds=(0, 1, 2))
    assert code_of("estimate", str(path)) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "PASS none, unless the script evaluates the model: - 0 evaluations were seen in the first "
        "4 updates: no call of the model in evaluation mode (`model.eval()`) and without gradients "
        "was seen. A PASS needs at least 2 in each run, of 8 updates, on the same samples, which "
        "no run trains on: their loss is the held-out loss (1 is enough with `held_out: all`). If "
        "the script does so later in a run, nothing has to be changed; else name "
        "a function that returns it, called with the model alone: `held_out: MODULE:FUNCTION` "
        "in the base of the study's YAML"
    ) in said
    # it evaluates, and what is not known to be held out, as random crops; then a loss that is
    for trial, line in ((TRIAL, []), (replace(TRIAL, has_loss=True), _NOTHING_MISSING)):
        monkeypatch.setattr(command_cost, "time_command", lambda run, trial=trial: trial)
        assert code_of("estimate", str(path)) == 0
        said = capsys.readouterr().out.splitlines()
        assert [x for x in said if "PASS" in x or "its seeds are enough" in x] == line


@pytest.mark.parametrize(("script", "evaluates"), [("plain.py", False), ("evaluates.py", True)])
def test_a_trial_tells_whether_its_script_evaluates(folder, script, evaluates):
    (run,) = planned(study_of(folder, script, {}))
    found = time_command(run)
    assert (found.evaluates, found.has_loss) == (evaluates, evaluates)


def test_more_seeds_are_counted_as_they_are_run(folder, monkeypatch, capsys):
    monkeypatch.setattr(command_cost, "time_command", lambda run: TRIAL)
    path = study_of(folder, "plain.py", {"rerun": {}}, seeds=(0, 1))
    assert code_of("estimate", str(path), "--json", "--seeds", "5") == 0
    cost = json.loads(capsys.readouterr().out)
    assert (cost["runs"], list(cost["hours_by_seed"])) == (10, ["0", "1", "2", "3", "4"])
    assert code_of("estimate", str(path), "--seeds", "1") == 2


def test_a_commit_is_timed_in_its_own_checkout(folder, monkeypatch):
    """Its script, which takes other flags than the working tree's, is not the one that runs."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    path = study_of(folder, "plain.py", {"old": {"ref": "HEAD"}})
    git = ["git", "-c", "user.email=a@example.org", "-c", "user.name=a"]
    for words in (["init", "-q"], ["add", "train.py"], ["commit", "-qm", "x"]):
        subprocess.run([*git, *words], cwd=folder, check=True, capture_output=True)
    places = []

    @contextmanager
    def commanded(run, *, folder, output):
        places.append(folder)
        raise RunFailedError("baseline, seed 0: it is not run here")
        yield

    monkeypatch.setattr(command_cost, "commanded", commanded)
    runs = {run.arm: run for run in planned(path)}
    for run in runs.values():
        with pytest.raises(ValueError, match=f"arm {run.arm}: its trial of 8 updates: it is not"):
            time_command(run)
    monkeypatch.setattr(command_cost, "folder_of", refuse)
    with pytest.raises(ValueError, match="arm old: its trial of 8 updates: setup: it fails"):
        time_command(runs["old"])
    assert places[0] is None
    assert places[1].is_relative_to(folder / "cache")
    assert command_cost._key(runs["old"]) != command_cost._key(runs["baseline"])


def refuse(run):
    raise ValueError("setup: it fails")


def test_what_trains_nothing_is_told_with_its_arm(folder):
    path = study_of(folder, "plain.py", {})
    (folder / "train.py").write_text("print(1)")
    (run,) = planned(path)
    with pytest.raises(ValueError, match="arm baseline: its trial of 8 updates: no training was"):
        time_command(run)


def test_a_policy_that_drops_snapshots_is_refused(folder, capsys):
    path = study_of(folder, "plain.py", {"rerun": {}})
    assert code_of("estimate", str(path), "--keep", "none") == 2
    assert "keep must be all for a study of commands, got none" in capsys.readouterr().err


def test_ranks_share_the_host_and_have_a_gpu_each():
    held = [{"host": 3, "gpu": 5}, {"host": 4, "gpu": 7}, {}]
    assert _memory(held) == {"host": 7, "gpu": 7}
    assert _memory([{"host": 3}]) == {"host": 3}
    assert _memory([]) == {}
