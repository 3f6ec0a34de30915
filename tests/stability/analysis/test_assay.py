"""Whether planted faults were found: each at its own levels, by this study's limits and looks."""

import math
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest

from attention_kernels.testing.fault_names import FAULT_LEVELS
from stability.analysis.assay import arm_assay, found_at, would_have_shown
from stability.analysis.evidence import LevelEvidence
from stability.analysis.sequential import look_alpha
from stability.analysis.study_records import read_study
from stability.records.assay import (
    AssayRecord,
    read_assay,
    sources_of,
    unplanted,
    write_assay,
)
from stability.records.sealed_json import file_checksum, read_sealed, write_sealed
from tests.stability.analysis.fault_figures import (
    OWN,
    POLICY,
    a_fault,
    gradient_of,
    operator_of,
    own_of,
)

BROKEN = {
    "attention.implementation": ["baseline", "flash"],
    "attention.fault": ["", "out_gain_1pct"],
}
PARENTS = {"snapshots/step-00000020.safetensors": "a" * 64}
GRADIENT = gradient_of((20.0, 21.0, 19.0), 0.0, 0.1)


@pytest.fixture(scope="module")
def written(synthetic, tmp_path_factory):
    return synthetic.write_synthetic(tmp_path_factory.mktemp("assay") / "quickstart", seeds=[0])


@pytest.fixture
def study(written, tmp_path):
    """A study of one seed that a test may add an assay to."""
    return shutil.copytree(written, tmp_path / "quickstart")


def _planted(**instead):
    """A record's faults, each of the table, all found but those given `instead`; None: left out."""
    found = {
        name: a_fault(
            name,
            tuple(level for level in levels if level != "training"),
            operator=operator_of(gain=5e-3),
            **(GRADIENT if "gradient" in levels else {}),
        )
        for name, levels in FAULT_LEVELS.items()
    }
    return tuple(fault for fault in (found | instead).values() if fault is not None)


def _recorded(study, *, broken=BROKEN, resolved=None, kernels="k", precision=None):
    """The study, with an arm that is broken by `broken` and manifests that list the parents."""
    recorded = read_study(study)
    arms = []
    for arm in recorded.arms:
        manifest = replace(
            arm.runs[0].manifest,
            files=PARENTS,
            resolved=resolved or {"engine": "twin"},
            environment={"kernel_source": kernels},
        )
        arm = replace(arm, runs={0: replace(arm.runs[0], manifest=manifest)})
        if arm.name == "flash_all_bf16":
            arm = replace(arm, role="broken", diff=broken)
        arms.append(arm)
    base = {**recorded.base, "precision": precision or recorded.base["precision"]}
    return replace(recorded, arms=tuple(arms), base=base)


def _assay(study, faults=None, *, arm="flash_fa2", sources=None, **recorded):
    """What is said of `flash_fa2` with these faults on record."""
    record = AssayRecord(
        arm="flash_fa2",
        seed=0,
        parents=PARENTS,
        own=OWN,
        faults=_planted() if faults is None else faults,
        sources=sources_of({"engine": "twin"}, {"kernel_source": "k"}),
    )
    path = write_assay(study, record)
    content = read_sealed(path, "the test")
    content |= {"arm": arm} | ({} if sources is None else {"sources": sources})
    write_sealed(path, content)
    found = _recorded(study, **recorded)
    return arm_assay(found, found.arm("flash_fa2"), POLICY)


MISSED = a_fault("dk_gain", operator=operator_of())


def test_an_arm_is_seen_clearly_where_every_fault_is_found(study):
    seen = _assay(study)
    assert (seen.state, seen.faults) == ("sensitive", 11)
    assert seen.sentence == (
        "all 11 planted faults were found: 11 at the operator, 7 in the gradient"
    )
    blind = _assay(study, _planted(dk_gain=MISSED))
    assert (blind.state, blind.missed) == ("blind", ["dk_gain at the operator"])
    assert blind.sentence == "1 of 11 planted faults was missed: dk_gain at the operator"


def test_of_a_fault_that_the_gradient_missed_it_is_said_which_limit_finds_it(study):
    """And that limit does find it: with a wider one it is not surely beyond."""
    ratios = tuple(2.2 * math.exp(0.3 * math.sin(5.0 * i)) for i in range(24))
    near = a_fault(
        "dv_gain",
        ("operator", "gradient"),
        operator=operator_of(gain=5e-3),
        **gradient_of(ratios, 0.026, 0.0155),
    )
    blind = _assay(study, _planted(dv_gain=near))
    assert blind.missed == ["dv_gain in the gradient"]
    said = blind.sentence
    (limit,) = re.findall(
        r"a study with max_gradient_ratio ([\d.]+) in its policy would find", said
    )
    mean = math.exp(sum(map(math.log, ratios)) / 24)
    assert f"the error of dv_gain there is {mean:.3g} times the baseline's (limit 2)" in said
    assert "a share of 0.026 repeats (limit 0.01), which more seeds do not change" in said
    alpha = look_alpha(POLICY.alpha)
    for value, is_found in ((float(limit), True), (float(limit) + 0.11, False)):
        policy = replace(POLICY, max_gradient_ratio=value)
        assert found_at("gradient", near, OWN, alpha, policy) == is_found
    # of one that errs no further than the baseline no limit on that would be one
    small = replace(near, ratios=tuple(x / 2.5 for x in ratios))
    assert "in its policy would find it" not in _assay(study, _planted(dv_gain=small)).sentence
    # nor is one at which the candidate itself would not hold
    own = replace(near, **own_of((1.9, 1.91, 1.89)))
    assert "in its policy would find it" not in _assay(study, _planted(dv_gain=own)).sentence
    own = replace(near, **own_of((3.0, 3.1, 2.9)))
    assert _assay(study, _planted(dv_gain=own)).sentence.endswith(
        "do not change, and the candidate without it is beyond a limit there itself"
    )


