"""Each part of the pair contract, broken once and refused."""

import json
from dataclasses import replace

import pytest
import yaml

from stability.analysis.ladder import ladder_of
from stability.analysis.pair_contract import ContractError, axis_of, check_batches, check_start
from stability.analysis.study_records import read_study
from stability.config.arms import expand
from stability.config.diff import hash_without, recorded_config
from stability.config.load import load_study
from stability.records.manifest import read_manifest
from stability.records.paths import RunPaths
from stability.study import train_run
from tests.stability.sealing import seal


def _manifests(study, candidate="flash_fa2"):
    return tuple(
        read_manifest(RunPaths.for_run(study, arm, 0).manifest) for arm in ("baseline", candidate)
    )


def _arm(write_study, changes):
    study = load_study(write_study(lambda c: c["arms"].update(odd=changes)), None)
    return next(arm for arm in expand(study) if arm.name == "odd")


def test_an_honest_pair_passes(trained):
    check_start(*_manifests(trained))
    paths = [RunPaths.for_run(trained, arm, 0) for arm in ("baseline", "flash_fa2")]
    check_batches(*paths, step=6)


def test_another_environment_is_refused(trained):
    baseline, candidate = _manifests(trained)
    other = replace(candidate, environment={**candidate.environment, "package.torch": "1.0"})
    with pytest.raises(
        ContractError, match=r"flash_fa2, seed 0: environment.package.torch .* is '1.0'"
    ):
        check_start(baseline, other)


def _importing(manifest, *keys, **changes):
    return replace(
        manifest, environment={**manifest.environment, **dict.fromkeys(keys, "abc")}, **changes
    )


@pytest.mark.parametrize("arm", ["fp32", "rerun", "init_seed"])
@pytest.mark.parametrize("by_candidate", [True, False])
def test_a_module_that_one_run_alone_imported_is_refused_but_of_an_attention(
    trained, arm, by_candidate
):
    def pair(candidate):
        found = _manifests(trained, candidate)
        both = (found[0], _importing(found[1], "module.mine"))
        return both if by_candidate else (_importing(found[0], "module.mine"), found[1])

    with pytest.raises(ContractError, match=r"environment\.module\.mine must be"):
        check_start(*pair(arm))
    check_start(*pair("flash_fa2"))


@pytest.mark.parametrize(
    "key",
    ["module.torch.optim.adamw", "module.lightning.pytorch.plugins", "module.sitecustomize"],
)
def test_no_attention_is_a_reason_for_another_torch_or_hook(trained, key):
    baseline, candidate = _manifests(trained)
    with pytest.raises(ContractError, match=rf"environment\.{key} must be"):
        check_start(baseline, _importing(candidate, key))
    other = replace(candidate, environment={**candidate.environment, key: "other"})
    with pytest.raises(ContractError, match=rf"environment\.{key} must be"):
        check_start(_importing(baseline, key), other)
    check_start(_importing(baseline, key), _importing(candidate, key))


def test_a_plug_in_may_be_an_attentions_and_a_copy_of_what_the_baseline_took_may_not(trained):
    baseline, candidate = _manifests(trained)
    keys = ("package.my-attention", "module.my_attention.core")
    check_start(baseline, _importing(candidate, *keys))
    check_start(_importing(baseline, *keys), _importing(candidate, *keys, "module.my_attention"))
    with pytest.raises(ContractError, match=r"environment\.module\.my_attention\.core must be"):
        check_start(_importing(baseline, keys[0]), _importing(candidate, *keys))


def test_a_module_of_the_attention_that_one_probe_looks_at_is_free(trained):
    baseline, candidate = _manifests(trained, "rerun")
    probe = {"every": 2, "shadows": [{"implementation": "mine:attend"}]}
    watched = replace(candidate, config={**candidate.config, "probe": probe})
    check_start(baseline, _importing(watched, "module.mine"))
    off = replace(candidate, config={**candidate.config, "probe": {**probe, "every": 0}})
    unwatched = replace(baseline, config={**baseline.config, "probe": {"every": 0}})
    with pytest.raises(ContractError, match=r"environment\.module\.mine must be"):
        check_start(unwatched, _importing(off, "module.mine"))
    other = _importing(baseline, "module.mine")
    other.environment["module.mine"] = "other"
    with pytest.raises(ContractError, match=r"environment\.module\.mine must be"):
        check_start(other, _importing(watched, "module.mine"))


