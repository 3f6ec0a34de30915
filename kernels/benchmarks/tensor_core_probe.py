"""Compares this GPU's tensor cores with their models, to the bit.

    PYTHONPATH=kernels python kernels/benchmarks/tensor_core_probe.py [--json PATH]

Matrix products that a tensor core computes, by Triton's `tl.dot` and by `torch._scaled_mm`, are
read in two ways. Sums whose result tells (`revealing_sums`) measure what a model is made of. Then
random operands are multiplied, and the share of results with the bits of the model is counted;
other models, and the exact sum rounded once, are beside it, so that a share of 1 says something.
The instruction that ran is read from the compiled kernel. Exit code 1 if a figure or bit differs.

torch, Triton and `attention_kernels` are all that it needs, and a few seconds.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from revealing_sums import Product, expected, measured
from run import commit
from torch import Tensor

from attention_kernels.machine import hardware, versions
from attention_kernels.rounding import round_to
from attention_kernels.tensor_core import tensor_core_matmul
from attention_kernels.tensor_core_models import MODELS, TensorCoreModel

__all__ = ["Case", "cases", "probe", "right", "shares"]

ARCHITECTURES = {(8, 0): "ampere", (8, 9): "ada", (9, 0): "hopper", (10, 0): "blackwell"}
DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "tf32": torch.float32,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
}
INSTRUCTION = re.compile(r"(?:wgmma\.mma_async|mma\.sync|tcgen05\.mma)[\w.:]*")
BLOCK_K = 128
ROWS, LENGTH = 2048, 512
"""Rows, columns and K of random products: so many tiles that no library divides K among them."""


@triton.jit
def product_kernel(
    p_a,
    p_b,
    p_d,
    K,
    N,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PROMOTE: tl.constexpr,
):
    """Write one tile of d = a b; b is stored (N, K). PROMOTE 0 never leaves the tensor core."""
    o_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    o_k = tl.arange(0, BLOCK_K)
    b_d = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        b_a = tl.load(p_a + o_m[:, None] * K + (k + o_k)[None, :])
        b_b = tl.load(p_b + o_n[None, :] * K + (k + o_k)[:, None])
        if PROMOTE > 0:
            b_d = tl.dot(b_a, b_b, b_d, max_num_imprecise_acc=PROMOTE)
        else:
            b_d = tl.dot(b_a, b_b, b_d, input_precision="tf32")
    tl.store(p_d + o_m[:, None] * N + o_n[None, :], b_d)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A way to multiply on this GPU, and the model that it is held against."""

    name: str
    operands: str
    """The format of both operands."""
    model: TensorCoreModel
    held_in: str
    """The format that the tensor core reads: `operands`, or a wider one that it converts to."""
    run: Product
    promote_every: int | None = None
    seen: dict[str, str] = field(default_factory=dict)
    """The instruction that ran, under "instruction", once it did."""

    def predict(self, a: Tensor, b: Tensor, model: TensorCoreModel) -> Tensor:
        """Return what `model` says of the product."""
        formats = (self.held_in, self.held_in)
        every = self.promote_every
        return tensor_core_matmul(a, b, model, promote_every=every, formats=formats)


def cases(capability: tuple[int, int]) -> Iterator[Case]:
    """Yield the ways to multiply that a GPU of this compute capability has."""
    architecture = ARCHITECTURES.get(capability)
    if architecture is None:
        raise SystemExit(
            "tensor_core_probe: compute capability must be one that has models, "
            f"{', '.join(map(str, ARCHITECTURES))}, got {capability}"
        )
    hopper = capability == (9, 0)
    for operands in ("bf16", "fp16", "tf32", "e4m3", "e5m2"):
        fp8 = operands in ("e4m3", "e5m2")
        name = f"{architecture}_{'fp8' if fp8 else operands}"
        if name not in MODELS:
            continue
        yield _case(f"tl.dot {operands}", operands, name)
        if hopper and operands != "tf32":
            few = _case(f"tl.dot {operands}, 16 rows", operands, "hopper_fp16" if fp8 else name, 16)
            yield replace(few, held_in="fp16", run=_in_order(few.run)) if fp8 else few
        if hopper and fp8:
            yield _case(f"tl.dot {operands}, promoted", operands, name, promote=BLOCK_K)
    if f"{architecture}_fp8" in MODELS:
        for fast in (True, False):
            yield Case(
                name=f"_scaled_mm e4m3, use_fast_accum={fast}",
                operands="e4m3",
                model=MODELS[f"{architecture}_fp8"],
                held_in="e4m3",
                run=_scaled_mm(fast),
                promote_every=BLOCK_K if hopper and not fast else None,
            )


def _in_order(run: Product) -> Product:
    """Return `run` with K sorted so that the tensor core takes it in order.

    Hopper has no warp-level FP8 product. Triton converts operands to FP16 where they lie: of each
    32, the first instruction takes those at 0 and 1 of every 4, and the second the others.
    """

    def ordered(a: Tensor, b: Tensor) -> Tensor:
        taken = torch.arange(a.shape[1], device=a.device).view(-1, 8, 2, 2).transpose(1, 2)
        place = taken.flatten().argsort()
        return run(a[:, place], b[place])

    return ordered


