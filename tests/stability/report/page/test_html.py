"""The pages of a study and of a probe: self-contained, true to the records, inert for any name."""

import html
import itertools
import re
from contextlib import ExitStack
from dataclasses import replace

import pytest
from plotly.offline import get_plotlyjs

from stability.analysis.evidence import silent_level
from stability.analysis.ladder import ladder_of
from stability.analysis.number_text import scientific, times
from stability.analysis.study_records import read_study
from stability.cli.main import main
from stability.records.events import Event
from stability.records.probe_record import read_probe_record, write_probe_record
from stability.records.run_lock import hold
from stability.records.sealed_json import read_sealed, write_sealed
from stability.report.page.html import prose, render, write_page, write_probe_page
from tests.stability.report.pages import figures_of, page_of, traces_of
from tests.stability.report.synthetic import write_synthetic
from tests.stability.report.synthetic_probe import write_probe
from tests.stability.report.synthetic_verdict import arm_verdict, study_verdict

HOSTILE = "<script>alert(1)</script>"
PLANTED = "model.layers.2.self_attn, head 1: error ratio stands out since step 20"


@pytest.fixture(scope="module")
def page(finished):
    return page_of(finished)


@pytest.fixture
def study(synthetic, tmp_path):
    return synthetic.write_synthetic(tmp_path / "quickstart")


def test_report_and_ladder_are_written_beside_the_records(study):
    path = write_page(read_study(study), study)
    assert path == study / "report.html"
    assert get_plotlyjs() in path.read_text(encoding="utf-8")
    assert (study / "ladder.json").read_text() == ladder_of(read_study(study)).to_json()


def test_same_records_give_the_same_bytes(study):
    first = write_page(read_study(study), study).read_bytes()
    assert write_page(read_study(study), study).read_bytes() == first


def test_page_fetches_nothing(page):
    assert not re.findall(r"(?:src|href)\s*=|@import|url\(|fetch\(|https?://", page)


def test_first_screen_holds_the_question_the_verdicts_and_the_ladder(page, finished):
    top = html.unescape(page[: page.index("What changed in each arm")])
    assert f"<h1>{read_study(finished).question}</h1>" in top
    assert top.index("flash_fa2 moves the weights") < top.index('id="ladder"')
    for row in ladder_of(read_study(finished)).rows:
        assert row.arm in top
        assert row.change in top


def test_table_holds_the_numbers_of_the_ladder(page, finished):
    page = page[page.index('<section id="top">') :]
    for row in ladder_of(read_study(finished)).rows[2:]:
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


def rendered(study):
    return render(study, ladder_of(study)).replace(get_plotlyjs(), "")


def test_without_a_yardstick_neither_text_nor_column_is_of_one(finished, page):
    bare = rendered(replace(read_study(finished), yardstick=""))
    for name, shown in (("with", page), ("without", bare)):
        has = name == "with"
        table = shown[shown.index('<section id="top">') : shown.index('<section id="changes">')]
        assert ("times fp32" in table) == has
        assert ("Ratios are taken" in table) == has
        assert ("yardstick" in shown[: shown.index('id="data"')]) == has
        head, line = (
            re.search(pattern, table, re.DOTALL).group(0)
            for pattern in (r"<thead>.*?</thead>", r'<th scope="row">flash_fa2<.*?</tr>')
        )
        steps = re.findall(r"<th[^>]*>step (\d+)", head)
        assert steps == ["20", "200", "200", *(["20", "200"] if has else [])]
        assert line.count('<td class="num') == 1 + len(steps), "a cell for each head"


def test_the_reference_is_the_yardstick_of_a_page_whose_study_names_none(finished):
    study = read_study(finished)
    arms = tuple(replace(x, role="reference") if x.name == "fp32" else x for x in study.arms)
    page = rendered(replace(study, yardstick="", arms=arms))
    assert "times fp32" in page
    # as far from the baseline as two roundings of one size are from each other is no sign of harm
    assert "lies right of" not in page
    assert "a candidate lies at about 1.4 times the reference&#39;s dotted line or left" in page
    assert "a candidate runs at about 1.4 times fp32 or below it early on" in page
    lines = [shape["name"] for shape in figures_of(page)["ladder"]["layout"]["shapes"]]
    assert lines == ["fp32", "fp32"]


def choices_of(page, section):
    """The options of each choice of a section, by name."""
    text = re.search(rf'<section id="section-{section}".*?</section>', page, re.DOTALL).group(0)
    selects = re.findall(r'<select data-choice="([^"]*)".*?>(.*?)</select>', text, re.DOTALL)
    return {name: re.findall(r'<option value="([^"]*)"', inner) for name, inner in selects}


