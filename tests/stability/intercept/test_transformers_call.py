"""What transformers' masks and options mean, and what of them is named as unsupported."""

import math

import pytest
import torch
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from attention_kernels import golden_attention
from stability.intercept.transformers_call import (
    MaskReader,
    TransformersCall,
    argument_names,
    unsupported,
)

LOWEST = torch.finfo(torch.float64).min


def eager_attention_forward(
    module, query, key, value, attention_mask, scaling, position_bias=None, novelty=None, **kwargs
):
    scores = query @ key.mT * scaling
    for added in (position_bias, attention_mask):
        scores = scores if added is None else scores + added
    return (scores.softmax(dim=-1) @ value).transpose(1, 2), None


def tensors(query_len=6, key_len=6, head_dim=16):
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 2, length, head_dim) for length in (query_len, key_len, key_len)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def received(mask=None, eager=True, self_attention=True, **options):
    return TransformersCall(
        module=nn.Identity().eval(),
        attention_mask=mask,
        options={"scaling": 0.25, **options},
        argument_names=argument_names(eager_attention_forward if eager else sdpa_attention_forward),
        eager=eager,
        self_attention=self_attention,
    )


def difference(call, q, k, v):
    """Return the distance from what transformers computes to what the call is said to mean."""
    function = eager_attention_forward if call.eager else sdpa_attention_forward
    own = function(call.module, q, k, v, call.attention_mask, **call.options)[0]
    mask, _ = MaskReader().read(call, q, k)
    return (own.transpose(1, 2) - golden_attention(q, k, v, **mask)).abs().max()


def tril(query_len, key_len):
    return torch.ones(query_len, key_len, dtype=torch.bool).tril()[None, None]


@pytest.mark.parametrize("lengths", [(6, 6), (4, 6), (1, 6)], ids=str)
@pytest.mark.parametrize("is_causal", [None, True, False])
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "sdpa"])
def test_is_causal_means_what_the_function_makes_of_it(eager, is_causal, lengths):
    options = {} if is_causal is None else {"is_causal": is_causal}
    assert difference(received(eager=eager, **options), *tensors(*lengths)) < 1e-14


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "sdpa"])
def test_position_bias_is_added_beside_the_mask(eager, masked):
    bias = torch.linspace(-2, 2, 72, dtype=torch.float64).reshape(1, 2, 6, 6)
    mask = None
    if masked:
        mask = torch.zeros(1, 1, 6, 6).double().masked_fill(~tril(6, 6), LOWEST)
        mask = mask if eager else tril(6, 6)
    call = received(mask, eager=eager, position_bias=bias)
    assert difference(call, *tensors()) < 1e-14


def test_additive_mask_keeps_what_it_adds():
    mask = torch.linspace(-3, 3, 36, dtype=torch.float64).reshape(1, 1, 6, 6)
    mask = mask.masked_fill(~tril(6, 6), LOWEST)
    assert difference(received(mask), *tensors()) < 1e-14


@pytest.mark.parametrize("is_bool", [True, False], ids=["bool", "additive"])
def test_padding_is_told_from_the_keys_that_nobody_attends(is_bool):
    q, k, _ = tensors()
    visible = tril(6, 6).repeat(2, 1, 1, 1)
    visible[1, :, :, :2] = False
    added = torch.zeros(2, 1, 6, 6).double().masked_fill(~visible, LOWEST)
    mask, valid = MaskReader().read(received(visible if is_bool else added), q, k)
    assert valid.tolist() == [[True] * 6, [False] * 2 + [True] * 4]
    assert torch.equal(mask["attn_mask"] == (1 if is_bool else 0), visible)


def test_keys_hidden_by_a_moderate_number_are_padding_too():
    q, k, _ = tensors()
    mask = torch.zeros(2, 1, 1, 6).double()
    mask[1, :, :, 4:] = -10000.0
    assert MaskReader().read(received(mask), q, k)[1].sum(dim=1).tolist() == [6, 4]
    assert difference(received(mask), *tensors()) < 1e-14