@pytest.mark.parametrize(
    ("faults", "lacking"),
    [
        ((), "scale_gain, dq_gain"),
        (_planted(bias_tenth_ulp=None), "planted on it: bias_tenth_ulp is lacking"),
        (_planted(dk_gain=a_fault("dk_gain", ())), "planted on it: dk_gain is lacking"),
        (
            _planted(out_gain=a_fault("out_gain", operator=operator_of(gain=5e-3))),
            "planted on it: out_gain is lacking",
        ),
    ],
    ids=["none", "one left out", "at no level", "not at today's levels"],
)
def test_an_assay_of_fewer_faults_than_todays_proves_nothing(study, faults, lacking):
    found = _assay(study, faults)
    assert found.state == "not measured"
    assert lacking in found.sentence
    assert found.sentence.endswith("lacking; run it again")


def test_an_assay_of_another_arm_is_not_its_own(study):
    found = _assay(study, arm="flash_fa3")
    assert found.state == "not measured"
    assert found.sentence == "faults were planted on flash_fa3, not on it; run it again"


@pytest.mark.parametrize(
    "other", [{"resolved": {"engine": "twin", "source": "edited"}}, {"kernels": "edited"}], ids=str
)
def test_an_assay_of_another_source_is_not_of_these_weights(study, other):
    found = _assay(study, **other)
    assert found.state == "not measured"
    assert found.sentence == (
        "faults were planted on another source of its attention than it was trained with"
    )
    assert _assay(study, sources={}, **other).state == "sensitive", "an older record is silent"


@pytest.mark.parametrize(
    "broken",
    [
        {"optimizer.eps": [1e-8, 10.0]},
        {"attention.profile": ["", "all_bf16"]},
        BROKEN | {"attention.fault": ["", "dropped_key"]},
        BROKEN | {"optimizer.eps": [1e-8, 10.0]},
    ],
    ids=["optimizer", "attention", "gross fault", "fault and more"],
)
def test_an_arm_broken_otherwise_does_not_show_that_training_sees_an_attention(study, broken):
    found = _assay(study, broken=broken)
    assert found.state == "not measured"
    assert "flash_all_bf16 is broken by something else than out_gain_1pct alone" in found.sentence
    recorded = _recorded(study, broken=broken)
    assert arm_assay(recorded, recorded.arm("fp32"), POLICY).state == "not applicable"


def test_at_fp64_the_operator_alone_is_asked(study):
    at_operator = tuple(
        replace(fault, levels=("operator",), ratios=()) for fault in _planted(bias_tenth_ulp=None)
    )
    found = _assay(study, at_operator, precision="64-true")
    assert (found.state, found.faults) == ("sensitive", 10)
    assert found.sentence == "all 10 planted faults were found: 10 at the operator"
    assert _assay(study, at_operator).state == "not measured", "in BF16 it lacks the gradient"
    blind = _assay(
        study,
        (*at_operator[:-1], replace(at_operator[-1], operator=operator_of())),
        precision="64-true",
    )
    assert blind.missed == ["causal_leak at the operator"]


def test_an_assay_that_is_not_of_these_weights_counts_as_none(study):
    recorded = read_study(study)
    arm = recorded.arm("flash_fa2")
    assert arm_assay(recorded, arm, POLICY).state == "not measured"
    assert _assay(study).state == "sensitive"
    found = _recorded(study)
    path = study / "assay" / "flash_fa2.json"
    content = read_sealed(path, "the test")
    content["parents"] = dict.fromkeys(content["parents"], "0" * 64)
    write_sealed(path, content)
    arm = found.arm("flash_fa2")
    assert "other weights" in arm_assay(found, arm, POLICY).sentence
    path.write_text(path.read_text().replace("gain", "gian"))
    assert "can't be read" in arm_assay(found, arm, POLICY).sentence


def test_an_assay_that_the_run_does_not_list_is_another_ones(study):
    assert _assay(study).state == "sensitive", "an older manifest lists none"
    recorded = _recorded(study)
    listed = {"assay": file_checksum(study / "assay" / "flash_fa2.json")}
    assert arm_assay(*_listing(recorded, listed), POLICY).state == "sensitive"
    found = arm_assay(*_listing(recorded, {"assay": "0" * 64}), POLICY)
    assert found.state == "not measured"
    assert "its assay is another file than the one that its run lists" in found.sentence