@pytest.mark.parametrize("key", ["text", "init_weights", "config_less_axis"])
def test_another_text_or_start_is_refused(trained, key):
    baseline, candidate = _manifests(trained)
    other = replace(candidate, hashes={**candidate.hashes, key: "abc"})
    with pytest.raises(ContractError, match=rf"hashes.{key} must be the baseline's .* is 'abc'"):
        check_start(baseline, other)


def test_another_start_is_what_a_seed_arm_is_for(trained):
    baseline, candidate = _manifests(trained, "init_seed")
    assert baseline.hashes["init_weights"] != candidate.hashes["init_weights"]
    check_start(baseline, candidate)


def test_another_batch_is_refused_with_its_number(trained, tmp_path):
    paths = [RunPaths.for_run(trained, arm, 0) for arm in ("baseline", "flash_fa2")]
    other = RunPaths.for_run(tmp_path, "flash_fa2", 0)
    other.metrics.parent.mkdir(parents=True)
    lines = [json.loads(line) for line in paths[1].metrics.read_text().splitlines()]
    for line in lines:
        if "batch_hash" in line and line["step"] >= 4:
            line["batch_hash"] = "f" * 64
    other.metrics.write_text("".join(seal(line) for line in lines))
    check_batches(paths[0], other, step=3)
    with pytest.raises(ContractError, match=r"flash_fa2: batch 4 differs .*'ffff"):
        check_batches(paths[0], other, step=6)


def test_two_axes_in_one_arm_are_refused(write_study):
    arm = _arm(write_study, {"precision": "32-true", "nudge": {"ulps": 1}})
    with pytest.raises(ContractError, match=r"arms.odd: must differ in one axis.*nudge"):
        axis_of(arm)


@pytest.mark.slow
def test_a_study_may_allow_two_axes_and_the_arm_is_called_confounded(
    write_study, run_tiny, tmp_path
):
    def edit(content):
        both = {"precision": "32-true", "optimizer": {"eps": 1e-6}}
        content["arms"] = {"baseline": {}, "both": both, "eps": {"optimizer": {"eps": 1e-6}}}
        content.update(seeds=[0], yardstick="both", allow_many=True)

    run_tiny(load_study(write_study(edit)), tmp_path)
    rows = {row.arm: row for row in ladder_of(read_study(tmp_path / "tiny")).rows}
    assert rows["both"].axis == "many"
    said = "confounded: bf16-mixed -> 32-true; epsilon of Adam: 1e-08 -> 1e-06"
    assert rows["both"].change == said
    assert (rows["eps"].axis, rows["eps"].state) == ("optimizer.eps", "finished")
    assert rows["eps"].rel_l2.last.mean > 0


def test_what_no_arm_may_change_is_refused_with_the_reason(write_study):
    arm = _arm(write_study, {"train": {"steps": 5}})
    said = r"arms.odd: train.steps must be 6 as in the baseline, is 5: .* compared step by step"
    with pytest.raises(ContractError, match=said):
        axis_of(arm, allow_many=True)


def test_several_values_are_one_change_where_the_arm_declares_it(write_study):
    both = {"optimizer": {"lr": 0.1, "eps": 1e-6}}
    assert axis_of(_arm(write_study, {**both, "change": "optimizer"})) == "optimizer"
    with pytest.raises(ContractError, match=r"one axis, differs in .* by `change: optimizer`"):
        axis_of(_arm(write_study, both))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("optimizer.lr", r"hold all that differs, optimizer.lr, optimizer.eps, got 'optimizer.lr'"),
        ("precision", r"hold all that differs, optimizer.lr, optimizer.eps, got 'precision'"),
        ("opt", r"hold all that differs"),
    ],
)
@pytest.mark.parametrize("allow_many", [True, False])
def test_a_declared_change_must_hold_all_that_differs(write_study, change, says, allow_many):
    arm = _arm(write_study, {"optimizer": {"lr": 0.1, "eps": 1e-6}, "change": change})
    with pytest.raises(ContractError, match=says):
        axis_of(arm, allow_many=allow_many)


