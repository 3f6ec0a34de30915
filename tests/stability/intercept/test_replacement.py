"""The candidate in the model's place: everywhere, in some layers, or in one direction."""

import pytest
import torch
from torch.nn import functional as F

from attention_kernels import PROFILES, flash_attention
from stability import shadow
from tests.stability.intercept.torch_models import (
    Decoder,
    tokens,
    train_step,
    unseen,
)


def _harsh(q, k, v, *, causal, scale=None):
    return flash_attention(q, k, v, causal=causal, scale=scale, numerics=PROFILES["all_bf16"])


class _Forward(torch.autograd.Function):
    """Out of one attention and the gradients of another, written out independently."""

    @staticmethod
    def forward(ctx, q, k, v, first, second):
        ctx.save_for_backward(q, k, v)
        ctx.second = second
        return first(q, k, v)

    @staticmethod
    def backward(ctx, dout):
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in ctx.saved_tensors]
            ctx.second(*leaves).backward(dout)
        return (*(x.grad for x in leaves), None, None)


def _own(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _candidate(q, k, v):
    return _harsh(q, k, v, causal=True)


EXPECTED = {
    "both": _candidate,
    "forward": lambda q, k, v: _Forward.apply(q, k, v, _candidate, _own),
    "backward": lambda q, k, v: _Forward.apply(q, k, v, _own, _candidate),
}


def _by_hand(model, layers, attend):
    """Give `layers` another attention in the place of SDPA."""
    for index in layers:
        layer = model.layers[index]

        def forward(x, layer=layer):
            q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in layer.qkv(x).chunk(3, -1))
            return layer.out(attend(q, k, v).transpose(1, 2).flatten(2))

        layer.forward = forward


@pytest.mark.parametrize("direction", EXPECTED)
@pytest.mark.parametrize("layers", [(0, 1, 2), (1,)], ids=["all", "one"])
def test_the_model_computes_as_if_written_with_the_candidate(direction, layers):
    results = []
    for by_hand in (False, True):
        torch.manual_seed(0)
        model = Decoder()
        if by_hand:
            _by_hand(model, layers, EXPECTED[direction])
            loss = train_step(model, 0)
        else:
            globs = [f"layers.{index}" for index in layers]
            with shadow(model, _harsh, replace=globs, direction=direction) as probe:
                loss = train_step(model, 0)
                probe.step()
        results.append([loss.detach(), *(p.grad for p in model.parameters())])
    for shadowed, expected in zip(*results, strict=True):
        assert torch.equal(shadowed, expected)


def test_every_step_is_replaced_and_only_due_ones_are_compared_candidate_minus_own():
    torch.manual_seed(0)
    model = Decoder()
    plain = model(tokens(0)[:, :-1])
    with shadow(model, _harsh, replace=["*"], every=2) as probe:
        for step in range(3):
            assert not torch.equal(model(tokens(0)[:, :-1]), plain)
            probe.step()
            seen = probe.metrics.get("deviation/layers.0/out/error_ratio", 0)
            assert seen > 100, step
    assert torch.equal(model(tokens(0)[:, :-1]), plain)


def test_under_autocast_the_candidate_gets_what_sdpa_would():
    seen = []

    def spy(q, k, v, *, causal, scale=None):
        seen.append(q.dtype)
        return flash_attention(q, k, v, causal=causal, scale=scale)

    torch.manual_seed(0)
    model = Decoder()
    for direction in ("both", "forward", "backward"):
        with shadow(model, spy, replace=["layers.0"], direction=direction, every=0) as probe:
            train_step(model, 0, torch.bfloat16)
            probe.step()
    assert seen == [torch.bfloat16] * 3


@unseen
def test_what_cannot_be_replaced_is_refused():
    with pytest.raises(ValueError, match="direction must be one of both, forward, backward, got "):
        shadow(Decoder(), replace=["*"], direction="sideways").__enter__()
    with pytest.raises(ValueError, match="candidate must be one to replace with, got 2"):
        shadow(Decoder(), ["flash", "golden"], replace=["*"]).__enter__()

    class Drops(torch.nn.Module):
        def forward(self, q):
            return F.scaled_dot_product_attention(q, q, q, dropout_p=0.2)

    model = Drops()
    with (
        shadow(model, replace=["*"]),
        pytest.raises(ValueError, match="model must be a call that flash:fa2 can take, got dropo"),
    ):
        model(torch.randn(1, 2, 8, 16))
