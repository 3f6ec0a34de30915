"""Whether planted faults were found: each at its own levels, by this study's limits and looks."""

from dataclasses import replace

import numpy as np
import pytest

from stability.analysis.assay import arm_assay, found_at, would_have_shown
from stability.analysis.evidence import LevelEvidence
from stability.analysis.sequential import look_alpha
from stability.analysis.study_records import read_study
from stability.config.schema import PolicyConfig
from stability.records.assay import AssayRecord, FaultRecord, read_assay, write_assay
from stability.records.sealed_json import read_sealed, write_sealed

POLICY = PolicyConfig()
ALPHA = look_alpha(POLICY.alpha)


def _operator(ratio=1.0, gain=0.0, bias=0.0, spread=0.1, count=15):
    """Figures of four results; only dq's are those that are given."""
    dice = np.random.default_rng(0)
    noise = dice.normal(size=(4, 3, count))
    found = {}
    for index, result in enumerate(("out", "dq", "dk", "dv")):
        mine = result == "dq"
        found[result] = {
            "error_ratio": tuple((ratio if mine else 1.0) * np.exp(spread * noise[index, 0])),
            "gain": tuple((gain if mine else 0.0) + 1e-4 * noise[index, 1]),
            "golden_bias_ulp": tuple((bias if mine else 0.0) + 2e-3 * noise[index, 2]),
        }
    return found


def _fault(name="dq_gain", levels=("operator",), operator=None, **figures):
    return FaultRecord(
        name=name, what="a factor", levels=levels, operator=operator or _operator(), **figures
    )


OWN = _fault("", ())


@pytest.mark.parametrize(
    ("figures", "found"),
    [
        ({}, False),
        ({"gain": 5e-3}, True),
        ({"gain": -5e-3}, True),
        ({"gain": 1.0e-3}, False),
        ({"ratio": 3.0}, True),
        ({"ratio": 1.9}, False),
        ({"bias": 0.1}, True),
        ({"bias": -0.1}, True),
        ({"bias": 0.04}, False),
    ],
    ids=str,
)
def test_a_fault_is_found_at_the_operator_where_one_figure_is_surely_beyond_its_limit(
    figures, found
):
    assert found_at("operator", _fault(operator=_operator(**figures)), OWN, ALPHA, POLICY) is found


def test_a_limit_that_is_raised_lets_faults_through():
    fault = _fault(operator=_operator(gain=5e-3))
    assert not found_at("operator", fault, OWN, ALPHA, replace(POLICY, max_gain=6e-3))


def test_what_the_candidate_shows_without_the_fault_is_no_sign_of_it():
    own = _fault("", (), operator=_operator(ratio=2.3))
    assert found_at("operator", _fault(operator=_operator(ratio=2.3)), OWN, ALPHA, POLICY)
    assert not found_at("operator", _fault(operator=_operator(ratio=2.3)), own, ALPHA, POLICY)
    both = _fault(operator=_operator(ratio=2.3, gain=5e-3))
    assert found_at("operator", both, own, ALPHA, POLICY)


@pytest.mark.parametrize(
    ("figures", "found"),
    [
        ({"ratios": (20.0, 21.0, 19.0), "share": 0.0, "share_se": 0.1, "share_looks": 3}, True),
        ({"ratios": (1.0,) * 24, "share": 0.04, "share_se": 0.005, "share_looks": 24}, True),
        ({"ratios": (1.0,) * 24, "share": 0.02, "share_se": 0.01, "share_looks": 24}, False),
        ({"ratios": (1.0, 3.0, 2.5), "share": 0.5, "share_se": 0.5, "share_looks": 3}, False),
        ({}, False),
    ],
)
def test_a_fault_is_found_in_the_gradient_by_its_ratio_or_by_what_repeats(figures, found):
    fault = _fault(levels=("gradient",), **figures)
    assert found_at("gradient", fault, OWN, ALPHA, POLICY) is found


@pytest.fixture
def study(synthetic, tmp_path):
    return synthetic.write_synthetic(tmp_path / "quickstart", seeds=[0])


def _assay(study, *faults):
    recorded = read_study(study)
    arm = recorded.arm("flash_fa2")
    parents = {"snapshots/step-00000020.safetensors": "a" * 64}
    run = arm.runs[0]
    run = replace(run, manifest=replace(run.manifest, files=parents))
    arm = replace(arm, runs={0: run})
    write_assay(study, AssayRecord(arm=arm.name, seed=0, parents=parents, own=OWN, faults=faults))
    return lambda: arm_assay(read_study(study), arm, POLICY)


FOUND = _fault(operator=_operator(gain=5e-3))
MISSED = _fault("dk_gain", operator=_operator())


def test_an_arm_is_seen_clearly_where_every_fault_is_found(study):
    seen = _assay(study, FOUND)()
    assert (seen.state, seen.faults) == ("sensitive", 1)
    blind = _assay(study, FOUND, MISSED)()
    assert (blind.state, blind.missed) == ("blind", ["dk_gain at the operator"])
    assert blind.sentence == "1 of 2 planted faults was missed: dk_gain at the operator"
    assert _assay(study)().state == "blind", "no fault at all proves nothing"


def test_an_assay_that_is_not_of_these_weights_counts_as_none(study):
    recorded = read_study(study)
    arm = recorded.arm("flash_fa2")
    assert arm_assay(recorded, arm, POLICY).state == "not measured"
    judge = _assay(study, FOUND)
    path = study / "assay" / "flash_fa2.json"
    content = read_sealed(path, "the test")
    content["parents"] = dict.fromkeys(content["parents"], "0" * 64)
    write_sealed(path, content)
    assert "other weights" in judge().sentence
    path.write_text(path.read_text().replace("gain", "gian"))
    assert "can't be read" in judge().sentence


def test_a_record_is_read_as_it_was_written(study):
    fault = _fault(ratios=(float("inf"), 2.0), share=float("nan"))
    _assay(study, fault)
    (read,) = read_assay(study, "flash_fa2").faults
    assert (read.operator, read.ratios) == (fault.operator, fault.ratios)
    assert np.isnan(read.share)


def test_faults_are_asked_only_of_arms_that_change_the_attention(study):
    recorded = read_study(study)
    assert arm_assay(recorded, recorded.arm("fp32"), POLICY).state == "not applicable"


def test_a_pass_says_which_harms_its_own_intervals_exclude():
    def evidence(level, **figures):
        return LevelEvidence(level=level, state="holds", sentence="", figures=figures)

    said = would_have_shown(
        {
            "operator": evidence("operator", gain_excluded=8e-4, golden_bias_ulp_excluded=0.011),
            "training": evidence("training", excess_high=1.043),
            "outcome": evidence("outcome", difference_high=0.0031),
        }
    )
    assert said == "a gain error of 0.08 %, a bias of 0.011 ULP, E 1.04, a loss 0.0031 nats worse"
    assert would_have_shown({"outcome": evidence("outcome")}) == ""
