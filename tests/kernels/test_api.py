"""The calls resolve their names once, refuse what can't be honoured and import nothing optional."""

import copy
import json
import math
import pickle
import subprocess
import sys

import pytest
import torch

import attention_kernels
from attention_kernels import (
    BASELINE_PROFILES,
    PROFILES,
    AttentionOutput,
    baseline_attention,
    flash_attention,
    golden_attention,
    resolve_engine,
)
from attention_kernels.testing import Shape, make_qkv

SHAPE = Shape(1, 2, 1, 17, 33, 24)


def draw(dtype=torch.bfloat16):
    return make_qkv(SHAPE, dtype, torch.Generator().manual_seed(0))


@pytest.mark.parametrize("attention", [flash_attention, baseline_attention, golden_attention])
def test_no_scale_is_one_over_the_root_of_head_dim(attention):
    q, k, v = draw()
    assert torch.equal(attention(q, k, v), attention(q, k, v, scale=1 / math.sqrt(24)))
    assert not torch.equal(attention(q, k, v), attention(q, k, v, scale=1))


def test_the_default_profiles_are_fa2_and_plain():
    q, k, v = draw()
    fa2 = flash_attention(q, k, v, numerics=PROFILES["fa2"], engine="twin")
    assert torch.equal(flash_attention(q, k, v), fa2)
    plain = baseline_attention(q, k, v, numerics=BASELINE_PROFILES["plain"])
    assert torch.equal(baseline_attention(q, k, v), plain)


def test_the_log_sum_exp_comes_only_when_asked_for():
    q, k, v = draw()
    result = flash_attention(q, k, v, return_lse=True)
    assert isinstance(result, AttentionOutput)
    assert torch.equal(result.out, flash_attention(q, k, v))
    assert result.lse.shape == q.shape[:3]


def test_packed_results_are_shaped_as_packed_queries():
    q, k, v = (x[0].transpose(0, 1) for x in draw())
    offsets = (torch.tensor(x, dtype=torch.int32) for x in ((0, 5, 17), (0, 30, 33)))
    packed = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), offsets, strict=True))
    out, lse = flash_attention(q, k, v, return_lse=True, **packed)
    assert (out.shape, lse.shape) == (q.shape, (2, 17))
    for attention in (baseline_attention, golden_attention):
        assert attention(q, k, v, **packed).shape == q.shape
    first = flash_attention(*(x.transpose(0, 1)[None] for x in (q[:5], k[:30], v[:30])))
    assert torch.equal(out[:5], first[0].transpose(0, 1))


def test_lse_is_the_log_of_the_sum_and_minus_infinity_for_rows_that_attend_nothing():
    q, k, v = draw(torch.float64)
    numerics = PROFILES["golden"]
    lse = flash_attention(q, k, v, numerics=numerics, return_lse=True, window=(None, 0)).lse
    scores = q @ k.mT / math.sqrt(24)
    hidden = torch.ones(17, 33).triu(33 - 17 + 1).bool()
    torch.testing.assert_close(lse, scores.masked_fill(hidden, -torch.inf).logsumexp(-1))
    v = k = k[:, :, :9]
    lse = flash_attention(q, k, v, return_lse=True, causal=True).lse
    assert (lse.isneginf() == (torch.arange(17) < 8)).all()


def test_out_has_the_dtype_of_q_and_goldens_is_fp64():
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        q, k, v = draw(dtype)
        assert flash_attention(q, k, v).dtype == dtype
        assert baseline_attention(q, k, v).dtype == dtype
        assert golden_attention(q, k, v).dtype == torch.float64


def test_numerics_survive_being_copied_and_sent():
    for numerics in (PROFILES["fa3_fp8"], BASELINE_PROFILES["fp8"]):
        for twin in (copy.deepcopy(numerics), pickle.loads(pickle.dumps(numerics))):
            assert (twin, twin.text) == (numerics, numerics.text)
    changed = PROFILES["fa2"].with_(block_k=32)
    assert changed.text != PROFILES["fa2"].text
    assert json.loads(changed.text) == changed.to_dict()


@pytest.mark.parametrize(
    ("engine", "device", "expected"),
    [
        ("auto", "cpu", "twin"),
        ("auto", "cuda", "triton"),
        ("twin", "cuda", "twin"),
        ("triton", "cpu", "triton"),
        ("twin", torch.device("cpu"), "twin"),
    ],
)
def test_auto_is_triton_on_cuda_and_the_twin_elsewhere(engine, device, expected):
    if expected == "triton":
        pytest.importorskip("triton", reason="resolves to an engine that is not installed")
    assert resolve_engine(engine, device) == expected


@pytest.mark.parametrize(("engine", "device"), [("triton", "cpu"), ("auto", "cuda")])
def test_triton_that_is_not_installed_is_refused_never_replaced(monkeypatch, engine, device):
    monkeypatch.setitem(sys.modules, "triton", None)
    message = rf"resolve_engine: engine must be one that is installed, got '{engine}' on {device}"
    with pytest.raises(ValueError, match=message + r".*install triton or pass engine='twin'"):
        resolve_engine(engine, device)
    assert resolve_engine("auto", "cpu") == "twin"


@pytest.mark.slow
def test_all_but_the_triton_engine_runs_where_triton_cannot_be_imported():
    script = """
import sys
sys.modules["triton"] = None
import torch
from attention_kernels import baseline_attention, flash_attention, golden_attention
q = torch.randn(1, 1, 8, 16, requires_grad=True)
for attention in (baseline_attention, flash_attention, golden_attention):
    attention(q, q, q).sum().backward()
import attention_kernels.testing
loaded = [m for m in sys.modules if "triton_" in m and m.startswith("attention_kernels")]
assert not loaded, loaded
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_the_public_surface_is_the_documented_one():
    assert sorted(attention_kernels.__all__) == [
        "AttentionFn",
        "AttentionOutput",
        "BASELINE_PROFILES",
        "BaselineNumerics",
        "FlashNumerics",
        "Format",
        "MaskArguments",
        "PROFILES",
        "attention",
        "attention_with_kvcache",
        "baseline_attention",
        "dropout_keep_mask",
        "flash_attention",
        "golden_attention",
        "resolve_engine",
        "round_to",
    ]
