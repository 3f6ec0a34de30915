"""All arms begin from one trained state: its weights, checked first, and its optimizer's state."""

import re
from dataclasses import replace

import pytest
import torch

from stability.analysis.pair_contract import ContractError, check_start, prove_pair
from stability.callbacks.random_numbers import RandomNumbers
from stability.config.arms import expand
from stability.config.convert import ConfigError
from stability.config.load import load_study
from stability.metrics.drift import ALL, drift
from stability.records.dcp_files import write_dcp
from stability.records.manifest import read_manifest
from stability.records.paths import RunPaths
from stability.records.run_files import read_run_snapshot
from stability.records.snapshots import read_snapshot, write_snapshot
from stability.study.assemble import assemble
from stability.study.fork import plan_fork
from stability.study.sharded_checkpoints import read_whole
from tests.conftest import run_quietly, write_tiny


def _plain(content):
    content.update(seeds=[0], yardstick="", arms={"baseline": {}})
    content["base"]["train"].update(steps=4, snapshot_steps=[2], checkpoint_every=2)
    content["base"]["probe"] = {"every": 0}


@pytest.fixture(scope="module")
def parent(tmp_path_factory, text_file):
    """A run that has trained four updates, whose state others begin from."""
    folder = tmp_path_factory.mktemp("parent")
    run_quietly(load_study(write_tiny(folder, text_file, _plain)), folder)
    return RunPaths.for_run(folder / "tiny", "baseline", 0)


@pytest.fixture
def weights(parent):
    return read_snapshot(parent.snapshot(4))


def _late(start, **arms):
    def edit(content):
        _plain(content)
        content["name"] = "late"
        content["base"]["start"] = str(start)
        content["arms"].update(arms)

    return edit


def _begun(write_study, start):
    return assemble(load_study(write_study(_late(start))).base)


FORMS = ["run", "snapshot", "checkpoint", "state_dict", "nested", "wrapped", "folder", "dcp"]


def _written(form, parent, weights, folder):
    """Return a path that holds the state of `parent` in some form."""
    if form == "run":
        return parent.root
    if form == "snapshot":
        return parent.snapshot(4)
    if form == "checkpoint":
        return parent.checkpoint(4)
    if form == "folder":
        (folder / "hf").mkdir()
        write_snapshot(folder / "hf" / "model.safetensors", weights)
        return folder / "hf"
    if form == "dcp":
        # as accelerate has it, a folder above
        write_dcp(folder / "step-4" / "0", {f"module.{x}": y for x, y in weights.items()}).wait()
        return folder / "step-4"
    content = {
        "state_dict": weights,
        "nested": {"model": weights, "step": 4},
        "wrapped": {f"module._orig_mod.{name}": value for name, value in weights.items()},
    }[form]
    torch.save(content, folder / "weights.pt")
    return folder / "weights.pt"


@pytest.mark.parametrize("form", FORMS)
def test_weights_are_read_from_all_that_compare_reads(write_study, parent, weights, tmp_path, form):
    parts = _begun(write_study, _written(form, parent, weights, tmp_path))
    state = parts.model.state_dict()
    assert all(torch.equal(state[name], weights[name]) for name in state)


@pytest.mark.slow
def test_arms_begin_from_one_state_and_are_pairs(write_study, run_tiny, parent, weights, tmp_path):
    arms = {
        "rerun": {},
        "nudge": {"nudge": {"ulps": 1}},
        "lr": {"optimizer": {"lr": 3e-3}},
        "sgd": {"optimizer": {"name": "sgd"}},
        "other": {"start": str(parent.snapshot(2))},
    }
    study = load_study(write_study(_late(parent.checkpoint(4), **arms)))
    ended = run_tiny(study, tmp_path).ended
    assert [end[2:] for end in ended] == [("finished", "")] * 6
    runs = {name: RunPaths.for_run(tmp_path / "late", name, 0) for name in ("baseline", *arms)}
    began = {name: read_snapshot(run.snapshot(0)) for name, run in runs.items()}
    for name in ("baseline", "lr", "sgd"):
        assert all(torch.equal(began[name][key], weights[key]) for key in weights)
    moved = {key: (began["nudge"][key] - weights[key]).abs().max() for key in weights}
    assert all(0 < distance < 1e-6 for distance in moved.values())
    for name, run in runs.items():
        if name != "baseline":
            assert prove_pair(runs["baseline"], run).state == "holds", name
    ends = {name: read_manifest(run.manifest).hashes["final_weights"] for name, run in runs.items()}
    assert ends["rerun"] == ends["baseline"]
    assert len(set(ends.values())) == len(ends) - 1
    with pytest.raises(ValueError, match="start"):
        plan_fork(runs["baseline"], 2, {"start": str(parent.snapshot(2))})


