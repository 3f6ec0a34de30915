"""`stability deviate`: measures attention numerics against FP64, as arXiv 2405.02803 does.

It reads lists from the command line, measures every combination on one attention call
(`probe.microbenchmark`) and prints a row for each result. With --waterfall it lowers and raises the
rounding points of one combination one by one, and --record keeps that in the run whose q, k and v
it was measured on. With --preset it puts published numbers beside measured ones.
"""

import dataclasses
import itertools
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import yaml

from attention_kernels.profiles import BASELINE_PROFILES, DEFAULT_FLASH_PROFILE, PROFILES
from stability.cli.output import HOLDS, of_the_verb, print_json
from stability.cli.retrained import with_snapshot
from stability.config.convert import nearest
from stability.records.metric_table import DEVIATION_METRICS
from stability.records.paths import RunPaths, is_run, run_at

if TYPE_CHECKING:
    from attention_kernels.api import Engine
    from stability.probe.attention_inputs import AttentionInputs
    from stability.probe.microbenchmark import Problem
    from stability.records.waterfall_record import WaterfallPoint, WaterfallStep

__all__ = ["deviate"]

PRESETS = ("fa3_table3", "tie_bias")


def deviate(
    profile: str = "",
    baseline: str = "plain",
    format: str = "bf16",
    length: str = "512",
    head_dim: str = "64",
    value_dim: int = 0,
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
    engine: Literal["auto", "twin", "triton"] = "auto",
    qkv: str = "",
    checkpoint: str = "",
    layer: int = 0,
    step: int | None = None,
    backward: bool = False,
    waterfall: bool = False,
    record: bool = False,
    preset: str = "",
    columns: str = "",
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
        value_dim: head_dim of v and out; 0 for that of q and k
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
        step: the snapshot of --checkpoint; the last if not given. One that the study's keep has
            dropped is had again by training the run anew, in runs/<study>/forks/<arm>
        backward: also dq, dk and dv
        waterfall: lower each rounding point alone, then raise each alone
        record: keep the waterfall, under a causal mask, in --checkpoint, for report and figure
        preset: fa3_table3 or tie_bias, a published figure beside the measured one
        columns: metrics to show, e.g. rmse,bias_ulp; baseline/rmse and pair/max_abs are of the
            other two pairs
        plot: an HTML file for a picture of the first column
        json: print everything as JSON
    """
    if preset:
        return _preset(preset, engine, json)
    if record and not (waterfall and checkpoint):
        raise ValueError("deviate: record must be given with waterfall and checkpoint; add both")
    if qkv and checkpoint:
        raise ValueError("deviate: qkv and checkpoint must not both be given")
    _check_least(1, seeds=seeds, batch=batch, heads=heads)
    _check_least(0, value_dim=value_dim, kv_heads=kv_heads)
    lists = {
        "profile": _profiles("profile", profile, PROFILES),
        "baseline": _profiles("baseline", baseline, BASELINE_PROFILES),
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
        "value_dim": value_dim or None,
        "causal": causal or record,
        "window": _window(window),
        "softcap": softcap,
        "scale": scale,
        "engine": engine,
        "changes": _changes(set),
    }
    shown = _columns(columns)
    own_profile, own_changes = _own_numerics("" if profile else checkpoint)
    lists["profile"] = lists["profile"] or [own_profile]
    fixed["changes"] = fixed["changes"] or own_changes
    with _naming(""):
        problems = _problems(lists, fixed)
    with _naming(qkv or checkpoint):
        step = _last_step(checkpoint) if checkpoint and step is None else step
        given = _given(qkv, checkpoint, layer, step)
        if given is not None:
            problems = [dataclasses.replace(problem, **_shape_of(given)) for problem in problems]
        if waterfall:
            steps = _waterfall(problems, given, plot, json)
            if record:
                assert step is not None
                _record_waterfall(checkpoint, layer, step, problems[0], steps)
            return HOLDS
        varied = [name for name, values in lists.items() if len(values) > 1]
        _show(list(_rows(problems, given, backward)), varied, shown, plot, json)
    return HOLDS


@contextmanager
def _naming(source: str) -> Iterator[None]:
    """Name the file or the run that q, k and v come from in what attention refuses about them.

    A class of numerics that refuses a value names itself, and so does a function of attention; the
    user gave the verb an option.
    """
    try:
        yield
    except ValueError as error:
        said = re.sub(r"^[A-Z]\w+(\.with_)?: ", "deviate: ", of_the_verb(str(error), "deviate"))
        if source and source not in said:
            said = f"{source}: {said.removeprefix('deviate: ')}"
        raise ValueError(said) from error


def _problems(lists: dict[str, list[Any]], fixed: dict[str, Any]) -> list["Problem"]:
    """Return every combination of `lists`; all are checked before the first is measured."""
    import torch  # heavy

    from stability.probe.microbenchmark import Problem

    problems = [
        Problem(**dict(zip(lists, values, strict=True)), **fixed)
        for values in itertools.product(*lists.values())
    ]
    for problem in problems:
        problem.numerics().resolve(torch.bfloat16)
        problem.baseline_numerics()
    return problems


def _rows(
    problems: list["Problem"], given: "AttentionInputs | None", backward: bool
) -> Iterator[dict[str, Any]]:
    from stability.probe.microbenchmark import measure  # heavy: torch

    for problem in problems:
        for measured in measure(problem, backward=backward, inputs=_inputs_of(problem, given)):
            yield {
                "point": dataclasses.asdict(problem),
                "numerics": problem.numerics().to_dict(),
                "baseline_numerics": problem.baseline_numerics().to_dict(),
                **measured.to_dict(),
            }


def _show(
    rows: list[dict[str, Any]], varied: list[str], shown: list[str], plot: str, as_json: bool
) -> None:
    from rich.console import Console  # heavy

    from attention_kernels.machine import versions
    from stability.report.terminal.deviation import print_points

    if plot:
        from stability.report.page.operator_charts import write_sweep_page  # heavy: plotly

        write_sweep_page(Path(plot), rows, varied, shown[0])
    if as_json:
        print_json({"versions": versions(), "rows": rows})
    else:
        print_points(rows, varied, shown, Console())


def _waterfall(
    problems: list["Problem"], given: "AttentionInputs | None", plot: str, as_json: bool
) -> list[dict[str, Any]]:
    """Measure, draw and print the waterfall of the only problem; return its steps."""
    if len(problems) > 1:
        raise ValueError(f"deviate: waterfall takes one point, got {len(problems)} combinations")
    from rich.console import Console  # heavy, and the rest needs torch

    from attention_kernels.machine import versions
    from stability.probe.microbenchmark import waterfall
    from stability.report.terminal.deviation import print_waterfall

    (problem,) = problems
    steps = [dataclasses.asdict(step) for step in waterfall(problem, _inputs_of(problem, given))]
    if plot:
        from stability.report.page.operator_charts import write_waterfall_page  # heavy: plotly

        write_waterfall_page(Path(plot), steps)
    if as_json:
        point = dataclasses.asdict(problem)
        numerics = problem.numerics().to_dict()
        print_json({"versions": versions(), "point": point, "numerics": numerics, "steps": steps})
    else:
        print_waterfall(steps, Console())
    return steps


def _record_waterfall(
    checkpoint: str, layer: int, step: int, problem: "Problem", steps: list[dict[str, Any]]
) -> None:
    """Write the waterfall of `problem` into the run `checkpoint`, and say where."""
    from rich.console import Console  # heavy

    from attention_kernels.machine import versions
    from stability.records.waterfall_record import WaterfallRecord, write_waterfall

    run = RunPaths(Path(checkpoint))
    record = WaterfallRecord(
        profile=problem.profile,
        format=problem.format,
        layer=layer,
        step=step,
        point=cast("WaterfallPoint", dataclasses.asdict(problem)),
        numerics=problem.numerics().to_dict(),
        steps=cast("list[WaterfallStep]", steps),
        versions=versions(),
    )
    kept = write_waterfall(run, record)
    # on standard error: --json keeps standard output for itself
    Console(stderr=True).print(f"kept in {kept}", soft_wrap=True, highlight=False, markup=False)


def _preset(name: str, engine: "Engine", as_json: bool) -> int:
    """Print a published result beside ours."""
    if name not in PRESETS:
        raise ValueError(
            f"deviate: preset must be one of {', '.join(PRESETS)}, got {name!r}; "
            f"nearest: {nearest(name, PRESETS)}"
        )
    from rich.console import Console  # heavy, and the rest needs torch

    from stability.report.terminal.deviation import print_published, print_ties

    if name == "tie_bias":
        rows = _tie_rows(engine)
        print_json({"rows": rows}) if as_json else print_ties(rows, Console())
        return HOLDS
    rows = _fa3_table3_rows()
    title = "FlashAttention-3 (arXiv 2407.08608), table 3: RMSE against FP64"
    print_json({"rows": rows}) if as_json else print_published(rows, title, Console())
    return HOLDS


def _tie_rows(engine: "Engine") -> list[dict[str, Any]]:
    import torch  # heavy

    from stability.probe import published_presets

    engine = "twin" if engine == "auto" else engine
    heads = 512 if engine == "twin" or torch.cuda.is_available() else 256
    return [
        dataclasses.asdict(published_presets.tie_bias(profile, changes, engine, sign, heads=heads))
        for profile, changes in published_presets.TIE_CASES
        for sign in (-1, 1)
    ]


def _fa3_table3_rows() -> list[dict[str, Any]]:
    from stability.probe import published_presets  # heavy: torch
    from stability.probe.microbenchmark import measure

    rows = []
    for cell in published_presets.FA3_TABLE3:
        (measured,) = measure(published_presets.fa3_table3(cell), backward=False)
        theirs, ours = published_presets.published_and_measured(cell, measured)
        at = {"row": cell.row, "column": cell.column, "profile": cell.profile}
        rows.append({**at, "published": theirs, "measured": ours})
    return rows


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


def _check_least(least: int, **numbers: int) -> None:
    for name, value in numbers.items():
        if value < least:
            raise ValueError(f"deviate: {name} must be at least {least}, got {value}")


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


def _profiles(option: str, text: str, known: Mapping[str, Any]) -> list[str]:
    names = _words(text)
    for name in names:
        if name not in known:
            raise ValueError(
                f"deviate: {option} must be a known profile, got {name!r}; "
                f"nearest: {nearest(name, known)}"
            )
    return names


def _own_numerics(checkpoint: str) -> tuple[str, tuple[tuple[str, Any], ...]]:
    """Return the flash profile that a run trains with, and what its config changes in it.

    That is `fa2` without changes for a run with another attention, and without a run.
    """
    from stability.records.manifest import read_manifest  # heavy: torch

    manifest = RunPaths(Path(checkpoint)).manifest
    if not checkpoint or not manifest.is_file():  # `capture` reports a folder that holds no run
        return DEFAULT_FLASH_PROFILE, ()
    attention = read_manifest(manifest).config.get("attention", {})
    if attention.get("implementation") != "flash":
        return DEFAULT_FLASH_PROFILE, ()
    profile = attention.get("profile") or DEFAULT_FLASH_PROFILE
    return profile, tuple(attention.get("numerics", {}).items())


def _columns(text: str) -> list[str]:
    from stability.report.terminal.deviation import COLUMNS  # heavy

    names = _words(text)
    for name in names:
        group, _, metric = name.rpartition("/")
        groups = ("", "candidate", "baseline", "pair", "golden")
        if metric not in DEVIATION_METRICS or group not in groups:
            raise ValueError(
                f"deviate: columns must be metrics, got {name!r}; nearest: "
                f"{nearest(metric, DEVIATION_METRICS)}"
            )
    return names or list(COLUMNS)


def _given(qkv: str, checkpoint: str, layer: int, step: int | None) -> "AttentionInputs | None":
    """Return q, k and v of a file or of a run; None if they are to be drawn."""
    if qkv:
        from stability.probe.attention_inputs import read_inputs  # heavy: torch

        return read_inputs(Path(qkv), "fp64")
    if checkpoint:
        run_at(Path(checkpoint), "deviate: checkpoint")
        from stability.study.capture import capture  # heavy: torch, Lightning

        return capture(with_snapshot(Path(checkpoint), step), layer, step)
    return None


def _last_step(checkpoint: str) -> int | None:
    """Return the last step that a run has weights of, or had; None if it never had any."""
    from stability.records.run_files import recorded_steps

    run = RunPaths(Path(checkpoint))
    return max(recorded_steps(run), default=None) if is_run(run.root) else None


def _inputs_of(problem: "Problem", given: "AttentionInputs | None") -> "AttentionInputs | None":
    """Return the given inputs on the grid of the problem's format."""
    from stability.probe.attention_inputs import round_inputs  # heavy: torch

    return None if given is None else round_inputs((x.double() for x in given), problem.format)


def _shape_of(given: "AttentionInputs") -> dict[str, Any]:
    batch, heads, length, head_dim = given.q.shape
    return {
        "batch": batch,
        "heads": heads,
        "kv_heads": given.k.shape[1],
        "length": length,
        "key_len": given.k.shape[2],
        "head_dim": head_dim,
        "value_dim": given.v.shape[3] if given.v.shape[3] != head_dim else None,
        "distribution": "given",
    }
