"""Hopper's FP8 tensor cores keep 14 bits of a sum: in a matrix product, and in FP8 attention.

Claim: summed in Hopper's FP8 tensor cores alone, a random matrix product with K = 4096 errs by
    nearly 2 %, more with larger K, and adding sums of 128 products in FP32 cures it
Source: DeepSeek-V3's report, arXiv 2412.19437, section 3.3.2
Published: about 14 bits are kept; K = 4096: "maximum relative error of nearly 2 %"; larger K is
    worse; promotion every 128 is enough. Law and size of the matrices, and what the error is
    relative to, are not said
Varies: the law of both matrices, N(0, 1) or U(0, 1), scaled to e4m3's 448; K; who adds: the tensor
    core alone, FP32 every 128 products, or a tensor core of 25 bits (Blackwell's). In attention:
    the law of v, the keys, and FlashAttention-3's FP8 with a factor a head, whose accumulator goes
    through all keys, or a factor each 128 keys, whose sums are added in FP32. The tensor core is
    emulated (`attention_kernels.tensor_core`) after published measurements
Measured: of the product, against the exact product of the same FP8 values: the largest error, over
    the exact results' RMS and element by element, and the mean signed error. Of attention: the
    error of out against the golden, relative, Frobenius. "Nearly 2 %" is read as 2 % within a
    factor of 1.5: the largest of more results is larger
Refuted if: no reading of the law and of "relative" gives 1.33 to 3 %, or promotion leaves 0.1 %
Sizes: cpu: 256 x 256 results, K to 4096; 128 queries on up to 8192 keys, head_dim 64; 8 seeds;
    gpu: 2048 x 2048, 2048 queries; quick: 48 x 48, 16 queries on up to 2048 keys, 5 seeds

    stability experiment fp8_accumulation [--size cpu|gpu]
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from attention_kernels import PROFILES, flash_attention, golden_attention, round_to
from attention_kernels.tensor_core import tensor_core_matmul
from experiments.kit.plots import draw_series
from experiments.kit.record import Findings
from experiments.kit.rows import BySeed, Rows, by_seed, mean, values_by
from experiments.kit.stated_tests import StatedTest, mean_within, monotone, ratio_within
from stability.report.paper.style import new_figure

LAWS = ("N(0, 1)", "U(0, 1)")
"""Of both matrices, and of v."""
ADDERS: dict[str, tuple[str, int | None]] = {
    "tensor core alone": ("hopper_fp8", None),
    "FP32 every 128": ("hopper_fp8", 128),
    "25 bits": ("blackwell_fp8", None),
}
ALONE, PROMOTED, WIDE = ADDERS
ATTENTIONS = {
    "one factor": ("fa3_fp8_per_tensor", "hopper_fp8"),
    "one factor, FP32": ("fa3_fp8_per_tensor", "ieee"),
    "factor each 128": ("fa3_fp8", "hopper_fp8"),
    "factor each 128, FP32": ("fa3_fp8", "ieee"),
}
"""The profile and who adds."""
ONE, ONE_WIDE, EACH, EACH_WIDE = ATTENTIONS
K = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Rows and columns of a product, its lengths K, queries and keys of attention, seeds."""

    size: int
    lengths: tuple[int, ...] = (256, 1024, K)
    queries: int
    keys: tuple[int, ...] = (512, 2048, 8192)
    seeds: int
    device: str = "cpu"


SIZES = {
    "quick": Settings(size=48, lengths=(512, K), queries=16, keys=(512, 2048), seeds=5),
    "cpu": Settings(size=256, queries=128, seeds=8),
    "gpu": Settings(size=2048, queries=2048, seeds=8, device="cuda"),
}


def measure(settings: Settings) -> Findings:
    """Measure products and attention at each seed."""
    rows = [
        {"part": part, "law": law, "seed": seed, **row}
        for law in LAWS
        for seed in range(settings.seeds)
        for part, found in (("product", _products), ("attention", _attentions))
        for row in found(settings, law, seed)
    ]
    return Findings(
        measured=_in_words(rows, max(settings.keys)),
        published=_published(rows, settings.lengths),
        controls=_controls(rows, settings.keys),
        rows=rows,
        explain=lambda: (
            "With values of one sign each cut takes from the sum, and errors add up: "
            f"{mean(rows, 'bias', **_at('U(0, 1)', ALONE)):.2%} is lost on average, where N(0, 1) "
            f"has a mean of {mean(rows, 'bias', **_at('N(0, 1)', ALONE)):+.3%}. So what the error "
            "is depends on a law that the report does not name"
        ),
    )


