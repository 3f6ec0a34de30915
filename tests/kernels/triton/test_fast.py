"""The fast path is another layout of the dialled kernels: the same bits, of no other numerics.

On a CPU both are interpreted, in one tile. On a GPU the fast path has tiles of its own, and its
bits are still those of the dialled kernels, forward and backward.
"""

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from attention_kernels import PROFILES, flash_attention
from attention_kernels.masks import Mask
from attention_kernels.testing import Shape, make_qkv, nan_filled
from attention_kernels.triton import fast_launch, launch
from attention_kernels.triton.fast_launch import TILES, applies, is_describable, tile_of
from tests.kernels.triton.fast_launches import caught

NEEDS_CUDA = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
NAMES = ("out", "lse", "dq", "dk", "dv")


def draw(shape, dtype, device, seed=0):
    generator = torch.Generator(device).manual_seed(seed)
    q, k, v = make_qkv(shape, dtype, generator)
    dout = torch.randn((*q.shape[:3], v.shape[3]), generator=generator, device=device)
    return q, k, v, dout.to(dtype)


def both(q, k, v, dout, mask, blocks=(64, 64), scale=None):
    """What the fast path and the dialled kernels give, by name."""
    numerics = PROFILES["fa2"].with_(block_q=blocks[0], block_k=blocks[1]).resolve(q.dtype)
    call = {"mask": mask, "scale": scale or q.shape[3] ** -0.5, "numerics": numerics}
    assert applies(q, k, v, **call)
    with nan_filled():
        out, lse = launch.dialled_forward(q, k, v, **call)
        dialled = launch.dialled_backward(dout, q, k, v, out, lse, **call)[:3]
        fast_out, fast_lse = launch.forward(q, k, v, **call)
        fast = launch.backward(dout, q, k, v, fast_out, fast_lse, **call)[:3]
    dialled, fast = (out, lse, *dialled), (fast_out, fast_lse, *fast)
    return dict(zip(NAMES, zip(fast, dialled, strict=True), strict=True))


def assert_same_bits(found):
    for name, (fast, dialled) in found.items():
        assert torch.equal(fast.float(), dialled.float()), name
        assert torch.equal(fast.float().signbit(), dialled.float().signbit()), f"sign of {name}"


SIZES = st.integers(1, 40)
WINDOWS = st.one_of(st.none(), st.integers(0, 40))


@settings(max_examples=12, phases=[Phase.explicit, Phase.generate])
@given(
    lengths=st.tuples(SIZES, SIZES),
    window=st.tuples(WINDOWS, WINDOWS),
    causal=st.booleans(),
    heads=st.sampled_from([(2, 2), (4, 2), (3, 1)]),
    dims=st.sampled_from([(16, 16), (24, 16), (16, 40)]),
    blocks=st.tuples(*[st.sampled_from([16, 32])] * 2),
    seed=st.integers(0, 9),
)
def test_interpreted_it_gives_the_bits_of_the_dialled_kernels(
    lengths, window, causal, heads, dims, blocks, seed
):
    shape = Shape(2, *heads, *lengths, dims[0])
    q, k, v, _ = draw(shape, torch.bfloat16, "cpu", seed)
    v = torch.randn(*v.shape[:3], dims[1], generator=torch.Generator().manual_seed(seed)).bfloat16()
    dout = torch.randn(*q.shape[:3], dims[1], generator=torch.Generator().manual_seed(seed + 1))
    mask = Mask(causal=causal, window=window)
    assert_same_bits(both(q, k, v, dout.bfloat16(), mask, blocks))


@pytest.mark.parametrize("causal", [False, True])
def test_interpreted_it_gives_the_bits_of_packed_sequences(causal):
    q, k, v, dout = draw(Shape(1, 4, 2, 61, 61, 16), torch.float16, "cpu")
    starts = torch.tensor([0, 7, 7, 40, 55], dtype=torch.int32)
    mask = Mask(causal=causal, cu_seqlens_q=starts, cu_seqlens_k=starts)
    found = both(q, k, v, dout, mask, (16, 32))
    assert_same_bits(found)
    assert (found["out"][0][:, :, 55:] == 0).all(), "rows in no sequence are 0"


FAR = [
    ({"exp": "exact"}, {}, 0.25),
    ({"exp": "exp2"}, {}, 0.25),
    ({"accumulator": "bf16"}, {}, 0.25),
    ({"rounding": "stochastic"}, {}, 0.25),
    ({"key_order": "reversed"}, {}, 0.25),
    ({"splits": 2}, {}, 0.25),
    ({"operands": "e4m3"}, {}, 0.25),
    ({"gradient_scale": "probabilities"}, {}, 0.25),
    ({"block_k": 256}, {}, 0.25),
    ({}, {"softcap": 5.0}, 0.25),
    ({}, {"dropout_p": 0.1}, 0.25),
    ({}, {"sinks": torch.zeros(2)}, 0.25),
    ({}, {"alibi_slopes": torch.ones(1, 2)}, 0.25),
    ({}, {"bias": torch.zeros(1, 1, 8, 8)}, 0.25),
    ({}, {"visible": torch.ones(1, 1, 8, 8, dtype=torch.bool)}, 0.25),
    ({}, {"key_padding": torch.ones(1, 8, dtype=torch.bool)}, 0.25),
    ({}, {}, -0.25),
    ({}, {}, 0.0),
]


