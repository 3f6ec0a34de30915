"""A trained study: what the design promises of its records."""

import json

import pytest
import torch
from scipy.stats import wasserstein_distance

from stability.config.load import load_study
from stability.records.manifest import read_manifest
from stability.records.metric_log import read_metrics, read_text
from stability.records.metric_names import BATCH_HASH, drift_name
from stability.records.paths import RunPaths
from stability.records.snapshots import hash_state, read_snapshot

ARMS = ["baseline", "flash_all_bf16", "flash_fa2", "rerun", "nudge", "fp32", "init_seed"]
SNAPSHOTS = [0, 1, 2, 4, 6]


def _run(study, arm, seed=0):
    return RunPaths.for_run(study, arm, seed)


def test_every_run_finishes_with_a_whole_record(trained):
    assert [arm["name"] for arm in json.loads((trained / "study.json").read_text())["arms"]] == ARMS
    for arm in ARMS:
        for seed in (0, 1):
            run = _run(trained, arm, seed)
            manifest = read_manifest(run.manifest)
            assert (manifest.state, manifest.step, manifest.message) == ("finished", 6, "")
            assert all(run.snapshot(step).exists() for step in SNAPSHOTS)
            assert read_metrics(run.metrics)["train/loss"].steps == list(range(6))


@pytest.mark.parametrize("seed", [0, 1])
def test_drift_of_rerun_is_exactly_zero_for_every_parameter_at_every_step(trained, seed):
    metrics = read_metrics(_run(trained, "rerun", seed).metrics)
    distances = {name: s for name, s in metrics.items() if name.startswith("drift/")}
    parameters = read_snapshot(_run(trained, "rerun", seed).snapshot(0))
    assert {name.split("/")[1] for name in distances} == {*parameters, "all"}
    for name, series in distances.items():
        assert series.steps == SNAPSHOTS
        expected = 1.0 if name.endswith("/cosine") else 0.0
        assert series.values == [expected] * len(SNAPSHOTS), name


@pytest.mark.parametrize("arm", ["flash_all_bf16", "flash_fa2", "fp32", "init_seed"])
def test_drift_of_a_changed_arm_is_not_zero(trained, arm):
    assert read_metrics(_run(trained, arm).metrics)[drift_name("all", "rel_l2")].values[-1] > 1e-7


def test_a_nudge_of_one_ulp_moves_every_weight_by_one_ulp(trained):
    before = read_snapshot(_run(trained, "baseline").snapshot(0))
    after = read_snapshot(_run(trained, "nudge").snapshot(0))
    for name, weight in before.items():
        up = torch.nextafter(weight, torch.tensor(torch.inf))
        down = torch.nextafter(weight, torch.tensor(-torch.inf))
        assert ((after[name] == up) | (after[name] == down)).all(), name
        assert weight.numel() < 8 or ((after[name] == up).any() and (after[name] == down).any())


def test_logged_w1_is_scipys_on_the_snapshots(trained):
    metrics = read_metrics(_run(trained, "fp32").metrics)
    ours = read_snapshot(_run(trained, "fp32").snapshot(6))
    theirs = read_snapshot(_run(trained, "baseline").snapshot(6))
    for name in ours:
        expected = wasserstein_distance(ours[name].flatten(), theirs[name].flatten())
        assert metrics[drift_name(name, "w1")].values[-1] == pytest.approx(expected, rel=1e-6)


def test_arms_of_a_seed_saw_the_same_batches_and_seeds_differ(trained):
    hashes = {
        (arm, seed): read_manifest(_run(trained, arm, seed).manifest).hashes["batches"]
        for arm in ARMS
        for seed in (0, 1)
    }
    for seed in (0, 1):
        assert len({hashes[arm, seed] for arm in ARMS}) == 1
    assert hashes["baseline", 0] != hashes["baseline", 1]
    log = read_text(_run(trained, "baseline").metrics, BATCH_HASH)
    assert list(log) == [1, 2, 3, 4, 5, 6]
    assert len(set(log.values())) == 6


def test_same_initial_weights_unless_the_axis_is_the_seed(trained):
    init = {arm: read_manifest(_run(trained, arm).manifest).hashes["init_weights"] for arm in ARMS}
    assert len({init[arm] for arm in ARMS if arm != "init_seed"}) == 1
    assert init["init_seed"] != init["baseline"]


def test_manifest_names_the_engine_that_auto_became_and_the_final_weights(trained):
    run = _run(trained, "flash_fa2")
    manifest = read_manifest(run.manifest)
    assert manifest.resolved["engine"] == "twin"
    assert manifest.resolved["numerics"]["statistics"] == "fp32"
    assert manifest.diff == {
        "attention.implementation": ["baseline", "flash"],
        "attention.profile": ["", "fa2"],
    }
    assert manifest.hashes["final_weights"] == hash_state(read_snapshot(run.snapshot(6)))


def test_deviation_is_logged_per_layer_at_probed_steps_and_means_candidate_minus_baseline(trained):
    base = read_metrics(_run(trained, "baseline").metrics)
    flash = read_metrics(_run(trained, "flash_all_bf16").metrics)
    for layer in ("layer_0", "layer_1"):
        for metric in ("rel_fro", "bias", "error_ratio"):
            assert base[f"deviation/{layer}/out/{metric}"].steps == [0, 2, 4]
        # step 0: the same weights and batch, so primary and shadow merely swap places
        if layer == "layer_0":
            name = f"deviation/{layer}/out/bias"
            assert base[name].values[0] == flash[name].values[0] != 0
        assert base[f"deviation/{layer}/out/error_ratio"].values[0] > 1


@pytest.mark.slow
def test_watching_changes_nothing(write_study, run_tiny, tmp_path):
    weights = []
    for every, golden in ((0, False), (1, True)):

        def edit(content, every=every, golden=golden):
            content["base"]["probe"].update(every=every, golden=golden)
            content["arms"] = {"baseline": {}, "flash_all_bf16": content["arms"]["flash_all_bf16"]}
            content.update(seeds=[0], yardstick="flash_all_bf16")

        out = tmp_path / f"every-{every}"
        run_tiny(load_study(write_study(edit), None), out)
        weights.append(
            [
                read_manifest(_run(out / "tiny", arm).manifest).hashes["final_weights"]
                for arm in ("baseline", "flash_all_bf16")
            ]
        )
    assert weights[0] == weights[1]
    assert weights[0][0] != weights[0][1]
