"""The checks of pairs in the terminal: each reason once and whole, what is wrong first."""

import pytest
from rich.console import Console

from stability.analysis.pair_proof import PairProof, ProofLine
from stability.analysis.study_check import DriftCheck, PairCheck
from stability.report.terminal.pairs import print_checks, print_drift_check, print_proof

DAMAGED = f"/a/long/folder/{'of-a-study/' * 9}baseline/seed-0/metrics.jsonl: it was changed"


def _printed(checks, troubles=(), *, is_terminal=False):
    console = Console(width=80, record=True, force_terminal=is_terminal)
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


def test_a_terminal_gets_sentences_in_its_width_and_a_path_in_one_piece():
    lines = _printed([HOLDS, _damaged("arm_0")], is_terminal=True).splitlines()
    wide = [line for line in lines if len(line) > 80]
    assert [line.strip() for line in wide] == [DAMAGED.partition(": it")[0] + ":"]
    assert "  are the runs' own word" in lines
    assert max(map(len, _printed([HOLDS]).splitlines())) > 80, "in a pipe it is one line"


@pytest.mark.parametrize("width", [80, 160])
def test_a_proof_shows_both_values_of_every_line_whatever_else_is_long(width):
    names = ["nudge.ulps", "environment.package.opentelemetry-exporter-otlp-proto-common"]
    values = [("0", "1"), ("1.45.2", "1.46.0")]
    lines = [
        ProofLine(field=name, first=a, second=b, sameness="different by design")
        for name, (a, b) in zip(names, values, strict=True)
    ]
    packages = ", ".join(f"package-{i}" for i in range(40))
    lines.append(ProofLine(field="packages", first=packages, second=packages, sameness="same"))
    runs = ("runs/mine/baseline/seed-0", "runs/mine/nudge/seed-0")
    console = Console(width=width, record=True, force_terminal=True)
    print_proof(PairProof(first=runs[0], second=runs[1], axes=(), lines=tuple(lines)), console)
    drifts = DriftCheck(state="holds", said="all come from the snapshots on disk " * 4)
    print_drift_check(drifts, console)
    text = console.export_text()
    assert max(len(line.rstrip()) for line in text.splitlines()) <= width
    for value in ("0", "1", "1.45.2", "1.46.0", "package-39"):
        assert value in text.split(), value
    by_design = [line.split() for line in text.splitlines() if "different" in line]
    assert [words[-3:-1] for words in by_design] == [["0", "1"], ["1.45.2", "1.46.0"]]
    assert "".join(text.split()).count("bydesign") == 2
