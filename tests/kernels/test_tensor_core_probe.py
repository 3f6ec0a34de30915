"""The probe of a GPU's tensor cores, run on emulated ones, finds in each what it is made of."""

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from attention_kernels.tensor_core import tensor_core_matmul
from attention_kernels.tensor_core_models import MODELS

pytest.importorskip("triton")
FOLDER = Path(__file__).parents[2] / "kernels" / "benchmarks"


@pytest.fixture(scope="module")
def probe():
    """The script as a module, as `python kernels/benchmarks/tensor_core_probe.py` sees it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        known = set(sys.modules)
        yield __import__("tensor_core_probe")
        for name in set(sys.modules) - known:
            if str(FOLDER) in str(getattr(sys.modules[name], "__file__", "")):
                del sys.modules[name]


def emulated(model, promote_every=None):
    formats = (model.operands[-1],) * 2
    return lambda a, b: tensor_core_matmul(
        a, b, model, formats=formats, promote_every=promote_every
    )


@pytest.mark.parametrize("name", MODELS)
def test_revealing_inputs_find_what_a_model_is_made_of(probe, name):
    assert probe.measured(emulated(MODELS[name]), "cpu") == probe.expected(MODELS[name])


@pytest.mark.parametrize(
    "change", [{"cut": "down"}, {"products": 8}, {"fraction_bits": 14}, {"accumulator": "fp32"}]
)
def test_revealing_inputs_find_each_change_of_a_model(probe, change):
    changed = replace(MODELS["hopper_fp8"], **change)
    found = probe.measured(emulated(changed), "cpu")
    wanted = probe.expected(MODELS["hopper_fp8"])
    differing = {name for name in wanted if found[name] != wanted[name]}
    (field,) = change
    assert differing == {{"accumulator": "accumulator_bits"}.get(field, field)}


def test_a_sum_in_fp32_is_no_tensor_core(probe):
    found = probe.measured(torch.matmul, "cpu")
    assert found["rounding"] == "nearest_even"
    assert found["fraction_bits"] == sys.modules["revealing_sums"].MOST_BITS
    assert found["accumulator_bits"] == 23


def case(probe, name, run, promote_every=None):
    model = MODELS[name]
    return probe.Case(
        name=name,
        operands=model.operands[0],
        model=model,
        held_in=model.operands[0],
        run=run,
        promote_every=promote_every,
        seen={},
    )


@pytest.mark.parametrize(("name", "promote"), [("hopper_fp8", 128), ("hopper_bf16", None)])
def test_random_operands_tell_a_model_from_its_neighbours(probe, name, promote):
    model = MODELS[name]
    run = emulated(replace(model, operands=model.operands[:1]), promote)
    rows = probe.shares(case(probe, name, run, promote), rows=128, length=256, device="cpu")
    assert len({row["law"] for row in rows}) == 4
    assert all(row["model"] == 1.0 for row in rows)
    for other in (*probe.others(model), "exact sum"):
        assert min(row[other] for row in rows) < 0.9, other


def test_a_chip_with_other_bits_is_told(probe, monkeypatch, capsys):
    right = emulated(replace(MODELS["hopper_bf16"], operands=("bf16",)))
    wrong = emulated(replace(MODELS["hopper_bf16"], fraction_bits=24))
    monkeypatch.setattr(probe, "measured", lambda run, find=probe.measured: find(run, "cpu"))
    monkeypatch.setattr(
        probe,
        "shares",
        lambda each, find=probe.shares: find(each, rows=128, length=256, device="cpu"),
    )
    assert probe.right(probe.probe(case(probe, "hopper_bf16", right)))
    assert not probe.right(probe.probe(case(probe, "hopper_bf16", wrong)))
    assert "fraction_bits 24; the model says 25" in capsys.readouterr().out

    def refuse(a, b):
        raise RuntimeError("no such type\nand more")

    found = probe.probe(case(probe, "hopper_bf16", refuse))
    assert "error" in found
    assert "does not run: RuntimeError: no such type\n" in capsys.readouterr().out


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0)])
def test_each_architecture_is_held_against_its_own_models(probe, capability):
    found = list(probe.cases(capability))
    names = {each.name: each.model.name for each in found}
    architecture = probe.ARCHITECTURES[capability]
    assert names["tl.dot bf16"] == f"{architecture}_bf16"
    assert ("_scaled_mm e4m3, use_fast_accum=True" in names) == (capability != (8, 0))
    promoted = {each.name for each in found if each.promote_every}
    assert bool(promoted) == (capability == (9, 0))
    assert all(each.model.takes(each.held_in) for each in found)


def test_operands_that_are_converted_where_they_lie_are_given_in_another_order(probe):
    """On an H100 the warp-level FP8 kernel had the bits of this order, and of no other."""
    taken = [32 * i + 4 * j + 2 * half + k for i in range(4) for half in (0, 1) for j in range(8)
             for k in (0, 1)]  # fmt: skip
    assert taken[:5] == [0, 1, 4, 5, 8]
    assert taken[16:19] == [2, 3, 6]
    model = MODELS["hopper_fp16"]

    def converted(a, b):
        return tensor_core_matmul(a[:, taken], b[taken], model)

    assert probe.measured(converted, "cpu") != probe.expected(model)
    assert probe.measured(probe._in_order(converted), "cpu") == probe.expected(model)


def test_a_chip_without_a_model_is_refused(probe):
    with pytest.raises(SystemExit, match=r"must be one that has models, .*, got \(7, 0\)"):
        list(probe.cases((7, 0)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "rows", "promote", "instruction", "additions"),
    [
        ("bf16", 64, 0, "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16", 0),
        ("fp8e4nv", 64, 0, "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3", 0),
        ("fp8e4nv", 64, 128, "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3", 32),
        ("fp8e4nv", 16, 0, "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", 0),
    ],
    ids=["bf16", "e4m3", "e4m3 promoted", "e4m3, 16 rows"],
)
def test_hopper_runs_the_instruction_that_the_model_is_of(
    probe, dtype, rows, promote, instruction, additions
):
    """Compiled without a GPU, by which a promoted sum is told from one inside the tensor core."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler import compile as compile_kernel

    names = probe.product_kernel.arg_names
    types = {"p_a": f"*{dtype}", "p_b": f"*{dtype}", "p_d": "*fp32", "K": "i32", "N": "i32"}
    values = {"BLOCK_M": rows, "BLOCK_N": 64, "BLOCK_K": probe.BLOCK_K, "PROMOTE": promote}
    signature = {name: types.get(name, "constexpr") for name in names}
    constants = {(names.index(name),): value for name, value in values.items()}
    aligned = {(at,): [["tt.divisibility", 16]] for at in range(len(types))}
    source = ASTSource(probe.product_kernel, signature, constants, aligned)
    ptx = compile_kernel(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
    assert set(probe.INSTRUCTION.findall(ptx)) == {instruction}
    assert len(re.findall(r"\badd[.\w]*\.f32\b", ptx)) == additions
