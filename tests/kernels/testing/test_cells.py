"""Each class of calls that a kernel has a path for is among the cells of a check."""

import functools
import itertools

import pytest
import torch

from attention_kernels.testing import Shape
from attention_kernels.testing.cells import FULL, QUICK, Cell, not_looked_at, reference
from attention_kernels.testing.formula import RESULTS
from attention_kernels.testing.laws import LAWS, draw
from tests.kernels.testing.checked import FA2, FEW, ONE, PLAIN, plain, quick
from tests.sampling import one_in


def test_the_quick_cells_hold_each_class_and_plain_attention_with_both_masks():
    assert [cell.causal for cell in PLAIN] == [True, False]
    assert any(cell.strided for cell in QUICK)
    assert any(not cell.visible().any(-1).all() for cell in QUICK)
    assert any(cell.shape.key_len > 1024 for cell in QUICK)


@pytest.mark.parametrize("cell", QUICK[2:5], ids=str)
def test_the_formula_without_a_mistake_is_the_golden(cell):
    where = reference(cell, torch.float32)
    for name, x in where.formula().results().items():
        torch.testing.assert_close(x, where.golden[name], atol=1e-11, rtol=1e-11)


@pytest.mark.parametrize("size", Shape._fields)
def test_the_full_check_looks_as_far_as_the_quick_one(size):
    largest = [max(getattr(cell.shape, size) or 0 for cell in cells) for cells in (FULL, QUICK)]
    assert largest[0] >= largest[1]


def test_each_check_says_what_it_leaves_out_and_the_full_one_only_what_is_beyond_its_cells():
    of_full, beyond = not_looked_at(QUICK)
    assert of_full == (
        "of the full check 'rare rows' inputs, 5 laws of inputs without a causal mask, "
        "head_dim 96, 12 lengths from 63 to 2050, a head_dim of v that is not q's"
    )
    assert not_looked_at(FULL) == (
        "head_dim above 128, lengths above 2400, heads or heads per kv head (GQA) or batch above "
        "8, combinations that no cell has",
    )
    assert not_looked_at(ONE)[-1] == (
        "head_dim above 32, lengths above 65, heads or heads per kv head (GQA) or batch above 2, "
        "combinations that no cell has"
    )
    report = quick(FA2)
    assert report.passed
    assert report.cells == len(QUICK)
    assert not report.unsupported
    assert report.sentence.startswith(
        f"flash_attention passes the quick check at bf16 in {len(QUICK)}"
    )
    assert report.sentence == f"{report.answer}; not looked at: {of_full}; {beyond}"
    assert "not looked at" not in quick(plain, cells=FEW).sentence


