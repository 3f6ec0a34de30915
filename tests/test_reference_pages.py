"""The reference pages of the site leave nothing out: every key, metric and public name is there."""

import re

import pytest

import attention_kernels
import stability
from tests.test_site import SCRIPT

PAGES = ("command_line_page", "keys_page", "metrics_page", "python_page")


@pytest.mark.parametrize("page", PAGES)
def test_each_page_of_the_reference_leads_to_the_glossary_first(page):
    title, sentence = SCRIPT[page]().split("\n\n")[:2]
    assert title.startswith("# ")
    assert sentence.strip() == "Words of this project are explained in the [glossary](glossary.md)."


def _rows(page: str) -> list[list[str]]:
    """Return the cells of all rows of a page's tables, less their headings."""
    lines = [x for x in page.splitlines() if x.startswith("| `")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def test_each_key_says_what_it_is():
    rows = _rows(SCRIPT["keys_page"]())
    assert len(rows) > 100
    assert [row for row in rows if not all(row)] == []


@pytest.mark.parametrize("package", [stability, attention_kernels], ids=lambda x: x.__name__)
def test_each_public_name_is_on_the_page(package):
    shown = re.findall(r"^::: ([\w.]+)\.(\w+)$", SCRIPT["python_page"](), re.MULTILINE)
    own = {name for home, name in shown if home.partition(".")[0] == package.__name__}
    assert own == {*package.__all__}
