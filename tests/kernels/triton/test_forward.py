"""The interpreted forward kernel: exact at FP64, the twin below, live at every point."""

import os
import subprocess
import sys
import threading

import pytest
import torch
import triton.language as tl

from attention_kernels import PROFILES
from attention_kernels.formats import FORMATS
from attention_kernels.masks import Mask
from attention_kernels.testing import Shape, make_qkv, nan_filled
from attention_kernels.triton import forward as triton_forward
from attention_kernels.triton import launch as triton_launch
from attention_kernels.twin import forward as twin_forward
from tests.sampling import one_in

SHAPES = [
    Shape(2, 2, 1, 1, 1, 16),
    Shape(1, 2, 2, 1, 65, 256),
    Shape(1, 4, 2, 63, 65, 40),
    Shape(1, 1, 1, 65, 63, 64),
    Shape(1, 3, 1, 113, 203, 96),
    Shape(1, 2, 1, 203, 113, 59),
]
CASES = [
    ("fa2", torch.bfloat16, 16),
    ("fa2", torch.float16, 32),
    ("all_bf16", torch.bfloat16, 64),
    ("all_bf16", torch.float64, 64),
]
FORWARD_POINTS = [
    *("operands", "products", "scores", "statistics", "exponents", "summands", "probabilities"),
    *("rescaled_accumulator", "block_output", "accumulator", "output"),
]


def draw(shape, dtype=torch.float64, seed=0):
    return make_qkv(shape, dtype, torch.Generator().manual_seed(seed))


def run(q, k, v, profile="golden", causal=False, engine=triton_launch, **changes):
    numerics = PROFILES[profile].with_(**changes).resolve(q.dtype)
    mask = Mask(causal=causal)
    return engine.forward(q, k, v, mask=mask, scale=q.shape[-1] ** -0.5, numerics=numerics)