class _Gain(torch.autograd.Function):
    """The identity, whose gradient is 1 % too large."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return 1.01 * grad


CLASSES = {
    "only where a scale is given": lambda q, k, v, causal, scale: scale is not None,
    "only on strided inputs": lambda q, k, v, causal, scale: not v.is_contiguous(),
    "only with a single kv head": lambda q, k, v, causal, scale: 1 == k.shape[1] < q.shape[1],
    "only with head_dim above 64": lambda q, k, v, causal, scale: q.shape[3] > 64,
    "only where query_len != key_len": lambda q, k, v, causal, scale: q.shape[2] == 1,
    "only without a causal mask": lambda q, k, v, causal, scale: not causal,
}


_EACH = [*zip([*CLASSES][::2], ("out", "dk", "dv"), strict=True)]


_REST = [case for case in itertools.product(CLASSES, RESULTS) if case not in _EACH]


@pytest.mark.parametrize(
    ("trait", "what"),
    [*_EACH, *(pytest.param(*case, marks=pytest.mark.slow) for case in _REST if case[1] == "dq")]
    + [
        pytest.param(*case, marks=pytest.mark.long)
        for case in _REST
        if case[1] not in ("dq", "lse")
    ],
)
def test_one_percent_in_one_class_of_calls_alone_fails(trait, what):
    # a kernel has a path of its own for each; the mean over all cells would hide it
    def attend(q, k, v, *, causal, scale=None):
        inputs = {"q": q, "k": k, "v": v}
        wrong = CLASSES[trait](q, k, v, causal, scale)
        if wrong and what != "out":
            inputs[what[1]] = _Gain.apply(inputs[what[1]])
        out = plain(**inputs, causal=causal, scale=scale)
        return 1.01 * out if wrong and what == "out" else out

    def in_class(cell):
        q, k, v, _ = reference(cell, torch.bfloat16).inputs
        return CLASSES[trait](q, k, v, cell.causal, cell.scale)

    few = [cell for cell in QUICK if cell.law == "normal" and cell.shape.batch < 8]
    decoding = [cell for cell in QUICK if cell.shape.query_len == 1 < cell.shape.key_len][:1]
    of_class = [cell for cell in [*few, *decoding] if in_class(cell)]
    report = quick(attend, cells=[*PLAIN, *of_class])
    assert not report.passed
    assert report.findings[0].noun == what, report.sentence
    assert trait in report.sentence, report.sentence


def wrong_where(hits):
    """Return an attention that misses its last key in the calls that `hits` says."""

    def attend(q, k, v, *, causal, scale=None):
        if not hits(q, k, causal):
            return plain(q, k, v, causal=causal, scale=scale)
        visible = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
        visible = visible.tril(k.shape[2] - q.shape[2]) if causal else visible
        visible[:, -1] = False
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=visible, scale=scale
        )

    return attend


USED_BY_LLMS = {
    "long rows at head_dim 128": lambda q, k, causal: q.shape[3] == 128 and k.shape[2] > 128,
    "a multiple of 128": lambda q, k, causal: q.shape[2] > 64 and q.shape[2] % 128 == 0,
    "groups of three": lambda q, k, causal: q.shape[1] == 3 * k.shape[1],
    "decoding without a mask": lambda q, k, causal: q.shape[2] == 1 < k.shape[2] and not causal,
    "a few new queries": lambda q, k, causal: 1 < q.shape[2] <= 16,
    "no gradient, and GQA": lambda q, k, causal: (
        not torch.is_grad_enabled() and q.shape[1] > k.shape[1]
    ),
}


@pytest.mark.parametrize("what", one_in(3, USED_BY_LLMS))
def test_calls_as_language_models_make_them_are_among_the_cells(what):
    def is_hit(cell):
        q, k, _, _ = reference(cell, torch.bfloat16).inputs
        with torch.set_grad_enabled(what != "no gradient, and GQA"):
            return USED_BY_LLMS[what](q, k, cell.causal)

    # the first cell has a single key, which nobody can miss
    cells = [cell for cell in QUICK if is_hit(cell) and cell.shape.key_len > 1][:1]
    assert not quick(wrong_where(USED_BY_LLMS[what]), cells=cells).passed


def by_hand(q, k, v, *, causal, scale=None, change=lambda scores: scores, least=-torch.inf):
    """Attend in FP32 with a running maximum that begins at `least`, and another `change`."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = change(q.float() @ k.float().mT * (scale or q.shape[-1] ** -0.5))
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1 + k.shape[2] - q.shape[2])
    scores = scores.masked_fill(hidden & causal, -torch.inf)
    weights = (scores - scores.detach().amax(-1, keepdim=True).clamp(min=least)).exp()
    return (weights / (weights.sum(-1, keepdim=True) + 1e-30) @ v.float()).to(q.dtype)


def test_a_running_maximum_that_begins_at_zero_fails():
    from_zero = functools.partial(by_hand, least=0.0)
    low = [cell for cell in QUICK if cell.law == "far below zero"]
    assert quick(by_hand, cells=[*PLAIN, *low]).passed
    assert quick(from_zero, cells=PLAIN).passed
    assert not quick(from_zero, cells=low).passed


class _Factor(torch.autograd.Function):
    """Times 1.01, and the gradient as it is."""

    @staticmethod
    def forward(ctx, x):
        return 1.01 * x

    @staticmethod
    def backward(ctx, grad):
        return grad


def test_a_factor_on_the_scores_alone_is_named_with_its_size():
    report = quick(functools.partial(by_hand, change=_Factor.apply), "fp32", cells=FEW)
    assert "the scores are 1.0100" in report.sentence, report.sentence


def test_a_fault_at_the_head_dim_and_the_gqa_of_llms_fails():
    def attend(q, k, v, *, causal, scale=None):
        out = plain(q, k, v, causal=causal, scale=scale)
        return 1.05 * out if q.shape[-1] == 128 and q.shape[1] == 8 * k.shape[1] else out

    usual = [cell for cell in QUICK if cell.shape.head_dim == 128]
    assert set(usual) < set(FULL)
    assert not quick(attend, cells=usual).passed
    assert quick(plain, cells=usual).passed


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
