"""Time and memory of SDPA and of un-padded attention over length, through a Llama of transformers.

Claim: below about 3000 tokens SDPA is faster than FlashAttention-2, which un-pads, and takes less
    memory.
Source: transformers, issue 36585
Published: below about 3000 tokens SDPA was faster and used less memory; no figures, no shape
Varies: the length; the implementation: transformers' eager (padded, to 2048 tokens), sdpa, and
    flash_attention_2. Where that is not installed, un-padded attention stands for it: valid tokens
    are packed, attended, and scattered back into zeros; on the CPU by PyTorch's flash kernel, one
    call a sequence, on CUDA by profile fa2 in Triton. One of two sequences is padded on the right,
    by 25 to 75 % of its tokens, by one token, or not at all
Measured: seconds (the better of two calls) and peak allocation of a forward of a one-layer model in
    BF16, in turns on the same batch, 5 batches; as ratios to sdpa with the same padding
Refuted if: at some measured length below 3000 tokens SDPA is slower or takes more memory
Sizes: cpu: width 512, 8 heads on 4, 256 to 4096 tokens; gpu: width 2048, 32 heads on 16, 256 to
    16384 tokens; quick: width 128, 64 and 128 tokens

    stability experiment padding_cost [--size cpu|gpu]
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import geometric_mean
from typing import Any

import torch
from matplotlib.figure import Figure

from experiments.kit.cost import peak_allocation
from experiments.kit.padded_llama import (
    VOCABULARY,
    flash_attention_2,
    padding_mask,
    random_llama,
    register_unpadded,
)
from experiments.kit.plots import draw_series
from experiments.kit.record import Findings
from experiments.kit.rows import Rows, by_seed, chosen, over
from experiments.kit.stated_tests import StatedTest, mean_within
from stability.report.paper.style import GREY, log_axis, new_figure

SHORT = 3000
EAGER_TO = 2048
BATCHES = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How large the model is, and at which lengths."""

    width: int
    heads: int
    lengths: tuple[int, ...]
    device: str = "cpu"


SIZES = {
    "quick": Settings(width=128, heads=2, lengths=(64, 128)),
    "cpu": Settings(width=512, heads=8, lengths=(256, 512, 1024, 2048, 4096)),
    "gpu": Settings(
        width=2048, heads=32, lengths=(256, 512, 1024, 2048, 4096, 8192, 16384), device="cuda"
    ),
}


def measure(settings: Settings) -> Findings:
    """Time each implementation, and count its memory, at each length, padding and batch."""
    flash = flash_attention_2(settings.device)
    on_gpu = settings.device == "cuda"
    stand_in = partial(register_unpadded, "flash:fa2" if on_gpu else "sdpa", packed=on_gpu)
    names = {"eager": "eager", "sdpa": "sdpa", "un-padded": flash or stand_in()}
    size: dict[str, Any] = {"width": settings.width, "heads": settings.heads, "layers": 1}
    model = random_llama(**size, dtype=torch.bfloat16, seed=0, device=settings.device)
    rows = [
        row
        for length in settings.lengths
        for padding in ("padded", "one", "none")
        for row in _at_length(model, names, length, padding, settings.device)
    ]
    return Findings(
        measured=_sentence(rows, one_kernel=not on_gpu),
        published=_published(rows),
        controls=[] if on_gpu else _controls(rows),
        rows=rows,
        explain=partial(_explanation, rows),
    )


