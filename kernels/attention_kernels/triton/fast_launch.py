"""Runs the fast path: which calls it takes, in which tiles, and how they are launched.

It takes what is `fa2` but for the tile, of BF16 or FP16, under a mask of positions alone (causal,
window, packed); every other call goes to the dialled kernels (`launch`). It is a layout and no
numerics of its own: block_k of the forward, which decides bits, is the numerics'. Of a GPU's tile
the rest comes from `TILES` by architecture and head_dim, and nothing from timing. Sums over blocks
(dQ, dK, dV) have the same order in any tile on tensor cores, which add 16 products at a time into
the accumulator; the tests hold that on a GPU. The interpreter, which adds a block at a time, runs
in the tile that numerics name.

Operands are read by tensor descriptors where the chip has them (sm_90 and later) and the tensors
are aligned as they demand, else by pointers, to the same bits.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attention_kernels.masks import Mask
from attention_kernels.numerics import FlashNumerics
from attention_kernels.profiles import PROFILES
from attention_kernels.triton.arguments import (
    Constants,
    constants_of,
    kernel_inputs,
    lengths_of,
    narrower,
    places_of,
)
from attention_kernels.triton.fast import (
    fast_dkv_kernel,
    fast_dq_kernel,
    fast_forward_kernel,
    fast_group_kernel,
)
from attention_kernels.triton.runtime import blocks_of, run

__all__ = [
    "TILES",
    "FastConstants",
    "Tile",
    "applies",
    "architecture",
    "backward",
    "fast_constants",
    "forward",
    "is_describable",
    "key_of",
    "tile_of",
]


@dataclass(frozen=True, kw_only=True)
class FastConstants(Constants):
    """What a fast kernel is compiled for."""

    descriptors: bool = False
    """Whether operands that a loop reads are tensor descriptors."""
    makes_dk: bool = True
    makes_dv: bool = True
    adds_dk: bool = True
    """Whether it is dK, which is scaled, that the group kernel adds."""
    block_values: int = 1024
    """Values that a program of `fast_group_kernel` adds."""


class Tile(NamedTuple):
    """Rows of a program, and how it is compiled."""

    block_q: int
    block_k: int
    """In the forward the numerics' is taken instead."""
    warps: int
    stages: int


_ROWS = 256
"""The largest block of queries, to a multiple of which the numbers of rows are filled up."""
KERNELS = ("forward", "dq", "dkv", "dk", "dv")
"""Names of what has a tile: "dk" and "dv" are `fast_dkv_kernel` where it makes one of both, since
both at once would spill registers."""

TILES: dict[int, dict[tuple[str, int], Tile]] = {
    80: {
        ("forward", 64): Tile(64, 64, 4, 2),
        ("forward", 128): Tile(128, 64, 8, 3),
        ("forward", 256): Tile(64, 64, 8, 2),
        ("dq", 64): Tile(64, 32, 4, 2),
        ("dq", 128): Tile(64, 64, 8, 2),
        ("dq", 256): Tile(64, 64, 8, 2),
        ("dkv", 64): Tile(32, 64, 4, 2),
        ("dkv", 128): Tile(64, 64, 8, 3),
        ("dk", 256): Tile(64, 64, 8, 2),
        ("dv", 256): Tile(64, 64, 8, 2),
    },
    90: {
        ("forward", 64): Tile(64, 64, 4, 3),
        ("forward", 128): Tile(64, 64, 4, 3),
        ("forward", 256): Tile(64, 64, 4, 3),
        ("dq", 64): Tile(64, 128, 4, 3),
        ("dq", 128): Tile(128, 64, 8, 3),
        ("dq", 256): Tile(128, 32, 8, 3),
        ("dkv", 64): Tile(64, 64, 4, 2),
        ("dkv", 128): Tile(64, 64, 4, 2),
        ("dk", 256): Tile(32, 128, 8, 2),
        ("dv", 256): Tile(64, 128, 8, 2),
    },
    100: {
        ("forward", 64): Tile(64, 64, 4, 3),
        ("forward", 128): Tile(128, 64, 8, 3),
        ("forward", 256): Tile(64, 64, 8, 3),
        ("dq", 64): Tile(128, 64, 8, 3),
        ("dq", 128): Tile(128, 64, 8, 3),
        ("dq", 256): Tile(128, 32, 8, 2),
        ("dkv", 64): Tile(64, 64, 4, 2),
        ("dkv", 128): Tile(64, 64, 4, 2),
        ("dk", 256): Tile(64, 64, 8, 2),
        ("dv", 256): Tile(64, 64, 8, 2),
    },
}
"""By compute capability, then kernel and width of a head; a narrower head takes the next.

Those of sm_90 were measured on an H100 (`kernels/README.md`), the others chosen so that the
compiler spills no register and makes no product twice, as 8 warps would on a tile of 32 x 64 of
sm_80; no GPU of those has run them.
"""
SMALL_MEMORY = 99 * 1024
"""Bytes of shared memory that a program may have on chips of capability 8.6, 8.9 and 12."""
SMALL_TILES: dict[tuple[str, int], Tile] = TILES[80] | {
    ("dq", 256): Tile(64, 32, 8, 1),
    ("dk", 256): Tile(32, 64, 8, 1),
}
"""The tiles of those chips: sm_80's, but for two that would not fit. These make some products
twice, and no GPU has run them."""
_SMALL = 86


