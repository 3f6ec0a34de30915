"""Attention dropout: golden, baseline, twin and Triton drop the same weights and scale the others.

The definition and the keep mask are written anew here (`definition`, `dropout_stream`), with no
line shared. Denominators and the LSE know of no dropout.
"""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_kernels import (
    BASELINE_PROFILES,
    baseline_attention,
    flash_attention,
    golden_attention,
)
from attention_kernels.testing import FAULTS, Shape, assert_within_budget, make_qkv, plant
from attention_kernels.testing.faults import skip_last_key
from tests.kernels.definition import definition
from tests.kernels.dropout_stream import keep_by_hand
from tests.kernels.flash import SMALL, flash
from tests.sampling import one_in

FP64_RTOL = 1e-13
"""Two FP64 evaluations in other orders: about sqrt(100) * 2**-53 = 1e-15 each, with room."""

P, SEED, OFFSET = 0.3, 2**40 + 5, 3
DROPOUT: dict[str, Any] = {"dropout_p": P, "dropout_seed": SEED, "dropout_offset": OFFSET}
SHAPE = Shape(2, 4, 2, 20, 37, 16, 24)
SINKS = torch.tensor([-2.0, 0.5, 3.0, 1.0], dtype=torch.float64)
BIAS = torch.randn(1, 4, 20, 37, generator=torch.Generator().manual_seed(3)).double()
PADDING = torch.arange(37) < torch.tensor([[37], [30]])
SLOPES = torch.tensor([0.1, 0.2, 0.4, 0.8], dtype=torch.float64)
TRAINED = ("attn_mask", "sinks")
RESULTS = ("out", "dq", "dk", "dv", "dattn_mask", "dsinks")

DIALS: dict[str, Any] = {
    "": {},
    "splits": {"splits": 3, "key_order": "reversed"},
    "key_outer": {"loop_order": "key_outer"},
    "wide": {"block_q": 32, "block_k": 64},
}
EXACT = {
    "golden": golden_attention,
    "baseline": baseline_attention,
    **{f"{e} {d}".strip(): flash(e, **SMALL | DIALS[d]) for e in ("twin", "triton") for d in DIALS},
}
MASKS: dict[str, Any] = {
    "full": {},
    "rows that attend nothing": {"window": (0, None), "key_padding": PADDING},
    "causal, window, softcap": {"causal": True, "window": (9, 2), "softcap": 2.0},
    "sinks, scale": {"sinks": SINKS, "scale": 0.6},
    "bias": {"attn_mask": BIAS},
    "alibi": {"alibi_slopes": SLOPES},
}
MASKS["all"] = {name: x for mask in MASKS.values() for name, x in mask.items()}
CASES = list(itertools.product(EXACT, MASKS))
FAST = [(name, mask) for name, mask in CASES if "triton" not in name]
SLOW = [(name, mask) for name, mask in CASES if "triton" in name]


