"""Un-padded attention gives what SDPA gives at valid positions, and zeros in padded rows."""

import pytest
import torch

from experiments.kit.padded_llama import (
    flash_attention_2,
    hidden_states,
    padding_mask,
    random_llama,
    register_opened,
    register_unpadded,
)

CANDIDATES = [("flash:fa2", True), ("sdpa", False)]
TOKENS = torch.randint(256, (3, 12), generator=torch.Generator().manual_seed(0))


def states(implementation, side, **options):
    model = random_llama(width=64, heads=4, dtype=torch.float32, seed=0, layers=2)
    mask = padding_mask(12, (0, 5, 11), side)
    return hidden_states(model, implementation, TOKENS, mask, **options)


def test_padding_stands_on_its_side():
    assert padding_mask(4, (0, 3), "left").tolist() == [[1, 1, 1, 1], [0, 0, 0, 1]]
    assert padding_mask(4, (0, 3), "right").tolist() == [[1, 1, 1, 1], [1, 0, 0, 0]]
    assert padding_mask(4, (0, 3), "none").all()


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize(("candidate", "packed"), CANDIDATES)
def test_valid_positions_are_sdpas_and_padded_ones_are_zero(candidate, packed, side):
    valid = padding_mask(12, (0, 5, 11), side).bool()
    ours = states(register_unpadded(candidate, packed=packed), side)
    sdpa = states("sdpa", side)
    torch.testing.assert_close(ours.hidden[valid], sdpa.hidden[valid], atol=1e-5, rtol=1e-5)
    assert len(ours.attention) == 2
    for layer in ours.attention:
        assert layer[valid].abs().max() > 1e-3
        assert not layer[~valid].any()


def test_zeroed_sdpa_is_the_unpadded_one_everywhere():
    ours, sdpa = states(register_unpadded(), "right"), states("sdpa", "right")
    assert (ours.hidden - sdpa.hidden).abs().max() > 0.1
    zeroed = states("sdpa", "right", zeroed=True)
    torch.testing.assert_close(zeroed.hidden, ours.hidden, atol=1e-5, rtol=1e-5)


def test_opened_rows_are_not_zero():
    padded = ~padding_mask(12, (0, 5, 11), "left").bool()
    assert states(register_opened(), "left").attention[0][padded].abs().min(dim=-1).values.all()


def test_a_call_it_cannot_do_is_refused():
    model = random_llama(width=64, heads=4, dtype=torch.float32, seed=0, layers=1)
    model.set_attn_implementation(register_unpadded())
    with torch.no_grad():
        cache = model(TOKENS, use_cache=True).past_key_values
        with pytest.raises(ValueError, match=r"register_unpadded: .* got 1 and 13, dropout"):
            model(TOKENS[:, :1], past_key_values=cache)
    with pytest.raises(ValueError, match=r"^attention must be"):
        register_unpadded("flsh:fa2")
    assert flash_attention_2("cpu") == ""
