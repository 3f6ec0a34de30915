"""The documentation as a site: it builds strictly, offline, and no link of it leads nowhere."""

import dataclasses
import os
import re
import runpy
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

import attention_kernels
import stability
from stability.cli.main import VERBS
from stability.cli.reference import GROUPS, REFERENCE
from stability.config.command_study import CommandConfig
from stability.config.study import StudyConfig

pytest.importorskip("zensical", reason="the extra docs is not installed")
ROOT = Path(__file__).parent.parent
SCRIPT = runpy.run_path(str(ROOT / "docs" / "scripts" / "build_site.py"))


def test_the_reference_is_made_of_the_code():
    verbs = REFERENCE["cli"]()
    assert all(f"## stability {verb}\n" in verbs for verb in VERBS)
    assert "usage: stability fork" in verbs
    keys = REFERENCE["keys"]()
    row = next(line for line in keys.splitlines() if line.startswith("| `gradient_sequences` |"))
    assert "`int`" in row
    assert "How many sequences of the batch gradient evidence looks at; 0: all." in row
    assert "| `rel_l2` | drift: relative L2 |" in REFERENCE["metrics"]()
    assert "::: stability.intercept.session.shadow" in SCRIPT["python_page"]()


def _nested_in(kind: type) -> set[type]:
    """Return the dataclasses that a dataclass has as fields, at any depth."""
    hints = get_type_hints(kind)
    kinds = [x for hint in hints.values() for x in (hint, *get_args(hint))]
    found = {x for x in kinds if dataclasses.is_dataclass(x)}
    return found.union(*(_nested_in(x) for x in found))


def test_every_key_of_a_study_is_in_the_reference():
    shown = {kind for kinds in GROUPS.values() for kind in kinds}
    asked = _nested_in(StudyConfig) | _nested_in(CommandConfig) | {StudyConfig, CommandConfig}
    assert {kind.__name__ for kind in asked} <= {kind.__name__ for kind in shown}


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


class _Fetched(HTMLParser):
    """Gathers what a browser fetches of other hosts to show a page, which no mere link is."""

    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attrs):
        given = {name: value or "" for name, value in attrs if not name.startswith("xmlns")}
        if tag not in ("a", "area", "base"):
            self.found += [value for value in given.values() if _is_elsewhere(value)]
        self.found += _of_style(given.get("style", ""))

    def handle_data(self, data):
        self.found += _of_style(data)


def _is_elsewhere(value):
    return re.match(r"\s*(https?:)?//", value) is not None


def _of_style(text):
    """Return what a style sheet fetches of other hosts."""
    return re.findall(r"""(?:url\(|@import)\s*["']?((?:https?:)?//[^"')\s]+)""", text)


def fetched(site):
    """Return what the pages and style sheets of a folder fetch of other hosts, by file."""
    found = {}
    for path in site.rglob("*.html"):
        page = _Fetched()
        page.feed(path.read_text(encoding="utf-8"))
        found[path.name] = page.found
    for path in site.rglob("*.css"):
        found[path.name] = _of_style(path.read_text(encoding="utf-8"))
    return {name: each for name, each in found.items() if each}


@pytest.mark.parametrize(
    "planted",
    [
        '<script src="https://x.org/a.js"></script>',
        '<script src="//x.org/a.js"></script>',
        '<link rel="stylesheet" href="https://x.org/a.css">',
        '<link rel="preconnect" href="https://fonts.x.org">',
        '<img srcset="https://x.org/a.png 2x">',
        "<style>@import 'https://x.org/a.css';</style>",
        '<p style="background: url(http://x.org/a.png)">',
    ],
)
def test_what_a_page_fetches_is_found(planted, tmp_path):
    (tmp_path / "a.html").write_text(f'<a href="https://x.org">a link</a>{planted}')
    (tmp_path / "a.css").write_text("@font-face { src: url(//x.org/a.woff2) }")
    found = fetched(tmp_path)
    assert len(found["a.html"]) == 1
    assert found["a.css"] == ["//x.org/a.woff2"]


def _without_network():
    """Return what a command begins with, and its variables, so that it reaches no other host."""
    alone = ["unshare", "--map-root-user", "--net"]
    if shutil.which("unshare"):
        tried = subprocess.run([*alone, "true"], capture_output=True)
        if tried.returncode == 0:
            return alone, {}
    # where a user may not leave the network: what asks for a proxy finds none
    return [], dict.fromkeys(("http_proxy", "https_proxy", "all_proxy"), "http://127.0.0.1:9")


@pytest.mark.slow
def test_the_site_builds_without_a_network_and_fetches_nothing(tmp_path):
    begins, proxies = _without_network()
    command = [
        *begins,
        sys.executable,
        ROOT / "docs" / "scripts" / "build_site.py",
        tmp_path / "site",
    ]
    path = os.pathsep.join((str(ROOT), str(ROOT / "kernels")))
    done = subprocess.run(
        command, env=os.environ | proxies | {"PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, (done.stdout, done.stderr)
    site = tmp_path / "site" / "html"
    pages = {path.name: path.read_text(encoding="utf-8") for path in site.rglob("*.html")}
    assert {"index.html", "cli.html", "keys.html", "metrics.html", "python.html"} <= pages.keys()
    assert "rows_of" not in pages["index.html"]
    assert "error_ratio" in pages["metrics.html"]
    # mkdocstrings has filled in what a public function says
    assert "candidate" in pages["python.html"]
    anchors = re.findall(r'id="[\w.]+\.(\w+)"', pages["python.html"])
    assert {*stability.__all__, *attention_kernels.__all__} <= {*anchors}
    assert fetched(site) == {}
    shutil.rmtree(site)


MISTAKES = {
    "[x](no.md)": "no.md: leads nowhere",
    "[x](b.md#no)": "--strict",
    "[x][y]\n\n[y]: b.md#no": "--strict",
    "<img src='no.png'>": "links that lead nowhere: index.html: no.png",
}
"""What is planted into a page, and who refuses it: this project's check, or the generator."""


def _build(tmp_path, planted="", navigation=()):
    """Build a site of two pages, one with `planted`, and with these entries of navigation more."""
    script = runpy.run_path(str(ROOT / "docs" / "scripts" / "build_site.py"))
    (tmp_path / "a.md").write_text(f"# A\n\n[b](b.md#there) {planted}\n")
    (tmp_path / "b.md").write_text("# B\n\n## There\n\nWords.\n")
    (tmp_path / "c.md").write_text("# Glossary\n")  # each page of the reference leads there
    config = script["_config"]
    script["build"].__globals__.update(
        ROOT=tmp_path,
        PAGES={"Home": {"index.md": "a.md", "b.md": "b.md", "glossary.md": "c.md"}},
        python_page=lambda: "# Python\n",
        _config=lambda entries, *folders: config([*entries, *navigation], *folders),
    )
    return script["build"](tmp_path / "site")


@pytest.mark.slow
def test_a_site_with_a_mistake_is_not_built(tmp_path):
    assert (_build(tmp_path) / "b.html").exists(), "two pages without a mistake"
    for planted, said in MISTAKES.items():
        with pytest.raises((ValueError, subprocess.CalledProcessError), match=said):
            _build(tmp_path, planted)
    with pytest.raises(ValueError, match=r"lead nowhere: .*: \./no\.md"):
        _build(tmp_path, navigation=["no.md"])
