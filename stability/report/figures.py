"""Every chart of a study, in the report's order, with one colour for each arm throughout.

The charts themselves: `ladder_chart`, `training_charts`, `deviation_charts`.
"""

from stability.analysis.ladder import Ladder
from stability.analysis.recorded import RecordedStudy
from stability.report.chart import Chart, Section
from stability.report.deviation_charts import study_deviation
from stability.report.ladder_chart import ladder_chart
from stability.report.palette import arm_styles
from stability.report.training_charts import drift_section, loss_section

__all__ = ["study_charts"]


def study_charts(study: RecordedStudy, ladder: Ladder) -> tuple[Chart, list[Section]]:
    """Return the ladder chart, and the sections on loss, drift and deviation (if probed)."""
    styles = arm_styles([arm.name for arm in study.arms])
    sections = [loss_section(study, styles), drift_section(study, styles)]
    deviation = study_deviation(study)
    return ladder_chart(ladder, styles), [*sections, *([deviation] if deviation else [])]
