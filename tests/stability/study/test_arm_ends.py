"""Arms that end before the baseline: their bits, their records, and what readers make of them.

The study is trained once: a rerun, a nudge and a reference of four steps beside whole runs of six.
"""

import dataclasses
import json
import shutil

import pytest

from stability.analysis.ladder import ladder_of
from stability.analysis.ladder_sentences import notes, sentence
from stability.analysis.pair_contract import prove_pair
from stability.analysis.study_hashes import compare_hashes
from stability.analysis.study_records import read_study
from stability.config.arms import describe_change
from stability.config.load import load_study
from stability.records.manifest import read_manifest, write_manifest
from stability.records.metric_log import read_metrics
from stability.records.metric_names import BATCH_HASH, TRAIN_LOSS
from stability.records.paths import RunPaths, snapshot_steps
from stability.report.live.study_summary import summary_of_study
from stability.study.run import RunConflictError
from stability.study.run_study import plan_study
from tests.conftest import train_edited
from tests.stability.sealing import seal

pytestmark = pytest.mark.slow

FLASH = {"attention": {"implementation": "flash", "profile": "fa2"}}
ORDER = ["baseline", "truth", "nudge", "rerun", "flash", "init_seed"]


def _edit(content):
    content["arms"] = {
        "flash": FLASH,
        "init_seed": {"seed": {"init_offset": 9}},
        "rerun": {"until": 4},
        "truth": {"role": "reference", "until": 4},
        "nudge": {"nudge": {"ulps": 1}, "until": 4},
    }
    content["base"]["probe"] |= {"seeds": "first"}
    content |= {"yardstick": "truth", "early_step": 2}


@pytest.fixture(scope="module")
def done(tmp_path_factory, text_file):
    """The YAML's path, and the folder of the study."""
    return train_edited(tmp_path_factory.mktemp("ends"), text_file, _edit)


@pytest.fixture
def study(done, tmp_path):
    """A copy of the trained study that a test may spoil."""
    shutil.copytree(done[1], tmp_path / "runs" / "tiny")
    return tmp_path / "runs" / "tiny"


def test_the_controls_of_a_seed_are_trained_before_its_candidates(done):
    runs = plan_study(load_study(done[0]), done[1].parent)
    assert [(run.seed, run.arm.name) for run in runs] == [
        (seed, name) for seed in (0, 1) for name in ORDER
    ]


def test_arms_are_shown_in_the_order_of_the_yaml(done):
    names = [arm.name for arm in read_study(done[1]).arms]
    assert names == ["baseline", "flash", "init_seed", "rerun", "truth", "nudge"]


@pytest.mark.parametrize("arm", ["rerun", "truth", "nudge"])
def test_an_arm_with_an_end_has_finished_there(done, arm):
    paths = RunPaths.for_run(done[1], arm, 0)
    manifest = read_manifest(paths.manifest)
    assert (manifest.state, manifest.step, manifest.until) == ("finished", 4, 4)
    assert snapshot_steps(paths) == [0, 1, 2, 4]
    found = read_metrics(paths.metrics)
    assert found[TRAIN_LOSS].steps == [0, 1, 2, 3]
    assert found["drift/all/rel_l2"].steps == [0, 1, 2, 4]


def test_its_learning_rate_follows_the_schedule_of_the_whole_length(done):
    """A schedule that ended at 4 would give a rerun other updates, so a drift that is not zero."""
    drift = read_metrics(RunPaths.for_run(done[1], "rerun", 0).metrics)["drift/all/rel_l2"]
    assert drift.values == [0.0] * 4


def test_a_run_that_is_resumed_ends_at_its_end(done, study, run_tiny):
    paths = RunPaths.for_run(study, "nudge", 0)
    whole = read_manifest(paths.manifest)
    files = {name: hash for name, hash in whole.files.items() if "00004" not in name}
    files.pop("metrics.jsonl")
    stopped = dataclasses.replace(whole, state="interrupted", step=2, files=files)
    write_manifest(paths.manifest, stopped)
    observer = run_tiny(load_study(done[0]), study.parent)
    again = read_manifest(paths.manifest)
    assert (again.state, again.step) == ("finished", 4)
    assert again.hashes["final_weights"] == whole.hashes["final_weights"]
    assert observer is not None


def test_another_end_is_another_run(done, study, run_tiny):
    asked = load_study(done[0])
    arms = asked.arms | {"nudge": asked.arms["nudge"] | {"until": 2}}
    with pytest.raises(RunConflictError, match="holds a run with until = 4, asked for 2"):
        run_tiny(dataclasses.replace(asked, arms=arms), study.parent)


