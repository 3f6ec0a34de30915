"""The report as a reader's browser shows it: from disk, offline, and equal to the records."""

import json
import re

import pytest

from stability.analysis.study_records import read_study
from stability.report.page.html import write_page
from tests.sampling import one_in
from tests.stability.report.page_audit import crowded_ticks, texts
from tests.stability.report.synthetic_full import write_full

VIEWS = [(width, dark) for width in (400, 1280, 2000) for dark in (False, True)]
ARM = "flash_fa2"
DRAWN = "return document.documentElement.dataset.drawn"
INK = """
return [
  getComputedStyle(document.body).backgroundColor,
  ...[...document.querySelectorAll("h1, td")].map((text) => getComputedStyle(text).color),
  ...[...document.querySelectorAll(".plot .xtick text, .plot .xtitle")].map(
    (text) => getComputedStyle(text).fill),
];
"""
WORDS = """
return [...document.querySelectorAll(".plot")].map((plot) => [
  plot.id, plot._fullLayout.xaxis?.title.text, plot._fullLayout.yaxis?.title.text,
  plot.closest("figure").querySelector("figcaption").innerText,
]);
"""
AT_PRINT = """
addEventListener("beforeprint", () => {
  const drawn = [...document.querySelectorAll(".plot > .plot-container")];
  window.onPaper = drawn.length;
  window.widest = Math.max(...drawn.map((plot) => plot.querySelector("svg").width.baseVal.value));
});
"""
# the sections of tables that are wider than their place
TOO_WIDE = """
return [...document.querySelectorAll("table")]
  .filter((table) => table.offsetWidth > table.parentElement.offsetWidth)
  .map((table) => table.closest("section").id);
"""
# how strong each row of an arm is, in the tables
ROWS = """
const strength = (element) =>
  element ? getComputedStyle(element).opacity * strength(element.parentElement) : 1;
return [...document.querySelectorAll(`[data-arm-row="${arguments[0]}"] th`)].map(strength);
"""
EVERY_ARM = ("ladder", "loss", "loss-difference", "drift")
"""Charts that show all arms at once."""


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    return write_full(tmp_path_factory.mktemp("studies") / "full")


@pytest.fixture(scope="module")
def report(study):
    return write_page(read_study(study), study)


@pytest.fixture(
    scope="module", params=VIEWS, ids=lambda v: f"{v[0]}px-{'dark' if v[1] else 'light'}"
)
def size(request):
    return request.param


@pytest.fixture
def view(browser, report, size):
    """The report at one width and theme, wholly drawn; a test leaves it as it was."""
    if browser.shown != (report, *size):
        browser.open(report, width=size[0], dark=size[1])
        browser.draw_all()
    return browser


@pytest.fixture
def opened(browser, report):
    """The report, opened anew: a test may do with it what it likes."""
    browser.open(report)
    return browser


def recorded(study, arm, name, step):
    """The mean over the seeds of what the logs say, read without the code under test."""
    found = []
    for log in sorted(study.glob(f"{arm}/seed-*/metrics.jsonl")):
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        found += [line[name] for line in lines if line["step"] == step and name in line]
    assert len(found) == 2
    return sum(found) / 2


def numbers(text):
    """Every number of a text that is written with at least five digits."""
    plain = text.replace("\N{MINUS SIGN}", "-").replace(",", "")
    found = re.findall(r"[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?", plain)
    digits = [re.sub(r"e.*|\D", "", number).lstrip("0") for number in found]
    return [float(n) for n, kept in zip(found, digits, strict=True) if len(kept) >= 5]


def place_of(browser, plot, arm, x=None, y=None):
    """The trace and point of an arm's mark at x or y, for a hover."""
    near = [value is None or pytest.approx(value, rel=1e-4) for value in (x, y)]
    for index, trace in enumerate(browser.traces(plot)):
        if trace["meta"].get("arm") == arm and trace["hoverinfo"] != "skip" and trace["y"]:
            for point, at in enumerate(zip(trace["x"], trace["y"], strict=True)):
                if all(n is True or v == n for v, n in zip(at, near, strict=True)):
                    return index, point
    raise AssertionError(f"{plot}: no mark of {arm} at ({x}, {y})")


def drawn(browser):
    """What each chart holds, and what it says."""
    says = "return document.getElementById(arguments[0]).textContent"
    return {plot: (browser.traces(plot), browser.run(says, plot)) for plot in browser.plots()}


def switch(browser, arm):
    browser.click(f'button[data-arm="{arm}"]')
    browser.settle()
    return browser.run(
        "return document.querySelector(`button[data-arm='${arguments[0]}']`).ariaPressed", arm
    )


# ---- it opens, whole and quiet


def test_it_opens_from_disk_offline_with_every_chart_and_without_a_complaint(browser, report, size):
    browser.open(report, width=size[0], dark=size[1])
    browser.draw_all()
    count = int(browser.run(DRAWN))
    assert count == len(browser.plots()) >= 8
    for plot in browser.plots():
        assert browser.traces(plot), f"{plot} is empty"
    assert browser.console() == []
    assert browser.requests() == []


