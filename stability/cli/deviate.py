"""`stability deviate`: the microbenchmark of arXiv 2405.02803 as a command.

Reads lists from the command line, runs every combination, prints one row a result. Leaves out the
measuring (`attention.microbenchmark`), presets' figures (`attention.presets`) and the table.
"""

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console

from attention_kernels.api import Engine
from attention_kernels.machine import versions
from stability.cli.output import print_json
from stability.cli.waterfall_keeping import keep_waterfall, own_numerics
from stability.config.convert import nearest
from stability.metrics.deviation import DEVIATION_METRICS, GOLDEN_METRICS
from stability.probe import published_presets
from stability.probe.attention_inputs import AttentionInputs, read_inputs, round_inputs
from stability.probe.microbenchmark import Problem, measure, waterfall
from stability.report.page.operator_charts import write_sweep_page, write_waterfall_page
from stability.report.terminal.deviation import (
    COLUMNS,
    print_points,
    print_published,
    print_ties,
    print_waterfall,
)
from stability.study.capture import capture

__all__ = ["deviate"]

PRESETS = ("fa3_table3", "tie_bias")


def deviate(
    profile: str = "",
    baseline: str = "plain",
    format: str = "bf16",
    length: str = "512",
    head_dim: str = "64",
    block_q: str = "",
    block_k: str = "",
    distribution: str = "normal",
    seeds: int = 1,
    batch: int = 1,
    heads: int = 4,
    kv_heads: int = 0,
    causal: bool = False,
    window: str = "",
    softcap: float = 0.0,
    scale: float | None = None,
    set: str = "",
    engine: Engine = "auto",
    qkv: str = "",
    checkpoint: str = "",
    layer: int = 0,
    step: int | None = None,
    backward: bool = False,
    waterfall: bool = False,
    record: bool = False,
    preset: str = "",
    columns: str = ",".join(COLUMNS),
    plot: str = "",
    json: bool = False,
) -> int:
    """Measure how far attention at chosen numerics is from the FP64 golden and from a baseline.

    Options that take a list take it with commas; every combination is a point.

    Args:
        profile: flash profiles, e.g. fa2,all_bf16; empty is that of --checkpoint, or fa2
        baseline: baseline profiles, e.g. plain
        format: formats of q, k, v and of what the numerics leave to them, e.g. bf16,fp16,e8m12
        length: query and key lengths
        head_dim: head dims
        block_q: rows of q in a tile; empty is as the profile says
        block_k: rows of k in a tile; empty is as the profile says
        distribution: normal, outliers, uniform or large
        seeds: how many seeds each point is drawn with
        batch: sequences
        heads: query heads
        kv_heads: key and value heads; 0 is as many as query heads
        causal: hide keys after the query
        window: keys before and after the query, e.g. 128,0
        softcap: bound of the scores; 0 is none
        scale: of q k^T; 1/sqrt(head_dim) if not given
        set: fields of the flash numerics, e.g. accumulator=bf16,splits=4
        engine: auto, twin or triton
        qkv: a safetensors file with q, k and v instead of drawn ones
        checkpoint: a run's folder, whose q, k and v at --layer are taken
        layer: the layer of --checkpoint
        step: the snapshot of --checkpoint; the last if not given
        backward: also dq, dk and dv
        waterfall: lower each rounding point alone, then raise each alone
        record: keep the waterfall, under a causal mask, in --checkpoint, for report and figure
        preset: fa3_table3 or tie_bias, a published figure beside the measured one
        columns: metrics to show; baseline/rmse and pair/max_abs are of the other two pairs
        plot: an HTML file for a picture of the first column
        json: print everything as JSON
    """
    console = Console()
    if preset:
        return _preset(preset, engine, json, console)
    if record and not (waterfall and checkpoint):
        raise ValueError("deviate: record must be given with waterfall and checkpoint; add both")
    shown = _columns(columns)
    own_profile, own_changes = own_numerics("" if profile else checkpoint)
    lists = {
        "profile": _words(profile) or [own_profile],
        "baseline": _words(baseline),
        "format": _words(format),
        "length": _integers("length", length),
        "head_dim": _integers("head_dim", head_dim),
        "block_q": _integers("block_q", block_q) or [None],
        "block_k": _integers("block_k", block_k) or [None],
        "distribution": _words(distribution),
        "seed": list(range(seeds)),
    }
    fixed = {
        "batch": batch,
        "heads": heads,
        "kv_heads": kv_heads or None,
        "causal": causal or record,
        "window": _window(window),
        "softcap": softcap,
        "scale": scale,
        "engine": engine,
        "changes": _changes(set) or own_changes,
    }
    problems = [Problem(**dict(zip(lists, x, strict=True)), **fixed) for x in _product(lists)]
    for problem in problems:  # every combination is looked at before the first is run
        problem.numerics().resolve(torch.bfloat16)
        problem.baseline_numerics()
    given = _given(qkv, checkpoint, layer, step)
    if given is not None:
        problems = [dataclasses.replace(problem, **_shape_of(given)) for problem in problems]
    varied = [name for name, values in lists.items() if len(values) > 1]
    if waterfall:
        steps = _waterfall(problems, given, plot, json, console)
        if record:
            keep_waterfall(checkpoint, layer, step, problems[0], steps)
        return 0
    rows = list(_rows(problems, given, backward))
    if plot:
        write_sweep_page(Path(plot), rows, varied, shown[0])
    if json:
        print_json({"versions": versions(), "rows": rows})
    else:
        print_points(rows, varied, shown, console)
    return 0