def dense(q, k, v, causal):
    """Softmax attention by its definition, in FP64; rows that attend nothing give 0 and -inf."""
    k, v = (x.double().repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = q.double() @ k.mT * q.shape[-1] ** -0.5
    if causal:
        rows, keys = scores.shape[-2:]
        hidden = torch.ones(rows, keys, dtype=torch.bool).triu(1 + keys - rows)
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores.softmax(-1).nan_to_num() @ v, scores.logsumexp(-1)


def ulps_apart(x, y, format):
    """|x - y| in spacings of `format` at y."""
    x, y = x.double(), y.double()
    exponent = torch.frexp(y).exponent - 1
    spacing = torch.ldexp(torch.ones_like(y), exponent.clamp(min=format.min_exponent))
    return (x - y).abs() / (spacing * 2.0**-format.mantissa_bits)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_with_every_point_at_fp64_the_kernel_is_dense_attention(shape, causal):
    q, k, v = draw(shape)
    expected, expected_lse = dense(q, k, v, causal)
    for tiles in ({"block_q": 32, "block_k": 128}, {"block_q": 128, "block_k": 32}):
        with nan_filled():
            out, lse = run(q, k, v, causal=causal, **tiles)
        assert (out - expected).norm() <= 1e-12 * expected.norm()
        torch.testing.assert_close(lse, expected_lse, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(("profile", "dtype", "block_k"), one_in(4, CASES), ids=str)
@pytest.mark.parametrize("shape", SHAPES[1:], ids=str)
def test_the_kernel_is_the_twin_within_two_ulp(shape, profile, dtype, block_k, causal):
    q, k, v = draw(shape, dtype)
    with nan_filled():
        out, lse = run(q, k, v, profile, causal, block_k=block_k)
    twin_out, twin_lse = run(q, k, v, profile, causal, twin_forward, block_k=block_k)
    assert (out.dtype, lse.dtype) == (twin_out.dtype, twin_lse.dtype)
    output = PROFILES[profile].resolve(dtype).forward.output
    assert (ulps_apart(out, twin_out, FORMATS[output]) <= 2).double().mean() >= 0.999
    torch.testing.assert_close(lse, twin_lse, rtol=1e-6 if profile == "fa2" else 2**-7, atol=1e-6)


@pytest.mark.parametrize("shape", SHAPES[1:], ids=str)
def test_in_fp32_the_kernel_errs_as_fp32_sums_may(shape):
    # Not ULPs of the result, which say little of another order of additions: worst-case error of
    # a sum of n terms is n * 2**-24 of them. TF32 or BF16 operands err 30 times that or more.
    q, k, v = draw(shape, torch.float32)
    expected, expected_lse = dense(q, k, v, False)
    out, lse = run(q, k, v, "fa2")
    bound = (shape.head_dim + shape.key_len) * 2**-24
    assert (out - expected).norm() <= bound * expected.norm()
    assert (lse - expected_lse).norm() <= bound * expected_lse.norm()


@pytest.mark.parametrize("point", FORWARD_POINTS)
def test_each_forward_point_moves_the_output(point):
    q, k, v = draw(Shape(1, 2, 1, 65, 130, 40))
    lowered = run(q, k, v, **{point: "bf16"})[0]
    # One BF16 rounding is 2**-9 of what it rounds; anything above FP64 noise shows it happened.
    assert (lowered - run(q, k, v)[0]).abs().max() > 1e-6
    assert (lowered - run(q, k, v, engine=twin_forward, **{point: "bf16"})[0]).norm() < 1e-12


def test_near_ties_and_hidden_blocks_move_the_maximum_as_in_the_twin():
    q, k, v = draw(Shape(1, 1, 1, 33, 50, 16), torch.bfloat16)
    q, k = q.abs(), -k.abs()  # scores below 0, where either moves a maximum to 0
    tiles = {"block_q": 16, "block_k": 16}

    def agreement(found, **dials):
        options = {"profile": "peer_2510_04212_stabilised", "causal": True}
        expected, _ = run(q, k, v, **options, engine=twin_forward, **(tiles | near | dials))
        return (found == expected).double().mean()

    near = {"repeated_max_tolerance": 0.1}
    found, _ = run(q, k, v, "peer_2510_04212_stabilised", True, **tiles, **near)
    assert agreement(found) >= 0.97
    assert agreement(found, repeated_max_tolerance=0.0) < 0.9
    assert agreement(found, repeated_max_rule="bounded") < 0.9


def test_the_lse_point_moves_the_lse_alone():
    q, k, v = draw(Shape(1, 2, 1, 65, 130, 40))
    (out, lse), (lowered_out, lowered_lse) = run(q, k, v), run(q, k, v, lse="bf16")
    assert torch.equal(out, lowered_out)
    assert torch.equal(lowered_lse, lse.float().bfloat16().double())


def test_strides_do_not_change_a_bit():
    q, k, v = draw(Shape(2, 2, 2, 65, 70, 40), torch.bfloat16)
    expected = run(q, k, v, "fa2", True)
    rows_outer = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    dims_outer = [x.mT.contiguous().mT for x in (q, k, v)]
    for strided in (rows_outer, dims_outer):
        assert not strided[0].is_contiguous()
        for x, y in zip(run(*strided, "fa2", True), expected, strict=True):
            assert torch.equal(x, y)


def test_a_row_that_attends_nothing_gives_zero_and_minus_infinity():
    q, k, v = draw(Shape(1, 1, 1, 100, 20, 16), torch.bfloat16)
    out, lse = run(q, k, v, "fa2", True, block_q=16)
    assert torch.equal(out[:, :, :80], torch.zeros_like(out[:, :, :80]))
    assert (lse[:, :, :80] == -torch.inf).all()
    assert (out[:, :, 80:] != 0).any(-1).all()
    assert lse[:, :, 80:].isfinite().all()


def test_a_nan_stays_in_its_row_and_warns_nobody():
    q, k, v = draw(Shape(1, 1, 1, 65, 65, 16), torch.float32)
    q[0, 0, 3, 5] = torch.nan
    out, lse = run(q, k, v, "fa2")
    assert out.isnan().any(-1).squeeze().nonzero().tolist() == [[3]]
    assert lse.isnan().squeeze().nonzero().tolist() == [[3]]


def test_the_interpreter_leaves_triton_and_the_kernels_as_they_were():
    q, k, v = draw(Shape(1, 1, 1, 16, 16, 16))
    before = tl.dot, tl.reduce, tl.tensor.__getitem__, dict(vars(triton_forward))
    run(q, k, v)
    assert before == (tl.dot, tl.reduce, tl.tensor.__getitem__, dict(vars(triton_forward)))


def test_threads_may_attend_at_once():
    q, k, v = draw(Shape(1, 2, 1, 65, 65, 16))
    expected, results = run(q, k, v)[0], []
    threads = [threading.Thread(target=lambda: results.append(run(q, k, v)[0])) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    assert all(torch.equal(result, expected) for result in results)


HASH = """
import hashlib, torch
from attention_kernels import PROFILES
from attention_kernels.triton import launch as triton_launch
from attention_kernels.masks import Mask
from attention_kernels.testing import Shape, make_qkv
q, k, v = make_qkv(Shape(1, 2, 1, 65, 70, 40), torch.bfloat16, torch.Generator().manual_seed(0))
out, lse = triton_launch.forward(
    q, k, v, mask=Mask(causal=True), scale=0.15, numerics=PROFILES["fa2"].resolve(q.dtype)
)
print(hashlib.sha256(out.numpy().tobytes() + lse.numpy().tobytes()).hexdigest())
"""


@pytest.mark.slow
def test_no_environment_variable_changes_a_bit():
    switches = {
        "TRITON_INTERPRET": "1",
        "TRITON_DEFAULT_FP_FUSION": "1",
        "TRITON_F32_DEFAULT": "tf32",
        "NVIDIA_TF32_OVERRIDE": "1",
    }
    # Threads decide how BLAS splits a sum, which is the machine's business, not the kernel's.
    clean = {k: v for k, v in os.environ.items() if k not in switches} | {"OMP_NUM_THREADS": "1"}
    path = {"PYTHONPATH": os.pathsep.join(sys.path)}
    hashes = {
        subprocess.run(
            [sys.executable, "-W", "error", "-c", HASH],
            env=clean | path | extra,
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        ).stdout
        for extra in ({}, switches)
    }
    assert len(hashes) == 1


def test_another_device_is_refused():
    q = torch.empty(1, 1, 16, 16, device="meta")
    with pytest.raises(ValueError, match="q must be on a cpu or cuda device, got meta"):
        run(q, q, q, "fa2")
