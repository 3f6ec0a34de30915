"""Published numbers that the microbenchmark is held against: the problems, and what was printed.

`fa3_table3` is table 3 of FlashAttention-3 (arXiv 2407.08608): RMSE against FP64 on inputs with
outliers. The paper names neither the softmax scale nor the length. At head_dim 128 and length 4096
our FP16 column agrees with the printed one at softmax scale 1, and our FP8 column at
1/sqrt(head_dim); at the other's scale each is off by a factor of 4 to 20. At 1/sqrt(head_dim) the
FP16 column agrees as well if what is printed there is relative to the RMS of the golden, which the
paper does not say (`experiments/fa3_table3.py`). `tie_bias` builds the failure of arXiv 2510.04212:
rows in which P is exactly 1 twice, with small residuals, over values of one sign. Leaves out tables
and the command (`cli.deviate`).
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from attention_kernels import PROFILES, flash_attention, golden_attention
from attention_kernels.api import Engine
from stability.probe.attention_inputs import AttentionInputs
from stability.probe.microbenchmark import Problem, ResultDeviations, at_format

__all__ = [
    "FA3_TABLE3",
    "TIE_CASES",
    "PublishedRmse",
    "TieBias",
    "TiedRows",
    "fa3_table3",
    "published_and_measured",
    "tie_bias",
    "tied_inputs",
]

TIED_RESIDUALS = 30
RESIDUAL_DEPTH = 10.5
"""exp(-10.5) or a little less each: 30 residuals weigh 5e-4 beside the two ones."""
ULP = 2.0**-6
"""The spacing of BF16 in [2, 4), where all of v and out lie."""
NO_RESIDUAL_DEPTH = 40.0
"""exp(-40): FP32 drops the residuals from the sum."""

TiedRows = Literal["tied", "no_residual", "mixed_residuals", "untied"]
"""The failing rows and three controls, each of which lacks one ingredient: the residuals, their
common sign (the tied values keep theirs), or the tie (the second P lies in 0.5 to 0.95)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedRmse:
    """One printed RMSE, and the profile or baseline whose RMSE it is compared with."""

    row: str
    column: str
    profile: str = "fa2"
    baseline: str = "plain"
    of_baseline: bool = False
    scale: float | None
    rmse: float


FA3_TABLE3 = (
    PublishedRmse(
        row="FP16",
        column="baseline",
        baseline="fp16_softmax",
        of_baseline=True,
        scale=1.0,
        rmse=3.2e-4,
    ),
    PublishedRmse(row="FP16", column="FA2", profile="fa2", scale=1.0, rmse=1.9e-4),
    PublishedRmse(row="FP16", column="FA3", profile="fa3", scale=1.0, rmse=1.9e-4),
    PublishedRmse(
        row="FP8", column="baseline", baseline="fp8", of_baseline=True, scale=None, rmse=2.4e-2
    ),
    PublishedRmse(row="FP8", column="FA3", profile="fa3_fp8", scale=None, rmse=9.1e-3),
    PublishedRmse(
        row="FP8",
        column="no block quantisation",
        profile="fa3_fp8_per_tensor",
        scale=None,
        rmse=9.3e-3,
    ),
    PublishedRmse(
        row="FP8",
        column="no incoherent processing",
        profile="fa3_fp8_coherent",
        scale=None,
        rmse=2.4e-2,
    ),
)


