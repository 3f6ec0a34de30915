"""A probe in the terminal and as a page: what stands out is said first, nothing is broken."""

import json
import re

import pytest
from rich.console import Console

from stability.cli.main import main
from stability.records.events import Event
from stability.report.page.html import write_probe_page
from stability.report.terminal.probe import print_probe
from tests.stability.report.synthetic_probe import write_probe

HOSTILE = "</script><b>x"
PLANTED = "model.layers.2.self_attn, head 1: error ratio stands out since step 20"


def _printed(folder, width=120):
    console = Console(width=width, record=True, force_terminal=False)
    print_probe(folder, console)
    return console.export_text()


def test_the_table_says_what_stands_out_and_has_a_line_a_layer(tmp_path):
    text = _printed(write_probe(tmp_path, planted=(2, 1)))
    assert text.index(PLANTED) < text.index("error")
    rows = [line for line in text.splitlines() if re.match(r"model\.layers\.\d", line)]
    assert [row.split()[0] for row in rows[-4:]] == [
        f"model.layers.{i}.self_attn" for i in range(4)
    ]
    assert "4 layers, 6 steps looked at of 55" in text
    assert "own" in text


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_a_narrow_terminal_gets_fewer_columns_not_broken_ones(tmp_path, width):
    text = _printed(write_probe(tmp_path), width)
    table = text[text.index("layer ") :]
    assert "…" not in table.split("error:")[0]
    assert max(len(line) for line in text.splitlines()) <= width
    assert ("logit" in text) == (width >= 60)


def test_a_healthy_probe_says_so_and_one_without_golden_has_errors_of_gradients(tmp_path):
    text = _printed(write_probe(tmp_path, golden=False))
    assert "No layer or head stands out from the others, and none is biased." in text
    assert "ratio" not in text
    assert "of dq" in text


def test_events_are_listed_and_the_rest_counted(tmp_path):
    events = tuple(Event(step, "finding", "layer_0", f"wrong {step}") for step in range(12))
    text = _printed(write_probe(tmp_path, events=(Event(3, "alert", "", "too big"), *events)))
    assert "alert  step 3: too big" in text
    assert "finding  step 0, layer_0: wrong 0" in text
    assert "and 5 more" in text


def _data(page):
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    return json.loads(found.group(1))


def test_the_page_has_every_chart_and_its_choices(tmp_path):
    folder = write_probe(tmp_path, planted=(2, 1), shadows=("flash_fa2", "mine"))
    page = write_probe_page(folder).read_text()
    data = _data(page)
    assert {*data["figures"]} == {
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
            metas = [trace["meta"] for trace in data["figures"][chart]["data"]]
            assert dict(selects) in metas, chart
    heads = next(
        trace
        for trace in data["figures"]["heads"]["data"]
        if trace["meta"] == {"shadow": "mine", "what": "dq", "metric": "error_ratio"}
    )
    cells = {(y, x): heads["z"][y][x] for y in range(4) for x in range(4)}
    assert max(cells, key=cells.__getitem__) == (2, 1)
    assert page.index(PLANTED) < page.index("<main>")


def test_the_same_records_give_the_same_page_and_names_stay_text(tmp_path):
    folder = write_probe(tmp_path, events=(Event(1, "finding", HOSTILE, HOSTILE),))
    first = write_probe_page(folder).read_bytes()
    assert write_probe_page(folder).read_bytes() == first
    assert HOSTILE not in first.decode().split('id="data"')[0]


def test_show_and_report_take_a_probe_and_refuse_other_folders(tmp_path, capsys):
    folder = tmp_path / "probe"
    folder.mkdir()
    write_probe(folder)
    assert main(["show", str(folder)]) == 0
    assert main(["report", str(folder)]) == 0
    assert (folder / "probe.html").stat().st_size > 10**6
    with pytest.raises(SystemExit) as caught:
        main(["show", str(tmp_path)])
    assert caught.value.code == 2
    assert "must hold study.json or probe.json" in capsys.readouterr().err
    (folder / "metrics.jsonl").unlink()
    with pytest.raises(SystemExit):
        main(["show", str(folder)])
    assert "there are no figures here" in capsys.readouterr().err