def test_the_optimizers_state_is_taken_over_with_the_arms_own_settings(write_study, parent):
    study = load_study(write_study(_late(parent.checkpoint(4), lr={"optimizer": {"lr": 3e-3}})))
    saved = torch.load(parent.checkpoint(4), weights_only=True)["optimizer_states"][0]
    for arm in expand(study):
        optimizer = assemble(arm.config).module.configure_optimizers()["optimizer"]
        found = optimizer.state_dict()
        for index, state in saved["state"].items():
            assert torch.equal(found["state"][index]["exp_avg_sq"], state["exp_avg_sq"])
            assert found["state"][index]["step"] == 4
        assert {group["initial_lr"] for group in found["param_groups"]} == {arm.config.optimizer.lr}


@pytest.mark.slow
def test_the_optimizers_state_of_a_run_over_ranks_is_taken_over(write_study, run_tiny, tmp_path):
    """Whatever layout wrote it, and whatever layout begins from it."""

    def sharded(content):
        _plain(content)
        content["base"] |= {"parallel": {"shard": 2}, "precision": "32-true"}

    def late(content):
        _late(folder, sharded={"parallel": {"shard": 2}})(content)
        content["base"]["precision"] = "32-true"

    run_tiny(load_study(write_study(sharded)), tmp_path, isolated=True)
    folder = RunPaths.for_run(tmp_path / "tiny", "baseline", 0).sharded_checkpoint(4)
    saved = read_whole(folder)["optimizer_states"][0]["state"]
    optimizer = _begun(write_study, folder).module.configure_optimizers()["optimizer"]
    found = optimizer.state_dict()["state"]
    assert found.keys() == saved.keys() != set()
    for index, state in saved.items():
        assert torch.equal(found[index]["exp_avg_sq"], state["exp_avg_sq"])
        assert found[index]["step"] == 4

    ended = run_tiny(load_study(write_study(late)), tmp_path, isolated=True).ended
    assert [end[2:] for end in ended] == 2 * [("finished", "")]
    runs = [RunPaths.for_run(tmp_path / "late", name, 0) for name in ("baseline", "sharded")]
    one, two = (read_run_snapshot(run, 4) for run in runs)
    assert 0 < drift(two, one)[ALL]["rel_l2"] < 1e-6, "another order of sums, and no more"

    # a folder of DCP's that somebody else has written may have other groups of parameters
    (folder / "rest.pt").unlink()
    optimizer = _begun(write_study, folder).module.configure_optimizers()["optimizer"]
    assert optimizer.state_dict()["state"] == {}


def test_what_holds_weights_alone_begins_with_a_fresh_optimizer(write_study, parent, weights):
    for start, name in ((parent.snapshot(4), "adamw"), (parent.checkpoint(4), "sgd")):
        base = load_study(write_study(_late(start))).base
        config = replace(base, optimizer=replace(base.optimizer, name=name))
        optimizer = assemble(config).module.configure_optimizers()["optimizer"]
        assert optimizer.state_dict()["state"] == {}


