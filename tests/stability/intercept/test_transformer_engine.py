"""Calls of Transformer Engine's DotProductAttention are read right, and changed by nothing.

The library needs CUDA; a stand-in with its names, arguments and meaning takes its place, whose
arithmetic in FP64 is also what the figures are held to.
"""

from itertools import product

import pytest
import torch
from torch import nn

from stability.intercept.transformer_engine_calls import _usual_slopes
from tests.sampling import one_in
from tests.stability.intercept.transformer_engine_models import (
    BATCH,
    GROUPS,
    HEADS,
    LENGTH,
    PACKED,
    WIDTH,
    inputs,
    lengths,
    looked,
)
from tests.stability.intercept.transformer_engine_stand_in import _slopes, engine

__all__ = ["engine"]

MASKS = [
    {"attn_mask_type": "no_mask"},
    {"attn_mask_type": "causal"},
    {"attn_mask_type": "causal_bottom_right"},
    {"attn_mask_type": "causal", "window_size": (3, 0)},
    {"attn_mask_type": "causal_bottom_right", "window_size": (3, 0)},
    {"attn_mask_type": "no_mask", "window_size": (2, 4)},
    {"attn_mask_type": "no_mask", "window_size": (2, 4), "bottom_right_diagonal": False},
]


def _spelt(call):
    return "-".join(str(x).replace(" ", "") for x in call.values())


@pytest.mark.parametrize(
    ("call", "layout", "queries"), one_in(5, product(MASKS, ("sbhd", "bshd"), (LENGTH, 7)))
)
def test_masks_by_name_are_read_in_both_corners(engine, call, layout, queries):
    attend = engine(HEADS, WIDTH, GROUPS, qkv_format=layout)
    looked(attend, call, inputs(layout), queries=queries)


@pytest.mark.parametrize(
    "settings",
    [
        {"attn_mask_type": "no_mask", "softmax_scale": 0.1},
        {"attn_mask_type": "no_mask", "window_size": (2, 4), "bottom_right_diagonal": False},
        {"softmax_type": "off-by-one"},
        {"softmax_type": "learnable"},
        {"softmax_type": "learnable", "attn_mask_type": "causal_bottom_right"},
        {"return_max_logit": True},
    ],
    ids=_spelt,
)
def test_the_settings_of_the_module_are_read(engine, settings):
    attend = engine(HEADS, WIDTH, GROUPS, **settings)
    if settings.get("softmax_type") == "learnable":
        nn.init.normal_(attend.softmax_offset)
    looked(attend, {}, inputs("sbhd"), queries=7)


def test_a_causal_modules_window_is_none_in_a_call_without_a_mask(engine):
    looked(engine(HEADS, WIDTH, GROUPS), {"attn_mask_type": "no_mask"}, inputs("sbhd"))


PADDED = [
    {"attn_mask_type": "padding"},
    {"attn_mask_type": "padding_causal"},
    {"attn_mask_type": "padding,causal", "window_size": (2, 0)},
    {"attn_mask_type": "padding_causal_bottom_right"},
    {"attn_mask_type": "padding", "window_size": (2, 3)},
    {"attn_mask_type": "padding_causal", "core_attention_bias_type": "alibi"},
]


@pytest.mark.parametrize(
    ("call", "given", "layout"),
    one_in(7, product(PADDED, ("lengths", "a mask", "left padding"), ("sbhd", "bshd"))),
)
def test_padding_is_left_out(engine, layout, given, call):
    padding = torch.zeros(BATCH, 1, 1, LENGTH, dtype=torch.bool)
    padding[1, ..., :5] = given == "left padding"
    padding[1, ..., 7:] = given != "left padding"
    if given == "lengths":
        call = {**call, "cu_seqlens_q": lengths(12, 7), "cu_seqlens_kv": lengths(12, 7)}
    else:
        call = {**call, "attention_mask": padding}
    valid = ~padding[:, 0, 0]
    valid = valid if layout == "bshd" else valid.T
    attend = engine(HEADS, WIDTH, GROUPS, qkv_format=layout)
    looked(attend, call, inputs(layout), valid)


