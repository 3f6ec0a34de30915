"""torch.func's transforms of an attention give the true result or refuse, never a silent zero."""

import pytest
import torch
from torch.autograd import forward_ad

from attention_kernels import PROFILES, baseline_attention, flash_attention, golden_attention


def flash(q, k, v, **options):
    return flash_attention(q, k, v, engine="twin", numerics=PROFILES["golden"], **options)


# torch 2.13 itself uses what it deprecates, once forward-mode differentiation is first entered.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.torch.jit.script. is deprecated:DeprecationWarning"
)
ATTENTIONS = {"flash": flash, "baseline": baseline_attention, "golden": golden_attention}
REFUSED = "must carry no tangent of forward-mode differentiation"
STEP = 1e-5
"""Of central differences: they err by its square, about 1e-10, and 1e-16 / STEP of rounding."""


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


Q, K, V = draw(1, 4, 5, 16), draw(1, 2, 7, 16, seed=1), draw(1, 2, 7, 16, seed=2)
BIAS = draw(1, 1, 5, 7, seed=3)
QUERIES = torch.stack([Q, 2 * Q, -Q])


def jvp(attention, x):
    return torch.func.jvp(attention, (x,), (x.flip(-1),))


@pytest.mark.parametrize("name", ["flash", "baseline"])
@pytest.mark.parametrize("operand", ["q", "k", "v", "attn_mask"])
def test_forward_mode_is_refused_for_whatever_carries_the_tangent(name, operand):
    given = {"q": Q, "k": K, "v": V, "attn_mask": BIAS}

    def attend(x):
        return ATTENTIONS[name](**given | {operand: x})

    message = f"{name}_attention: {operand} {REFUSED}"
    with pytest.raises(NotImplementedError, match=message):
        jvp(attend, given[operand])
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=message):
        attend(forward_ad.make_dual(given[operand], given[operand]))


@pytest.mark.parametrize("name", ATTENTIONS)
def test_slopes_hand_on_no_tangent_that_could_be_taken_for_0(name):
    slopes = torch.rand(4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def attend(x):
        return ATTENTIONS[name](Q, K, V, alibi_slopes=x)

    with pytest.raises(NotImplementedError, match=r"alibi_slopes must carry no .* as attn_mask to"):
        jvp(attend, slopes)


@pytest.mark.parametrize("name", ["flash", "baseline"])
def test_forward_mode_is_refused_inside_of_other_transforms(name):
    def attend(q):
        return ATTENTIONS[name](q, K, V)

    for transformed in (
        lambda: torch.func.jacfwd(attend)(Q),
        lambda: torch.vmap(lambda q: jvp(attend, q))(QUERIES),
    ):
        with pytest.raises(NotImplementedError, match=REFUSED):
            transformed()


def test_a_vmap_inside_of_forward_mode_hides_no_tangent_from_flash():
    with pytest.raises(NotImplementedError, match=REFUSED):
        jvp(torch.vmap(lambda q: flash(q, K, V)), QUERIES)


# Dynamo leaves the graph to look for the tangent, and says how it traces what comes after.
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a .functools.lru_cache:UserWarning")
@pytest.mark.slow
@pytest.mark.parametrize("name", ATTENTIONS)
def test_a_compiled_call_drops_no_tangent(name):
    torch.compiler.reset()

    def tangent(q):
        return jvp(lambda q: ATTENTIONS[name](q, K, V), q)[1]

    compiled = torch.compile(tangent, backend="eager")
    if name == "golden":
        assert torch.equal(compiled(Q), tangent(Q))
        return
    with pytest.raises(NotImplementedError, match=REFUSED):
        compiled(Q)


@pytest.mark.parametrize("options", [{}, {"causal": True, "softcap": 2.0, "attn_mask": BIAS}])
@pytest.mark.parametrize("rows", [None, 2], ids=["whole", "in chunks"])
def test_the_tangent_of_golden_is_the_finite_difference(options, rows, monkeypatch):
    if rows is not None:
        monkeypatch.setattr("attention_kernels.golden.CHUNK_BYTES", 8 * 4 * 7 * rows)
    operands = (Q, K, V)
    tangents = tuple(x.flip(-1) for x in operands)

    def attend(q, k, v):
        return golden_attention(q, k, v, **options)

    def moved(by):
        return attend(*(x + by * dx for x, dx in zip(operands, tangents, strict=True)))

    tangent = torch.func.jvp(attend, operands, tangents)[1]
    expected = (moved(STEP) - moved(-STEP)) / (2 * STEP)
    assert expected.abs().max() > 0.1
    assert (tangent - expected).abs().max() < 1e-8


@pytest.mark.parametrize("name", ATTENTIONS)
def test_constants_beside_a_tangent_are_no_reason_to_refuse(name):
    attention = ATTENTIONS[name]
    with forward_ad.dual_level():
        out = attention(Q, K, V) * forward_ad.make_dual(Q, K[:, :1, :5].expand_as(Q))
        tangent = forward_ad.unpack_dual(out).tangent
    assert tangent is not None
    assert torch.equal(tangent, attention(Q, K, V) * K[:, :1, :5])


def test_vmap_over_flash_is_each_call_alone_forward_and_backward():
    padding = draw(3, 1, 7, seed=4) > -1
    queries = QUERIES.clone().requires_grad_()
    out = torch.vmap(lambda q, seen: flash(q, K, V, key_padding=seen))(queries, padding)
    parts = zip(queries, padding, strict=True)
    expected = torch.stack([flash(q, K, V, key_padding=seen) for q, seen in parts])
    assert torch.equal(out, expected)
    (ours,) = torch.autograd.grad(out.square().sum(), queries)
    (alone,) = torch.autograd.grad(expected.square().sum(), queries)
    assert torch.equal(ours, alone)


@pytest.mark.parametrize("name", ["baseline", "golden"])
def test_vmap_is_refused_by_what_reads_values_on_the_way(name):
    message = f"{name}_attention: q must not be batched by torch.vmap"
    with pytest.raises(NotImplementedError, match=message):
        torch.vmap(lambda q: ATTENTIONS[name](q, K, V))(QUERIES)