def test_every_choice_has_traces_and_attention_comes_first(page):
    figures, choices = figures_of(page), choices_of(page, "deviation")
    assert {name: options[0] for name, options in choices.items()} == {
        "arm": "flash_all_bf16",
        "what": "out",
        "metric": "error_ratio",
    }
    for key in ("deviation-map", "deviation-curves"):
        metas = [trace["meta"] for trace in figures[key]["data"]]
        for arm, what, metric in itertools.product(*choices.values()):
            assert {"arm": arm, "what": what, "metric": metric} in metas


def test_arm_keeps_its_colour_from_chart_to_chart(page):
    figures = figures_of(page)
    seen = {}
    for key in ("loss", "loss-difference", "drift"):
        for trace in figures[key]["data"]:
            seen.setdefault(trace["legendgroup"], set()).add(trace["line"]["color"])
    assert all(len(colours) == 1 for colours in seen.values())
    assert len({colours.pop() for colours in seen.values()}) == 7


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
    for figure in figures_of(page).values():
        names = [str(trace.get("name", "")) for trace in figure["data"]]
        assert not any("<" in name for name in names), "plotly reads tags in names"


@pytest.mark.parametrize("until", [0, 15, 70])
def test_running_study_has_a_report(synthetic, tmp_path, until):
    synthetic.write_study_json(tmp_path)
    with ExitStack() as stack:
        for arm in synthetic.ARMS[:3]:
            run = synthetic.write_run(tmp_path, arm, 0, state="running", until=until)
            stack.enter_context(hold(run))
        page = page_of(tmp_path)
    assert "seed 1 missing" in page
    said = "seed 0 stopped: no process trains it any more"
    assert said not in page
    assert said in page_of(tmp_path)


def test_arm_that_the_study_no_longer_has_is_named_and_not_drawn(study):
    content = read_sealed(study / "study.json", "")
    content["arms"] = [arm for arm in content["arms"] if arm["name"] != "flash_all_bf16"]
    write_sealed(study / "study.json", content)
    page = page_of(study)
    (said,) = re.findall("On disk, but not in the study: (.*?)<", page)
    assert said == "flash_all_bf16 (seeds 0, 1)."
    assert 'data-arm-row="flash_fa2"' in page
    assert 'data-arm-row="flash_all_bf16"' not in page
    assert "flash_all_bf16" not in str(figures_of(page))
    assert figures_of(page)["loss"]["data"]


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


def test_each_change_stands_beside_its_group(study):
    page = page_of(study)
    found = re.findall(r'<tr data-arm-row="(\w+)"><th scope="row">\w+</th><td>(.*?)</td>', page)
    assert dict(found) == {
        "rerun": "\N{EN DASH}",
        "flash_fa2": "attention",
        "flash_all_bf16": "attention",
        "fp32": "precision",
        "init_seed": "init",
        "nudge": "init",
    }


def test_half_a_surrogate_pair_is_written_out(synthetic, tmp_path):
    folder = synthetic.write_synthetic(tmp_path / "study", seeds=[0], question="why \ud800?")
    assert "why \\ud800?" in write_page(read_study(folder), folder).read_text(encoding="utf-8")


def test_diff_that_holds_no_pairs_is_refused(study):
    content = read_sealed(study / "study.json", writer="the test")
    content["arms"][1]["diff"]["precision"] = "fp32"
    write_sealed(study / "study.json", content)
    with pytest.raises(
        ValueError, match=r"arms\.1\.diff\.precision must be of type list, is 'fp32'"
    ):
        read_study(study)


@pytest.mark.parametrize(
    ("seeds", "outcome"),
    [((0, 1), "OPEN"), (tuple(range(5)), "INCONCLUSIVE")],
    ids=["2 seeds", "5 seeds"],
)
def test_answer_of_the_policy_comes_first(tmp_path, seeds, outcome):
    page = page_of(write_synthetic(tmp_path / "study", seeds=list(seeds)))
    badge = f'<p class="answer tone-open"><b>{outcome}</b>'
    assert page.index(badge) < page.index("<main>")
    whiskers = "90% interval of the mean" if len(seeds) == 5 else "smallest to largest seed"
    assert f"whiskers: {whiskers}" in page


def answers_on(page):
    """The tone, badge and arm of each line of the page's answer."""
    top = page[: page.index("<main>")]
    return re.findall(r'<p class="answer tone-(\w+)"><b>([^<]*)</b> <strong>([^<]*)</strong>', top)


def test_the_page_leads_with_an_answer_for_each_candidate(finished, monkeypatch):
    monkeypatch.setattr("stability.report.page.html.verdict_of", lambda _: study_verdict())
    page = page_of(finished)
    assert answers_on(page) == [
        ("bad", "FAIL", "a_candidate_of_a_long_name"),
        ("good", "PASS", "flash_fa2"),
        ("good", "FAIL, as it must", "broken"),
    ]
    assert 'class="control"><th scope="row">broken<' in page


