"""The reference pages of the site leave nothing out: every key, metric and public name is there."""

import inspect
import re
from itertools import pairwise

import pytest

import attention_kernels
import stability
from stability.cli.reference import REFERENCE, name_tables
from stability.config.load import load_study
from stability.records.metric_log import read_lines
from tests.test_site import SCRIPT

PAGES = {**REFERENCE, "python": SCRIPT["python_page"]}
OF_TERMINAL = REFERENCE["python"]()


@pytest.mark.parametrize("page", PAGES)
def test_each_page_of_the_reference_leads_to_the_glossary_first(page):
    title, sentence = PAGES[page]().split("\n\n")[:2]
    assert title.startswith("# ")
    assert sentence.strip() == "Words of this project are explained in the [glossary](glossary.md)."


def _rows(page: str) -> list[list[str]]:
    """Return the cells of all rows of a page's tables, less their headings."""
    lines = [x for x in page.splitlines() if x.startswith("| `")]
    cells = [re.split(r"(?<!\\)\|", line)[1:-1] for line in lines]
    return [[name.strip(" `"), *(cell.strip() for cell in others)] for name, *others in cells]


@pytest.mark.parametrize("page", ["keys", "metrics"])
def test_each_row_says_what_it_is(page):
    rows = _rows(PAGES[page]())
    assert len(rows) > 100
    assert [row for row in rows if not all(row)] == []


@pytest.mark.parametrize("package", [stability, attention_kernels], ids=lambda x: x.__name__)
def test_each_public_name_is_on_the_page(package):
    shown = re.findall(r"^::: ([\w.]+)\.(\w+)$", PAGES["python"](), re.MULTILINE)
    own = {name for home, name in shown if home.partition(".")[0] == package.__name__}
    assert own == {*package.__all__}
    here = OF_TERMINAL.split(f"\n## {package.__name__}\n")[1].split("\n## ")[0]
    assert set(re.findall(r"^### (\w+)$", here.replace("\\_", "_"), re.MULTILINE)) == own


def _said_in_terminal(name: str) -> str:
    return re.split("\n##", OF_TERMINAL.split(f"\n### {name}\n")[1])[0]


@pytest.mark.parametrize(
    "function",
    [stability.record, stability.shadow, attention_kernels.flash_attention],
    ids=lambda x: x.__name__,
)
def test_a_function_is_shown_in_the_terminal_with_each_argument_and_its_docstring(function):
    said = _said_in_terminal(function.__name__)
    signature, words = said.split("```python\n")[1].split("\n```\n")
    shown = re.findall(r"^ {4}\*{0,2}(\w+)(?:: .+)?,$", signature, re.MULTILINE)
    parameters = inspect.signature(function).parameters
    assert shown == [*parameters]
    for name, each in parameters.items():
        if isinstance(each.default, str | int):
            assert re.search(
                rf"^ {{4}}{name}: .* = {re.escape(repr(each.default))},$", signature, re.M
            )
    docstring = inspect.getdoc(function).replace("- ", "")
    assert "".join(docstring.split()) == "".join(words.replace("- ", "").split())


def test_a_class_is_shown_with_its_fields_and_the_methods_that_a_user_calls():
    said = _said_in_terminal("Format")
    assert "- `saturate: bool = False`" in said
    assert "Format.fits(wider: 'Format') -> bool" in said
    assert "`Format.max_value`: Largest finite value." in said
    hooks = re.findall(r"Callback\.(?:on_|_|state_dict)\w*", OF_TERMINAL)
    assert hooks == []
    assert "`stabilised`" in _said_in_terminal("PROFILES")


IN_LOG, IN_LOG_ALONE, IN_SUMMARY, OF_STUDY, WORDS = name_tables()


def name_patterns(section: str) -> dict[str, re.Pattern]:
    """Return what fits the names of each row of a section of the page, by pattern and row."""
    parts = {"PART": r"head_\d+|positions_\d+_\d+", "AT": "early|last"}
    words = {pattern: [cells[0] for cells in rows] for pattern, rows in _tables(WORDS)}
    parts |= {word: "|".join(words[word]) for word in ("RESULT", "SPREAD")}
    parts |= {"GROUP": "|".join(["all", *words["GROUP"]])}
    found = {}
    for pattern, rows in _tables(section):
        for name, _ in rows:
            whole = re.sub("METRIC|ENTRY|TABLE", name, pattern)
            optional = whole.replace("[", "(?:").replace("]", ")?")
            fits = re.sub("[A-Z]{2,}", lambda x: f"(?:{parts.get(x[0], '[^/]+')})", optional)
            found[f"{pattern} {name}"] = re.compile(fits)
    return found


def _tables(section: str) -> list[tuple[str, list[list[str]]]]:
    """Return the headings of a section's tables, and their rows."""
    places = [*re.finditer("^## (.+)$", page := PAGES["metrics"](), re.MULTILINE)]
    bounds = pairwise([*(x.start() for x in places), len(page)])
    text = {x[1]: page[a:b] for x, (a, b) in zip(places, bounds, strict=True)}[section]
    return [(part.partition("\n")[0].strip("`"), _rows(part)) for part in text.split("\n### ")[1:]]


def unnamed(names: set[str], *sections: str) -> list[str]:
    """Return the names that no pattern of these sections fits."""
    patterns = [each for section in sections for each in name_patterns(section).values()]
    return sorted(name for name in names if not any(each.fullmatch(name) for each in patterns))


def _watch_all(content: dict) -> None:
    flash = {"implementation": "flash"}
    content["base"]["probe"] |= {
        **{"heads": True, "positions": 2, "inside": True, "inherited": True, "gradient_every": 2},
        "shadows": [{**flash, "profile": "all_bf16"}, {**flash, "profile": "fa2"}],
    }
    content["base"]["watch"] = {"every": 2}
    content["base"]["train"] |= {"steps": 4, "snapshot_steps": [2]}
    content["arms"] = {name: content["arms"][name] for name in ("baseline", "flash_fa2", "fp32")}
    content["seeds"] = [0]


def test_every_name_of_a_runs_log_is_on_the_page_and_every_name_on_it_is_logged(
    write_study, run_tiny, tmp_path
):
    run_tiny(load_study(write_study(_watch_all)), tmp_path / "runs")
    logs = [*(tmp_path / "runs" / "tiny").glob("*/seed-0/metrics.jsonl")]
    assert len(logs) == 3
    names = {name for log in logs for _, line in read_lines(log) for name in line}
    assert unnamed(names, IN_LOG, IN_LOG_ALONE) == []
    patterns = name_patterns(IN_LOG)
    assert [row for row, fits in patterns.items() if not any(map(fits.fullmatch, names))] == []
