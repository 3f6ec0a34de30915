"""What was executed: found by module and direction, without touching compiled code or the probe."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

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
