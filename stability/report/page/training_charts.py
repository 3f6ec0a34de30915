"""Loss and drift over the steps of training, one line an arm.

Leaves out what happens inside attention (`deviation_charts`) and the drift of single parameters
(`parameter_chart`).
"""

from collections.abc import Iterable, Mapping
from typing import Any

from stability.analysis.ladder import INDEPENDENT_AXES
from stability.analysis.study_records import RecordedArm, RecordedRun, RecordedStudy
from stability.config.schema import BASELINE
from stability.report.page.chart import (
    ALL_AT_ONCE,
    LOG_AXIS,
    Chart,
    Section,
    arm_lines,
    make_figure,
    thinning_remarks,
)
from stability.report.view.palette import ArmStyle

__all__ = ["DRIFT_METRICS", "drift_section", "loss_section", "shown_drift"]

DRIFT_METRICS = {
    "rel_l2": "drift of all weights: relative L2",
    "w1": "W1 of all weights (units of the weights)",
    "w1_over_std": "W1 of all weights / their standard deviation",
    "mean_abs": "mean |difference| of all weights",
    "max_abs": "largest |difference| of all weights",
    "1-cosine": "1 - cosine of the angle between all weights",
    "sign_flips": "share of weights with another sign",
}
"""What the drift chart may show. A cosine is so near to 1 that only its distance says anything."""
STEPS = {
    "log steps": {"xaxis.type": "log", "xaxis.tickmode": "linear"},
    "linear steps": {"xaxis.type": "linear", "xaxis.tickmode": "auto"},
}
"""How the step axis may be laid out. A log axis ticks at each power of ten."""
STEP_TITLE = {"title": {"text": "step"}}
HEIGHT = 430


def loss_section(study: RecordedStudy, styles: Mapping[str, ArmStyle]) -> Section:
    """Return the training loss of each arm, and its difference from the baseline's."""
    charts = (_loss_chart(study, styles), _loss_difference_chart(study, styles))
    return Section(key="loss", title="Loss", intro="", charts=charts, choices={})


def drift_section(study: RecordedStudy, styles: Mapping[str, ArmStyle]) -> Section:
    """Return the drift of each arm over the steps, for each drift metric."""
    return Section(
        key="drift",
        title="Drift",
        intro="",
        charts=(_drift_chart(study, styles),),
        choices={"metric": tuple(DRIFT_METRICS), "steps": tuple(STEPS)},
    )


def _loss_chart(study: RecordedStudy, styles: Mapping[str, ArmStyle]) -> Chart:
    lines = [
        line
        for arm in study.arms
        for line in arm_lines(arm.name, _losses(arm), styles[arm.name], bold=_is_candidate(arm))
    ]
    return Chart(
        key="loss",
        title="Training loss",
        caption="Thick: mean over the seeds; thin: each seed. All arms see the same batches.",
        good="all arms lie on top of one another.",
        bad="an arm leaves the bundle, or spikes where the others do not.",
        figure=make_figure(
            lines,
            height=HEIGHT,
            xaxis=STEP_TITLE,
            yaxis={"title": {"text": "loss (nats)"}},
            **ALL_AT_ONCE,
        ),
        remarks=thinning_remarks(_longest(_losses(arm) for arm in study.arms), len(study.seeds)),
    )


def _loss_difference_chart(study: RecordedStudy, styles: Mapping[str, ArmStyle]) -> Chart:
    lines = [
        line
        for arm in study.candidates
        for line in arm_lines(
            arm.name,
            _loss_differences(study, arm),
            styles[arm.name],
            bold=_is_candidate(arm),
            hover="%{y:+.6g}",
            hidden=arm.axis in INDEPENDENT_AXES,
        )
    ]
    return Chart(
        key="loss-difference",
        title="Loss minus the baseline's, on the same batch",
        caption="Paired by seed and step, so the noise of the batches cancels.",
        good="it wanders around 0 with no trend.",
        bad="it stays on one side of 0 and grows: the change costs (or wins) loss.",
        figure=make_figure(
            lines,
            height=HEIGHT,
            xaxis=STEP_TITLE,
            yaxis={"title": {"text": "loss - baseline loss (nats)"}, "zeroline": True},
            **ALL_AT_ONCE,
        ),
        remarks=(
            *_hidden_remarks(study),
            *thinning_remarks(_longest(_losses(arm) for arm in study.candidates), len(study.seeds)),
        ),
    )


