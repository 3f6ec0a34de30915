"""FA2 against FA3 in BF16: what the reference decides.

Claim: FA3 looks 20x worse than FA2 only beside a reference that is FA2 itself
Source: flash-attention issue 1138
Published: relative Frobenius error of FA2 and FA3 equal against FP32 and FP64; against a BF16
    scaled_dot_product_attention FA2's is 1/20 of FA3's, because that reference is FA2; against a
    plain BF16 implementation the difference vanishes
Varies: the reference; the candidate: the profiles `fa2` and `fa3` (both round P and out to BF16,
    and keep statistics and accumulator in FP32), another build of each (exp in place of exp2 or the
    reverse, which differ in the last bits of FP32), and PyTorch's and flash-attn's kernels where
    they run
Measured: relative Frobenius error of out; q, k, v are N(0, 1) in BF16, head_dim 128, no mask
Refuted if: FA2 and FA3 differ against FP64, FP32 or plain BF16, or not against FA2
Sizes: cpu: batch 1, length 4096, 8 heads, 6 seeds, a quarter of the batch and half of the length
    published, where the profile `fa2` stands for the SDPA that is FA2: SDPA on a CPU is not; gpu:
    batch 4, length 8192, 8 heads, as published, 6 seeds; quick: length 512, 2 heads, 5 seeds

    stability experiment fa3_vs_fa2_reference [--size cpu|gpu]
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure
from torch import Tensor

from attention_kernels import PROFILES, attention, flash_attention, golden_attention
from attention_kernels.peers.registry import peers
from attention_kernels.testing import Shape
from experiments.kit.record import Findings
from experiments.kit.rows import BySeed, Rows, by_seed
from experiments.kit.stated_tests import StatedTest, equal, ratio_within
from stability.analysis.intervals import paired_interval
from stability.probe.attention_inputs import draw_inputs
from stability.report.paper.style import log_axis, new_figure
from stability.report.view.palette import OKABE_ITO


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How large and how many seeds."""

    batch: int = 1
    heads: int
    length: int
    seeds: int
    device: str = "cpu"


SIZES = {
    "quick": Settings(heads=2, length=512, seeds=5),
    "cpu": Settings(heads=8, length=4096, seeds=6),
    "gpu": Settings(batch=4, heads=8, length=8192, seeds=6, device="cuda"),
}
FLASH = {
    "fa2": PROFILES["fa2"],
    "fa3": PROFILES["fa3"],
    "fa2, another build": PROFILES["fa2"].with_(exp="exp2"),
    "fa3, another build": PROFILES["fa3"].with_(exp="exact"),
    "fa3, keys forward": PROFILES["fa3"].with_(key_order="forward"),
}
KERNELS = ("sdpa:flash", "flash_attn2", "flash_attn3")
"""PyTorch's and flash-attn's: candidates and references where they run."""
EQUAL = {"above": 0.98, "below": 1.02}
FAR = {"below": 0.1}
PUBLISHED = (
    ("FP64", "fa2", "fa3", "equal within 2 %", EQUAL),
    ("FP32", "fa2", "fa3", "equal within 2 %", EQUAL),
    ("plain BF16", "fa2", "fa3", "equal within 2 %", EQUAL),
    ("sdpa:flash", "flash_attn2", "flash_attn3", "1/20 published; below 1/10", FAR),
)
"""Reference, two candidates, and what is stated of the first's error over the second's.

A statement about a kernel is made only where that kernel runs.
"""
AS_GOOD, ORDER = {"above": 0.95, "below": 1.05}, {"below": 0.67}
CONTROLS = (
    ("fa2", "fa2, another build", "fa3", "1/20 published of real kernels; below 1/10", FAR),
    ("FP64", "sdpa:flash", "fa2", "PyTorch's kernel is as good, within 5 %", AS_GOOD),
    ("fa3", "fa3, another build", "fa2", "it turns round; below 1/10", FAR),
    ("fa2", "fa3, keys forward", "fa3", "the order of keys is a third or more of it", ORDER),
)


def measure(settings: Settings) -> Findings:
    """Measure each candidate against each reference at each seed."""
    kernels = [
        each.name for each in peers(settings.device) if each.available and each.name in KERNELS
    ]
    rows = [row for seed in range(settings.seeds) for row in _rows(settings, kernels, seed)]
    itself = [row["rel_fro"] for row in rows if row["reference"] == row["candidate"]]
    rerun = equal("each against itself, run again: no difference", itself)
    missing = [name for name in KERNELS if name not in kernels]
    return Findings(
        measured=_measured(rows, kernels),
        published=_stated(PUBLISHED, rows, missing),
        controls=[*_stated(CONTROLS, rows, missing), rerun],
        rows=rows,
    )


