"""Compiles the kernels as a launch would, for a chip that is not at hand, and reads what came out.

Triton needs no GPU to compile. The tests hold what the machine code takes (registers, shared
memory, spills), and `benchmarks/static.py` estimates from its loops how fast it would be. A failed
assertion inside Triton's passes ends the process: compile what may not compile in a child process.
Leaves out launches (`launch`).
"""

# The tuples of arguments hold types of Triton's in the place of tensors.
# pyright: reportArgumentType=false, reportCallIssue=false

import re
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compile_kernel

from attention_kernels.masks import Mask
from attention_kernels.numerics import FlashNumerics
from attention_kernels.operands import operand_dtype
from attention_kernels.triton import fast, fast_launch
from attention_kernels.triton.arguments import (
    Factors,
    Masks,
    Places,
    PlaceScalars,
    Scalars,
    compiled_dtype,
    constants_of,
)
from attention_kernels.triton.backward import dbias_kernel, dkv_kernel, dq_kernel
from attention_kernels.triton.forward import forward_kernel, merge_kernel
from attention_kernels.triton.launch import STAGES, warps_of

__all__ = [
    "FAST_KERNELS",
    "KERNELS",
    "SHARED_MEMORY",
    "TENSOR_MEMORY",
    "MachineCode",
    "compile_ahead",
    "compile_fast_ahead",
    "fits",
    "machine_code",
    "signature_of",
]

KERNELS: dict[str, Any] = {
    kernel.__name__: kernel
    for kernel in (forward_kernel, merge_kernel, dq_kernel, dkv_kernel, dbias_kernel)
}
"""Every dialled kernel by its name."""

FAST_KERNELS: dict[str, Any] = {
    "forward": fast.fast_forward_kernel,
    "dq": fast.fast_dq_kernel,
    "dkv": fast.fast_dkv_kernel,
    "dk": fast.fast_dkv_kernel,
    "dv": fast.fast_dkv_kernel,
}
"""The kernels of the fast path by the names of their tiles."""
_DESCRIBED = {"forward": ("p_k", "p_v"), "dq": ("p_k", "p_v")}
"""What a fast kernel reads by descriptors; the others q and dout."""

SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Bytes that a program may have, by compute capability."""

TENSOR_MEMORY = 512
"""Columns that a program may have on sm_100, whose tensor cores add in a memory of their own."""

_OPERANDS = ("q", "k", "v", "dout")
_POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
}


class MachineCode(NamedTuple):
    """What a compiled kernel takes of a chip, and its instructions as cuobjdump prints them."""

    registers: int
    """Of a thread."""
    spills: int
    """Instructions that load or store a spilled register."""
    sass: str


def signature_of(
    kernel: Any,
    numerics: FlashNumerics,
    dtype: torch.dtype,
    mask: Mask,
    operands: Sequence[str] = ("p_q", "p_k", "p_v", "p_dout"),
) -> tuple[dict[str, Any], dict[tuple[int, ...], Any], dict[tuple[int, ...], Any]]:
    """Return the types of a kernel's arguments as `launch` gives them, constants and attributes.

    For contiguous tensors of `dtype`: `operands` as `prepare` gives them, the others in the work
    format; `numerics` is resolved. Both mappings are by the argument's place, as Triton wants them.
    """
    work = numerics.work_dtype()
    factor = _POINTERS[work] if numerics.scaled else "constexpr"
    # the forward has no dout, and no factors of it
    factors = [factor] * 3 + ["constexpr" if kernel is forward_kernel else factor]
    has = {
        "padding": ("*u8", mask.key_padding),
        "visible": ("*u8", mask.visible),
        "bias": ("*fp32", mask.bias),
        "table": ("*i32", mask.mask_mod),
        "tiles": ("*u8", mask.mask_mod),
        "slopes": ("*fp32", mask.alibi_slopes),
        "sinks": ("*fp32", mask.sinks),
        "cu_q": ("*i32", mask.cu_seqlens_q),
        "cu_k": ("*i32", mask.cu_seqlens_k),
    }
    masks = {name: kind if x is not None else "constexpr" for name, (kind, x) in has.items()}
    masks |= {f"{name}_strides": ("i32",) * 4 for name in ("padding", "visible", "table", "bias")}
    kind = ("fp32",) * 4 if work == torch.float64 else "fp32"
    whole = [("fp32",) * 2] * (len(Scalars._fields) - 4)
    masks_of_call = Masks(**masks, slopes_batch="i32", scalars=Scalars(*[kind] * 4, *whole))
    groups = {"factors": Factors(*factors), "masks": masks_of_call}
    signature: dict[str, Any] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for index, parameter in enumerate(kernel.params):
        name = parameter.name
        if name in groups:
            signature[name] = groups[name]
            for at, kind in enumerate(groups[name]):
                if kind == "constexpr":
                    constants[(index, at)] = None
        elif parameter.is_constexpr:
            signature[name] = "constexpr"
        elif name.endswith("strides"):
            signature[name] = ("i32", "i32", "i32", "constexpr")
            constants[(index, 3)] = 1
            attributes |= {(index, axis): [["tt.divisibility", 16]] for axis in range(3)}
        elif name.startswith("p_"):
            held = _held(name, numerics, dtype) if name in operands else work
            signature[name] = _POINTERS[held]
            attributes[(index,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "i32"
    return signature, constants, attributes


def _held(name: str, numerics: FlashNumerics, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of an argument that a launch hands over in the dtype of an operand."""
    operand = name.removeprefix("p_")
    held = operand_dtype(operand, numerics, dtype) if operand in _OPERANDS else dtype
    return compiled_dtype(held, numerics.work_dtype())


