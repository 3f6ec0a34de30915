"""Delayed scales of a training: one for all of an update, from what earlier ones have seen."""

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from attention_kernels.delayed_scaling import DelayedScales, SeenAmax, quantized_now
from attention_kernels.linear_recipes import LINEAR_RECIPES, linear_recipe_named
from attention_kernels.recipe_linear import recipe_linear

F32 = np.float32
WIDTH, OUT, ROWS = 8, 6, 10
FP8 = "forward=delayed-e4m3{0} dgrad=delayed-e5m2{0}/delayed-e4m3{0} "
FP8 += "wgrad=delayed-e5m2{0}/delayed-e4m3{0} output=fp32"
"""The recipe fp8_delayed, with room for a history."""


def _draw(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _update(scales, x, weight, dy, history=1024, parts=1):
    """One update in `parts` micro-batches; return y, dx and dw of the whole batch."""
    recipe = linear_recipe_named(FP8.format(f"+history{history}"))
    w = weight.clone().requires_grad_()
    ys, dxs = [], []
    scales.is_open = True
    for own_x, own_dy in zip(x.chunk(parts), dy.chunk(parts), strict=True):
        leaf = own_x.clone().requires_grad_()
        y = recipe_linear(leaf, w, None, recipe, scales=scales.of("own"))
        y.backward(own_dy)
        ys.append(y.detach())
        dxs.append(leaf.grad)
    scales.advance()
    return torch.cat(ys), torch.cat(dxs), w.grad


def _rounded(values, amaxes, dtype, largest, history):
    """`values` by the scale of the last `history` amaxes; written from the recipe's source."""
    scale = F32(1)
    known = [float(a) for a in amaxes]
    for at in range(len(known)):
        amax = F32(max(known[max(0, at + 1 - history) : at + 1]))
        if amax > 0 and np.isfinite(amax):
            scale = F32(largest) / amax
    clipped = np.clip(values.numpy() * scale, -largest, largest)
    return clipped.astype(dtype).astype(F32) * (F32(1) / scale)


@pytest.mark.parametrize("history", [1, 2, 1024])
def test_each_update_multiplies_by_the_scales_that_earlier_ones_left(history):
    scales, amaxes = DelayedScales(), {"x": [], "w": [], "dy": []}
    sizes = [1.0, 8.0, 0.01, 0.02, 500.0, 1.0]
    for step, size in enumerate(sizes):
        x, weight, dy = (
            size * _draw(ROWS, WIDTH, seed=step),
            _draw(OUT, WIDTH, seed=50 + step),
            _draw(ROWS, OUT, seed=100 + step) / size,
        )
        y, dx, dw = _update(scales, x, weight, dy, history)
        e4m3, e5m2 = (ml_dtypes.float8_e4m3fn, 448), (ml_dtypes.float8_e5m2, 57344)
        of_x = _rounded(x, amaxes["x"], *e4m3, history)
        of_w = _rounded(weight, amaxes["w"], *e4m3, history)
        of_dy = _rounded(dy, amaxes["dy"], *e5m2, history)
        for found, wanted in ((y, of_x @ of_w.T), (dx, of_dy @ of_w), (dw, of_dy.T @ of_x)):
            np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-5, atol=1e-6 * size)
        for name, values in (("x", x), ("w", weight), ("dy", dy)):
            amaxes[name].append(values.abs().max())


def _three(parts):
    scales = DelayedScales()
    for step in range(3):
        x, weight, dy = (
            _draw(*shape, seed=10 * step + i)
            for i, shape in enumerate([(ROWS, WIDTH), (OUT, WIDTH), (ROWS, OUT)])
        )
        found = _update(scales, x, weight, dy, parts=parts)
    return found, scales.state_dict()


def test_micro_batches_of_an_update_share_its_scales_and_leave_one_amax():
    whole, states = _three(1)
    found, of_parts = _three(5)
    assert states.keys() == of_parts.keys()
    assert len(states) == 6
    for name, state in states.items():
        assert torch.equal(state["amaxes"], of_parts[name]["amaxes"]), name
        assert state["scale"] == of_parts[name]["scale"], name
        assert len(state["amaxes"]) == 3
    assert torch.equal(found[0], whole[0])
    assert torch.equal(found[1], whole[1])
    torch.testing.assert_close(found[2], whole[2])


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputed_forward_has_the_scales_of_its_update_and_leaves_one_amax(reentrant):
    plain, again = DelayedScales(), DelayedScales()
    recipe, bits = LINEAR_RECIPES["fp8_delayed"], []
    for scales in (plain, again):
        for step in range(3):
            x = _draw(ROWS, WIDTH, seed=step).requires_grad_()
            weight = _draw(OUT, WIDTH, seed=9).requires_grad_()
            scales.is_open = True

            def layer(x, weight=weight, scales=scales):
                return recipe_linear(x, weight, None, recipe, scales=scales.of("own"))

            y = checkpoint(layer, x, use_reentrant=reentrant) if scales is again else layer(x)
            y.sum().backward()
            scales.advance()
        bits.append([y.detach(), x.grad, weight.grad])
    assert all(torch.equal(a, b) for a, b in zip(*bits, strict=True))
    states = plain.state_dict(), again.state_dict()
    for name, state in states[0].items():
        assert torch.equal(state["amaxes"], states[1][name]["amaxes"]), name