def draw(shape, dtype=torch.float64, seed=0):
    """q, k, v and dout."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = make_qkv(shape, dtype, generator)
    return q, k, v, torch.randn((*q.shape[:3], v.shape[3]), generator=generator).to(dtype)


def run(attend, *inputs: Any, **options: Any) -> dict[str, Any]:
    """Return out and gradients by name; inputs are q, k, v, dout, and biases and sinks train."""
    *qkv, dout = inputs
    trained = {name: options[name] for name in TRAINED if name in options}
    leaves = [x.detach().requires_grad_() for x in (*qkv, *trained.values())]
    options |= dict(zip(trained, leaves[3:], strict=True))
    out = attend(*leaves[:3], **options)
    gradients = torch.autograd.grad(out, leaves, dout.to(out.dtype))
    names = ("dq", "dk", "dv", *(f"d{name}" for name in trained))
    return {"out": out.detach(), **dict(zip(names, gradients, strict=True))}


def by_definition(*inputs, p=P, seed=SEED, offset=OFFSET, **options):
    q, k = inputs[:2]
    keep = keep_by_hand((*q.shape[:3], k.shape[2]), p, seed, offset)
    return run(definition, *inputs, weight=keep.double() / (1 - p), **options)


def assert_close(ours, expected, rtol=FP64_RTOL):
    """Within `rtol` of the largest value, and of 1."""
    assert ours.keys() == expected.keys()
    for result, right in expected.items():
        assert ours[result].shape == right.shape, result
        error = (ours[result] - right).abs().max().item()
        assert error <= rtol * max(1.0, right.abs().max().item()), result


def assert_equal(ours, expected):
    for result, right in expected.items():
        assert torch.equal(ours[result], right), result


@pytest.mark.parametrize(("name", "mask"), FAST + one_in(28, SLOW[::-1], slow=4))
def test_each_is_the_definition_with_every_gradient(name, mask):
    inputs = draw(SHAPE)
    expected = by_definition(*inputs, **MASKS[mask])
    ours = run(EXACT[name], *inputs, **MASKS[mask], **DROPOUT)
    assert_close(ours, expected)
    # what is planted in vain proves nothing: another seed gives other results
    other = by_definition(*inputs, offset=OFFSET + 1, **MASKS[mask])
    assert all((other[x] - expected[x]).abs().max() > 1e-3 for x in expected)


@settings(max_examples=30)
@given(
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 2), st.integers(1, 3)),
    lengths=st.tuples(st.integers(1, 70), st.integers(1, 70)),
    causal=st.booleans(),
    p=st.floats(0.001, 0.99),
    seed=st.integers(0, 2**63 - 1),
)
def test_of_any_shape_and_seed_they_are_the_definition(sizes, lengths, causal, p, seed):
    batch, kv_heads, group = sizes
    inputs = draw(Shape(batch, kv_heads * group, kv_heads, *lengths, 16))
    expected = by_definition(*inputs, p=p, seed=seed, offset=0, causal=causal)
    # kept weights are up to 1 / (1 - p) = 100 times as large, and so is what rounds them
    for name in ("golden", "baseline", "twin"):
        ours = run(EXACT[name], *inputs, causal=causal, dropout_p=p, dropout_seed=seed)
        assert_close(ours, expected, 10 * FP64_RTOL)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "shape"),
    one_in(
        3,
        [
            ("golden", Shape(1, 2, 1, 2, 3, 16)),
            ("baseline", Shape(2, 4, 2, 3, 5, 16)),
            ("twin key_outer", Shape(2, 4, 2, 3, 5, 16)),
            ("twin", Shape(1, 2, 1, 2, 3, 16)),
            ("twin splits", Shape(2, 4, 2, 3, 5, 16)),
            ("golden", Shape(2, 4, 2, 3, 5, 16)),
            ("baseline", Shape(1, 2, 1, 2, 3, 16)),
        ],
    ),
    ids=str,
)
def test_finite_differences_agree(name, shape):
    q, k, v, _ = draw(shape)
    bias = BIAS[:, : shape.heads, : shape.query_len, : shape.key_len].clone()
    leaves = [x.requires_grad_() for x in (q, k, v, bias, SINKS[: shape.heads].clone())]

    def attend(q, k, v, bias, sinks):
        masks = {"attn_mask": bias, "sinks": sinks, "softcap": 3.0, "window": (3, 1)}
        return EXACT[name](q, k, v, **masks, **DROPOUT)

    assert torch.autograd.gradcheck(attend, leaves)


ONE_HOT = Shape(2, 4, 2, 20, 37, 16, 37)
"""A value of each key that is its own axis of out: out is the weights."""


def weights(attend, dtype=torch.float64, **options):
    """Return the weights `(batch, heads, query_len, key_len)` after dropout."""
    q, k, _, _ = draw(ONE_HOT, dtype)
    return attend(q, k, torch.eye(37, dtype=dtype).expand(2, 2, 37, 37), **options)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("name", "changes"),
    [("golden", {}), ("baseline", {})]
    + [("twin", {"block_q": i, "block_k": j}) for i in (16, 32, 64) for j in (16, 64)]
    + [("twin", SMALL | {"splits": 3}), ("twin", SMALL | {"key_order": "reversed"})]
    + one_in(9, [("triton", {"block_k": 16, "splits": 2}), ("triton", SMALL), ("triton", {})]),
    ids=str,
)
def test_tiles_splits_and_dtypes_change_no_weight_that_is_dropped(name, changes, dtype):
    attend = EXACT[name] if not changes and name != "triton" else flash(name, "fa2", **changes)
    kept = keep_by_hand((2, 4, 20, 37), P, SEED, OFFSET)
    assert torch.equal(weights(attend, dtype, **DROPOUT) != 0, kept)


@pytest.mark.parametrize(
    "name",
    ["golden", "baseline", "twin", "twin splits", pytest.param("triton", marks=pytest.mark.slow)],
)
def test_the_denominator_and_the_lse_are_those_without_dropout(name):
    whole = weights(EXACT[name])
    kept = keep_by_hand((2, 4, 20, 37), P, SEED, OFFSET)
    torch.testing.assert_close(
        weights(EXACT[name], **DROPOUT), whole * kept / (1 - P), rtol=1e-14, atol=0
    )
    q, k, v, _ = draw(SHAPE)
    lse = EXACT[name](q, k, v, sinks=SINKS, return_lse=True).lse
    assert torch.equal(EXACT[name](q, k, v, sinks=SINKS, return_lse=True, **DROPOUT).lse, lse)


QUERIES, KEYS = (20, 0, 5, 0, 17), (37, 3, 20, 0, 29)
"""Lengths of packed sequences, some of them empty."""


def packed():
    """Packed q, k, v and dout with their offsets, and the same padded, with their lengths."""
    generator = torch.Generator().manual_seed(2)
    sizes = ((QUERIES, 4, 16), (KEYS, 2, 16), (KEYS, 2, 24), (QUERIES, 4, 24))
    parts = [
        [torch.randn(n, heads, dim, generator=generator).double() for n in lengths]
        for lengths, heads, dim in sizes
    ]
    starts = [
        torch.tensor([0, *itertools.accumulate(x)], dtype=torch.int32) for x in (QUERIES, KEYS)
    ]
    padded = [
        torch.nn.utils.rnn.pad_sequence(x, batch_first=True).transpose(1, 2).contiguous()
        for x in parts
    ]
    offsets = {"cu_seqlens_q": starts[0], "cu_seqlens_k": starts[1]}
    return [torch.cat(x) for x in parts], offsets, padded


@pytest.mark.parametrize(
    "name",
    [
        *("golden", "baseline", "twin", "twin splits", "twin key_outer"),
        pytest.param("triton", marks=pytest.mark.slow),
    ],
)
def test_packed_sequences_drop_what_padded_ones_drop(name):
    tokens, offsets, padded = packed()
    ours = run(EXACT[name], *tokens, **offsets, **DROPOUT)
    seen = torch.arange(max(KEYS)) < torch.tensor(KEYS)[:, None]
    expected = by_definition(*padded, key_padding=seen)
    lengths = {"out": QUERIES, "dq": QUERIES, "dk": KEYS, "dv": KEYS}
    # padded queries have dout 0, and so add nothing to dk and dv
    rows = {
        name: torch.cat([x[i, :, :n].transpose(0, 1) for i, n in enumerate(lengths[name])])
        for name, x in expected.items()
    }
    assert_close(ours, rows)


@pytest.mark.parametrize(
    "name", ["golden", "baseline", "twin", pytest.param("triton", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_a_probability_of_0_changes_no_bit(name, dtype):
    attend = EXACT[name] if name in ("golden", "baseline") else flash(name, "fa2", **SMALL)
    inputs, masks = draw(SHAPE, dtype), MASKS["all"]
    plain = run(attend, *inputs, **masks)
    off = {"dropout_p": 0.0, "dropout_seed": SEED, "dropout_offset": OFFSET}
    assert_equal(run(attend, *inputs, **masks, **off), plain)


@pytest.mark.parametrize(
    "name", ["golden", "baseline", "twin", pytest.param("triton", marks=pytest.mark.slow)]
)
def test_seed_and_offset_decide_and_twice_gives_the_same_bits(name):
    attend = EXACT[name] if name in ("golden", "baseline") else flash(name, "fa2", **SMALL)
    inputs = draw(SHAPE, torch.bfloat16)
    first = run(attend, *inputs, **DROPOUT)
    assert_equal(run(attend, *inputs, **DROPOUT), first)
    for name, other in (("dropout_seed", SEED + 1), ("dropout_offset", OFFSET + 1)):
        changed = run(attend, *inputs, **DROPOUT | {name: other})
        assert not any(torch.equal(changed[x], first[x]) for x in first)


def test_golden_in_chunks_drops_what_it_drops_whole(monkeypatch):
    inputs, masks = draw(SHAPE), MASKS["all"]
    expected = by_definition(*inputs, **masks)
    for scores in (5 * 37, 3 * 20 * 37):  # of a chunk: a few rows of a head, or some heads
        monkeypatch.setattr("attention_kernels.golden.CHUNK_BYTES", 8 * scores)
        assert_close(run(golden_attention, *inputs, **masks, **DROPOUT), expected)


BF16 = dict.fromkeys(
    (
        *("operands", "statistics", "probabilities", "accumulator", "output", "lse", "delta"),
        *("dp", "ds", "dq_accumulator", "dkv_accumulator", "gradients"),
    ),
    "bf16",
)
"""Every point but scores, whose FP64 makes that the work format: sums there are as good as exact,
so that two engines that add in other orders round to the same bits."""
KINDS: dict[str, Any] = {
    "stochastic": {"rounding": "stochastic", "seed": 5},
    "nearest": {},
    "stochastic, splits": {"rounding": "stochastic", "seed": SEED % 2**32, "splits": 2},
    "stochastic, key_outer": {"rounding": "stochastic", "loop_order": "key_outer"},
    "toward zero, reversed": {"rounding": "toward_zero", "key_order": "reversed"},
    "away, exp2": {"rounding": "away", "exp": "exp2"},
    "beta": {"repeated_max_beta": 7.0},
    "threshold": {"rescale_threshold": 4.0},
    "incoherent": {"incoherent": True, "rounding": "stochastic"},
    "fp8": {"scaling": "per_block", "operands": "e4m3", "probabilities": "e4m3"},
}


@pytest.mark.parametrize(
    ("kind", "mask"), one_in(20, itertools.product(KINDS, ("full", "all")), slow=3)
)
def test_the_kernel_has_the_bits_of_the_twin_in_every_kind_of_numerics(kind, mask):
    changes = SMALL | BF16 | KINDS[kind]
    inputs = draw(SHAPE._replace(batch=1))
    masks = {n: x.bfloat16() if n in TRAINED else x for n, x in MASKS[mask].items()}
    masks |= {n: x[:1] for n, x in masks.items() if n == "key_padding"}
    twin, triton = (
        run(flash(e, **changes), *inputs, **masks, **DROPOUT) for e in ("twin", "triton")
    )
    assert_equal(triton, twin)
    plain = run(flash("twin", **changes), *inputs, **masks)
    assert not any(torch.equal(plain[x], twin[x]) for x in twin)


RULE = {"fa2": {}, "fa1": {}, "fa3": {"splits": 2}, "fa4": {"key_order": "reversed"}}


@pytest.mark.parametrize("p", [0.1, 0.7])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("engine", "profile"),
    [("twin", profile) for profile in RULE]
    + [pytest.param("triton", profile, marks=pytest.mark.long) for profile in ("fa2", "fa3")],
)
def test_flash_attns_rule_holds(engine, profile, dtype, p):
    """max|flash - golden| <= 2 max|plain attention - golden|, for out and gradients."""
    inputs = draw(Shape(2, 4, 2, 65, 97, 32), dtype)
    options = {"causal": True, "dropout_p": p, "dropout_seed": 9}
    attend = flash(engine, profile, block_q=32, block_k=32, **RULE[profile])
    ours, baseline = (run(f, *inputs, **options) for f in (attend, baseline_attention))
    golden = run(golden_attention, *(x.double() for x in inputs), **options)
    for result in ours:
        assert_within_budget(ours[result], baseline[result], golden[result], what=result)


def test_plain_attention_rounds_where_eager_pytorch_does():
    """Weights in BF16, dropped and divided there, as by torch.nn.functional.dropout."""
    q, k, v, _ = draw(SHAPE, torch.bfloat16)
    k, v = (x.repeat_interleave(2, dim=1) for x in (k, v))
    scores = ((q.float() @ k.float().mT).bfloat16().float() * 0.25).bfloat16()
    kept = keep_by_hand((2, 4, 20, 37), P, SEED, OFFSET)
    dropped = (scores.softmax(-1).float() * kept / (1 - P)).bfloat16()
    expected = (dropped.float() @ v.float()).bfloat16()
    assert torch.equal(baseline_attention(q, k, v, **DROPOUT), expected)


@pytest.mark.parametrize(
    "name", ["golden", "baseline", "twin", pytest.param("triton", marks=pytest.mark.slow)]
)
def test_rows_whose_every_weight_is_dropped_give_zero_and_finite_gradients(name):
    inputs, p = draw(Shape(1, 2, 2, 33, 40, 16)), 0.97
    kept = keep_by_hand((1, 2, 33, 40), p, 4)
    empty = ~kept.any(-1)
    assert empty.any()
    ours = run(EXACT[name], *inputs, dropout_p=p, dropout_seed=4)
    assert torch.equal((ours["out"] == 0).all(-1), empty)
    assert_close(ours, by_definition(*inputs, p=p, seed=4, offset=0), 100 * FP64_RTOL)


def test_weights_that_outgrow_their_format_are_refused():
    """P / (1 - p) is an operand of plain attention's product; scaled, it is brought into range."""
    q, k, v, _ = draw(SHAPE, torch.bfloat16)
    narrow = BASELINE_PROFILES["plain"].with_(probabilities="e4m3")
    message = (
        r"baseline_attention: dropout_p must be at most 1 - 1/448, with probabilities in e4m3, got "
        r"0.999; drop less, or take a format of more range"
    )
    with pytest.raises(ValueError, match=message):
        baseline_attention(q, k, v, numerics=narrow, dropout_p=0.999, dropout_seed=1)
    one_key = [x[:, :, :1].contiguous() for x in (q, k, v)]  # whose weight is 1
    out = baseline_attention(*one_key, numerics=narrow, dropout_p=0.99, dropout_seed=1)
    assert out.isfinite().all()
    fp8 = BASELINE_PROFILES["fp8"]
    for p in (0.5, 0.99, 0.9999):
        out = baseline_attention(*one_key, numerics=fp8, dropout_p=p, dropout_seed=1)
        assert out.isfinite().all()