def test_a_declared_change_is_of_one_group(write_study):
    both = {"train": {"batch_size": 2, "compile": "eager"}, "change": "train"}
    with pytest.raises(ContractError, match=r"of one group, got 'train', which is batch and com"):
        axis_of(_arm(write_study, both))


def test_a_change_that_is_declared_and_not_made_is_refused(write_study):
    with pytest.raises(ContractError, match=r"hold all that differs, nothing, got 'optimizer'"):
        axis_of(_arm(write_study, {"change": "optimizer"}))


@pytest.mark.slow
def test_an_arm_that_breaks_the_contract_while_it_runs_fails_and_the_others_go_on(
    write_study, run_tiny, tmp_path, monkeypatch
):
    def edit(content):
        arms = content["arms"]
        content.update(seeds=[0], yardstick="fp32")
        content["arms"] = {k: arms[k] for k in ("baseline", "rerun", "fp32")}

    honest = train_run.load_data

    def crooked(config, *ranks):
        data = honest(config, *ranks)
        return data if config.precision != "bf16-mixed" or crooked.calls.pop(0) else _shifted(data)

    def _shifted(data):
        data.order_seed = 99
        return data

    crooked.calls = [True, False]  # the baseline is honest, the rerun reads other batches
    monkeypatch.setattr(train_run, "load_data", crooked)
    ended = run_tiny(load_study(write_study(edit), None), tmp_path / "runs").ended
    assert [state for _, _, state, _ in ended] == ["finished", "failed", "finished"]
    assert "pair contract: rerun: batch 1 differs" in ended[1][3]
    manifest = read_manifest(RunPaths.for_run(tmp_path / "runs" / "tiny", "rerun", 0).manifest)
    assert manifest.state == "failed"
    assert yaml.safe_load(manifest.message.split(":")[0]) == "pair contract"


def test_a_candidate_in_another_environment_is_refused_before_its_first_step(
    write_study, run_tiny, tmp_path, monkeypatch
):
    def edit(content):
        content.update(seeds=[0], yardstick="fp32")
        content["arms"] = {k: content["arms"][k] for k in ("baseline", "fp32")}

    honest = train_run.environment
    threads = iter([1, 2])
    monkeypatch.setattr(train_run, "environment", lambda: {**honest(), "threads": next(threads)})
    ended = run_tiny(load_study(write_study(edit), None), tmp_path / "runs").ended
    assert [state for _, _, state, _ in ended] == ["finished", "failed"]
    assert "environment.threads must be the baseline's 1, is 2" in ended[1][3]
    run = RunPaths.for_run(tmp_path / "runs" / "tiny", "fp32", 0)
    assert not run.metrics.exists()
    assert read_manifest(run.manifest).step == 0


def test_weights_that_a_change_adds_are_free_and_all_others_must_begin_alike(trained):
    baseline, rerun = _manifests(trained, "rerun")
    change = {"model.qk_norm": [False, True]}
    config = {**rerun.config, "model": {**rerun.config["model"], "qk_norm": True}}
    less = hash_without(recorded_config(config, "here"), change)
    hashes = {**rerun.hashes, "init_weights": "abc", "config_less_axis": less}
    normed = replace(rerun, config=config, diff=change, hashes=hashes)
    check_start(baseline, normed)
    other = replace(normed, hashes={**hashes, "shared_weights": "abc"})
    with pytest.raises(ContractError, match=r"hashes.shared_weights must be the base.* is 'abc'"):
        check_start(baseline, other)
    del hashes["shared_weights"]
    with pytest.raises(ContractError, match=r"hashes.shared_weights must be .* is None"):
        check_start(baseline, replace(normed, hashes=hashes))
