"""The checks of pairs in the terminal: each reason once and whole, what is wrong first."""

from rich.console import Console

from stability.analysis.study_check import PairCheck
from stability.report.terminal.pairs import print_checks

DAMAGED = f"/a/long/folder/{'of-a-study/' * 9}baseline/seed-0/metrics.jsonl: it was changed"


def _printed(checks, troubles=()):
    console = Console(width=80, record=True, force_terminal=False)
    print_checks(checks, console, troubles)
    return console.export_text()


def _damaged(arm):
    return PairCheck(arm=arm, seed=0, state="damaged", said=DAMAGED)


HOLDS = PairCheck(arm="nudge", seed=1, state="holds", said="differ in nudge alone", recomputed=(5,))


def test_a_file_that_spoils_many_pairs_is_named_once_and_unbroken():
    text = _printed([*(_damaged(f"arm_{i}") for i in range(5)), HOLDS])
    assert text.count(DAMAGED) == 1
    assert f"arm_0/seed-0, arm_1/seed-0, arm_2/seed-0 and 2 more: damaged: {DAMAGED}" in text
    assert sum(line.startswith(" arm_") for line in text.splitlines()) == 5
    assert "differ in nudge alone" in text
    assert "1 of 6 planned pairs keep the contract; 5 damaged" in text


def test_what_is_wrong_with_the_plan_is_said_before_the_count():
    text = _printed([HOLDS], ["protocol.json was changed after it was sealed"])
    assert text.index("protocol.json was changed") < text.index("1 of 1 planned pairs")
    assert "keep the contract, but see above" in text
    assert "see above" not in _printed([HOLDS])


def test_a_study_without_pairs_is_said_to_prove_nothing():
    text = _printed([], ["protocol.json is not there"])
    assert (
        "nothing is proven: the study has no arm beside its baseline, so there is no pair" in text
    )
    assert "protocol.json is not there" in text
    assert "0 of 0" not in text


def test_a_reason_is_not_said_twice():
    check = PairCheck(arm="a", seed=0, state="no pair", said="no pair: config.x is 1 in one")
    assert "a/seed-0: no pair: config.x is 1 in one" in _printed([check])
