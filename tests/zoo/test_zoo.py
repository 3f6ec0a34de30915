"""The zoo's tables hold what they say: what is right keeps to a budget, what is wrong does not.

The budget here is not `check_attention`'s and shares no code with it: error over plain attention's,
gain, bias and broken promises, on a few small problems that between them show every mistake.
"""

import functools
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from attention_kernels import baseline_attention, golden_attention
from attention_kernels.rounding import INPUT_DTYPES, round_into
from tests.sampling import one_in
from tests.zoo.right import ALL, RIGHT
from tests.zoo.wrong import WRONG

RESULTS = ("out", "lse", "dq", "dk", "dv")
_LIMITS = {"error ratio": 1.6, "row": 4.0, "gain": 2.5e-3, "bias": 0.25, "lse": 1e-4}
_FP32_RATIO = 4.0
"""In FP32 an error ratio also holds the rounding of the LSE, which plain attention has none of: 1.9
to 2.9 in the gradients where the scores have a standard deviation of 1.6."""


class Problem(NamedTuple):
    batch: int
    heads: int
    kv_heads: int
    query_len: int
    key_len: int
    head_dim: int
    causal: bool = True
    scale: float | None = None
    strided: bool = False
    logits: float = 1.0


PROBLEMS = {
    "causal": Problem(4, 4, 2, 70, 70, 16),
    "full": Problem(4, 4, 2, 70, 70, 16, causal=False),
    "q40-k70": Problem(2, 2, 2, 40, 70, 16),
    "q70-k40": Problem(2, 2, 2, 70, 40, 16),
    "scale": Problem(2, 2, 2, 40, 40, 16, scale=0.4),
    "strided": Problem(2, 2, 2, 40, 40, 16, strided=True),
    "d40": Problem(2, 2, 2, 40, 40, 40),
    # scores in the hundreds, which plain attention rounds to whole numbers: shows NaN alone
    "large-logits": Problem(2, 2, 2, 40, 40, 16, logits=8.0),
    "many-keys": Problem(1, 2, 2, 40, 1100, 16),
    "many-queries": Problem(1, 2, 2, 700, 40, 16, causal=False),
}


class Reference(NamedTuple):
    inputs: tuple[Tensor, Tensor, Tensor, Tensor]
    options: dict[str, Any]
    golden: dict[str, Tensor]
    errors: dict[str, Tensor]
    """Plain attention's errors, and those of rounding golden once, whichever are larger."""


@functools.cache
def _reference(name: str, dtype: torch.dtype) -> Reference:
    problem = PROBLEMS[name]
    generator = torch.Generator().manual_seed(sorted(PROBLEMS).index(name))

    def draw(heads: int, length: int, size: float = 1.0) -> Tensor:
        shape = (problem.batch, length, heads, problem.head_dim)
        x = (size * torch.randn(shape, generator=generator)).to(dtype).transpose(1, 2)
        return x if problem.strided else x.contiguous()

    inputs = (
        draw(problem.heads, problem.query_len, problem.logits),
        draw(problem.kv_heads, problem.key_len, problem.logits),
        draw(problem.kv_heads, problem.key_len),
        draw(problem.heads, problem.query_len),
    )
    options = {"causal": problem.causal, "scale": problem.scale}
    q, k, v, dout = (x.double() for x in inputs)
    golden, _ = _results(golden_attention, (q, k, v, dout), {**options, "return_lse": True})
    plain, _ = _results(baseline_attention, inputs, {**options, "return_lse": True})
    errors = {}
    for result in ("out", "dq", "dk", "dv"):
        rounded = round_into(golden[result], INPUT_DTYPES[dtype], dtype)
        both = [(x.double() - golden[result]).square() for x in (plain[result], rounded)]
        errors[result] = torch.maximum(*both)
    return Reference(inputs, options, golden, errors)


def _results(function, inputs, options) -> tuple[dict[str, Tensor], Tensor]:
    """Return the results by name, and out as it was returned."""
    leaves = [x.detach().requires_grad_() for x in inputs[:3]]
    returned = function(*leaves, **options)
    out, lse = returned if isinstance(returned, tuple) else (returned, None)
    gradients = torch.autograd.grad(out, leaves, inputs[3].to(out.dtype))
    found = dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *gradients), strict=True))
    return (found if lse is None else {**found, "lse": lse}), out


