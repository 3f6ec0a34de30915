"""The numerics check themselves, resolve "input" and flatten without loss."""

import dataclasses

import pytest
import torch

from attention_kernels.numerics import BaselineNumerics, FlashNumerics, Tiling, input_format
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


@pytest.mark.parametrize("point", [p for p in FlashNumerics().to_dict() if "block" not in p])
def test_any_single_fp64_point_widens_the_work_format(point):
    numerics = PROFILES["all_bf16"]
    assert numerics.work_dtype() == torch.float32
    assert numerics.with_(**{point: "fp64"}).work_dtype() == torch.float64


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
        (lambda: FlashNumerics().with_(dp="int8"), "BackwardNumerics: dp must be a format"),
        (lambda: Tiling(block_q=48), r"block_q must be one of \(16, 32, 64, 128, 256\), got 48"),
        (lambda: BaselineNumerics().with_(score="fp32"), "no field 'score'; nearest: scores"),
        (lambda: BaselineNumerics(softmax="half"), "BaselineNumerics: softmax must be a format"),
        (lambda: input_format(torch.int32), "dtype must be one of fp64, .* got torch.int32"),
    ],
)
def test_what_does_not_exist_is_named_with_its_neighbours(make, message):
    with pytest.raises(ValueError, match=message):
        make()