@pytest.mark.parametrize(("changes", "masked", "scale"), FAR, ids=str)
def test_it_takes_no_call_of_other_numerics_or_masks(changes, masked, scale):
    q = torch.zeros(1, 2, 8, 128, dtype=torch.bfloat16)
    numerics = PROFILES["fa2"].with_(**changes).resolve(q.dtype)
    near = {"mask": Mask(), "scale": 0.25, "numerics": PROFILES["fa2"].resolve(q.dtype)}
    assert applies(q, q, q, **near)
    assert not applies(q, q, q, mask=Mask(**masked), scale=scale, numerics=numerics)


def test_it_takes_no_wide_operands():
    q = torch.zeros(1, 2, 8, 128)
    numerics = PROFILES["fa2"].resolve(q.dtype)
    assert not applies(q, q, q, mask=Mask(), scale=0.25, numerics=numerics)


def test_the_public_call_takes_it(monkeypatch):
    taken = []
    found = torch.zeros(1, 2, 8, 16), torch.zeros(1, 2, 8)
    monkeypatch.setattr(fast_launch, "forward", lambda *x, **_: taken.append(x) or found)
    q = torch.zeros(1, 2, 8, 16, dtype=torch.bfloat16)
    flash_attention(q, q, q, engine="triton")
    assert len(taken) == 1
    flash_attention(q, q, q, engine="triton", softcap=3.0)
    assert len(taken) == 1


def test_a_descriptor_is_made_of_aligned_tensors_alone():
    x = torch.zeros(2, 3, 8, 64, dtype=torch.bfloat16)
    assert is_describable(x)
    assert is_describable(x.transpose(1, 2))
    assert is_describable(x[:1].expand(1, 3, 8, 64)), "an axis of one may have any stride"
    assert not is_describable(x[:1].expand(2, 3, 8, 64)), "a stride of 0"
    assert not is_describable(x[..., 1:]), "2 bytes past an address of 16"
    assert not is_describable(torch.zeros(2, 3, 8, 60, dtype=torch.bfloat16)), "rows of 120 bytes"
    assert not is_describable(x.mT), "rows that do not lie side by side"
    assert not is_describable(x[:, :, :0])


def test_every_width_has_tiles_on_every_architecture():
    for arch in TILES:
        for width in (16, 40, 64, 65, 96, 128, 160, 256):
            assert tile_of("forward", arch, width)
            assert tile_of("dq", arch, width)
            joint = tile_of("dkv", arch, width) is not None
            apart = [tile_of(name, arch, width) is not None for name in ("dk", "dv")]
            assert apart == [not joint] * 2, "dK and dV are made once each"


GPU_CASES = [
    (Shape(2, 4, 2, 113, 203, 40), {}),
    (Shape(2, 4, 1, 512, 256, 64), {"causal": True}),
    (Shape(2, 4, 4, 1024, 1023, 128), {"causal": True, "window": (100, 0)}),
    (Shape(1, 8, 2, 1000, 1000, 128), {"causal": True}),
    (Shape(1, 2, 1, 1023, 1024, 256), {}),
    (Shape(1, 2, 2, 640, 640, 256), {"causal": True}),
    (Shape(1, 2, 2, 500, 700, 96), {"window": (70, 20)}),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("shape", "masked"), [pytest.param(*case, marks=NEEDS_CUDA) for case in GPU_CASES], ids=str
)
def test_compiled_it_gives_the_bits_of_the_dialled_kernels(shape, masked, dtype):
    assert_same_bits(both(*draw(shape, dtype, "cuda"), Mask(**masked)))


@pytest.mark.parametrize("block_k", [pytest.param(x, marks=NEEDS_CUDA) for x in (32, 128)])
def test_compiled_it_keeps_the_numerics_block_k(block_k):
    tensors = draw(Shape(1, 2, 2, 300, 300, 64), torch.bfloat16, "cuda")
    assert_same_bits(both(*tensors, Mask(causal=True), (64, block_k)))


@pytest.mark.parametrize("causal", [pytest.param(x, marks=NEEDS_CUDA) for x in (False, True)])
def test_compiled_descriptors_and_pointers_give_the_same_bits(causal, monkeypatch):
    tensors = draw(Shape(2, 4, 2, 333, 333, 128), torch.bfloat16, "cuda")
    described = both(*tensors, Mask(causal=causal))
    monkeypatch.setattr(fast_launch, "is_describable", lambda x: False)
    pointed = both(*tensors, Mask(causal=causal))
    for name in NAMES:
        assert torch.equal(described[name][0], pointed[name][0]), name


