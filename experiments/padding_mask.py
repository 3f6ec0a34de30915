"""Eager, SDPA and un-padded attention on padded batches, through a Llama of transformers.

Claim: SDPA and FlashAttention-2 agree but in padded rows, as FlashAttention-2 un-pads and writes
    zeros there.
Source: transformers, issue 36585
Published: no mask: agree at atol 1e-1; padding: differ only in padded rows, where FlashAttention-2
    has zeros; non-padded positions agree at rtol = atol = 4e-2
Varies: the implementation: transformers' eager and sdpa; un-padded attention, which packs the valid
    tokens, attends them and scatters them back into zeros, by profile fa2 with `cu_seqlens` (in
    BF16 it rounds P and out) and by PyTorch's own choice of kernel, one call a sequence; and
    flash_attention_2 where it is installed, else fa2 stands for it. No padding, left, right; the
    seed
Measured: the smallest t for which |a - b| <= t + t |b| holds, of the last hidden state and of the
    first layer's attention; the largest padded row of any layer's attention
Refuted if: valid positions need more than 4e-2, or padded rows need no more
Sizes: cpu: BF16, 4 layers, width 256, 4 heads on 2, transformers' default law of weights, 4
    sequences of 256 tokens, 8 seeds; gpu: width 1024, 16 heads on 8, 1024 tokens; quick: width 64,
    48 tokens, 5 seeds

    stability experiment padding_mask [--size cpu|gpu]
"""

import itertools
import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from experiments.kit.padded_llama import (
    VOCABULARY,
    flash_attention_2,
    hidden_states,
    padding_mask,
    random_llama,
    register_opened,
    register_unpadded,
)
from experiments.kit.plots import draw_dots
from experiments.kit.record import Findings
from experiments.kit.rows import Rows, by_seed, chosen, over
from experiments.kit.stated_tests import StatedTest, equal, every
from stability.report.paper.style import GREY, log_axis, new_figure

