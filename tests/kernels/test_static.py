"""Machine code is read as it is, and the model gives the figures that were published of others."""

import sys
import types
from pathlib import Path

import pytest
import torch
import triton

from attention_kernels import PROFILES
from attention_kernels.masks import Mask
from attention_kernels.triton.ahead import SHARED_MEMORY, compile_fast_ahead, machine_code
from attention_kernels.triton.fast_launch import (
    KERNELS,
    SMALL_MEMORY,
    SMALL_TILES,
    TILES,
    Tile,
    architecture,
    tile_of,
)
from tests.sampling import others_long, others_slow

FOLDER = Path(__file__).parents[2] / "kernels/benchmarks"


@pytest.fixture(scope="module")
def bench():
    sys.path.insert(0, str(FOLDER))
    yield types.SimpleNamespace(**{name: __import__(name) for name in ("sass", "static")})
    sys.path.remove(str(FOLDER))


def sass(*lines):
    """The lines as cuobjdump prints them, 16 bytes each, with the encoding behind."""
    return "\n".join(
        f"        /*{16 * at:04x}*/   {line} ;   /* 0x0000004fff067819 */\n"
        "                                  /* 0x000fe40000000000 */"
        for at, line in enumerate(lines)
    )


FORWARD = sass(
    "LDC R1, c[0x0][0x28]",
    "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR12], RZ, !UPT",
    "@P0 BRA 0x10",  # a loop of its own: the first product again
    "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24, gsb0",
    "MUFU.EX2 R3, R4",
    "MUFU.LG2 R3, R4",
    "FMUL R1, R2, R3",
    "FFMA.FTZ R1, R2, R3, R4",
    "@!P1 FADD R1, R2, R3",
    "FMNMX R1, R2, R3, !PT",
    "ISETP.GE.AND P0, PT, R1, R2, PT",
    "STL [R1], R4",
    "NOP",
    "@!UP0 BRA 0x30",
    "BRA 0xe0",  # where a program ends, it jumps onto itself
)


def test_each_loop_is_read_apart_with_what_is_in_it(bench):
    first, second = bench.sass.loops_of(FORWARD)
    assert (first.instructions, first.products, first.tensor) == (2, {"64x64x16": 1}, 32)
    assert second.products == {"64x128x16": 1}
    assert second.tensor == 64
    assert second.instructions == 10, "all but NOP, with the branch"
    assert (second.ex2, second.special, second.integer, second.spills) == (1, 2, 2, 1)
    assert second.fp32 == {"FADD": 1, "FFMA": 1, "FMUL": 1}
    assert second.busiest == 16, "two MUFU of 8 cycles"


def test_of_nested_loops_the_inner_one_counts(bench):
    code = sass("FADD R1, R1, R1", "HMMA.16816.F32.BF16 R4, R4, R6, R8", "BRA 0x10", "BRA 0x0")
    (loop,) = bench.sass.loops_of(code)
    assert (loop.instructions, loop.products) == (2, {"16x8x16": 1})
    assert loop.tensor == 9


def test_on_sm_100_products_are_counted_that_one_thread_issues_for_all(bench):
    code = sass(
        "LDTM.16dp32bit_t0_t15.x32 R4, tmem[UR6+0x100000]",
        "@!P0 BRA 0x80",  # waits past the end, and comes back
        "MUFU.EX2 R3, R4",
        "UTCHMMA gdesc[UR8], gdesc[UR10], tmem[UR15], tmem[UR26], idesc[UR27], !UPT",
        "UTCHMMA tmem[UR24], gdesc[UR22], tmem[UR15], tmem[UR26], idesc[UR27], UPT",
        "UTCBAR [UR33], URZ",
        "BRA.U !UP2, 0x0",
        "EXIT",
        "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR8+0xc020], R5",
        "@!P0 BRA 0x80",
        "BRA 0x20",
    )
    (loop,) = bench.sass.loops_of(code)
    assert (loop.instructions, loop.products, loop.ex2) == (7, {"UTCHMMA": 2}, 1)
    assert loop.tensor == 0


def test_what_is_no_machine_code_is_refused(bench):
    with pytest.raises(ValueError, match="what cuobjdump -sass prints"):
        bench.sass.loops_of("no such file")
    assert bench.sass.loops_of(sass("HGMMA.64x64x16.F32.BF16 R24, gdesc[UR12], RZ", "EXIT")) == []