def _listing(recorded, hashes):
    arm = recorded.arm("flash_fa2")
    manifest = replace(arm.runs[0].manifest, hashes=hashes)
    arm = replace(arm, runs={0: replace(arm.runs[0], manifest=manifest)})
    others = [arm if one.name == arm.name else one for one in recorded.arms]
    return replace(recorded, arms=tuple(others)), arm


def test_an_assay_on_fewer_batches_than_todays_proves_nothing(study):
    assert _assay(study).state == "sensitive"
    path = study / "assay" / "flash_fa2.json"
    content = read_sealed(path, "the test")
    for stages in ([3, 6, 12, 24], None):
        older = {name: value for name, value in content.items() if name != "stages"}
        write_sealed(path, older | ({} if stages is None else {"stages": stages}))
        recorded = _recorded(study)
        found = arm_assay(recorded, recorded.arm("flash_fa2"), POLICY)
        assert (found.state, found.sentence) == (
            "not measured",
            "faults were planted on it by another version, on other batches; run it again",
        )
    # at 64-true nothing is asked of the gradient
    at_operator = tuple(
        replace(fault, levels=("operator",), ratios=()) for fault in _planted(bias_tenth_ulp=None)
    )
    _assay(study, at_operator, precision="64-true")
    content = read_sealed(path, "the test")
    write_sealed(path, {name: value for name, value in content.items() if name != "stages"})
    recorded = _recorded(study, precision="64-true")
    assert arm_assay(recorded, recorded.arm("flash_fa2"), POLICY).state == "sensitive"


def test_a_fault_that_could_not_be_looked_at_as_often_as_it_takes_is_none_that_was_missed(study):
    failed = replace(_planted()[1], error="the command ended with exit code 1: no disk")
    found = _assay(study, _planted(**{failed.name: failed}))
    assert (found.state, found.sentence) == (
        "not measured",
        f"{failed.name} could not be looked at again: the command ended with exit code 1: no disk",
    )


def test_where_no_fault_could_be_planted_the_reason_is_said(study):
    _assay(study)
    record = read_assay(study, "flash_fa2")
    write_assay(study, replace(record, own=unplanted("there is no room"), faults=()))
    recorded = _recorded(study)
    found = arm_assay(recorded, recorded.arm("flash_fa2"), POLICY)
    assert (found.state, found.sentence) == (
        "not measured",
        "no faults could be planted on it: there is no room",
    )


def test_what_is_said_of_a_recorded_run_is_no_source_of_its_attention():
    said = {"command": ["python", "train.py"], "notes": ["no loss was seen"], "doubts": []}
    assert sources_of(said, {}) == sources_of(said | {"notes": [], "doubts": ["x"]}, {})
    launched = [{"arguments": ["t.py"], "variables": {"MY_DAY": day}} for day in ("1", "2")]
    assert len({str(sources_of(said | {"launched": each}, {})) for each in launched}) == 1
    assert sources_of(said, {}) != sources_of(said | {"command": ["python", "other.py"]}, {})


@pytest.mark.parametrize("name", ["rank_ends", "start_parts", "constants"])
def test_what_is_another_in_each_seed_is_no_source_of_its_attention(name):
    seeds = [{"command": ["python", "train.py"], name: {"1": each}} for each in ("a", "b")]
    assert sources_of(seeds[0], {}) == sources_of(seeds[1], {})
    of_ours = [{"implementation": "own", name: each} for each in ("a", "b")]
    assert sources_of(of_ours[0], {}) != sources_of(of_ours[1], {})


def test_a_record_is_read_as_it_was_written(study):
    fault = a_fault(ratios=(float("inf"), 2.0), share=float("nan"))
    _assay(study, (fault,))
    record = read_assay(study, "flash_fa2")
    (read,) = record.faults
    assert set(record.sources) == {"attention", "kernel_source"}
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
    seen = "a gain error of 0.08 % in a layer, {}a mean bias of 0.011 ULP"
    assert said == seen.format("") + ", E 1.04, a loss 0.0031 nats worse"
    exact = {"training": evidence("training", excess_high=0.0)}
    assert would_have_shown(exact) == "any E above 0"
    better = {"outcome": evidence("outcome", difference_high=-3.3e-4)}
    assert would_have_shown(better) == "any worse loss, and one not at least 3.3e-4 nats better"
    figures = {"gain_excluded": 8e-4, "head_gain_excluded": 2e-3, "golden_bias_ulp_excluded": 0.011}
    said = would_have_shown({"operator": evidence("operator", **figures)})
    assert said == seen.format("one of 0.2 % in a head, ")
    assert would_have_shown({"outcome": evidence("outcome")}) == ""
    for ratio, words in ((0.917, "91.7 % of"), (1.35, "1.35 times")):
        said = would_have_shown({"gradient": evidence("gradient", ratio_high=ratio)})
        assert said == f"a gradient error above {words} the baseline's"
