"""What was executed is part of the contract: a label alone makes no pair."""

import json
import shutil
from dataclasses import replace

import pytest

from stability.analysis.ladder import ladder_of
from stability.analysis.ladder_sentences import notes
from stability.analysis.pair_contract import prove_pair
from stability.analysis.study_check import check_pairs
from stability.analysis.study_records import read_study
from stability.records.manifest import read_manifest, write_manifest
from stability.records.metric_names import EVAL_LOSS
from stability.records.module_sources import UNHASHED
from stability.records.paths import RunPaths
from stability.records.run_files import RunFiles
from tests.stability.sealing import change_environment, change_witness, seal


@pytest.fixture
def study(trained, tmp_path):
    """A copy of a whole study, to be spoiled."""
    return shutil.copytree(trained, tmp_path / "tiny")


def _run(study, arm):
    return RunPaths.for_run(study, arm, 0)


def _relabel(study):
    """Put a run that trained BF16 in the place of the arm fp32, under that arm's label."""
    label = read_manifest(_run(study, "fp32").manifest)
    shutil.rmtree(_run(study, "fp32").root)
    run = RunPaths(shutil.copytree(_run(study, "rerun").root, _run(study, "fp32").root))
    trained = read_manifest(run.manifest)
    hashes = {**trained.hashes, "config_less_axis": label.hashes["config_less_axis"]}
    claims = {name: getattr(label, name) for name in ("arm", "axis", "config", "diff", "resolved")}
    write_manifest(run.manifest, replace(trained, hashes=hashes, **claims))
    return run


def _lines(study, arm):
    proof = prove_pair(_run(study, "baseline"), _run(study, arm))
    return proof, {line.field: line.sameness for line in proof.lines}


SAID = "no pair: arm fp32 is labelled 32-true, its linear layers multiplied BF16"


@pytest.mark.slow
def test_an_arm_relabelled_after_it_trained_is_found_out(study):
    _relabel(study)
    proof, _ = _lines(study, "fp32")
    assert proof.sentence == SAID
    # all that a manifest says of itself is in order: only what was executed is not
    assert [line.field for line in proof.lines if line.sameness == "different"] == [
        "witness of fp32"
    ]
    (check,) = (c for c in check_pairs(read_study(study)) if (c.arm, c.seed) == ("fp32", 0))
    assert (check.state, check.said) == ("no pair", SAID)
    run = read_study(study).arm("fp32").runs[0]
    assert run.breach == SAID
    assert not run.drift("rel_l2")


def _as_if_fp32(stretch):
    for row in stretch["executed"]:
        row[4] = ["float32" for _ in row[4]]


def test_a_change_that_had_no_effect_is_a_finding(study):
    run = _relabel(study)
    change_witness(run, _as_if_fp32)
    proof, _ = _lines(study, "fp32")
    said = "a pair: they differ in precision alone; the change had no effect on the weights: both"
    assert proof.sentence.startswith(said)
    note = (
        "The change had no effect on the weights: fp32 changes precision and ends in the "
        "baseline's bits (seed 0)."
    )
    assert note in notes(ladder_of(read_study(study)))


def test_where_evaluation_alone_differs_the_sentence_says_so(study):
    run = _relabel(study)
    change_witness(run, _as_if_fp32)
    lines = map(json.loads, run.metrics.read_text().splitlines())
    moved = [{n: x + 1 if n == EVAL_LOSS else x for n, x in line.items()} for line in lines]
    run.metrics.write_text("".join(map(seal, moved)))
    RunFiles(run, read_manifest(run.manifest)).add(run.metrics)
    said = " ".join(notes(ladder_of(read_study(study))))
    assert (
        "ends in the baseline's bits (seed 0); its held-out loss is another (seed 0), so it "
        "changes the evaluation." in said
    )


def test_an_honest_study_has_no_such_finding(trained):
    assert not [n for n in notes(ladder_of(read_study(trained))) if "no effect" in n]
    for arm in ("fp32", "rerun", "flash_fa2", "nudge"):
        proof, lines = _lines(trained, arm)
        assert proof.breach is None
        assert not proof.unproven
        assert lines[f"witness of {arm}"] == "same"
        by_axis = {
            "fp32": ("different by design",) * 2,
            "flash_fa2": ("same", "different by design"),
        }
        found = (lines["executed in linear"], lines["executed in attention"])
        assert found == by_axis.get(arm, ("same", "same"))


def _with_a_hooks_product(stretch):
    row = ["unowned", "", "backward", "aten::mm", ["float64", "float64"], "float64"]
    stretch["executed"].append(row)


def test_a_product_of_no_module_is_compared_between_the_runs_of_a_pair(study):
    assert "executed in unowned" not in _lines(study, "rerun")[1]
    for arm, sameness in (("rerun", "different"), ("fp32", "different by design")):
        change_witness(_run(study, arm), _with_a_hooks_product)
        proof, lines = _lines(study, arm)
        assert lines["executed in unowned"] == sameness
        assert lines[f"witness of {arm}"] == "same"
        assert bool(proof.breach) == (sameness == "different")
        said = "differs, first in no module, backward: aten::mm of float64 x float64 in one alone"
        assert [line for line in proof.lines if line.says.endswith(said)]
    change_witness(_run(study, "baseline"), _with_a_hooks_product)
    assert _lines(study, "rerun")[1]["executed in unowned"] == "same"