def _case(name: str, operands: str, model: str, rows: int = 64, *, promote: int = 0) -> Case:
    seen: dict[str, str] = {}

    def run(a: Tensor, b: Tensor) -> Tensor:
        dtype = DTYPES[operands]
        a_MK, b_NK = a.to(dtype).contiguous(), b.T.to(dtype).contiguous()
        (M, K), N = a_MK.shape, b_NK.shape[0]
        d_MN = a.new_empty((M, N))
        block_k = BLOCK_K // 2 if operands == "tf32" else BLOCK_K
        tiles = product_kernel[M // rows, N // 64]
        compiled = tiles(a_MK, b_NK, d_MN, K, N, rows, 64, block_k, promote)
        found = INSTRUCTION.findall(compiled.asm["ptx"])
        seen["instruction"] = ", ".join(dict.fromkeys(found))
        return d_MN

    return Case(
        name=name,
        operands=operands,
        model=MODELS[model],
        held_in=operands,
        run=run,
        promote_every=promote or None,
        seen=seen,
    )


def _scaled_mm(fast: bool) -> Product:
    def run(a: Tensor, b: Tensor) -> Tensor:
        dtype = torch.float8_e4m3fn
        one = torch.ones((), device=a.device)
        a_MK, b_KN = a.to(dtype).contiguous(), b.T.to(dtype).contiguous().T
        return torch._scaled_mm(
            a_MK, b_KN, scale_a=one, scale_b=one, out_dtype=torch.float32, use_fast_accum=fast
        )

    return run


def draws(
    operands: str, rows: int, length: int, device: str, seed: int
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return random a (rows, length) and b (length, rows) on a format's grid, by the law's name."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator)

    def spread(x: Tensor, low: int, high: int) -> Tensor:
        return x * 2.0 ** torch.randint(low, high, x.shape, generator=generator)

    def pair() -> tuple[Tensor, Tensor]:
        return normal(rows, length), normal(length, rows)

    pairs = {
        "N(0, 1)": pair(),
        "of one sign": tuple(x.abs() for x in pair()),
        "N(0, 1) times 2**-6 to 2**6": tuple(spread(x, -6, 7) for x in pair()),
        "with subnormals of FP8": tuple(spread(x, -14, 2) for x in pair()),
    }
    return {
        law: (round_to(a, operands).to(device), round_to(b, operands).to(device))
        for law, (a, b) in pairs.items()
    }


def shares(
    case: Case, rows: int = ROWS, length: int = LENGTH, device: str = "cuda", seed: int = 0
) -> list[dict[str, Any]]:
    """Return for each law the share of results that have the bits of a model, and of others."""
    lines = []
    for law, (a, b) in draws(case.operands, rows, length, device, seed).items():
        found = case.run(a, b)
        row: dict[str, Any] = {"law": law, "results": found.numel(), "products": rows**2 * length}
        row["model"] = _share(found, case.predict(a, b, case.model))
        part = slice(0, 64)
        for name, other in others(case.model).items():
            row[name] = _share(found[part], case.predict(a[part], b, other))
        row["exact sum"] = _share(found[part], (a[part].double() @ b.double()).float())
        lines.append(row)
    return lines


def others(model: TensorCoreModel) -> dict[str, TensorCoreModel]:
    """Return models that differ from `model` in one field."""
    bits = model.fraction_bits
    return {
        "cut down": replace(model, cut="down"),
        "one bit less": replace(model, fraction_bits=bits - 1),
        "one bit more": replace(model, fraction_bits=bits + 1),
        "half the products": replace(model, products=model.products // 2),
        "twice the products": replace(model, products=model.products * 2),
    }


def _share(found: Tensor, predicted: Tensor) -> float:
    return (found.view(torch.int32) == predicted.view(torch.int32)).double().mean().item()


def probe(case: Case) -> dict[str, Any]:
    """Return what one case does, or why it does not run; print both."""
    print(f"\n{case.name}: held against {case.model.name}")
    try:
        figures = measured(case.run)
        found = shares(case)
    except Exception as error:  # a library may refuse a format on this chip: the others still run
        print(f"  does not run: {type(error).__name__}: {str(error).splitlines()[0]}")
        return {"case": case.name, "error": str(error)}
    wanted = expected(case.model)
    if case.seen:
        print(f"  instruction: {case.seen['instruction']}")
    for name, value in figures.items():
        said = "" if value == wanted[name] else f"; the model says {wanted[name]}"
        print(f"  {name} {value}{said}")
    for row in found:
        named = {name: value for name, value in row.items() if isinstance(value, float)}
        print(f"  {row['law']}: " + ", ".join(f"{n} {v:.6f}" for n, v in named.items()))
    return {
        "case": case.name,
        "model": case.model.name,
        "instruction": case.seen.get("instruction", ""),
        "promote_every": case.promote_every,
        "measured": figures,
        "as_expected": figures == wanted,
        "shares": found,
    }


def right(row: dict[str, Any]) -> bool:
    """Say whether every figure and every bit of a case that ran is its model's."""
    return row["as_expected"] and all(each["model"] == 1 for each in row["shares"])


def main() -> int:
    """Probe every case of this GPU; return 1 if one differs from its model."""
    parser = argparse.ArgumentParser(description="Compare tensor cores with their models.")
    parser.add_argument("--json", type=Path, help="write everything that was found here")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("tensor_core_probe: device must be a CUDA GPU, got none; run it on one")
    machine, used = hardware("cuda"), versions()
    print(f"{machine['name']}, torch {used['torch']}, Triton {used['triton']}, at {commit()}")
    rows = [probe(case) for case in cases(torch.cuda.get_device_capability())]
    if options.json:
        record = {"hardware": machine, "versions": used, "commit": commit(), "cases": rows}
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    ran = [row for row in rows if "error" not in row]
    wrong = [row["case"] for row in ran if not right(row)]
    print(f"\n{len(ran) - len(wrong)} of {len(ran)} cases have their model's bits and figures")
    print("".join(f"  not: {name}\n" for name in wrong), end="")
    return int(bool(wrong) or not ran)


if __name__ == "__main__":
    sys.exit(main())
