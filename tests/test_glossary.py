"""No word of the glossary is used on a page before it is linked there.

Held on every page of the site that is written by hand, each by itself, since nobody reads them in
order: the first use of a word in prose, whether or not in capitals, is a link to its row of the
glossary. Headings, code and links to other pages are passed over.
"""

import re
import runpy

import pytest

from tests.pages import ROOT, site_pages

SECTIONS = runpy.run_path(str(ROOT / "docs" / "scripts" / "build_site.py"))["PAGES"]
LEFT_OUT = {"docs/glossary.md": "each word is explained in its row, and used in other words' rows"}
"""Pages of the site that are not held, and why. Its reference (verbs, keys, metrics, names) is no
page of `SECTIONS`: it is made of the code, whose docstrings hold no links."""
PAGES = [page for part in SECTIONS.values() for page in part.values() if page not in LEFT_OUT]
GLOSSARY = (ROOT / "docs" / "glossary.md").read_text()
ANCHORS = re.findall(r'<a id="([^"]+)">', GLOSSARY)

WORDS = {
    "arm": "arms?",
    "pair": r"pairs?(?!\s+contract)",
    "axis": "axis|axes",
    "role": "roles?",
    "reference": "references?",
    "rerun": "reruns?|A/A",
    "nudge": "nudged?s?",
    "yardstick": "yardsticks?",
    "control": "controls?",
    "golden": "golden",
    "deviation": r"(?<!standard\s)deviations?",
    "error-ratio": r"error\s+ratios?",
    "gain": "gains?",
    "drift": "drifts?",
    "w1": "W1",
    "ladder": "ladders?",
    "held-out-loss": r"held-out\s+loss(es)?",
    "spike": "spikes?",
    "exploratory": "exploratory",
    "excess": "excess|(?-i:E)",
    "sketch": "sketch(es)?",
    "level": "levels?",
    "planted-fault": r"planted\s+faults?|faults?(\s+are|\s+is)?\s+planted",
    "assay": r"assays?|NO\s+ASSAY",
    "seal": "seal(s|ed)?",
    "witness": "witness(es|ed)?",
    "contract": r"pair\s+contract",
    "bundle": "bundles?",
    "rounding-point": r"rounding\s+points?",
    "profile": "profiles?",
    "twin": "twin",
    "recipe": "recipes?",
}
"""By anchor, how the word is written, in small letters or in capitals."""
OTHER_SENSE = {
    "docs/extend.md": {"reference": "the name of an argument: what a metric is taken to"},
    "docs/look.md": {"level": "of an alert of W&B"},
    "docs/instrument.md": {"reference": "the value at which an ULP is taken"},
    "kernels/README.md": {
        "axis": "of a tensor",
        "pair": "two rows of one tensor",
        "reference": "kernels that others are held against",
    },
    "experiments/README.md": {
        "control": "a test of the instrument",
        "reference": "what others have measured from",
    },
}
"""By page and anchor, what the word means on a page that does not mean the glossary's by it."""
PLAIN = {
    "run": "what everybody calls so",
    "study": "an ordinary word: trainings that answer one question together",
    "baseline": "what everybody calls so",
    "candidate": "the same",
    "broken": "an ordinary word, the name of an arm",
    "bias": "what statistics calls so, also in its other senses",
    "look": "an ordinary word, also in its other senses",
    "share": "the same; its letter f stands beside it",
    "window": "the same; where it is the glossary's the page says what ends it",
    "record": "an ordinary word, also a verb of the command line",
    "format": "what everybody calls so",
}
"""By anchor, why a word needs no link."""


def test_each_word_of_the_glossary_is_held_or_left_out_for_a_reason():
    assert sorted([*WORDS, *PLAIN]) == sorted(ANCHORS)


NOT_PROSE = (
    r"```.*?```",
    r"<!--.*?-->",
    r"(?m:^#[^\n]*)",
    r"!\[[^\]]*\]\([^)]*\)",
    r"`[^`]*`",
    r"\[[^\]]*\]\((?![^)]*glossary\.md#)[^)]*\)",
)


def _prose(text):
    """Return a page with what is no sentence of it blanked: code, headings, pictures, links."""
    for passed_over in NOT_PROSE:
        text = _blanked(passed_over, text)
    return text


def _blanked(pattern, text):
    return re.sub(rf"(?s:{pattern})", lambda found: " " * len(found[0]), text)


def _unlinked(text):
    """Return by anchor where the first use of a word lies, if that is no link to its row."""
    prose, missing = _prose(text), {}
    words = _blanked(r"(?<=\])\([^)]*\)", prose)
    for anchor, written in WORDS.items():
        first = re.search(rf"(?i)(?<![\w/-])({written})(?![\w/-])", words)
        links = re.finditer(rf"\[([^\]]*)\]\([^)]*glossary\.md#{anchor}\)", prose)
        # the whole word within one link, as [the ladder](glossary.md#ladder)
        if first and not any(
            each.start(1) <= first.start() and first.end() <= each.end(1) for each in links
        ):
            missing[anchor] = first.span()
    return missing


@pytest.mark.parametrize("page", PAGES)
def test_the_first_use_of_a_word_is_a_link_to_the_glossary(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    unlinked = _unlinked(text)
    other = OTHER_SENSE.get(page, {})
    assert set(other) <= set(unlinked), "the page does not use this word, or links it"
    assert {
        anchor: text[max(0, a - 60) : b + 30]
        for anchor, (a, b) in unlinked.items()
        if anchor not in other
    } == {}


def test_only_the_glossary_is_left_out():
    assert set(PAGES) == set(site_pages()) - {"docs/glossary.md"}
    assert set(OTHER_SENSE) <= set(PAGES)


def test_a_use_before_the_link_is_seen_and_one_in_code_or_a_heading_is_not():
    linked = "# Arm\n\n```sh\nan arm\n```\nAn `arm`, [an arm](glossary.md#arm) and arms."
    assert _unlinked(linked) == {}
    assert _unlinked("# Arm\n\nAn arm") == {"arm": (10, 13)}
    assert _unlinked(f"Arms? {linked}".lower()) == {"arm": (0, 4)}
    assert _unlinked("[an arm](glossary.md#pair)") == {"arm": (4, 7)}


def test_a_capital_hides_no_word_and_a_standard_deviation_is_none():
    assert set(_unlinked("Arms part.")) == {"arm"}
    assert set(_unlinked("It is EXPLORATORY.")) == {"exploratory"}
    assert set(_unlinked("E and e")) == {"excess"}
    assert _unlinked("an e, a standard\ndeviation") == {}
    assert set(_unlinked("a standard deviation and a deviation")) == {"deviation"}
