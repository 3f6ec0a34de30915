"""The compiled path, with no GPU: every kernel compiles, fits, and the fast ones do not spill.

Registers, shared memory and spills are read from the cubin by cuobjdump, in Triton's package.
Compilation happens in child processes that run this file, since a failed assertion inside Triton's
passes ends its process. The slow tests compile the fast path and the trained biases for
sm_90 and FP64 for sm_80, the long ones the rest for sm_90 and some of it for the others;
`python tests/kernels/triton/test_compile.py 80 90 100` prints all of it as JSON, in ten minutes.
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
import triton
from triton.runtime.errors import OutOfResources
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from attention_kernels import PROFILES
from attention_kernels.mask_mod import MaskMod
from attention_kernels.masks import Mask
from attention_kernels.triton import launch as triton_launch
from attention_kernels.triton import runtime
from attention_kernels.triton.ahead import KERNELS, SHARED_MEMORY, compile_ahead, machine_code
from attention_kernels.triton.arguments import constants_of
from attention_kernels.triton.forward import forward_kernel

ARCHS = [
    pytest.param(arch, id=f"sm_{arch}", marks=() if arch == 90 else pytest.mark.long)
    for arch in SHARED_MEMORY
]
# not folded: a fused operation would be one that the compiler made
FA2 = PROFILES["fa2"].with_(exp="exp2")
SMALL = {"block_q": 16, "block_k": 16}
MIDDLE = {"block_q": 64, "block_k": 64}
FAST = {
    f"bf16-d{d}": (FA2.with_(block_q=64 if d <= 128 else 32), torch.bfloat16, d)
    for d in (64, 128, 256)
}
FORMATS_GRID = {
    f"{name}-d{head_dim}": (numerics, dtype, head_dim)
    for name, numerics, dtype in (
        ("fp16", FA2, torch.float16),
        ("fp32", FA2.with_(block_q=32, block_k=32), torch.float32),
        ("tf32", FA2.with_(block_q=32, block_k=32, dot="tf32"), torch.float32),
        ("e4m3", PROFILES["fa3_fp8"].with_(exp="exp2", **MIDDLE), torch.bfloat16),
        ("all_bf16", PROFILES["all_bf16"], torch.bfloat16),
        ("fp64", PROFILES["golden"].with_(probabilities="bf16", **SMALL), torch.float64),
    )
    for head_dim in (64, 128, 256)
}
DIALS = {
    "stochastic": (PROFILES["all_bf16"].with_(rounding="stochastic"), torch.bfloat16, 64),
    "splits": (FA2.with_(splits=4, key_order="reversed"), torch.bfloat16, 64),
    "fa1": (PROFILES["fa1"].with_(exp="exp2"), torch.bfloat16, 64),
    "fa4": (PROFILES["fa4"].with_(exp="exp2_polynomial", **MIDDLE), torch.bfloat16, 64),
    "beta": (FA2.with_(repeated_max_beta=7.0), torch.bfloat16, 64),
    "each_operation": (PROFILES["peer_2510_04212_stabilised"], torch.bfloat16, 64),
    "fused": (FA2.with_(fp_fusion=True), torch.bfloat16, 64),
    "fused-by-name": (PROFILES["fa2"], torch.bfloat16, 64),
    "latent": (FA2.with_(block_q=32), torch.bfloat16, (192, 128)),
}
SHIPPED = {f"shipped-fa3-d{d}": (PROFILES["fa3"], torch.bfloat16, d) for d in (64, 128, 256)}
"""In its own tile, of 128 x 128."""
SHIPPED_SPILLS = {64: (0, 0, 52), 128: (0, 0, 118), 256: (77, None, None)}
"""Of forward, dQ, dK with dV on sm_90, at most; None does not fit. `kernels/README.md` has them."""
FULL = Mask(
    causal=True,
    window=(64, None),
    softcap=15.0,
    key_padding=torch.empty(0),
    visible=torch.empty(0),
    bias=torch.empty(1, 2, 64, 64),
    mask_mod=MaskMod(lambda b, h, q, k: q >= k, range(1), range(2)),
    alibi_slopes=torch.empty(0),
    sinks=torch.empty(0),
    dropout_p=0.7,  # whose bits are compared with more than 2**31
    dropout_seed=1,
)
MASKS = {
    "full": Mask(),
    "causal": Mask(causal=True),
    "every_mask": FULL,
    "dropout": Mask(causal=True, dropout_p=0.1, dropout_seed=1),
    "own": Mask(causal=True, bias=torch.empty(1, 2, 64, 64)),
    "shared": Mask(causal=True, bias=torch.empty(1, 1, 1, 1)),
}
FP64_ABORTS = [int(x) for x in triton.__version__.split("+")[0].split(".")[:3]] < [3, 7, 1]
"""Whether Triton's compiler ends its process at FP64 for sm_100, as that of 3.6 does."""
TRAINED = ("bf16-d64", "bf16-d128", "bf16-d256", "fp32-d64", "e4m3-d64", "fp64-d64", "stochastic")
"""Of these the gradient of a bias is compiled, of one with all axes and of one with none."""


