"""A mask as a function of (batch, query head, query, key), as FlexAttention's, in blocks.

The definition is that of `definition`, with the mask written out by Python's own loops and passed
as -inf; a second judge is torch's flex_attention, which evaluates the same function by vmap.
"""

import functools
import gc
from typing import Any

import pytest
import torch

from attention_kernels import baseline_attention, golden_attention
from attention_kernels.mask_mod import _HELD, EMPTY, FULL, MaskMod, block_table
from attention_kernels.peers.registry import attention
from attention_kernels.testing import Shape, make_qkv
from tests.kernels.definition import definition
from tests.kernels.flash import SMALL, flash
from tests.sampling import others_long

RTOL = 1e-13
"""Two FP64 evaluations in other orders: about sqrt(100) * 2**-53 = 1e-15 each, with room."""
SHAPE = Shape(2, 4, 2, 37, 41, 16)
CPU = torch.device("cpu")
RESULTS = ("out", "lse", "dq", "dk", "dv")

EXACT = {
    "golden": golden_attention,
    "baseline": baseline_attention,
    "twin": flash("twin", **SMALL),
    "twin, splits": flash("twin", splits=2, key_order="reversed", **SMALL),
    "twin, key blocks outside": flash("twin", loop_order="key_outer", block_q=32, block_k=16),
    "triton": flash("triton", **SMALL),
    "triton, splits": flash("triton", splits=2, key_order="reversed", **SMALL),
    "triton, key blocks outside": flash("triton", loop_order="key_outer", block_q=32, block_k=16),
}
DOCUMENT = torch.tensor([0] * 10 + [1] * 3 + [2] * 28)
PREFIX = torch.tensor([5, 30])
REACH = torch.tensor([1, 4, 16, 50])

MODS = {
    "causal": lambda b, h, q, k: q >= k,
    "sliding window": lambda b, h, q, k: (q >= k) & (q - k < 7),
    "prefix of each batch": lambda b, h, q, k: (k <= q) | (k < PREFIX[b]),
    "documents": lambda b, h, q, k: DOCUMENT[q] == DOCUMENT[k],
    "each head its own reach": lambda b, h, q, k: (k <= q) & (q - k < REACH[h]),
    "rows that see nothing": lambda b, h, q, k: (q > 17) & (k > 2) & (k < q + b),
    "batch and head": lambda b, h, q, k: (k * (b + 1) + q * (h + 2)) % 5 != 0,
    "everything": lambda b, h, q, k: b.new_ones((), dtype=torch.bool),
    "nothing": lambda b, h, q, k: b.new_zeros((), dtype=torch.bool),
}
CORNER = "batch and head"


@functools.cache
def written_out(mask):
    """The mask one truth value after the other: the function sees four numbers, no broadcasting."""
    one = [torch.arange(size) for size in (2, 4, 37, 41)]
    places = [(b, h, q, k) for b in one[0] for h in one[1] for q in one[2] for k in one[3]]
    return torch.tensor([bool(MODS[mask](*place)) for place in places]).view(2, 4, 37, 41)


