"""The chart of the ladder: an arm far beyond the others does not press them into one spot."""

from stability.analysis.ladder import ladder_of
from stability.analysis.study_records import read_study
from stability.report.page.ladder_chart import ladder_chart
from stability.report.view.palette import arm_styles


def test_far_arm_is_named_at_the_edge_and_leaves_the_scale_to_the_others(finished):
    ladder = ladder_of(read_study(finished))
    figure = ladder_chart(ladder, arm_styles([row.arm for row in ladder.rows])).figure
    drawn = [x for trace in figure.data for x in trace.x if x is not None]
    assert max(drawn) == ladder.row("flash_all_bf16").rel_l2.last.mean
    row = ladder.row("init_seed").rel_l2
    text = f"{row.early.mean:.1e} and {row.last.mean:.1e}, off the scale ▸"
    assert text in [note.text for note in figure.layout.annotations]
