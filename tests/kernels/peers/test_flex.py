"""FlexAttention computes what the arguments mean here; its eager form, as the CPU has it."""

import pytest
import torch

from attention_kernels import attention, baseline_attention, golden_attention
from attention_kernels.testing import assert_within_budget
from tests.kernels.peers.peer_calls import MASKS, SHAPES, alibi, bias, draw, pack, padding
from tests.sampling import one_in

FLEX_MASKS = MASKS | {
    "softcap": lambda _: {"softcap": 2.0},
    "all": lambda shape: (
        {"softcap": 2.0, "causal": True, "window": (9, None), "key_padding": padding(shape)}
        | {"attn_mask": bias(shape), "alibi_slopes": alibi(shape)}
    ),
}


@pytest.mark.parametrize("kind", FLEX_MASKS)
@pytest.mark.parametrize("shape", one_in(3, SHAPES), ids=str)
def test_flex_means_what_the_golden_means(shape, kind):
    (q, k, v, _), mask = draw(shape, torch.float64), FLEX_MASKS[kind](shape)
    found = attention(q, k, v, implementation="flex", **mask)
    exact = golden_attention(q, k, v, **mask)
    # eager flex computes FP64 inputs in FP64; only its bias and slopes are FP32 here, as golden's
    assert (found - exact).norm() <= 1e-12 * exact.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_flex_errs_within_the_budget_of_its_dtype(dtype):
    q, k, v, _ = draw(SHAPES[0], dtype)
    found = attention(q, k, v, implementation="flex", causal=True)
    plain = baseline_attention(q, k, v, causal=True)
    assert_within_budget(found, plain, golden_attention(q, k, v, causal=True))


@pytest.mark.parametrize(
    "mask",
    [
        {},
        {"causal": True},
        {"window": (2, 1)},
        {"alibi_slopes": torch.linspace(0.05, 1, 20).view(5, 4), "causal": True},
    ],
    ids=["full", "causal", "window", "alibi"],
)
def test_flex_keeps_packed_sequences_apart(mask):
    q, k, v, packing = pack(torch.float64)
    found = attention(q, k, v, implementation="flex", **packing, **mask)
    exact = golden_attention(q, k, v, **packing, **mask)
    assert (found - exact).norm() <= 1e-12 * exact.norm()


def test_flex_has_no_gradients_on_the_cpu_and_says_so():
    q, k, v, _ = draw(SHAPES[0])
    with pytest.raises(ValueError, match=r"'flex'.* does not support backward on CPU"):
        attention(q.requires_grad_(), k, v, implementation="flex")
    with torch.no_grad():
        assert torch.isfinite(attention(q, k, v, implementation="flex")).all()
