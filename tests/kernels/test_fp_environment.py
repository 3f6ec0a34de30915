"""The first call of a process is as exact as the second, whichever attention makes it."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from attention_kernels.fp_environment import VECTOR_MATH, settle_vector_math

ROOT = Path(__file__).parents[2]
# The race itself shows in one process of ten; what must hold in each is that no function of MKL's
# sees many values, hence many threads, before it has seen one.
FIRST_CALLS = """
import torch
from attention_kernels import *
first = {}
def watched(name, function):
    def call(x, *args, **options):
        first.setdefault((name, x.dtype), x.numel())
        return function(x, *args, **options)
    return call
for name in ("exp", "log"):
    setattr(torch, name, watched(name, getattr(torch, name)))
    setattr(torch.Tensor, name, watched(name, getattr(torch.Tensor, name)))
torch.Tensor.exp_ = watched("exp", torch.Tensor.exp_)
q = torch.randn(1, 2, 64, 64, requires_grad=True)
def plain(q, k, v, *, causal=True, scale=None):
    return (q @ k.mT - torch.full(q.shape[-2:-1] * 2, torch.inf).triu(1)).exp() @ v
def shadowed(q, k, v):
    from stability import shadow
    class Model(torch.nn.Linear):
        def forward(self, x):
            q = super().forward(x)
            return torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    model = Model(64, 64)
    with shadow(model, plain, golden=False) as probe:
        model(q).sum().backward()
        probe.step()
    return q
def checked(q, k, v):
    from attention_kernels.testing import check_attention
    from attention_kernels.testing.cells import QUICK
    check_attention(plain, dtypes=["fp32"], cells=QUICK[:1])
    return q
ATTENTION(q, q, q).sum().backward()
dtypes = (torch.float32, torch.float64)
print(first == {(name, dtype): 1 for name in ("exp", "log") for dtype in dtypes})
"""

ATTENTIONS = [
    "flash_attention",
    pytest.param("baseline_attention", marks=pytest.mark.slow),
    pytest.param("golden_attention", marks=pytest.mark.slow),
    pytest.param("shadowed", marks=pytest.mark.slow),
    pytest.param("checked", marks=pytest.mark.slow),
]


@pytest.mark.slow
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_no_function_meets_several_threads_first(attention):
    code = FIRST_CALLS.replace("ATTENTION", attention)
    path = f"{ROOT / 'kernels'}:{ROOT}"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": path, "PATH": "", "HOME": "/nonexistent"},
        timeout=120,
    )
    assert done.stdout.strip() == "True", done.stderr


def test_every_function_is_one_of_torch_and_takes_a_half():
    settle_vector_math.cache_clear()
    settle_vector_math()
    assert len(set(VECTOR_MATH)) == len(VECTOR_MATH)
    assert all(torch.isfinite(getattr(torch, name)(torch.tensor([0.5]))) for name in VECTOR_MATH)
