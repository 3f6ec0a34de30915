"""Which arrays are submitted, with which dependencies, and what is told where Slurm lacks."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stability.execute.executor import StudyCommand
from stability.execute.job_record import JobArray
from stability.execute.slurm import SlurmArrays, plan_arrays, tasks_of
from tests.stability.execute.runs import end, plain_runs

ARMS = ("baseline", "nudge", "fp32")


def _not_queued(key):
    return None


def _command(folder):
    return StudyCommand(words=("run", "study.yaml"), folder=folder, name="tiny")


def test_baselines_are_one_array_and_each_arm_follows_seed_by_seed(tmp_path):
    baselines, *others = plan_arrays(plain_runs(tmp_path, ARMS, (3, 5)), _not_queued)
    assert (baselines.arm, baselines.seeds, baselines.after) == ("baseline", (3, 5), None)
    assert [(each.arm, each.seeds) for each in others] == [("nudge", (3, 5)), ("fp32", (3, 5))]
    submitted = JobArray(name="n", arm="baseline", seeds=(3, 5), id="17")
    for each in others:
        assert each.after is not None
        assert each.dependency(submitted) == "aftercorr:17"


def test_seeds_whose_baseline_is_kept_wait_for_nothing(tmp_path):
    runs = plain_runs(tmp_path, ("baseline", "nudge"), (0, 1, 2))
    end(runs[0])
    planned = plan_arrays(runs[1:], _not_queued)
    found = {each.seeds: each.after for each in planned if each.arm == "nudge"}
    assert found[(0,)] is None
    after = found[(1, 2)]
    assert after is not None
    assert after.seeds == (1, 2)


def test_a_single_seed_of_an_older_array_waits_for_its_own_baseline(tmp_path):
    older = JobArray(name="n", arm="baseline", seeds=(0, 1, 2), id="17")
    runs = [run for run in plain_runs(tmp_path, ("baseline", "nudge"), (0, 1, 2)) if run.seed]
    planned = plan_arrays(runs, lambda key: older if key[0] == "baseline" else None)
    assert [(each.seeds, each.dependency(each.after)) for each in planned] == [
        ((1,), "afterok:17_1"),
        ((2,), "afterok:17_2"),
    ]


@settings(max_examples=30)
@given(st.data())
def test_every_run_that_is_not_under_way_is_planned_once_and_after_its_baseline(
    tmp_path_factory, data
):
    runs = plain_runs(tmp_path_factory.mktemp("study"), ARMS, (0, 1, 2))
    of_seed = {run.seed: run for run in runs if run.baseline is None}
    for seed in data.draw(st.sets(st.sampled_from([0, 1, 2]))):
        end(of_seed[seed])
    queued = data.draw(st.sets(st.sampled_from([(run.arm.name, run.seed) for run in runs])))
    older = {arm: JobArray(name=arm, arm=arm, seeds=(0, 1, 2), id="9") for arm in ARMS}
    left = [run for run in runs if not run.paths.manifest.exists()]
    planned = plan_arrays(left, lambda key: older[key[0]] if key in queued else None)
    keys = [(each.arm, seed) for each in planned for seed in each.seeds]
    wanted = {(run.arm.name, run.seed) for run in left} - queued
    assert len(keys) == len(set(keys))
    assert set(keys) == wanted
    for each in planned:
        for seed in each.seeds if each.arm != "baseline" else ():
            is_kept = of_seed[seed].paths.manifest.exists()
            assert (each.after is None) == is_kept
            # a number in one array is the same seed's in the other, or one job waits for one
            assert each.after is None or each.seeds in (each.after.seeds, (seed,))


def test_ranks_are_asked_for_each_arm(tmp_path):
    runs = plain_runs(tmp_path, ARMS, (0,))
    planned = plan_arrays(runs, _not_queued, lambda run: 4 if run.arm.name == "fp32" else 1)
    assert {each.arm: each.ranks for each in planned} == {"baseline": 1, "nudge": 1, "fp32": 4}


@pytest.mark.parametrize(
    ("ranks", "options", "expected"),
    [
        (1, {"gpus-per-node": "8"}, {"ntasks": 1}),
        (8, {}, {"ntasks": 1}),
        (8, {"gpus-per-node": "8"}, {"ntasks": 1}),
        (8, {"gpus-per-node": "a100:4"}, {"nodes": 2, "ntasks": 8, "ntasks-per-node": 4}),
        (9, {"gpus-per-node": "4"}, {"nodes": 3, "ntasks": 9, "ntasks-per-node": 4}),
        (2, {"ntasks-per-node": "4"}, {"nodes": 1, "ntasks": 2, "ntasks-per-node": 4}),
        (4, {"ntasks-per-node": "1", "gpus-per-node": "8"}, {"nodes": 4, "ntasks": 4}),
    ],
)
def test_ranks_that_one_node_has_no_room_for_are_tasks_on_several(ranks, options, expected):
    assert expected.items() <= tasks_of(ranks, options).items()


def test_an_option_that_must_be_a_number_is_named():
    with pytest.raises(ValueError, match=r"--slurm\.gpus-per-node must be a number, got 'a100'"):
        tasks_of(8, {"gpus-per-node": "a100"})


def test_what_lacks_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "submitit", None)
    with pytest.raises(ValueError, match=r"pip install 'training-stability\[slurm\]'"):
        SlurmArrays(_command(tmp_path), {})
    monkeypatch.setitem(__import__("sys").modules, "submitit", pytest)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="needs sbatch, which is not on PATH"):
        SlurmArrays(_command(tmp_path), {})
