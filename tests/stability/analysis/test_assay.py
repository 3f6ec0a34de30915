"""Whether planted faults were found: each at its own levels, by this study's limits and looks."""

import math
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest

from attention_kernels.testing.fault_names import FAULT_LEVELS
from stability.analysis.assay import arm_assay, found_at, is_settled, would_have_shown
from stability.analysis.evidence import LevelEvidence
from stability.analysis.sequential import look_alpha
from stability.analysis.study_records import read_study
from stability.config.study import LEAST_ALPHA, PolicyConfig
from stability.records.assay import (
    STAGES,
    AssayRecord,
    FaultRecord,
    read_assay,
    sources_of,
    unplanted,
    write_assay,
)
from stability.records.sealed_json import file_checksum, read_sealed, write_sealed

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


def _own(ratios=(1.0, 1.1, 0.95), share=0.0, share_se=0.002):
    return {"own_ratios": ratios, "own_share": share, "own_share_se": share_se}


def _gradient(ratios, share=0.0, share_se=0.002):
    figures = {"ratios": ratios, "share": share, "share_se": share_se, "share_looks": len(ratios)}
    return figures | _own()


def _around(ratio, spread, count):
    """Ratios with this geometric mean, whose logs scatter."""
    dice = np.random.default_rng(1).normal(size=count)
    return tuple(ratio * np.exp(spread * (dice - dice.mean()) / dice.std(ddof=1)))


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
    own = replace(OWN, operator=_operator(ratio=2.3))
    assert found_at("operator", _fault(operator=_operator(ratio=2.3)), OWN, ALPHA, POLICY)
    assert not found_at("operator", _fault(operator=_operator(ratio=2.3)), own, ALPHA, POLICY)
    both = _fault(operator=_operator(ratio=2.3, gain=5e-3))
    assert found_at("operator", both, own, ALPHA, POLICY)


@pytest.mark.parametrize(
    ("figures", "found"),
    [
        (_gradient((20.0, 21.0, 19.0), 0.0, 0.1), True),
        (_gradient((1.0,) * 24, 0.04, 0.005), True),
        (_gradient((1.0,) * 24, 0.02, 0.01), False),
        (_gradient((1.0, 3.0, 2.5), 0.5, 0.5), False),
        (_gradient((1.0, math.nan, 1.0), math.nan, math.nan), True),
        (_gradient((1.0, math.inf, 1.0), math.nan, math.nan), True),
        (_gradient((1.0,) * 24, math.inf, 0.1), True),
        (_gradient((1.0,) * 24, math.inf, math.inf), False),
        (_gradient((1.0,) * 24, 0.04, 0.0), False),
        ({}, False),
    ],
)
def test_a_fault_is_found_in_the_gradient_by_its_ratio_or_by_what_repeats(figures, found):
    fault = _fault(levels=("gradient",), **figures)
    assert found_at("gradient", fault, OWN, ALPHA, POLICY) is found


FAR = _gradient((20.0, 21.0, 19.0), 0.9, 0.01)


@pytest.mark.parametrize(
    ("own", "figures", "found"),
    [
        # each figure, beyond its limit without the fault too, leaves the other one
        (_own((3.0, 3.1, 2.9)), {}, True),
        (_own((3.0, 3.1, 2.9)), {"share": 0.0}, False),
        (_own((2.6, 3.5, 3.0)), {"share": 0.0}, False),
        (_own((1.0,) * 3, 0.05, 0.01), {}, True),
        (_own((1.0,) * 3, 0.05, 0.01), {"ratios": (1.0, 1.1, 0.9)}, False),
        (_own((3.0, 3.1, 2.9), 0.05, 0.01), {}, False),
        # its own doubt is no finding: a share of 0.02 with a standard error of 0.01 may be none
        (_own((1.0,) * 3, 0.02, 0.01), {"ratios": (1.0, 1.1, 0.9)}, True),
        (_own((1.0, 9.0, 1.0)), {"share": 0.0}, True),
        # one that is exact is within each limit
        (_own((0.0,) * 3, 0.0, 0.0), {"share": 0.0}, True),
        (_own((0.0, 1.0, 0.5)), {"share": 0.0}, True),
        (_own((1.0, math.nan, 1.0), math.nan, math.nan), {}, False),
        (_own((1.0, math.inf, 1.0)), {"share": 0.0}, False),
        (_own((), math.nan, math.nan), {}, False),
    ],
    ids=str,
)
def test_a_figure_of_the_gradient_that_is_beyond_without_the_fault_shows_nothing(
    own, figures, found
):
    fault = _fault(levels=("gradient",), **FAR | figures | own)
    assert found_at("gradient", fault, OWN, ALPHA, POLICY) is found
    assert is_settled(POLICY, fault) is found


