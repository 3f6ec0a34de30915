"""No word of the glossary is used on a page before it is linked there.

Held on README and on the pages that a newcomer reads, Tutorials and How to, each by itself, since
nobody reads them in order: the first use of a word in prose is a link to its row of the glossary.
Headings, code and links to other pages are passed over.
"""

import re
import runpy

import pytest

from tests.pages import ROOT

SECTIONS = runpy.run_path(str(ROOT / "docs" / "build_site.py"))["PAGES"]
PAGES = [page for part in ("Home", "Tutorials", "How to") for page in SECTIONS[part].values()]
GLOSSARY = (ROOT / "docs" / "glossary.md").read_text()
ANCHORS = re.findall(r'<a id="([^"]+)">', GLOSSARY)

WORDS = {
    "arm": "arms?",
    "pair": r"pairs?(?!\s+contract)",
    "axis": "axis|axes",
    "rerun": "reruns?|A/A",
    "nudge": "nudged?s?",
    "yardstick": "yardsticks?",
    "golden": "golden",
    "deviation": "deviations?",
    "error-ratio": r"error\s+ratios?",
    "gain": "gains?",
    "drift": "drifts?",
    "w1": "W1",
    "ladder": "ladders?",
    "held-out-loss": r"held-out\s+loss(es)?",
    "spike": "spikes?",
    "exploratory": "exploratory",
    "excess": "excess|E",
    "sketch": "sketch(es)?",
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
"""By anchor, how the word is written."""
PLAIN = {
    "run": "what everybody calls so",
    "study": "a file that the first page shows, and the same outside of this project",
    "role": "said where it is used: what an arm is for",
    "baseline": "what everybody calls so",
    "candidate": "the same",
    "reference": "the same, and named beside what it is on each page",
    "broken": "an ordinary word, the name of an arm",
    "control": "what everybody calls so",
    "bias": "the same",
    "look": "an ordinary word, also in its other senses",
    "share": "the same; its letter f stands beside it",
    "window": "the same",
    "level": "the same; the four are named with it",
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
        first = re.search(rf"(?<![\w/-])({written})(?![\w/-])", words)
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
    assert {anchor: text[max(0, a - 60) : b + 30] for anchor, (a, b) in unlinked.items()} == {}


def test_a_use_before_the_link_is_seen_and_one_in_code_or_a_heading_is_not():
    linked = "# Arm\n\n```sh\nan arm\n```\nAn `arm`, [an arm](glossary.md#arm) and arms."
    assert _unlinked(linked) == {}
    assert _unlinked("# Arm\n\nAn arm") == {"arm": (10, 13)}
    assert _unlinked(f"Arms? {linked}".lower()) == {"arm": (0, 4)}
    assert _unlinked("[an arm](glossary.md#pair)") == {"arm": (4, 7)}
