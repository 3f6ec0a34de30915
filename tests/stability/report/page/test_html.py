"""The HTML report: self-contained, honest about its numbers, and inert whatever names it holds."""

import html
import itertools
import json
import re
from dataclasses import replace

import pytest
from plotly.offline import get_plotlyjs

from stability.analysis.ladder import build_ladder, ladder_of
from stability.analysis.number_text import scientific, times
from stability.analysis.study_records import read_study
from stability.records.sealed_json import read_sealed, write_sealed
from stability.report.page.html import render, write_report
from tests.stability.report.typed_arrays import decode

HOSTILE = "<script>alert(1)</script>"


def page_of(study_dir):
    """The page without plotly's own source, which is not ours to check."""
    study = read_study(study_dir)
    return render(study, ladder_of(study)).replace(get_plotlyjs(), "")


def data_of(page):
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    return json.loads(found.group(1), object_hook=decode)


@pytest.fixture(scope="module")
def page(finished):
    return page_of(finished)


@pytest.fixture
def study(synthetic, tmp_path):
    return synthetic.write_synthetic(tmp_path / "quickstart")


def test_report_and_ladder_are_written_beside_the_records(study):
    path = write_report(study)
    assert path == study / "report.html"
    assert get_plotlyjs() in path.read_text(encoding="utf-8")
    assert (study / "ladder.json").read_text() == build_ladder(study).to_json()


def test_same_records_give_the_same_bytes(study):
    first = write_report(study).read_bytes()
    assert write_report(study).read_bytes() == first


def test_page_fetches_nothing(page):
    assert not re.findall(r"(?:src|href)\s*=|@import|url\(|fetch\(|https?://", page)


def test_first_screen_holds_the_question_the_verdicts_and_the_ladder(page, finished):
    top = html.unescape(page[: page.index("What changed in each arm")])
    assert f"<h1>{read_study(finished).question}</h1>" in top
    assert top.index("flash_fa2 moves the weights") < top.index('id="ladder"')
    for row in build_ladder(finished).rows:
        assert row.arm in top
        assert row.change in top


def test_table_holds_the_numbers_of_the_ladder(page, finished):
    for row in build_ladder(finished).rows[2:]:
        line = re.search(rf'<th scope="row">{row.arm}<.*?</tr>', page, re.DOTALL).group(0)
        shown = re.findall(r'<td class="num[^>]*>([^<]*)', line)
        assert shown == [
            f"{row.final_loss.mean:.3f}",
            scientific(row.rel_l2.early.mean),
            scientific(row.rel_l2.last.mean),
            scientific(row.w1.last.mean),
            times(row.ratio.early.mean),
            times(row.ratio.last.mean),
        ]


def test_charts_hold_the_numbers_of_the_records(page, finished):
    lines = (finished / "flash_fa2" / "seed-1" / "metrics.jsonl").read_text().splitlines()
    entries = [json.loads(line) for line in lines]
    name = "drift/all/w1"
    logged = {e["step"]: e[name] for e in entries if name in e and e["step"] > 0}
    traces = data_of(page)["figures"]["drift"]["data"]
    trace = next(
        t
        for t in traces
        if t["name"] == "flash_fa2, seed 1" and t["meta"] == {"arm": "flash_fa2", "metric": "w1"}
    )
    assert dict(zip(trace["x"], trace["y"], strict=True)) == pytest.approx(logged, rel=1e-5)


def test_deviation_of_each_layer_is_the_mean_of_the_seeds(page, finished, synthetic):
    traces = data_of(page)["figures"]["deviation-curves"]["data"]
    chosen = {"arm": "flash_fa2", "what": "out", "metric": "error_ratio"}
    mine = [trace for trace in traces if trace["meta"] == chosen]
    assert [trace["name"] for trace in mine] == [f"layer_{n}" for n in range(5)]
    want = synthetic.deviations("flash_fa2", 3, 40)["error_ratio"]
    assert mine[3]["y"][mine[3]["x"].index(40)] == pytest.approx(want, rel=1e-12)


def choices_of(page, section):
    """The options of each choice of a section, by name."""
    text = re.search(rf'<section id="section-{section}".*?</section>', page, re.DOTALL).group(0)
    selects = re.findall(r'<select data-choice="([^"]*)".*?>(.*?)</select>', text, re.DOTALL)
    return {name: re.findall(r'<option value="([^"]*)"', inner) for name, inner in selects}