def _draw(law: str, *size: int, generator: torch.Generator) -> Tensor:
    draw = torch.randn if law == "N(0, 1)" else torch.rand
    return draw(size, generator=generator)


def _narrow(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x in e4m3, brought onto its largest value, and the factor that takes it back."""
    factor = x.abs().max() / 448
    return round_to((x / factor).clamp(-448, 448), "e4m3"), factor


def _products(settings: Settings, law: str, seed: int) -> Iterator[dict[str, Any]]:
    """Yield the errors of a product, by its length and by who adds."""
    generator = torch.Generator().manual_seed(seed)
    for length in settings.lengths:
        drawn = (
            _draw(law, settings.size, length, generator=generator),
            _draw(law, length, settings.size, generator=generator),
        )
        (a, a_factor), (b, b_factor) = (_narrow(x.to(settings.device)) for x in drawn)
        exact = a.double() @ b.double()
        wide = drawn[0].double() @ drawn[1].double()
        kept = exact * (a_factor * b_factor).double()
        operands = ((kept.cpu() - wide).norm() / wide.norm()).item()
        for adder, (model, every) in ADDERS.items():
            error = tensor_core_matmul(a, b, model, promote_every=every).double() - exact
            yield {
                "adder": adder,
                "length": length,
                "max_over_rms": (error.abs().max() / exact.square().mean().sqrt()).item(),
                "max_relative": (error.abs() / exact.abs()).max().item(),
                "rel_fro": (error.norm() / exact.norm()).item(),
                "bias": (error.mean() / exact.abs().mean()).item(),
                "operands_rel_fro": operands,
            }


def _attentions(settings: Settings, law: str, seed: int) -> Iterator[dict[str, Any]]:
    """Yield the errors of attention, by its keys, factors and who adds."""
    generator = torch.Generator().manual_seed(seed)
    for keys in settings.keys:
        sizes = (("N(0, 1)", settings.queries), ("N(0, 1)", keys), (law, keys))
        q, k, v = (
            _draw(each, 1, 1, length, 64, generator=generator).to(settings.device, torch.bfloat16)
            for each, length in sizes
        )
        exact = golden_attention(q.double(), k.double(), v.double())
        for name, (profile, dot) in ATTENTIONS.items():
            # out is not rounded, so that BF16 does not hide what the sum is
            numerics = PROFILES[profile].with_(dot=dot, output="fp32")
            error = flash_attention(q, k, v, numerics=numerics, engine="twin").double() - exact
            yield {
                "attention": name,
                "keys": keys,
                "rel_fro": (error.norm() / exact.norm()).item(),
                "bias": (error.mean() / exact.abs().mean()).item(),
            }


def _at(law: str, adder: str, length: int = K) -> dict[str, Any]:
    return {"part": "product", "law": law, "adder": adder, "length": length}


def _percent(rows: Rows, figure: str, **only: Any) -> BySeed:
    return {seed: 100 * value for seed, value in by_seed(rows, figure, **only).items()}


def _out(rows: Rows, law: str, attention: str, keys: int) -> BySeed:
    only = {"part": "attention", "law": law, "attention": attention, "keys": keys}
    return by_seed(rows, "rel_fro", **only)


def _published(rows: Rows, lengths: tuple[int, ...]) -> list[StatedTest]:
    """State how far the tensor core alone errs, that K makes it worse, and that FP32 cures it."""
    nearly = partial(mean_within, unit="%", above=2 / 1.5, below=2 * 1.5)
    found = [
        nearly(
            f"K = {K}, N(0, 1): the largest error is nearly 2 % of the results' RMS",
            _percent(rows, "max_over_rms", **_at(LAWS[0], ALONE)),
        ),
        nearly(
            f"K = {K}, U(0, 1): the largest error is nearly 2 % of its result",
            _percent(rows, "max_relative", **_at(LAWS[1], ALONE)),
        ),
    ]
    for law in LAWS:
        by_length = {
            f"K = {length}": by_seed(rows, "max_over_rms", **_at(law, ALONE, length))
            for length in lengths
        }
        found.append(monotone(f"{law}: a larger K errs more", by_length, rising=True))
    for law in LAWS:
        left = _percent(rows, "max_over_rms", **_at(law, PROMOTED))
        found.append(
            mean_within(f"{law}: promoted, under 0.1 % is left", left, unit="%", below=0.1)
        )
    return found


def _controls(rows: Rows, keys: tuple[int, ...]) -> list[StatedTest]:
    """State where errors come from, how large they are beside others, and what attention does."""
    (normal, positive), most = LAWS, max(keys)
    wide = [_percent(rows, "max_over_rms", **_at(law, WIDE)) for law in LAWS]
    by_keys = {f"{each} keys": _out(rows, positive, ONE, each) for each in keys}
    bias = partial(_percent, rows, "bias")
    percent = partial(mean_within, unit="%")
    operands, sums = (
        [by_seed(rows, name, **_at(law, ALONE)) for law in LAWS]
        for name in ("operands_rel_fro", "rel_fro")
    )

    def attention(statement: str, law: str, one: str, wide: str, **bounds: float) -> StatedTest:
        both = _out(rows, law, one, most), _out(rows, law, wide, most)
        return ratio_within(f"attention, v in {law}, {most} keys: {statement}", *both, **bounds)

    return [
        percent(
            f"a tensor core of 25 bits errs by under 0.01 %, K = {K}; the larger of both laws",
            {seed: max(x[seed] for x in wide) for seed in wide[0]},
            below=0.01,
        ),
        percent(f"{normal}: no bias", bias(**_at(normal, ALONE)), above=-0.1, below=0.1),
        percent(f"{positive}: results are too small", bias(**_at(positive, ALONE)), below=-1),
        percent(
            f"{positive}: promoted, they are still, by under 0.1 %",
            bias(**_at(positive, PROMOTED)),
            above=-0.1,
            below=0,
        ),
        ratio_within(
            f"{normal}: rounding operands to e4m3 errs over 10 times what the sum errs",
            *(operands[0], sums[0]),
            above=10,
        ),
        ratio_within(f"{positive}: under a tenth of it", operands[1], sums[1], below=0.1),
        attention(
            "the sum changes the error by under 5 %", normal, ONE, ONE_WIDE, above=0.95, below=1.05
        ),
        attention(
            "one factor: it makes it over 10 times as large", positive, ONE, ONE_WIDE, above=10
        ),
        attention("one each 128 keys: under 1.5 times", positive, EACH, EACH_WIDE, below=1.5),
        monotone(f"v in {positive}, one factor: more keys err more", by_keys, rising=True),
    ]


def _in_words(rows: Rows, keys: int) -> str:
    said = []
    for law in LAWS:
        alone = mean(rows, "max_over_rms", **_at(law, ALONE))
        relative = mean(rows, "max_relative", **_at(law, ALONE))
        left = mean(rows, "max_over_rms", **_at(law, PROMOTED))
        said.append(
            f"{law}, K = {K}: largest error {alone:.2%} of the RMS, {relative:.3g} element by "
            f"element; promoted {left:.3%} of the RMS"
        )
    one, each, exact = (
        mean(rows, "rel_fro", part="attention", law=LAWS[1], attention=name, keys=keys)
        for name in (ONE, EACH, ONE_WIDE)
    )
    said.append(
        f"FP8 attention on {keys} keys, v in U(0, 1): out errs by {one:.2%} with one factor a head "
        f"and {each:.2%} with one each 128 keys, {exact:.2%} where sums are in FP32"
    )
    return ". ".join(said)


def draw(rows: Rows) -> Figure:
    """Draw the largest error of a product by K, and the error of attention by keys."""
    figure = new_figure("column", 4.4)
    upper, lower = figure.subplots(2, 1)
    parts = {
        part: [row for row in rows if row["part"] == part] for part in ("product", "attention")
    }
    products = {
        f"{law}, {adder}": values_by(
            parts["product"], "length", "max_over_rms", law=law, adder=adder
        )
        for law in LAWS
        for adder in (ALONE, PROMOTED)
    }
    _panel(upper, products, "K", "largest error / RMS")
    labels = {"one factor a head": ONE, "one each 128 keys": EACH, "FP32 sums": ONE_WIDE}
    attentions = {
        label: values_by(parts["attention"], "keys", "rel_fro", law=LAWS[1], attention=name)
        for label, name in labels.items()
    }
    _panel(lower, attentions, "keys; v in U(0, 1)", "error of out")
    return figure


def _panel(axes: Axes, lines: dict[str, dict[float, list[float]]], x: str, y: str) -> None:
    draw_series(axes, lines, x=x, y=y, log="xy")
    places = sorted({place for line in lines.values() for place in line})
    axes.set_xticks(places, [f"{place:g}" for place in places])
    axes.minorticks_off()
    axes.legend(loc="lower center", bbox_to_anchor=(0.45, 1.0), ncols=2, columnspacing=1.0)
