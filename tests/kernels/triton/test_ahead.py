"""What is compiled ahead is what a launch would hand to Triton, and what fits is what it runs."""

import types

import pytest
import torch

from attention_kernels import PROFILES
from attention_kernels.masks import Mask
from attention_kernels.triton import ahead, arguments, launch
from attention_kernels.triton.ahead import SHARED_MEMORY, TENSOR_MEMORY, fits, signature_of

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
SCALED = {"nvfp4 operands": PROFILES["fa2"].with_(operands="nvfp4")}
"""Numerics that no profile has, whose operands are in blocks."""


@pytest.fixture
def launches(monkeypatch):
    """What a call would launch on a GPU: kernel, arguments and constants, none of which runs."""
    caught = []

    def remember(kernel, programs, given, constants, fp_fusion=False):
        caught.append((kernel, given, constants))

    def as_on_a_gpu(work, *tensors):
        return arguments.kernel_inputs(work, *(x.to("meta") for x in tensors))

    monkeypatch.setattr(launch, "_launch", remember)
    monkeypatch.setattr(launch, "kernel_inputs", as_on_a_gpu)
    return caught


def call(numerics, dtype, *, group, packed):
    """Call the dialled kernels, forward and backward, as `launch` does."""
    q, dout = (torch.ones(1, 2 * group, 9, 32, dtype=dtype) for _ in range(2))
    k, v = (torch.ones(1, 2, 9, 32, dtype=dtype) for _ in range(2))
    starts = torch.tensor([0, 4, 9], dtype=torch.int32) if packed else None
    mask = Mask(causal=True, cu_seqlens_q=starts, cu_seqlens_k=starts)
    options = {"mask": mask, "scale": 32**-0.5, "numerics": numerics}
    out, lse = launch.dialled_forward(q, k, v, **options)
    launch.dialled_backward(dout, q, k, v, out, lse, **options)
    return mask


def kind_of(value):
    """What Triton compiles for an argument."""
    if isinstance(value, torch.Tensor):
        names = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
        names |= {torch.float64: "fp64", torch.int32: "i32", torch.uint8: "u8"}
        return f"*{names[value.dtype]}"
    if isinstance(value, tuple):
        return tuple(kind_of(each) for each in value)
    return {type(None): "constexpr", int: "i32", float: "fp32"}[type(value)]


@pytest.mark.parametrize("name", [*PROFILES, *SCALED])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_arguments_have_the_types_of_a_launch(launches, name, dtype):
    numerics = (PROFILES | SCALED)[name].resolve(dtype)
    at = [*PROFILES, *SCALED].index(name) + DTYPES.index(dtype)
    mask = call(numerics, dtype, group=1 + at % 2, packed=at % 3 == 0)
    assert [kernel.__name__ for kernel, _, _ in launches] == [
        "forward_kernel",
        "dq_kernel",
        "dkv_kernel",
    ]
    for kernel, given, _ in launches:
        signature, *_ = signature_of(kernel, numerics, dtype, mask)
        assert len(given) == len(kernel.params) - 1, "all but the constants"
        for (parameter, kind), value in zip(signature.items(), given, strict=False):
            if not parameter.endswith("strides"):
                expected = tuple(kind) if isinstance(kind, tuple) else kind
                assert kind_of(value) == expected, f"{kernel.__name__}: {parameter}"


@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("packed", [False, True])
def test_constants_are_those_of_a_launch(launches, monkeypatch, group, packed):
    mask = call(PROFILES["fa3"].resolve(torch.bfloat16), torch.bfloat16, group=group, packed=packed)
    sources = []

    def compile_kernel(source, target, options):
        sources.append(source)
        return compiled(0, None)

    monkeypatch.setattr(ahead, "compile_kernel", compile_kernel)
    for kernel, _, constants in launches:
        ahead.compile_ahead(kernel, 90, PROFILES["fa3"], torch.bfloat16, 32, mask, group=group)
        found = sources.pop().constants[(len(kernel.params) - 1,)]
        assert vars(found) == vars(constants), kernel.__name__


def compiled(shared, tensor_memory):
    """A compiled kernel that takes so many bytes and columns."""
    return types.SimpleNamespace(
        metadata=types.SimpleNamespace(shared=shared, tmem_size=tensor_memory)
    )


def test_a_kernel_fits_where_neither_memory_is_passed():
    for arch, limit in SHARED_MEMORY.items():
        assert fits(compiled(limit, None), arch)
        assert not fits(compiled(limit + 1, None), arch)
    assert fits(compiled(0, TENSOR_MEMORY), 100)
    assert not fits(compiled(0, TENSOR_MEMORY + 1), 100)


def test_fewer_stages_are_compiled_where_tensor_memory_is_passed(monkeypatch):
    stages = []

    def compile_kernel(source, target, options):
        stages.append(options["num_stages"])
        return compiled(1024, TENSOR_MEMORY + 64 * (options["num_stages"] - 1))

    monkeypatch.setattr(ahead, "compile_kernel", compile_kernel)
    kernel = ahead.KERNELS["dkv_kernel"]
    found = ahead.compile_ahead(kernel, 100, PROFILES["fa3"], torch.bfloat16, 128)
    assert stages == [2, 1]
    assert found.metadata.tmem_size == TENSOR_MEMORY
