"""The numerics check themselves, resolve "input" and flatten without loss."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attention_kernels.formats import ROUNDINGS, input_format
from attention_kernels.numerics import (
    DOTS,
    EXPS,
    KEY_ORDERS,
    BaselineNumerics,
    FlashNumerics,
    Tiling,
)
from attention_kernels.points import FIELDS, UNROUNDED
from attention_kernels.profiles import BASELINE_PROFILES, PROFILES


@pytest.mark.parametrize("profile", PROFILES)
def test_a_profile_is_rebuilt_from_its_flat_record(profile):
    numerics = PROFILES[profile]
    assert FlashNumerics().with_(**numerics.to_dict()) == numerics


@pytest.mark.parametrize("profile", BASELINE_PROFILES)
def test_a_baseline_profile_is_rebuilt_from_its_flat_record(profile):
    numerics = BASELINE_PROFILES[profile]
    assert BaselineNumerics().with_(**numerics.to_dict()) == numerics


def test_resolving_replaces_input_everywhere_and_nothing_else():
    resolved = PROFILES["fa2"].resolve(torch.float16)
    assert "input" not in resolved.to_dict().values()
    assert resolved.forward.probabilities == "fp16"
    assert resolved.forward.statistics == "fp32"
    assert resolved.backward.ds == "fp16"
    assert resolved.resolve(torch.bfloat16) == resolved


@pytest.mark.parametrize("point", FIELDS)
def test_any_single_fp64_point_widens_the_work_format(point):
    numerics = PROFILES["all_bf16"]
    assert numerics.work_dtype() == torch.float32
    assert numerics.with_(**{point: "fp64"}).work_dtype() == torch.float64


def test_a_field_between_the_points_rounds_nothing_unless_it_names_a_format():
    unrounded = [name for name, value in FlashNumerics().to_dict().items() if value == UNROUNDED]
    assert len(unrounded) == 8
    for name in PROFILES:
        if not name.startswith("peer"):
            assert {PROFILES[name].to_dict()[field] for field in unrounded} == {UNROUNDED}
    resolved = PROFILES["fa2"].resolve(torch.bfloat16)
    assert resolved.targets["products"] is resolved.targets["block_sum"] is None
    assert resolved.with_(products="input").resolve(torch.bfloat16).targets["products"] is not None


def test_fields_are_changed_by_their_own_name_in_their_own_group():
    changed = FlashNumerics().with_(block_k=32, ds="fp32")
    assert (changed.tiling.block_k, changed.backward.ds) == (32, "fp32")
    assert changed.forward == FlashNumerics().forward


def test_numerics_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        FlashNumerics().tiling.block_q = 32  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FlashNumerics().with_(probability="fp32"), "no field 'probability'; nearest: p"),
        (lambda: FlashNumerics().with_(scores="fp23"), "scores must be a format, got 'fp23'; near"),
        (lambda: FlashNumerics().with_(dp="int7"), "BackwardNumerics: dp must be a format"),
        (lambda: Tiling(block_q=48), r"one of \(16, 32, 64, 96, 128, 256\), got 48"),
        (lambda: FlashNumerics().with_(repeated_max_beta=0.5), "at least 1, got 0.5"),
        (lambda: FlashNumerics().with_(repeated_max_tolerance=-1), "at least 0, got -1"),
        (lambda: FlashNumerics().with_(repeated_max_rule="mine"), "of bounded, published, got 'm"),
        (lambda: FlashNumerics().with_(gradient_scale="q"), "one of sums, probabilities, got 'q'"),
        (lambda: FlashNumerics().with_(products="word"), "'word'; nearest: work"),
        (lambda: FlashNumerics().with_(scores="work"), "scores must be a format, got 'work'"),
        (lambda: FlashNumerics().with_(exponents="e4m3"), "exponents must be a format with infin"),
        (
            lambda: FlashNumerics().with_(summands="bf16-saturate"),
            "summands must be a format with infinities, got 'bf16-saturate'",
        ),
        (lambda: FlashNumerics().with_(rescale_threshold=-1), "at least 0, got -1"),
        (lambda: FlashNumerics().with_(rescale_threshold=float("nan")), "number of at least 0"),
        (lambda: FlashNumerics().with_(exp="exp10"), "exp must be one of exact, exp2, exp2_folded"),
        (lambda: FlashNumerics().with_(splits=0), "splits must be an integer from 1 to 256, got 0"),
        (lambda: FlashNumerics().with_(splits=True), "splits must be an integer .* got True"),
        (lambda: FlashNumerics().with_(loop_order="diagonal"), "one of query_outer, key_outer"),
        (lambda: FlashNumerics().with_(key_order="random"), "one of forward, reversed, got 'rand"),
        (lambda: FlashNumerics().with_(scaling="per_row"), "one of none, per_tensor, per_block"),
        (lambda: FlashNumerics().with_(incoherent="yes"), "incoherent must be true or false"),
        (lambda: FlashNumerics().with_(rounding="up"), "rounding must be one of nearest_even"),
        (lambda: FlashNumerics().with_(seed=-1), "seed must be an integer from 0 to 4294967295"),
        (lambda: FlashNumerics().with_(dot="tf32x2"), "dot must be one of ieee, tf32, tf32x3"),
        (lambda: FlashNumerics().with_(fp_fusion=1), "fp_fusion must be true or false, got 1"),
        (
            lambda: FlashNumerics().with_(loop_order="key_outer", splits=2),
            "splits must be 1 with loop_order 'key_outer', got 2",
        ),
        (
            lambda: FlashNumerics().with_(loop_order="key_outer", rescale_threshold=8.0),
            "rescale_threshold must be 0 with loop_order 'key_outer', got 8",
        ),
        (
            lambda: PROFILES["fa3_fp8"].with_(rescale_threshold=8.0),
            "keep P within probabilities 'e4m3', whose largest value is 448, got 8.0",
        ),
        (
            lambda: PROFILES["golden"].with_(dot="tf32").resolve(torch.float64),
            "dot must be 'ieee' where the work format is FP64, got 'tf32'",
        ),
        (lambda: BaselineNumerics(scale_order="twice"), "scale_order must be one of after, before"),
        (lambda: BaselineNumerics(softmax_rounding="no"), "softmax_rounding must be one of once"),
        (lambda: BaselineNumerics().with_(score="fp32"), "no field 'score'; nearest: scores"),
        (lambda: BaselineNumerics(softmax="half"), "BaselineNumerics: softmax must be a format"),
        (lambda: input_format(torch.int32), "dtype must be one of fp64, .* got torch.int32"),
    ],
)
def test_what_does_not_exist_is_named_with_its_neighbours(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@given(
    values=st.fixed_dictionaries(
        {},
        optional={
            **{point: st.sampled_from(["fp32", "bf16", "e5m2", "e6m9-flush"]) for point in FIELDS},
            "rounding": st.sampled_from(ROUNDINGS),
            "exp": st.sampled_from(EXPS),
            "key_order": st.sampled_from(KEY_ORDERS),
            "dot": st.sampled_from(DOTS),
            "repeated_max_beta": st.floats(1, 8),
            "seed": st.integers(0, 2**32 - 1),
        },
    )
)
def test_any_fields_survive_the_way_to_a_record_and_back(values):
    numerics = FlashNumerics().with_(**values)
    assert {name: numerics.to_dict()[name] for name in values} == values
    assert FlashNumerics().with_(**numerics.to_dict()) == numerics


def test_p_is_scaled_to_the_top_of_a_narrow_format_and_only_with_scaled_operands():
    fp8 = PROFILES["fa3_fp8"].resolve(torch.bfloat16)
    assert fp8.probability_scale() == 256.0
    assert fp8.with_(scaling="none").probability_scale() == 1.0
    assert fp8.with_(probabilities="bf16").probability_scale() == 1.0
    assert fp8.with_(probabilities="e5m2").probability_scale() == 2.0**15
