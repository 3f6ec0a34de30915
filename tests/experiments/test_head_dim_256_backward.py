"""Gradients at head_dim 256: right kernels keep the budget, a wrong port does not."""

import pytest

from attention_kernels.testing import Shape, with_gradients
from stability.probe.attention_inputs import draw_inputs
from stability.report.paper.style import paper_style


@pytest.fixture(scope="module")
def found(experiment):
    return experiment.measure(experiment.SIZES["quick"])


@pytest.mark.slow
def test_right_kernels_keep_the_budget_and_the_wrong_port_does_not(found):
    assert all(test.holds for test in found.tests), [test.found for test in found.tests]
    of_budget = {
        kernel: [row["of_budget"] for row in found.rows if row["kernel"] == kernel]
        for kernel in ("fa2", "fa3", "fa2, block_q 32", "wrong port")
    }
    assert max(max(of_budget[name]) for name in ("fa2", "fa3", "fa2, block_q 32")) < 0.9
    assert min(of_budget["wrong port"]) > 10
    narrow, fa2 = (
        [row for row in found.rows if row["kernel"] == name]
        for name in ("fa2, narrow dK, dV", "fa2")
    )
    assert [row["dq"] for row in narrow] == [row["dq"] for row in fa2]
    assert sum(row["dv"] for row in narrow) > 1.1 * sum(row["dv"] for row in fa2)
    # each: 5 seeds, 2 formats, 2 lengths, causal and not
    assert {len(values) for values in of_budget.values()} == {40}


def test_a_wrong_port_is_wrong_in_dk_and_dv_alone(experiment):
    q, k, v, dout = draw_inputs("normal", Shape(1, 1, 1, 72, 72, 256), "bf16", 0)
    wrong = experiment._wrong_port(q, k, v, dout, causal=True)
    right = with_gradients(experiment.OWN["fa2"], q, k, v, dout, causal=True)
    assert wrong["dq"].equal(right["dq"])
    assert not wrong["dk"].equal(right["dk"])
    # keys past the first block of queries are seen by the last block alone
    assert not wrong["dv"][:, :, 64:].any()


def test_figure_names_its_axes(experiment, found):
    with paper_style():
        left, right = experiment.draw(found.rows).axes
    assert "% of elements" in left.get_xlabel()
    assert "budgets" in right.get_xlabel()