def test_every_choice_has_traces_and_attention_comes_first(page):
    figures, choices = data_of(page)["figures"], choices_of(page, "deviation")
    assert {name: options[0] for name, options in choices.items()} == {
        "arm": "flash_all_bf16",
        "what": "out",
        "metric": "rel_fro",
    }
    for key in ("deviation-map", "deviation-curves"):
        metas = [trace["meta"] for trace in figures[key]["data"]]
        for arm, what, metric in itertools.product(*choices.values()):
            assert {"arm": arm, "what": what, "metric": metric} in metas


def test_arm_keeps_its_colour_from_chart_to_chart(page):
    figures = data_of(page)["figures"]
    seen = {}
    for key in ("loss", "loss-difference", "drift"):
        for trace in figures[key]["data"]:
            seen.setdefault(trace["legendgroup"], set()).add(trace["line"]["color"])
    assert all(len(colours) == 1 for colours in seen.values())
    assert len({colours.pop() for colours in seen.values()}) == 7


def test_zero_drift_is_said_where_a_log_axis_cannot_show_it(page):
    data = data_of(page)["figures"]
    names = [trace.get("name") for trace in data["drift"]["data"]]
    assert "rerun: 0 (exact)" in names
    assert "rerun: exactly 0 at all 18 comparisons" in page
    assert any("0 (exact)" in note["text"] for note in data["ladder"]["layout"]["annotations"])


def test_hostile_names_stay_text(study):
    read = read_study(study)
    metrics = dict(read.arms[2].runs[0].metrics)
    metrics[f"deviation/{HOSTILE}/out/rel_fro"] = metrics["deviation/layer_0/out/rel_fro"]
    runs = {0: replace(read.arms[2].runs[0], metrics=metrics, error=HOSTILE)}
    arm = replace(read.arms[2], name=HOSTILE, diff={HOSTILE: [HOSTILE, "x"]}, runs=runs)
    spoiled = replace(
        read,
        name=HOSTILE,
        question=HOSTILE,
        yardstick=HOSTILE,
        arms=(*read.arms[:2], arm, *read.arms[3:]),
    )
    page = render(spoiled, ladder_of(spoiled)).replace(get_plotlyjs(), "")
    assert "<script>alert" not in page
    assert len(re.findall(r"<script[ >]", page)) == page.count("</script>") == 3
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    for figure in data_of(page)["figures"].values():
        names = [str(trace.get("name", "")) for trace in figure["data"]]
        assert not any("<" in name for name in names), "plotly reads tags in names"


@pytest.mark.parametrize("until", [0, 15, 70])
def test_running_study_has_a_report(synthetic, tmp_path, until):
    synthetic.write_study_json(tmp_path)
    for arm in synthetic.ARMS[:3]:
        synthetic.write_run(tmp_path, arm, 0, state="running", until=until)
    page = page_of(tmp_path)
    assert "seed 1 missing" in page
    assert data_of(page)["figures"]["loss"]["data"]


def test_study_that_has_not_begun_has_a_report(synthetic, tmp_path):
    synthetic.write_study_json(tmp_path)
    page = page_of(tmp_path)
    assert "no run has recorded its environment yet" in page
    assert "Deviation inside attention" not in page


def test_proofs_tell_a_broken_pair_from_a_change_by_design(study):
    path = study / "flash_fa2" / "seed-1" / "manifest.json"
    manifest = read_sealed(path, "")
    manifest["hashes"]["batches"] = "other"
    manifest["environment"]["torch"] = "2.11.0"
    write_sealed(path, manifest)
    page = page_of(study)
    contract = page[page.index('id="contract"') :]

    def row(arm):
        return re.search(rf'<th scope="row">{arm}</th>.*?</tr>', contract, re.DOTALL).group(0)

    assert re.search(r"✗ different<small>seed 1<", row("flash_fa2"))
    assert re.search(r"✓ same<small>seed 0<", row("flash_fa2"))
    assert row("rerun").count("✓ same<small>seed 0, 1<") == 4
    assert "≠ different by design" in row("init_seed")
    assert "✗" not in row("init_seed") + row("nudge") + row("fp32")
    assert re.search(r'<td class="bad"><code>2.13.0 / 2.11.0', contract)


def test_half_a_surrogate_pair_is_written_out(synthetic, tmp_path):
    folder = synthetic.write_synthetic(tmp_path / "study", seeds=[0], question="why \ud800?")
    assert "why \\ud800?" in write_report(folder).read_text(encoding="utf-8")


def test_diff_that_holds_no_pairs_is_refused(study):
    content = read_sealed(study / "study.json", writer="the test")
    content["arms"][1]["diff"]["precision"] = "fp32"
    write_sealed(study / "study.json", content)
    with pytest.raises(ValueError, match="'flash_all_bf16' must hold pairs of values"):
        read_study(study)
