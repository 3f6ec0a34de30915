"""A check passes what is right, fails what is wrong, and says what is wrong with it."""

import functools
import re

import pytest
import torch

from attention_kernels import PROFILES, baseline_attention, flash_attention, golden_attention
from attention_kernels.testing import Shape, check_attention, plant
from attention_kernels.testing.cells import DTYPES, QUICK, Cell, reference
from attention_kernels.testing.formula import RESULTS
from attention_kernels.testing.laws import LAWS, draw
from attention_kernels.testing.limits import excesses
from attention_kernels.testing.measured import measure
from attention_kernels.testing.statistics import angle, gain, over_looks, t_quantile

FA2 = functools.partial(flash_attention, numerics=PROFILES["fa2"])
ONE = [Cell(law="normal", shape=Shape(2, 2, 1, 65, 65, 32), causal=True)]


FEW = [
    Cell(law="normal", shape=Shape(6, 2, 1, 65, 65, 32), causal=True),
    Cell(law="normal", shape=Shape(6, 2, 2, 70, 70, 32), causal=False),
]
UNEQUAL = [cell for cell in QUICK if cell.shape.query_len != cell.shape.key_len]


def quick(attention, dtype="bf16", cells=None, **options):
    return check_attention(attention, dtypes=[dtype], quick=True, cells=cells, **options)


def plain(q, k, v, *, causal, scale=None):
    return baseline_attention(q, k, v, causal=causal, scale=scale)


def test_flash_passes_the_quick_cells():
    report = quick(FA2)
    assert report.passed, report.sentence
    assert report.cells == len(QUICK)
    assert not report.unsupported


@pytest.mark.parametrize("dtype", DTYPES)
def test_plain_attention_and_golden_pass(dtype):
    for attention in (plain, golden):
        report = quick(attention, dtype, FEW)
        assert report.passed, report.sentence


@pytest.mark.parametrize("cell", QUICK[2:5], ids=str)
def test_the_formula_without_a_mistake_is_the_golden(cell):
    where = reference(cell, torch.float32)
    for name, x in where.formula().results().items():
        torch.testing.assert_close(x, where.golden[name], atol=1e-11, rtol=1e-11)


@pytest.mark.parametrize(
    ("fault", "dtype", "said"),
    [
        ("scale_gain", "bf16", "the softmax scale is 1.005"),
        ("dk_gain", "bf16", "dk is 1.00"),
        ("delta_off", "fp16", r"delta = rowsum\(dO \* O\) is 0.95"),
        ("dropped_key", "bf16", "keys 31, 63 are missed|key 31 is missed|keys 31, 63"),
        ("causal_leak", "fp32", r"causal mask lets row i see key i\+1"),
        ("stale_block", "fp32", "a stale block: tile 1 of 32 keys"),
    ],
)
def test_a_planted_fault_is_found_and_named(fault, dtype, said):
    report = quick(plant(plain, fault), dtype, FEW)
    assert not report.passed
    assert re.search(said, report.sentence), report.sentence


def test_what_is_refused_is_listed_and_all_of_it_is_no_pass():
    def equal_lengths(q, k, v, *, causal, scale=None):
        if q.shape[2] != k.shape[2]:
            raise NotImplementedError("query_len other than key_len")
        return plain(q, k, v, causal=causal, scale=scale)

    def nothing(q, k, v, *, causal, scale=None):
        raise ValueError("causal must be a colour")

    report = quick(equal_lengths, cells=[*FEW, *UNEQUAL])
    assert report.passed
    assert list(report.unsupported) == ["query_len other than key_len"]
    report = quick(nothing, cells=FEW)
    assert not report.passed
    assert not report.cells
    assert report.sentence.endswith("nothing was looked at: causal must be a colour")


def test_no_cells_are_no_pass():
    assert not quick(plain, cells=[]).passed


def golden(q, k, v, *, causal, scale=None):
    return golden_attention(q, k, v, causal=causal, scale=scale).to(q.dtype)


