"""Forks go on from the exact state: changing nothing they end in the parent's bits, else apart."""

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from stability.analysis.pair_contract import prove_pair
from stability.cli.main import main
from stability.records.manifest import read_manifest
from stability.records.metric_log import read_metrics
from stability.records.paths import RunPaths, prediction_steps
from stability.records.run_files import damage
from stability.records.witness import read_witness
from stability.study.bisect import halve
from stability.study.fork import fork_drifts, plan_fork, run_fork
from stability.study.run import RunConflictError
from stability.study.train_run import TrainOptions
from tests.conftest import SilentObserver, train_edited
from tests.sampling import one_in

ROOT = Path(__file__).parents[3]
FLASH = {"attention": {"implementation": "flash", "profile": "all_bf16"}}


def _edit(content):
    content["base"]["precision"] = "16-mixed"
    content["base"]["train"] |= {"steps": 10, "snapshot_steps": [4, 7], "keep_checkpoints": 0}
    partial = {"attention": {**FLASH["attention"], "layers": ["layer_1"]}}
    content["arms"] = {"baseline": {}, "flash": FLASH, "flash_layer_1": partial}
    content.update(seeds=[0], yardstick="flash", early_step=4)


@pytest.fixture(scope="module")
def study(tmp_path_factory, text_file):
    """A study of a baseline with a loss scaler and a candidate, that keeps every checkpoint."""
    return train_edited(tmp_path_factory.mktemp("forked"), text_file, _edit)[1]


@pytest.fixture
def parent(study):
    return RunPaths.for_run(study, "baseline", 0)


def _fork(parent, at, changes, **options):
    run, observer = plan_fork(parent, at, changes, **options), SilentObserver()
    run_fork(run, TrainOptions(wandb_mode="disabled"), observer, isolated=False)
    assert observer.ended[0][2:] in (("finished", ""), ("finished", "kept"))
    return run


@pytest.mark.parametrize("at", [2, 6])
def test_a_fork_that_changes_nothing_ends_in_the_parents_bits(parent, at):
    run = _fork(parent, at, {}, name=f"same-{at}")
    assert set(fork_drifts(run).values()) == {0.0}
    assert max(fork_drifts(run)) == 10
    ours, theirs = read_manifest(run.paths.manifest), read_manifest(parent.manifest)
    # a fork is planned after the fact, so no protocol was sealed for it
    # nor was it there for what its parent is
    apart = {"protocol": "", "record": ours.hashes["record"]}
    assert ours.hashes == {**theirs.hashes, **apart}
    assert ours.fork == {"from": "../../../baseline/seed-0", "at": at, "until": 10}
    losses = [read_metrics(paths.metrics)["train/loss"] for paths in (run.paths, parent)]
    assert losses[0] == losses[1]
    evaluated = [read_metrics(paths.metrics)["eval/loss"] for paths in (run.paths, parent)]
    assert evaluated[0] == evaluated[1]
    assert damage(run.paths) == []


@pytest.mark.slow
def test_a_fork_is_apart_from_its_step_on_and_a_candidate_s_drifts_are_not_its_own(study, parent):
    run = _fork(parent, 4, FLASH)
    drifts = fork_drifts(run)
    assert list(drifts) == [7, 10]
    assert 0 < drifts[7] < drifts[10]
    candidate = RunPaths.for_run(study, "flash", 0)
    back = _fork(candidate, 4, {"attention": {"implementation": "baseline"}}, name="back")
    assert min(fork_drifts(back)) == 7
    assert prediction_steps(run.paths) == [4, 7, 10]
    late = _fork(parent, 8, FLASH)
    assert late.paths != run.paths
    assert fork_drifts(late)[10] < drifts[10]


def test_a_fork_has_a_witness_of_its_own_updates_alone(parent):
    run = _fork(parent, 4, {"precision": "32-true"}, name="fp32-4")
    witness = read_witness(run.paths.witness)
    # the parent multiplied FP16 up to there, under a label of its own
    assert [(each.first, each.last) for each in witness.all] == [(4, 10)]
    proof = prove_pair(parent, run.paths)
    assert (proof.breach, proof.unproven) == (None, [])


