"""`compare` in one pass: heads, ranges, padding, histogram and golden, against the definitions."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_kernels.formats import format_named
from attention_kernels.rounding import INPUT_DTYPES
from attention_kernels.testing import statistics
from stability.metrics import result_sums
from stability.metrics.deviation import (
    LAYER_COLUMNS,
    PART_COLUMNS,
    compare,
    deviation,
    position_ranges,
)
from stability.metrics.golden_error import GOLDEN_COLUMNS, PART_GOLDEN_COLUMNS
from stability.metrics.ulp import ULP_EDGES
from tests.stability.metrics.floored_ulps import bias_and_error, floored_ulps, golden_metrics

FLOORED = ("error_ratio", "golden_bias_ulp", "golden_bias_ulp_baseline", "baseline_over_rounding")
"""What depends on the floor of ULPs against the golden."""


def _results(shape=(2, 3, 10, 16), dtype=torch.bfloat16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    golden = torch.randn(shape, generator=generator, dtype=torch.float64)
    noise = [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2)]
    x, reference = ((golden * (1 + 2**-7 * n)).to(dtype) for n in noise)
    return x, reference, golden


def _close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12, equal_nan=True)


def _part(cut, x, reference, golden, output_format):
    """Return what a part must have: its own figures, but ULPs of the whole's floor."""
    metrics = deviation(x[cut], reference[cut])
    ulps = floored_ulps(x, reference, output_format)[cut]
    metrics["bias_ulp"], metrics["bias_ulp_se"] = bias_and_error(ulps)
    values = [metrics[name] for name in PART_COLUMNS]
    against = golden_metrics(x, reference, golden, cut)
    values += [against[name] for name in PART_GOLDEN_COLUMNS]
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("chunk", [1, 100, 2**17])
def test_heads_and_ranges_are_those_of_the_slices(dtype, chunk, monkeypatch):
    monkeypatch.setattr(result_sums, "CHUNK", chunk)
    x, reference, golden = _results(dtype=dtype)
    for tensor in (x, reference, golden):
        tensor[:, 2] *= 2.0**-5  # a head that lies below the floor
    found = compare(x, reference, golden=golden, heads=True, positions=4)
    against = golden_metrics(x, reference, golden)
    assert tuple(against) == GOLDEN_COLUMNS
    whole = [*deviation(x, reference).values(), *against.values()]
    _close(found.layer, torch.tensor(whole, dtype=torch.float64))
    columns = len(PART_COLUMNS) + len(PART_GOLDEN_COLUMNS)
    assert found.heads.shape == (3, columns)
    for head in range(3):
        cut = (slice(None), head)
        _close(found.heads[head], _part(cut, x, reference, golden, INPUT_DTYPES[dtype]))
    ranges = position_ranges(10, 4)
    assert found.positions.shape == (len(ranges), columns)
    for index, rows in enumerate(ranges):
        cut = (slice(None), slice(None), slice(rows.start, rows.stop))
        _close(found.positions[index], _part(cut, x, reference, golden, INPUT_DTYPES[dtype]))


@settings(max_examples=60)
@given(length=st.integers(1, 5000), count=st.integers(1, 40))
def test_ranges_part_the_positions_evenly(length, count):
    ranges = position_ranges(length, count)
    assert [i for rows in ranges for i in rows] == list(range(length))
    sizes = [len(rows) for rows in ranges]
    assert len(ranges) == min(length, count)
    assert max(sizes) - min(sizes) <= 1


@settings(max_examples=40)
@given(
    batch=st.integers(1, 3),
    heads=st.integers(1, 3),
    length=st.integers(1, 9),
    seed=st.integers(0, 10**6),
)
def test_padding_is_left_out_of_everything(batch, heads, length, seed):
    x, reference, golden = _results((batch, heads, length, 16), seed=seed)
    valid = torch.rand(batch, 1, length, generator=torch.Generator().manual_seed(seed)) < 0.7
    kept = valid.expand(batch, heads, length)
    spoiled = x.masked_fill(~kept.unsqueeze(-1), torch.nan)
    found = compare(spoiled, reference, golden=golden, valid=valid)
    if not kept.any():
        count = LAYER_COLUMNS.index("nonfinite")
        measures = torch.cat([found.layer[:count], found.layer[count + 1 : -1]])
        assert measures.isnan().all()
        assert found.layer[count] == found.layer[-1] == 0
        assert found.histogram.sum() == 0
        return
    # of one head of one sequence at a time: each has a floor of its own against the golden
    expected = compare(x[kept], reference[kept], golden=golden[kept])
    columns = (*LAYER_COLUMNS, *GOLDEN_COLUMNS)
    unfloored = [columns.index(name) for name in columns if name not in FLOORED]
    _close(found.layer[unfloored], expected.layer[unfloored])
    by_head = compare(spoiled, reference, golden=golden, valid=valid, heads=True).heads
    for head in range(heads) if batch == 1 else ():
        rows = kept[0, head]
        alone = golden_metrics(*(t[:, head, rows] for t in (x, reference, golden)))
        _close(
            by_head[head, len(PART_COLUMNS) :],
            torch.tensor([alone[name] for name in PART_GOLDEN_COLUMNS]).double(),
        )
    assert torch.equal(found.histogram, expected.histogram)
    assert found.layer[LAYER_COLUMNS.index("nonfinite")] == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_the_histogram_counts_errors_between_its_edges(dtype):
    x, reference, _ = _results((1, 2, 40, 16), dtype)
    found = compare(x, reference, output_format="bf16").histogram
    errors = floored_ulps(x, reference, "bf16")
    # an error on an edge belongs to the bin further from zero
    outward = np.nextafter(errors, np.where(errors < 0, -np.inf, np.inf))
    expected, _ = np.histogram(outward, [-np.inf, *ULP_EDGES, np.inf])
    assert found.tolist() == expected.tolist()
    assert found.sum() == x.numel()


