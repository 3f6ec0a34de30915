"""Charts of training over its steps, a line an arm: losses, drift of all weights, what was watched.

Leaves out what happens inside attention (`attention_charts`) and single parameters
(`weight_charts`).
"""

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from stability.analysis.held_out_losses import held_out_differences
from stability.analysis.ladder import is_reference, yardstick_of
from stability.analysis.number_text import nats
from stability.analysis.study_records import RecordedArm, RecordedStudy
from stability.config.schema import BASELINE
from stability.records.metric_names import watch_name
from stability.records.metric_table import SHOWN_DRIFTS, WATCH_METRICS
from stability.report.page.chart import (
    ALL_AT_ONCE,
    LOG_AXIS,
    STEP_AXIS,
    Chart,
    Section,
    arm_lines,
    beyond_limit,
    log_ticks,
    make_chart,
    range_around,
    section_of,
    thinning_remarks,
)
from stability.report.view.drift import drift_by_seed
from stability.report.view.ladder import is_candidate, is_unpaired
from stability.report.view.palette import ArmStyle

__all__ = [
    "drift_layout",
    "drift_section",
    "held_out_section",
    "loss_section",
    "watch_section",
]

STEPS = {
    "log steps": {"xaxis.type": "log", "xaxis.tickmode": "array"},
    "linear steps": {"xaxis.type": "linear", "xaxis.tickmode": "auto"},
}
"""How the drift's step axis may be laid out."""
MOST_TICKS = 6
HEIGHT = 430

BySeed = Mapping[int, Mapping[int, float]]
"""Seed -> step -> value."""


def loss_section(study: RecordedStudy, styles: Mapping[str, ArmStyle]) -> Section:
    """Return the training loss of each arm, and its difference from the baseline's."""
    charts = (_loss_chart(study, styles), _loss_difference_chart(study, styles))
    return Section(key="loss", title="Loss", intro="", charts=charts, choices={})


def _loss_chart(study: RecordedStudy, styles: Mapping[str, ArmStyle]) -> Chart:
    return make_chart(
        "loss",
        "Training loss",
        _lines(study.arms, _losses, styles),
        caption="Thick: mean over the seeds; thin: each seed. All arms see the same batches.",
        good="all arms lie on top of one another.",
        bad="an arm leaves the bundle, or spikes where the others do not.",
        height=HEIGHT,
        xaxis=STEP_AXIS,
        yaxis={"title": {"text": "loss (nats)"}},
        **ALL_AT_ONCE,
        remarks=thinning_remarks(_longest(map(_losses, study.arms)), len(study.seeds)),
    )


def _loss_difference_chart(study: RecordedStudy, styles: Mapping[str, ArmStyle]) -> Chart:
    baseline = study.arm(BASELINE)
    reference = _losses(baseline) if baseline else {}

    def differences(arm: RecordedArm) -> BySeed:
        return {
            seed: {
                step: loss - reference[seed][step]
                for step, loss in losses.items()
                if step in reference.get(seed, {})
            }
            for seed, losses in _losses(arm).items()
        }

    return make_chart(
        "loss-difference",
        "Loss minus the baseline's, on the same batch",
        _lines(study.candidates, differences, styles, hide_far=True, hover="%{y:+.6g}"),
        caption="Paired by seed and step, so the noise of the batches cancels.",
        good="it wanders around 0 with no trend.",
        bad="it stays on one side of 0 and grows: the change costs (or wins) loss.",
        height=HEIGHT,
        xaxis=STEP_AXIS,
        yaxis={"title": {"text": "loss - baseline loss (nats)"}, "zeroline": True},
        **ALL_AT_ONCE,
        remarks=(
            *_hidden_remarks(study),
            *thinning_remarks(_longest(map(_losses, study.candidates)), len(study.seeds)),
        ),
    )


