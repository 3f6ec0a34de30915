"""What happened in the runs, on the time line and in words."""

from stability.records.paths import RunPaths
from tests.stability.report.pages import page_of, traces_of
from tests.stability.report.synthetic import write_run
from tests.stability.report.synthetic_full import ALERT, FINDING, write_full

ARM = "flash_all_bf16"


def test_time_line_marks_each_event_and_a_run_that_failed(synthetic, tmp_path):
    folder = write_full(tmp_path / "study")
    fp32 = next(arm for arm in synthetic.ARMS if arm["name"] == "fp32")
    RunPaths.for_run(folder, "fp32", 1).metrics.unlink()
    write_run(folder, fp32, 1, state="failed", until=70)
    marks = {
        (trace["meta"]["arm"], trace["name"].split(": ")[1], x): text
        for trace in traces_of(page_of(folder), "timeline")
        for x, text in zip(trace["x"], trace["text"], strict=True)
    }
    assert set(marks) == {
        (ARM, "finding", FINDING.step),
        (ARM, "alert", ALERT.step),
        ("fp32", "failed", 70),
    }
    assert FINDING.text in marks[ARM, "finding", FINDING.step]


def test_run_that_failed_is_listed_though_no_event_is(synthetic, tmp_path):
    folder = synthetic.write_synthetic(tmp_path / "study", seeds=[0])
    fp32 = next(arm for arm in synthetic.ARMS if arm["name"] == "fp32")
    RunPaths.for_run(folder, "fp32", 0).metrics.unlink()
    write_run(folder, fp32, 0, state="failed", until=70)
    page = page_of(folder)
    assert "All 1, in words" in page
    assert "<td>failed</td>" in page