def applies(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, scale: float, numerics: FlashNumerics
) -> bool:
    """Whether the fast path takes a call; `numerics` is resolved."""
    return (
        q.dtype in (torch.bfloat16, torch.float16)
        and scale > 0
        and numerics.tiling.block_k * max(q.shape[3], v.shape[3]) <= 128 * 128
        and _by_position_alone(mask)
        and _is_fa2(numerics, q.dtype)
    )


@functools.lru_cache(maxsize=256)
def _is_fa2(numerics: FlashNumerics, dtype: torch.dtype) -> bool:
    tiling = numerics.tiling
    fa2 = PROFILES["fa2"].with_(block_q=tiling.block_q, block_k=tiling.block_k)
    return numerics == fa2.resolve(dtype)


def _by_position_alone(mask: Mask) -> bool:
    tensors = (mask.key_padding, mask.visible, mask.bias, mask.alibi_slopes, mask.sinks)
    numbers = (mask.softcap, mask.dropout_p)
    return all(x is None for x in (*tensors, mask.mask_mod)) and not any(numbers)


def architecture(device: torch.device) -> int:
    """Return the compute capability whose tiles a device takes, 0 for a CPU, which interprets."""
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    is_large = (major, minor) in ((8, 0), (8, 7))
    return {9: 90, 10: 100}.get(major, 80 if is_large else _SMALL)


def tile_of(kernel: str, arch: int, width: int) -> Tile | None:
    """Return the tile of a kernel for heads of `width`, the wider one of q's and v's.

    None where the architecture has another kernel for it.
    """
    held = next(held for held in (64, 128, 256) if width <= held)
    return (SMALL_TILES if arch == _SMALL else TILES[arch]).get((kernel, held))


def is_describable(x: Tensor) -> bool:
    """Whether a tensor descriptor can be made of a tensor `(batch, heads, rows, head_dim)`.

    Rows lie side by side, and every other stride and the address are multiples of 16 bytes.
    """
    strides = [
        stride * x.element_size()
        for stride, size in zip(x.stride(), x.shape, strict=True)
        if size > 1
    ]
    whole = all(stride > 0 and stride % 16 == 0 for stride in strides[:-1])
    return x.numel() > 0 and x.stride(3) == 1 and whole and x.data_ptr() % 16 == 0


