"""FlashAttention-4's dials: the polynomial is unseen in BF16, the threshold is not."""

import math

import pytest

from stability.report.paper.style import paper_style


@pytest.fixture(scope="module")
def found(experiment):
    return experiment.measure(experiment.SIZES["quick"])


def _rows(found, inputs, **only):
    wanted = {"what": "out", "inputs": inputs, "factor": False, "width": 7, **only}
    rows = [row for row in found.rows if wanted.items() <= row.items()]
    assert len(rows) == 5
    return {row["seed"]: row for row in rows}


@pytest.mark.slow
def test_every_statement_holds(found):
    assert [test.statement for test in found.tests if not test.holds] == []
    assert sum(not test.control for test in found.tests) == 4


def test_polynomial_alone_is_what_was_published(found):
    for row in found.rows[:5]:
        assert row["max"] == pytest.approx(8.76e-5, rel=0.01)
        assert 2**-9 < row["max_bf16"] < 2**-8 * (1 + 1e-4)
        assert 0 < row["excess_percent"] < 1


def test_only_the_threshold_costs_bf16_accuracy_and_more_with_e4m3(found):
    for inputs in ("normal", "outliers", "large", "climb"):
        exact = _rows(found, inputs, probabilities="input", exp="exact", threshold=0.0)
        cubic = _rows(found, inputs, probabilities="input", exp="exp2_polynomial", threshold=0.0)
        late = _rows(found, inputs, probabilities="input", exp="exact", threshold=8.0)
        fp8 = {x: _rows(found, inputs, probabilities="e4m3", threshold=x) for x in (0.0, 8.0)}
        for seed, row in exact.items():
            assert cubic[seed]["rel_fro"] == pytest.approx(row["rel_fro"], rel=0.01)
            loss = late[seed]["rel_fro"] / row["rel_fro"]
            assert loss > 1.01
            assert fp8[8.0][seed]["rel_fro"] / fp8[0.0][seed]["rel_fro"] > loss
            assert fp8[0.0][seed]["rel_fro"] >= row["rel_fro"]


def test_climbing_scores_lose_by_the_rounding_of_one_p(found, experiment):
    """All weight is on two keys, e^3.5 : 1, and BF16 rounds e^3.5 to 33."""
    late = _rows(found, "climb", probabilities="input", exp="exact", threshold=8.0)
    p = math.exp(experiment.CLIMB)
    lost = (33 / p - 1) * p / (p + 1)
    exact = _rows(found, "climb", probabilities="input", exp="exact", threshold=0.0)
    for seed, row in late.items():
        # the rounding of P and that of out, independent of it, add in squares
        assert row["rel_fro"] == pytest.approx(math.hypot(lost, exact[seed]["rel_fro"]), rel=0.15)


def test_figure_names_its_axes_and_spans_every_threshold(found, experiment):
    with paper_style():
        figure = experiment.draw(found.rows)
    above, left, right = figure.axes
    assert above.get_xlabel() == "mantissa bits of inputs, P and out"
    assert above.get_ylabel() == "error, polynomial / exact"
    assert left.get_ylabel() == "error / at threshold 0"
    for axes in (left, right):
        assert axes.get_xlabel() == "rescale threshold\n(powers of two)"
        assert [text.get_text() for text in axes.get_xticklabels()] == ["0", "8"]
        assert len(axes.containers) == 4