def changed(**changes):
    def attend(q, k, v, *, causal, scale=None):
        out = plain(q, k, v, causal=causal, scale=scale)
        return changes["out"](out, q)

    return attend


BROKEN = {
    "raises": (lambda out, q: 1 // 0, "raises ZeroDivisionError"),
    "shape": (lambda out, q: out[..., :-1], "out has shape"),
    "dtype": (lambda out, q: out.double(), "out has dtype torch.float64"),
    "missing": (lambda out, q: out.detach(), "dq is missing: out carries no gradient"),
    "NaN": (lambda out, q: out.masked_fill(out == out.amax(), torch.nan), "NaN in out"),
    "not repeatable": (
        lambda out, q: out * (1 + 0.01 * torch.rand(())),
        "out is not repeatable",
    ),
    "input changed": (lambda out, q: (q.detach().mul_(1), out)[1], "q, an input, is changed"),
    "infinity": (lambda out, q: out.masked_fill(out == out.amax(), torch.inf), "infinity in out"),
    "unwritten": (lambda out, q: out + torch.empty_like(out) * 0, "NaN in out"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_promise_is_told_without_statistics(what):
    change, said = BROKEN[what]
    report = quick(changed(out=change), cells=ONE)
    assert not report.passed
    assert said in report.sentence


def test_an_unknown_dtype_is_refused():
    with pytest.raises(ValueError, match="dtypes must be among bf16, fp16, fp32, got 'int8'"):
        quick(plain, "int8")


def test_given_inputs_are_checked_too():
    given = draw("normal", Shape(2, 2, 2, 70, 70, 16), torch.float32, seed=0)
    report = quick(plain, cells=[], given=given)
    assert report.passed
    assert {row["law"] for row in report.statistics} == {"given inputs"}


@pytest.mark.parametrize("law", LAWS)
def test_a_law_gives_the_same_values_for_a_seed_and_all_finite(law):
    shape = Shape(1, 2, 1, 40, 40, 16)
    one, again = (draw(law, shape, torch.bfloat16, seed=3) for _ in range(2))
    for x, y in zip(one, again, strict=True):
        assert torch.equal(x, y)
        assert x.isfinite().all()


def test_tied_maxima_are_ties_of_the_largest_probability():
    where = Cell(law="tied maxima", shape=Shape(1, 2, 2, 40, 40, 16), causal=False)
    weights = reference(where, torch.bfloat16).formula().weights()
    first, second = weights.topk(2, dim=-1).values.unbind(-1)
    assert torch.equal(first, second)


def test_gain_and_angle_tell_a_factor_from_noise():
    golden = torch.randn(
        1, 2, 50, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    torch.testing.assert_close(gain(1.01 * golden, golden), torch.full((1, 2), 0.01).double())
    assert angle(1.01 * golden, golden).max() < 1e-7
    turned = golden + 0.1 * golden.flip(-1)
    assert angle(turned, golden).min() > 0.05


def test_students_t_is_that_of_the_tables():
    assert t_quantile(0.05, 10) == pytest.approx(2.228, abs=1e-3)
    assert t_quantile(0.001, 3) == pytest.approx(12.92, abs=1e-2)
    assert t_quantile(2e-6, 15) == pytest.approx(7.43, abs=0.3)


def test_a_mean_over_looks_is_sure_only_beyond_its_limit():
    near = over_looks([1.0, 1.1, 0.9, 1.05])
    assert near.surely_beyond(0.5, 0.01)
    assert not near.surely_beyond(0.99, 0.01)
    assert not over_looks([7.0]).surely_beyond(1.0, 0.5)


@pytest.mark.parametrize("result", RESULTS)
def test_a_result_rounded_once_exceeds_nothing(result):
    wheres = [reference(cell, torch.bfloat16) for cell in FEW]
    rounded = [
        measure(
            where,
            result,
            where.golden[result].to(torch.float32 if result == "lse" else where.dtype),
        )
        for where in wheres
    ]
    assert not excesses(rounded, "bf16")
    off = [measure(x.where, result, 1.02 * x.values.double()) for x in rounded]
    assert excesses(off, "bf16")
