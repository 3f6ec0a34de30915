"""A gradient that goes through the maximum of a softmax is told, and not an error that looks so."""

import pytest
import torch

from attention_kernels.testing.cells import QUICK
from tests.kernels.testing.checked import FEW, Turned, plain, quick

LONG = [cell for cell in QUICK if cell.law == "one-signed v" and cell.shape.key_len > 1000]
SHORT = [cell for cell in QUICK if cell.law == "one-signed v" and cell.shape.key_len < 1000]
PEAKED = [cell for cell in QUICK if cell.law == "large logits"]
CAUSE = (
    "dk errs only in keys that hold a row's largest score so far, along q of those rows: the "
    "backward goes through the maximum that the scores are shifted by, whose gradient is 0 but for "
    "rounding; detach the maximum (seen in "
)


def _blockwise(block, largest, flip=False):
    """An online softmax whose backward is autograd's own, over blocks of keys."""

    def attention(q, k, v, *, causal, scale=None):
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
        hidden = hidden.triu(k.shape[2] - q.shape[2] + 1) if causal else ~hidden
        if flip:
            k, v, hidden = k.flip(2), v.flip(2), hidden.flip(1)
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        m = torch.full((*q.shape[:3], 1), -1e30)
        l, acc = torch.zeros_like(m), torch.zeros((*q.shape[:3], v.shape[3]))
        for start in range(0, k.shape[2], block):
            part = slice(start, start + block)
            scores = (scale * q @ k[:, :, part].mT).masked_fill(hidden[:, part], -1e30)
            new = torch.maximum(m, largest(scores))
            p, alpha = (scores - new).exp(), (m - new).exp()
            l = l * alpha + p.sum(-1, keepdim=True)
            acc = acc * alpha + p @ v[:, :, part]
            m = new
        return acc / l

    return attention


def _amax(scores):
    return scores.amax(-1, keepdim=True)


def _max(scores):
    return scores.max(-1, keepdim=True).values


@pytest.mark.parametrize(
    "attention",
    [
        _blockwise(32, _amax),
        _blockwise(16, _max),
        _blockwise(128, _amax),
        _blockwise(10_000, _amax),
        _blockwise(32, _amax, flip=True),
    ],
    ids=["tiles of 32", "tiles of 16, max", "tiles of 128", "whole rows", "from the last key"],
)
def test_a_backward_through_the_maximum_is_told(attention):
    said = quick(attention, "fp32", [*LONG, *FEW]).sentence
    assert f"FAILS at fp32: {CAUSE}" in said
    assert said.endswith("dk)")


def test_what_is_told_to_be_done_cures_it():
    detached = _blockwise(32, lambda scores: _amax(scores.detach()))
    assert quick(detached, "fp32", LONG).passed


class _Off(torch.autograd.Function):
    """dS of a right attention with an error of its delta, or of all of dk."""

    @staticmethod
    def forward(ctx, scores, delta):
        ctx.save_for_backward(scores.softmax(-1))
        ctx.delta = delta
        return scores.clone()

    @staticmethod
    def backward(ctx, ds):
        (weights,) = ctx.saved_tensors
        noise = torch.randn(ds.shape, generator=torch.Generator().manual_seed(0))
        if ctx.delta:
            return ds + 1e-4 * weights * noise[..., :1], None
        return ds + 1e-2 * ds * noise, None


@pytest.mark.parametrize("cells", [LONG, SHORT, PEAKED], ids=["long", "short", "peaked"])
@pytest.mark.parametrize("delta", [True, False], ids=["delta", "each weight"])
def test_an_error_that_stands_with_the_weights_is_not_told_so(delta, cells):
    def attention(q, k, v, *, causal, scale=None):
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
        scores = (q @ k.mT) * (q.shape[-1] ** -0.5 if scale is None else scale)
        scores = scores.masked_fill(hidden.triu(k.shape[2] - q.shape[2] + 1), -torch.inf)
        return _Off.apply(scores, delta).softmax(-1) @ v

    report = quick(attention, "fp32", cells)
    assert not report.passed
    assert {"dk"} <= {finding.noun for finding in report.findings}
    assert "maximum" not in report.sentence


def _losing(is_nan):
    """Return what makes a gradient noisy, and one NaN of it in longer calls if `is_nan`."""

    def turn(dx):
        noise = torch.randn(dx.shape, generator=torch.Generator().manual_seed(0))
        lost = dx + 1e-2 * dx * noise
        if is_nan and dx.shape[2] >= 60:
            lost[0, 0, 0, 0] = torch.nan
        return lost

    return turn


def test_a_gradient_that_holds_nan_in_some_cells_is_reported_and_not_measured():
    def attention(q, k, v, **options):
        return plain(Turned.apply(q, _losing(False)), Turned.apply(k, _losing(True)), v, **options)

    report = quick(attention, "fp32", [cell for cell in QUICK if cell.shape.key_len < 300])
    assert {"dq", "dk"} <= {finding.noun for finding in report.findings}
    assert "NaN" in report.sentence


def test_where_out_is_off_too_it_is_not_told_so():
    through = _blockwise(32, _amax)

    def attention(q, k, v, *, causal, scale=None):
        out = through(q, k, v, causal=causal, scale=scale)
        return out + 1e-5 * torch.randn(out.shape, generator=torch.Generator().manual_seed(0))

    report = quick(attention, "fp32", LONG)
    assert "out" in {finding.noun for finding in report.findings}
    assert "maximum" not in report.sentence
    assert quick(plain, "fp32", LONG).passed
