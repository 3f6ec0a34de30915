"""`stability check`: says whether an attention computes attention, or what is wrong with it.

The check itself is `attention_kernels.testing.check_attention`, for a test suite of one's own.
"""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attention_kernels.testing.fault_names import FAULT_NAMES
from stability.cli.output import FAILS, HOLDS, WRONG, print_json, print_line
from stability.cli.retrained import with_snapshot
from stability.config.convert import nearest
from stability.records.paths import run_at

if TYPE_CHECKING:
    from rich.table import Table

    from attention_kernels.testing.check import CheckReport, Finding
    from attention_kernels.testing.laws import Inputs

__all__ = ["check", "option_help", "split_options"]

_DTYPES = ("bf16", "fp16", "fp32")
_DELTA = (
    " A kernel that takes delta from the rounded output, as FlashAttention-2 does, errs some 3 "
    "times in dq by design."
)
_RESULTS = ("out", "lse", "dq", "dk", "dv")
_LINES = 8
"""Of what an answer rests on, at most."""


def check(
    attention: str,
    dtype: str = "bf16,fp16,fp32",
    quick: bool = False,
    fault: str = "",
    device: str = "auto",
    layer: int | None = None,
    step: int | None = None,
    json: bool = False,
    changes: str = "",
) -> int:
    """Check an attention against FP64, forward and backward, and say what is wrong with it.

    Args:
        attention: MODULE:FUNCTION of (q, k, v, *, causal, scale=None), or a name, e.g. flash:fa2;
            q is (batch, heads, tokens, head_dim), k and v may have fewer heads and other tokens,
            and v, as out, another head_dim; under causal the last query sees every key, and a row
            that sees none is 0; what it does not support it may refuse by NotImplementedError
        dtype: bf16, fp16 and fp32, or some of them with commas
        quick: fewer cells; the template's kernel takes 10 s on two idle cores, 4 s in bf16 alone;
            all cells take two to three times as long, so minutes for a slow kernel alone
        fault: a planted fault, e.g. dk_gain, to see that it is found
        device: where it is called: cpu, cuda, or auto, a GPU where there is one
        layer: the layer of --from; the first, 0, if not given
        step: the snapshot of --from; the last if not given. One that the study's keep has dropped
            is had again by training the run anew, in runs/<study>/forks/<arm>
        json: print everything as JSON
        changes: the run of --from
    """
    dtypes = [word.strip() for word in dtype.split(",") if word.strip()]
    for word in dtypes:
        if word not in _DTYPES:
            raise ValueError(
                f"check: dtype must be among {', '.join(_DTYPES)}, got {word!r}; "
                f"nearest: {nearest(word, _DTYPES)}"
            )
    if len(set(dtypes)) < len(dtypes):
        raise ValueError(f"check: dtype must name each once, got {dtype!r}")
    if not dtypes:
        raise ValueError("check: dtype must be at least one of bf16, fp16, fp32, got none")
    if fault and fault not in FAULT_NAMES:
        raise ValueError(
            f"check: fault must be a planted fault, got {fault!r}; "
            f"nearest: {nearest(fault, FAULT_NAMES)}"
        )
    if changes:
        run_at(Path(changes), "check: --from")
    if not changes and (layer is not None or step is not None):
        raise ValueError("check: --layer and --step are of a recorded run, got no --from RUN")
    with _stdout_to_stderr():  # what the kernel prints is no part of the answer
        report = _check(attention, dtypes, quick, fault, device, (changes, layer or 0, step))
    if json:
        print_json(report.to_dict())
    else:
        _print(report)
    if not report.cells:
        return WRONG
    return HOLDS if report.passed else FAILS


@contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Inside the context all output goes to stderr, that of C++ and of a GPU's printf too."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def option_help() -> str:
    """Return the line of the verb's help on the option that `split_options` takes."""
    return (
        "--from RUN  also q, k and v of a recorded run, e.g. runs/quickstart/flash_fa2/seed-0; of "
        "a study with `keep: none` it is trained anew first, which is said with its updates"
    )


