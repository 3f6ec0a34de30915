"""Flash against baseline attention by length: the directions, at a size of seconds."""

import pytest
import torch

from stability.report.paper.style import paper_style


@pytest.fixture(scope="module")
def found(experiment):
    return experiment.measure(experiment.SIZES["quick"])


def test_absolute_difference_rises_for_values_of_one_sign_only(found):
    held = {test.statement: test.holds for test in found.tests}
    assert held["U(0, 1): max rises with each length"]
    assert held["U(0, 1): mean rises with each length"]
    assert held["U(0, 1): std rises with each length"]
    assert not held["N(0, 1): mean rises with each length"]
    assert not held["N(0, 1): std rises with each length"]


def test_controls_say_why(found):
    assert all(test.holds for test in found.tests if test.control)
    assert "RMS of out falls" in found.explanation


def test_rescales_are_expected_ones(experiment):
    assert experiment._expected_rescales(1) == 0
    assert experiment._expected_rescales(3) == pytest.approx(1 / 2 + 1 / 3)


def test_figure_names_its_axes(experiment, found):
    with paper_style():
        upper, lower = experiment.draw(found.rows).axes
    assert "baseline" in upper.get_ylabel()
    assert lower.get_xlabel().startswith("keys")
    assert len(upper.get_lines()) >= 6


def _draw(*size, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)


def _one_row(q_row, keys, block_k):
    moves, largest = 0, None
    for start in range(0, len(keys), block_k):
        before = largest
        for key in keys[start : start + block_k]:
            score = float(q_row @ key)
            largest = score if largest is None else max(largest, score)
        moves += before is not None and largest > before
    return moves


@pytest.mark.parametrize("block_k", [1, 5, 16, 100])
def test_rescales_are_the_count_of_a_loop_over_keys(experiment, block_k):
    q, k = _draw(2, 2, 7, 16), _draw(2, 2, 41, 16, seed=1)
    expected = [
        [[_one_row(row, k[b, h], block_k) for row in q[b, h]] for h in range(2)] for b in range(2)
    ]
    assert experiment.rescales(q, k, block_k=block_k).tolist() == expected


def test_keys_in_no_order_rescale_a_harmonic_number_of_times(experiment):
    q, k = _draw(1, 8, 512, 16, dtype=torch.bfloat16), _draw(1, 8, 256, 16, seed=1)
    found = experiment.rescales(q, k.bfloat16(), block_k=16).double().mean()
    assert found == pytest.approx(sum(1 / j for j in range(2, 17)), rel=0.05)


def test_equal_scores_do_not_rescale_and_negative_ones_do(experiment):
    q = torch.ones(1, 1, 1, 1)
    equal, rising = torch.tensor([3.0, 3.0, 3.0, 3.0]), torch.tensor([-4.0, -3.0, -2.0, -1.0])
    assert experiment.rescales(q, equal.reshape(1, 1, 4, 1), block_k=1).item() == 0
    assert experiment.rescales(q, rising.reshape(1, 1, 4, 1), block_k=1).item() == 3
