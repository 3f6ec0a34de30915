"""The peak counts what is in use at once, temporaries included, and nothing from before."""

import torch

from experiments.kit.cost import peak_allocation

MIB = 2**20


def test_the_peak_is_of_what_lives_at_once():
    before = torch.zeros(4 * MIB)

    def one_after_the_other():
        for _ in range(3):
            torch.zeros(MIB)

    def at_once():
        return [torch.zeros(MIB) for _ in range(3)]

    assert peak_allocation(one_after_the_other, "cpu") == 4 * MIB
    assert peak_allocation(at_once, "cpu") == 12 * MIB
    assert len(before) == 4 * MIB


def test_what_an_operator_takes_inside_counts():
    q = torch.zeros(1, 1, 512, 16)
    visible = torch.ones(512, 512, dtype=torch.bool)

    def attend():
        return torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=visible)

    # the mask becomes an additive one, in FP32
    assert peak_allocation(attend, "cpu") > 4 * 512 * 512


def test_a_call_that_takes_nothing_has_no_peak():
    assert peak_allocation(lambda: None, "cpu") == 0
