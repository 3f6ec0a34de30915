"""`train.matmul_precision` and `train.deterministic` are axes: set, recorded, free as declared."""

from dataclasses import replace

import pytest
import torch

from stability.analysis.environment_contract import moved_by
from stability.analysis.pair_contract import prove_pair
from stability.config.axes import groups_of
from stability.config.convert import ConfigError
from stability.config.load import load_study
from stability.config.schema import TrainConfig
from stability.records.manifest import read_manifest, write_manifest
from stability.records.paths import RunPaths
from stability.records.witness import read_witness
from stability.study import train_run
from stability.study.process_switches import switched
from tests.conftest import run_quietly, write_tiny

ARMS = {
    "medium": {"train": {"matmul_precision": "medium"}},
    "free": {"train": {"deterministic": False}},
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory, text_file):
    folder = tmp_path_factory.mktemp("switches")

    def edit(content):
        content.update(seeds=[0], yardstick="", arms={"baseline": {}, **ARMS})
        content["base"]["train"].update(steps=3, snapshot_steps=[2])
        content["base"]["probe"] = {"every": 0}

    observer = run_quietly(load_study(write_tiny(folder, text_file, edit)), folder)
    assert [end[2:] for end in observer.ended] == [("finished", "")] * 3
    return folder


def _run(folder, arm):
    return RunPaths.for_run(folder / "tiny", arm, 0)


def _switches(folder, arm):
    (stretch,) = read_witness(_run(folder, arm).witness).all
    return stretch.switches["at_start"]


@pytest.mark.slow
def test_the_config_decides_the_switches_of_the_process_that_trains(trained):
    assert _switches(trained, "baseline")["float32_matmul_precision"] == "highest"
    assert _switches(trained, "baseline")["deterministic_algorithms"] is True
    assert _switches(trained, "medium")["float32_matmul_precision"] == "medium"
    assert _switches(trained, "free")["deterministic_algorithms"] is False
    # runs that train in one process don't inherit it
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize(
    ("arm", "axis", "group"),
    [
        ("medium", "train.matmul_precision", "precision"),
        ("free", "train.deterministic", "environment"),
    ],
)
def test_a_declared_switch_is_no_breach(trained, arm, axis, group):
    proof = prove_pair(_run(trained, "baseline"), _run(trained, arm))
    assert (proof.state, proof.axes) == ("holds", (axis,))
    assert groups_of([axis]) == [group]


def test_an_undeclared_switch_is_a_breach(trained):
    manifest = read_manifest(_run(trained, "medium").manifest)
    train = {**manifest.config["train"], "matmul_precision": "highest"}
    forged = replace(manifest, config={**manifest.config, "train": train}, diff={})
    try:
        write_manifest(_run(trained, "medium").manifest, forged)
        proof = prove_pair(_run(trained, "baseline"), _run(trained, "medium"))
    finally:
        write_manifest(_run(trained, "medium").manifest, manifest)
    wrong = {line.field for line in proof.lines if line.sameness == "different"}
    assert {"switch float32_matmul_precision", "environment.switch.cuda_matmul_fp32"} <= wrong


def test_a_change_frees_its_own_switches_alone():
    assert "float32_matmul_precision" in moved_by({"train.matmul_precision": ["highest", "high"]})
    assert "deterministic_algorithms" not in moved_by({"train.matmul_precision": ["highest", "x"]})
    assert moved_by({"precision": ["bf16-mixed", "32-true"]}) == frozenset()


@pytest.mark.parametrize(
    ("train", "said"),
    [
        ({"matmul_precision": "high"}, "float32_matmul_precision 'high', it was 'highest'"),
        ({"deterministic": False}, "deterministic_algorithms False, it was True"),
    ],
)
def test_a_run_that_trains_with_other_switches_than_it_asks_for_fails(
    write_study, run_tiny, tmp_path, monkeypatch, train, said
):
    make = train_run.make_trainer

    def make_plain(config, *args):
        torch.set_float32_matmul_precision("highest")
        return make(replace(config, train=replace(config.train, deterministic=True)), *args)

    monkeypatch.setattr(train_run, "make_trainer", make_plain)

    def edit(content):
        content.update(seeds=[0], yardstick="", arms={"baseline": {}})
        content["base"]["train"].update(steps=2, snapshot_steps=[], **train)

    (ended,) = run_tiny(load_study(write_study(edit)), tmp_path).ended
    assert ended[2:] == ("failed", f"witness: arm baseline asks for {said} when training began")


def test_the_process_gets_its_precision_back_also_where_a_run_fails():
    seen = []

    def fail():
        with switched(TrainConfig(matmul_precision="medium")):
            seen.append(torch.get_float32_matmul_precision())
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert seen == ["medium"]
    assert torch.get_float32_matmul_precision() == "highest"


def test_another_word_than_torchs_is_refused(write_study):
    with pytest.raises(ConfigError, match=r"train.matmul_precision: must be a known .* got 'tf32'"):
        load_study(write_study(), {"train.matmul_precision": "tf32"})
    with pytest.raises(ConfigError, match=r"train.deterministic: must be true or false, got 'off'"):
        load_study(write_study(), {"train.deterministic": "'off'"})