def _at_length(
    model: Any, names: Mapping[str, str], length: int, padding: str, device: str
) -> list[dict[str, Any]]:
    """Return a row an implementation and batch, after a batch that warms up."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for batch in range(-1, BATCHES):
        tokens = torch.randint(VOCABULARY, (2, length), generator=generator).to(device)
        share = 0.25 + 0.5 * torch.rand(1, generator=generator).item()
        count = {"padded": int(share * length), "one": 1, "none": 0}[padding]
        given = padding_mask(length, (0, count), "right").to(device) if count else None
        for name, implementation in names.items():
            if name == "eager" and (length > EAGER_TO or padding != "padded"):
                continue
            model.set_attn_implementation(implementation)
            run = partial(model, input_ids=tokens, attention_mask=given, use_cache=False)
            with torch.no_grad():
                mib = peak_allocation(run, device) / 2**20
                seconds = min(_seconds(run, device) for _ in range(2))
            figures = {"seconds": seconds, "mib": mib}
            rows.append({"length": length, "padding": padding, "seed": batch} | figures)
            rows[-1]["implementation"] = name
    return [row for row in rows if row["seed"] >= 0]


def _seconds(call: Callable[[], object], device: str) -> float:
    on_gpu = device == "cuda"
    if on_gpu:
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    call()
    if on_gpu:
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def _ratios(
    rows: Rows, what: str, length: float, padding: str, name: str = "un-padded"
) -> dict[int, float]:
    """Return `what` of an implementation over that of sdpa, by batch."""
    at: dict[str, Any] = {"length": length, "padding": padding}
    theirs, sdpa = (by_seed(rows, what, **at, implementation=each) for each in (name, "sdpa"))
    return over(theirs, sdpa)


def _over_lengths(
    rows: Rows, what: str, padding: str, pick: Callable[..., float]
) -> dict[int, float]:
    """Return by batch what `pick` makes of the ratios at all lengths."""
    lengths = sorted({row["length"] for row in rows})
    found = [_ratios(rows, what, length, padding) for length in lengths]
    return {seed: pick([each[seed] for each in found]) for seed in found[0]}


def _published(rows: Rows) -> list[StatedTest]:
    short = sorted({row["length"] for row in rows if row["length"] < SHORT})
    return [
        mean_within(
            f"{length} tokens: SDPA {words}: un-padded / SDPA",
            _ratios(rows, what, length, "padded"),
            unit="x",
            above=1,
        )
        for what, words in (("seconds", "is faster"), ("mib", "takes less memory"))
        for length in short
    ]


def _controls(rows: Rows) -> list[StatedTest]:
    """State what holds where both implementations call one kernel, which is on the CPU."""
    within = partial(mean_within, unit="x")
    words = "without padding both are one kernel, and take the same"
    return [
        within(
            f"{words} time: un-padded / SDPA, geometric mean of lengths",
            _over_lengths(rows, "seconds", "none", geometric_mean),
            above=0.8,
            below=1.25,
        ),
        within(
            f"{words} memory: largest un-padded / SDPA",
            _over_lengths(rows, "mib", "none", max),
            above=0.98,
            below=1.02,
        ),
        within(
            "one token of padding gives SDPA a mask and un-padding nothing to save, and SDPA takes "
            "more memory at every length: largest un-padded / SDPA",
            _over_lengths(rows, "mib", "one", max),
            below=1,
        ),
    ]


def _mean(rows: Rows, what: str, length: float, padding: str) -> float:
    ratios = _ratios(rows, what, length, padding)
    return sum(ratios.values()) / len(ratios)


def _all(rows: Rows, what: str, padding: str) -> str:
    lengths = sorted({row["length"] for row in rows})
    return ", ".join(f"{_mean(rows, what, length, padding):.2f}x" for length in lengths)


def _sentence(rows: Rows, *, one_kernel: bool) -> str:
    lengths = ", ".join(str(length) for length in sorted({row["length"] for row in rows}))
    stands = " (PyTorch's kernel, a call a sequence, for FlashAttention-2)" if one_kernel else ""
    return (
        f"un-padded{stands} / SDPA at {lengths} tokens: time {_all(rows, 'seconds', 'padded')}; "
        f"memory {_all(rows, 'mib', 'padded')}"
    )


def _explanation(rows: Rows) -> str:
    lengths = sorted({row["length"] for row in rows})
    ahead = [length for length in lengths if _mean(rows, "seconds", length, "one") > 1]
    return (
        "of padding SDPA gets a mask of length x length, un-padding none. With one token of "
        f"padding, so none to save, un-padded / SDPA is {_all(rows, 'seconds', 'one')} in time, "
        f"SDPA ahead at {', '.join(map(str, ahead)) or 'no'} tokens, and "
        f"{_all(rows, 'mib', 'one')} in memory; without a mask {_all(rows, 'seconds', 'none')} and "
        f"{_all(rows, 'mib', 'none')}"
    )


def draw(rows: Rows) -> Figure:
    """Draw ratios of time and memory to SDPA over length."""
    figure = new_figure("column", 4.6)
    lines = {
        "eager, 25 to 75 % padding": ("eager", "padded"),
        "un-padded, 25 to 75 % padding": ("un-padded", "padded"),
        "un-padded, one token of padding": ("un-padded", "one"),
        "un-padded, no padding": ("un-padded", "none"),
    }
    panels = {"seconds": "time / SDPA's", "mib": "peak memory / SDPA's"}
    for axes, (what, label) in zip(figure.subplots(2, 1, sharex=True), panels.items(), strict=True):
        series = {}
        for name, (implementation, padding) in lines.items():
            found = chosen(rows, implementation=implementation, padding=padding)
            lengths = sorted({float(row["length"]) for row in found})
            series[name] = {
                length: list(_ratios(rows, what, length, padding, implementation).values())
                for length in lengths
            }
        draw_series(axes, series)
        log_axis(axes, "x")
        log_axis(axes, "y")
        axes.axhline(1, color=GREY, linewidth=0.8)
        axes.axvline(SHORT, color=GREY, linewidth=0.8, linestyle=":")
        axes.set_ylabel(label)
    axes.set_xlabel("length (tokens)")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=1)
    return figure
