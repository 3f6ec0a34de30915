"""Prints what `kernels/README.md` says of the published code of arXiv 2510.04212 and of beta.

`python -m tests.kernels.scripts.published_numbers`, in the root of the repository; `twin` after it
leaves out Triton's interpreter, which takes a minute.
"""

import sys

import torch

from attention_kernels import PROFILES, flash_attention, golden_attention
from stability.probe.published_presets import tied_inputs
from tests.kernels.test_published_code import FILES, RESULTS, apart, attend, read

DRAWS = 60


def agreement(engine):
    """Print, for each profile, the worst share of equal elements, and how far others are."""
    for stable in ("stable0", "stable1"):
        names = [name for name in FILES if name.endswith(stable)]
        if engine == "triton":  # which has no block of 96
            names = [name for name in names if "k96" not in name]
        share, beyond, most = dict.fromkeys(RESULTS, 1.0), 0, 0.0
        for name in names:
            tensors, numerics = read(name)
            found = attend(tensors, numerics, engine)
            for result in RESULTS:
                equal = (found[result] == tensors[result]).double().mean().item()
                ulps = apart(found[result], tensors[result])
                share[result] = min(share[result], equal)
                beyond = max(beyond, int((ulps > 1).sum()))
                most = max(most, ulps.max().item())
        shares = ", ".join(f"{result} {100 * value:.3f} %" for result, value in share.items())
        print(f"{engine}, {stable}, {len(names)} files: {shares}; {beyond} beyond 1 ULP, {most:g}")


def tied_rows(seed):
    """Return q, k and v like those of the files called ties_positive, from another seed."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(1, 2, *shape, generator=generator)

    tied, k = normal(1, 32), 0.3 * normal(192, 32)
    k[..., ::7, :] = tied
    q = 2 / 3 * tied + 0.05 * normal(192, 32)
    return tuple(x.bfloat16() for x in (q, k, 1 + normal(192, 32).abs()))


def bias(qkv, numerics, **options):
    """Return the mean signed error of out in ULPs of BF16."""
    out = flash_attention(*qkv, numerics=numerics, **options)
    golden = golden_attention(*(x.double() for x in qkv), **options)
    ulp = torch.ldexp(torch.ones_like(golden), torch.frexp(golden).exponent - 8)
    return ((out.double() - golden) * golden.sign() / ulp).mean()


def signs_of_bias():
    """Print how often beta turns the sign of the bias of many ties, and the mean bias."""
    numerics = PROFILES["all_bf16"].with_(block_q=64, block_k=64)
    cured = numerics.with_(repeated_max_beta=7.0)
    rows = [tied_rows(seed) for seed in range(DRAWS)]
    found = torch.stack(
        [torch.stack([bias(x, each, causal=True) for x in rows]) for each in (numerics, cured)]
    )
    means, errors = found.mean(1).tolist(), (found.std(1) / DRAWS**0.5).tolist()
    turned = int((found[0].sign() != found[1].sign()).sum())
    said = " to ".join(f"{m:+.3f} +- {e:.3f}" for m, e in zip(means, errors, strict=True))
    print(f"of {DRAWS} draws of 27 tied keys {turned} change sign with beta 7; mean {said} ULP")


def shift_out_of_range():
    """Print the bias of the published rule where beta moves the maximum out of range."""
    inputs = tied_inputs(128, 1, 0)
    changes = {"repeated_max_beta": 7.0, "repeated_max_rule": "published"}
    numerics = PROFILES["all_bf16"].with_(**changes)
    found = bias((8 * inputs.q, inputs.k, inputs.v), numerics, scale=1.0)
    print(f"published rule, maxima of 8 to 16, beta 7: {found:+.1f} ULP")


if __name__ == "__main__":
    for engine in ("twin",) if "twin" in sys.argv[1:] else ("twin", "triton"):
        agreement(engine)
    signs_of_bias()
    shift_out_of_range()
