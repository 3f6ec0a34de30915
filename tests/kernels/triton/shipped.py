"""Compiles every profile as it is shipped, for chips that are not at hand, and says what fits.

    PYTHONPATH=.:kernels python tests/kernels/triton/shipped.py      # writes shipped.json
    PYTHONPATH=.:kernels python tests/kernels/triton/shipped.py fa3-64-90-4 fa3-64-90-4-packed
                                                                     # prints these cases alone

A case is a profile in its own tile at a head_dim for a chip, with a group of query heads for each
head of keys, of packed sequences or not, forward and backward, in BF16 under a causal mask. Which
kernels are compiled is what a launch decides: the fast path takes `fa2`. Each case has a process of
its own, since a failed assertion inside Triton's passes ends it. Leaves out what the figures are
held to (`test_shipped`).
"""

import itertools
import json
import multiprocessing
import signal
import sys
import tempfile
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from triton import knobs
from triton.compiler import compiler as triton_compiler
from triton.runtime.jit import JITFunction

from attention_kernels import PROFILES
from attention_kernels.masks import Mask
from attention_kernels.numerics import FlashNumerics
from attention_kernels.triton import fast_launch, runtime
from attention_kernels.triton.ahead import (
    KERNELS,
    SHARED_MEMORY,
    compile_ahead,
    compile_fast_ahead,
    fits,
    machine_code,
)

FIGURES = Path(__file__).with_name("shipped.json")
HEAD_DIMS = (64, 128, 256)
GROUPS = (1, 4, 8)
DTYPE = torch.bfloat16
DIALLED = ("forward_kernel", "dq_kernel", "dkv_kernel")


class Case(NamedTuple):
    """What is compiled at once; `str()` of it is its key in the figures."""

    profile: str
    head_dim: int
    arch: int
    group: int
    packed: bool

    def __str__(self) -> str:
        packed = "-packed" if self.packed else ""
        return f"{self.profile}-{self.head_dim}-{self.arch}-{self.group}{packed}"


PACKED = (False, True)
CASES = {
    str(case): case
    for case in itertools.starmap(
        Case, itertools.product(PROFILES, HEAD_DIMS, SHARED_MEMORY, GROUPS, PACKED)
    )
}


def compiled_kernels(case: Case) -> Iterator[tuple[str, Any]]:
    """Compile what the launches of a case run; give each kernel's name and what Triton made."""
    numerics = PROFILES[case.profile]
    starts = torch.zeros(2, dtype=torch.int32) if case.packed else None
    mask = Mask(causal=True, cu_seqlens_q=starts, cu_seqlens_k=starts)
    options = {"mask": mask, "group": case.group}
    heads = (2 * case.group, 2, 2)
    q, k, v = (torch.empty(1, n, 64, case.head_dim, dtype=DTYPE, device="meta") for n in heads)
    scale = case.head_dim**-0.5
    if fast_launch.applies(q, k, v, mask=mask, scale=scale, numerics=numerics.resolve(DTYPE)):
        for name in fast_launch.KERNELS:
            if fast_launch.tile_of(name, case.arch, case.head_dim):
                given = (name, case.arch, numerics, DTYPE, case.head_dim)
                yield f"fast_{name}", compile_fast_ahead(*given, **options)
    else:
        for name in DIALLED:
            given = (KERNELS[name], case.arch, numerics, DTYPE, case.head_dim)
            yield name, compile_ahead(*given, **options)


def refusal(compiled: Any, case: Case, numerics: FlashNumerics, registers: int) -> str | None:
    """Return what the library says where a chip does not take a compiled kernel, or None.

    Triton asks before it loads one; of its driver, which wants a GPU, only the answers are made up.
    """
    kernel = mock.MagicMock(spec=JITFunction)
    kernel.__getitem__.return_value = lambda *args, **options: compiled._init_handles()
    driver = mock.MagicMock()
    threads = 65536 // (-(-registers // 8) * 8) // 32 * 32
    driver.active.utils.load_binary.return_value = (None, None, registers, 0, threads)
    driver.active.get_current_target.return_value.warp_size = 32
    limit = SHARED_MEMORY[case.arch]
    tile = types.SimpleNamespace(
        head_dim=case.head_dim, block_q=numerics.tiling.block_q, block_k=numerics.tiling.block_k
    )
    with (
        mock.patch.object(triton_compiler, "driver", driver),
        mock.patch.object(triton_compiler, "max_shared_mem", return_value=limit),
        mock.patch.object(torch.cuda, "device", mock.MagicMock()),
    ):
        try:
            options = {"device": torch.device("cuda"), "warps": 4, "stages": (1,)}
            runtime.run(kernel, 1, (), tile, **options)  # pyright: ignore[reportArgumentType] three of its fields are read
        except ValueError as error:
            return str(error)
    return None


def measure(case: Case) -> dict[str, Any]:
    """Return what each kernel of a case takes, and whether the chip has it."""
    kernels = {}
    for name, compiled in compiled_kernels(case):
        code = machine_code(compiled)
        refused = refusal(compiled, case, PROFILES[case.profile], code.registers)
        kernels[name] = {
            "shared": compiled.metadata.shared,
            "tensor_memory": compiled.metadata.tmem_size or 0,
            "registers": code.registers,
            "spills": code.spills,
            "fits": fits(compiled, case.arch),
            "refused": refused,
        }
    return kernels


def in_child(case: Case) -> dict[str, Any]:
    """Measure a case in a process of its own; where that is ended, `{"aborted": signal}`."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        child = multiprocessing.get_context("fork").Process(
            target=_answer, args=(case, Path(folder))
        )
        child.start()
        child.join()
        if answer.exists():
            return json.loads(answer.read_text())
    if child.exitcode is None or child.exitcode >= 0:
        raise RuntimeError(f"{case}: the process that compiles it ends with {child.exitcode}")
    return {"aborted": signal.Signals(-child.exitcode).name}


def _answer(case: Case, folder: Path) -> None:
    knobs.cache.dir = str(folder)
    (folder / "answer.json").write_text(json.dumps(measure(case)))


def write(keys: Sequence[str]) -> None:
    """Measure these cases and write them beside those that were measured before."""
    figures = json.loads(FIGURES.read_text()) if FIGURES.exists() else {"cases": {}}
    cases = figures["cases"] if figures.get("triton") == triton.__version__ else {}
    for key in keys:
        if key not in cases:
            cases[key] = in_child(CASES[key])
            # a line a case, in the order of `CASES`
            lines = [f'  "{each}": {json.dumps(cases[each])}' for each in CASES if each in cases]
            listed = ",\n".join(lines)
            version = json.dumps(triton.__version__)
            FIGURES.write_text(f'{{\n "triton": {version},\n "cases": {{\n{listed}\n }}\n}}\n')


if __name__ == "__main__":
    if sys.argv[1:]:
        sys.stdout.write(json.dumps({key: in_child(CASES[key]) for key in sys.argv[1:]}, indent=1))
    else:
        write(list(CASES))
