"""Every chart of a study, in the report's order, with one colour for each arm throughout.

The charts themselves are in files by subject.
"""

from stability.analysis.ladder import Ladder
from stability.analysis.probe_records import observed_arms
from stability.analysis.study_records import RecordedStudy
from stability.report.page.chart import Chart, Section
from stability.report.page.deviation_charts import study_deviation
from stability.report.page.event_chart import event_section
from stability.report.page.ladder_chart import ladder_chart
from stability.report.page.parameter_chart import parameter_section
from stability.report.page.probe_charts import inside_sections
from stability.report.page.training_charts import drift_section, loss_section
from stability.report.page.watch_chart import watch_section
from stability.report.page.waterfall_chart import waterfall_section
from stability.report.page.weight_chart import weight_section
from stability.report.view.palette import arm_styles

__all__ = ["study_charts"]


def study_charts(study: RecordedStudy, ladder: Ladder) -> tuple[Chart, list[Section]]:
    """Return the ladder chart, and a section for each subject that the study has records of."""
    styles = arm_styles([arm.name for arm in study.arms])
    sections = [
        loss_section(study, styles),
        event_section(study, styles),
        drift_section(study, styles),
        parameter_section(study),
        study_deviation(study),
        waterfall_section(study),
        *inside_sections(observed_arms(study)),
        watch_section(study, styles),
        weight_section(study, styles),
    ]
    return ladder_chart(ladder, styles), [section for section in sections if section is not None]