def test_looks_evaluations_and_what_is_outside_of_an_update_leave_nothing_behind():
    scales = DelayedScales()
    x, weight, dy = _draw(4, WIDTH, seed=0), _draw(OUT, WIDTH, seed=1), _draw(4, OUT, seed=2)
    _update(scales, x, weight, dy)
    before = scales.state_dict()
    recipe, leaf = LINEAR_RECIPES["fp8_delayed"], (9 * x).requires_grad_()
    outside = recipe_linear(leaf, weight, None, recipe, scales=scales.of("own"))
    outside.backward(dy.bfloat16())
    scales.is_open = True
    look = recipe_linear(leaf, weight, None, recipe, scales=scales.of("own", records=False))
    look.backward(dy.bfloat16())
    with torch.no_grad():
        evaluated = recipe_linear(leaf, weight, None, recipe, scales=scales.of("own"))
    scales.advance()
    after = scales.state_dict()
    assert all(torch.equal(after[name]["amaxes"], before[name]["amaxes"]) for name in before)
    # and each was made by the scales as they stood, under which 9 x saturates
    assert torch.equal(look, outside)
    assert torch.equal(evaluated, outside)
    exact = leaf.detach() @ weight.T
    assert (look.float() - exact).norm() > 0.3 * exact.norm()


def test_operands_and_modules_and_products_of_one_forward_have_scales_of_their_own():
    scales, recipe = DelayedScales(), LINEAR_RECIPES["fp8_delayed"]
    scales.is_open = True
    x, weight = _draw(4, WIDTH, seed=0), _draw(OUT, WIDTH, seed=1)
    for module, part, size in (("a", 0, 1.0), ("a", 1, 2.0), ("b", 0, 4.0)):
        recipe_linear(size * x, weight, None, recipe, scales=scales.of(module), part=part)
    scales.advance()
    of_x = {
        name: state["amaxes"].item() / x.abs().max().item()
        for name, state in scales.state_dict().items()
        if "forward.left" in name
    }
    assert sorted(of_x.values()) == [1, 2, 4]
    assert len(scales.state_dict()) == 6


def test_a_state_goes_on_where_it_was_stored():
    scales = DelayedScales()
    x, weight, dy = _draw(4, WIDTH, seed=0), _draw(OUT, WIDTH, seed=1), _draw(4, OUT, seed=2)
    _update(scales, x, weight, dy)
    stored = scales.state_dict()
    again = DelayedScales()
    again.is_open = True
    again.quantized("stale", x, "e4m3", 4)
    again.load_state_dict(stored)
    first, second = (_update(each, 3 * x, weight, dy) for each in (scales, again))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert again.state_dict().keys() == stored.keys(), "an update that was cut off is forgotten"
    assert all(len(state["amaxes"]) == 1 for state in stored.values()), "a value"


def test_what_other_processes_saw_counts_also_of_an_operand_that_is_not_here():
    scales = DelayedScales()
    scales.is_open = True
    scales.quantized("here", torch.tensor([2.0]), "e4m3", 4)
    told = []

    def join(seen):
        told.append(dict(seen))
        return {"here": seen["here"]._replace(amax=7.0), "there": SeenAmax(0.5, "e5m2", 2)}

    scales.advance(join)
    assert told == [{"here": SeenAmax(2.0, "e4m3", 4)}]
    states = scales.state_dict()
    assert states["here"]["scale"] == 64
    assert states["there"]["scale"] == 57344 * 2
    assert [states[name]["history"] for name in ("here", "there")] == [4, 2]


@given(
    amaxes=st.lists(
        st.one_of(st.just(0.0), st.just(math.inf), st.floats(2.0**-100, 2.0**100, width=32)),
        min_size=1,
        max_size=8,
    ),
    history=st.integers(1, 4),
)
def test_the_scale_is_that_of_the_last_history_that_is_finite_and_not_zero(amaxes, history):
    scales, wanted = DelayedScales(), F32(1)
    for at, amax in enumerate(amaxes):
        scales.is_open = True
        scales.quantized("own", torch.tensor([amax]), "e4m3", history)
        scales.advance()
        known = F32(max(amaxes[max(0, at + 1 - history) : at + 1]))
        if known > 0 and np.isfinite(known):
            wanted = F32(448) / known
        assert scales.state_dict()["own"]["scale"] == float(wanted)


def test_without_scales_an_operand_has_the_one_that_it_would_leave_behind():
    x = 300 * _draw(5, 7, seed=3)
    scales = DelayedScales()
    scales.is_open = True
    scales.quantized("own", x, "e4m3", 1)
    scales.advance()
    assert torch.equal(quantized_now(x, "e4m3"), scales.quantized("own", x, "e4m3", 1))