def forward(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, scale: float, numerics: FlashNumerics
) -> tuple[Tensor, Tensor]:
    """Return out, in q's dtype on a GPU, FP32 on a CPU, and lse in FP32; see `launch.forward`."""
    call = _Call(q, k, v, mask, scale, numerics)
    q, k, v = kernel_inputs(torch.float32, q, k, v)
    out = call.make((*q.shape[:3], v.shape[3]), q.dtype)
    # filled before a descriptor is made, for the reason given in `backward`
    lse = torch.full(q.shape[:3], -torch.inf, dtype=torch.float32, device=q.device)
    tile = call.tiles["forward"]
    read, descriptors = call.read((k, v), tile.block_k)
    call.run(
        fast_forward_kernel,
        blocks_of(call.lengths.query, tile.block_q) * q.shape[1] * call.lengths.batches,
        (q, *read, out, lse, *(x.stride() for x in (q, k, v, out)), call.places),
        (q.shape[1], call.lengths.query, q.shape[2], k.shape[2]),
        tile,
        descriptors=descriptors,
    )
    return out, lse


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    mask: Mask,
    scale: float,
    numerics: FlashNumerics,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk and dv, in q's dtype on a GPU and FP32 on a CPU; see `launch.backward`."""
    call = _Call(q, k, v, mask, scale, numerics)
    q, k, v, out, dout = kernel_inputs(torch.float32, q, k, v, out, dout)
    lse = lse.contiguous()
    dq, heads, lengths = call.make(q.shape, q.dtype), q.shape[1], call.lengths
    # Filled, since that launches a kernel of torch's: it binds this thread, one of autograd's, to
    # the GPU, without which no descriptor can be made.
    row_rows = q.shape[2] if call.packed else blocks_of(q.shape[2], _ROWS) * _ROWS
    shift, delta = torch.zeros((2, *q.shape[:2], row_rows), dtype=lse.dtype, device=q.device)
    strides = tuple(x.stride() for x in (q, k, v))
    tile = call.tiles["dq"]
    read, descriptors = call.read((k, v), tile.block_k)
    call.run(
        fast_dq_kernel,
        blocks_of(lengths.query, tile.block_q) * heads * lengths.batches,
        (
            *(q, *read, out, dout, lse, shift, delta, dq),
            *(*strides, *(x.stride() for x in (out, dout, dq)), call.places),
        ),
        (heads, lengths.query, q.shape[2], k.shape[2], row_rows),
        tile,
        descriptors=descriptors,
    )
    # what `fast_dq_kernel` wrote of rows is read by launches after it on the same stream
    dtype = q.dtype if call.group == 1 else torch.float32
    dk, dv = (call.make((q.shape[0], heads, *x.shape[2:]), dtype) for x in (k, v))
    for name in ("dkv", "dk", "dv"):
        tile = call.tiles.get(name)
        if tile is None:
            continue
        (q_read, dout_read), descriptors = call.read((q, dout), tile.block_q)
        call.run(
            fast_dkv_kernel,
            blocks_of(lengths.key, tile.block_k) * heads * lengths.batches,
            (
                *(q_read, k, v, dout_read, shift, delta, dk, dv),
                *(*strides, *(x.stride() for x in (dout, dk, dv)), call.places),
            ),
            (heads, lengths.key, q.shape[2], k.shape[2], row_rows),
            tile,
            descriptors=descriptors,
            makes_dk=name != "dv",
            makes_dv=name != "dk",
        )
    if call.group > 1:
        dk, dv = call.add_group(dk, k, of_dk=True), call.add_group(dv, v, of_dk=False)
    return dq, dk, dv