def cases(arch):
    """Name -> (numerics, dtype, head_dim, mask) of what is compiled for a chip.

    A head_dim of two numbers is that of q and k, and that of v.
    """
    chosen = {(name, mask): case for name, case in FAST.items() for mask in ("full", "causal")}
    # A pass of 3.7 (TritonGPUHoistTMEMAlloc) fails there on dq_kernel with stochastic rounding.
    beyond = ("stochastic",) if arch >= 100 else ()
    if arch >= 100 and FP64_ABORTS:
        beyond += ("fp64",)
    others = FORMATS_GRID | DIALS
    chosen |= {(n, "causal"): case for n, case in others.items() if not n.startswith(beyond)}
    trained = {name: case for name, case in (FAST | others).items() if name in TRAINED}
    trained = {n: case for n, case in trained.items() if not n.startswith(beyond)}
    for mask in ("own", "shared"):
        chosen |= {(f"trained-{n}", mask): case for n, case in trained.items()}
    chosen |= {(name, "causal"): case for name, case in SHIPPED.items() if arch == 90}
    chosen[("every_mask", "every_mask")] = (FA2, torch.bfloat16, 64)
    chosen |= {(f"dropout-{name}", "dropout"): case for name, case in FAST.items()}
    chosen |= {(f"dropout-{name}", "dropout"): DIALS[name] for name in ("fa1", "splits")}
    return {f"{name}-{mask}": (*case, MASKS[mask]) for (name, mask), case in chosen.items()}


def report(arch: int, only: str = "") -> dict[str, dict[str, int]]:
    """What the machine code of every kernel and case holds; `only` is a regex of case names."""
    patterns = {
        "tensor_core_16_bit": r"mma\S*\.f32\.(?:bf16\.bf16|f16\.f16)|tcgen05\.mma|wgmma",
        "tf32": r"tf32",
        "fused": r"\bfma\.rn\.f(32|64)",
        "atomic": r"\b(atom|red)\.(global|gpu)",
    }
    found = {}
    for case, (numerics, dtype, head_dim, mask) in cases(arch).items():
        for name, kernel in KERNELS.items():
            if name == "merge_kernel" and numerics.tiling.splits == 1:
                continue
            if (name == "dbias_kernel") > (mask.bias is not None):
                continue
            if (name != "dbias_kernel" and case.startswith("trained")) or not re.search(only, case):
                continue
            compiled = compile_ahead(kernel, arch, numerics, dtype, head_dim, mask)
            ptx = compiled.asm["ptx"]
            counts = {key: len(re.findall(pattern, ptx)) for key, pattern in patterns.items()}
            counts["shared"] = compiled.metadata.shared
            code = machine_code(compiled)
            counts |= {"registers": code.registers, "spills": code.spills}
            found[f"{case}-{name}"] = counts
    return found


def in_child(arch, only, folder):
    cache = {"TRITON_CACHE_DIR": str(folder), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, __file__, str(arch), only],
        env=os.environ | cache | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)[str(arch)]


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_the_fast_path_of_each_head_dim_fits_and_spills_nothing(arch, tmp_path):
    kernels = in_child(arch, "^bf16-", tmp_path)
    assert len(kernels) == 2 * 3 * 3
    for name, found in kernels.items():
        assert found["spills"] == 0, name
        assert 0 < found["shared"] <= SHARED_MEMORY[arch], name
        assert 0 < found["registers"] <= 255, name
        assert found["tensor_core_16_bit"] > 0, name
        assert found["tf32"] == found["fused"] == found["atomic"] == 0, name


