"""Does this attention compute attention? A check in seconds, forward and backward.

`check_attention` calls an attention on the cells of `cells.FULL` or `QUICK`, compares each result
with the golden, asks what of it is too large (`limits`), and says in one line what is wrong
(`diagnosis`). It needs no tolerance: an attention may err twice what plain attention in the same
dtype errs, which is the rule of flash-attn's own tests, and may have no gain and no bias.

Where it fails, it names the mistake whose FP64 results come closest, or says that the attention
takes another layout (`layout`). What the attention refuses
stands in the answer, a plain cell first, and an attention that refuses everything does not pass:
nothing was looked at. One that names `attn_mask` or `sinks` among its arguments is called with
trained ones too (`trained_masks`), and one that names `dropout_p` and `dropout_seed` with dropout
(`dropped_weights`). Whether autocast changes its bits is said beside the answer (`autocast`).
Leaves out speed, and other masks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from attention_kernels.fp_environment import settle_vector_math
from attention_kernels.testing.autocast import autocast_sentence
from attention_kernels.testing.calls import Breach, Called, Signature, call
from attention_kernels.testing.cells import (
    DTYPES,
    FULL,
    QUICK,
    Cell,
    Reference,
    given_cell,
    not_looked_at,
)
from attention_kernels.testing.cells import reference as drawn_reference
from attention_kernels.testing.devices import CPU, called_on, device_name, usable_device, wait_for
from attention_kernels.testing.diagnosis import Diagnosis, diagnose
from attention_kernels.testing.dropped_weights import dropout_findings
from attention_kernels.testing.formula import RESULTS
from attention_kernels.testing.laws import Inputs
from attention_kernels.testing.layout import layout_sentence
from attention_kernels.testing.limits import LOOK_ROWS, Excess, biases_as_judged, excesses
from attention_kernels.testing.measured import Measured, measure
from attention_kernels.testing.refusals import UnsupportedError
from attention_kernels.testing.sentences import (
    breach_sentence,
    excess_sentence,
    refusals_in_words,
)
from attention_kernels.testing.trained_masks import LIMIT, trained_mask_findings
from attention_kernels.testing.unexplained import is_sure

__all__ = ["EXCESSES", "CheckReport", "Finding", "check_attention"]

EXCESSES = ("error ratio", "range", "row", "gain", "bias", "bias away from zero")
"""What a finding may be that says of a result how much is too large."""
_BESIDE = "not explained by that: "
_PERHAPS = f"perhaps {_BESIDE}"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that is wrong: `what` by a short name, the `noun` for it, and a sentence."""

    what: str
    noun: str
    sentence: str
    dtypes: tuple[str, ...]
    value: float = 0.0
    error: float = 0.0
    limit: float = 0.0
    follows: bool | None = None
    """Whether it follows from the mistake that is named; None where none is, or it is not known.

    It is not known of what is beyond a limit by no more than a mistake's own roundings may be.
    """