def test_stochastic_rounding_of_a_delayed_operand_is_unbiased():
    scales = DelayedScales()
    x = torch.full((64, 64), 1.0 + 2.0**-5)  # a quarter of the way from 1 to 1 + 2**-3
    bits = torch.randint(0, 2**32, x.shape, generator=torch.Generator().manual_seed(0))
    found = scales.quantized("own", x, "e4m3", 1, rounding="stochastic", bits=bits)
    assert set(found.unique().tolist()) == {1.0, 1.125}
    assert (found > 1).double().mean().item() == pytest.approx(0.25, abs=0.03)


@pytest.mark.parametrize(
    ("elements", "history", "scale"),
    [
        ("e4m3", 3, 448 / 8),
        ("e5m2", 4, 57344 / 32),  # another format of the same amaxes
        ("e4m3", 2, 448 / 4),
        ("e4m3", 1, 448 / 1),
        ("e4m3", 100, 448 / 32),
    ],
)
def test_a_fork_to_another_format_or_history_begins_with_its_own_scale(elements, history, scale):
    parent = DelayedScales()
    for amax in (32.0, 8.0, 4.0, 1.0):
        parent.is_open = True
        parent.quantized("own", torch.tensor([amax]), "e4m3", 4)
        parent.advance()
    fork = DelayedScales()
    fork.load_state_dict(parent.state_dict())
    largest = {"e4m3": 448, "e5m2": 57344}[elements]
    found = fork.quantized("own", torch.tensor([1e30]), elements, history, records=False)
    assert found.item() == largest / scale
    fork.is_open = True
    fork.quantized("own", torch.tensor([0.5]), elements, history)
    fork.advance()
    assert fork.state_dict()["own"]["history"] == history
    assert len(fork.state_dict()["own"]["amaxes"]) == min(history, 5)


@pytest.mark.parametrize("elements", ["e4m3", "e5m2"])
def test_what_is_not_finite_stays_so_and_what_is_larger_than_foreseen_saturates(elements):
    scales = DelayedScales()
    scales.is_open = True
    x = torch.tensor([1.0, math.nan, -2.0])
    scales.quantized("own", x, elements, 4)
    scales.advance()
    assert scales.state_dict()["own"]["amaxes"].tolist() == [2.0], "a GPU's maximum leaves out NaN"
    given = torch.tensor([1e38, -1e38, math.inf, math.nan])
    found = scales.quantized("own", given, elements, 4)
    assert found[:2].tolist() == [2.0, -2.0]
    assert not found[2:].isfinite().any()


def test_gradients_of_replicas_have_the_scales_of_the_whole_batch():
    """Each of four has the mean of its own samples, so its gradients are four times as large."""
    one, of_four = DelayedScales(), DelayedScales(replicas=4)
    x, weight, dy = _draw(8, WIDTH, seed=0), _draw(OUT, WIDTH, seed=1), 1e-4 * _draw(8, OUT, seed=2)
    for step in range(3):
        whole = _update(one, x, weight, dy)
        recipe, parts = linear_recipe_named(FP8.format("")), []
        of_four.is_open = True
        for own_x, own_dy in zip(x.chunk(4), (4 * dy).chunk(4), strict=True):
            leaf, w = own_x.clone().requires_grad_(), weight.clone().requires_grad_()
            recipe_linear(leaf, w, None, recipe, scales=of_four.of("own")).backward(own_dy)
            parts.append((leaf.grad / 4, w.grad / 4))
        of_four.advance()
        assert torch.equal(torch.cat([dx for dx, _ in parts]), whole[1]), step
        torch.testing.assert_close(sum(dw for _, dw in parts), whole[2])
    states = one.state_dict(), of_four.state_dict()
    assert all(states[0][n]["scale"] == each["scale"] for n, each in states[1].items())


def test_an_empty_operand_is_refused():
    with pytest.raises(ValueError, match=r"x must hold values, got shape \(0, 3\)"):
        quantized_now(torch.zeros(0, 3), "e4m3")


def test_a_fork_is_of_its_own_format_also_where_another_process_multiplies():
    parent = DelayedScales()
    parent.advance(lambda seen: {"there": SeenAmax(8.0, "e4m3", 4)})
    fork = DelayedScales()
    fork.load_state_dict(parent.state_dict())
    fork.advance(lambda seen: {"there": SeenAmax(4.0, "e5m2", 2)})
    state = fork.state_dict()["there"]
    assert (state["elements"], state["history"], state["scale"]) == ("e5m2", 2, 57344 / 8)


def test_a_fork_whose_history_says_no_scale_begins_with_one():
    parent = DelayedScales()
    for amax in (2.0, math.inf):
        parent.is_open = True
        parent.quantized("own", torch.tensor([amax]), "e4m3", 4)
        parent.advance()
    assert parent.state_dict()["own"]["scale"] == 224
    assert parent.quantized("own", torch.tensor([1e6]), "e5m2", 4).item() == 57344
