"""What was watched of the run itself: gradient norm, log Z, RMS_t, one line an arm.

Leaves out what is watched inside of attention (`probe_charts`).
"""

from collections.abc import Mapping

from stability.analysis.study_records import RecordedStudy
from stability.records.metric_names import watch_name
from stability.report.page.chart import (
    ALL_AT_ONCE,
    Chart,
    Section,
    arm_lines,
    choices_of,
    make_figure,
    thinning_remarks,
)
from stability.report.view.palette import ArmStyle

__all__ = ["watch_section"]

FIGURES = {
    "grad_norm": ("norm of the gradient, before clipping", "log"),
    "log_z": ("log Z, mean over the tokens (nats)", "linear"),
    "rms_max": ("largest RMS of Adam's update, RMS_t, over the parameters", "linear"),
    "nonfinite_gradients": ("gradients that are no finite number", "linear"),
    "loss_spike": ("1 where the loss spiked", "linear"),
}
"""The figures of `callbacks.training_watch`: title of the axis, and its scale."""


def watch_section(study: RecordedStudy, styles: Mapping[str, ArmStyle]) -> Section | None:
    """Return the watched figures of each arm over the steps; None if none was watched."""
    longest, lines = 0, []
    for name in FIGURES:
        for arm in study.arms:
            by_seed = {seed: run.series(watch_name(name)) for seed, run in arm.runs.items()}
            if not any(by_seed.values()):
                continue
            longest = max(longest, *(len(values) for values in by_seed.values()))
            bold = arm.axis == "attention"
            meta = {"figure": name}
            lines += arm_lines(arm.name, by_seed, styles[arm.name], bold=bold, meta=meta)
    if not lines:
        return None
    choices = choices_of(lines)
    title, scale = FIGURES[choices["figure"][0]]
    chart = Chart(
        key="watch",
        title="Over the steps",
        caption="Thick: mean over the seeds; thin: each seed.",
        good="the arms lie on top of one another.",
        bad="an arm whose gradients or updates grow before its loss does.",
        figure=make_figure(
            lines,
            height=430,
            xaxis={"title": {"text": "step"}},
            yaxis={"title": {"text": title}, "type": scale, "tickformat": ".3~g", "nticks": 6},
            **ALL_AT_ONCE,
            meta={
                "figure": {
                    name: {"yaxis.title.text": title, "yaxis.type": scale}
                    for name, (title, scale) in FIGURES.items()
                }
            },
        ),
        remarks=thinning_remarks(longest, len(study.seeds)),
    )
    return Section(
        key="watch",
        title="What was watched in training",
        intro="",
        charts=(chart,),
        choices={"figure": choices["figure"]},
    )