def fits(compiled: Any, arch: int) -> bool:
    """Whether a chip has the memory of a compiled kernel: what Triton asks before it runs one."""
    metadata = compiled.metadata
    return metadata.shared <= SHARED_MEMORY[arch] and (metadata.tmem_size or 0) <= TENSOR_MEMORY


def compile_ahead(
    kernel: Any,
    arch: int,
    numerics: FlashNumerics,
    dtype: torch.dtype,
    head_dim: int | tuple[int, int],
    mask: Mask | None = None,
    group: int = 1,
) -> Any:
    """Return a kernel compiled for compute capability `arch`, as 90; fewer stages if it must.

    `head_dim` is that of q and k, and that of v where there are two; `group` query heads share a
    head of k. What comes back is Triton's compiled kernel, which may still not fit the chip
    (`fits`).
    """
    mask = mask or Mask()
    resolved = numerics.resolve(dtype)
    sizes = head_dim if isinstance(head_dim, tuple) else (head_dim, head_dim)
    q, k, v = (
        torch.empty(1, heads, 64, size, dtype=dtype, device="meta")
        for heads, size in ((2 * group, sizes[0]), (2, sizes[0]), (2, sizes[1]))
    )
    values = constants_of(
        q,
        k,
        v,
        mask=mask,
        scale=sizes[0] ** -0.5,
        numerics=resolved,
        bias_trained=kernel is dbias_kernel,
    )
    signature, constants, attributes = signature_of(kernel, resolved, dtype, mask)
    constants[(len(kernel.params) - 1,)] = values
    options = {
        "num_warps": warps_of(kernel, values),
        "enable_fp_fusion": numerics.arithmetic.fp_fusion,
    }
    compiled = None
    for stages in STAGES:
        compiled = compile_kernel(
            ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes),
            target=GPUTarget("cuda", arch, 32),
            options={**options, "num_stages": stages},
        )
        if fits(compiled, arch):
            break
    return compiled


def compile_fast_ahead(
    name: str,
    arch: int,
    numerics: FlashNumerics,
    dtype: torch.dtype,
    head_dim: int,
    *,
    mask: Mask | None = None,
    group: int = 1,
    tile: fast_launch.Tile | None = None,
) -> Any:
    """Return a kernel of the fast path compiled for `arch` in its own tile, or in another one.

    `name` is one of `FAST_KERNELS`; tensors are aligned, so that sm_90 and later read by
    descriptors, unless they are packed.
    """
    kernel, mask, resolved = FAST_KERNELS[name], mask or Mask(), numerics.resolve(dtype)
    tile = tile or fast_launch.tile_of(name, arch, head_dim)
    if tile is None:
        raise ValueError(f"compile_fast_ahead: {name} must have a tile, has none at {head_dim}")
    q = torch.empty(1, group, 64, head_dim, dtype=dtype, device="meta")
    descriptors = arch >= 90 and mask.cu_seqlens_q is None
    values = fast_launch.fast_constants(
        fast_launch.key_of(q, q[:, :1], q[:, :1], mask, resolved),
        block_q=tile.block_q,
        block_k=tile.block_k,
        descriptors=descriptors,
        makes_dk=name != "dv",
        makes_dv=name != "dk",
    )
    narrow = ["p_q", "p_k", "p_v", "p_out", "p_dout", "p_dq"]
    narrow += ["p_dk", "p_dv"] if group == 1 else []
    signature, constants, attributes = signature_of(kernel, resolved, dtype, mask, narrow)
    at = [parameter.name for parameter in kernel.params].index("masks")
    constants = {place: x for place, x in constants.items() if place[0] != at}
    packed = mask.cu_seqlens_q is not None
    scalars = PlaceScalars("fp32", "fp32", ("fp32",) * 2, ("fp32",) * 2)
    signature["masks"] = Places(*["*i32" if packed else "constexpr"] * 2, scalars)
    constants |= {} if packed else {(at, 0): None, (at, 1): None}
    names = [parameter.name for parameter in kernel.params]
    if descriptors:
        rows = tile.block_k if name in _DESCRIBED else tile.block_q
        kind = f"tensordesc<{_POINTERS[dtype][1:]}[1, 1, {rows}, {values.block_d}]>"
        for described in _DESCRIBED.get(name, ("p_q", "p_dout")):
            signature[described] = kind
            del attributes[(names.index(described),)]
    constants[(len(names) - 1,)] = values
    return compile_kernel(
        ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes),
        target=GPUTarget("cuda", arch, 32),
        options={"num_warps": tile.warps, "num_stages": tile.stages, "enable_fp_fusion": False},
    )


def machine_code(compiled: Any) -> MachineCode:
    """Return what the machine code of a compiled kernel takes, by cuobjdump of Triton's package."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(compiled.asm["cubin"])
        usage, sass = (
            subprocess.run([tool, option, path], capture_output=True, text=True, check=True).stdout
            for option in ("--dump-resource-usage", "-sass")
        )
    registers = re.search(r"\bREG:(\d+)", usage)
    if registers is None:
        raise ValueError(f"machine_code: cuobjdump must say the registers, says {usage!r}")
    spills = len(re.findall(r"\b(?:STL|LDL)\b", sass))
    return MachineCode(registers=int(registers[1]), spills=spills, sass=sass)