def test_a_control_that_is_not_found_is_as_loud_as_a_failure(finished, monkeypatch):
    verdict = study_verdict(broken="PASS")
    monkeypatch.setattr("stability.report.page.html.verdict_of", lambda _: verdict)
    assert answers_on(page_of(finished))[-1] == ("bad", "PASS, but it must FAIL", "broken")


def test_whiskers_are_the_interval_once_there_are_seeds_enough(tmp_path):
    folder = write_synthetic(tmp_path / "study", seeds=list(range(5)))
    row = ladder_of(read_study(folder)).row("fp32")
    marks = [t for t in traces_of(page_of(folder), "ladder") if "error_x" in t]
    early = next(t for t in marks if t["x"] == [row.rel_l2.early.mean])
    interval = row.rel_l2.early.interval
    assert early["x"][0] + early["error_x"]["array"][0] == pytest.approx(interval.high)
    assert early["x"][0] - early["error_x"]["arrayminus"][0] == pytest.approx(interval.low)
    assert interval.high < row.rel_l2.early.high


def test_page_of_a_probe_has_every_chart_and_its_choices(tmp_path):
    folder = write_probe(tmp_path, planted=(2, 1), shadows=("flash_fa2", "mine"))
    page = write_probe_page(folder).read_text()
    figures = figures_of(page)
    assert {*figures} == {
        "deviation-map",
        "deviation-curves",
        "heads",
        "streams",
        "histogram",
        "watched",
    }
    for section in re.findall(r'<section id="section-.*?</section>', page, re.DOTALL):
        selects = re.findall(
            r'<select data-choice="([^"]*)".*?<option value="([^"]*)"', section, re.S
        )
        charts = re.findall(r'class="plot" id="([^"]*)"', section)
        for chart in charts:
            metas = [trace["meta"] for trace in figures[chart]["data"]]
            assert dict(selects) in metas, chart
    heads = next(
        trace
        for trace in figures["heads"]["data"]
        if trace["meta"] == {"shadow": "mine", "what": "dq", "metric": "error_ratio"}
    )
    cells = {(y, x): heads["z"][y][x] for y in range(4) for x in range(4)}
    assert max(cells, key=cells.__getitem__) == (2, 1)
    assert page.index(PLANTED) < page.index("<main>")


def test_same_records_of_a_probe_give_the_same_page_and_names_stay_text(tmp_path):
    hostile = "</script><b>x"
    folder = write_probe(tmp_path, events=(Event(1, "finding", hostile, hostile),))
    first = write_probe_page(folder).read_bytes()
    assert write_probe_page(folder).read_bytes() == first
    assert hostile not in first.decode().split('id="data"')[0]


def test_show_and_report_take_a_probe_and_refuse_other_folders(tmp_path, capsys):
    folder = tmp_path / "probe"
    folder.mkdir()
    write_probe(folder)
    assert main(["show", str(folder)]) == 0, "nothing is wrong in it"
    assert main(["report", str(folder)]) == 0
    assert (folder / "probe.html").stat().st_size > 10**6
    with pytest.raises(SystemExit) as caught:
        main(["show", str(tmp_path)])
    assert caught.value.code == 2
    assert "must hold study.json or probe.json" in capsys.readouterr().err
    (folder / "metrics.jsonl").unlink()
    # of one that has ended it is known that there were figures
    write_probe_record(folder, replace(read_probe_record(folder), state="running", log=None))
    with pytest.raises(SystemExit):
        main(["show", str(folder)])
    assert "there are no figures here" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("state", "lead"),
    [("not applicable", "n/a"), ("not measured", "not measured")],
)
def test_a_silent_level_says_its_state_once(finished, monkeypatch, state, lead):
    silent = silent_level("outcome", state, "no run has a held-out loss", cell=state)
    arm = arm_verdict("flash_fa2", "INCONCLUSIVE")
    judged = replace(
        study_verdict(), arms=(replace(arm, levels={**arm.levels, "outcome": silent}),)
    )
    monkeypatch.setattr("stability.report.page.html.verdict_of", lambda _: judged)
    study = read_study(finished)
    page = render(study, ladder_of(study), stamp="without scripts")
    item = re.search(r"<li>(<span[^>]*>outcome.*?)</li>", page)[1]
    assert re.sub("<.*?>", "", item) == f"outcome {lead}: no run has a held-out loss."
    cell = re.search(r'<td data-level="outcome" title="(.*?)">', page)[1]
    assert cell == "no run has a held-out loss."
    assert "operator holds: flash_fa2 at the operator is holds" in re.sub("<.*?>", "", page)


def test_what_stands_in_backticks_is_code_and_nothing_else_is_markup():
    said = prose("take `probe: {every: 2}`, not `a<b`, `${now()}`, <b> or a lone `")
    code = "<code>probe: {every: 2}</code>"
    assert said == f"take {code}, not `a&lt;b`, `${{now()}}`, &lt;b&gt; or a lone `"
