"""A check passes what is right, fails what is wrong, and says what is wrong with it."""

import functools
import itertools
import random
import re

import pytest
import torch

from attention_kernels import PROFILES, baseline_attention, flash_attention, golden_attention
from attention_kernels.testing import Shape, check_attention, plant
from attention_kernels.testing.cells import DTYPES, FULL, QUICK, Cell, not_looked_at, reference
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
PLAIN = [cell for cell in QUICK if cell.is_plain()]
UNEQUAL = [cell for cell in QUICK if cell.shape.query_len != cell.shape.key_len]


def quick(attention, dtype="bf16", cells=None, **options):
    return check_attention(attention, dtypes=[dtype], quick=True, cells=cells, **options)


def plain(q, k, v, *, causal, scale=None):
    return baseline_attention(q, k, v, causal=causal, scale=scale)


def test_the_quick_cells_hold_each_class_and_plain_attention_with_both_masks():
    assert [cell.causal for cell in PLAIN] == [True, False]
    assert any(cell.strided for cell in QUICK)
    assert any(not cell.visible().any(-1).all() for cell in QUICK)
    assert any(cell.shape.key_len > 1024 for cell in QUICK)


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
        raise ValueError("dtype must be float64, got torch.bfloat16")

    report = quick(equal_lengths, cells=[*FEW, *UNEQUAL])
    assert report.passed
    assert list(report.unsupported) == ["query_len other than key_len"]
    assert f"it refuses {len(UNEQUAL)} more: 'query_len other than key_len'" in report.sentence
    assert not report.plain_refused
    report = quick(nothing, cells=FEW)
    assert not report.passed
    assert not report.cells
    assert report.sentence.endswith(
        "nothing was looked at: dtype must be float64, got torch.bfloat16"
    )


def test_plain_attention_refused_stands_in_the_answer():
    def causal_alone(q, k, v, *, causal, scale=None):
        if not causal:
            raise ValueError("only causal=True is supported, got False")
        return plain(q, k, v, causal=causal, scale=scale)

    report = quick(causal_alone, cells=[*FEW, *PLAIN])
    assert report.passed
    assert "it refuses 2 more, 1 of them plain attention (bf16, normal" in report.sentence
    assert report.to_dict()["plain_refused"] == [f"bf16, {PLAIN[1]}"]


def test_a_dtype_that_is_refused_is_not_said_to_pass():
    def narrow(q, k, v, *, causal, scale=None):
        if q.dtype == torch.float32:
            raise NotImplementedError("FP32")
        return plain(q, k, v, causal=causal, scale=scale)

    report = check_attention(narrow, dtypes=["bf16", "fp32"], cells=PLAIN)
    assert " passes the check at bf16 in 2 cells; it refuses 2 more, 2 of them plain" in (
        report.sentence
    )


@pytest.mark.parametrize(
    ("message", "of", "refused"),
    [
        ("head_dim must be at most 16, got 64", "plain", True),
        ("head_dim must be 64, got 128", "plain", False),  # a mistake: it was given 64
        ("key_len must be a multiple of 128", "plain", True),
        ("GQA is not supported", "plain", False),  # this call has none
        ("GQA is not supported", "gqa", True),
        ("expected sequence of length 3 at dim 1 (got 2)", "plain", False),
        ("not enough values to unpack (expected 4, got 3)", "plain", False),
        ("q must be contiguous", "plain", False),
        ("q must be contiguous", "strided", True),
        ("only torch.float16 is supported, got torch.bfloat16", "plain", True),
        ("only float16 is supported, got float32", "plain", False),
        ("a head is wrong", "plain", False),
    ],
)
def test_a_value_error_is_a_refusal_only_of_an_option_of_the_call(message, of, refused):
    def attend(q, k, v, *, causal, scale=None):
        raise ValueError(message)

    cells = {
        "plain": PLAIN[0],
        "gqa": FEW[0],
        "strided": next(cell for cell in QUICK if cell.strided),
    }
    report = quick(attend, cells=[cells[of]])
    assert list(report.unsupported) == ([message] if refused else [])
    assert [finding.what for finding in report.findings] == ([] if refused else ["raises"])


def test_each_check_says_what_it_leaves_out_and_the_full_one_only_what_is_beyond_its_cells():
    left_out = not_looked_at(QUICK)
    assert "the law 'rare rows'" in left_out
    assert "head_dim 96" in left_out
    assert not_looked_at(FULL) == (
        "head_dim above 128; lengths above 2050; heads above 8; heads per kv head (GQA) above 8; "
        "batch above 8; combinations of these that no cell has"
    )
    assert not_looked_at(ONE).endswith(
        "head_dim above 32; lengths above 65; heads above 2; heads per kv head (GQA) above 2; "
        "batch above 2; combinations of these that no cell has"
    )
    report = quick(FA2)
    assert report.passed
    assert report.cells == len(QUICK)
    assert not report.unsupported
    assert report.sentence.startswith(
        f"flash_attention passes the quick check at bf16 in {len(QUICK)}"
    )
    assert report.sentence.endswith(f"not looked at: {left_out}")
    assert "not looked at" not in quick(plain, cells=FEW).sentence


