"""A call is judged by all it does: its form and manners, what it changes, what it refuses."""

import itertools
import random

import pytest
import torch

from attention_kernels import baseline_attention
from attention_kernels.testing import Shape
from attention_kernels.testing.cells import FULL, QUICK, reference
from tests.kernels.testing.checked import FA2, FEW, ONE, PLAIN, plain, quick


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


def changed(**changes):
    def attend(q, k, v, *, causal, scale=None):
        out = plain(q, k, v, causal=causal, scale=scale)
        return changes["out"](out, q)

    return attend


_CALLS = itertools.count()
BROKEN = {
    "raises": (lambda out, q: 1 // 0, "raises ZeroDivisionError"),
    "shape": (lambda out, q: out[..., :-1], "out has shape"),
    "dtype": (lambda out, q: out.double(), "out has dtype torch.float64"),
    "missing": (lambda out, q: out.detach(), "dq is missing: out carries no gradient"),
    "NaN": (lambda out, q: out.masked_fill(out == out.amax(), torch.nan), "NaN in out"),
    "not repeatable": (
        # not of random numbers: in BF16 two of them may round to one factor
        lambda out, q: out * (1 + 0.1 * next(_CALLS)),
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
    "the default device": lambda: torch.set_default_device("meta"),
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
    # torch must not believe that a mode is on which a call has put on top of another
    torch.set_default_device("meta")
    torch.set_default_device(None)
    assert not torch._C._len_torch_function_stack()


@pytest.mark.parametrize(
    ("switch", "back"),
    [
        (lambda: torch.set_grad_enabled(False), lambda: torch.set_grad_enabled(True)),
        (lambda: torch.set_default_device("meta"), lambda: torch.set_default_device(None)),
    ],
    ids=["no gradients", "another device"],
)
def test_settings_of_the_one_who_asks_are_no_mistake_and_stay(switch, back):
    switch()
    before = torch.is_grad_enabled(), torch.get_default_device()
    try:
        assert quick(plain, cells=ONE).passed
        assert before == (torch.is_grad_enabled(), torch.get_default_device())
    finally:
        back()


@pytest.fixture
def own_precision():
    """Set the precision of one backend's FP32 products, as PyTorch advises, and put it back."""
    matmul = torch.backends.mkldnn.matmul
    before, matmul.fp32_precision = matmul.fp32_precision, "bf16"
    yield matmul
    matmul.fp32_precision = before


def test_a_backend_s_own_matmul_precision_is_no_mistake_unless_a_call_sets_it(own_precision):
    assert quick(plain, cells=ONE).passed
    assert own_precision.fp32_precision == "bf16"

    def attend(q, k, v, *, causal, scale=None):
        own_precision.fp32_precision = "tf32"
        return plain(q, k, v, causal=causal, scale=scale)

    report = quick(attend, cells=ONE)
    assert "changes the precision of FP32 matrix products for whatever" in report.sentence
    assert own_precision.fp32_precision == "bf16"


def test_other_names_of_the_arguments_are_known():
    def attend(q, k, v, *, is_causal=False, softmax_scale=None):
        return plain(q, k, v, causal=is_causal, scale=softmax_scale)

    cells = [PLAIN[0], next(cell for cell in QUICK if cell.scale)]
    report = quick(attend, cells=cells)
    assert report.passed, report.sentence
    assert not report.unsupported


@pytest.mark.slow
def test_pytorchs_own_function_is_checked_as_it_is():
    # its causal mask is top-left and GQA must be asked for: two things that a wrapper must mend
    report = quick(torch.nn.functional.scaled_dot_product_attention, cells=PLAIN)
    assert report.passed, report.sentence
    longer = [cell for cell in QUICK if cell.shape.query_len < cell.shape.key_len and cell.causal]
    alone = [cell for cell in FULL if cell.shape == Shape(2, 4, 4, 113, 203, 32)]
    report = quick(torch.nn.functional.scaled_dot_product_attention, cells=alone)
    assert longer
    assert "top-left" in report.sentence, report.sentence
