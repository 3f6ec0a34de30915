"""Pictures for papers: the records' numbers, at the size asked for, the same bytes each time."""

import csv
import re
import shutil
from pathlib import Path

import matplotlib
import pytest

from stability.analysis.ladder import ladder_of
from stability.analysis.study_records import read_study
from stability.cli.main import main
from stability.records.metric_log import MetricLog
from stability.records.metric_names import deviation_name, drift_name
from stability.records.paths import RunPaths
from stability.records.waterfall_record import WaterfallRecord, write_waterfall
from stability.report.paper.figure import write_figure
from stability.report.paper.figure_options import KINDS
from stability.report.paper.files import Table, to_csv
from stability.report.paper.style import paper_style, shown
from stability.report.view.error_bars import bar_ends, bar_kind
from tests.sampling import one_in

EVIL = "<script>alert(1)</script> $\\frac{1}$ \N{SLIGHTLY SMILING FACE}\x1b[2J 漢 =1+1 " + "x" * 250
ERRORS = {"out": 4e-3, "dq": 8e-3, "dk": 0.0, "dv": 2e-3}
WATERFALL = WaterfallRecord(
    profile="all_bf16",
    format="bf16",
    layer=1,
    step=200,
    point={"causal": True, "changes": []},
    numerics={},
    steps=[
        {"change": "none", "point": "", "format": "", "errors": ERRORS},
        {"change": "lowered", "point": EVIL, "format": "bf16", "errors": ERRORS},
        {"change": "lowered", "point": "lse", "format": "bf16", "errors": {**ERRORS, "dq": 1e-3}},
        {"change": "raised", "point": EVIL, "format": "fp64", "errors": ERRORS},
        {"change": "raised", "point": "lse", "format": "fp64", "errors": {**ERRORS, "dq": 7e-3}},
    ],
    versions={},
)


@pytest.fixture(scope="module")
def study(synthetic, tmp_path_factory) -> Path:
    """A finished study of five seeds with a waterfall on record."""
    folder = tmp_path_factory.mktemp("studies") / "five"
    synthetic.write_synthetic(folder, seeds=[*range(5)])
    write_waterfall(RunPaths.for_run(folder, "flash_all_bf16", 2), WATERFALL)
    return folder


def rows_of(path):
    return list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))


def drawn(folder, kind, path, **chosen):
    chosen = {"width": "column", **chosen}
    if kind == "heatmap":
        chosen = {"metric": "rel_fro", **chosen}
    return write_figure(read_study(folder), kind, path, **chosen)


@pytest.mark.parametrize("kind", one_in(4, KINDS))
def test_the_same_records_give_the_same_bytes_whatever_the_user_has_set(study, tmp_path, kind):
    for file_format in ("pdf", "svg", "png"):
        first, second = (tmp_path / f"{name}.{file_format}" for name in ("a", "b"))
        numbers = drawn(study, kind, first).read_text()
        mine = {"font.size": 30, "svg.hashsalt": None, "figure.facecolor": "red"}
        with matplotlib.rc_context(mine):
            assert drawn(study, kind, second).read_text() == numbers
            assert matplotlib.rcParams["font.size"] == 30
        assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize(("width", "points"), one_in(2, [("column", 241.2), ("page", 496.8)]))
def test_a_picture_is_as_wide_as_the_paper_wants_and_its_text_is_text(
    study, tmp_path, width, points
):
    for kind in KINDS:
        drawn(study, kind, tmp_path / "p.svg", width=width)
        drawn(study, kind, tmp_path / "p.pdf", width=width)
        svg = (tmp_path / "p.svg").read_text()
        assert f'width="{points:g}pt"' in svg
        assert "flash_all_bf16" in "".join(re.findall(r"<text[^>]*>([^<]*)</text>", svg)) or (
            kind == "waterfall" and "all_bf16, layer 1, step 200" in svg
        )
        box = re.search(rb"/MediaBox \[ ?0 0 ([\d.]+) ", (tmp_path / "p.pdf").read_bytes())
        assert float(box.group(1)) == points
        assert b"/FontFile2" in (tmp_path / "p.pdf").read_bytes()
        assert b"CreationDate" not in (tmp_path / "p.pdf").read_bytes()
        assert "dc:date" not in svg