def test_the_state_of_somebody_elses_checkpoint_is_left_where_it_is(write_study, parent, tmp_path):
    content = torch.load(parent.checkpoint(4), weights_only=True)
    content["callbacks"] = {}
    torch.save(content, tmp_path / "other.ckpt")
    parts = _begun(write_study, tmp_path / "other.ckpt")
    assert parts.module.configure_optimizers()["optimizer"].state_dict()["state"] == {}


def test_arms_that_began_elsewhere_are_no_pair_unless_that_is_the_change(
    write_study, run_tiny, parent, weights, tmp_path
):
    write_snapshot(tmp_path / "start.safetensors", weights)
    study = load_study(
        write_study(_late(tmp_path / "start.safetensors", lr={"optimizer": {"lr": 2e-3}}))
    )
    run_tiny(study, tmp_path)
    was = read_manifest(RunPaths.for_run(tmp_path / "late", "baseline", 0).manifest)
    now = read_manifest(RunPaths.for_run(tmp_path / "late", "lr", 0).manifest)
    check_start(was, now)
    other = replace(now, hashes={**now.hashes, "start": "0" * 64})
    with pytest.raises(ContractError, match=r"hashes.start must be the baseline's '.*', is '000"):
        check_start(was, other)


@pytest.mark.slow
def test_a_run_is_not_resumed_from_a_file_that_has_changed(
    write_study, run_tiny, weights, tmp_path, monkeypatch
):
    path = tmp_path / "start.safetensors"
    write_snapshot(path, weights)
    study = load_study(write_study(_late(path)))

    def interrupt(self, trainer, step):
        if step == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RandomNumbers, "before_update", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run_tiny(study, tmp_path)
    name = next(iter(weights))
    write_snapshot(path, {**weights, name: weights[name] + 1})
    (ended,) = run_tiny(study, tmp_path).ended
    assert re.search("began from .* with checksum .* put the file back", ended[3])
    write_snapshot(path, weights)
    assert run_tiny(study, tmp_path).ended[0][2:] == ("finished", "")


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            lambda w: {k: v for k, v in w.items() if "layer_1.key" not in k},
            "must hold each weight of the model, lacks blocks.layer_1.key.weight and 0 of .*near",
        ),
        (
            lambda w: {**w, "blocks.layer_2.key.weight": torch.ones(2)},
            "must hold the weights of this model alone, also has blocks.layer_2.key.weight",
        ),
        (
            lambda w: {**w, "final_norm.weight": torch.ones(3)},
            r"must hold weights of the model's shapes, final_norm.weight is \(3,\) and not",
        ),
        (
            lambda w: {**w, "final_norm.weight": w["final_norm.weight"] * torch.nan},
            "must hold finite values, final_norm.weight has others",
        ),
    ],
)
def test_a_state_that_is_not_the_models_is_refused(write_study, weights, tmp_path, edit, message):
    write_snapshot(tmp_path / "start.safetensors", edit(weights))
    with pytest.raises(ValueError, match=f"start: .*start.safetensors {message}"):
        _begun(write_study, tmp_path / "start.safetensors")


def test_a_path_where_nothing_is_is_refused(write_study, tmp_path):
    with pytest.raises(ValueError, match=r"start: .*nowhere.pt"):
        _begun(write_study, tmp_path / "nowhere.pt")


def test_an_init_scheme_would_change_nothing_and_is_refused(write_study, parent):
    edit = _late(parent.snapshot(4), x={"model": {"init": "xavier"}})
    with pytest.raises(ConfigError, match=r"arms.x.model.init: would change nothing, since"):
        load_study(write_study(edit))


@pytest.mark.parametrize("of_base", [False, True])
def test_an_arm_of_other_weights_can_not_begin_from_the_state_of_one_model(
    write_study, parent, of_base
):
    edit = _late(parent.snapshot(4), x={"model": {"qk_norm": not of_base}})

    def edit_base(content):
        edit(content)
        content["base"]["model"]["qk_norm"] = of_base

    with pytest.raises(ConfigError, match=r"arms.x.model.qk_norm: must be as in the base where"):
        load_study(write_study(edit_base))
