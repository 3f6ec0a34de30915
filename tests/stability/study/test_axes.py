"""Any declared change of the config trains as a pair: it moves the weights, and the pair holds."""

import json
import shutil
import warnings
from dataclasses import replace

import pytest
import torch

from stability.analysis.arm_summary import summarise_arm
from stability.analysis.ladder import ladder_of
from stability.analysis.pair_contract import prove_pair
from stability.analysis.study_check import check_pairs
from stability.analysis.study_records import find_arm, read_study
from stability.config.load import load_study
from stability.metrics.drift import drift, weights_of_both
from stability.records.manifest import read_manifest, write_manifest
from stability.records.metric_log import read_metrics
from stability.records.metric_names import DRIFT_FROM, DRIFT_OF
from stability.records.paths import RunPaths
from stability.records.run_files import read_run_snapshot
from stability.study.remade_drifts import remake_drifts
from tests.conftest import run_quietly, write_tiny
from tests.stability.sealing import seal

OWN = """
import torch

class Signs(torch.optim.Optimizer):
    def __init__(self, groups, lr):
        super().__init__(groups, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        loss = closure() if closure else None
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad.sign(), alpha=group["lr"])
        return loss

def fill(matrix, generator):
    matrix.uniform_(-0.05, 0.05, generator=generator)
"""
# arm: what it lays over the base, its axis, the group that tables and W&B show
CHANGES = {
    "lr": ({"optimizer": {"lr": 2e-3}}, "optimizer.lr", "optimizer"),
    "warmup": ({"optimizer": {"warmup_steps": 4}}, "optimizer.warmup_steps", "schedule"),
    "betas": ({"optimizer": {"betas": [0.9, 0.999]}}, "optimizer.betas", "optimizer"),
    "decay": ({"optimizer": {"weight_decay": 0.5}}, "optimizer.weight_decay", "optimizer"),
    "clip": ({"train": {"grad_clip": 0.05}}, "train.grad_clip", "optimizer"),
    "state": ({"optimizer": {"state": "bf16"}}, "optimizer.state", "optimizer"),
    "sgd": (
        {"optimizer": {"name": "sgd", "momentum": 0.5}, "change": "optimizer"},
        "optimizer",
        "optimizer",
    ),
    "muon": (
        {"optimizer": {"name": "muon", "lr": 2e-3}, "change": "optimizer"},
        "optimizer",
        "optimizer",
    ),
    "signs": ({"optimizer": {"name": "own_axes:Signs"}}, "optimizer.name", "optimizer"),
    "batch": ({"train": {"batch_size": 2}}, "train.batch_size", "batch"),
    "accumulated": (
        {"train": {"trainer": {"accumulate_grad_batches": 2}}},
        "train.trainer.accumulate_grad_batches",
        "batch",
    ),
    "order": ({"seed": {"order_offset": 7}}, "seed.order_offset", "data"),
    "dropout": ({"model": {"dropout": 0.1}}, "model.dropout", "model"),
    "heads": ({"model": {"heads": 1}}, "model.heads", "model"),
    "qk_norm": ({"model": {"qk_norm": True}}, "model.qk_norm", "model"),
    "std": ({"model": {"init_std": 0.03}}, "model.init_std", "init"),
    "scheme": ({"model": {"init": "orthogonal"}}, "model.init", "init"),
    "own_init": ({"model": {"init": "own_axes:fill"}}, "model.init", "init"),
    "seed": ({"seed": {"init_offset": 7}}, "seed.init_offset", "init"),
    "modules": (
        {"precision": {"default": "bf16-mixed", "*.mlp_*": "emulated:e4m3"}},
        "precision",
        "precision",
    ),
    "matmul": ({"train": {"matmul_precision": "medium"}}, "train.matmul_precision", "precision"),
    "loose": ({"train": {"deterministic": False}}, "train.deterministic", "environment"),
    "compiled": ({"train": {"compile": "aot_eager"}}, "train.compile", "compile"),
    "inductor": (
        {
            "train": {"compile": "inductor", "compile_options": {"fallback_random": True}},
            "change": "train",
        },
        "train",
        "compile",
    ),
}
SAME_BATCHES = set(CHANGES) - {"batch", "accumulated", "order"}
SAME_START = set(CHANGES) - {"std", "own_init", "scheme", "seed", "qk_norm"}
MAY_COMPUTE_THE_SAME = {"matmul", "loose"}
"""By the machine: its products of FP32, and what it has that is not deterministic."""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def study(tmp_path_factory, text_file):
    folder = tmp_path_factory.mktemp("axes")

    def edit(content):
        content.update(seeds=[0], yardstick="lr")
        content["arms"] = {"baseline": {}} | {name: arm for name, (arm, *_) in CHANGES.items()}
        content["base"]["probe"] = {"every": 0}

    (folder / "own_axes.py").write_text(OWN)
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        patch.syspath_prepend(folder)
        # of torch's own making
        warnings.filterwarnings("ignore", "`torch.jit.script_method` is deprecated")
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not")
        observer = run_quietly(load_study(write_tiny(folder, text_file, edit)), folder)
    assert [end for end in observer.ended if end[2] != "finished"] == []
    return folder / "tiny"


