"""Fixed tolerances and the budget on packed sequences: which kernel passes which, in seconds."""

import pytest

from experiments.kit.rows import chosen
from stability.report.paper.style import paper_style


def mean(rows, value, **only):
    picked = chosen(rows, **only)
    return sum(row[value] for row in picked) / len(picked)


@pytest.mark.slow
def test_what_passes_which_rule(experiment):
    found = experiment.measure(experiment.SIZES["quick"])
    for test in found.tests:
        assert test.holds, f"{test.statement}: {test.found}"
    assert [test.control for test in found.tests].count(False) == 2
    check_shares(found.rows)
    check_budget(found.rows)
    with paper_style():
        check_axes(*experiment.draw(found.rows).axes)


def check_shares(rows):
    fa2 = {"batch": "whole", "kernel": "fa2"}
    assert mean(rows, "outside 1e-4", **fa2, format="fp16") < 25
    assert mean(rows, "outside 1e-4", **fa2, format="bf16") > 50
    # out rounded once, and P and out rounded
    once, twice = (
        mean(rows, "outside 1e-3", batch="whole", kernel=kernel, format="bf16")
        for kernel in ("exact, rounded once", "fa2")
    )
    assert 1 < once < twice < 5


def check_budget(rows):
    skipped = {"batch": "prefix", "kernel": "last key skipped"}
    fp16, bf16 = (mean(rows, "of_budget", **skipped, format=name) for name in ("fp16", "bf16"))
    # three mantissa bits: 8 times the spacing, and a fault that is the same in both
    assert 5 < fp16 / bf16 < 12


def check_axes(fixed, budget):
    assert "rtol = atol" in fixed.get_xlabel()
    assert fixed.get_ylabel() == "elements outside (%)"
    assert budget.get_xlabel().startswith("max error / budget")
    kernels = [label.get_text() for label in budget.get_yticklabels()]
    assert (kernels[0], kernels[-1]) == ("fa2", "exact, rounded once")
