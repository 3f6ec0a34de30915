"""The compiled path, with no GPU: it compiles for sm_80 and sm_90, and says why it can't launch.

Compilation happens in a child process that runs this file: a failed assertion inside Triton's
passes ends its process.
"""

import contextlib
import json
import os
import re
import subprocess
import sys
from unittest import mock

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compile_kernel
from triton.runtime.errors import OutOfResources
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from attention_kernels import PROFILES, triton_launch
from attention_kernels.numerics import FlashNumerics
from attention_kernels.triton_backward import dkv_kernel, dq_kernel
from attention_kernels.triton_forward import forward_kernel

KERNELS = {kernel.__name__: kernel for kernel in (forward_kernel, dq_kernel, dkv_kernel)}
SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024}
POINTERS = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.float64: "*fp64"}
FA2, GOLDEN = PROFILES["fa2"], PROFILES["golden"].with_(probabilities="bf16", ds="fp16")
CASES = {
    "fa2-d64": (FA2, torch.bfloat16, 64),
    "fa2-d128": (FA2, torch.bfloat16, 128),
    "fp32-d16": (FA2.with_(block_q=32, block_k=32), torch.float32, 16),
    "fp64-d32": (GOLDEN, torch.float64, 32),
}


def compile_one(name: str, arch: int, numerics: FlashNumerics, dtype: torch.dtype, head_dim: int):
    """Compile as `triton_launch` would for contiguous causal tensors of two heads."""
    kernel, resolved = KERNELS[name], numerics.resolve(dtype)
    q = torch.empty(1, 2, 64, head_dim, dtype=dtype, device="meta")
    points = tuple(set(resolved.to_dict()) - {"block_q", "block_k"})
    values = triton_launch.kernel_constants(q, q, True, 0.125, resolved, points)
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        argument = parameter.name
        if parameter.is_constexpr:
            signature[argument] = "constexpr"
            constants[(index,)] = values[argument]
        elif argument.endswith("strides"):
            signature[argument] = ("i32", "i32", "i32", "constexpr")
            constants[(index, 3)] = 1
            attributes |= {(index, axis): [["tt.divisibility", 16]] for axis in range(3)}
        elif argument.startswith("p_"):
            as_given = argument in ("p_q", "p_k", "p_v", "p_dout")
            signature[argument] = POINTERS[dtype if as_given else resolved.work_dtype()]
            attributes[(index,)] = [["tt.divisibility", 16]]
        else:
            signature[argument] = "i32"
    return compile_kernel(
        ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes),
        target=GPUTarget("cuda", arch, 32),
        options={**triton_launch.compile_options(kernel, values), "num_stages": 2},
    )


def report(arch: int) -> dict[str, dict[str, int]]:
    """What the machine code of every kernel and case holds."""
    patterns = {
        "bf16_tensor_core": r"mma\S*\.f32\.bf16\.bf16",
        "fp64_tensor_core": r"mma\S*\.f64\.f64",
        "tf32": r"tf32",
        "fused": r"\bfma\.rn\.f(32|64)",
        "async_copy": r"cp\.async",
        "atomic": r"\b(atom|red)\.",
    }
    found = {}
    for case, (numerics, dtype, head_dim) in CASES.items():
        for name in KERNELS:
            compiled = compile_one(name, arch, numerics, dtype, head_dim)
            ptx = compiled.asm["ptx"]
            counts = {key: len(re.findall(pattern, ptx)) for key, pattern in patterns.items()}
            counts["shared"] = compiled.metadata.shared
            found[f"{case}-{name}"] = counts
    return found


@pytest.fixture(scope="module", params=SHARED_MEMORY, ids="sm_{}".format)
def compiled(request, tmp_path_factory):
    cache = {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, __file__, str(request.param)],
        env=os.environ | cache | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return request.param, json.loads(done.stdout)


def test_every_kernel_compiles_and_fits_the_shared_memory(compiled):
    arch, kernels = compiled
    assert len(kernels) == len(CASES) * len(KERNELS)
    for name, found in kernels.items():
        assert 0 < found["shared"] <= SHARED_MEMORY[arch], name


def test_16_bit_operands_reach_the_tensor_cores_as_they_were_loaded(compiled):
    for name, found in compiled[1].items():
        if name.startswith("fa2"):
            assert found["bf16_tensor_core"] > 0, name
            # Blocks that pass through registers to be cast can't be copied ahead of time.
            assert found["async_copy"] > 0, name


def test_nothing_is_narrowed_or_fused_unasked(compiled):
    for name, found in compiled[1].items():
        assert found["tf32"] == 0, name
        assert found["atomic"] == 0, name
        if name.startswith("fa2"):
            assert found["fused"] == 0, name
        else:
            assert found["bf16_tensor_core"] == 0, name


def launch_compiled(kernel, profile="fa2", head_dim=256):
    q = torch.empty(1, 1, 64, head_dim)
    points = ("operands", "scores")
    numerics = PROFILES[profile].resolve(torch.float32)
    constants = triton_launch.kernel_constants(q, q, False, 0.125, numerics, points)
    with mock.patch.object(torch.cuda, "device", contextlib.nullcontext):
        triton_launch._run_compiled(kernel, 1, (q,), constants)


def test_blocks_that_do_not_fit_are_refused_by_name():
    kernel = mock.MagicMock(spec=JITFunction)
    kernel.__getitem__.return_value.side_effect = OutOfResources(300_000, 232_448, "shared memory")
    message = r"at head_dim 256, got block_q=64, block_k=64 \(shared memory: 300000 needed, 232448"
    with pytest.raises(ValueError, match=message):
        launch_compiled(kernel)


def test_fewer_stages_are_tried_before_blocks_are_refused():
    kernel = mock.MagicMock(spec=JITFunction)
    launch = kernel.__getitem__.return_value
    launch.side_effect = [OutOfResources(300_000, 232_448, "shared memory"), None]
    launch_compiled(kernel)
    stages = [call.kwargs.pop("num_stages") for call in launch.call_args_list]
    assert stages == [2, 1]
    assert launch.call_args_list[0] == launch.call_args_list[1]
    assert launch.call_args.kwargs["enable_fp_fusion"] is False


def test_an_interpreting_process_does_not_pretend_to_compile():
    with pytest.raises(ValueError, match="TRITON_INTERPRET set; unset it"):
        launch_compiled(InterpretedFunction(forward_kernel.fn))


if __name__ == "__main__":
    sys.stdout.write(json.dumps(report(int(sys.argv[1]))))