def test_charts_are_drawn_as_they_come_near(browser, report):
    browser.open(report, height=600)
    browser.wait(f"{DRAWN} > 0")
    count = (
        "return document.documentElement.dataset.drawn - document.querySelectorAll('.plot').length"
    )
    assert browser.run(count) < 0
    browser.draw(browser.plots()[-1])
    assert int(browser.run(DRAWN)) < len(browser.plots())


# ---- it can be read


def test_nothing_is_wider_than_the_page(view):
    assert view.run("return document.scrollingElement.scrollWidth") <= view.width


def test_text_is_large_strong_and_whole(view):
    found = texts(view)
    assert len(found) > 300
    assert {text.plot for text in found} == {"", *view.plots()}
    assert [str(text) for text in found if text.size < 12] == []
    assert [str(text) for text in found if text.contrast < 4.5 and not text.off] == []
    assert [str(text) for text in found if text.is_clipped(view.width)] == []


# of each arm that is judged, the levels whose cell, with its name, lies within the page
LEVELS_IN_SIGHT = """
const inside = (box) => box.width > 0 && box.left >= 0 && box.right <= innerWidth;
const named = (cell) => innerWidth > 900
  ? document.querySelectorAll("#evidence thead th")[cell.cellIndex].innerText
  : getComputedStyle(cell, "::before").content.replaceAll('"', "");
const scroll = document.querySelector("#evidence .scroll");
return [...document.querySelectorAll("#evidence tbody tr")].map((row) => [
  scroll.scrollWidth <= scroll.clientWidth,
  ...[...row.cells].slice(2).filter((cell) => inside(cell.getBoundingClientRect())).map(named),
]);
"""


@pytest.mark.parametrize("width", [360, 500, 899, 901, 1280, 1500, 2000])
def test_the_verdict_is_in_sight_at_any_width_and_no_level_behind_an_edge(browser, report, width):
    browser.open(report, width=width)
    rows = browser.run(LEVELS_IN_SIGHT)
    assert rows == [[True, "operator", "gradient", "training", "outcome"]] * 2


# of each chart the height of its drawing and of its place on the page
HEIGHTS = """
return [...document.querySelectorAll(".plot")].map(
  (plot) => [plot.id, plot._fullLayout.height, plot.clientHeight]);
"""
AS_WIDE_AS_ITS_PLACE = """
return [...document.querySelectorAll(".plot")].every(
  (plot) => Math.abs(plot._fullLayout.width - plot.clientWidth) < 1);
"""


def test_a_window_that_is_made_narrow_and_wide_again_leaves_each_chart_its_height(opened):
    found = {}
    opened.draw_all()
    for width in (1200, 1000, 400, 1200):
        opened.set_size(width)
        opened.wait(AS_WIDE_AS_ITS_PLACE)
        opened.settle()
        heights = opened.run(HEIGHTS)
        assert [plot for plot, drawn, place in heights if drawn != place] == []
        assert found.setdefault(width > 600, heights) == heights
    assert found[True] != found[False]


def test_ticks_do_not_lie_on_one_another(view):
    assert crowded_ticks(view) == []


def test_charts_name_their_axes_and_say_what_good_and_bad_look_like(view):
    words = view.run(WORDS)
    assert [plot for plot, x, y, _ in words if not x or not y] == []
    for plot, _, _, caption in words:
        assert re.search(r"Good: \S.*Bad: \S", caption, re.DOTALL), plot


def test_dusk_changes_the_colours_of_page_and_charts(opened):
    opened.draw_all()
    day = opened.run(INK)
    opened.set_theme(dark=True)
    opened.settle()
    night = opened.run(INK)
    assert len(day) == len(night) > 20
    assert all(a != b for a, b in zip(day, night, strict=True))
    assert all(text.contrast >= 4.5 or text.off for text in texts(opened))


# ---- it says what the records say


@pytest.mark.parametrize(("metric", "step"), [("rel_l2", 20), ("w1", 5)])
def test_hovering_a_drift_reads_the_record(view, study, metric, step):
    want = recorded(study, ARM, f"drift/all/{metric}", step)
    first = view.choose("drift", "metric", metric)
    said = view.hover("drift", *place_of(view, "drift", ARM, step, want))
    view.choose("drift", "metric", first)
    assert ARM in said
    assert want in [pytest.approx(number, rel=1e-5) for number in numbers(said)]


def test_hovering_a_loss_reads_the_record(view, study):
    want = recorded(study, ARM, "train/loss", 137)
    said = view.hover("loss", *place_of(view, "loss", ARM, 137, want))
    step = int(re.search(r"\d+", said).group())  # on a phone steps lie 1.6 px apart
    assert abs(step - 137) <= 2
    want = recorded(study, ARM, "train/loss", step)
    (line,) = [line for line in said.splitlines() if ARM in line]  # all arms pop up at once
    assert want in [pytest.approx(number, rel=1e-5) for number in numbers(line)]