@pytest.mark.parametrize("kind", ["padding", "padding_causal", "padding_causal_bottom_right"])
@pytest.mark.parametrize("given", ["lengths", "masks"])
def test_padded_queries_and_keys_may_have_lengths_of_their_own(engine, given, kind):
    padding = torch.arange(7)[None] >= torch.tensor([7, 4])[:, None]
    of_keys = torch.arange(12)[None] >= torch.tensor([9, 11])[:, None]
    call = {"attn_mask_type": kind}
    if given == "lengths":
        call |= {"cu_seqlens_q": lengths(7, 4), "cu_seqlens_kv": lengths(9, 11)}
    else:
        call |= {"attention_mask": (padding[:, None, None], of_keys[:, None, None])}
    attend = engine(HEADS, WIDTH, GROUPS, attention_type="cross")
    looked(attend, call, inputs("sbhd"), ~padding.T, queries=7)


@pytest.mark.parametrize(
    "call",
    [
        {"attn_mask_type": "padding"},
        {"attn_mask_type": "padding_causal"},
        {"attn_mask_type": "padding_causal", "window_size": (2, 0)},
        {"attn_mask_type": "padding_causal", "core_attention_bias_type": "alibi"},
        {"attn_mask_type": "padding_causal", "cu_seqlens_kv": lengths(6, 0, 6)},
        {"attn_mask_type": "padding_causal_bottom_right", "cu_seqlens_kv": lengths(3, 1, 8)},
    ],
    ids=lambda call: _spelt({k: v for k, v in call.items() if "cu" not in k}),
)
def test_packed_sequences_do_not_see_one_another(engine, call):
    attend = engine(HEADS, WIDTH, GROUPS, qkv_format="thd")
    valid = None
    if call["attn_mask_type"].endswith("right"):  # five queries and three keys: two see nothing
        valid = torch.arange(LENGTH) > 1
    looked(attend, {**PACKED, **call}, inputs("thd"), valid)


def test_tokens_between_packed_sequences_are_padding(engine):
    gaps = {"cu_seqlens_q_padded": lengths(6, 6), "cu_seqlens_kv_padded": lengths(6, 6)}
    call = {"cu_seqlens_q": lengths(5, 4), "cu_seqlens_kv": lengths(5, 4), **gaps}
    valid = torch.ones(LENGTH, dtype=torch.bool)
    valid[[5, 10, 11]] = False
    attend = engine(HEADS, WIDTH, GROUPS, qkv_format="thd", attn_mask_type="padding_causal")
    looked(attend, call, inputs("thd"), valid)


@pytest.mark.parametrize("queries", [LENGTH, 7])
@pytest.mark.parametrize("window", [None, (3, 5)])
def test_an_arbitrary_mask_is_read(engine, window, queries):
    mask = torch.rand(BATCH, 1, queries, LENGTH, generator=torch.Generator().manual_seed(0)) < 0.3
    mask[..., -queries:].diagonal(dim1=2, dim2=3).fill_(False)
    call = {"attn_mask_type": "arbitrary", "attention_mask": mask, "window_size": window}
    looked(engine(HEADS, WIDTH, GROUPS), call, inputs("sbhd"), queries=queries)


@pytest.mark.parametrize(
    "call",
    [
        {"core_attention_bias_type": "post_scale_bias"},
        {"core_attention_bias_type": "post_scale_bias", "attn_mask_type": "causal_bottom_right"},
        {"core_attention_bias_type": "alibi"},
        {"core_attention_bias_type": "alibi", "attn_mask_type": "causal_bottom_right"},
        {"core_attention_bias_type": "alibi", "alibi_slopes": torch.linspace(0.1, 1, HEADS)},
        {"core_attention_bias_type": "alibi", "alibi_slopes": torch.rand(BATCH, HEADS)},
    ],
    ids=lambda call: _spelt({k: v for k, v in call.items() if k != "alibi_slopes"}),
)
def test_what_is_added_to_the_scores_is_read(engine, call):
    for queries in (LENGTH, 7):
        looked(engine(HEADS, WIDTH, GROUPS), call, inputs("sbhd"), queries=queries)


def test_values_may_have_a_head_dim_of_their_own(engine):
    attend = engine(HEADS, (WIDTH, 24), GROUPS)
    looked(attend, {}, inputs("sbhd"), value_width=24)


def test_alibis_own_slopes_are_those_of_the_library():
    for heads in (1, 2, 6, 12):
        assert torch.equal(_usual_slopes(heads, torch.device("cpu")), _slopes(heads))