@pytest.mark.parametrize("name", ["golden", "baseline", "twin"])
def test_a_compiled_call_gives_the_bits_of_eager_and_new_seeds_compile_nothing(name):
    torch.compiler.reset()
    graphs = []

    def counting(graph, _):
        graphs.append(graph)
        return graph.forward

    q, k, v, _ = draw(Shape(1, 4, 2, 9, 13, 16))

    def attend(q, k, v, seed, offset):
        return EXACT[name](q, k, v, dropout_p=P, dropout_seed=seed, dropout_offset=offset)

    compiled = torch.compile(attend, fullgraph=True, backend=counting)
    for seed, offset in ((5, 3), (6, 4), (7, 9), (2**40, 2**33), (12, 2**62)):
        assert torch.equal(compiled(q, k, v, seed, offset), attend(q, k, v, seed, offset))
    # of the first call for its numbers, of the second for any
    assert len(graphs) == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["golden", "baseline", "twin"])
def test_a_compiled_backward_gives_the_bits_of_eager(name):
    torch.compiler.reset()
    inputs = draw(Shape(2, 4, 2, 20, 37, 16))

    def attend(q, k, v, seed, **options):
        return EXACT[name](q, k, v, dropout_p=P, dropout_seed=seed, **options)

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    for seed in (3, 4, 2**40 + 1):
        options = {"sinks": SINKS, "seed": seed}
        assert_equal(run(compiled, *inputs, **options), run(attend, *inputs, **options))


