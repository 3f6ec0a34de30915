"""Whatever text stands in the records, the pages show it as text: nothing of it runs or is markup.

Every text that the readers accept is tried; without a browser by what a parser finds in the page,
with one by what happens.
"""

import html
import json
import re
from functools import cache
from html.parser import HTMLParser

import pytest
from plotly.offline import get_plotlyjs

from stability.analysis.study_records import read_study
from stability.report.page.html import write_page, write_probe_page
from tests.sampling import one_in
from tests.stability.report.hostile_records import write_hostile_probe, write_hostile_study

RUN = "window.pwned=1"
TEXTS = {
    "script": f"<script>{RUN}</script>",
    "end of script": f"</script><script>{RUN}</script>",
    "comment": f"<!--<script>{RUN}//-->",
    "image": f"<img src=x onerror={RUN}>",
    "attribute": f'"onmouseover="{RUN}',
    "single quotes": f"' onmouseover='{RUN}",
    "end of title": f"</title></style></textarea><svg onload={RUN}>",
    "address": f"javascript:{RUN}",
    "plotly link": f'<a href="javascript:{RUN}">x',
    "plotly markup": "%{y}<b>x<br>%{customdata}<extra>",
    "entities": f"&lt;script&gt;{RUN}&lt;/script&gt;&quot;&#x22;",
    "template literal": f"${{{RUN}}}`${{{RUN}}}`",
    "jinja": "{{7*7}}{% raw %}{# x #}",
    "line separators": f"a\u2028{RUN}\u2029b",
    "right to left": "\u202egpj.exe\u202c",
    "emoji": "\N{PILE OF POO}\N{ZERO WIDTH JOINER}\N{WOMAN}",
    "path": "../../etc/passwd",
    "long": "a_long_name." * 25,
}
PAGES = {
    "study": (write_hostile_study, lambda folder: write_page(read_study(folder), folder)),
    "probe": (write_hostile_probe, write_probe_page),
}


@pytest.fixture(scope="module", params=PAGES)
def written(request, tmp_path_factory):
    """A function that writes the page of records full of some texts, and returns its path."""
    record, write = PAGES[request.param]

    @cache
    def page_of(*texts):
        return write(record(tmp_path_factory.mktemp("hostile"), *texts))

    return page_of


class Page(HTMLParser):
    """What a parser finds in a page: its tags with the names of their attributes, and its texts."""

    def __init__(self, path):
        super().__init__()
        self.tags, self.code, self.shown = [("",)], [], []
        # less plotly's own source, which is not ours
        self.feed(path.read_text(encoding="utf-8").replace(get_plotlyjs(), ""))
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, *(name for name, _ in attrs)))

    def handle_endtag(self, tag):
        self.tags.append((f"/{tag}",))

    def handle_comment(self, data):
        self.tags.append(("comment", data))

    def handle_data(self, data):
        is_code = self.tags[-1][0] in ("style", "script")
        (self.code if is_code else self.shown).append(data)


@pytest.mark.parametrize("kind", one_in(4, TEXTS))
def test_a_text_adds_no_tag_no_attribute_and_no_code(written, kind):
    text = TEXTS[kind]
    page = Page(written(text))
    harmless = Page(written(re.sub(r"[^/]+", "x", text)))  # a slash parts the names of metrics
    assert page.tags == harmless.tags
    style, data, script = page.code
    assert [style, script] == [harmless.code[0], harmless.code[2]]
    assert "<" not in data
    assert json.loads(data)["figures"]
    assert sum(text in said for said in page.shown) >= 5


IN_CHARTS = [text for text in TEXTS.values() if "/" not in text and len(text) < 100]
"""Those that can be a layer's name, and leave a chart room to draw."""
FOREIGN = """
return [...document.querySelectorAll(
  "img, iframe, object, embed, a[href], [onerror], [onload], [onmouseover], main script")]
  .map((element) => element.outerHTML);
"""
SELECTS = """
return [...document.querySelectorAll("select[data-choice]")].map((select) => [
  select.closest("[data-section]").dataset.section, select.dataset.choice,
  [...select.options].map((option) => option.value)]);
"""


ROOM = "return document.getElementById(arguments[0])._fullLayout.xaxis._length"
SELECTED = "return [...document.querySelectorAll('select[data-choice]')].map((s) => s.value)"


@pytest.fixture
def full(browser, written):
    """The page of records that hold every text somewhere, wholly drawn; tests only look at it."""
    page = written(*(text for text in TEXTS.values() if len(text) < 100))
    if browser.shown != (page, 1200, False):
        browser.open(page)
        browser.draw_all()
    return browser


def is_unharmed(browser):
    """Whether nothing has run, no element is there that the page did not bring, and all is calm."""
    assert browser.run("return window.pwned ?? null") is None
    assert browser.run(FOREIGN) == []
    assert browser.run("return document.scripts.length") == 3
    assert browser.console() == []
    assert browser.requests() == []
    return True


@pytest.mark.slow
def test_texts_are_shown_as_they_are_in_tables_and_charts(full):
    tables = full.run("return document.querySelector('main').textContent")
    chart = full.run("return document.getElementById('deviation-map').textContent")
    assert [text for text in TEXTS.values() if len(text) < 100 and text not in tables] == []
    assert [text for text in IN_CHARTS if text not in chart] == []
    assert is_unharmed(full)


@pytest.mark.slow
def test_texts_pop_up_as_they_are(full):
    cells = full.traces("deviation-map")[0]
    shown = [html.unescape(layer) for layer in cells["y"]]
    for text in IN_CHARTS:
        assert text in full.hover("deviation-map", 0, cells["x"].index("40"), shown.index(text))
    for plot in full.plots():
        for index, trace in enumerate(full.traces(plot)[:3]):
            marks = [point for point, y in enumerate(trace["y"] or ()) if y is not None]
            if trace["hoverinfo"] != "skip" and trace["type"] != "heatmap" and marks:
                assert full.hover(plot, index, marks[0])
    assert is_unharmed(full)


@pytest.mark.slow
def test_texts_can_be_chosen_and_stand_in_the_address(full):
    full.shown = None  # what is chosen here stays so
    for section, name, options in full.run(SELECTS):
        for option in options[-1:]:
            full.choose(section, name, option)
    chosen = full.run(SELECTED)
    address = full.driver.current_url
    full.driver.get("about:blank")
    full.driver.get(address)
    full.draw_all()
    assert full.run(SELECTED) == chosen
    assert is_unharmed(full)


def test_a_long_name_leaves_a_phone_room_for_page_and_chart(browser, written):
    browser.open(written(TEXTS["long"]), width=400)
    browser.draw(*browser.plots())
    assert browser.run("return document.scrollingElement.scrollWidth") <= 400
    assert browser.run(ROOM, "deviation-map") >= 130
    assert TEXTS["long"] in browser.hover("deviation-map", 0, 2, 0)
