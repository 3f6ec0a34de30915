"""`stability figure`: one picture of a study for a paper, with its numbers beside it."""

import hashlib
import re
from collections.abc import Collection
from pathlib import Path

from stability.cli.output import HOLDS, print_line
from stability.config.convert import nearest
from stability.records.metric_table import LAYER_METRICS, SHOWN_DRIFTS
from stability.report.paper.figure_options import FORMATS, KINDS, RESULTS, WIDTHS

__all__ = ["figure"]


def figure(
    folder: Path,
    what: str = "ladder",
    format: str = "",
    arm: str = "",
    compared: str = "out",
    metric: str = "",
    width: str = "column",
    out: str = "",
) -> int:
    """Draw a study's ladder, drift, heat map or waterfall for a paper; the numbers go beside it.

    Args:
        folder: the folder of a study, e.g. runs/quickstart
        what: ladder, drift, heatmap or waterfall
        format: pdf, svg or png; as the ending of --out, or pdf
        arm: the arm to draw: drift draws all if not given, heatmap and waterfall the first
        compared: of a heat map: out, lse, dq, dk or dv
        metric: of drift: rel_l2, w1, ...; of a heat map: rel_fro, error_ratio, gain, ...
        width: column (3.35 in) or page (6.9 in)
        out: the picture's file; figures/<what>-<arm>.<format> in the study's folder if not given
    """
    _check("what", what, KINDS)
    format = format or Path(out).suffix[1:] or "pdf"
    _check("format", format, FORMATS)
    _check("width", width, WIDTHS)
    _check("compared", compared, RESULTS)
    metrics = LAYER_METRICS if what == "heatmap" else SHOWN_DRIFTS
    # every probe has it, with a golden or without
    metric = metric or ("rel_fro" if what == "heatmap" else next(iter(metrics)))
    _check("metric", metric, metrics)
    if what == "ladder" and arm:
        raise ValueError(f"figure: arm must not be given for a ladder of all arms, got {arm!r}")
    path = Path(out) if out else folder / "figures" / _name(what, arm, compared, metric, format)
    if path.suffix != f".{format}":
        raise ValueError(f"figure: out must end in .{format}, got {out!r}; or give another format")
    from stability.analysis.study_records import read_study  # heavy: numpy

    study = read_study(folder)
    from stability.report.paper.figure import write_figure  # heavy: matplotlib

    numbers = write_figure(
        study, what, path, width=width, arm=arm, compared=compared, metric=metric
    )
    for written in (path, numbers):
        print_line(written)
    return HOLDS


def _check(name: str, value: str, known: Collection[str]) -> None:
    if value not in known:
        raise ValueError(
            f"figure: {name} must be one of {', '.join(known)}, got {value!r}; nearest: "
            f"{nearest(value, known)}"
        )


def _name(what: str, arm: str, compared: str, metric: str, format: str) -> str:
    """Return the file's name; arms whose names a file can't have are told apart by a digest."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "_", arm)[:64]
    digest = "" if plain == arm else f"_{hashlib.sha256(arm.encode()).hexdigest()[:8]}"
    parts = [what, f"{plain}{digest}"]
    if what == "heatmap":
        parts += [compared, metric]
    elif what == "drift" and metric != "rel_l2":
        parts += [metric]
    return f"{'-'.join(part for part in parts if part)}.{format}"