# torch 2.13 itself uses what it deprecates, once forward-mode differentiation is first entered.
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_tangents_go_through_golden_and_are_refused_by_flash():
    q, k, v, _ = draw(SHAPE)
    tangent = q.flip(2)
    ours = torch.func.jvp(lambda q: golden_attention(q, k, v, **DROPOUT), (q,), (tangent,))[1]
    keep = keep_by_hand((2, 4, 20, 37), P, SEED, OFFSET).double() / (1 - P)
    expected = torch.func.jvp(lambda q: definition(q, k, v, weight=keep), (q,), (tangent,))[1]
    torch.testing.assert_close(ours, expected)
    with pytest.raises(NotImplementedError, match="q must carry no tangent of forward-mode"):
        torch.func.jvp(lambda q: flash_attention(q, k, v, **DROPOUT), (q,), (tangent,))


def test_under_vmap_each_slice_is_a_call_of_its_own():
    q, k, v, _ = draw(SHAPE)
    queries = torch.stack([q, q.flip(2), -q])
    out = torch.vmap(lambda q: EXACT["twin"](q, k, v, **DROPOUT))(queries)
    assert torch.equal(out, torch.stack([EXACT["twin"](x, k, v, **DROPOUT) for x in queries]))


@pytest.mark.parametrize("name", [name for name in FAULTS if name != "scale_gain"])
def test_faults_that_golden_makes_are_made_without_dropout(name):
    q, k, v, _ = draw(Shape(1, 1, 1, 9, 9, 16), torch.float32)
    with pytest.raises(ValueError, match=r"plant: dropout_p must be 0, got 0.3; the fault is made"):
        plant(flash_attention, name)(q, k, v, causal=True, **DROPOUT)


def test_a_last_key_is_not_skipped_in_packed_sequences_with_dropout():
    tokens, offsets, _ = packed()
    with pytest.raises(ValueError, match=r"skip_last_key: dropout_p must be 0, got 0.3; the fault"):
        skip_last_key(golden_attention)(*tokens[:3], **offsets, **DROPOUT)