def _rows(
    problems: list[Problem], given: AttentionInputs | None, backward: bool
) -> Iterator[dict[str, Any]]:
    for problem in problems:
        inputs = (
            None if given is None else round_inputs((x.double() for x in given), problem.format)
        )
        for figures in measure(problem, backward=backward, inputs=inputs):
            yield {
                "point": dataclasses.asdict(problem),
                "numerics": problem.numerics().to_dict(),
                "baseline_numerics": problem.baseline_numerics().to_dict(),
                **figures.to_dict(),
            }


def _waterfall(
    problems: list[Problem],
    given: AttentionInputs | None,
    plot: str,
    as_json: bool,
    console: Console,
) -> list[dict[str, Any]]:
    if len(problems) > 1:
        raise ValueError(f"deviate: waterfall takes one point, got {len(problems)} combinations")
    (problem,) = problems
    inputs = None if given is None else round_inputs((x.double() for x in given), problem.format)
    steps = [dataclasses.asdict(step) for step in waterfall(problem, inputs)]
    if plot:
        write_waterfall_page(Path(plot), steps)
    if as_json:
        point = dataclasses.asdict(problem)
        numerics = problem.numerics().to_dict()
        print_json({"versions": versions(), "point": point, "numerics": numerics, "steps": steps})
    else:
        print_waterfall(steps, console)
    return steps


def _preset(name: str, engine: Engine, as_json: bool, console: Console) -> int:
    if name not in PRESETS:
        raise ValueError(
            f"deviate: preset must be one of {', '.join(PRESETS)}, got {name!r}; "
            f"nearest: {nearest(name, PRESETS)}"
        )
    if name == "tie_bias":
        engine = "twin" if engine == "auto" else engine
        heads = 512 if engine == "twin" or torch.cuda.is_available() else 256
        rows = [
            dataclasses.asdict(
                published_presets.tie_bias(profile, changes, engine, sign, heads=heads)
            )
            for profile, changes in published_presets.TIE_CASES
            for sign in (-1, 1)
        ]
        print_json({"rows": rows}) if as_json else print_ties(rows, console)
        return 0
    rows = []
    for cell in published_presets.FA3_TABLE3:
        (figures,) = measure(published_presets.fa3_table3(cell), backward=False)
        printed, measured = published_presets.published_and_measured(cell, figures)
        at = {"row": cell.row, "column": cell.column, "profile": cell.profile}
        rows.append({**at, "published": printed, "measured": measured})
    title = "FlashAttention-3 (arXiv 2407.08608), table 3: RMSE against FP64"
    print_json({"rows": rows}) if as_json else print_published(rows, title, console)
    return 0


def _product(lists: dict[str, list[Any]]) -> Iterator[tuple[Any, ...]]:
    return itertools.product(*lists.values())


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _integers(name: str, text: str) -> list[int]:
    try:
        values = [int(word) for word in _words(text)]
    except ValueError as error:
        raise ValueError(f"deviate: {name} must be integers with commas, got {text!r}") from error
    if any(value < 1 for value in values):
        raise ValueError(f"deviate: {name} must be at least 1, got {text!r}")
    return values


def _window(text: str) -> tuple[int | None, int | None] | None:
    if not text:
        return None
    words = [word.strip() for word in text.split(",")]
    if len(words) != 2 or not all(word.isdigit() or word in ("", "none") for word in words):
        raise ValueError(
            f"deviate: window must be LEFT,RIGHT, e.g. 128,0 or 128,none, got {text!r}"
        )
    left, right = (int(word) if word.isdigit() else None for word in words)
    return left, right


def _changes(text: str) -> tuple[tuple[str, Any], ...]:
    changes = []
    for word in _words(text):
        name, equals, value = word.partition("=")
        if not equals:
            raise ValueError(f"deviate: set must be FIELD=VALUE with commas, got {word!r}")
        changes.append((name.strip(), yaml.safe_load(value)))
    return tuple(changes)


def _columns(text: str) -> list[str]:
    names = _words(text)
    known = [*DEVIATION_METRICS, *GOLDEN_METRICS]
    for name in names:
        group, _, metric = name.rpartition("/")
        if metric not in known or group not in ("", "candidate", "baseline", "pair", "golden"):
            raise ValueError(
                f"deviate: columns must be metrics, got {name!r}; nearest: {nearest(metric, known)}"
            )
    return names or list(COLUMNS)


def _shape_of(given: AttentionInputs) -> dict[str, Any]:
    batch, heads, length, head_dim = given.q.shape
    return {
        "batch": batch,
        "heads": heads,
        "kv_heads": given.k.shape[1],
        "length": length,
        "key_len": given.k.shape[2],
        "head_dim": head_dim,
        "distribution": "given",
    }


def _given(qkv: str, checkpoint: str, layer: int, step: int | None) -> AttentionInputs | None:
    if qkv and checkpoint:
        raise ValueError("deviate: qkv and checkpoint must not both be given")
    if qkv:
        return read_inputs(Path(qkv), "fp64")
    return capture(Path(checkpoint), layer, step) if checkpoint else None
