"""Reads the loops of a compiled kernel: what a warp issues in one turn, and how busy that keeps it.

A loop is the code between a branch backwards and its target; the loops that multiply on tensor
cores are the ones that attention spends its time in. Counts are of one warp and one turn.

Cycles are those of sm_90, of one of a multiprocessor's four schedulers, which a warp stays with:
one instruction is issued a cycle; MUFU has 4 lanes, 8 cycles a warp; the integer and comparing
pipe 16 lanes, 2 cycles; FP32 32 lanes, 1 cycle. Tensor cores do 2,048 BF16 multiply-adds a cycle
and multiprocessor (NVIDIA H100 whitepaper: 989 TFLOPS on 132 of them at 1.83 GHz), so that
HGMMA.64xNx16 takes N / 2 cycles of all four, and 24 at least: below N = 48 it waits for A, of which
a row has 32 bytes whatever N is. A warp's own HMMA.16816, for which sm_90 is not made, takes 9
cycles, as the figures of `static.PEERS` were counted; at the full rate it would be 4. Leaves out
memory, barriers, and how pipes overlap.

On sm_100 one thread issues UTCHMMA for all warps of a program, and its shape is not in the
instruction but in a descriptor: it is counted, under "UTCHMMA", and takes no cycles here. What
that thread alone executes stands in the loop of all, and is counted as if each warp issued it.
"""

import re
from collections import Counter
from dataclasses import dataclass

__all__ = ["Loop", "loops_of"]

_LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+ )?([A-Z][A-Z0-9_.a-z]*)([^;]*);")
_TARGET = re.compile(r"0x([0-9a-f]+)\s*$")
_WGMMA = re.compile(r"HGMMA\.(\d+)x(\d+)x(\d+)\.")
_MMA = re.compile(r"HMMA\.(\d\d)(\d)(\d+)\.")
_FP32 = frozenset(["FADD", "FFMA", "FMUL"])
_COMPARING = frozenset(["FMNMX", "FSEL", "FSETP", "ISETP", "SEL", "VIADDMNMX", "VIMNMX"])
_INTEGER = frozenset(["F2FP", "IABS", "IADD3", "LEA", "LOP3", "PRMT", "SHF", "VIADD"]) | _COMPARING


@dataclass(frozen=True, kw_only=True)
class Loop:
    """One turn of a loop, as one warp issues it."""

    instructions: int
    products: dict[str, int]
    """How often each product of the tensor cores is issued, by its shape, as "64x128x16"."""
    tensor: float
    """Cycles of the tensor cores of all four schedulers; 0 of those whose shape is not read."""
    ex2: int
    special: int
    """MUFU instructions, EX2 among them."""
    fp32: dict[str, int]
    integer: int
    spills: int

    @property
    def busiest(self) -> int:
        """Cycles of the pipe that is busiest beside the tensor cores."""
        return max(self.instructions, 8 * self.special, 2 * self.integer, sum(self.fp32.values()))


def loops_of(sass: str) -> list[Loop]:
    """Return the loops of `cuobjdump -sass` that multiply on tensor cores, in order of address.

    Of nested ones the innermost. ValueError where there is no instruction to read.
    """
    code = [(int(at, 16), name, rest) for at, name, rest in _LINE.findall(sass)]
    if not code:
        raise ValueError("loops_of: sass must be what cuobjdump -sass prints, has no instruction")
    found: list[tuple[int, int]] = []
    for at, name, rest in code:
        target = _TARGET.search(rest) if name.split(".")[0] == "BRA" else None
        if target and int(target[1], 16) < at:
            found.append((int(target[1], 16), at))
    loops = []
    for first, last in sorted(found):
        if any(
            (first, last) != other and first <= other[0] and other[1] <= last for other in found
        ):
            continue  # it holds another one
        loop = _loop([(name, rest) for at, name, rest in code if first <= at <= last])
        if loop.products:
            loops.append(loop)
    return loops


def _loop(code: list[tuple[str, str]]) -> Loop:
    stems = Counter(name.split(".")[0] for name, _ in code)
    products: Counter[str] = Counter()
    tensor = 0.0
    for name, _ in code:
        shape = _WGMMA.match(name) or _MMA.match(name)
        if shape:
            rows, columns, depth = map(int, shape.groups())
            products["x".join(shape.groups())] += 1
            if name.startswith("HGMMA"):
                tensor += max(24.0, rows * columns * depth / 2048)
            else:
                tensor += 9.0 * rows * columns * depth / 2048
        elif name.startswith("UTCHMMA"):
            products["UTCHMMA"] += 1
    return Loop(
        instructions=len(code) - stems["NOP"],
        products=dict(products),
        tensor=tensor,
        ex2=sum(name.startswith("MUFU.EX2") for name, _ in code),
        special=stems["MUFU"],
        fp32={name: stems[name] for name in sorted(_FP32)},
        integer=sum(stems[name] for name in _INTEGER),
        spills=stems["STL"] + stems["LDL"],
    )
