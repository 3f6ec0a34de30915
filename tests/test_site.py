"""The documentation as a site: it builds strictly, offline, and no link of it leads nowhere."""

import runpy
import shutil
from pathlib import Path

import pytest

from stability.cli.main import VERBS

pytest.importorskip("zensical", reason="the extra docs is not installed")
ROOT = Path(__file__).parent.parent
SCRIPT = runpy.run_path(str(ROOT / "docs" / "build_site.py"))


def test_the_reference_is_made_of_the_code():
    verbs = SCRIPT["command_line_page"]()
    assert all(f"## stability {verb}\n" in verbs for verb in VERBS)
    assert "usage: stability fork" in verbs
    keys = SCRIPT["keys_page"]()
    row = next(line for line in keys.splitlines() if line.startswith("| `gradient_sequences` |"))
    assert "`int`" in row
    assert "How many sequences of the batch gradient evidence looks at; 0: all." in row
    assert "| `rel_l2` | drift of all weights: relative L2 |" in SCRIPT["metrics_page"]()
    assert "::: stability.intercept.session.shadow" in SCRIPT["python_page"]()


def test_every_page_of_the_documentation_is_in_the_site():
    listed = {origin for pages in SCRIPT["PAGES"].values() for origin in pages.values()}
    there = {str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md")}
    assert there <= listed


def test_a_link_that_leads_nowhere_is_named(tmp_path):
    (tmp_path / "a.html").write_text('<a id="x" href="b.html#y">')
    (tmp_path / "b.html").write_text('<a href="a.html#x"></a><img src="no.png">')
    found = SCRIPT["broken_links"](tmp_path)
    assert sorted(found) == ["a.html: b.html#y", "b.html: no.png"]
    with pytest.raises(ValueError, match="leads nowhere"):
        SCRIPT["_linked"]("[x](no.md)", ROOT / "docs" / "look.md", {}, tmp_path)


@pytest.mark.slow
def test_the_site_builds_and_fetches_nothing(tmp_path):
    site = SCRIPT["build"](tmp_path / "site")
    pages = {path.name: path.read_text(encoding="utf-8") for path in site.rglob("*.html")}
    assert {"index.html", "cli.html", "keys.html", "metrics.html", "python.html"} <= pages.keys()
    assert "rows_of" not in pages["index.html"]
    assert "error_ratio" in pages["metrics.html"]
    # mkdocstrings has filled in what a public function says
    assert "candidate" in pages["python.html"]
    for text in pages.values():
        assert 'src="http' not in text
        assert 'href="https://fonts' not in text
    shutil.rmtree(site)
