"""Any declared change of the config trains as a pair: it moves the weights, and the pair holds."""

import warnings
from dataclasses import replace

import pytest

from stability.analysis.ladder import ladder_of
from stability.analysis.pair_contract import prove_pair
from stability.analysis.study_records import read_study
from stability.config.load import load_study
from stability.records.manifest import read_manifest, write_manifest
from stability.records.metric_log import read_metrics
from stability.records.paths import RunPaths
from tests.conftest import run_quietly, write_tiny

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
CHANGES = {
    "lr": ({"optimizer": {"lr": 2e-3}}, "optimizer.lr"),
    "warmup": ({"optimizer": {"warmup_steps": 4}}, "optimizer.warmup_steps"),
    "betas": ({"optimizer": {"betas": [0.9, 0.999]}}, "optimizer.betas"),
    "decay": ({"optimizer": {"weight_decay": 0.5}}, "optimizer.weight_decay"),
    "clip": ({"train": {"grad_clip": 0.05}}, "train.grad_clip"),
    "state": ({"optimizer": {"state": "bf16"}}, "optimizer.state"),
    "sgd": ({"optimizer": {"name": "sgd"}}, "optimizer.name"),
    "muon": (
        {"optimizer": {"name": "muon", "lr": 2e-3}, "change": "optimizer"},
        "optimizer",
    ),
    "signs": ({"optimizer": {"name": "own_axes:Signs"}}, "optimizer.name"),
    "batch": ({"train": {"batch_size": 2}}, "train.batch_size"),
    "accumulated": (
        {"train": {"trainer": {"accumulate_grad_batches": 2}}},
        "train.trainer.accumulate_grad_batches",
    ),
    "dropout": ({"model": {"dropout": 0.1}}, "model.dropout"),
    "heads": ({"model": {"heads": 1}}, "model.heads"),
    "std": ({"model": {"init_std": 0.03}}, "model.init_std"),
    "own_init": ({"model": {"init": "own_axes:fill"}}, "model.init"),
    "compiled": ({"train": {"compile": "aot_eager"}}, "train.compile"),
}
SAME_BATCHES = set(CHANGES) - {"batch", "accumulated"}
SAME_START = set(CHANGES) - {"std", "own_init"}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def study(tmp_path_factory, text_file):
    folder = tmp_path_factory.mktemp("axes")

    def edit(content):
        content.update(seeds=[0], yardstick="lr")
        content["arms"] = {"baseline": {}} | {name: arm for name, (arm, _) in CHANGES.items()}
        content["base"]["probe"] = {"every": 0}

    (folder / "own_axes.py").write_text(OWN)
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        patch.syspath_prepend(folder)
        # of Dynamo's own making
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not")
        observer = run_quietly(load_study(write_tiny(folder, text_file, edit)), folder)
    assert [end for end in observer.ended if end[2] != "finished"] == []
    return folder / "tiny"


@pytest.mark.parametrize("arm", CHANGES)
def test_a_change_moves_the_weights_and_leaves_a_pair(study, arm):
    row = next(row for row in ladder_of(read_study(study)).rows if row.arm == arm)
    assert (row.state, row.axis) == ("finished", CHANGES[arm][1])
    # PyTorch's own backend for debugging computes what eager does, and so proves that it does
    assert (row.rel_l2.last.mean > 0) == (arm != "compiled")
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
    assert (losses[0].values[0] == losses[1].values[0]) == (arm in SAME_START - {"heads"})


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