def compiled(
    bench, *, instructions, ex2, products, rows=64, warps=4, registers=128, shared=49152, **of_chip
):
    """A kernel with such a loop; its tensor cycles are read from made-up machine code."""
    names = {shape: "HGMMA" if "x" in shape else "HMMA" for shape in products}
    lines = [f"{names[x]}.{x}.F32.BF16 R1" for x, n in products.items() for _ in range(n)]
    lines += ["MUFU.EX2 R1, R2"] * ex2
    lines += ["MOV R1, R2"] * (instructions - len(lines) - 1)
    (loop,) = bench.sass.loops_of(sass(*lines, "BRA 0x0"))
    assert loop.instructions == instructions
    return bench.static.Compiled(
        kernel="k",
        rows=rows,
        keys=64,
        loop=loop,
        warps=warps,
        registers=registers,
        shared=shared,
        spills=0,
        **of_chip,
    )


@pytest.mark.parametrize(
    ("head_dim", "rows", "kernel", "expected"),
    [
        # of the same loops, read by others: see `PEERS` for where
        (64, 128, {"instructions": 517, "ex2": 68, "products": {"64x64x16": 16}}, (419, 814)),
        (64, 64, {"instructions": 617, "ex2": 34, "products": {"64x64x16": 8}}, (254, 359)),
        (64, 64, {"instructions": 377, "ex2": 34, "products": {"64x64x16": 8}}, (350, 587)),
        (
            128,
            64,
            {"instructions": 666, "ex2": 34, "products": {"64x64x16": 8, "64x128x16": 4}},
            (376, None),
        ),
        (256, 32, {"instructions": 747, "ex2": 20, "products": {"16816": 128}}, (233, 384)),
    ],
)
def test_the_model_gives_the_forward_figures_known(bench, head_dim, rows, kernel, expected):
    kernels = [compiled(bench, rows=rows, **kernel)]
    found = [
        bench.static.estimate("forward", kernels, head_dim, overlapped=overlapped)
        for overlapped in (False, True)
    ]
    for value, figure in zip(found, expected, strict=True):
        assert figure is None or round(value) == pytest.approx(figure, abs=1)


@pytest.mark.parametrize(
    ("head_dim", "dq", "dkv", "expected"),
    [
        (64, (714, {"64x64x16": 12}), (885, {"64x32x16": 24}), (138, 223)),
        (
            128,
            (830, {"64x64x16": 16, "64x128x16": 4}),
            (994, {"64x32x16": 32, "64x64x16": 8}),
            (197, 385),
        ),
    ],
)
def test_the_model_gives_the_backward_figures_known(bench, head_dim, dq, dkv, expected):
    kernels = [
        compiled(bench, instructions=dq[0], ex2=32, products=dq[1]),
        # two warp groups that each compute everything: their time adds up, the work does not
        compiled(bench, instructions=dkv[0], ex2=32, products=dkv[1], warps=8),
    ]
    found = [
        bench.static.estimate("backward", kernels, head_dim, overlapped=overlapped)
        for overlapped in (False, True)
    ]
    assert [round(value) for value in found] == pytest.approx(expected, abs=1)


PRODUCTS = {"forward": (1, 1), "dq": (2, 1), "dkv": (2, 2), "dk": (2, 1), "dv": (1, 1)}
"""Products that a kernel needs of a tile: head_dim deep, and a block deep, which are added up."""
# By version of Triton, then on sm_80, sm_90 and sm_100: the most instructions of the loop without a
# mask for 64 x 64 scores of 4 warps, some 2 % above those found, and how many programs fit a
# multiprocessor.
BUDGETS = {
    "3.7.1": {
        ("forward", 64): ((370, 2), (310, 3), (340, 3)),
        ("dq", 64): ((390, 3), (210, 2), (295, 2)),
        ("dkv", 64): ((510, 2), (320, 3), (375, 2)),
        ("forward", 128): ((570, 1), (355, 2), (380, 1)),
        ("dq", 128): ((670, 1), (295, 1), (320, 1)),
        ("dkv", 128): ((920, 1), (370, 2), (410, 1)),
        ("forward", 256): ((1410, 1), (450, 1), (710, 1)),
        ("dq", 256): ((1040, 1), (530, 1), (800, 1)),
        ("dk", 256): ((1075, 1), (610, 1), (915, 1)),
        ("dv", 256): ((725, 1), (255, 1), (500, 1)),
    },
    "3.6.0": {
        ("forward", 64): ((370, 3), (315, 3), (355, 3)),
        ("dq", 64): ((390, 3), (210, 2), (320, 2)),
        ("dkv", 64): ((550, 2), (350, 2), (490, 2)),
        ("forward", 128): ((570, 1), (360, 2), (405, 1)),
        ("dq", 128): ((670, 1), (300, 1), (350, 1)),
        ("dkv", 128): ((955, 1), (400, 2), (535, 1)),
        ("forward", 256): ((1410, 1), (455, 1), (790, 1)),
        ("dq", 256): ((1040, 1), (535, 1), (925, 1)),
        ("dk", 256): ((1085, 1), (635, 1), (1115, 1)),
        ("dv", 256): ((730, 1), (285, 1), (590, 1)),
    },
}
ROWS = {80: 2, 90: 2, 100: 1}
"""Of how many rows of a tile a thread has scores."""
ROWS_OF_ALL_WARPS = {(80, 256): 8}
"""The same where Triton gives each warp some keys of all 64 rows, by head_dim."""
ADDRESSES = {("3.7.1", 90, "dkv", 128): 12}
"""Most spills of a kernel that has any; one of these is in the loop."""
CASES = [(arch, *case) for arch in TILES for case in BUDGETS["3.7.1"]]
IN_EVERY_RUN = [(80, "dkv", 64), (90, "forward", 64), (100, "forward", 64)]
COSTLY = [case for case in CASES if case[1:] in {("forward", 256), ("dq", 256)}]