def test_a_fork_with_another_epsilon_takes_it(parent):
    run = _fork(parent, 4, {"optimizer": {"eps": 1e-3}})
    assert fork_drifts(run)[7] > 0


@pytest.mark.parametrize(
    "changes",
    [
        {"lr": 2e-3},
        pytest.param({"weight_decay": 0.9}, marks=pytest.mark.slow),
        pytest.param({"betas": [0.5, 0.6]}, marks=pytest.mark.slow),
        pytest.param({"warmup_steps": 9}, marks=pytest.mark.slow),
        pytest.param({"state": "bf16"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_fork_with_another_setting_of_the_optimizer_takes_it(parent, changes):
    # a restored optimizer has the settings of the one that was saved
    run = _fork(parent, 4, {"optimizer": changes}, name=next(iter(changes)), until=7)
    assert fork_drifts(run)[7] > 0


def test_a_fork_may_train_on_larger_batches(parent):
    run = _fork(parent, 4, {"train": {"batch_size": 6}}, name="batch", until=7)
    proof = prove_pair(parent, run.paths)
    assert (proof.breach, proof.axes) == (None, ("train.batch_size",))


def test_a_name_that_another_fork_has_is_refused(parent):
    _fork(parent, 4, {"precision": "32-true"}, name="mine", until=7)
    for at, until in ((6, 7), (4, 10)):
        run = plan_fork(parent, at, {"precision": "32-true"}, name="mine", until=until)
        with pytest.raises(RunConflictError, match=r"holds a run with fork\.(at|until)"):
            run_fork(run, TrainOptions(wandb_mode="disabled"), SilentObserver(), isolated=False)


def test_a_kill_while_a_fork_is_laid_down_leaves_it_to_be_laid_again(parent, monkeypatch):
    run = plan_fork(parent, 4, {}, name="laid-again")

    def killed(*arguments):
        raise SystemExit

    with monkeypatch.context() as patch:
        patch.setattr("stability.study.train_run.lay_fork", killed)
        with pytest.raises(SystemExit):
            run_fork(run, TrainOptions(wandb_mode="disabled"), SilentObserver(), isolated=False)
    run.paths.metrics.write_text("half")
    assert set(fork_drifts(_fork(parent, 4, {}, name="laid-again")).values()) == {0.0}


def test_a_fork_of_a_partly_changed_arm_leaves_the_other_layers_alone(study):
    partial = RunPaths.for_run(study, "flash_layer_1", 0)
    run = plan_fork(partial, 4, {"attention": {"profile": "fa2"}})
    config = run.arm.config
    assert config.attention.layers == ("layer_1",)
    assert config.probe.shadows[0].implementation == "baseline"


def test_forks_have_names_of_their_own_however_long_the_change(parent):
    runs = [
        plan_fork(parent, 4, {"attention": {"implementation": "flash", "numerics": numerics}})
        for numerics in (
            {"accumulator": "bf16", "output": "bf16", "lse": "bf16"},
            {"accumulator": "bf16", "output": "bf16", "lse": "fp16"},
        )
    ]
    assert runs[0].paths != runs[1].paths
    assert max(len(run.arm.name) for run in runs) <= 64


def test_a_fork_may_stop_early_at_the_same_learning_rates(parent):
    short = _fork(parent, 4, FLASH, until=7, name="short")
    whole = _fork(parent, 4, FLASH)
    assert fork_drifts(short)[7] == fork_drifts(whole)[7]
    assert read_manifest(short.paths.manifest).step == 7


@pytest.mark.parametrize(
    ("at", "changes", "until", "message"),
    one_in(
        4,
        [
            (
                5,
                {},
                0,
                r"at must be a step with a checkpoint, got 5; .* has 2, 4, 6, 8, 10 \(train.ke",
            ),
            (
                4,
                {"model": {"init": "xavier"}},
                0,
                "model.init must not change, it only decides how",
            ),
            (4, {"nudge": {"ulps": 1}}, 0, "nudge must not change"),
            (4, {"model": {"init_std": 0.1}}, 0, "model.init_std must not change, it only decides"),
            (4, {"model": {"qk_norm": True}}, 0, "qk_norm must not change, the checkpoint has the"),
            (
                4,
                {"optimizer": {"name": "sgd"}},
                0,
                "optimizer.name must not change, its state would",
            ),
            (4, {"train": {"steps": 30}}, 0, "train.steps must be 10 as in the baseline, is 30"),
            (4, {"attention": {"implementation": "flesh"}}, 0, "got 'flesh'; nearest: flash"),
            (4, {}, 3, "until must be from 5 to 10, got 3"),
            (10, {}, 0, "at must be a step before the run's last, 10, got 10"),
        ],
    ),
)
def test_what_can_not_be_forked_is_said(parent, at, changes, until, message):
    with pytest.raises(ValueError, match=message):
        plan_fork(parent, at, changes, until=until)


def test_a_damaged_checkpoint_is_no_start(parent):
    path = parent.checkpoint(6)
    before = path.read_bytes()
    path.write_bytes(before[:-9] + b"x" + before[-8:])
    with pytest.raises(ValueError, match=r"step-00000006.ckpt is damaged"):
        plan_fork(parent, 6, {})
    path.write_bytes(before)


@pytest.mark.slow
def test_to_plan_a_fork_imports_no_module_of_the_users_here(parent):
    own = {"attention": {"implementation": "tests.stability.study.own_threads:attend"}}
    threads = torch.get_num_threads()
    run = plan_fork(parent, 4, own, name="own")
    assert run.arm.diff
    assert "tests.stability.study.own_threads" not in sys.modules
    assert torch.get_num_threads() == threads


@pytest.mark.long
@pytest.mark.slow
def test_a_killed_fork_goes_on_to_the_same_bits(write_study, tmp_path):
    # all of it in processes of the command: one that has imported more is another one
    def stability(
        *words, code="from stability.cli.main import main; import sys; main(sys.argv[1:])"
    ):
        return subprocess.run(
            [sys.executable, "-c", code, *map(str, words)],
            env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"},
            capture_output=True,
            timeout=240,
        ).returncode

    deadly = (
        "import os, sys\n"
        "from stability.callbacks.progress import ProgressCallback\n"
        "from stability.cli.main import main\n"
        "from stability.study import fork\n"
        "run_fork = fork.run_fork\n"
        "fork.run_fork = lambda *given: run_fork(*given, isolated=False)\n"
        "end = ProgressCallback.on_train_batch_end\n"
        "def deadly(self, trainer, *rest):\n"
        "    end(self, trainer, *rest)\n"
        "    if trainer.global_step == 8: os.kill(os.getpid(), 9)\n"
        "ProgressCallback.on_train_batch_end = deadly\n"
        "main(sys.argv[1:])\n"
    )
    assert stability("run", write_study(_edit), "--out", tmp_path, "--wandb", "disabled") == 0
    parent = RunPaths.for_run(tmp_path / "tiny", "baseline", 0)
    words = ["fork", parent.root, "--at", "4", "--set", "precision=32-true", "--name"]
    assert stability(*words, "killed", code=deadly) == -signal.SIGKILL
    assert stability(*words, "killed") == 0
    assert stability(*words, "whole") == 0
    forks = [RunPaths.for_run(tmp_path / "tiny" / "forks", x, 0) for x in ("killed", "whole")]
    first, second = (read_manifest(fork.manifest).hashes for fork in forks)
    assert first == second
    assert forks[0].metrics.read_bytes() == forks[1].metrics.read_bytes()


def test_halving_finds_the_one_part_that_carries_the_drift():
    calls = []

    def measure(parts):
        calls.append(parts)
        return 0.01 * len(parts) + ("e" in parts)

    found = halve("abcdefg", measure)
    assert found[-1].parts == ("e",)
    assert len(calls) == 1 + 2 * 3
    assert [each.drift for each in found] == [measure(each.parts) for each in found]


def test_a_part_that_diverges_carries_a_divergence():
    found = halve("abcd", lambda parts: math.inf if "c" in parts else 0.1)
    assert found[-1].parts == ("c",)
    together = halve("ab", lambda parts: math.inf if len(parts) == 2 else 0.1)
    assert together[-1].parts == ("a", "b")


def test_halving_stops_where_the_parts_act_together():
    found = halve("abcd", lambda parts: 1.0 if set("bc") <= set(parts) else 0.1)
    assert found[-1].parts == tuple("abcd")
    assert halve("ab", lambda parts: 0.0)[-1].drift == 0.0


@pytest.mark.slow
def test_bisecting_forks_each_half_of_the_layers(parent, capsys):
    words = ["bisect", str(parent.root), "--at", "4", "--until", "10"]
    change = ["--set", "attention={implementation: flash, profile: all_bf16}"]
    assert main([*words, *change, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["parts"] for each in found[:1]] == [["layer_0", "layer_1"]]
    assert {tuple(each["parts"]) for each in found} >= {("layer_0",), ("layer_1",)}
    for each in found:
        only = {"attention": {**FLASH["attention"], "layers": each["parts"]}}
        run = _fork(parent, 4, only, name="only-" + "-".join(each["parts"]))
        assert fork_drifts(run)[10] == each["rel_l2"] > 0
    assert main([*words, *change]) == 0
    assert "of the drift, from step 4 to 10." in capsys.readouterr().out


@pytest.mark.slow
def test_bisecting_names_the_rounding_point(parent, capsys):
    words = ["bisect", str(parent.root), "--at", "4", "--over", "points", "--json"]
    numerics = "attention.numerics={accumulator: e5m2, lse: bf16}"
    assert main([*words, "--set", "attention.implementation=flash", "--set", numerics]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found[0]["parts"] == ["accumulator", "lse"]
    assert found[-1]["parts"] == ["accumulator"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--at", "4", "--set", "precision=32-true"], "changes must be of the attention, got prec"),
        (["--at", "4", "--over", "points", "--set", "attention.profile=plain"], "needs a change"),
        (["--at", "4", "--until", "9", "--set", "attention.implementation=flash"], "7, 10"),
        (
            ["--at", "10", "--set", "attention.implementation=flash"],
            "bisect: at must be a step with a snapshot after it, got 10; ",
        ),
        (
            ["--at", "5", "--set", "attention.implementation=flash"],
            "stability: bisect: at must be a step with a checkpoint, got 5; ",
        ),
        (["--at", "4"], "of the attention, got none; e.g. --set attention.profile=fa3"),
        (
            ["--at", "4", "--set", "attention=flash"],
            "--set must name a part of the attention, as attention.implementation=flash or ",
        ),
        (["--at", "4", "--over", "points", "--set", "attention.implementation=flash"], "sets none"),
    ],
)
def test_what_can_not_be_bisected_is_one_line(parent, capsys, words, message):
    with pytest.raises(SystemExit) as caught:
        main(["bisect", str(parent.root), *words])
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("over", ["layers", "points"])
def test_a_run_that_changes_a_part_already_is_not_bisected(study, capsys, over):
    partial = RunPaths.for_run(study, "flash_layer_1", 0)
    change = ["--set", "attention.profile=fa2"]
    with pytest.raises(SystemExit):
        main(["bisect", str(partial.root), "--at", "4", "--over", over, *change])
    said = capsys.readouterr().err
    assert "must be the same in every layer and direction, got layers layer_1, direct" in said


@pytest.mark.parametrize("verb", ["fork", "bisect"])
def test_what_is_no_run_is_said_in_one_line(study, capsys, verb):
    with pytest.raises(SystemExit):
        main([verb, str(study), "--at", "4"])
    said = capsys.readouterr().err
    assert f"{verb}: run must be a run's folder, got '{study}'; it is runs/<study>/<arm>" in said
    assert said.count("\n") == 1


def test_the_fork_command_shows_the_drift_by_step(parent, capsys):
    words = ["fork", str(parent.root), "--at", "4", "--set", "attention.implementation=flash"]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "drift from the parent" in shown
    assert "baseline.at-4.to-10.attention.implementation-flash." in shown
    with pytest.raises(SystemExit) as caught:
        main(["fork", str(parent.root), "--at", "4", "--set", "attention"])
    assert caught.value.code == 2
    assert "--set must be KEY=VALUE" in capsys.readouterr().err