def test_the_ladder_is_that_of_the_records(study, tmp_path):
    rows = rows_of(drawn(study, "ladder", tmp_path / "l.pdf"))
    ladder = ladder_of(read_study(study))
    for row in ladder.rows:
        for when, spread in (("early", row.rel_l2.early), ("last", row.rel_l2.last)):
            found = [each for each in rows if (each["arm"], each["when"]) == (row.arm, when)]
            seeds = {each["seed"]: float(each["rel_l2"]) for each in found}
            mean = seeds.pop("mean", None)
            assert seeds == {str(seed): value for seed, value in spread.per_seed.items()}
            if spread.n:
                assert mean == spread.mean
                ends = [float(each["bar_low"]) for each in found if each["bar"]]
                assert ends == [spread.interval.low]
    assert {row["bar"] for row in rows} == {"", "90 % interval"}


def test_bars_are_a_range_where_there_are_too_few_seeds(finished, tmp_path):
    rows = rows_of(drawn(finished, "ladder", tmp_path / "l.svg"))
    assert {row["bar"] for row in rows} == {"", "range of the seeds"}
    spread = ladder_of(read_study(finished)).row("nudge").rel_l2.last
    assert (*bar_ends(spread), bar_kind(spread)) == (spread.low, spread.high, "range of the seeds")
    assert "mean and range of 2 seeds" in (tmp_path / "l.svg").read_text()


def test_the_drifts_are_those_of_the_records(study, tmp_path):
    rows = rows_of(drawn(study, "drift", tmp_path / "d.svg", metric="w1"))
    recorded = read_study(study)
    for arm in recorded.candidates:
        for seed, run in arm.runs.items():
            mine = [row for row in rows if (row["arm"], row["seed"]) == (arm.name, str(seed))]
            found = {int(row["step"]): float(row["drift"]) for row in mine}
            assert found == {step: x for step, x in run.drift("w1").items() if step > 0}
    shown_as = {row["arm"]: row["shown_as"] for row in rows}
    assert shown_as["rerun"] == "0 (exact)"
    assert shown_as["init_seed"] == "off the scale"
    svg = (tmp_path / "d.svg").read_text()
    assert "rerun: 0 (exact)" in svg
    alone = rows_of(drawn(study, "drift", tmp_path / "d.svg", arm="init_seed"))
    assert {(row["arm"], row["shown_as"]) for row in alone} == {("init_seed", "line")}


def test_the_heat_map_is_that_of_the_records(study, tmp_path):
    rows = rows_of(drawn(study, "heatmap", tmp_path / "h.pdf", arm="fp32", metric="error_ratio"))
    runs = read_study(study).arm("fp32").runs
    name = deviation_name("layer_3", "out", "error_ratio")
    for step in (0, 100):
        mine = [row for row in rows if (row["layer"], row["step"]) == ("layer_3", str(step))]
        found = {row["seed"]: float(row["value"]) for row in mine}
        values = {str(seed): run.series(name)[step] for seed, run in runs.items()}
        assert found == {**values, "mean": sum(values.values()) / 5}


def test_the_waterfall_is_the_recorded_one(study, tmp_path):
    rows = rows_of(drawn(study, "waterfall", tmp_path / "w.svg"))
    lse = {(row["change"], row["result"]): row for row in rows if row["point"] == "lse"}
    assert float(lse["lowered", "dq"]["relative_error"]) == 1e-3
    assert float(lse["raised", "dq"]["share"]) == 7e-3 / 8e-3
    assert lse["raised", "dk"]["share"] == "nan"
    assert EVIL in {row["point"] for row in rows}, "whole in the numbers"
    svg = (tmp_path / "w.svg").read_text()
    assert "<script" not in svg
    assert "x" * 40 not in svg


@pytest.fixture
def evil(synthetic, tmp_path) -> Path:
    """A study whose layers have a name that nobody should have."""
    folder = tmp_path / "evil"
    synthetic.write_study_json(folder, seeds=[0])
    paths = RunPaths.for_run(folder, "flash_fa2", 0)
    log = MetricLog(paths.metrics)
    name = EVIL.replace("/", "")
    for step, value in ((0, 1.0), (10, float("nan")), (20, 1e31)):
        log.append(step, {deviation_name(name, "out", "bias_ulp"): value})
        log.append(step, {deviation_name("=2", "out", "bias_ulp"): -value})
        log.append(step, {deviation_name("$x_1$", "out", "bias_ulp"): value})
    log.close()
    return folder


