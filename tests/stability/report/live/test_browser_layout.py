"""The dashboard's list and comparison at every width and in both themes: nothing is out of sight.

What a study says is held elsewhere (`test_study_summary`, `test_comparison`).
"""

import shutil
from contextlib import ExitStack

import pytest

from stability.records.run_lock import hold
from tests.stability.report.live.serving import TOKEN, serving, settled
from tests.stability.report.page_audit import crowded_ticks, texts
from tests.stability.report.synthetic_probe import write_probe

MANY = 60
SEEN = {
    "empty": ["There is no study here yet"],
    "mixed": ["1 running", "1 failed", "1 stopped", "14 finished", "can't be read", "looked at"],
    "many": [f"kernel-of-day-{number:02}" for number in range(MANY)],
    "compared": ["2 studies compared", "The ladders", "Drift"],
}
"""By page, words that are on it once everything has been read."""
HOLDS = (
    # while a page is loaded anew it has no body
    "return document.body !== null"
    " && arguments[0].every((each) => document.body.innerText.includes(each))"
)
# charts follow the window by themselves, a moment later
FITS = """
return [...document.querySelectorAll(".plot")].every(
  (plot) => Math.abs(plot._fullLayout?.width - plot.clientWidth) < 1);
"""


def write_mixed(runs, synthetic, finished):
    """Write a study in every state; return the run that a process has to hold."""
    shutil.copytree(finished, runs / "finished")
    synthetic.write_synthetic(runs / "finished-by-night", yardstick="nudge")
    for name, state in (("in-training", "running"), ("failed", "failed"), ("killed", "running")):
        synthetic.write_study_json(runs / name)
        run = synthetic.write_run(runs / name, synthetic.ARMS[0], 0, state=state, until=80)
        if name == "in-training":
            trained = run
    synthetic.write_study_json(runs / "torn")
    (runs / "torn" / "study.json").write_text('{"config": {')
    write_probe(runs / "probed", planted=(2, 1))
    return trained


@pytest.fixture(scope="module")
def addresses(finished, synthetic, tmp_path_factory):
    """By name, the address of each page; all are served at once."""
    folder = tmp_path_factory.mktemp("laid-out")
    for number in range(MANY):
        shutil.copytree(finished, folder / "many" / f"kernel-of-day-{number:02}")
    (folder / "empty").mkdir()
    with ExitStack() as stack:
        stack.enter_context(hold(write_mixed(folder / "mixed", synthetic, finished)))
        lists = {
            name: stack.enter_context(serving(folder / name)) for name in ("empty", "mixed", "many")
        }
        for served in lists.values():
            settled(served)
        found = {name: f"http://{each.host}/?token={TOKEN}" for name, each in lists.items()}
        chosen = "study=finished&study=finished-by-night"
        yield {**found, "compared": f"http://{lists['mixed'].host}/compare?{chosen}"}


@pytest.fixture(scope="module", params=SEEN)
def page(request, browser, addresses):
    """A browser with one of the pages, once everything on it has been read and drawn."""
    browser.set_online(True)
    browser.set_size(1280)
    if request.param == "compared":
        browser.driver.get(addresses["mixed"])  # for its cookie
    browser.driver.get(addresses[request.param])
    browser.wait(HOLDS, SEEN[request.param])
    if request.param == "compared":
        browser.draw_all()
    yield browser
    browser.driver.delete_all_cookies()
    browser.driver.get("about:blank")
    browser.set_online(False)
    browser.shown = None
    browser.console()
    browser.requests()


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [400, 1280, 2000])
def test_text_is_large_strong_and_whole_and_nothing_wider_than_the_page(page, width, dark):
    page.set_size(width)
    page.set_theme(dark=dark)
    page.wait(FITS)
    page.settle()
    assert page.run("return document.scrollingElement.scrollWidth") <= width
    found = texts(page)
    assert found
    assert [str(text) for text in found if text.size < 12] == []
    assert [str(text) for text in found if text.contrast < 4.5 and not text.off] == []
    assert [str(text) for text in found if text.is_clipped(width)] == []
    assert crowded_ticks(page) == []