def test_an_error_on_an_edge_counts_outward():
    reference = torch.full((1, 1, 1, 16), 1.0, dtype=torch.float64)
    edges = torch.tensor(ULP_EDGES, dtype=torch.float64).view(1, 1, 1, -1)
    found = compare(reference + edges * 2.0**-7, reference, output_format="bf16").histogram
    assert found.tolist() == [1] * 8 + [0] + [1] * 8


def test_two_equal_infinities_are_left_out_and_others_counted():
    x, reference, _ = _results((1, 1, 4, 16), torch.float32)
    x[0, 0, 0, :2] = torch.tensor([torch.inf, -torch.inf])
    reference[0, 0, 0, :2] = torch.tensor([torch.inf, torch.inf])
    x[0, 0, 1, 0] = torch.nan
    found = dict(zip(LAYER_COLUMNS, compare(x, reference).layer.tolist(), strict=True))
    assert found["nonfinite"] == 2
    keep = torch.ones(4, 16, dtype=torch.bool)
    keep[0, :2] = keep[1, 0] = False
    expected = deviation(x[0, 0][keep].view(1, -1), reference[0, 0][keep].view(1, -1))
    for name in LAYER_COLUMNS[:-1]:
        assert found[name] == pytest.approx(expected[name], rel=1e-12), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nothing_is_written_into_the_callers_tensors(dtype):
    x, reference, golden = _results(dtype=dtype)
    x[0, 0, 0, 0] = torch.nan
    before = [t.clone() for t in (x, reference, golden)]
    compare(x, reference, golden=golden, valid=torch.ones(2, 1, 10, dtype=torch.bool))
    for now, then in zip((x, reference, golden), before, strict=True):
        assert torch.equal(now.nan_to_num(9.0), then.nan_to_num(9.0))


def test_strides_do_not_matter():
    x, reference, golden = _results((2, 10, 3, 16))
    turned = [t.transpose(1, 2) for t in (x, reference, golden)]
    straight = [t.contiguous() for t in turned]
    first = compare(turned[0], turned[1], golden=turned[2], heads=True)
    second = compare(straight[0], straight[1], golden=straight[2], heads=True)
    _close(first.layer, second.layer)
    _close(first.heads, second.heads)


def test_nothing_waits_for_a_device():
    x, reference, golden = (t.to("meta") for t in _results())
    valid = torch.ones(2, 1, 10, dtype=torch.bool, device="meta")
    found = compare(x, reference, golden=golden, valid=valid, heads=True, positions=2)
    assert found.layer.shape == (len(LAYER_COLUMNS) + len(GOLDEN_COLUMNS),)
    assert found.histogram.shape == (len(ULP_EDGES) + 1,)


def test_parts_need_four_dimensions():
    x, reference, _ = _results((3, 10, 16))
    with pytest.raises(
        ValueError, match=r"x must be \(batch, heads, length, head_dim\).*got \(3, "
    ):
        compare(x, reference, heads=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_gain_and_bias_are_those_of_the_kernels_own_check(dtype):
    x, reference, golden = _results((1, 3, 10, 16), dtype)
    found = compare(x, reference, golden=golden, heads=True).heads[:, len(PART_COLUMNS) :]
    columns = dict(zip(PART_GOLDEN_COLUMNS, found.unbind(1), strict=True))
    format = format_named(INPUT_DTYPES[dtype])
    for result, suffix in ((x, ""), (reference, "_baseline")):
        _close(columns[f"gain{suffix}"], statistics.gain(result, golden)[0])
        bias = statistics.bias_ulp(result, golden, format)[0]
        _close(columns[f"golden_bias_ulp{suffix}"], bias)