def test_names_are_text_in_picture_and_numbers(evil, tmp_path):
    for file_format in ("svg", "pdf", "png"):
        path = tmp_path / f"h.{file_format}"
        rows = rows_of(drawn(evil, "heatmap", path, metric="bias_ulp"))
    assert {row["layer"] for row in rows} == {EVIL.replace("/", ""), "'=2", "$x_1$"}
    svg = (tmp_path / "h.svg").read_text()
    assert "<script" not in svg
    assert "&lt;scr" in svg
    assert ">$x_1$</text>" in svg
    with paper_style():
        assert shown("a$b$ 漢\x1b", 40) == "a$b$ \\u6f22\\x1b"
        assert len(shown(EVIL, 20)) == 20


def test_no_number_is_taken_for_a_formula_nor_a_formula_for_a_text():
    table = Table(("a", "b"), [("-1+1", -1.5), ("@x", 1e-7), ('say "a,b"\n', 0.1 + 0.2)])
    assert to_csv(table) == ('a,b\n\'-1+1,-1.5\n\'@x,1e-07\n"say ""a,b""\n",0.30000000000000004\n')


def test_a_study_that_is_not_whole_is_drawn_as_what_it_is(synthetic, tmp_path):
    folder = tmp_path / "ill"
    synthetic.write_study_json(folder, seeds=[0, 1])
    arms = {arm["name"]: arm for arm in synthetic.ARMS}
    synthetic.write_run(folder, arms["baseline"], 0)
    synthetic.write_run(folder, arms["fp32"], 0)
    synthetic.write_run(folder, arms["flash_fa2"], 0, state="diverged", until=60)
    log = MetricLog(RunPaths.for_run(folder, "rerun", 0).metrics)
    log.append(20, {drift_name("all", "rel_l2"): float("inf")})
    log.close()
    drawn(folder, "ladder", tmp_path / "l.svg")
    svg = (tmp_path / "l.svg").read_text()
    assert "diverged" in svg
    assert "1 of 2 seeds" in svg
    assert "no drift on record: missing" in svg
    drawn(folder, "drift", tmp_path / "d.svg")
    assert "nudge: no drift" in (tmp_path / "d.svg").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--what", "laddr"], "what must be one of .*got 'laddr'; nearest: ladder"),
        (["--format", "gif"], "format must be one of pdf, svg, png, got 'gif'"),
        (["--width", "pag"], "width must be one of column, page, got 'pag'; nearest: page"),
        (["--what", "drift", "--metric", "rel_fro"], "metric must be one of rel_l2"),
        (["--what", "heatmap", "--compared", "dx"], "compared must be one of out, lse"),
        (["--what", "drift", "--arm", "flash_fa3"], "got 'flash_fa3'; nearest: flash_fa2"),
        (["--arm", "nudge"], "arm must not be given for a ladder of all arms, got 'nudge'"),
        (["--out", "x.svg", "--format", "pdf"], "out must end in .pdf, got 'x.svg'"),
        (["--what", "drift"], "must have a drift on record, .*baseline/seed-0 is not on record"),
        (["--what", "ladder"], "must have a drift on record, .*baseline/seed-0 is not on record"),
        (["--what", "heatmap"], "rel_fro of out to draw, no arm has it on record; give the study"),
        (["--what", "heatmap", "--arm", "fp32"], "'fp32' has none; run the study with a probe"),
        (["--what", "waterfall"], "run `stability deviate --waterfall --checkpoint RUN --record`"),
    ],
)
def test_what_can_not_be_drawn_is_refused_and_nothing_is_written(
    synthetic, tmp_path, capsys, words, message
):
    synthetic.write_study_json(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(SystemExit) as stop:
        main(["figure", str(tmp_path), *words])
    assert stop.value.code == 2
    said = capsys.readouterr().err
    assert re.search(message, said)
    assert not re.match("stability: (write|draw)_", said), "nobody has typed that function's name"
    assert sorted(tmp_path.rglob("*")) == before


def test_the_verb_writes_beside_the_study_and_says_where(finished, tmp_path, capsys):
    folder = tmp_path / "quick"
    shutil.copytree(finished, folder)
    assert main(["figure", str(folder), "--what", "heatmap", "--arm", "nudge"]) == 0
    picture, numbers = map(Path, capsys.readouterr().out.split())
    assert picture == folder / "figures" / "heatmap-nudge-out-rel_fro.pdf"
    assert numbers == picture.with_suffix(".csv")
    assert sorted((folder / "figures").iterdir()) == [numbers, picture]
    assert main(["figure", str(folder), "--out", str(tmp_path / "mine.svg")]) == 0
    assert (tmp_path / "mine.svg").read_text().startswith("<?xml")