@dataclass(kw_only=True)
class CheckReport:
    """What a check found. `findings` opens with the diagnosis; the rest are what it rests on."""

    name: str
    dtypes: tuple[str, ...]
    cells: int = 0
    """Calls whose results were looked at, over all dtypes."""
    findings: tuple[Finding, ...] = ()
    unsupported: dict[str, list[str]] = field(default_factory=dict)
    """What was refused: the attention's own words, and the cells that it said them in."""
    plain_refused: tuple[str, ...] = ()
    """Which of the refused cells are plain: what any attention should take."""
    kind: str = "the check"
    device: torch.device = CPU
    """Where it was called."""
    not_looked_at: tuple[str, ...] = ()
    """What the check does not look at, a line each: of the full one, and beyond its cells."""
    autocast: str = ""
    """What autocast changes in one call in BF16, as a sentence, or nothing."""
    statistics: list[dict[str, Any]] = field(default_factory=list)
    """A row for each dtype, cell and result."""
    biases: list[dict[str, Any]] = field(default_factory=list)
    """A row for each dtype and result: the bias over all draws, which is what is judged, in ULPs
    of the dtype, its standard error, and its limit."""

    @property
    def passed(self) -> bool:
        """Whether anything was looked at and nothing is wrong with it."""
        return self.cells > 0 and not self.findings

    @property
    def sentence(self) -> str:
        """Return the answer in one line, and if it passes what was not looked at."""
        left_out = f"; not looked at: {'; '.join(self.not_looked_at)}" if self.not_looked_at else ""
        return f"{self.answer}{left_out if self.passed else ''}"

    @property
    def answer(self) -> str:
        """Return the answer in one line."""
        if not self.cells and not self.findings:
            why = next(iter(self.unsupported), "it was asked for nothing")
            return f"{self.name}: nothing was looked at: {why}"
        if self.findings:
            first = self.findings[0]
            at = f"{', '.join(first.dtypes)}{self._place}"
            return f"{self.name} FAILS at {at}: {first.sentence}"
        looked_at = [x for x in self.dtypes if any(row["dtype"] == x for row in self.statistics)]
        said = f"{self.name} passes {self.kind} at {', '.join(looked_at)} in {self.cells} cells"
        said += self._place
        return f"{said}{refusals_in_words(self.unsupported, self.plain_refused)}"

    @property
    def _place(self) -> str:
        return "" if self.device == CPU else f" on {device_name(self.device)}"

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values."""
        return {
            "name": self.name,
            "passed": self.passed,
            "sentence": self.sentence,
            "dtypes": list(self.dtypes),
            "device": device_name(self.device),
            "cells": self.cells,
            "findings": [vars(finding) for finding in self.findings],
            "unsupported": self.unsupported,
            "plain_refused": list(self.plain_refused),
            "not_looked_at": list(self.not_looked_at),
            "autocast": self.autocast,
            "biases": self.biases,
            "statistics": self.statistics,
        }


def check_attention(
    attention: Callable[..., Any],
    *,
    dtypes: Sequence[str] = ("bf16", "fp16", "fp32"),
    quick: bool = False,
    name: str = "",
    gives_lse: bool | None = None,
    given: Inputs | None = None,
    cells: Sequence[Cell] | None = None,
    device: torch.device | str = "cpu",
) -> CheckReport:
    """Check `attention(q, k, v, *, causal, scale=None)`, forward and backward, on `device`.

    What it is held against is computed on the CPU whatever the device.

    `causal` may be called `is_causal`, and `scale` `softmax_scale` or `sm_scale`. It is asked for
    the LSE with `return_lse=True` if it has an argument of that name, or if
    `gives_lse` says so. `given` are further inputs, of any dtype, which causal attention is checked
    on after they were rounded. `quick` looks at the few cells of `cells.QUICK`, and its sentence
    says what it leaves out. ValueError for a dtype that is not one of `cells.DTYPES`, or that is
    given twice, and for a device that this machine does not compute on.
    """
    for dtype in dtypes:
        if dtype not in DTYPES:
            raise ValueError(
                f"check_attention: dtypes must be among {', '.join(DTYPES)}, got {dtype!r}; "
                "leave it out for all of them"
            )
    if len(set(dtypes)) < len(dtypes):
        raise ValueError(f"check_attention: dtypes must differ, got {', '.join(dtypes)}")
    chosen = cells if cells is not None else (QUICK if quick else FULL)
    settle_vector_math()
    report = CheckReport(
        name=name or _name_of(attention),
        dtypes=tuple(dtypes),
        kind="the quick check" if chosen is QUICK else "the check",
        device=usable_device(device),
        not_looked_at=not_looked_at(chosen) if cells is None else (),
    )
    # a module may have switched gradients off, or chosen another device, when it was imported
    with torch.enable_grad(), torch.device("cpu"):
        _look_at_all(attention, Signature(attention, gives_lse), chosen, given, report)
    return report


def _look_at_all(
    attention: Callable[..., Any],
    signature: Signature,
    chosen: Sequence[Cell],
    given: Inputs | None,
    report: CheckReport,
) -> None:
    """Check the attention at each dtype of the report, and write down there what is found."""
    findings: list[Finding] = []
    in_bf16: list[tuple[Reference, Called]] = []
    for format in report.dtypes:
        references = (drawn_reference(cell, DTYPES[format]) for cell in chosen)
        seen = _Seen(format)
        for where in references:
            _look(attention, signature, where, seen, report)
        if given is not None:
            where = given_cell(given, DTYPES[format], "given inputs")
            _look(attention, signature, where, seen, report)
        findings += seen.findings()
        if format == "bf16":
            in_bf16 = seen.calls
        findings += _of_further_calls(attention, signature, format, report)
        report.statistics += [_row(format, one) for one in seen.measured]
        report.biases += [
            {
                "dtype": format,
                "result": result,
                "value": mean.value,
                "error": mean.error,
                "limit": x,
            }
            for result, (mean, x) in biases_as_judged(seen.measured, format).items()
        ]
    report.findings = _merged(findings)
    # last of all: what these do to a GPU, no other call is to answer for
    report.autocast = autocast_sentence(attention, signature, in_bf16, report.device)
    report.findings = _with_layout(attention, report)


def _with_layout(attention: Callable[..., Any], report: CheckReport) -> tuple[Finding, ...]:
    """Return the findings, or in place of those of a dtype its layout, if that is what is wrong.

    What is measured in a wrong layout tells nothing of the attention.
    """
    failing = {format for finding in report.findings for format in finding.dtypes}
    said = {
        format: layout_sentence(attention, format, report.device)
        for format in report.dtypes
        if format in failing
    }
    dtypes = tuple(format for format, sentence in said.items() if sentence)
    if not dtypes:
        return report.findings
    layout = Finding(what="layout", noun="layout", sentence=said[dtypes[0]], dtypes=dtypes)
    others = (finding for finding in report.findings if not {*finding.dtypes} <= {*dtypes})
    return layout, *others


def _of_further_calls(
    attention: Callable[..., Any], signature: Signature, format: str, report: CheckReport
) -> list[Finding]:
    """Return what is wrong where a mask is trained or dropout is on, if it takes such by name."""
    findings = []
    call = (called_on(report.device, attention), signature.causal, DTYPES[format])
    further = [("trained mask", x) for x in trained_mask_findings(*call)]
    further += [("dropout", x) for x in dropout_findings(*call)]
    for what, found in further:
        if isinstance(found, str):
            report.unsupported.setdefault(found, []).append(f"{format}, one call")
            continue
        findings.append(
            Finding(
                what=what,
                noun=found.result,
                sentence=found.sentence,
                dtypes=(format,),
                value=found.value,
                limit=LIMIT,
            )
        )
    try:
        wait_for(report.device)
    except RuntimeError as error:  # no refusal: a GPU that has faulted raises at every call
        reason = (str(error).strip().splitlines() or [""])[0]
        said = f"breaks the GPU where a mask is trained or dropout is on: {reason}"
        findings.append(Finding(what="raises", noun="out", sentence=said, dtypes=(format,)))
    return findings


def _name_of(attention: Callable[..., Any]) -> str:
    inner = getattr(attention, "func", attention)
    return getattr(inner, "__name__", type(attention).__name__)


class _Seen:
    """What was seen of an attention in one dtype."""

    def __init__(self, format: str) -> None:
        self.format = format
        self.measured: list[Measured] = []
        self.others: dict[str, list[Measured]] = {}
        """By the words for another manner of calling, what of it differs in its bits."""
        self.breaches: list[tuple[Breach, Reference]] = []
        self.calls: list[tuple[Reference, Called]] = []

    def findings(self) -> list[Finding]:
        """Return what is wrong: the diagnosis first, then each excess it rests on.

        Of other manners of calling the first is told of, and only where the usual one is right.
        """
        found = excesses(self.measured, self.format)
        off = {breach.result for breach, _ in self.breaches} | {excess.result for excess in found}
        names = {one.result for one in self.measured}
        right = [name for name in RESULTS if name in names - off]
        findings = [self._of_breach(*case, right) for case in _worst_breaches(self.breaches)]
        findings = self._with_excesses(findings, self.measured, found)
        for words, measured in self.others.items():
            if findings:
                break
            findings = [
                replace(finding, sentence=f"{words}, {finding.sentence}")
                for finding in self._with_excesses([], measured, excesses(measured, self.format))
            ]
        return findings

    def _with_excesses(
        self, findings: list[Finding], measured: list[Measured], found: list[Excess]
    ) -> list[Finding]:
        if found:
            diagnosis = diagnose(found, measured)
            finding = self._of_diagnosis(diagnosis, found[0])
            # a mistake that is named tells more than an infinity that it makes
            infinite = bool(findings) and findings[0].what == "infinity"
            findings.insert(0 if infinite and diagnosis.explained else len(findings), finding)
            left = diagnosis.left
            follows = None if left is None else True
            findings += [self._of_excess(excess, follows) for excess in found[:12]]
            worst: dict[tuple[str, str], Excess] = {}
            for excess in left or ():
                worst.setdefault((excess.statistic, excess.result), excess)
            for excess in worst.values():
                sure = is_sure(excess)
                words = _BESIDE if sure else _PERHAPS
                findings.append(self._of_excess(excess, False if sure else None, words))
        return findings

    def _of_breach(self, breach: Breach, wheres: list[Reference], right: Sequence[str]) -> Finding:
        every = {where.cell for where, _ in self.calls}
        sentence = breach_sentence(breach, [where.cell for where in wheres], every, right)
        return Finding(
            what=breach.kind, noun=breach.result, sentence=sentence, dtypes=(self.format,)
        )

    def _of_diagnosis(self, diagnosis: Diagnosis, worst: Excess) -> Finding:
        return Finding(
            what="diagnosis",
            noun=diagnosis.noun,
            sentence=diagnosis.sentence,
            dtypes=(self.format,),
            value=worst.value,
            error=worst.error,
            limit=worst.limit,
        )

    def _of_excess(self, excess: Excess, follows: bool | None, beside: str = "") -> Finding:
        return Finding(
            what=excess.statistic,
            noun=excess.result,
            sentence=f"{beside}{excess_sentence(excess)}",
            dtypes=(self.format,),
            value=excess.value,
            error=excess.error,
            limit=excess.limit,
            follows=follows,
        )


def _look(
    attention: Callable[..., Any],
    signature: Signature,
    where: Reference,
    seen: _Seen,
    report: CheckReport,
) -> None:
    try:
        called = call(attention, signature, where, report.device)
    except UnsupportedError as refusal:
        cells = report.unsupported.setdefault(str(refusal), [])
        cells.append(f"{seen.format}, {where.cell}")
        if where.cell.is_plain():
            report.plain_refused = (*report.plain_refused, cells[-1])
        return
    report.cells += 1
    seen.calls.append((where, called))
    seen.breaches += [(breach, where) for breach in called.breaches]
    seen.measured += _measured(where, called.results)
    for words, results in called.others.items():
        seen.others.setdefault(words, []).extend(_measured(where, results))
    for refusal in called.refused:
        report.unsupported.setdefault(refusal, []).append(f"{seen.format}, {where.cell}")


def _measured(where: Reference, results: dict[str, Tensor]) -> list[Measured]:
    return [measure(where, name, x) for name, x in results.items() if not x.isnan().any()]


def _worst_breaches(
    breaches: list[tuple[Breach, Reference]],
) -> list[tuple[Breach, list[Reference]]]:
    """Return a breach of each kind and result, the gravest first, and where it occurred."""
    order = ("raises", "form", "shape", "dtype", "missing", "NaN", "infinity", "not repeatable")
    kinds: dict[tuple[str, str, bool], list[tuple[Breach, Reference]]] = {}
    for breach, where in breaches:
        # what may be refused stands apart, or a bug would be advised away
        key = (breach.kind, breach.result, breach.may_refuse)
        kinds.setdefault(key, []).append((breach, where))

    def gravity(cases: list[tuple[Breach, Reference]]) -> tuple[int, int]:
        breach = cases[0][0]
        kind = order.index(breach.kind) if breach.kind in order else len(order)
        return kind, RESULTS.index(breach.result) if breach.result in RESULTS else len(RESULTS)

    ranked = sorted(kinds.values(), key=gravity)
    return [(cases[0][0], [where for _, where in cases]) for cases in ranked]


def _merged(findings: list[Finding]) -> tuple[Finding, ...]:
    """Return findings with those of several dtypes that say the same as one, diagnoses first.

    Of two diagnoses with one noun that of the last dtype, the most exact, is kept.
    """
    merged: dict[tuple[object, ...], Finding] = {}
    for finding in findings:
        # what is right beside it is of one dtype
        beside = finding.what in ("NaN", "infinity") and " right" in finding.sentence
        said = finding.sentence if beside else ""
        perhaps = finding.sentence.startswith(_PERHAPS)
        key = (finding.what, finding.noun, finding.follows, perhaps, said)
        dtypes = merged[key].dtypes if key in merged else ()
        new = tuple(dict.fromkeys((*dtypes, *finding.dtypes)))
        merged[key] = Finding(**{**vars(finding), "dtypes": new})
    return tuple(sorted(merged.values(), key=lambda finding: finding.what in EXCESSES))


def _row(format: str, measured: Measured) -> dict[str, Any]:
    # of a few rows, where dq may be zero, a gain or a bias says nothing
    judged = measured.squared_errors.shape[-1] >= LOOK_ROWS
    log, error = measured.log_ratio()
    ranges, _ = measured.log_ratio_of_ranges()
    largest = log.argmax(0, keepdim=True)  # of each head the batch entry that errs most
    return {
        "dtype": format,
        "law": measured.where.cell.law,
        "cell": str(measured.where.cell),
        "result": measured.result,
        "error_ratio": log.exp().amax(0).tolist(),
        "error_ratio_error": (log.exp() * error).gather(0, largest)[0].tolist(),
        "error_ratio_by_range": ranges.exp().tolist(),
        "worst_row": measured.row_ratio().max().item(),
        "gain": measured.gains.mean(0).tolist() if judged else [],
        "bias_ulp": measured.biases.mean(0).tolist() if judged else [],
        "angle": measured.angles.mean(0).tolist(),
    }