def test_an_error_that_no_mistake_explains_is_said_to_be_unexplained():
    def coarse(q, k, v, *, causal, scale=None):
        out = plain(q, k, v, causal=causal, scale=scale)
        noise = torch.randn(out.shape, generator=torch.Generator().manual_seed(0))
        return out + (0.1 * noise).to(out.dtype)

    sentence = quick(coarse, cells=FEW).sentence
    assert "nothing known explains it" in sentence
    assert "too coarse" not in sentence


def test_no_cells_are_no_pass():
    assert not quick(plain, cells=[]).passed


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


_EACH = [*zip(CLASSES, ("out", "dq", "dk", "dv", "out", "dk"), strict=True)]
_REST = [case for case in itertools.product(CLASSES, RESULTS) if case not in _EACH]


@pytest.mark.parametrize(
    ("trait", "what"),
    [*_EACH, *(pytest.param(*case, marks=pytest.mark.slow) for case in _REST if case[1] != "lse")],
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


class WordlessError(Exception):
    def __str__(self):
        raise RuntimeError("broken")


def raises(error):
    raise error


@pytest.mark.parametrize(
    ("change", "what", "said"),
    [
        (lambda out: raises(SystemExit(0)), "raises", "raises SystemExit: 0"),
        (lambda out: raises(WordlessError()), "raises", "raises WordlessError: WordlessError"),
        (lambda out: out.to_sparse(), "form", "out is a sparse_coo tensor on cpu"),
        (lambda out: out.detach().to("meta"), "form", "out is a strided tensor on meta"),
        (lambda out: (out, 3, None), "form", "returns a tuple of 3 and must return out alone"),
    ],
)
def test_what_ends_a_call_oddly_is_a_finding(change, what, said):
    report = quick(changed(out=lambda out, q: change(out)), cells=ONE)
    assert not report.passed
    assert report.findings[0].what == what
    assert said in report.sentence


@pytest.mark.parametrize("lse", [None, [1, 2]])
def test_an_lse_that_was_asked_for_and_is_not_given_is_missing(lse):
    def attend(q, k, v, *, causal, scale=None, return_lse=False):
        out = plain(q, k, v, causal=causal, scale=scale)
        return (out, lse) if return_lse and lse else out

    report = quick(attend, cells=ONE)
    assert [finding.what for finding in report.findings] == ["missing"]
    assert "lse is missing: return_lse=True must give (out, lse)" in report.sentence


def without_lse(change):
    def attend(q, k, v, *, causal, scale=None, return_lse=False):
        out, lse = baseline_attention(q, k, v, causal=causal, scale=scale, return_lse=True)
        return (out, lse) if return_lse else change(out)

    return attend


def test_the_call_without_the_lse_is_checked_too():
    report = quick(without_lse(lambda out: 1.05 * out), cells=FEW)
    assert not report.passed
    assert "where the LSE is not asked for, out and all gradients are 1.05" in report.sentence
    report = quick(without_lse(lambda out: 1 / 0), cells=FEW)
    assert "raises ZeroDivisionError: division by zero, where the LSE is not" in report.sentence


def test_other_bits_without_the_lse_are_no_mistake():
    def attend(q, k, v, *, causal, scale=None, return_lse=False):
        if return_lse:
            return baseline_attention(q, k, v, causal=causal, scale=scale, return_lse=True)
        return FA2(q, k, v, causal=causal, scale=scale)

    cell = reference(FEW[0], torch.bfloat16)
    q, k, v, _ = cell.inputs
    out = plain(q, k, v, causal=True)
    assert not torch.equal(FA2(q, k, v, causal=True), out)
    report = quick(attend, cells=FEW)
    assert report.passed, report.sentence


@pytest.mark.parametrize(
    ("when", "said"),
    [
        (lambda q, k, v: not torch.is_grad_enabled(), "under torch.no_grad()"),
        (lambda q, k, v: q.requires_grad and not k.requires_grad, "q alone needs a gradient"),
        (lambda q, k, v: v.requires_grad and not k.requires_grad, "v alone needs a gradient"),
    ],
)
def test_calls_without_a_gradient_and_with_one_of_three_are_checked_too(when, said):
    def attend(q, k, v, *, causal, scale=None):
        out = plain(q, k, v, causal=causal, scale=scale)
        return 1.02 * out if when(q, k, v) else out

    report = quick(attend, cells=PLAIN)
    assert not report.passed
    assert said in report.sentence
    assert "1.02" in report.sentence


def test_a_manner_of_calling_that_is_refused_is_listed():
    def attend(q, k, v, *, causal, scale=None):
        if not torch.is_grad_enabled():
            raise NotImplementedError("inference")
        return plain(q, k, v, causal=causal, scale=scale)

    report = quick(attend, cells=PLAIN)
    assert report.passed
    assert list(report.unsupported) == ["inference, under torch.no_grad()"]


_SHARED = {}


class _Workspace(torch.autograd.Function):
    """An attention that keeps what its backward needs in one place for all calls."""

    @staticmethod
    def forward(ctx, q, k, v, causal, scale):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        with torch.enable_grad():
            _SHARED["out"] = plain(*leaves, causal=causal, scale=scale)
        _SHARED["leaves"] = leaves
        return _SHARED["out"].detach()

    @staticmethod
    def backward(ctx, grad):
        found = torch.autograd.grad(_SHARED["out"], _SHARED["leaves"], grad, retain_graph=True)
        return (*found, None, None)


def test_what_two_layers_share_by_mistake_is_found():
    def attend(q, k, v, *, causal, scale=None):
        return _Workspace.apply(q, k, v, causal, scale)

    report = quick(attend, cells=PLAIN)
    assert not report.passed
    assert "where another call comes between forward and backward" in report.sentence


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


@pytest.mark.parametrize("what", USED_BY_LLMS)
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


def test_the_lse_of_a_row_that_attends_nothing_may_be_plus_infinity():
    def attend(q, k, v, *, causal, scale=None, return_lse=False):
        out, lse = baseline_attention(q, k, v, causal=causal, scale=scale, return_lse=True)
        return (out, lse.masked_fill(lse == -torch.inf, torch.inf)) if return_lse else out

    empty = [cell for cell in QUICK if not cell.visible().any(-1).all()]
    report = quick(attend, cells=empty)
    assert report.passed, report.sentence


class OwnModule(torch.nn.Module):
    def forward(self, q, k, v, *, is_causal, sm_scale=None):
        return plain(q, k, v, causal=is_causal, scale=sm_scale)


def test_a_module_is_asked_by_the_names_of_its_forward():
    report = quick(OwnModule(), cells=ONE)
    assert report.passed, report.sentence


@pytest.mark.parametrize("error", [RuntimeError, AssertionError, GeneratorExit])
def test_what_is_raised_is_a_refusal_by_its_words_or_a_finding(error):
    def attend(q, k, v, *, causal, scale=None):
        raise error("head_dim must be at most 16")

    report = quick(attend, cells=ONE)
    if error is GeneratorExit:
        assert "raises GeneratorExit" in report.sentence
    else:
        assert list(report.unsupported) == ["head_dim must be at most 16"]


SIDE_EFFECTS = {
    "torch's random numbers": lambda: torch.manual_seed(0),
    "Python's random numbers": lambda: random.seed(0),
    "whether gradients are recorded": lambda: torch.set_grad_enabled(False),
    "the default dtype": lambda: torch.set_default_dtype(torch.float64),
    "autocast": lambda: torch.set_autocast_enabled("cpu", True),
    "the precision of FP32 matrix products": lambda: torch.set_float32_matmul_precision("high"),
}


@pytest.mark.parametrize("what", SIDE_EFFECTS)
def test_what_a_call_changes_beside_its_results_is_a_finding_and_put_back(what):
    def attend(q, k, v, *, causal, scale=None):
        out = plain(q, k, v, causal=causal, scale=scale)
        SIDE_EFFECTS[what]()
        return out

    before = torch.get_rng_state()
    report = quick(attend, cells=ONE)
    assert f"changes {what} for whatever is computed after it" in report.sentence
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.is_grad_enabled()
    assert torch.get_default_dtype() == torch.float32
    assert torch.get_float32_matmul_precision() == "highest"


def test_other_names_of_the_arguments_are_known():
    def attend(q, k, v, *, is_causal=False, softmax_scale=None):
        return plain(q, k, v, causal=is_causal, scale=softmax_scale)

    cells = [PLAIN[0], next(cell for cell in QUICK if cell.scale)]
    report = quick(attend, cells=cells)
    assert report.passed, report.sentence
    assert not report.unsupported


def test_pytorchs_own_function_is_checked_as_it_is():
    # its causal mask is top-left and GQA must be asked for: two things that a wrapper must mend
    report = quick(torch.nn.functional.scaled_dot_product_attention, cells=PLAIN)
    assert report.passed, report.sentence
    longer = [cell for cell in QUICK if cell.shape.query_len < cell.shape.key_len and cell.causal]
    alone = [cell for cell in FULL if cell.shape == Shape(2, 4, 4, 113, 203, 32)]
    report = quick(torch.nn.functional.scaled_dot_product_attention, cells=alone)
    assert longer
    assert "top-left" in report.sentence, report.sentence


def test_a_fault_at_the_head_dim_and_the_gqa_of_llms_fails():
    def attend(q, k, v, *, causal, scale=None):
        out = plain(q, k, v, causal=causal, scale=scale)
        return 1.05 * out if q.shape[-1] == 128 and q.shape[1] == 8 * k.shape[1] else out

    usual = [cell for cell in QUICK if cell.shape.head_dim == 128]
    assert set(usual) < set(FULL)
    assert not quick(attend, cells=usual).passed
    assert quick(plain, cells=usual).passed


def test_an_unknown_dtype_is_refused():
    with pytest.raises(ValueError, match="dtypes must be among bf16, fp16, fp32, got 'int8'"):
        quick(plain, "int8")
    with pytest.raises(ValueError, match="dtypes must differ, got bf16, bf16"):
        check_attention(plain, dtypes=["bf16", "bf16"])


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
