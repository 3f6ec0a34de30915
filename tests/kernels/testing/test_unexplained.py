"""What follows from a mistake is told apart from what does not, and alike mistakes by all cells."""

import collections

import pytest
import torch

from attention_kernels import baseline_attention, golden_attention
from attention_kernels.testing import Shape, check_attention, unexplained
from attention_kernels.testing.cells import QUICK, Cell
from attention_kernels.testing.limits import Excess
from tests.kernels.testing.checked import FEW, Turned, plain, quick

FEW_LAWS = [x for x in QUICK if x.law in ("normal", "outliers") and x.shape.query_len < 130]

WITH_EMPTY = [FEW[1], Cell(law="normal", shape=Shape(2, 2, 2, 70, 40, 32), causal=True)]


SINGLE = [
    Cell(law="normal", shape=Shape(2, 2, 2, length, length, 32), causal=False)
    for length in (64, 70)
]


GROUPED = Cell(law="normal", shape=Shape(2, 4, 2, 65, 65, 32), causal=True)


def leaky(q, k, v, *, causal, scale=None):
    """Attention in which row i sees key i + 1."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool)
        scores = scores.masked_fill(~visible.tril(k.shape[2] - q.shape[2] + 1), -torch.inf)
    return scores.float().softmax(-1).nan_to_num(0).to(q.dtype) @ v


def noisy(size):
    """Return what gives a gradient an error of this size without a direction."""

    def turn(dx):
        drawn = torch.randn(dx.shape, generator=torch.Generator().manual_seed(0), dtype=dx.dtype)
        return dx * (1 + size * drawn)

    return turn


def without_last_key(q, k, v, *, causal, scale=None, every=0):
    """Attention that misses the last key, or the last of `every` so many."""
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    every = every or k.shape[2]
    hidden = torch.arange(k.shape[2]) % every == every - 1
    return scores.masked_fill(hidden, -torch.inf).float().softmax(-1).nan_to_num(0).to(q.dtype) @ v


def without_last_keys(q, k, v, *, causal, scale=None):
    """Attention that misses the last key of each tile of 32 keys, also of one that is not full."""
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    keys = torch.arange(k.shape[2])
    hidden = (keys % 32 == 31) | (keys == len(keys) - 1)
    return scores.masked_fill(hidden, -torch.inf).float().softmax(-1).to(q.dtype) @ v


class _NoDelta(torch.autograd.Function):
    """Attention, causal where asked, whose backward has no delta in the last tile of 32 keys."""

    @staticmethod
    def forward(ctx, q, k, v, causal, scale):
        out, lse = baseline_attention(q, k, v, causal=causal, scale=scale, return_lse=True)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.causal, ctx.scale = causal, q.shape[-1] ** -0.5 if scale is None else scale
        return out

    @staticmethod
    def backward(ctx, *douts):
        q, k, v, out, lse, dout = (x.float() for x in (*ctx.saved_tensors, *douts))
        hidden = torch.ones(q.shape[2], k.shape[2]).triu(1 + k.shape[2] - q.shape[2]).bool()
        scores = (ctx.scale * q @ k.mT).masked_fill(hidden & ctx.causal, -torch.inf)
        p = (scores - lse.unsqueeze(-1)).exp()
        keys = torch.arange(k.shape[2])
        delta = (dout * out).sum(-1, keepdim=True) * (keys < (len(keys) - 1) // 32 * 32)
        ds = ctx.scale * p * (dout @ v.mT - delta)
        dtype = ctx.saved_tensors[0].dtype
        return *(x.to(dtype) for x in (ds @ k, ds.mT @ q, p.mT @ dout)), None, None


def told(report, follows):
    return [(x.what, x.noun) for x in report.findings if x.follows is follows]


def test_a_result_that_is_missing_is_no_factor_of_zero():
    at = {"law": "normal", "error": 0.0, "limit": 1e-3, "heads": (0,), "of_heads": 1}
    missing = Excess(statistic="gain", result="dq", value=-1.0, **at)
    tenfold = Excess(statistic="gain", result="dk", value=9.0, **at)
    # what is divided by nothing would be as large as no error is
    assert unexplained._gains([missing, tenfold]) == {"dk": tenfold}


def test_all_that_one_mistake_makes_follows_from_it():
    report = quick(leaky, cells=FEW_LAWS)
    assert "row i see key i+1" in report.sentence
    assert {noun for _, noun in told(report, True)} >= {"out", "dv"}
    assert not told(report, False)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_a_second_mistake_does_not_follow_from_the_first(dtype):
    def both(q, k, v, *, causal, scale=None):
        return leaky(q, k, Turned.apply(v, lambda dx: 1.05 * dx), causal=causal, scale=scale)

    report = quick(both, dtype, cells=FEW_LAWS)
    assert "row i see key i+1" in report.sentence
    assert {noun for _, noun in told(report, True)} >= {"out", "dv"}
    # and no more than it: the errors of rows and of ranges follow from the second
    (gain,) = (x for x in report.findings if "not explained by that" in x.sentence)
    assert (gain.what, gain.follows) == ("gain", False)
    assert gain.value == pytest.approx(0.05, abs=0.003)
    assert gain.sentence.startswith("not explained by that: dv is 1.0")


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_a_second_mistake_that_is_a_factor_hides_no_third(dtype):
    def all_three(q, k, v, *, causal, scale=None):
        turned = Turned.apply(v, lambda dx: noisy(0.2)(1.05 * dx))
        return leaky(q, k, turned, causal=causal, scale=scale)

    report = quick(all_three, dtype, cells=FEW_LAWS)
    assert set(told(report, False)) >= {("gain", "dv"), ("error ratio", "dv")}


@pytest.mark.parametrize("noise", [0.0, 0.01])
def test_a_row_that_a_mistake_makes_zero_hides_no_other_row(noise):
    def both(q, k, v, *, causal, scale=None):
        v = Turned.apply(v, noisy(noise))
        return without_last_key(q, k, v, causal=causal, scale=scale, every=16)

    cells = [Cell(law="normal", shape=Shape(2, 2, 2, 64, 64, 32), causal=False)]
    report = quick(both, "fp32", cells=cells)
    assert "the last key of each tile of 16" in report.sentence
    assert {noun for _, noun in told(report, False)} == ({"dv"} if noise else set())


def test_a_cell_of_which_a_mistake_leaves_nothing_follows_from_it():
    shapes = [Shape(2, 2, 2, 65, 65, 32), Shape(2, 2, 2, 1, 1, 32)]
    cells = [Cell(law="normal", shape=shape, causal=False) for shape in shapes]
    report = quick(without_last_key, cells=cells)
    assert "the last key is missed" in report.sentence
    assert not told(report, False)


def test_a_mistake_in_one_head_alone_leaves_what_is_wrong_in_another():
    def uneven(q, k, v, *, causal, scale=None):
        out = leaky(q, k, v, causal=causal, scale=scale)
        return torch.cat([out[:, :-1], 0.9 * out[:, -1:]], 1)

    assert "out" in {noun for _, noun in told(quick(uneven, cells=FEW_LAWS), False)}


def test_a_mistake_of_one_head_is_not_sought_in_others():
    def first_head(q, k, v, *, causal, scale=None):
        wrong = leaky(q[:, :1], k[:, :1], v[:, :1], causal=causal, scale=scale)
        return torch.cat([wrong, plain(q[:, 1:], k[:, 1:], v[:, 1:], causal=causal)], 1)

    cells = [Cell(law="normal", shape=Shape(2, 2, 2, 70, 70, 32), causal=True)]
    report = quick(first_head, cells=cells)
    assert "row i see key i+1, in head 0 alone" in report.sentence
    assert told(report, True)
    assert not told(report, False)


def test_of_mistakes_that_are_alike_in_one_cell_the_one_of_all_cells_is_named():
    def without_tail(q, k, v, *, causal, scale=None):
        # of 65 keys the tail is the last key, of 70 the last six
        keys = k.shape[2] // 16 * 16
        return baseline_attention(q, k[:, :, :keys], v[:, :, :keys], scale=scale)

    # mistakes are laid beside the first, which has a row for each and more keys
    full = [Shape(2, 2, 2, 65, 65, 32), Shape(2, 2, 2, 50, 70, 32)]
    cells = [Cell(law="normal", shape=shape, causal=False) for shape in full]
    said = quick(without_tail, "fp32", cells=cells).sentence
    assert "the last tile of 16 keys that is not full" in said
    assert "the last key is missed" not in said


def test_a_mistake_that_leaves_more_than_another_is_not_made_in_all_cells(monkeypatch):
    made = collections.Counter()

    def counted(where, mistake, size):
        made[mistake.words] += 1
        return with_mistake(where, mistake, size)

    with_mistake = unexplained._with_mistake
    monkeypatch.setattr(unexplained, "_with_mistake", counted)
    shapes = [Shape(2, 2, 2, length, length, 32) for length in (65, 66, 67, 68, 69)]
    cells = [Cell(law="normal", shape=shape, causal=False) for shape in shapes]
    assert "the last key is missed" in quick(without_last_key, cells=cells).sentence
    assert made.pop("the last key is missed") == len(cells)
    # in 65 keys the last one is all of a tail, and in no other length
    assert made
    assert max(made.values()) <= 2


def test_the_same_mistake_in_other_places_of_another_cell_is_known_again():
    def misses(q, k, v, *, causal, scale=None):
        kept = torch.arange(k.shape[2]) % 32 != 31
        hidden = v * kept[:, None]
        scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
        if causal:
            visible = torch.ones(scores.shape[-2:], dtype=torch.bool)
            scores = scores.masked_fill(~visible.tril(k.shape[2] - q.shape[2]), -torch.inf)
        return scores.masked_fill(~kept, -torch.inf).float().softmax(-1).to(q.dtype) @ hidden

    shapes = [Shape(2, 2, 2, 65, 65, 32), Shape(2, 2, 2, 140, 140, 32)]
    cells = [Cell(law="normal", shape=shape, causal=True) for shape in shapes]
    report = quick(misses, "fp32", cells=cells)
    assert "the last key of each tile of 32" in report.sentence
    assert told(report, True)
    assert not told(report, False)


def hiding(q, k, v, *, causal, scale=None, least=0.0):
    """Attention whose rows without keys are 0 by `where`, after a division by `least` or more."""
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool)
        scores = scores.masked_fill(~visible.tril(k.shape[2] - q.shape[2]), -torch.inf)
    largest = scores.detach().amax(-1, keepdim=True)
    weights = (scores - largest.masked_fill(largest == -torch.inf, 0)).exp()
    total = weights.sum(-1, keepdim=True)
    return torch.where(total == 0, 0, weights / total.clamp(min=least) @ v)


def test_nan_in_a_gradient_says_what_is_right_and_what_to_do_which_helps():
    said = quick(hiding, "fp32", cells=WITH_EMPTY).sentence
    assert "NaN in dv in every key, in 1 of 2 cells" in said
    assert "; out, dq and dk are right. So it is the backward of these rows" in said
    assert "0 / 0" in said
    assert "divide such a row by 1" in said

    def divided(*args, **options):
        return hiding(*args, **options, least=1.0)

    assert quick(divided, "fp32", cells=WITH_EMPTY).passed


def test_nan_in_a_gradient_says_nothing_of_results_that_are_off():
    def off(q, k, v, *, causal, scale=None):
        return hiding(q, k, v, causal=causal, scale=scale) * 1.01

    said = quick(off, "fp32", cells=WITH_EMPTY).sentence
    assert "NaN in dv" in said
    assert " right" not in said


def test_what_is_right_is_said_of_the_dtypes_it_is_right_in():
    def of_bf16(q, k, v, *, causal, scale=None):
        factor = 1.1 if q.dtype == torch.bfloat16 else 1.0
        return hiding(
            Turned.apply(q, lambda dx: factor * dx), k, v, causal=causal, scale=scale, least=1.0
        )

    def also_nan(q, k, v, *, causal, scale=None):
        nan = torch.nan if q.shape[2] > k.shape[2] else 1.0
        return of_bf16(q, k, Turned.apply(v, lambda dx: nan * dx), causal=causal, scale=scale)

    report = check_attention(also_nan, dtypes=["bf16", "fp32"], cells=WITH_EMPTY)
    said = {x.dtypes: x.sentence for x in report.findings if x.what == "NaN"}
    assert "; out and dk are right" in said["bf16",]
    assert "; out, dq and dk are right" in said["fp32",]


def test_what_nan_in_the_lse_comes_of_is_not_told():
    def nan_lse(q, k, v, *, causal, scale=None, return_lse=False):
        out, lse = baseline_attention(q, k, v, causal=causal, scale=scale, return_lse=True)
        return (out, lse.masked_fill(lse == -torch.inf, torch.nan)) if return_lse else out

    said = quick(nan_lse, "fp32", cells=WITH_EMPTY).sentence
    assert "NaN in lse" in said
    assert "dk and dv are right" in said
    assert "backward" not in said


def test_a_mistake_that_names_what_is_right_is_told_once_for_all_dtypes():
    def sums_right(q, k, v, *, causal, scale=None):
        first = [x[:, :1].detach() + (x - x.detach()) for x in (k, v)]
        return baseline_attention(q, *first, causal=causal, scale=scale)

    report = check_attention(sums_right, dtypes=["bf16", "fp32"], cells=[GROUPED])
    assert "are summed over the right heads" in report.sentence
    (diagnosis,) = (x for x in report.findings if x.what == "diagnosis")
    assert diagnosis.dtypes == ("bf16", "fp32")


def test_what_a_mistake_may_round_to_is_neither_said_to_follow_nor_not_to():
    def both(q, k, v, *, causal, scale=None):
        return leaky(q, k, Turned.apply(v, lambda dx: 1.003 * dx), causal=causal, scale=scale)

    report = quick(both, cells=FEW_LAWS)
    assert "row i see key i+1" in report.sentence
    assert not told(report, False)
    (gain,) = (x for x in report.findings if x.sentence.startswith("perhaps"))
    assert gain.sentence.startswith("perhaps not explained by that: dv is 1.00")
    assert gain.value == pytest.approx(0.003, abs=0.001)


@pytest.mark.parametrize(("empty", "passes"), [(-torch.inf, True), (0.0, False), (1e4, False)])
def test_the_lse_of_a_row_without_keys_is_minus_infinity_and_no_number(empty, passes):
    def attention(q, k, v, *, causal, scale=None, return_lse=False):
        out, lse = golden_attention(q, k, v, causal=causal, scale=scale, return_lse=True)
        lse = lse.masked_fill(lse == -torch.inf, empty)
        return (out.to(q.dtype), lse) if return_lse else out.to(q.dtype)

    report = quick(attention, cells=WITH_EMPTY)
    assert report.passed == passes, report.sentence
    assert passes or "lse" in report.sentence


def test_a_delta_that_is_missing_in_the_last_tile_alone_is_named():
    def without_delta(q, k, v, *, causal, scale=None):
        return _NoDelta.apply(q, k, v, causal, scale)

    report = quick(without_delta, cells=SINGLE)
    said = "delta = rowsum(dO * O) is missing, it is 0, in the last tile of 32 keys, in every head"
    assert report.findings[0].sentence.startswith(said), report.sentence
    assert not told(report, False)


def test_the_last_key_of_each_tile_and_of_the_tail_is_not_the_last_key_alone():
    report = quick(without_last_keys, cells=SINGLE)
    said = "are missed: the last key of each tile of 32, of the tail too, in every head"
    assert said in report.sentence, report.sentence
    assert "the last key is missed" not in report.sentence
    assert not told(report, False)
    alone = quick(without_last_key, cells=SINGLE)
    assert "the last key is missed, in every head (seen in" in alone.sentence
    assert "of the tail too" not in alone.sentence