def fa3_table3(
    cell: PublishedRmse, *, length: int = 4096, heads: int = 4, seed: int = 0
) -> Problem:
    """Return the problem of one cell of the table."""
    return Problem(
        profile=cell.profile,
        baseline=cell.baseline,
        format="fp16",
        length=length,
        head_dim=128,
        heads=heads,
        scale=cell.scale,
        distribution="outliers",
        seed=seed,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class TieBias:
    """Mean signed error of out in ULPs of BF16 against the golden, with its standard error."""

    profile: str
    engine: str
    sign: int
    bias_ulp: float
    standard_error: float
    mean_abs_ulp: float
    delta_ulp: float
    """Of delta = rowsum(dO * O), dO > 0, in ULPs of out: mean signed error weighted by dO."""
    delta_from_p_ulp: float
    """The same of delta = rowsum(dP * P), which reads no O."""
    samples: int


def tied_inputs(heads: int, sign: int, seed: int, rows: TiedRows = "tied") -> AttentionInputs:
    """Return 64 queries a head, `(1, heads, 64, 64)`, and 32 keys of which two tie in every row.

    v is in [2, 4), times `sign`, dO is positive; all are on the BF16 grid, in FP32. `rows` takes
    one thing away.
    """
    generator = torch.Generator().manual_seed(seed)
    keys, queries, dim = 2 + TIED_RESIDUALS, 64, 64
    q = torch.zeros(1, heads, queries, dim)
    # Two digits, so that the maxima fill 1 to 2. Where they fill only the lower half of each step
    # of BF16, P of beta 2 has a bias of its own, -0.013 ULP.
    q[..., 0] = 1 + torch.rand(1, heads, queries, generator=generator)
    q[..., 2] = torch.rand(1, heads, queries, generator=generator)
    q[..., 1] = NO_RESIDUAL_DEPTH if rows == "no_residual" else RESIDUAL_DEPTH
    k = torch.zeros(1, heads, keys, dim)
    k[..., 0], k[..., 2] = 1.0, 2.0**-7
    k[..., 2:, 1] = -(1 + 0.1 * torch.rand(1, heads, TIED_RESIDUALS, generator=generator))
    v = sign * (2 + 2 * torch.rand(1, heads, keys, dim, generator=generator))
    # Values that would round up to 4 stay below it.
    v = v.clamp(-3.98, 3.98)
    dout = torch.randn(1, heads, queries, dim, generator=generator).abs()
    if rows == "untied":
        k[..., 1, 0] -= 0.05 + 0.29 * torch.rand(1, heads, generator=generator)
    elif rows == "mixed_residuals":
        coin = torch.randint(0, 2, v[..., 2:, :].shape, generator=generator)
        v[..., 2:, :] *= 2 * coin - 1
    return AttentionInputs(*(x.bfloat16().float() for x in (q, k, v, dout)))


TIE_CASES = (
    ("all_bf16", ()),
    ("all_bf16", (("statistics", "fp32"), ("output", "fp32"))),
    ("stabilised", (("repeated_max_beta", 1),)),
    ("stabilised", ()),
    ("fa2", ()),
)
"""Profiles, with what is changed in them: in the second the unnormalised P v alone is rounded."""


def tie_bias(
    profile: str,
    changes: tuple[tuple[str, Any], ...],
    engine: Engine,
    sign: int,
    *,
    heads: int,
    seed: int = 0,
    rows: TiedRows = "tied",
    device: str = "cpu",
) -> TieBias:
    """Measure the bias of one profile in one engine, on values of one sign.

    Inputs are on the BF16 grid in FP32, so that an output that is not rounded stays so. Rows of a
    head share v, so the standard error is that of the means of the heads.
    """
    numerics = at_format(PROFILES[profile].with_(**dict(changes)), "bf16", stored=False)
    inputs = AttentionInputs(*(x.to(device) for x in tied_inputs(heads, sign, seed, rows)))
    qkv = (inputs.q, inputs.k, inputs.v)
    options: dict[str, Any] = {"scale": 1.0, "numerics": numerics, "engine": engine}
    out, lse = flash_attention(*qkv, **options, return_lse=True)
    golden = golden_attention(*qkv, scale=1.0)
    ulps_BHQD = (out.double() - golden) / ULP
    by_head = ulps_BHQD.mean(dim=(0, 2, 3))
    return TieBias(
        profile=" ".join([profile, *(f"{name}={value}" for name, value in changes)]),
        engine=engine,
        sign=sign,
        bias_ulp=by_head.mean().item(),
        standard_error=by_head.std().item() / math.sqrt(heads),
        mean_abs_ulp=ulps_BHQD.abs().mean().item(),
        delta_ulp=_delta_ulp(inputs.dout, (inputs.dout * out.double()).sum(-1), golden),
        delta_from_p_ulp=_delta_ulp(inputs.dout, _delta_from_p(inputs, lse), golden),
        samples=out.numel(),
    )


def _delta_from_p(inputs: AttentionInputs, lse: Tensor) -> Tensor:
    """Return rowsum(dP * P) in FP32, P = exp(S - LSE) as the backward forms it."""
    p_BHQK = torch.exp(inputs.q @ inputs.k.mT - lse.unsqueeze(-1))
    return (inputs.dout @ inputs.v.mT * p_BHQK).sum(-1)


def _delta_ulp(dout: Tensor, delta: Tensor, golden: Tensor) -> float:
    """Return the mean error of `delta` in ULPs of out: per unit of dO."""
    error = delta.double() - (dout * golden).sum(-1)
    return (error.sum() / (ULP * dout.double().sum())).item()


def published_and_measured(cell: PublishedRmse, measured: ResultDeviations) -> tuple[float, float]:
    """Return the printed RMSE and the one measured."""
    found = measured.baseline if cell.of_baseline else measured.candidate
    return cell.rmse, found["rmse"]
