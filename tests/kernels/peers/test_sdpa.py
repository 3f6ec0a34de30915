"""Each backend of SDPA computes what the arguments mean here, or refuses, and is never replaced."""

import pytest
import torch

from attention_kernels import attention, baseline_attention, golden_attention
from attention_kernels.testing import assert_within_budget, with_gradients
from tests.kernels.peers.peer_calls import MASKS, SHAPES, draw

SDPA_ON_CPU = ("sdpa:math", "sdpa:flash")


def within_budget(found, plain, exact):
    for name, value in found.items():
        assert_within_budget(value, plain[name], exact[name], 2.0 if name == "out" else 3.0, name)


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", SDPA_ON_CPU)
def test_sdpa_means_what_the_golden_means(name, shape, kind):
    tensors, mask = draw(shape), MASKS[kind](shape)
    found = with_gradients(attention, *tensors, implementation=name, **mask)
    plain = with_gradients(baseline_attention, *tensors, **mask)
    exact = with_gradients(golden_attention, *(x.double() for x in tensors), **mask)
    assert found["out"].dtype == torch.bfloat16
    within_budget(found, plain, exact)


@pytest.mark.parametrize("kind", ["visible", "bias", "causal"])
def test_sdpa_never_sees_a_row_that_attends_nothing(monkeypatch, kind):
    seen = []

    def recording(q, k, v, attn_mask, **_):
        seen.append(attn_mask)
        return torch.zeros_like(q)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", recording)
    q, k, v, _ = draw(SHAPES[2])
    attention(q, k, v, implementation="sdpa:math", **MASKS[kind](SHAPES[2]))
    shown = seen[0] if seen[0].dtype == torch.bool else seen[0] > -torch.inf
    assert shown.any(-1).all()


@pytest.mark.parametrize("name", ["sdpa:efficient", "sdpa:cudnn"])
def test_a_backend_that_the_cpu_has_not_is_refused_never_replaced(name):
    q, k, v, _ = draw(SHAPES[0])
    with pytest.raises(ValueError, match=f"attention: .*'{name}' for q .* on cpu; it says: PyTor"):
        attention(q, k, v, implementation=name)