def _drift_chart(study: RecordedStudy, styles: Mapping[str, ArmStyle]) -> Chart:
    figure = make_figure(
        _drift_lines(study, styles),
        height=520,
        xaxis={**STEP_TITLE, "type": "log", "dtick": 1},
        yaxis={"title": {"text": DRIFT_METRICS["rel_l2"]}, **LOG_AXIS},
        **ALL_AT_ONCE,
        meta={
            "metric": {key: {"yaxis.title.text": text} for key, text in DRIFT_METRICS.items()},
            "steps": STEPS,
        },
    )
    return Chart(
        key="drift",
        title="Distance from the baseline's weights",
        caption=(
            "Against the baseline's snapshot of the same seed and step, from the first update on. "
            "A straight rise on linear steps is exponential growth. W1 is blind to position, so "
            "it is far smaller than the others and never stands alone."
        ),
        good="a candidate runs below the yardstick from the first step on, and rerun stays at 0.",
        bad=(
            "a candidate starts above the yardstick. That all arms meet at the end is no sign of "
            "either: chaos brings even the 1-ULP nudge there."
        ),
        figure=figure,
        remarks=(
            *_hidden_remarks(study),
            *_zero_remarks(study),
            *thinning_remarks(len(study.drift_steps), len(study.seeds)),
        ),
    )


def _drift_lines(study: RecordedStudy, styles: Mapping[str, ArmStyle]) -> list[dict[str, Any]]:
    return [
        line
        for metric in DRIFT_METRICS
        for arm in study.candidates
        for line in arm_lines(
            arm.name,
            {seed: _after_start(shown_drift(run, metric)) for seed, run in arm.runs.items()},
            styles[arm.name],
            bold=_is_candidate(arm),
            positive=True,
            hover="%{y:.5e}",
            hidden=arm.axis in INDEPENDENT_AXES,
            meta={"metric": metric},
        )
    ]


def shown_drift(run: RecordedRun, metric: str) -> Mapping[int, float]:
    """Return one of DRIFT_METRICS by step."""
    if metric == "1-cosine":
        return {step: 1 - cosine for step, cosine in run.drift("cosine").items()}
    return run.drift(metric)


def _is_candidate(arm: RecordedArm) -> bool:
    return arm.axis == "attention"


def _losses(arm: RecordedArm) -> dict[int, dict[int, float]]:
    return {seed: run.loss() for seed, run in arm.runs.items()}


def _loss_differences(study: RecordedStudy, arm: RecordedArm) -> dict[int, dict[int, float]]:
    baseline = study.arm(BASELINE)
    reference = _losses(baseline) if baseline else {}
    return {
        seed: {
            step: loss - reference[seed][step]
            for step, loss in losses.items()
            if step in reference.get(seed, {})
        }
        for seed, losses in _losses(arm).items()
    }


def _longest(arms: Iterable[Mapping[int, Mapping[int, float]]]) -> int:
    return max((len(values) for by_seed in arms for values in by_seed.values()), default=0)


def _after_start(values: Mapping[int, float]) -> dict[int, float]:
    """Leave out step 0, which an axis of log steps can't show."""
    return {step: value for step, value in values.items() if step > 0}


def _hidden_remarks(study: RecordedStudy) -> tuple[str, ...]:
    return tuple(
        f"{arm.name} starts from other weights and lies far beyond the others: hidden until its "
        "name below the chart is clicked."
        for arm in study.candidates
        if arm.axis in INDEPENDENT_AXES
    )


def _zero_remarks(study: RecordedStudy) -> tuple[str, ...]:
    remarks = []
    for arm in study.candidates:
        drifts = [value for run in arm.runs.values() for value in run.drift("rel_l2").values()]
        if drifts and not any(drifts):
            remarks.append(
                f"{arm.name}: exactly 0 at all {len(drifts)} comparisons; a log axis can't show it."
            )
    return tuple(remarks)