class _Call:
    """What the launches of one call have in common."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, numerics: FlashNumerics
    ) -> None:
        self.places = places_of(mask, q, k, scale=scale, numerics=numerics)
        self.lengths = lengths_of(mask, q, k)
        self.key = key_of(q, k, v, mask, numerics)
        self.group, self.packed = self.key.group, self.key.packed
        self.device = q.device
        self.arch = architecture(q.device)
        tiling, width = numerics.tiling, max(q.shape[3], v.shape[3])
        if self.arch == 0:
            tile = Tile(tiling.block_q, tiling.block_k, 4, 1)
            self.tiles: dict[str, Tile] = dict.fromkeys(("forward", "dq", "dkv"), tile)
        else:
            found = {name: tile_of(name, self.arch, width) for name in KERNELS}
            self.tiles = {name: tile for name, tile in found.items() if tile is not None}
            self.tiles["forward"] = self.tiles["forward"]._replace(block_k=tiling.block_k)

    def make(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a result to be written; packed, rows in no sequence are nobody's, and 0."""
        make = torch.zeros if self.packed else torch.empty
        return make(tuple(shape), dtype=dtype, device=self.device)

    def read(self, tensors: tuple[Tensor, Tensor], rows: int) -> tuple[tuple[Any, ...], bool]:
        """Return what a kernel reads blocks of `rows` of both by, and whether that is descriptors.

        Packed sequences have none: a block would read on in the next sequence.
        """
        if self.arch < 90 or self.packed or not all(map(is_describable, tensors)):
            return tensors, False
        return tuple(_descriptor(x, rows) for x in tensors), True

    def run(
        self,
        kernel: Any,
        programs: int,
        arguments: tuple[Any, ...],
        counts: tuple[int, ...],
        tile: Tile,
        **changes: bool,
    ) -> None:
        """Run a kernel in a tile, with fewer stages where those do not fit."""
        blocks = {"block_q": tile.block_q, "block_k": tile.block_k}
        constants = fast_constants(self.key, **blocks, **changes)
        stages = tuple(range(tile.stages, 0, -1))
        arguments = (*arguments, *counts)
        options = {"device": self.device, "warps": tile.warps, "stages": stages}
        run(kernel, programs, arguments, constants, **options)

    def add_group(self, parts: Tensor, like: Tensor, *, of_dk: bool) -> Tensor:
        """Return dK or dV, shaped and typed as `like`, of what each query head adds to it."""
        total = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        size = like.shape[2] * like.shape[3]
        constants = fast_constants(self.key, adds_dk=of_dk)
        programs = blocks_of(size, constants.block_values) * like.shape[0] * like.shape[1]
        arguments = (parts, total, self.places, size)
        options = {"device": self.device, "warps": 4, "stages": (1,)}
        run(fast_group_kernel, programs, arguments, constants, **options)
        return total


class Key(NamedTuple):
    """What a call's kernels are compiled for, but for their tiles."""

    numerics: FlashNumerics
    dtype: torch.dtype
    group: int
    head_dim: int
    v_head_dim: int
    left: bool
    right: bool
    packed: bool


def key_of(q: Tensor, k: Tensor, v: Tensor, mask: Mask, numerics: FlashNumerics) -> Key:
    """Return the key of a call; `numerics` is resolved."""
    group = q.shape[1] // k.shape[1]
    left, right = (x is not None for x in narrower(mask.offsets(), q, k))
    packed = mask.cu_seqlens_q is not None
    return Key(numerics, q.dtype, group, q.shape[3], v.shape[3], left, right, packed)


@functools.lru_cache(maxsize=1024)
def fast_constants(key: Key, **changes: Any) -> FastConstants:
    """Return the constants of a fast kernel: `changes` are its tile and what it makes."""
    make = functools.partial(torch.empty, dtype=key.dtype, device="meta")
    heads = ((key.group, key.head_dim), (1, key.head_dim), (1, key.v_head_dim))
    q, k, v = (make(1, count, 9, width) for count, width in heads)
    starts = torch.zeros(2, dtype=torch.int32) if key.packed else None
    window = (4 if key.left else None, 4 if key.right else None)
    mask = Mask(window=window, cu_seqlens_q=starts, cu_seqlens_k=starts)
    held = constants_of(q, k, v, mask=mask, scale=1.0, numerics=key.numerics)
    return FastConstants(**(vars(held) | changes))


def _descriptor(x: Tensor, rows: int) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor  # of a GPU alone

    width = max(16, 1 << (x.shape[3] - 1).bit_length())
    # an axis of one may have any stride, which the hardware checks all the same
    strides = [stride if size > 1 else 16 for stride, size in zip(x.stride(), x.shape, strict=True)]
    strides[3] = 1
    return TensorDescriptor(x, list(x.shape), strides, [1, 1, rows, width])