def _stated(statements: Sequence[Any], rows: Rows, missing: Sequence[str]) -> list[StatedTest]:
    return [
        ratio_within(
            f"against {reference}, {first} over {second}: {words}",
            _by_seed(rows, reference, first),
            _by_seed(rows, reference, second),
            **bounds,
        )
        for reference, first, second, words, bounds in statements
        if {reference, first, second}.isdisjoint(missing)
    ]


def _rows(settings: Settings, kernels: Sequence[str], seed: int) -> Iterator[dict[str, Any]]:
    """Yield the relative Frobenius error of each candidate against each reference."""
    sizes = (settings.heads, settings.heads, settings.length, settings.length, 128)
    q, k, v, _ = draw_inputs("normal", Shape(settings.batch, *sizes), "bf16", seed, settings.device)
    outs = {name: flash_attention(q, k, v, numerics=numerics) for name, numerics in FLASH.items()}
    outs |= {name: attention(q, k, v, implementation=name) for name in kernels}
    references = {
        "FP64": golden_attention(q, k, v),
        "FP32": attention(q.float(), k.float(), v.float(), implementation="sdpa:math"),
        "plain BF16": attention(q, k, v, implementation="baseline:plain"),
        **{name: flash_attention(q, k, v, numerics=FLASH[name]) for name in ("fa2", "fa3")},
        **{name: attention(q, k, v, implementation=name) for name in kernels},
    }
    for reference, expected in references.items():
        for candidate, out in outs.items():
            yield {
                "reference": reference,
                "candidate": candidate,
                "seed": seed,
                "rel_fro": _rel_fro(out, expected),
            }


def _rel_fro(out: Tensor, reference: Tensor) -> float:
    """Return |out - reference| / |reference|, Frobenius norms in FP64."""
    reference = reference.double()
    return ((out.double() - reference).norm() / reference.norm()).item()


def _by_seed(rows: Rows, reference: str, candidate: str) -> BySeed:
    return by_seed(rows, "rel_fro", reference=reference, candidate=candidate)


def _measured(rows: Rows, kernels: Sequence[str]) -> str:
    """Return FA2's error over FA3's against each reference, in words."""
    pairs = dict.fromkeys(("FP64", "FP32", "plain BF16", *kernels), "fa2")
    over = [
        f"{_mean(rows, name, fa2) / _mean(rows, name, 'fa3'):.2g}x against {name}"
        for name, fa2 in (pairs | {"fa2": "fa2, another build"}).items()
    ]
    exact = ", ".join(
        f"{_mean(rows, 'FP64', name):.2g} for {name}" for name in ("fa2", "fa3", *kernels)
    )
    return f"FA2's error over FA3's: {', '.join(over)}; against FP64 it is {exact}"


def _mean(rows: Rows, reference: str, candidate: str) -> float:
    return paired_interval(_by_seed(rows, reference, candidate)).mean


def draw(rows: Rows) -> Figure:
    """Draw the error of FA2, FA3 and SDPA against each reference."""
    figure = new_figure("column", 2.6)
    axes = figure.add_subplot()
    references = list(dict.fromkeys(row["reference"] for row in rows))
    for (candidate, marker), colour in zip(
        {"fa2, another build": "o", "fa3, another build": "s", "sdpa:flash": "D"}.items(),
        OKABE_ITO,
        strict=False,
    ):
        errors = {name: list(_by_seed(rows, name, candidate).values()) for name in references}
        # a kernel against itself has no error, and no place on a log axis
        places = [place for place, name in enumerate(references) if all(errors[name])]
        axes.plot(
            [error for place in places for error in errors[references[place]]],
            [place for place in places for _ in errors[references[place]]],
            color=colour,
            marker=marker,
            markersize=4,
            markerfacecolor="none",
            linestyle="none",
            label=candidate,
        )
    axes.set_yticks(range(len(references)), references)
    axes.set_ylabel("reference")
    axes.invert_yaxis()
    log_axis(axes, "x")
    axes.set_xlabel("relative Frobenius error of out")
    figure.legend(loc="outside upper center", ncols=1)
    return figure