def _faults(function, name: str, dtype: torch.dtype, with_lse: bool) -> list[str]:
    """Return what is wrong with an attention on a problem, as "dk gain 0.005"."""
    reference = _reference(name, dtype)
    before = [x.clone() for x in reference.inputs]
    # clones keep their strides
    inputs = tuple(x.clone() for x in reference.inputs)
    options = {**reference.options, **({"return_lse": True} if with_lse else {})}
    found, out = _results(function, inputs, options)
    if not all(map(torch.equal, inputs, before)):
        return ["an input changed"]
    if out.dtype != dtype:
        return [f"dtype {out.dtype}"]
    # in a third call as in the first
    for _ in range(2 if name == "causal" else 0):
        again, _ = _results(function, inputs, options)
        if any(not torch.equal(found[key].nan_to_num(), again[key].nan_to_num()) for key in found):
            return ["not repeatable"]
    if PROBLEMS[name].logits > 1:
        return [f"NaN in {key}" for key in found if not found[key].isfinite().all()]
    return [text for key in found for text in _of_result(key, found[key], reference, dtype)]


def _of_result(key: str, x: Tensor, reference: Reference, dtype: torch.dtype) -> list[str]:
    golden = reference.golden[key]
    if key == "lse":
        worst = (x.double() - golden).nan_to_num(0, 0, 0).abs().max().item()
        return [f"lse off by {worst:.2g}"] if worst > _LIMITS["lse"] else []
    if not x.isfinite().all():
        return [f"NaN in {key}"]
    error, allowed = x.double() - golden, reference.errors[key]
    heads = (error.square().mean((0, 2, 3)) / allowed.mean((0, 2, 3))).sqrt().max().item()
    figures = {
        "error ratio": heads,
        "gain": abs((error * golden).sum().item()) / golden.square().sum().item(),
    }
    if key == "out":
        rows = error.square().sum((0, 1, 3)) / allowed.sum((0, 1, 3)).clamp(min=1e-30)
        figures["row"] = rows[4:].max().sqrt().item()
        if dtype != torch.float32:
            bits = 7 if dtype == torch.bfloat16 else 10
            large = golden.abs() > golden.square().mean().sqrt() / 2
            ulp = 2.0 ** (golden[large].abs().log2().floor() - bits)
            outward = error[large] * golden[large].sign() / ulp
            figures["bias"] = abs(outward.mean().item())
    limits = {**_LIMITS, **({"error ratio": _FP32_RATIO} if dtype == torch.float32 else {})}
    return [f"{key} {what} {x:.3g}" for what, x in figures.items() if x > limits[what]]


def _ids(kind):
    return kind.name


def test_the_tables_are_large_enough_and_have_no_name_twice():
    assert len(RIGHT) >= 14
    assert len(WRONG) >= 30
    names = [one.name for one in (*RIGHT, *WRONG)]
    assert len(set(names)) == len(names)
    for dtype in ALL:
        assert sum(dtype in one.dtypes for one in RIGHT) >= 14
        assert sum(dtype in one.dtypes for one in WRONG) >= 30


@pytest.mark.parametrize("right", one_in(2, RIGHT), ids=_ids)
def test_a_right_attention_is_right_at_its_dtypes(right):
    for dtype in right.dtypes:
        for name in PROBLEMS:
            if right.name == "sdpa:flash" and name in ("q40-k70", "q70-k40", "many-keys"):
                continue  # PyTorch's CPU kernel takes no mask but its own
            assert not _faults(right.function, name, dtype, False), (dtype, name)


@pytest.mark.parametrize("wrong", one_in(2, WRONG), ids=_ids)
def test_a_wrong_attention_is_wrong_at_its_dtypes(wrong):
    for dtype in wrong.dtypes:
        with_lse = "LSE" in wrong.name
        assert any(_faults(wrong.function, name, dtype, with_lse) for name in PROBLEMS), dtype