def test_a_fault_of_which_nothing_can_be_seen_is_not_looked_at_for_ever():
    hidden = _own((3.0, 3.1, 2.9), 0.05, 0.01)
    for looks, settled in ((12, False), (24, True), (48, True)):
        fault = _fault(levels=("gradient",), **_gradient((3.0, 3.1) * (looks // 2), 0.05) | hidden)
        assert is_settled(POLICY, fault) is settled
        half = replace(fault, own_share=0.0, share=0.015, share_se=0.01)
        assert not is_settled(POLICY, half), "the share may still show it"


@pytest.mark.parametrize("layers", [3, 12])
def test_at_the_least_error_rate_that_a_study_may_have_a_gain_and_a_bias_are_found(layers):
    """P-values are simulated: with fewer draws, or a smaller rate, none could be."""
    policy = PolicyConfig(alpha=LEAST_ALPHA)
    for figures in ({"gain": 5e-3}, {"bias": 0.1}):
        fault = _fault(operator=_operator(count=3 * layers, **figures))
        assert found_at("operator", fault, OWN, look_alpha(LEAST_ALPHA), policy), figures


def test_where_the_candidates_own_figures_are_lacking_nothing_is_found():
    fault, none = _fault(operator=_operator(gain=5e-3)), replace(OWN, operator={})
    assert found_at("operator", fault, OWN, ALPHA, POLICY)
    assert not found_at("operator", fault, none, ALPHA, POLICY)


def test_each_stage_at_which_a_fault_is_tried_has_its_part_of_the_error_rate():
    """Of a share that is surely beyond at a twelfth of one look's error rate, and just not."""
    from scipy.stats import t

    tries = 2 * len(STAGES)
    assert tries == 12
    for part, is_found in ((1.02, True), (0.98, False)):
        for looks in (3, 24, 96):
            far = t.isf(ALPHA / tries / part, looks - 1)
            share = POLICY.max_share + 1e-3 * far
            figures = _gradient((1.0,) * looks, share, 1e-3)
            fault = _fault(levels=("gradient",), **figures)
            assert found_at("gradient", fault, OWN, ALPHA, POLICY) is is_found


@pytest.mark.parametrize(
    ("figures", "settled"),
    [
        (_gradient(_around(2.2, 0.3, 24), 0.026, 0.0155), False),
        (_gradient(_around(2.2, 0.3, 24), 0.09, 0.0155), True),
        (_gradient(_around(1.1, 0.2, 24), 0.026, 0.0155), False),
        (_gradient(_around(1.1, 0.2, 24), 0.0, 0.001), True),
        # a share that is surely small settles nothing while the ratio may be beyond
        (_gradient(_around(1.9, 0.3, 24), 0.0, 0.001), False),
        # at the error rate of one look, 0.014, this would be surely within
        (_gradient(_around(1.1, 0.2, 24), 0.0, 0.0040), False),
        (_gradient((1.0, 1.1)), False),
        ({}, False),
    ],
    ids=str,
)
def test_more_looks_are_taken_while_a_fault_is_neither_found_nor_surely_missed(figures, settled):
    assert is_settled(POLICY, _fault(levels=("gradient",), **figures)) is settled


BROKEN = {
    "attention.implementation": ["baseline", "flash"],
    "attention.fault": ["", "out_gain_1pct"],
}
PARENTS = {"snapshots/step-00000020.safetensors": "a" * 64}
GRADIENT = _gradient((20.0, 21.0, 19.0), 0.0, 0.1)


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
        name: _fault(
            name,
            tuple(level for level in levels if level != "training"),
            operator=_operator(gain=5e-3),
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


MISSED = _fault("dk_gain", operator=_operator())


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
    near = _fault(
        "dv_gain",
        ("operator", "gradient"),
        operator=_operator(gain=5e-3),
        **_gradient(ratios, 0.026, 0.0155),
    )
    blind = _assay(study, _planted(dv_gain=near))
    assert blind.missed == ["dv_gain in the gradient"]
    said = blind.sentence
    (limit,) = re.findall(
        r"a study with max_gradient_ratio ([\d.]+) in its policy would find", said
    )
    mean = math.exp(sum(map(math.log, ratios)) / 24)
    assert f"dv_gain errs {mean:.3g} times as far as the baseline there (limit 2)" in said
    assert "a share of 0.026 repeats (limit 0.01), which more seeds do not change" in said
    alpha = look_alpha(POLICY.alpha)
    for value, is_found in ((float(limit), True), (float(limit) + 0.11, False)):
        policy = replace(POLICY, max_gradient_ratio=value)
        assert found_at("gradient", near, OWN, alpha, policy) == is_found
    # of one that errs no further than the baseline no limit on that would be one
    small = replace(near, ratios=tuple(x / 2.5 for x in ratios))
    assert "in its policy would find it" not in _assay(study, _planted(dv_gain=small)).sentence
    # nor is one at which the candidate itself would not hold
    own = replace(near, **_own((1.9, 1.91, 1.89)))
    assert "in its policy would find it" not in _assay(study, _planted(dv_gain=own)).sentence
    own = replace(near, **_own((3.0, 3.1, 2.9)))
    assert _assay(study, _planted(dv_gain=own)).sentence.endswith(
        "do not change, and the candidate without it is beyond a limit there itself"
    )


@pytest.mark.parametrize(
    ("faults", "lacking"),
    [
        ((), "scale_gain, dq_gain"),
        (_planted(bias_tenth_ulp=None), "planted on it: bias_tenth_ulp is lacking"),
        (_planted(dk_gain=_fault("dk_gain", ())), "planted on it: dk_gain is lacking"),
        (
            _planted(out_gain=_fault("out_gain", operator=_operator(gain=5e-3))),
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
        (*at_operator[:-1], replace(at_operator[-1], operator=_operator())),
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
    fault = _fault(ratios=(float("inf"), 2.0), share=float("nan"))
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
    better = {"outcome": evidence("outcome", difference_high=-3.3e-4)}
    assert would_have_shown(better) == "any loss not 3.3e-4 nats better"
    figures = {"gain_excluded": 8e-4, "head_gain_excluded": 2e-3, "golden_bias_ulp_excluded": 0.011}
    said = would_have_shown({"operator": evidence("operator", **figures)})
    assert said == seen.format("one of 0.2 % in a head, ")
    assert would_have_shown({"outcome": evidence("outcome")}) == ""
