"""Estimates from machine code what a GPU that is not at hand would do: our kernels beside peers.

    PYTHONPATH=kernels python kernels/benchmarks/static.py [--json PATH]

Compiles the kernels of the fast path for sm_90, with no GPU, reads the loop in which each
multiplies without a mask (`sass`), and prints what a warp issues in a turn and how many TFLOPS an
H100 would reach if nothing but its pipes held it up. The estimate lets the tensor cores and the
busiest other pipe of a warp take turns; in brackets they overlap perfectly. Peers' rows are frozen,
as measured in the same way with Triton 3.7.1 (`PEERS`).

What it is worth: the order of kernels rather than their speed. Memory, barriers, launches, the ends
of rows and masked blocks are left out; the tutorial's kernel is some 16 % faster than estimated.
"""

import argparse
import json
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import triton
from sass import Loop, loops_of

from attention_kernels.profiles import PROFILES
from attention_kernels.triton.ahead import (
    SHARED_MEMORY,
    TENSOR_MEMORY,
    compile_fast_ahead,
    machine_code,
)
from attention_kernels.triton.fast_launch import KERNELS, Tile, tile_of

__all__ = ["PEERS", "Compiled", "estimate"]

PEAK = 865.0
"""TFLOPS that a product alone reaches on an H100 at its sustained clock."""
_PRODUCTS = {"forward": 2, "backward": 5}
"""Products of a tile's size that the direction needs; what is computed twice counts once."""
_REGISTERS, _WARPS, _PROGRAMS = 65536, 64, 32
"""The most that a multiprocessor holds, of sm_80, sm_90 and sm_100 alike."""
_SYSTEM = 1024
"""Bytes of shared memory that the system keeps beside each program's. A multiprocessor has them
once more than one program may have (CUDA C++ programming guide, compute capabilities)."""


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A row of another kernel, read from its own machine code."""

    name: str
    tile: str
    instructions: int
    ex2: int
    tflops: float
    overlapped: float | None = None


PEERS = {
    ("forward", 64): [
        Peer(name="Triton tutorial 06, TMA", tile="128x64 / 4", instructions=517, ex2=68,
             tflops=419, overlapped=814),
        Peer(name="FlexAttention, Inductor", tile="128x128 / 8", instructions=601, ex2=66,
             tflops=398, overlapped=737),
    ],
    ("forward", 128): [
        Peer(name="Triton tutorial 06", tile="128x128 / 8", instructions=493, ex2=66, tflops=571),
        Peer(name="FlexAttention, Inductor", tile="128x64 / 8", instructions=428, ex2=34,
             tflops=471),
    ],
    ("backward", 64): [
        Peer(name="Triton tutorial 06", tile="128x32 / 4", instructions=268 + 231, ex2=16 + 32,
             tflops=318, overlapped=481),
    ],
}  # fmt: skip
"""By direction and head_dim, with Triton 3.7.1 and BF16. The tutorial's backward: two loops."""
TUTORIAL_TILES = {64: Tile(128, 64, 4, 3), 128: Tile(128, 128, 8, 2)}
"""The tutorial's tiles of the forward by head_dim, with stages of ours. They are not ours: at 64 no
GPU has timed it, and at 128 a block of 128 keys is other numerics than `fa2`'s."""


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """A kernel in machine code: the loop without a mask, and what a program of it takes."""

    kernel: str
    rows: int
    keys: int
    loop: Loop
    warps: int
    registers: int
    shared: int
    spills: int
    arch: int = 90
    tensor_memory: int = 0
    """Columns, on sm_100."""

    @property
    def tile(self) -> str:
        """The tile as `Peer.tile` has it."""
        return f"{self.rows}x{self.keys} / {self.warps}"

    @property
    def programs(self) -> int:
        """How many programs fit a multiprocessor of its chip at once."""
        registers = -(-self.registers // 8) * 8 * 32 * self.warps
        shared = SHARED_MEMORY[self.arch] + _SYSTEM
        columns = TENSOR_MEMORY // self.tensor_memory if self.tensor_memory else _PROGRAMS
        return min(
            _REGISTERS // registers,
            shared // (self.shared + _SYSTEM),
            _WARPS // self.warps,
            columns,
            _PROGRAMS,
        )

    def cycles(self, *, overlapped: bool = False) -> float:
        """Cycles of a multiprocessor for one tile: warp groups share it, four warps go at once."""
        loop, groups = self.loop, self.warps // 4
        each = max(loop.tensor, loop.busiest) if overlapped else loop.tensor + loop.busiest
        return groups * each


def cycles_of_a_product(compiled: Compiled, *, overlapped: bool) -> float:
    """Return the cycles of a kernel for each score of one element of head_dim: tiles differ."""
    return compiled.cycles(overlapped=overlapped) / (compiled.rows * compiled.keys)


def estimate(
    direction: str, kernels: Sequence[Compiled], head_dim: int, *, overlapped: bool
) -> float:
    """Return TFLOPS of a direction whose `kernels` each go over every score of a head."""
    useful = _PRODUCTS[direction] * head_dim / 2048
    spent = sum(cycles_of_a_product(kernel, overlapped=overlapped) for kernel in kernels)
    return PEAK * useful / spent


def read(
    name: str, head_dim: int, arch: int = 90, group: int = 1, tile: Tile | None = None
) -> Compiled:
    """Compile a kernel of the fast path for a chip, in BF16, and read its loop without a mask.

    That is the one of the fewest instructions: the others test a mask too. In its own tile, or in
    another one, with numerics of its block of keys. ValueError where no loop multiplies on tensor
    cores.
    """
    numerics, dtype = PROFILES["fa2"], torch.bfloat16
    if tile and name == "forward":
        numerics = replace(numerics, tiling=replace(numerics.tiling, block_k=tile.block_k))
    tile = tile or tile_of(name, arch, head_dim)
    found = compile_fast_ahead(name, arch, numerics, dtype, head_dim, group=group, tile=tile)
    code = machine_code(found)
    loops = loops_of(code.sass)
    if not loops or tile is None:
        raise ValueError(f"static: {name} must multiply on tensor cores in a loop, has none")
    return Compiled(
        kernel=name,
        arch=arch,
        rows=tile.block_q,
        keys=tile.block_k,
        loop=min(loops, key=lambda loop: loop.instructions),
        warps=tile.warps,
        shared=found.metadata.shared,
        registers=code.registers,
        spills=code.spills,
        tensor_memory=found.metadata.tmem_size or 0,
    )


def in_tutorial_tile(head_dim: int) -> Compiled:
    """Compile the forward in the tile that Triton's tutorial has, and read its loop."""
    return read("forward", head_dim, tile=TUTORIAL_TILES[head_dim])


def rows_of(head_dim: int) -> list[dict]:
    """Return what is printed of one head_dim: ours by direction, with peers beside."""
    rows = []
    names = [name for name in KERNELS if tile_of(name, 90, head_dim)]
    for direction, of in (("forward", names[:1]), ("backward", names[1:])):
        kernels = [read(name, head_dim) for name in of]
        rows.append(
            {
                "direction": direction,
                "head_dim": head_dim,
                "kernels": [
                    asdict(each) | {"tile": each.tile, "programs": each.programs}
                    for each in kernels
                ],
                "tflops": estimate(direction, kernels, head_dim, overlapped=False),
                "overlapped": estimate(direction, kernels, head_dim, overlapped=True),
                "peers": [asdict(peer) for peer in PEERS.get((direction, head_dim), [])],
            }
        )
    return rows


def show(row: dict) -> str:
    """Return the lines of one direction and head_dim, at most 80 columns wide."""
    lines = [f"{row['direction']}, head_dim {row['head_dim']}"]
    for each in row["kernels"]:
        loop = each["loop"]
        fp32 = "/".join(str(loop["fp32"][name]) for name in ("FMUL", "FADD", "FFMA"))
        lines.append(
            f"  {each['kernel']:15} {each['tile']:12} {loop['instructions']:5} "
            f"{loop['ex2']:4} {fp32:>12} {loop['tensor']:6.0f} {each['programs']:4} "
            f"{each['spills']:6}"
        )
    lines.append(f"  ours: {row['tflops']:.0f} ({row['overlapped']:.0f}) TFLOPS by the model")
    for peer in row["peers"]:
        over = f" ({peer['overlapped']:.0f})" if peer["overlapped"] else ""
        lines.append(
            f"  {peer['name']}, {peer['tile']}: {peer['tflops']:.0f}{over}; ours is at "
            f"{row['tflops'] / peer['tflops']:.2f}x"
        )
    return "\n".join(lines)


def main() -> int:
    """Run it and return the exit code."""
    parser = argparse.ArgumentParser(description="What compiled kernels would do on an H100")
    parser.add_argument("--json", type=Path, help="write what is printed, with versions")
    options = parser.parse_args()
    print(f"sm_90, BF16, not causal; Triton {triton.__version__}; a warp, one turn of the loop:")
    print(f"  {'kernel':15} {'tile / warps':12} instr  EX2 FMUL/ADD/FMA tensor fit spills")
    rows = []
    for head_dim in (64, 128, 256):
        for row in rows_of(head_dim):
            print(show(row), flush=True)
            rows.append(row)
    for head_dim in TUTORIAL_TILES:
        ours = in_tutorial_tile(head_dim)
        theirs = PEERS["forward", head_dim][0].tflops
        tflops = estimate("forward", [ours], head_dim, overlapped=False)
        print(
            f"forward, head_dim {head_dim}, in the tutorial's tile {ours.tile}: "
            f"{tflops:.0f} TFLOPS, {tflops / theirs:.2f}x"
        )
    if options.json:
        versions = {"triton": triton.__version__, "torch": torch.__version__}
        content = {"versions": versions, "machine": platform.machine(), "rows": rows}
        options.json.write_text(json.dumps(content, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