@pytest.mark.parametrize("step", [20, 200])
def test_hovering_a_mark_of_the_ladder_reads_the_record(view, study, step):
    want = recorded(study, ARM, "drift/all/rel_l2", step)
    said = view.hover("ladder", *place_of(view, "ladder", ARM, want))
    assert want in [pytest.approx(number, rel=1e-5) for number in numbers(said)]


@pytest.mark.parametrize(("what", "metric"), one_in(2, [("dq", "error_ratio"), ("dk", "rel_fro")]))
def test_hovering_a_cell_of_the_heat_map_reads_the_record(view, study, what, metric):
    chosen = {"arm": ARM, "what": what, "metric": metric}
    first = {
        name: view.run(
            f"return document.querySelector('[data-section=deviation] [data-choice={name}]').value"
        )
        for name in chosen
    }
    for name, option in chosen.items():
        view.choose("deviation", name, option)
    (cells,) = [trace for trace in view.traces("deviation-map") if trace["type"] == "heatmap"]
    point, row = cells["x"].index("60"), cells["y"].index("layer_3")
    said = view.hover("deviation-map", view.traces("deviation-map").index(cells), point, row)
    for name, option in first.items():
        view.choose("deviation", name, option)
    assert "layer_3" in said
    want = recorded(study, ARM, f"deviation/layer_3/{what}/{metric}", 60)
    assert want in [pytest.approx(number, rel=1e-5) for number in numbers(said)]


# ---- arms are switched off and on


def test_a_switched_off_arm_leaves_every_chart_and_comes_back_as_it_was(view):
    before = drawn(view)
    named = {plot for plot, (traces, _) in before.items() if _of(ARM, traces)}
    assert named >= set(EVERY_ARM)
    assert set(view.run(ROWS, ARM)) == {1}
    assert switch(view, ARM) == "false"
    assert all(strength < 1 for strength in view.run(ROWS, ARM))
    off = drawn(view)
    for plot, (traces, text) in off.items():
        assert not _of(ARM, traces), plot
        assert ARM not in text, plot
        others = [trace for trace in before[plot][0] if trace["meta"].get("arm") != ARM]
        assert traces == others, plot
    assert all(off[plot][1] != before[plot][1] or off[plot][0] != before[plot][0] for plot in named)
    assert switch(view, ARM) == "true"
    assert drawn(view) == before


def _of(arm, traces):
    return [trace for trace in traces if trace["meta"].get("arm") == arm]


def test_a_section_that_shows_one_arm_goes_on_to_another(opened):
    opened.draw("deviation-map", "deviation-curves")
    opened.choose("deviation", "arm", ARM)
    assert _of(ARM, opened.traces("deviation-map"))
    switch(opened, ARM)
    for plot in ("deviation-map", "deviation-curves"):
        assert opened.traces(plot)
        assert not _of(ARM, opened.traces(plot))


def test_the_baseline_is_pinned(opened):
    button = opened.driver.find_element("css selector", 'button[data-arm="baseline"]')
    assert not button.is_enabled()
    assert button.get_attribute("aria-pressed") == "true"


def test_what_was_chosen_survives_a_reload(opened):
    switch(opened, ARM)
    switch(opened, "nudge")
    opened.choose("drift", "metric", "max_abs")
    address = opened.driver.current_url
    opened.driver.get("about:blank")
    opened.driver.get(address)
    opened.draw("drift")
    assert opened.run(
        "return [...document.querySelectorAll('[aria-pressed=false]')].map((b) => b.dataset.arm)"
    ) == [ARM, "nudge"]
    traces = opened.traces("drift")
    assert {trace["meta"].get("metric") for trace in traces if "arm" in trace["meta"]} == {
        "max_abs"
    }
    assert not _of(ARM, traces)
    assert _of("fp32", traces)
    assert opened.console() == []


def test_every_chart_is_on_paper_though_nobody_scrolled(opened):
    opened.run(AT_PRINT)
    pdf = opened.print_pdf()
    assert opened.run("return window.onPaper") == len(opened.plots())
    assert len(re.findall(rb"/Type\s*/Page\b", pdf)) > 1


def test_no_table_is_wider_than_paper(opened):
    """Paper has no edge to scroll behind: 718 px of A4 between the browser's own margins."""
    opened.set_media("print")
    opened.set_size(718)
    assert opened.run(TOO_WIDE) == []
    opened.set_media("")


def test_no_chart_is_wider_than_paper_and_each_is_as_wide_as_the_screen_again(opened):
    """A4 has 674 px between the browser's own margins and the page's."""
    opened.draw_all()
    opened.run(AT_PRINT)
    opened.print_pdf()
    assert opened.run("return window.widest") <= 674
    opened.wait("return document.getElementById('drift')._fullLayout.width > 1000")