def held_out_section(study: RecordedStudy, styles: Mapping[str, ArmStyle]) -> Section | None:
    """Return the held-out loss of each arm, less the baseline's; None if no text was held out.

    The margin of the policy is shaded: a loss in there is worse by more than may be.
    """
    differences = {arm.name: _held_out_differences(study, arm) for arm in study.candidates}
    arms = [arm for arm in study.candidates if any(differences[arm.name].values())]
    if not arms:
        return None
    margin = study.policy.margin_nats
    paired = [
        value
        for arm in arms
        if not is_unpaired(arm)
        for by_step in differences[arm.name].values()
        for value in by_step.values()
        if math.isfinite(value)
    ]
    chart = make_chart(
        "held-out",
        "Held-out loss minus the baseline's, on the same text",
        _lines(
            arms, lambda arm: differences[arm.name], styles, hide_far=True, hover="%{y:+.3g} nats"
        ),
        caption=(
            "On text that no arm trains on, the same batches for every run, paired by seed and "
            f"step. Shaded: worse by more than the margin, {nats(margin)} nats a token."
        ),
        good="all arms stay below the shade, to the last step.",
        bad="an arm rises into it. Below 0 an arm is better than the baseline, which is no harm.",
        height=HEIGHT,
        xaxis=STEP_AXIS,
        yaxis={
            "title": {"text": "held-out loss - baseline's (nats)"},
            "zeroline": True,
            "tickformat": "~g",
            "range": range_around([*paired, -margin / 4, 1.25 * margin]),
        },
        **ALL_AT_ONCE,
        # higher than anything that is drawn, whatever scale a reader chooses
        shapes=beyond_limit(margin, 10 * max(margin, 1.0, *map(abs, paired)), "y"),
        meta={
            "scale": {
                "with the margin": {},
                "the arms alone": {"yaxis.range": range_around([*paired, 0.0])},
            }
        },
        remarks=_hidden_remarks(study),
    )
    return Section(
        key="held-out",
        title="Held-out loss",
        intro="",
        charts=(chart,),
        choices={"scale": ("with the margin", "the arms alone")},
    )


def _held_out_differences(study: RecordedStudy, arm: RecordedArm) -> BySeed:
    by_seed: dict[int, dict[int, float]] = {}
    for step, values in held_out_differences(study, arm).items():
        for seed, value in values.per_seed.items():
            by_seed.setdefault(seed, {})[step] = value
    return by_seed


def drift_section(study: RecordedStudy, styles: Mapping[str, ArmStyle]) -> Section:
    """Return the drift of each arm over the steps, for each drift metric."""
    yardstick = yardstick_of(study)
    least = f"the yardstick {yardstick}" if yardstick else "the changes that you accept"
    good = f"a candidate runs below {least} from the first step on"
    bad = f"a candidate starts above {least}."
    if is_reference(study, yardstick):
        good = (
            f"a candidate runs at about 1.4 times {yardstick} or below it early on, as another "
            "rounding as good as the baseline's does"
        )
        bad = "a candidate starts far above that."
    chart = make_chart(
        "drift",
        "Distance from the baseline's weights",
        [
            line
            for metric in SHOWN_DRIFTS
            for line in _lines(
                study.candidates,
                partial(drift_by_seed, name=metric),
                styles,
                hide_far=True,
                positive=True,
                hover="%{y:.5e}",
                meta={"metric": metric},
            )
        ],
        caption=(
            "Against the baseline's snapshot of the same seed and step, from the first update on. "
            "A straight rise on linear steps is exponential growth. W1 is blind to position, so "
            "it is far smaller than the others and never stands alone."
        ),
        good=f"{good}, and rerun stays at 0.",
        bad=(
            f"{bad} That all arms meet at the end is no sign of either: chaos brings even the "
            "1-ULP nudge there."
        ),
        height=520,
        **drift_layout(study.drift_steps, steps=STEPS),
        remarks=(
            *_hidden_remarks(study),
            *_zero_remarks(study),
            *thinning_remarks(len(study.drift_steps), len(study.seeds)),
        ),
    )
    choices = {"metric": tuple(SHOWN_DRIFTS), "steps": tuple(STEPS)}
    return Section(key="drift", title="Drift", intro="", charts=(chart,), choices=choices)


