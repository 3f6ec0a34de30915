"""The golden is softmax(scale q k^T) v under every mask, in FP64, and small in memory."""

import subprocess
import sys

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from attention_kernels import baseline_attention, golden, golden_attention
from attention_kernels.masks import Mask, Sequence
from attention_kernels.testing import HARD_SHAPES, Shape, make_qkv, with_gradients

FP64_RTOL = 1e-13
"""Two FP64 evaluations in other orders: about sqrt(1000) * 2**-53 = 4e-15 each, with room."""

SHAPE = Shape(2, 4, 2, 13, 21, 16)
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])


def random(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


BIAS = random(2, 1, 13, 21).masked_fill(random(2, 1, 13, 21) > 1, -torch.inf)
PADDING = torch.arange(21) < torch.tensor([[14], [21]])
MASKS = {
    "full": {},
    "causal": {"causal": True},
    "scale": {"scale": 0.7},
    "window": {"window": (5, 2)},
    "window to the left": {"window": (4, None)},
    "window to the right": {"window": (None, 0)},
    "window, causal": {"window": (5, 3), "causal": True},
    "softcap": {"softcap": 1.5},
    "padding": {"key_padding": PADDING},
    "bool mask": {"attn_mask": random(4, 13, 21) > -1},
    "bool mask of keys": {"attn_mask": random(21) > -1},
    "bias": {"attn_mask": BIAS},
    "alibi": {"alibi_slopes": SLOPES},
    "alibi of each batch": {"alibi_slopes": torch.stack([SLOPES, 3 * SLOPES])},
    "everything": {
        "causal": True,
        "window": (9, None),
        "softcap": 2.0,
        "key_padding": PADDING,
        "attn_mask": BIAS,
        "alibi_slopes": SLOPES,
        "scale": 0.4,
    },
}


def naive(
    q,
    k,
    v,
    *,
    causal=False,
    window=None,
    softcap=0.0,
    key_padding=None,
    attn_mask=None,
    alibi_slopes=None,
    scale=None,
):
    """The definition, dense, and no line shared: exp over its sum, with nothing subtracted."""
    queries, keys = q.shape[2], k.shape[2]
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * (scale or q.shape[-1] ** -0.5)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    ahead = torch.arange(keys) - torch.arange(queries).unsqueeze(1) - (keys - queries)
    seen = torch.ones(scores.shape, dtype=torch.bool)
    left, right = window or (None, None)
    if left is not None:
        seen &= ahead >= -left
    if right is not None:
        seen &= ahead <= right
    if causal:
        seen &= ahead <= 0
    if key_padding is not None:
        seen &= key_padding[:, None, None]
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        seen &= attn_mask
    elif attn_mask is not None:
        scores = scores + attn_mask.double()
    if alibi_slopes is not None:
        slopes = alibi_slopes.double().expand(q.shape[0], -1)
        scores = scores - slopes[:, :, None, None] * ahead.abs()
    powers = torch.exp(scores) * seen
    return torch.einsum("bhqk,bhkd->bhqd", powers, v) / powers.sum(-1, keepdim=True).clamp(1e-300)


def draw(shape, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    q, k, v = make_qkv(shape, dtype, generator)
    return q, k, v, torch.randn(q.shape, generator=generator, dtype=torch.float64)


def assert_close(ours, expected):
    for name in expected:
        scale = expected[name].abs().max().item()
        error = (ours[name] - expected[name]).abs().max().item()
        assert error <= FP64_RTOL * scale, name


@pytest.mark.parametrize("mask", MASKS)
def test_golden_is_the_definition_under_every_mask_forward_and_backward(mask):
    inputs, options = draw(SHAPE), MASKS[mask]
    expected = with_gradients(naive, *inputs, **options)
    assert mask in ("full", "scale") or not torch.equal(
        expected["out"], with_gradients(naive, *inputs)["out"]
    )
    assert_close(with_gradients(golden_attention, *inputs, **options), expected)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("shape", HARD_SHAPES, ids=str)
def test_golden_is_the_definition_at_hard_shapes(shape, causal):
    inputs = draw(shape)
    expected = with_gradients(naive, *inputs, causal=causal)
    assert_close(with_gradients(golden_attention, *inputs, causal=causal), expected)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("attn_mask", [None, "bool", "bias"])
def test_golden_is_what_torch_computes_in_fp64(attn_mask, causal):
    shape = Shape(2, 4, 2, 17, 17, 24)
    inputs = draw(shape)
    masks = {"bool": (random(2, 4, 17, 17) > -1) | torch.eye(17).bool(), "bias": random(17, 17)}
    attn_mask = masks.get(attn_mask)
    ours = with_gradients(golden_attention, *inputs, causal=causal, attn_mask=attn_mask)
    if causal and attn_mask is not None:
        lower = torch.ones(17, 17, dtype=torch.bool).tril()
        hide = torch.zeros(17, 17, dtype=torch.float64).masked_fill(~lower, -torch.inf)
        attn_mask = attn_mask & lower if attn_mask.dtype == torch.bool else attn_mask + hide
        causal = False

    def sdpa(q, k, v):
        k, v = (x.repeat_interleave(2, dim=1) for x in (k, v))
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            return scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, is_causal=causal)

    assert_close(ours, with_gradients(sdpa, *inputs))


@pytest.mark.parametrize("options", [{}, {"causal": True, "window": (2, None)}], ids=str)
@pytest.mark.parametrize("slopes", [None, SLOPES, SLOPES * torch.tensor([[1], [2], [3], [4]])])
def test_packed_sequences_are_attended_each_by_itself(options, slopes):
    queries, keys = [3, 0, 7, 2], [5, 4, 0, 6]
    q, k, v, dout = (
        x[0].transpose(0, 1).contiguous() for x in draw(Shape(1, 4, 2, sum(queries), sum(keys), 16))
    )
    offsets = [torch.tensor([0, *x]).cumsum(0).to(torch.int32) for x in (queries, keys)]

    def one_by_one(q, k, v):
        parts = zip(q.split(queries), k.split(keys), v.split(keys), strict=True)
        outs = []
        for index, part in enumerate(parts):
            alone = [x.transpose(0, 1).unsqueeze(0) for x in part]
            own = slopes if slopes is None or slopes.dim() == 1 else slopes[index]
            empty = not (queries[index] and keys[index])
            out = alone[0] * 0 if empty else naive(*alone, alibi_slopes=own, **options)
            outs.append(out[0].transpose(0, 1))
        return torch.cat(outs)

    packed = {"cu_seqlens_q": offsets[0], "cu_seqlens_k": offsets[1], "alibi_slopes": slopes}
    ours = with_gradients(golden_attention, q, k, v, dout, **packed, **options)
    assert_close(ours, with_gradients(one_by_one, q, k, v, dout))


@pytest.mark.parametrize("attention", [golden_attention, baseline_attention])
@pytest.mark.parametrize(("queries", "keys"), [([3, 0], [0, 5]), ([0, 4, 0], [2, 0, 3])], ids=str)
def test_packed_sequences_of_which_none_has_queries_and_keys_have_zero_gradients(
    attention, queries, keys
):
    shape = Shape(1, 4, 2, sum(queries), sum(keys), 16)
    inputs = [x[0].transpose(0, 1).contiguous() for x in draw(shape)]
    inputs[0][0], inputs[2][0] = torch.inf, torch.nan  # nothing is read of them
    offsets = [torch.tensor([0, *x]).cumsum(0).to(torch.int32) for x in (queries, keys)]
    packed = {"cu_seqlens_q": offsets[0], "cu_seqlens_k": offsets[1]}
    results = with_gradients(attention, *inputs, **packed)
    for name, like in zip(("out", "dq", "dk", "dv"), [inputs[0], *inputs[:3]], strict=True):
        assert torch.equal(results[name], torch.zeros_like(like)), name


def test_golden_keeps_slopes_of_alibi_in_fp64():
    inputs = draw(SHAPE)
    slopes = SLOPES.double() + 2.0**-40  # 2**-40 is less than half an ULP of FP32 at each
    ours = with_gradients(golden_attention, *inputs, alibi_slopes=slopes)
    assert_close(ours, with_gradients(naive, *inputs, alibi_slopes=slopes))
    narrowed = with_gradients(golden_attention, *inputs, alibi_slopes=slopes.float())
    error = (ours["out"] - narrowed["out"]).abs().max() / ours["out"].abs().max()
    assert error > 10 * FP64_RTOL


NOTHING = {
    "padding": ({"key_padding": torch.tensor([[True] * 21, [False] * 21])}, 1),
    "bool mask": ({"attn_mask": torch.tensor([True, False]).view(2, 1, 1, 1)}, 1),
    "bias": ({"attn_mask": torch.tensor([0.0, -torch.inf]).view(2, 1, 1, 1)}, 1),
    "bias and softcap": (
        {"attn_mask": torch.tensor([0.0, -torch.inf]).view(2, 1, 1, 1), "softcap": 1.0},
        1,
    ),
}


@pytest.mark.parametrize("mask", NOTHING)
def test_rows_that_attend_nothing_give_zeros_and_zero_gradients(mask):
    options, empty = NOTHING[mask]
    results = with_gradients(golden_attention, *draw(SHAPE), **options)
    for name, value in results.items():
        assert value[1 - empty].all(), name
        assert not value[empty].any(), name


@pytest.mark.parametrize(
    ("shape", "options", "empty"),
    [
        (Shape(1, 2, 1, 9, 4, 16), {"causal": True}, 5),
        (Shape(1, 2, 1, 9, 4, 16), {"window": (0, 0)}, 5),
        (Shape(1, 2, 1, 9, 4, 16), {"window": (0, 2)}, 3),
        (Shape(1, 2, 1, 9, 4, 16), {"window": (None, 1), "softcap": 1.0}, 4),
    ],
    ids=["causal", "window", "window to the right", "softcap"],
)
@pytest.mark.parametrize("chunk_bytes", [golden.CHUNK_BYTES, 8])
def test_rows_before_the_first_key_give_zeros_and_zero_gradients(
    monkeypatch, chunk_bytes, shape, options, empty
):
    monkeypatch.setattr(golden, "CHUNK_BYTES", chunk_bytes)
    results = with_gradients(golden_attention, *draw(shape), **options)
    assert not results["dq"][:, :, :empty].any()
    assert not results["out"][:, :, :empty].any()
    assert results["out"][:, :, empty].all()
    assert all(value.isfinite().all() for value in results.values())


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("rows", [1, 3, 30, 60])
def test_the_chunk_size_moves_the_result_by_roundings_only(monkeypatch, rows, mask):
    inputs, options = draw(SHAPE), MASKS[mask]
    whole = with_gradients(golden_attention, *inputs, **options)
    monkeypatch.setattr(golden, "CHUNK_BYTES", 8 * 21 * rows)
    assert_close(with_gradients(golden_attention, *inputs, **options), whole)


@pytest.mark.parametrize("mask", [Mask(), Mask(causal=True), Mask(window=(9, 4))], ids=str)
def test_a_chunk_is_the_longest_that_holds_the_budget(mask):
    sequence = Sequence(0, range(60), range(50), mask)

    def scores(start, rows):
        return rows * len(mask.key_range(range(start, start + rows), 60, 50))

    for budget in (5, 100, 1000, 10_000):
        for start in (0, 7, 30, 59):
            rows = golden._chunk_rows(budget, start, sequence)
            assert 1 <= rows <= 60 - start
            assert rows == 1 or scores(start, rows) <= budget
            assert start + rows == 60 or scores(start, rows + 1) > budget


def test_low_precision_inputs_give_fp64_out_and_gradients_in_their_dtype():
    q, k, v = draw(HARD_SHAPES[4], torch.bfloat16)[:3]
    results = with_gradients(golden_attention, q, k, v, torch.ones_like(q))
    assert [x.dtype for x in results.values()] == [torch.float64] + 3 * [torch.bfloat16]
    assert torch.equal(results["out"], golden_attention(q.double(), k.double(), v.double()))


def test_large_scores_do_not_overflow():
    q, k, v, dout = draw(Shape(1, 1, 1, 4, 6, 16))
    results = with_gradients(golden_attention, 1e4 * q, 1e4 * k, v, dout)
    assert all(value.isfinite().all() for value in results.values())
    best = (q @ k.mT).argmax(-1)
    torch.testing.assert_close(results["out"][0, 0], v[0, 0, best[0, 0]])


@pytest.mark.slow
def test_length_8192_forward_and_backward_never_hold_a_head_of_scores():
    script = """
import resource, torch
from attention_kernels import golden_attention
torch.set_num_threads(2)
q, k, v = (torch.randn(1, 2, 8192, 16, requires_grad=True) for _ in range(3))
torch.autograd.grad(golden_attention(q[:, :, :64], k, v).sum(), (q, k, v))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
torch.autograd.grad(golden_attention(q, k, v, causal=True).sum(), (q, k, v))
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120
    )
    assert int(run.stdout) < 8192 * 8192 * 8, "bytes beyond what a short call takes"