def draw(shape, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    q, k, v = make_qkv(shape, dtype, generator)
    return q, k, v, torch.randn((*q.shape[:3], v.shape[3]), generator=generator).to(dtype)


def run(attend, q, k, v, dout, **options) -> dict[str, Any]:
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    returned = attend(*leaves, return_lse=True, **options)
    gradients = torch.autograd.grad(returned.out, leaves, dout.to(returned.out.dtype))
    return dict(zip(RESULTS, (returned.out.detach(), returned.lse, *gradients), strict=True))


def defined(q, k, v, dout, visible, **options):
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    added = torch.zeros(visible.shape, dtype=torch.float64).masked_fill(~visible, -torch.inf)
    out = definition(*leaves, attn_mask=added, **options)
    gradients = torch.autograd.grad(out, leaves, dout)
    return {"out": out.detach(), **dict(zip(RESULTS[2:], gradients, strict=True))}


def assert_close(ours, expected):
    for result, right in expected.items():
        error = (ours[result] - right).abs().max().item()
        assert error <= RTOL * max(right.abs().max().item(), 1e-3), (result, error)


# The interpreter is slow: one mask of all four indices is in the fast tests.
CASES = others_long(
    [(name, mask) for name in EXACT for mask in MODS],
    slow=[(name, mask) for name in EXACT for mask in MODS if not name.startswith("triton")]
    + [("triton", CORNER)],
)


@pytest.mark.parametrize(("name", "mask"), CASES)
def test_each_is_the_definition_with_every_gradient(name, mask):
    inputs = draw(SHAPE)
    visible = written_out(mask)
    assert_close(run(EXACT[name], *inputs, mask_mod=MODS[mask]), defined(*inputs, visible))


@pytest.mark.parametrize(("name", "mask"), CASES)
def test_bits_are_those_of_the_same_mask_written_out(name, mask):
    inputs = draw(SHAPE, torch.float32)
    attn_mask = written_out(mask)
    ours = run(EXACT[name], *inputs, mask_mod=MODS[mask])
    dense = run(EXACT[name], *inputs, attn_mask=attn_mask)
    for result in RESULTS:
        assert torch.equal(ours[result], dense[result]), result


@pytest.mark.parametrize(
    "name", ["golden", "baseline", "twin", pytest.param("triton", marks=pytest.mark.slow)]
)
def test_it_hides_beside_all_else_that_hides_and_adds(name):
    inputs = draw(SHAPE)
    others = {
        "causal": True,
        "window": (20, None),
        "softcap": 2.0,
        "key_padding": (torch.arange(41) % 7 != torch.tensor([[1], [4]])),
        "alibi_slopes": torch.tensor([0.1, 0.2, 0.0, 0.5], dtype=torch.float64),
        "sinks": torch.tensor([0.5, -1.0, 0.0, 2.0], dtype=torch.float64),
    }
    visible = written_out(CORNER)
    ours = run(EXACT[name], *inputs, mask_mod=MODS[CORNER], **others)
    assert_close(ours, defined(*inputs, visible, **others))
    others |= {"dropout_p": 0.3, "dropout_seed": 5}
    bias = torch.linspace(-1, 1, 41, dtype=torch.float64).requires_grad_()
    dbias = []
    for mask in ({"attn_mask": bias, "mask_mod": MODS[CORNER]}, {"attn_mask": bias + 0}):
        if "mask_mod" not in mask:
            mask["attn_mask"] = mask["attn_mask"].masked_fill(~visible, -torch.inf)
        out = EXACT[name](*inputs[:3], **mask, **others)
        dbias.append(torch.autograd.grad(out, bias, inputs[3].to(out.dtype))[0])
    assert_close({"dbias": dbias[0]}, {"dbias": dbias[1]})


@pytest.mark.parametrize("name", ["golden", "baseline", "twin"])
def test_finite_differences_agree(name):
    q, k, v, _ = (x.requires_grad_() for x in draw(Shape(1, 2, 1, 3, 4, 16)))

    def attend(q, k, v):
        return EXACT[name](q, k, v, mask_mod=lambda b, h, q, k: (k <= q + h) & (q != 1))

    assert torch.autograd.gradcheck(attend, (q, k, v))


@pytest.mark.parametrize("mask", ["causal", "documents", "each head its own reach", CORNER])
def test_torch_flex_attention_agrees(mask):
    from torch.nn.attention.flex_attention import create_mask

    q, k, v, _ = draw(SHAPE)
    visible = create_mask(MODS[mask], 2, 4, 37, 41, device="cpu")
    theirs = attention(q, k, v, implementation="flex", attn_mask=visible)
    for name in ("golden", "baseline", "twin"):
        assert_close({"out": EXACT[name](q, k, v, mask_mod=MODS[mask])}, {"out": theirs})


def test_golden_in_parts_asks_about_the_batch_and_heads_at_hand(monkeypatch):
    inputs = draw(SHAPE)
    expected = defined(*inputs, written_out(CORNER))
    monkeypatch.setattr("attention_kernels.golden.CHUNK_BYTES", 8 * 2 * 41 * 5)
    assert_close(run(golden_attention, *inputs, mask_mod=MODS[CORNER]), expected)


class Recorder:
    """A sliding window that keeps the largest tile it was asked about."""

    def __init__(self):
        self.largest = 0

    def __call__(self, b, h, q, k):
        seen = (q >= k) & (q - k < 128)
        asked = torch.broadcast_shapes(*(x.shape for x in (b, h, q, k)))
        self.largest = max(self.largest, asked.numel())
        return seen


def test_twin_and_golden_never_ask_about_more_than_a_tile(monkeypatch):
    q, k, v, dout = draw(Shape(1, 1, 1, 256, 256, 16), torch.float32)
    recorder = Recorder()
    run(flash("twin", block_q=16, block_k=32), q, k, v, dout, mask_mod=recorder)
    assert recorder.largest == 4 * 16 * 32  # four query blocks go together
    recorder = Recorder()
    monkeypatch.setattr("attention_kernels.golden.CHUNK_BYTES", 8 * 256 * 8)
    run(golden_attention, q, k, v, dout, mask_mod=recorder)
    assert recorder.largest == 8 * 256


def test_a_table_of_a_sliding_window_is_far_smaller_than_the_mask(monkeypatch):
    length, recorder = 4096, Recorder()
    monkeypatch.setattr("attention_kernels.mask_mod.STRIP", 2**16)
    mod = MaskMod(recorder, range(2), range(8))
    table, tiles = block_table(mod, length, length, 64, 64, CPU)
    assert table.shape == (1, 1, 64, 64)
    assert table.dtype == torch.int32
    # three tiles a line are seen, of them the first and the last in part
    assert tiles.shape == (64 + 62, 64, 64)
    assert (table == FULL).sum() == 63
    assert 4 * table.numel() + tiles.numel() < length * length / 30
    assert recorder.largest <= 2**16


@pytest.mark.parametrize("mask", MODS)
@pytest.mark.parametrize("blocks", [(16, 16), (16, 32), (64, 16)])
def test_a_table_and_its_tiles_are_the_mask(mask, blocks, monkeypatch):
    monkeypatch.setattr("attention_kernels.mask_mod.STRIP", 1)  # a tile at a time
    expected = written_out(mask)
    table, tiles = block_table(MaskMod(MODS[mask], range(2), range(4)), 37, 41, *blocks, CPU)
    whole = torch.ones((1, *blocks), dtype=torch.bool)
    every = torch.cat([tiles, ~whole, whole])  # at -2 none, at -1 all
    got = every[table.long()].transpose(3, 4).flatten(4, 5).flatten(2, 3)
    assert torch.equal(got[..., :37, :41].expand(expected.shape), expected)
    assert len(tiles) == (table >= 0).sum()
    assert table.min() >= EMPTY
    seen = tiles.flatten(1)
    assert seen.any(dim=1).all()


def test_the_function_lives_as_long_as_its_graph_and_no_longer():
    gc.collect()
    before = len(_HELD)
    q, k, v, dout = draw(Shape(1, 1, 1, 20, 20, 16))
    out = EXACT["twin"](q.requires_grad_(), k, v, mask_mod=lambda b, h, i, j: i >= j)
    gc.collect()
    assert len(_HELD) == before + 1
    out.backward(dout)
    del out
    gc.collect()
    assert len(_HELD) == before


WRONG = {
    "torch.float64": lambda b, h, q, k: (q >= k).double(),
    "int": lambda b, h, q, k: 1,
    r"one of \(2, 4, \d+, 1, ": lambda b, h, q, k: (q >= k).expand(2, 4, -1, -1)[:, :, :, None],
    r"one of \(3, ": lambda b, h, q, k: (q >= k).expand(3, 4, -1, -1)[:, :, :20],
    "ZeroDivisionError": lambda b, h, q, k: 1 / 0,
    "TypeError": lambda q, k: q >= k,
}


@pytest.mark.parametrize("got", WRONG)
@pytest.mark.parametrize("name", ["golden", "baseline", "twin", "triton"])
def test_a_function_that_returns_no_mask_is_refused(name, got):
    q, k, v, _ = draw(SHAPE)
    rule = r"_attention: mask_mod must be a function of \(batch, head, query, key\)"
    with pytest.raises(ValueError, match=rf"{rule}.* got {got}.*; combine the indices"):
        EXACT[name](q, k, v, mask_mod=WRONG[got])


def test_what_is_no_function_and_packed_sequences_are_refused():
    q, k, v, _ = draw(SHAPE)
    with pytest.raises(ValueError, match=r"mask_mod must be a function .* got Tensor; pass"):
        golden_attention(q, k, v, mask_mod=torch.ones(37, 41) > 0)
    packed = [x[0].transpose(0, 1) for x in (q, k, v)]
    starts = {f"cu_seqlens_{x}": torch.tensor([0, n]).int() for x, n in (("q", 37), ("k", 41))}
    with pytest.raises(ValueError, match="mask_mod must be None with packed sequences"):
        golden_attention(*packed, mask_mod=MODS["causal"], **starts)


def test_a_peer_refuses_it_by_name():
    q, k, v, _ = draw(SHAPE)
    with pytest.raises(ValueError, match="mask_mod must be left out with implementation 'sdpa:m"):
        attention(q, k, v, implementation="sdpa:math", mask_mod=MODS["causal"])


@pytest.mark.slow
def test_a_compiled_call_refuses_it():
    q, k, v, _ = draw(SHAPE)

    @torch.compile(fullgraph=True, backend="eager")
    def attend(q, k, v):
        return EXACT["twin"](q, k, v, mask_mod=MODS["causal"])

    with pytest.raises(Exception, match=r"mask_mod must be None inside of torch\.compile"):
        attend(q, k, v)