def drift_layout(at: Iterable[int], /, **choices: Mapping[str, Any]) -> dict[str, Any]:
    """Return the layout of a chart of drift at these steps, with a choice of the metric.

    Each of `choices` adds one more: option -> what it changes in the layout.
    """
    titles = {
        name: {"yaxis.title.text": metric.label, "yaxis.type": metric.shown_scale}
        for name, metric in SHOWN_DRIFTS.items()
    }
    return {
        "xaxis": {**STEP_AXIS, "type": "log", "tickmode": "array", "tickvals": _step_ticks(at)},
        "yaxis": {"title": {"text": SHOWN_DRIFTS["rel_l2"].label}, **LOG_AXIS},
        **ALL_AT_ONCE,
        "meta": {"metric": titles, **choices},
    }


def _step_ticks(steps: Iterable[int]) -> list[int]:
    """Return the ticks of a log axis over these steps; at least its ends, where there are two."""
    drawn = sorted(step for step in steps if step > 0)
    if not drawn:
        return []
    ticks = [digit * 10**decade for digit, decade in log_ticks(drawn[0], drawn[-1], MOST_TICKS)]
    return ticks if len(ticks) > 1 else sorted({drawn[0], drawn[-1]})


def watch_section(study: RecordedStudy, styles: Mapping[str, ArmStyle]) -> Section | None:
    """Return what was watched of each arm over the steps; None if nothing was."""
    lines, longest = [], 0
    for name in WATCH_METRICS:
        arms = [arm for arm in study.arms if any(_watched(arm, name).values())]
        values = partial(_watched, name=name)
        lines += _lines(arms, values, styles, meta={"figure": name})
        longest = max(longest, _longest(map(values, arms)))
    if not lines:
        return None
    layouts = {
        name: {"yaxis.title.text": metric.label, "yaxis.type": metric.scale}
        for name, metric in WATCH_METRICS.items()
    }
    first = WATCH_METRICS[lines[0]["meta"]["figure"]]
    chart = make_chart(
        "watch",
        "Over the steps",
        lines,
        caption="Thick: mean over the seeds; thin: each seed.",
        good="the arms lie on top of one another.",
        bad="an arm whose gradients or updates grow before its loss does.",
        height=HEIGHT,
        xaxis=STEP_AXIS,
        yaxis={
            "title": {"text": first.label},
            "type": first.scale,
            "tickformat": ".3~g",
            "nticks": 6,
        },
        **ALL_AT_ONCE,
        meta={"figure": layouts},
        remarks=thinning_remarks(longest, len(study.seeds)),
    )
    return section_of(chart, "What was watched in training", fixed=["arm"])


def _lines(
    arms: Iterable[RecordedArm],
    values: Callable[[RecordedArm], BySeed],
    styles: Mapping[str, ArmStyle],
    *,
    hide_far: bool = False,
    **look: Any,
) -> list[dict[str, Any]]:
    """Return the lines of `arms`, candidates in bold; `look` as in `arm_lines`.

    `hide_far` hides arms of other initial weights until they are clicked.
    """
    return [
        line
        for arm in arms
        for line in arm_lines(
            arm.name,
            values(arm),
            styles[arm.name],
            bold=is_candidate(arm),
            hidden=hide_far and is_unpaired(arm),
            **look,
        )
    ]


def _losses(arm: RecordedArm) -> BySeed:
    return {seed: run.loss() for seed, run in arm.runs.items()}


def _watched(arm: RecordedArm, name: str) -> BySeed:
    return {seed: run.series(watch_name(name)) for seed, run in arm.runs.items()}


def _longest(arms: Iterable[BySeed]) -> int:
    return max((len(values) for by_seed in arms for values in by_seed.values()), default=0)


def _hidden_remarks(study: RecordedStudy) -> tuple[str, ...]:
    return tuple(
        f"{arm.name} starts from other weights and lies far beyond the others: hidden until its "
        "name below the chart is clicked."
        for arm in study.candidates
        if is_unpaired(arm)
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
