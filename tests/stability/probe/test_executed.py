"""What was executed: found by module and direction, without touching compiled code or the probe."""

import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from attention_kernels.formats import format_named
from stability.model.precision import EmulatedLinear
from stability.probe.executed import Executed, naming_modules, unwitnessed
from stability.records.witness import Stretch, Witness


def _named(executed):
    return {
        (row.part, row.module, row.during, row.operator.removeprefix("aten::")): row
        for row in executed.rows
    }


def test_products_are_told_by_module_and_direction_under_autocast():
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4, bias=False))
    executed = Executed()
    with naming_modules(model, executed), executed:
        with torch.autocast("cpu", torch.bfloat16):
            out = model(torch.ones(2, 3, 8))
        out.float().sum().backward()
    found = _named(executed)
    assert set(found) == {
        ("linear", "0", "forward", "addmm"),
        ("linear", "0", "backward", "mm"),
        ("linear", "2", "forward", "mm"),
        ("linear", "2", "backward", "mm"),
    }
    assert {(row.operands, row.result) for row in found.values()} == {
        (("bfloat16", "bfloat16"), "bfloat16")
    }


def test_an_emulated_product_belongs_to_its_module_in_both_directions():
    model, executed = nn.Sequential(nn.Linear(8, 4)), Executed()
    with naming_modules(model, executed), executed:
        with EmulatedLinear(format_named("e4m3")):
            out = model(torch.ones(2, 8))
        out.sum().backward()
    assert {(row.module, row.during) for row in executed.rows} == {
        ("0", "forward"),
        ("0", "backward"),
    }


@pytest.mark.parametrize("backend", ["math", "flash"])
def test_the_backend_that_sdpa_took_is_on_record(backend):
    executed = Executed()
    kernel = {"math": SDPBackend.MATH, "flash": SDPBackend.FLASH_ATTENTION}[backend]
    q = torch.ones(1, 2, 8, 16)
    with executed, sdpa_kernel(kernel):
        F.scaled_dot_product_attention(q, q, q, is_causal=True)
    rows = [[*_values(row)] for row in executed.rows]
    witness = Witness(stretches=[_as_dict(Stretch(first=0, last=1, executed=rows))])
    assert witness.backends == [backend]


def _values(row):
    return (row.part, row.module, row.during, row.operator, list(row.operands), row.result)


def _as_dict(stretch):
    return {name: getattr(stretch, name) for name in ("first", "last", "executed")}


def test_what_an_instrument_computes_is_not_recorded():
    executed = Executed()
    with executed, unwitnessed():
        torch.ones(2, 2, dtype=torch.float64) @ torch.ones(2, 2, dtype=torch.float64)
    assert not executed.rows


def test_a_compiled_function_stays_compiled_inside_the_mode():
    runs = []

    def backend(graph, inputs):
        def compiled(*args):
            runs.append("compiled")
            return graph(*args)

        return compiled

    function = torch.compile(lambda x: x @ x + 1, backend=backend)
    function(torch.ones(2, 2))
    with Executed():
        function(torch.ones(2, 2))
        torch.compile(lambda x: x @ x + 2, backend=backend)(torch.ones(2, 2))
    assert runs == ["compiled"] * 3
    torch._dynamo.reset()