@pytest.mark.parametrize("causal", [pytest.param(x, marks=NEEDS_CUDA) for x in (False, True)])
def test_compiled_what_lies_past_a_tensor_is_not_read(causal):
    """A batch with infinities after one without: a block that read on would make NaN of them."""
    q, k, v, dout = draw(Shape(2, 2, 2, 70, 70, 64), torch.bfloat16, "cuda")
    for x in (q, k, v, dout):
        x[1] = torch.inf
    alone = both(*(x[:1].contiguous() for x in (q, k, v, dout)), Mask(causal=causal))
    beside = both(q, k, v, dout, Mask(causal=causal))
    for name in NAMES:
        assert torch.equal(beside[name][0][:1], alone[name][0]), name


def test_the_heads_of_a_group_are_added_in_their_order():
    """In FP32 (2**24 + 1) - 2**24 is 0, and from the last head on it would be 1."""
    q, k, v, _ = draw(Shape(1, 3, 1, 2, 5, 16), torch.bfloat16, "cpu")
    call = {"mask": Mask(), "scale": 0.5, "numerics": PROFILES["fa2"].resolve(q.dtype)}
    parts = torch.tensor([2.0**24, 1.0, -(2.0**24)])[None, :, None, None].expand(1, 3, 5, 16)
    for order, expected in (([0, 1, 2], 0.0), ([0, 2, 1], 1.0)):
        given = parts[:, order].contiguous()
        like = torch.empty(1, 1, 5, 16)
        for of_dk, scale in ((True, 0.5), (False, 1.0)):
            total = fast_launch._Call(q, k, v, **call).add_group(given, like, of_dk=of_dk)
            assert torch.equal(total, torch.full_like(like, expected * scale))


@pytest.mark.parametrize("packed", [False, True])
def test_packed_sequences_are_read_by_pointers(packed, monkeypatch):
    """A block of a descriptor would read on in the next sequence."""
    monkeypatch.setattr(fast_launch, "architecture", lambda device: 90)
    q, k, v, _ = draw(Shape(1, 2, 2, 64, 64, 64), torch.bfloat16, "cpu")
    starts = torch.tensor([0, 30, 64], dtype=torch.int32) if packed else None
    mask = Mask(cu_seqlens_q=starts, cu_seqlens_k=starts)
    call = fast_launch._Call(q, k, v, mask, 0.1, PROFILES["fa2"].resolve(q.dtype))
    assert call.read((k, v), 64)[1] is not packed


@pytest.mark.parametrize("head_dim", [64, 256])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("arch", sorted(TILES))
def test_a_gpu_is_launched_with_what_its_kernels_take(arch, kv_heads, head_dim):
    q, k, v, dout = draw(Shape(2, 4, kv_heads, 200, 130, head_dim), torch.bfloat16, "cpu")
    call = {"mask": Mask(causal=True), "scale": 0.1, "numerics": PROFILES["fa2"].resolve(q.dtype)}
    with caught(arch) as launched:
        out, lse = fast_launch.forward(q, k, v, **call)
        dq, dk, dv = fast_launch.backward(dout, q, k, v, out, lse, **call)
    assert {x.dtype for x in (out, dq, dk, dv)} == {torch.bfloat16}
    assert [x.shape for x in (dq, dk, dv)] == [x.shape for x in (q, k, v)]
    names = [launch.kernel.__name__ for launch in launched]
    both = ["fast_dkv_kernel"] * (2 if head_dim == 256 else 1)
    added = ["fast_group_kernel"] * (0 if kv_heads == 4 else 2)
    assert names == ["fast_forward_kernel", "fast_dq_kernel", *both, *added]
    for kernel, programs, arguments, constants, stages in launched:
        assert len(arguments) == len(kernel.params) - 1, "N is the last"
        if kernel.__name__ == "fast_group_kernel":
            continue
        described = [
            p.name for p, x in zip(kernel.params, arguments, strict=False) if "Desc" in str(type(x))
        ]
        of_keys = kernel.__name__ == "fast_dkv_kernel"
        reads = ["p_q", "p_dout"] if of_keys else ["p_k", "p_v"]
        assert described == ([] if arch == 80 else reads)
        assert constants.descriptors == (arch != 80)
        rows, block = (130, constants.block_k) if of_keys else (200, constants.block_q)
        assert programs == -(-rows // block) * 4 * 2
        assert list(stages) == sorted(stages, reverse=True)
    made = [
        (launch.constants.makes_dk, launch.constants.makes_dv)
        for launch in launched
        if launch.kernel.__name__ == "fast_dkv_kernel"
    ]
    assert made == ([(True, False), (False, True)] if head_dim == 256 else [(True, True)])