@pytest.mark.parametrize(
    ("arch", "kernel", "head_dim"), others_slow(CASES, IN_EVERY_RUN, long=COSTLY)
)
def test_the_fast_path_keeps_its_budget(bench, arch, kernel, head_dim):
    assert_within_budget(bench.static.read(kernel, head_dim, arch), head_dim)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "tile", "why"),
    [
        ("dkv", Tile(64, 64, 8, 2), "done twice"),  # wgmma has 64 rows for each 4 warps
        ("dq", Tile(64, 128, 4, 4), "programs of a multiprocessor"),  # 4 blocks in shared memory
    ],
    ids=["products twice", "half the programs"],
)
def test_a_tile_that_wastes_the_chip_breaks_the_budget(bench, kernel, tile, why):
    with pytest.raises(AssertionError, match=why):
        assert_within_budget(bench.static.read(kernel, 64, tile=tile), 64)


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_forward_is_at_the_tutorials_estimate_in_the_tutorials_tile(bench, head_dim):
    if triton.__version__ != "3.7.1":
        pytest.skip(f"the tutorial was not read with Triton {triton.__version__}")
    theirs = bench.static.PEERS["forward", head_dim][0]
    ours = bench.static.in_tutorial_tile(head_dim)
    assert ours.tile == theirs.tile
    assert ours.spills == 0
    tflops = bench.static.estimate("forward", [ours], head_dim, overlapped=False)
    assert tflops >= theirs.tflops - 0.5  # which is rounded to one
    shipped = bench.static.read("forward", head_dim)
    assert bench.static.estimate("forward", [shipped], head_dim, overlapped=False) < tflops


def assert_within_budget(found, head_dim):
    budgets = BUDGETS.get(triton.__version__)
    if budgets is None:
        pytest.skip(f"no budgets were measured with Triton {triton.__version__}")
    kernel, arch = found.kernel, found.arch
    instructions, programs = budgets[kernel, head_dim][list(TILES).index(arch)]
    # what 4 warps do of 64 x 64 scores: 32 a thread
    share = found.rows * found.keys / 64 / 64 / (found.warps / 4)
    assert_no_product_is_twice(found, head_dim)
    # a score takes one, and in the forward each row of a thread one for its rescale factor
    rows = ROWS_OF_ALL_WARPS.get((arch, head_dim), ROWS[arch]) if kernel == "forward" else 0
    assert found.loop.ex2 == 32 * share + rows, "not one EX2 a score"
    assert found.loop.instructions / share <= instructions, "too many instructions"
    assert found.programs == programs, "programs of a multiprocessor"
    assert found.spills <= ADDRESSES.get((triton.__version__, arch, kernel, head_dim), 0)


def assert_no_product_is_twice(found, head_dim):
    """What warps multiply in a turn is what a tile has, in the instructions of the chip."""
    deep, of_block = PRODUCTS[found.kernel]
    issued = found.loop.products
    if found.arch == 100:
        # an instruction multiplies all of a tile, 16 deep
        block = found.keys if found.kernel in ("forward", "dq") else found.rows
        assert issued == {"UTCHMMA": (deep * head_dim + of_block * block) / 16}, "done twice"
        return
    # HMMA is of one warp, wgmma of four
    start, warps = {80: ("16x8x", 1), 90: ("64x", 4)}[found.arch]
    assert all(shape.startswith(start) for shape in issued), "other tensor cores"
    products = sum(_volume(shape) * n for shape, n in issued.items()) * found.warps / warps
    assert products == (deep + of_block) * found.rows * found.keys * head_dim, "done twice"


def _volume(shape):
    rows, columns, depth = map(int, shape.split("x"))
    return rows * columns * depth


