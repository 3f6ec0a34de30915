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
    "study": "stud(y|ies)",
    "baseline": "baselines?",
    "candidate": "candidates?",
    "broken": "broken",
    "pair": r"pairs?(?!\s+contract)",
    "axis": "axis|axes",
    "role": "roles?",
    "reference": "references?",
    "rerun": "reruns?|A/A",
    "nudge": "nudged?s?",
    "yardstick": "yardsticks?",
    "control": "controls?",
    "snapshot": "snapshots?",
    "probe": "probes?",
    "plain-attention": r"plain\s+attention",
    "golden": "golden",
    "ulp": r"ULPs?|units?\s+(in|of)\s+(the|its)\s+last\s+place",
    "deviation": r"(?<!standard\s)deviations?",
    "error-ratio": r"error\s+ratios?",
    "gain": "gains?",
    "drift": "drifts?",
    "bias": "bias(es)?",
    "chaos": "chaos",
    "w1": "W1",
    "ladder": "ladders?",
    # a step or a number of seeds, not what somebody does
    "look": r"looks?(?!\s+(at|for|inside|like|alike|closely))",
    "share": "shares?",
    "window": "windows?",
    "held-out-loss": r"held-out\s+loss(es)?",
    "nat": "nats?",
    "lost": "lost|sound",
    "spike": "spikes?",
    "policy": "polic(y|ies)",
    "limit": "limits?|margins?",
    "harmed": "harmed|undecided",
    "pass": "(?-i:PASS)",
    "fail": "(?-i:FAIL)",
    "inconclusive": "INCONCLUSIVE",
    "no-assay": r"NO\s+ASSAY",
    "exploratory": "exploratory",
    "excess": "excess|(?-i:E)",
    "sketch": "sketch(es)?",
    "level": "levels?",
    "planted-fault": r"planted\s+faults?|faults?(\s+are|\s+is)?\s+planted",
    "assay": r"(?-i:[Aa]ssays?)",
    "seal": "seal(s|ed)?|protocols?",
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
    "README.md": {"harmed": "of a published claim, which stays undecided"},
    "docs/my_kernel.md": {"broken": "of a law of attention"},
    "docs/your_own_training.md": {"bias": "a parameter of a layer"},
    "docs/slurm.md": {"limit": "of a job's time"},
    "docs/study.md": {"share": "a part of all blocks"},
    "docs/extend.md": {"reference": "the name of an argument: what a metric is taken to"},
    "docs/look.md": {"level": "of an alert of W&B"},
    "docs/instrument.md": {"reference": "the value at which an ULP is taken"},
    "docs/layouts.md": {"share": "what ranks do with weights"},
    "docs/executors.md": {"limit": "of a job's time", "lost": "of a node"},
    "docs/trust.md": {"broken": "of a contract", "lost": "of a file"},
    "docs/families.md": {
        "bias": "a parameter of a layer",
        "window": "of positions that attention sees",
    },
    "docs/architecture.md": {"share": "what two implementations have in common"},
    "docs/measured.md": {"limit": "what a benchmark is held to"},
    "configs/README.md": {"window": "of positions that attention sees"},
    "kernels/README.md": {
        "axis": "of a tensor",
        "baseline": "plain attention, by its name in code",
        "bias": "what is added to scores",
        "pair": "two rows of one tensor",
        "probe": "what finds the order of a tensor core's sums",
        "reference": "kernels that others are held against",
        "share": "what two implementations have in common",
        "window": "of positions that attention sees",
    },
    "experiments/README.md": {
        "baseline": "plain attention, by its name in code",
        "control": "a test of the instrument",
        "harmed": "of a published claim, which stays undecided",
        "lost": "of what a sum leaves out",
        "reference": "what others have measured from",
        "share": "what two experiments have in common",
    },
    "CONTRIBUTING.md": {"look": "how a picture looks"},
    "CHANGELOG.md": {"bias": "a parameter of a layer"},
}
"""By page and anchor, what the word means on a page that does not mean the glossary's by it."""


def test_each_word_of_the_glossary_is_held():
    assert sorted(WORDS) == sorted(ANCHORS)


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


def test_a_word_of_several_senses_is_seen_in_the_glossarys():
    assert _unlinked("It looks at this, and passes or fails.") == {}
    assert _unlinked("It looks at this at each look.") == {"look": (25, 29)}
    assert set(_unlinked("PASS or NO\nASSAY")) == {"pass", "no-assay"}
    assert set(_unlinked("a unit in its last place")) == {"ulp"}