def split_options(words: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Split `--from RUN`, a name that no parameter can have, from the verb's other arguments.

    ValueError if RUN is missing.
    """
    rest, run, remaining = [], "", list(words)
    while remaining:
        word = remaining.pop(0)
        if word != "--from" and not word.startswith("--from="):
            rest.append(word)
            continue
        run = word[7:] if "=" in word else (remaining.pop(0) if remaining else "")
        if not run:
            raise ValueError("--from must be followed by a run's folder, got nothing")
    return rest, {"changes": run}


def _given(run: str, layer: int, step: int | None) -> "Inputs | None":
    """Return q, k and v of a run, and a random gradient of out."""
    if not run:
        return None
    from attention_kernels.testing.laws import Inputs  # heavy: torch
    from stability.study.capture import capture

    return Inputs(*capture(with_snapshot(Path(run), step), layer, step))


def _check(
    attention: str,
    dtypes: list[str],
    quick: bool,
    fault: str,
    device: str,
    run: tuple[str, int, int | None],
) -> "CheckReport":
    import torch  # heavy

    from attention_kernels.testing import check_attention, plant
    from attention_kernels.testing.devices import usable_device
    from stability.probe.attention_registry import attention_function

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    place = usable_device(device)
    function = attention_function(attention, place)
    name = attention
    if fault:
        function, name = plant(function, fault), f"{attention} with the fault {fault}"
    given = _given(*run)  # last, since it may train: a function that is not there is told before
    return check_attention(
        function, dtypes=dtypes, quick=quick, name=name, given=given, device=place
    )


def _print(report: "CheckReport") -> None:
    """Print the answer, what it rests on, what was refused, and the worst of each result."""
    from rich.console import Console  # heavy

    console = Console()

    def say(text: str, indent: int = 0) -> None:
        print_line(" " * indent + text)

    say(report.answer)
    for left_out in report.not_looked_at if report.passed else ():
        say(f"not looked at: {left_out}", 2)
    told = _rests_on(report)
    findings, more = told[:_LINES], len(told) - _LINES
    for finding in findings:
        say(f"{', '.join(finding.dtypes)}: {finding.sentence}", 2)
    if more > 0:
        say(f"and {more} more, which --json tells", 2)
    if explained := _explained(report):
        say(f"{', '.join(explained)}: all else that is too large follows from that", 2)
    for line in _inputs_named("\n".join([report.sentence, *(x.sentence for x in findings)])):
        say(line, 2)
    for reason, cells in report.unsupported.items():
        say(f"unsupported in {len(cells)} cells: {reason}", 2)
    if report.autocast:
        say(report.autocast, 2)
    # figures of another layout tell nothing of the attention
    if not report.statistics or any(x.what == "layout" for x in report.findings[:1]):
        return
    console.print()
    console.print(_table(report), highlight=False)
    print_line("")
    _say_what_figures_are(report, say)


def _say_what_figures_are(report: "CheckReport", say: Callable[[str], None]) -> None:
    """Print a legend of the table: its columns, its limits, and ratios above 2 that pass."""
    from attention_kernels.testing.limits import MAX_ROW, SURE  # heavy: torch

    rows = ", ".join(f"{MAX_ROW[dtype]:g} in {dtype}" for dtype in report.dtypes)
    say(
        "Each figure but the bias is the largest of any single head in any cell. The bias is what "
        "is judged, the mean over all draws of N(0, 1), of the head that is nearest its limit, in "
        "units of the dtype. After +- stands one standard error: only what is surely beyond its "
        f"limit fails, an error ratio or a gain by {SURE:g} of them, a bias by 5 or, of few draws, "
        "more. Limits: an error ratio to plain attention (or to what rounding alone costs) of 2, "
        f"of {rows} in the worst single row (of dk and dv the worst key), a gain of 0.1 %, a bias "
        f"of 0.05 ULP{_wider_biases(report)}. The angle, in radians, is that between a result and "
        "the right one; it has no limit."
    )
    above = {row["result"] for row in report.statistics if max(row["error_ratio"]) > 2}
    if "lse" in above and report.passed:
        say("Of lse the largest ratio is above 2, surely so in no cell. No verdict judges the LSE.")
    above.discard("lse")
    if report.passed and above:
        listed = ", ".join(result for result in _RESULTS if result in above)
        say(
            f"Of {listed} the largest ratio is above 2. A verdict's limit of 2 is on a mean over "
            "the study's own inputs, which may be smaller or larger."
            f"{_DELTA if 'dq' in above else ''} The study of `stability init --template kernel` "
            "allows 4. Another one allows 2: leave it so unless a first study finds more, since a "
            "wider limit stands in the answer; then max_error_ratio: 4.0 in the policy of a study "
            "of another name."
        )


def _wider_biases(report: "CheckReport") -> str:
    """Return the limits above the usual one, where plain attention has a bias itself."""
    from attention_kernels.testing.limits import MAX_BIAS  # heavy: torch

    wider = [
        f"{row['limit']:.2f} of {row['result']} in {row['dtype']}"
        for row in report.biases
        if row["limit"] > 1.1 * MAX_BIAS
    ]
    return f" (twice plain attention's own where that is more: {', '.join(wider)})" if wider else ""


def _table(report: "CheckReport") -> "Table":
    """Return the worst of each result in each dtype as a table."""
    from rich.table import Table  # heavy

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    columns = ("dtype", "result", "error ratio", "worst row", "gain", "bias, ULP", "angle")
    for column in columns:
        table.add_column(column, justify="left" if column in columns[:2] else "right")
    for dtype in report.dtypes:
        for result in _RESULTS:
            row = _worst(report, dtype, result)
            if row:
                table.add_row(dtype, result, *row)
    return table


def _inputs_named(text: str) -> list[str]:
    """Return what the inputs are that a text names, such as 'rare rows' inputs, a line for each."""
    from attention_kernels.testing.laws import LAWS  # heavy: torch

    return [f"{name!r} inputs: {law.what}" for name, law in LAWS.items() if f"{name!r}" in text]


def _rests_on(report: "CheckReport") -> "list[Finding]":
    """Return what the answer rests on and does not say itself.

    Of how far a result errs one figure: of its rows, which tell where, else of all, else of ranges.
    """
    ways = ("row", "error ratio", "range")
    found = [finding for finding in report.findings[1:] if not finding.follows]
    named = {x.sentence for x in report.findings if x.what == "diagnosis"} | {report.sentence}
    of_errors: dict[str, str] = {}
    for what in ways:
        for finding in found:
            if finding.what == what:
                of_errors.setdefault(finding.noun, what)
    return [
        finding
        for finding in found
        if not any(finding.sentence in said for said in named - {finding.sentence})
        and (finding.what not in ways or of_errors[finding.noun] == finding.what)
    ]


def _explained(report: "CheckReport") -> list[str]:
    """Return the dtypes in which more is too large, all of which follows from what is named."""
    from attention_kernels.testing.check import EXCESSES  # heavy: torch

    told: dict[bool, set[str]] = {True: set(), False: set()}
    for finding in report.findings:
        if finding.what in EXCESSES:
            told[bool(finding.follows)].update(finding.dtypes)
    return [dtype for dtype in report.dtypes if dtype in told[True] - told[False]]


def _worst(report: "CheckReport", dtype: str, result: str) -> list[str]:
    """Return the largest of each statistic over cells and heads, and the bias judged, as text."""
    rows = [r for r in report.statistics if r["dtype"] == dtype and r["result"] == result]
    if not rows:
        return []
    usual = [row for row in rows if row["law"] == "normal"] or rows

    def largest(name: str) -> float:
        return max((value for row in usual for value in row[name]), key=abs)

    ratios = [x for r in rows for x in zip(r["error_ratio"], r["error_ratio_error"], strict=True)]
    biases = [x for x in report.biases if (x["dtype"], x["result"]) == (dtype, result)]
    return [
        _with_error(*max(ratios), 2),
        _short(max(row["worst_row"] for row in rows), 1),
        f"{largest('gain'):+.1e}",
        _with_error(biases[0]["value"], biases[0]["error"], 3, "+") if biases else "-",
        f"{largest('angle'):.1e}",
    ]


def _with_error(value: float, error: float, digits: int, sign: str = "") -> str:
    """Return a figure and its standard error, both with a power of ten if the figure has one."""
    is_large = abs(value) >= 1000
    return f"{_short(value, digits, sign)}+-{f'{error:.0e}' if is_large else _short(error, digits)}"


def _short(x: float, digits: int, sign: str = "") -> str:
    """Return x with so many digits after the point, or with a power of ten: a table must fit."""
    return f"{x:{sign}.{digits}f}" if abs(x) < 1000 else f"{x:{sign}.1e}"