def test_the_same_bits_come_out_with_and_without_the_mode():
    def gradients(mode):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 5))
        x, y = torch.randn(7, 16), torch.randint(0, 5, (7,))
        with (
            naming_modules(model, mode) if mode else torch.enable_grad(),
            mode or torch.enable_grad(),
        ):
            with torch.autocast("cpu", torch.bfloat16):
                out = model(x)
            F.cross_entropy(out.float(), y).backward()
        return [p.grad for p in model.parameters()]

    pairs = zip(gradients(None), gradients(Executed()), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_the_model_is_left_as_it_was():
    model = nn.Sequential(nn.Linear(2, 2))
    model.attention = (len,)
    with naming_modules(model, Executed()):
        assert model.attention != (len,)
    assert model.attention == (len,)
    assert not model[0]._forward_hooks
    assert not model[0]._forward_pre_hooks


class _Nested(torch.autograd.Function):
    """The square of a matrix, whose backward is an autograd of its own, in FP64."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clone()  # no product: nothing else than its place tells whose node it is

    @staticmethod
    def backward(ctx, dy):
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().double().requires_grad_()
            return torch.autograd.grad(x @ x, x, dy.double())[0].float()


class _Squares(nn.Module):
    def forward(self, x):
        return _Nested.apply(x)


class _Attending(nn.Module):
    """A layer, an attention, which is a function, and another layer."""

    def __init__(self, attention):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.attention = (attention,)

    def forward(self, x):
        x = self.first(x)
        return self.last(self.attention[0](x, x, x))


def _executed(model, x=None):
    executed = Executed()
    with naming_modules(model, executed), executed:
        out = model(torch.ones(4, 4, requires_grad=True) if x is None else x)
        out.sum().backward()
    return executed


def _wide(executed):
    """Return where FP64 was multiplied."""
    rows = [row for row in executed.rows if "float64" in row.operands]
    return {(row.part, row.module, row.during) for row in rows}


def test_what_an_attentions_backward_runs_by_itself_belongs_to_that_attention():
    executed = _executed(_Attending(lambda q, k, v: _Nested.apply(q)))
    assert _wide(executed) == {("attention", "layer_0.attention", "backward")}
    linear = {(row.module, row.during) for row in executed.rows if row.part == "linear"}
    assert linear == {(m, d) for m in ("first", "last") for d in ("forward", "backward")}


def test_what_a_layers_backward_runs_by_itself_belongs_to_that_layer():
    model = nn.Sequential(nn.Linear(4, 4), _Squares(), nn.Linear(4, 4))
    assert _wide(_executed(model)) == {("linear", "1", "backward")}


def _wide_where_grad_is_on(q, k, v):
    """Multiply FP64 in the second forward of a checkpoint alone, and in its backward."""
    q = q.double() if torch.is_grad_enabled() else q
    return (q @ q).float()


def test_a_checkpointed_attention_is_computed_again_as_that_attention():
    def attention(q, k, v):
        return checkpoint(_wide_where_grad_is_on, q, k, v, use_reentrant=True)

    executed = _executed(_Attending(attention))
    assert _wide(executed) == {("attention", "layer_0.attention", "backward")}


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpointed_block_is_computed_again_by_its_own_modules(use_reentrant):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.inside = _Attending(lambda q, k, v: _Nested.apply(q))
            self.squares = _Squares()

        def forward(self, x):
            return checkpoint(self._both, x, use_reentrant=use_reentrant)

        def _both(self, x):
            return self.squares(self.inside(x))

    model = nn.Sequential(nn.Linear(4, 4), Block())
    assert _wide(_executed(model)) == {("linear", "1.squares", "backward")} | {
        # only a tuple of the model itself is one of attentions
        ("linear", "1.inside", "backward")
    }
    model = Block()
    model.attention, model.inside.attention = model.inside.attention, None
    model.inside.forward = lambda x: model.inside.last(model.attention[0](x, x, x))
    assert _wide(_executed(model)) == {
        ("attention", "layer_0.attention", "backward"),
        ("linear", "squares", "backward"),
    }


def test_a_gradient_within_a_forward_belongs_to_the_module_that_takes_it():
    class Penalty(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            x = x.double()
            (slope,) = torch.autograd.grad((x @ x).sum(), x, create_graph=True)
            return self.layer((x @ slope).float())

    executed = _executed(nn.Sequential(nn.Linear(4, 4), Penalty()))
    assert _wide(executed) == {("linear", "1", "forward"), ("linear", "1", "backward")}
    narrow = {(row.module, row.during) for row in executed.rows if "float32" in row.operands}
    assert narrow == {(m, d) for m in ("0", "1.layer") for d in ("forward", "backward")}


def test_what_no_module_made_is_nobodys():
    wide, model = torch.ones(4, 4, dtype=torch.float64), nn.Linear(4, 4)
    hook = model.weight.register_hook(lambda dw: (wide @ dw.double()).float())
    assert _wide(_executed(model)) == {("unowned", "", "backward")}
    hook.remove()
    x = torch.ones(4, 4, requires_grad=True)
    made_before = _Nested.apply(x)
    assert _wide(_executed(model, made_before)) == {("unowned", "", "backward")}
    model.weight.register_post_accumulate_grad_hook(lambda w: (wide @ w.double(), None)[1])
    assert _wide(_executed(model)) == {("unowned", "", "backward")}


def test_what_the_model_itself_ends_with_is_the_models():
    class Penalized(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            # nothing that follows is a product, and no module begins or ends after it
            return _Nested.apply(self.layer(x)) * 2 + 1

    assert _wide(_executed(Penalized())) == {("linear", "", "backward")}
    executed, layer = Executed(), nn.Linear(4, 4)
    with naming_modules(layer, executed), executed:
        _Nested.apply(layer(torch.ones(4, 4))).sum().backward()  # a loss, outside of the model
    assert _wide(executed) == {("linear", "", "backward")}
    executed = Executed()
    with naming_modules(layer, executed), executed:
        _Last.apply(layer(torch.ones(4, 4))).backward(torch.ones(4, 4))
    assert _wide(executed) == {("linear", "", "backward")}


class _Last(torch.autograd.Function):
    """A copy, whose backward begins with a product in FP64."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x.double())
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        (wide,) = ctx.saved_tensors
        return dy + 0 * (wide @ wide).float()


class _Twice(torch.autograd.Function):
    """The double of x, whose backward makes a graph without a product, and takes its gradient."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, dy):
        with torch.enable_grad():
            x = (ctx.saved_tensors[0].detach() * 1).requires_grad_()
            return torch.autograd.grad(_Nested.apply(x * 3), x, dy)[0]


def test_a_graph_that_a_backward_makes_without_a_product_is_its_modules():
    class Doubled(nn.Module):
        def forward(self, x):
            return _Twice.apply(x)

    model = nn.Sequential(nn.Linear(4, 4), Doubled(), nn.Linear(4, 4))
    assert _wide(_executed(model)) == {("linear", "1", "backward")}


def test_the_numbers_of_another_threads_nodes_are_not_taken_for_the_forwards():
    # as on a GPU, whose nodes run in a thread that counts its own from 0
    executed, gradient = Executed(), torch.ones(4, 4)

    def backward():
        with executed:
            out.backward(gradient)

    attending = _Attending(lambda q, k, v: _Nested.apply(q))
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(9)), attending)
    model.attention, attending.attention = (
        attending.attention,
        (lambda *qkv: model.attention[0](*qkv),),
    )
    other = threading.Thread(target=lambda: made.append(_first_number()) or backward())
    made = []
    with naming_modules(model, executed):
        with executed:
            ours = _first_number()
            out = model(torch.ones(4, 4, requires_grad=True))
            numbers = range(ours, _first_number())
        other.start()
        other.join()
    assert made[0] < numbers[0]
    assert _wide(executed) == {("attention", "layer_0.attention", "backward")}
    assert {row.part for row in executed.rows} == {"linear", "attention"}


def _first_number():
    return torch.ones(1, requires_grad=True).neg().grad_fn._sequence_nr()