FORMATS = {"bf16": torch.bfloat16, "fp32": torch.float32}
SIDES = ("none", "left", "right")
PADDED = SIDES[1:]


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How large the model and the batch, how many seeds."""

    width: int
    heads: int
    length: int
    seeds: int = 8
    device: str = "cpu"


SIZES = {
    "quick": Settings(width=64, heads=4, length=48, seeds=5),
    "cpu": Settings(width=256, heads=4, length=256),
    "gpu": Settings(width=1024, heads=16, length=1024, device="cuda"),
}


def measure(settings: Settings) -> Findings:
    """Compare each pair of implementations, in each format, at each seed and side of padding."""
    names = {"eager": "eager", "sdpa": "sdpa", "opened": register_opened()}
    names["un-padded fa2"] = register_unpadded("flash:fa2")
    names["un-padded torch"] = register_unpadded("sdpa", packed=False)
    flash = flash_attention_2(settings.device)
    takes = {"fp32": names, "bf16": {**names, "FlashAttention-2": flash} if flash else names}
    rows = [
        {"format": format, "seed": seed, "side": side, **row}
        for format in FORMATS
        for seed in range(settings.seeds)
        for side in SIDES
        for row in _compared(settings, takes[format], format, seed, side)
    ]
    unpadded = "FlashAttention-2" if flash else "un-padded fa2"
    return Findings(
        measured=_sentence(rows, unpadded),
        published=_published(rows, unpadded),
        controls=_controls(rows, unpadded),
        rows=rows,
        explain=partial(_explanation, rows, unpadded),
    )


def _compared(
    settings: Settings, names: dict[str, str], format: str, seed: int, side: Any
) -> list[dict[str, Any]]:
    """Return a row a pair, and one an implementation with the largest of its padded rows."""
    device, length = settings.device, settings.length
    model = random_llama(
        width=settings.width, heads=settings.heads, dtype=FORMATS[format], seed=seed, device=device
    )
    mask = padding_mask(length, (0, length // 5, 2 * length // 5, 3 * length // 4), side).to(device)
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, mask.shape, generator=generator).to(device)
    valid = mask.bool()
    run = partial(hidden_states, model, tokens=tokens, mask=None if side == "none" else mask)
    plain = {name: run(implementation) for name, implementation in names.items()}
    again = names if side != "none" and format == "bf16" else {}
    zeroed = {name: run(implementation, zeroed=True) for name, implementation in again.items()}
    rows: list[dict[str, Any]] = []
    for pair in itertools.combinations(names, 2):
        a, b = (plain[name] for name in pair)
        row = {"pair": ", ".join(pair), "valid": _needed(a.hidden, b.hidden, valid)}
        row["max_abs"] = (a.hidden - b.hidden)[valid].abs().max().item()
        row["attention_valid"] = _needed(a.attention[0], b.attention[0], valid)
        if side != "none":
            row["padded"] = _needed(a.hidden, b.hidden, ~valid)
            row["attention_padded"] = _needed(a.attention[0], b.attention[0], ~valid)
        if again:
            a, b = (zeroed[name] for name in pair)
            row["zeroed"] = _needed(a.hidden, b.hidden, torch.ones_like(valid))
        rows.append(row)
    if side != "none":
        for name, states in plain.items():
            padded = torch.stack(states.attention)[:, ~valid]
            rows.append({"implementation": name, "padded_output": padded.abs().max().item()})
    return rows


def _needed(a: Tensor, b: Tensor, rows: Tensor) -> float:
    """Return the least t for which |a - b| <= t + t |b| in all of `rows`."""
    return ((a - b).abs() / (1 + b.abs()))[rows].max().item()


def _published(rows: Rows, unpadded: str) -> list[StatedTest]:
    pair: dict[str, Any] = {"format": "bf16", "pair": f"sdpa, {unpadded}"}
    apart = by_seed(rows, "max_abs", **pair, side="none")
    words = "no padding: SDPA and FlashAttention-2 agree at atol 1e-1: max |a - b|"
    tests = [every(words, apart.values(), below=1e-1)]
    for side in PADDED:
        values = {what: by_seed(rows, what, **pair, side=side) for what in ("valid", "padded")}
        agree = f"{side} padding: valid positions agree at rtol = atol = 4e-2; needed"
        tests.append(every(agree, values["valid"].values(), below=4e-2))
        differ = f"{side} padding: padded rows do not agree at 4e-2; needed"
        tests.append(every(differ, values["padded"].values(), above=4e-2))
    zeros = chosen(rows, format="bf16", implementation=unpadded)
    written = "FlashAttention-2's padded rows of attention are zeros, in all layers"
    return [*tests, equal(written, (row["padded_output"] for row in zeros))]


def _controls(rows: Rows, unpadded: str) -> list[StatedTest]:
    bf16, fp32 = (
        [row for row in rows if row["format"] == name and "pair" in row] for name in FORMATS
    )
    pair: dict[str, Any] = {"format": "bf16", "pair": f"sdpa, {unpadded}"}
    opened = {**pair, "pair": f"opened, {unpadded}"}
    sdpa: dict[str, Any] = {"format": "bf16", "side": "right", "implementation": "sdpa"}
    right = (
        by_seed(rows, f"attention_{where}", **pair, side="right") for where in ("padded", "valid")
    )
    return [
        every(
            "every pair, eager included, agrees at valid positions at 4e-2; most needed",
            by_seed(bf16, "valid", max).values(),
            below=4e-2,
        ),
        every(
            "in FP32 every pair agrees at valid positions at 1e-4, so that the rest is rounding",
            by_seed(fp32, "valid", max).values(),
            below=1e-4,
        ),
        every(
            "right padding: SDPA's padded rows of attention are not zeros; largest",
            by_seed(rows, "padded_output", **sdpa).values(),
            above=0,
        ),
        every(
            "right padding, attention of the first layer: needed in padded rows / in valid ones",
            over(*right).values(),
            above=10,
        ),
        every(
            "with padded rows of both set to zero they agree everywhere at 4e-2; most needed",
            by_seed([row for row in rows if row["side"] in PADDED], "zeroed", max, **pair).values(),
            below=4e-2,
        ),
        every(
            "left padding, SDPA with rows that see no key opened: padded rows differ; needed",
            by_seed(rows, "padded", **opened, side="left").values(),
            above=4e-2,
        ),
    ]


def _sentence(rows: Rows, unpadded: str) -> str:
    def most(what: str, side: str) -> str:
        values = by_seed(rows, what, format="bf16", pair=f"sdpa, {unpadded}", side=side).values()
        return f"{max(values):.2g}"

    sides = "; ".join(
        f"{side} padding: {most('valid', side)} at valid positions, {most('padded', side)} in "
        f"padded rows, {most('zeroed', side)} with zeros in both"
        for side in PADDED
    )
    return f"no padding: max |a - b| {most('max_abs', 'none')}; rtol = atol needed: {sides}"


def _explanation(rows: Rows, unpadded: str) -> str:
    left: dict[str, Any] = {"format": "bf16", "side": "left"}
    sdpa = max(by_seed(rows, "padded_output", **left, implementation="sdpa").values())
    same = max(by_seed(rows, "padded", **left, pair=f"sdpa, {unpadded}").values())
    opened = min(by_seed(rows, "padded", **left, pair=f"opened, {unpadded}").values())
    return (
        f"a row padded on the left sees no key, and there this SDPA's attention is {sdpa:.2g}, as "
        f"un-padding's is 0: padded rows differ by {same:.2g}. With such rows opened to all keys, "
        f"as older versions of transformers had them, they differ by {opened:.2g} and more"
    )


def draw(rows: Rows) -> Figure:
    """Draw the tolerance that each pair with un-padded fa2 needs, by where it is taken."""
    figure = new_figure("column", 3.4)
    axes = figure.add_subplot()
    bf16: dict[str, Any] = {"format": "bf16"}
    places = {"no padding": ("none", "valid")}
    for side in PADDED:
        places |= {f"{side}: {what}": (side, what) for what in ("valid", "padded", "zeroed")}
    series = {
        pair.replace(",", " and"): {
            place: [row[value] or math.nan for row in chosen(rows, **bf16, side=side, pair=pair)]
            for place, (side, value) in places.items()
        }
        for pair in ("eager, un-padded fa2", "sdpa, un-padded fa2")
    }
    draw_dots(axes, series)
    axes.axvline(4e-2, color=GREY, linewidth=0.8, label="4e-2, published")
    log_axis(axes, "x")
    axes.set_xlabel("rtol = atol needed, last hidden state;\na dot a seed, none where it is 0")
    axes.legend(loc="lower center", bbox_to_anchor=(0.4, 1))
    return figure