def test_a_run_without_a_witness_is_unproven(study):
    run = _run(study, "rerun")
    run.witness.unlink()
    manifest = read_manifest(run.manifest)
    files = {name: sum for name, sum in manifest.files.items() if name != "witness.json"}
    write_manifest(run.manifest, replace(manifest, files=files))
    proof, _ = _lines(study, "rerun")
    said = "not on record: what rerun, seed 0 executed, which has no witness"
    assert proof.sentence == f"an A/A pair; {said}"
    (check,) = (c for c in check_pairs(read_study(study)) if (c.arm, c.seed) == ("rerun", 0))
    assert (check.state, check.said) == ("unproven", said)


def test_a_stretch_that_nobody_witnessed_is_unproven(study):
    change_witness(_run(study, "rerun"), lambda stretch: stretch.update(first=2))
    proof, _ = _lines(study, "rerun")
    said = "what rerun, seed 0 executed: nothing is on record of updates 0 to 2"
    assert proof.unproven == [said]


def test_a_stretch_of_which_nothing_was_seen_is_unproven(study):
    change_witness(_run(study, "rerun"), lambda stretch: stretch.update(executed=[]))
    proof, _ = _lines(study, "rerun")
    said = "what rerun, seed 0 multiplied: no product of updates 0 to 6 was looked at"
    assert proof.unproven == [said]


def test_what_a_compiled_run_multiplied_is_unproven(study):
    change_witness(
        _run(study, "rerun"),
        lambda stretch: stretch.update(executed=[], unproven="torch.compile fuses operators"),
    )
    proof, lines = _lines(study, "rerun")
    assert proof.unproven == ["what rerun, seed 0 multiplied: torch.compile fuses operators"]
    assert lines["known answers"] == lines["switches"] == "same"


def _other_attention(stretch):
    for row in stretch["executed"]:
        if row[0] == "attention" and row[3] == "aten::bmm":
            row[4] = ["float64", "float64"]


def _other_answer(stretch):
    stretch["answers"]["at_start"]["exp_fp32"] = stretch["answers"]["at_end"]["exp_fp32"] = "f" * 16


def _other_switch(stretch):
    for moment in ("at_start", "at_end"):
        stretch["switches"][moment]["sdpa_flash"] = False


def _other_module(stretch):
    stretch["modules"]["tests.conftest"] = "f" * 64


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (_other_module, "no pair: the source of module tests.conftest is "),
        (
            _other_attention,
            "no pair: what is executed in attention differs, first in layer_0.attention, backward: "
            "aten::bmm of float32 x float32 in one alone",
        ),
        (_other_answer, "no pair: known answer exp_fp32 is "),
        (_other_switch, "no pair: switch sdpa_flash is True in one, False in the other"),
    ],
)
def test_two_runs_of_one_config_execute_the_same(study, edit, said):
    change_witness(_run(study, "rerun"), edit)
    assert _lines(study, "rerun")[0].sentence.startswith(said)


def test_the_modules_of_another_attention_are_the_declared_change(study):
    change_witness(_run(study, "flash_fa2"), _other_module)
    proof, lines = _lines(study, "flash_fa2")
    assert proof.breach is None
    assert lines["the source of module tests.conftest"] == "different by design"


@pytest.mark.parametrize("gone", ["baseline", "fp32"])
def test_a_switch_that_one_run_does_not_list_is_unproven_and_no_breach(study, gone):
    run, name = _run(study, gone), "sdpa_math_reduction"
    manifest = read_manifest(run.manifest)
    known = {k: v for k, v in manifest.environment.items() if k != f"switch.{name}"}
    change_environment(run, known)
    change_witness(run, lambda stretch: [each.pop(name) for each in stretch["switches"].values()])
    proof, lines = _lines(study, "fp32")
    assert proof.breach is None
    assert lines[f"environment.switch.{name}"] == lines[f"switch {name}"] == "unknown"
    assert proof.unproven == [f"environment.switch.{name}", f"switch {name}"]


@pytest.mark.parametrize(("listed", "sameness"), [("MKL_*", "different"), ("NVTE_*", "unknown")])
def test_a_variable_that_one_run_had_set_is_a_breach_where_the_other_listed_it(
    study, listed, sameness
):
    for arm, more in (("baseline", {"variables_listed": listed}), ("fp32", _SET)):
        run = _run(study, arm)
        manifest = read_manifest(run.manifest)
        known = {k: v for k, v in manifest.environment.items() if k not in _SET}
        change_environment(run, {**known, **more})
    proof, lines = _lines(study, "fp32")
    assert lines["environment.variable.MKL_CBWR"] == sameness
    assert "environment.variables_listed" not in lines
    assert (proof.breach is None) is (sameness == "unknown")


_SET = {"variable.MKL_CBWR": "AVX2", "variables_listed": "MKL_* NVTE_*"}


@pytest.mark.parametrize("where", ["environment", "witness"])
def test_what_was_executed_without_a_source_leaves_its_pairs_unproven(study, where):
    name = "mine (text that it executes)"
    for arm in ("baseline", "fp32"):
        run = _run(study, arm)
        if where == "witness":
            change_witness(run, lambda stretch: stretch["modules"].update({name: UNHASHED}))
            continue
        manifest = read_manifest(run.manifest)
        known = {**manifest.environment, f"module.{name}": UNHASHED}
        write_manifest(run.manifest, replace(manifest, environment=known))
    proof, _ = _lines(study, "fp32")
    assert proof.breach is None
    said = {
        "environment": [f"environment.module.{name}"],
        "witness": [
            f"the source of what {arm}, seed 0 executed: unhashed: {name}"
            for arm in ("baseline", "fp32")
        ],
    }
    assert proof.unproven == said[where]
