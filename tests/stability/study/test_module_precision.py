"""A run whose modules have precisions of their own is a pair, and is held against each label."""

from dataclasses import replace

import pytest

from stability.analysis.pair_contract import prove_pair
from stability.config.load import load_study
from stability.records.manifest import read_manifest, write_manifest
from stability.records.paths import RunPaths
from stability.records.witness import read_witness
from stability.study import assemble as assemble_module
from stability.study.assemble import assemble
from stability.study.observer_gate import check_observer
from stability.study.run_study import StudyError, check_study, plan_study

pytestmark = pytest.mark.filterwarnings("ignore:Detected call of")
OWN = {"*.mlp_*": "emulated:e4m3", "blocks.layer_0.mlp_up": "fp32"}
TEXT = "bf16-mixed, *.mlp_*=emulated:e4m3, blocks.layer_0.mlp_up=fp32"


def _arms(**arms):
    def edit(content):
        content.update(seeds=[0], arms={"baseline": {}, **arms}, yardstick="")
        content["base"]["train"].update(steps=4, snapshot_steps=[2])

    return edit


def _run(tmp_path, arm):
    return RunPaths.for_run(tmp_path / "tiny", arm, 0)


def test_an_arm_whose_modules_differ_is_one_change_and_a_proven_pair(
    write_study, run_tiny, tmp_path
):
    study = load_study(write_study(_arms(own={"precision": OWN})))
    assert [end[2:] for end in run_tiny(study, tmp_path).ended] == [("finished", "")] * 2
    manifest = read_manifest(_run(tmp_path, "own").manifest)
    assert (manifest.axis, manifest.diff) == ("precision", {"precision": ["bf16-mixed", TEXT]})
    proof = prove_pair(_run(tmp_path, "baseline"), _run(tmp_path, "own"))
    assert (proof.state, proof.axes) == ("holds", ("precision",))
    rows = read_witness(_run(tmp_path, "own").witness).rows
    of = {row.module: set(row.operands) for row in rows if row.part == "linear"}
    assert of["blocks.layer_0.mlp_up"] == of["blocks.layer_1.mlp_up"] == {"float32"}
    assert of["blocks.layer_0.query"] == of[""] == {"bfloat16"}


def test_a_module_that_multiplies_otherwise_than_it_is_labelled_fails_the_run(
    write_study, run_tiny, tmp_path, monkeypatch
):
    def but_one(model, precision, *rest):
        kept = tuple(each for each in precision.modules if each[0] != "blocks.layer_0.mlp_up")
        assemble_module_precision(model, replace(precision, modules=kept), *rest)

    assemble_module_precision = assemble_module.with_module_precision
    monkeypatch.setattr(assemble_module, "with_module_precision", but_one)
    own = {"precision": {"*.query": "fp32", "blocks.layer_0.mlp_up": "fp32"}}
    ended = run_tiny(load_study(write_study(_arms(own=own))), tmp_path).ended
    said = (
        "witness: arm own is labelled fp32 in module blocks.layer_0.mlp_up, which multiplied BF16 "
        "in its backward"
    )
    assert ended[1] == ("own", 0, "failed", said)


def test_a_manifest_that_claims_another_precision_of_a_module_is_no_pair(
    write_study, run_tiny, tmp_path
):
    study = load_study(write_study(_arms(own={"precision": {"*.query": "fp32"}})))
    run_tiny(study, tmp_path)
    run = _run(tmp_path, "own")
    manifest = read_manifest(run.manifest)
    forged = "bf16-mixed, *.query=fp32, *.key=fp32"
    config = {**manifest.config, "precision": forged}
    diff = {"precision": ["bf16-mixed", forged]}
    write_manifest(run.manifest, replace(manifest, config=config, diff=diff))
    breach = prove_pair(_run(tmp_path, "baseline"), run).breach
    said = "labelled fp32 in module blocks.layer_0.key, which multiplied BF16"
    assert breach is not None
    assert said in breach.sentence


@pytest.mark.slow
@pytest.mark.parametrize("precision", [TEXT, "emulated:e5m2, *.mlp_*=bf16, *.query=fp32"])
def test_the_instruments_change_no_bit_where_modules_differ(write_study, precision):
    config = replace(load_study(write_study()).base, precision=precision)
    assert check_observer(config).equal


def test_a_glob_that_names_no_module_is_refused_before_anything_is_written(write_study, tmp_path):
    study = load_study(write_study(_arms(own={"precision": {"*.mpl_up": "fp32"}})))
    runs = plan_study(study, tmp_path / "out")
    with pytest.raises(StudyError, match=r"\*.mpl_up must name a module .* nearest: .*mlp_up"):
        check_study(runs)
    assert not (tmp_path / "out").exists()


def test_an_emulated_module_is_refused_where_the_model_is_compiled(write_study):
    base = load_study(write_study()).base
    train = replace(base.train, compile="aot_eager")
    config = replace(base, precision=TEXT, train=train)
    with pytest.raises(ValueError, match=r"train.compile must be empty with an emulated"):
        assemble(config)


# of Dynamo's own making
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not")
@pytest.mark.slow
def test_a_compiled_run_whose_modules_differ_ends_in_the_bits_of_the_eager_one(
    write_study, run_tiny, tmp_path
):
    study = load_study(
        write_study(_arms(compiled={"train": {"compile": "aot_eager"}})),
        {"precision": "bf16-mixed, *.mlp_*=fp32, blocks.layer_1.query=fp16"},
    )
    assert [end[2:] for end in run_tiny(study, tmp_path).ended] == [("finished", "")] * 2
    eager, compiled = (
        read_manifest(_run(tmp_path, arm).manifest).hashes["final_weights"]
        for arm in ("baseline", "compiled")
    )
    assert eager == compiled