@pytest.mark.parametrize("arm", CHANGES)
def test_a_change_moves_the_weights_and_leaves_a_pair(study, arm):
    recorded = read_study(study)
    summary = summarise_arm(recorded, ladder_of(recorded), arm)
    row = summary.row
    assert (row.state, row.axis) == ("finished", CHANGES[arm][1])
    assert summary.to_dict()["groups"] == [CHANGES[arm][2]]
    # PyTorch's own backend for debugging computes what eager does, and so proves that it does
    assert (row.rel_l2.last.mean > 0) == (arm != "compiled") or arm in MAY_COMPUTE_THE_SAME
    first, second = (RunPaths.for_run(study, name, 0) for name in ("baseline", arm))
    proof = prove_pair(first, second)
    assert proof.breach is None
    assert proof.axes == (CHANGES[arm][1],)
    hashes = [read_manifest(paths.manifest).hashes for paths in (first, second)]
    same = {name: hashes[0][name] == hashes[1][name] for name in ("batches", "init_weights")}
    assert same == {"batches": arm in SAME_BATCHES, "init_weights": arm in SAME_START}
    assert hashes[0]["held_out"] == hashes[1]["held_out"]
    losses = [read_metrics(paths.metrics)["eval/loss"] for paths in (first, second)]
    assert list(losses[0].steps) == list(losses[1].steps) == [0, 1, 2, 4, 6]
    # evaluated on the same text in the same batches, whatever an arm trains on
    same = losses[0].values[0] == losses[1].values[0]
    may_be = MAY_COMPUTE_THE_SAME | {"inductor"}
    assert same == (arm in SAME_START - {"heads", "modules"}) or arm in may_be


def test_an_undeclared_second_change_breaks_the_pair(study):
    baseline, muon = (RunPaths.for_run(study, arm, 0) for arm in ("baseline", "muon"))
    manifest = read_manifest(muon.manifest)
    # as somebody would who seals what he has changed
    write_manifest(muon.manifest, replace(manifest, axis="optimizer.name"))
    try:
        breach = prove_pair(baseline, muon).breach
    finally:
        write_manifest(muon.manifest, manifest)
    assert breach is not None
    assert "config.optimizer.name" in str(breach)


def test_an_arm_with_other_weights_drifts_over_those_that_both_have(study):
    runs = [RunPaths.for_run(study, name, 0) for name in ("baseline", "qk_norm")]
    first, second = (read_run_snapshot(paths, 0) for paths in runs)
    added = second.keys() - first.keys()
    assert sorted(name.split(".")[-2] for name in added) == ["key_norm"] * 2 + ["query_norm"] * 2
    assert all(torch.equal(first[name], second[name]) for name in first)
    recorded = read_study(study)
    arm = find_arm(recorded, "qk_norm")
    assert arm.runs[0].drift("rel_l2")[0] == 0.0
    last = weights_of_both(*(read_run_snapshot(paths, 6) for paths in reversed(runs)))
    assert arm.runs[0].drift("rel_l2")[6] == drift(*last)["all"]["rel_l2"]
    assert "they differ in model.qk_norm alone; drift is over the weights that both have" in (
        prove_pair(*runs).sentence
    )
    checked = {each.arm: each for each in check_pairs(recorded, every_drift=True)}
    assert checked["qk_norm"].state == "holds"


def test_a_drift_over_the_weights_of_both_is_computed_anew_as_it_was(study, tmp_path):
    folder = shutil.copytree(study, tmp_path / "tiny")
    paths = RunPaths.for_run(folder, "qk_norm", 0)
    before = find_arm(read_study(folder), "qk_norm").runs[0].drift("rel_l2")
    lines = [json.loads(line) for line in paths.metrics.read_text().splitlines()]
    # as of a version whose drifts named no parents
    without = [{k: v for k, v in x.items() if k not in (DRIFT_OF, DRIFT_FROM)} for x in lines]
    paths.metrics.write_text("".join(map(seal, without)))
    runs = {arm: RunPaths.for_run(folder, arm, 0) for arm in ("baseline", "qk_norm")}
    rows = remake_drifts(folder, 0, runs, lambda arm, said: None)
    assert {row.step: row.drifts["drift/all/rel_l2"] for row in rows} == before