@pytest.mark.slow
def test_the_gradient_of_a_bias_spills_nothing_up_to_head_dim_128(tmp_path):
    kernels = in_child(90, "^trained-bf16-d(64|128)", tmp_path)
    assert len(kernels) == 4
    assert not any(found["spills"] for found in kernels.values())


@pytest.mark.long
@pytest.mark.parametrize("arch", ARCHS)
def test_dropout_spills_nothing(arch, tmp_path):
    kernels = in_child(arch, "^dropout-", tmp_path)
    assert len(kernels) == 5 * 3 + 1
    for name, found in kernels.items():
        assert found["spills"] == found["fused"] == found["atomic"] == 0, name
        assert 0 < found["shared"] <= SHARED_MEMORY[arch], name


@pytest.mark.parametrize(
    ("arch", "only", "count"),
    [
        pytest.param(80, "^fp64-d64", 3, marks=pytest.mark.slow),
        pytest.param(90, "^(fp16|fp32|tf32)-", 27, marks=pytest.mark.long),
        pytest.param(90, "^(e4m3|all_bf16)-|^fp64-d64", 21, marks=pytest.mark.long),
        pytest.param(
            90,
            "^(stochastic|splits|fa[14]|beta|each|fused|latent|every)",
            32,
            marks=pytest.mark.long,
        ),
        pytest.param(
            100,
            "^(fp32|fp64|e4m3|all_bf16)-d64|^every",
            16 - 3 * FP64_ABORTS,
            marks=pytest.mark.long,
        ),
        pytest.param(80, "^trained", 14, marks=pytest.mark.long),
        pytest.param(90, "^trained", 14, marks=pytest.mark.long),
        pytest.param(100, "^trained", 12 - 2 * FP64_ABORTS, marks=pytest.mark.long),
    ],
)
def test_every_format_dial_and_mask_compiles_and_fits(arch, only, count, tmp_path):
    kernels = in_child(arch, only, tmp_path)
    assert len(kernels) == count
    for name, found in kernels.items():
        assert 0 < found["shared"] <= SHARED_MEMORY[arch], name
        assert found["atomic"] == 0, name
        assert (found["tf32"] > 0) == name.startswith("tf32"), name
        name = name.removeprefix("trained-")
        fused = name.startswith(("fused", "fp64", "fp32", "tf32"))
        assert fused or found["fused"] == 0, name
        assert found["fused"] > 0 or not name.startswith("fused"), name
        wide = name.startswith(("fp32", "tf32", "fp64"))
        assert (found["tensor_core_16_bit"] > 0) != (wide or "merge" in name), name


@pytest.mark.long
@pytest.mark.parametrize("head_dim", SHIPPED_SPILLS)
def test_fa3_as_shipped_spills_and_fits_as_the_readme_says(head_dim, tmp_path):
    if triton.__version__ != "3.7.1":
        pytest.skip(f"no spills were counted with Triton {triton.__version__}")
    kernels = in_child(90, f"^shipped-fa3-d{head_dim}-", tmp_path)
    assert len(kernels) == 3
    for found, spills in zip(kernels.values(), SHIPPED_SPILLS[head_dim], strict=True):
        assert (found["shared"] <= SHARED_MEMORY[90]) == (spills is not None)
        assert spills is None or found["spills"] <= spills


def launch_compiled(kernel, profile="fa2", head_dim=256):
    q = torch.empty(1, 1, 64, head_dim)
    numerics = PROFILES[profile].resolve(torch.float32)
    constants = constants_of(q, q, q, mask=Mask(), scale=1.0, numerics=numerics)
    with mock.patch.object(torch.cuda, "device", contextlib.nullcontext):
        options = {"device": torch.device("cuda"), "warps": 4, "stages": triton_launch.STAGES}
        runtime.run(kernel, 1, (q,), constants, **options)


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
    archs = [int(x) for x in sys.argv[1:] if x.isdigit()]
    only = next((x for x in sys.argv[1:] if not x.isdigit()), "")
    sys.stdout.write(json.dumps({arch: report(arch, only) for arch in archs}, indent=1))