GRID = {
    (arch, kernel, width, group, packed): None
    for arch in TILES
    for kernel in KERNELS
    for width in (40, 64, 96, 128, 192, 256)
    for group in (1, 4)
    for packed in (False, True)
    if tile_of(kernel, arch, width)
}
"""A group of 8 compiles to what one of 4 does, but for a number."""
SPILLED = {
    90: {
        ("forward", 192, True): 104,
        ("forward", 256, True): 67,
        ("dq", 192, False): 39,
        ("dq", 256, False): 26,
        ("dkv", 96, False): 29,
        ("dkv", 96, True): 146,
        ("dkv", 128, False): 34,
        ("dkv", 128, True): 68,
        ("dk", 192, False): 68,
        ("dk", 192, True): 12,
        ("dk", 256, False): 18,
        ("dk", 256, True): 6,
    },
    100: {},
    80: {},
}
"""The most that may be spilled anywhere in a kernel of packed sequences or of others, also where a
causal mask is tested. Tiles of
sm_90 are those that an H100 ran fastest; some that spill less ran slower or were not tried."""
COMPILED_IN_EVERY_RUN = [
    (80, "dkv", 128, 4, True),
    (90, "forward", 128, 4, False),
    (90, "dq", 96, 1, True),
    (100, "forward", 64, 1, False),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "kernel", "width", "group", "packed"), others_long(GRID, COMPILED_IN_EVERY_RUN)
)
def test_each_kernel_of_the_fast_path_fits_its_chip_as_it_is_launched(
    arch, kernel, width, group, packed
):
    starts = torch.tensor([0, 9], dtype=torch.int32) if packed else None
    mask = Mask(causal=True, cu_seqlens_q=starts, cu_seqlens_k=starts)
    options = {"mask": mask, "group": group}
    numerics, dtype = PROFILES["fa2"], torch.bfloat16
    found = compile_fast_ahead(kernel, arch, numerics, dtype, width, **options)
    assert 0 < found.metadata.shared <= SHARED_MEMORY[arch]
    code = machine_code(found)
    assert code.spills <= SPILLED[arch].get((kernel, width, packed), 0)
    wanted = {80: "HMMA", 90: "HGMMA", 100: "UTCHMMA"}[arch]
    assert wanted in code.sass
    assert ("UTMALDG" in code.sass) == (arch >= 90 and not packed), "read by descriptors"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "width"),
    others_long(
        [(name, width) for name, width in TILES[80] if width >= 128],
        [("dkv", 128), ("dq", 256), ("dk", 256)],
    ),
)
def test_each_kernel_fits_the_chips_of_less_shared_memory_that_take_the_tiles_of_sm_80(
    kernel, width
):
    tile = SMALL_TILES[kernel, width]._replace(stages=1)  # the fewest that are tried
    numerics, dtype = PROFILES["fa2"], torch.bfloat16
    mask = Mask(causal=True)
    found = compile_fast_ahead(kernel, 80, numerics, dtype, width, mask=mask, tile=tile)
    assert found.metadata.shared <= SMALL_MEMORY


@pytest.mark.parametrize(
    ("capability", "large"),
    [((8, 0), True), ((8, 7), True), ((8, 6), False), ((8, 9), False), ((12, 0), False)],
)
def test_a_chip_of_less_shared_memory_takes_tiles_that_fit_it(monkeypatch, capability, large):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    arch = architecture(torch.device("cuda"))
    assert (tile_of("dk", arch, 256) == TILES[80]["dk", 256]) == large
    assert tile_of("dkv", arch, 128) == TILES[80]["dkv", 128]


def test_programs_fit_by_registers_shared_memory_and_warps(bench):
    def fit(**kernel):
        return compiled(bench, instructions=9, ex2=1, products={"64x64x16": 1}, **kernel).programs

    assert fit(registers=128, shared=40960) == 4
    assert fit(registers=148, shared=40960) == 3
    assert fit(registers=255, shared=0) == 2
    assert fit(registers=32, shared=0, warps=8) == 8
    assert fit(registers=32, shared=227 * 1024 - 1024) == 1


def test_programs_fit_the_chip_that_they_are_compiled_for(bench):
    def fit(**kernel):
        few = {"registers": 32, "products": {"64x64x16": 1}}
        return compiled(bench, instructions=9, ex2=1, **few, **kernel).programs

    # two of 113 KiB, and 1 KiB of the system beside each: all of sm_90's 228 KiB
    assert [fit(shared=113 * 1024, arch=arch) for arch in (80, 90, 100)] == [1, 2, 2]
    assert fit(shared=113 * 1024 + 1) == 1
    assert [fit(shared=81 * 1024, arch=arch) for arch in (80, 90)] == [2, 2]
    assert fit(shared=0, arch=100, tensor_memory=128) == 4
    assert fit(shared=0, arch=100, tensor_memory=512) == 1