def test_mask_is_cut_to_the_keys():
    q, k, _ = tensors()
    longer = torch.zeros(1, 1, 6, 9).double()
    assert MaskReader().read(received(longer), q, k)[0]["attn_mask"].shape == (1, 1, 6, 6)


def test_rows_that_attend_nothing_do_not_count():
    q, k, _ = tensors(query_len=4)
    visible = torch.ones(1, 1, 4, 6, dtype=torch.bool)
    visible[:, :, 1] = False
    assert MaskReader().read(received(visible), q, k)[1].tolist() == [[True, False, True, True]] * 2


def test_option_that_the_function_does_not_look_at_means_nothing():
    assert difference(received(softcap=0.5), *tensors()) < 1e-14


def test_padded_keys_of_another_sequence_leave_all_rows():
    q, k, _ = tensors()
    visible = torch.ones(2, 1, 6, 6, dtype=torch.bool)
    visible[1, :, :, 4:] = False
    assert MaskReader().read(received(visible, self_attention=False), q, k)[1] is None
    assert MaskReader().read(received(visible), q, k)[1].sum(dim=1).tolist() == [6, 4]


def test_mask_shared_by_layers_is_read_once_and_again_when_rewritten():
    q, k, _ = tensors()
    reader, mask = MaskReader(), torch.zeros(2, 1, 6, 6).double()
    first = reader.read(received(mask), q, k)[0]["attn_mask"]
    assert reader.read(received(mask), q, k)[0]["attn_mask"] is first
    mask[:, :, :, 0] = LOWEST
    assert reader.read(received(mask), q, k)[0]["attn_mask"][0, 0, 0, 0] == -math.inf
    assert reader.read(received(mask, self_attention=False), q, k)[1] is None


def test_mask_of_inference_mode_is_read():
    q, k, _ = tensors()
    with torch.inference_mode():
        reader, mask = MaskReader(), torch.zeros(2, 1, 6, 6).double()
        assert reader.read(received(mask), q, k)[0]["attn_mask"].equal(mask)
        mask[:, :, :, 0] = LOWEST  # an inference tensor does not tell that it was written to
        assert reader.read(received(mask), q, k)[0]["attn_mask"][0, 0, 0, 0] == -math.inf


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (received(dropout=0.1, eager=False), "dropout_p 0.1"),
        (received(s_aux=torch.zeros(2, 1)), "sinks that are Tensor and not one number a head"),
        (received(cache=object(), eager=False), "a paged cache"),
        (received(scaling=torch.ones(())), "scaling that is a tensor"),
        (received(novelty=3), "the option novelty of its eager attention"),
        (received(torch.ones(2, 6)), "an attention_mask of shape (2, 6)"),
        (
            received(
                torch.zeros(1, 1, 6, 6, requires_grad=True),
                position_bias=torch.zeros(1, 2, 6, 6),
            ),
            "attention_mask that is trained beside a position_bias",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_an_attention_function_cannot_do_is_named(call, name):
    assert unsupported(call, *tensors()) == name


def test_sinks_are_read_from_the_call_or_the_module():
    q, k, v = tensors()
    given, own = torch.zeros(2), nn.Parameter(torch.ones(2))
    assert unsupported(received(s_aux=given), q, k, v) == ""
    assert MaskReader().read(received(s_aux=given), q, k)[0]["sinks"] is given
    call = received()
    call.module.sinks = own
    assert MaskReader().read(call, q, k)[0]["sinks"] is own
    assert "sinks" not in MaskReader().read(received(), q, k)[0]


def test_shapes_that_no_attention_function_takes_are_named():
    q, k, v = tensors()
    assert unsupported(received(), q, k, v[..., :8]) == "head_dim 8"
    assert unsupported(received(), *tensors(head_dim=8)) == "head_dim 8"
    assert unsupported(received(), q, k[:1], v[:1]) == "batch 1 of k beside q's 2"


def test_options_that_change_nothing_are_supported():
    assert unsupported(received(dropout=0.1), *tensors()) == ""  # eval mode
    assert unsupported(received(sliding_window=3, novelty=None, other=1), *tensors()) == ""
