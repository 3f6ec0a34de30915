"""The microbenchmark's inputs, its errors, and the rounding point that carries an error."""

import pytest
import torch
from safetensors.torch import save_file

from attention_kernels import round_to
from attention_kernels.points import FIELDS
from attention_kernels.testing import Shape
from stability.probe.attention_inputs import DISTRIBUTIONS, draw_inputs, read_inputs
from stability.probe.microbenchmark import POINTS, Problem, measure, waterfall

SMALL = {"length": 128, "heads": 2, "head_dim": 32}


@pytest.mark.parametrize("format", ["bf16", "fp16", "e5m5", "e8m30"])
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_inputs_lie_on_the_grid_and_repeat_with_their_seed(distribution, format):
    shape = Shape(1, 4, 2, 64, 96, 32)
    first, second = (draw_inputs(distribution, shape, format, 5) for _ in range(2))
    for x, y in zip(first, second, strict=True):
        assert torch.equal(x, y)
        assert torch.equal(x.double(), round_to(x.double(), format))
    assert first.q.shape == (1, 4, 64, 32)
    assert first.k.shape == (1, 2, 96, 32)
    assert not torch.equal(first.q, draw_inputs(distribution, shape, format, 6).q)


def test_more_mantissa_bits_err_less_and_rows_say_what_they_compare():
    errors = []
    for format in ("bf16", "e8m9", "e8m12", "fp32", "fp64"):
        found = measure(Problem(profile="all_bf16", **SMALL, format=format), backward=True)
        assert [figures.what for figures in found] == ["out", "dq", "dk", "dv"]
        found = measure(Problem(**SMALL, format=format, changes=_every(format)), backward=False)
        errors.append(found[0].candidate["rel_fro"])
        assert found[0].candidate["nonfinite"] == 0
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 1e3 * errors[3]


def _every(format):
    return tuple((point, format) for point in POINTS)


def test_the_candidate_is_not_the_baseline_nor_the_golden():
    (figures,) = measure(Problem(**SMALL), backward=False)
    errors = [figures.candidate["rmse"], figures.baseline["rmse"], figures.pair["rmse"]]
    assert len(set(errors)) == 3
    expected = figures.candidate["rel_fro"] / figures.baseline["rel_fro"]
    assert figures.golden["error_ratio"] == pytest.approx(expected)


def test_the_waterfall_lowers_and_raises_each_point_alone():
    steps = list(waterfall(Problem(profile="all_bf16", **SMALL)))
    assert [s.change for s in steps] == ["none"] + ["lowered"] * 13 + ["raised"] * 13
    assert [s.point for s in steps[1:14]] == POINTS == [s.point for s in steps[14:]]
    lowered = {s.point: s.errors for s in steps if s.change == "lowered"}
    assert lowered["operands"]["out"] < 1e-14  # inputs are on the grid already
    assert lowered["ds"]["out"] < 1e-14 < 1e-4 < lowered["ds"]["dq"]
    assert lowered["accumulator"]["out"] > 1e-4
    assert lowered["lse"]["out"] < 1e-14 < lowered["lse"]["dv"]
    whole = steps[0].errors["out"]
    raised = {s.point: s.errors["out"] for s in steps if s.change == "raised"}
    assert raised["scores"] < whole
    assert raised["delta"] == whole


def test_the_waterfall_has_a_row_for_each_point_at_which_the_profile_rounds():
    steps = list(waterfall(Problem(profile="peer_2510_04212", **SMALL)))
    lowered = {s.point: s.errors for s in steps if s.change == "lowered"}
    assert list(lowered) == list(FIELDS)
    assert lowered["block_output"]["out"] > 1e-4
    assert lowered["gradient_products"]["out"] < 1e-14 < 1e-4 < lowered["gradient_products"]["dq"]


def test_tensors_of_a_file_are_read_rounded_and_asked_for_by_name(tmp_path):
    q = torch.randn(1, 2, 8, 16)
    path = tmp_path / "qkv.safetensors"
    save_file({"q": q, "k": q + 1, "v": q + 2}, path)
    found = read_inputs(path, "bf16")
    assert torch.equal(found.v, (q + 2).bfloat16())
    save_file({"q": q, "key": q + 1}, path)
    with pytest.raises(ValueError, match="must hold q, k and v, got key, q; missing: k, v"):
        read_inputs(path, "bf16")
    with pytest.raises(ValueError, match="qkv must be a safetensors file, got 'nowhere'"):
        read_inputs(tmp_path.__class__("nowhere"), "bf16")


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        ({"profile": "fa22"}, "profile must be a known profile, got 'fa22'; nearest: fa2"),
        ({"baseline": "plane"}, "baseline must be a known profile, got 'plane'; nearest: plain"),
        ({"distribution": "gauss"}, "distribution must be one of normal"),
        ({"format": "bf61"}, "nearest: bf16"),
        ({"changes": (("accumulators", "bf16"),)}, "no field 'accumulators'; nearest: accumulator"),
        ({"block_k": 48}, "block_k must be one of"),
    ],
)
def test_unknown_names_are_refused_with_their_neighbours(problem, message):
    with pytest.raises(ValueError, match=message):
        measure(Problem(**problem), backward=False)


@pytest.mark.parametrize(
    "changes",
    [
        {"k": torch.zeros(2, 2, 16, 16)},
        {"v": torch.zeros(2, 2, 16, 32)},
        {"v": torch.zeros(1, 2, 16, 32), "dout": torch.zeros(1, 2, 16, 16)},
        {"q": torch.zeros(2, 16, 16)},
        {"k": torch.zeros(1, 2, 16, 16, dtype=torch.int64)},
        {"dout": torch.zeros(1, 2, 8, 16)},
    ],
)
def test_tensors_that_do_not_go_together_are_refused_by_file_and_name(tmp_path, changes):
    sound = {name: torch.zeros(1, 2, 16, 16) for name in "qkv"}
    path = tmp_path / "qkv.safetensors"
    save_file(sound | changes, path)
    with pytest.raises(ValueError, match=r"qkv\.safetensors: must hold q, k, v \(batch, heads"):
        read_inputs(path, "bf16")


def test_a_file_of_noise_is_refused_by_name(tmp_path):
    path = tmp_path / "qkv.safetensors"
    path.write_bytes(b"noise" * 100)
    with pytest.raises(ValueError, match=r"qkv\.safetensors: must be a whole snapshot"):
        read_inputs(path, "bf16")