def test_a_run_of_before_there_were_ends_is_one_of_the_whole_length(done, study, run_tiny):
    path = RunPaths.for_run(study, "flash", 0).manifest
    write_manifest(path, dataclasses.replace(read_manifest(path), until=0))
    run_tiny(load_study(done[0]), study.parent)
    path = RunPaths.for_run(study, "nudge", 0).manifest
    write_manifest(path, dataclasses.replace(read_manifest(path), until=0))
    with pytest.raises(RunConflictError, match="holds a run with until = 6, asked for 4"):
        run_tiny(load_study(done[0]), study.parent)


@pytest.mark.parametrize("arm", ["rerun", "truth", "nudge"])
def test_an_arm_that_ended_early_is_still_a_pair_with_its_baseline(done, arm):
    recorded = read_study(done[1])
    found = compare_hashes(recorded.arm(arm), recorded.arm("baseline"))
    assert {line.sameness for line in found["batches"].values()} == {"same"}
    assert {line.sameness for line in found["final_weights"].values()} == {"different by design"}
    runs = [RunPaths.for_run(done[1], name, 1) for name in ("baseline", arm)]
    assert prove_pair(*runs).breach is None


def test_other_batches_of_an_arm_that_ended_early_are_seen(study):
    paths = RunPaths.for_run(study, "nudge", 0)
    lines = [json.loads(line) for line in paths.metrics.read_text().splitlines()]
    spoiled = [line | ({BATCH_HASH: "0" * 64} if BATCH_HASH in line else {}) for line in lines]
    paths.metrics.write_text("".join(seal(line) for line in spoiled))
    recorded = read_study(study)
    found = compare_hashes(recorded.arm("nudge"), recorded.arm("baseline"))
    assert found["batches"][0].sameness == "different"


def test_only_the_first_seed_is_probed(done):
    for arm in ("baseline", "flash"):
        metrics = [read_metrics(RunPaths.for_run(done[1], arm, n).metrics) for n in (0, 1)]
        probed = [any(name.startswith("deviation/") for name in found) for found in metrics]
        assert probed == [True, False]


def test_a_seed_that_is_not_probed_ends_in_the_bits_of_one_that_is(done, tmp_path, run_tiny):
    asked = load_study(done[0], {"probe.seeds": "all"})
    arms = {name: asked.arms[name] for name in ("baseline", "flash")}
    changes = {"arms": arms, "seeds": (1,), "yardstick": ""}
    run_tiny(dataclasses.replace(asked, **changes), tmp_path)
    for arm in arms:
        found = [
            read_manifest(RunPaths.for_run(folder, arm, 1).manifest)
            for folder in (tmp_path / "tiny", done[1])
        ]
        assert found[0].config["probe"]["every"] == 2
        assert found[1].config["probe"]["every"] == 0
        assert found[0].hashes["final_weights"] == found[1].hashes["final_weights"]


def test_the_ladder_reads_an_ended_arm_as_far_as_it_goes(done):
    ladder = ladder_of(read_study(done[1]))
    assert (ladder.early_step, ladder.last_step, ladder.steps) == (2, 6, 6)
    nudge, flash = ladder.row("nudge"), ladder.row("flash")
    assert (nudge.rel_l2.early.n, nudge.rel_l2.last.n, nudge.final_loss.n) == (2, 0, 0)
    assert (flash.rel_l2.early.n, flash.rel_l2.last.n, flash.final_loss.n) == (2, 2, 2)
    assert nudge.state == "finished"
    assert "Planned to end early: " in notes(ladder)[-1]
    assert "truth at step 4" in notes(ladder)[-1]
    assert not any("has reached" in note for note in notes(ladder))


def test_no_sentence_gives_a_figure_that_an_ended_arm_has_not(done):
    ladder = ladder_of(read_study(done[1]))
    assert sentence(ladder, "nudge").count("step") == 1
    said = sentence(ladder, "flash")
    assert "as far as truth does at step 2" in said
    assert "no nudge arm" not in said


def test_a_study_whose_arms_have_all_ended_is_done(done):
    summary = summary_of_study(read_study(done[1]))
    assert summary.done == 1
    assert "6 arms, 2 seeds, up to 6 steps" in summary.size


def test_two_changes_of_a_reference_are_not_called_confounded():
    diff = {
        "attention.implementation": ["flash", "baseline"],
        "precision": ["bf16-mixed", "32-true"],
    }
    base = {"attention": {"implementation": "flash", "profile": ""}, "precision": "bf16-mixed"}
    said = "attention: flash -> baseline; bf16-mixed -> 32-true"
    assert describe_change("truth", "many", diff, base, "reference") == said
    assert describe_change("x", "many", diff, base) == f"confounded: {said}"
