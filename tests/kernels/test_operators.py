"""Attention is a good citizen of autograd and of torch.compile, at the same bits."""

import gc
from contextlib import contextmanager

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from attention_kernels import (
    BASELINE_PROFILES,
    PROFILES,
    baseline_attention,
    flash_attention,
    golden_attention,
)
from attention_kernels.operators import TENSORS, Call, plan_to_text
from attention_kernels.testing import Shape, make_qkv, with_gradients

SHAPE = Shape(2, 4, 2, 33, 65, 40)
ATTENTIONS = {
    "flash": lambda *qkv, **options: flash_attention(*qkv, engine="twin", **options),
    "baseline": baseline_attention,
    "golden": golden_attention,
}
PADDING = torch.arange(65) < torch.tensor([[50], [65]])
BIAS = torch.linspace(-1, 1, 33 * 65).reshape(33, 65)
OFFSETS = torch.tensor([0, 7, 7, 33], dtype=torch.int32)
WIDE_OUT = PROFILES["stabilised"].with_(output="fp32", block_q=16, block_k=32)
FP8 = PROFILES["fa3_fp8"].with_(block_q=16, block_k=32)
CASES = {
    "flash causal": ("flash", {"causal": True}),
    "flash window, softcap, padding": (
        "flash",
        {"window": (9, 3), "softcap": 2.0, "key_padding": PADDING},
    ),
    "flash bias and alibi": (
        "flash",
        {"attn_mask": BIAS, "alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.0])},
    ),
    "flash fp8": ("flash", {"causal": True, "numerics": FP8}),
    "flash wider out": ("flash", {"numerics": WIDE_OUT, "attn_mask": BIAS > 0}),
    "baseline": ("baseline", {"softcap": 2.0, "window": (None, 3)}),
    "baseline fp8": ("baseline", {"numerics": BASELINE_PROFILES["fp8"]}),
    "golden": ("golden", {"causal": True, "attn_mask": BIAS}),
}


@pytest.fixture(autouse=True)
def _nothing_compiled_before():
    torch.compiler.reset()


def draw(shape, dtype):
    generator = torch.Generator().manual_seed(0)
    q, k, v = make_qkv(shape, dtype, generator)
    return q, k, v, torch.randn(q.shape, generator=generator).to(dtype)


def packed(x):
    return x[0, :, :33].transpose(0, 1).contiguous()


def assert_same(results, expected):
    for name in expected:
        assert results[name].dtype == expected[name].dtype
        assert torch.equal(results[name], expected[name]), name


@contextmanager
def matmul_precision(name):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(name)
    switches = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul
    expected = [switch.fp32_precision for switch in switches]
    try:
        yield
        assert [switch.fp32_precision for switch in switches] == expected
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("case", CASES)
def test_a_compiled_model_gives_the_bits_of_eager_with_no_graph_break(case):
    attention, options = CASES[case]
    inputs = draw(SHAPE, torch.bfloat16)
    compiled = torch.compile(ATTENTIONS[attention], fullgraph=True, backend="aot_eager")
    eager = with_gradients(ATTENTIONS[attention], *inputs, **options)
    assert_same(with_gradients(compiled, *inputs, **options), eager)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_packed_sequences_compile_too(attention):
    inputs = [packed(x) for x in draw(SHAPE, torch.float32)]
    options = {"cu_seqlens_q": OFFSETS, "cu_seqlens_k": OFFSETS, "causal": True}
    compiled = torch.compile(ATTENTIONS[attention], fullgraph=True, backend="aot_eager")
    eager = with_gradients(ATTENTIONS[attention], *inputs, **options)
    assert_same(with_gradients(compiled, *inputs, **options), eager)


# torch 2.13 itself uses what it deprecates, once inductor is imported.
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
@pytest.mark.slow
def test_inductor_gives_the_bits_of_eager_around_attention():
    def model(q, k, v, **options):
        out, lse = flash_attention(q * 2, k, v, engine="twin", return_lse=True, **options)
        return out + lse.unsqueeze(-1)

    inputs = draw(SHAPE, torch.float32)
    options = {"causal": True, "window": (20, None)}
    compiled = torch.compile(model, fullgraph=True, backend="inductor")
    assert_same(
        with_gradients(compiled, *inputs, **options), with_gradients(model, *inputs, **options)
    )


@pytest.mark.parametrize(
    "changing",
    [
        [{"scale": scale} for scale in (0.1, 0.2, 0.3)],
        [{"softcap": softcap} for softcap in (1.0, 2.0, 3.0)],
        [{"window": window} for window in ((1, 2), (3, 4), (7, None))],
        [{"numerics": PROFILES["fa2"].with_(block_k=16, scores=f"e8m{m}")} for m in (2, 3, 4)],
    ],
    ids=["scale", "softcap", "window", "numerics"],
)
def test_a_compiled_call_follows_arguments_that_change(changing):
    q, k, v, _ = draw(Shape(1, 2, 1, 17, 33, 16), torch.bfloat16)
    compiled = torch.compile(ATTENTIONS["flash"], fullgraph=True, backend="aot_eager")
    seen = []
    for options in changing:
        seen.append(compiled(q, k, v, **options))
        assert torch.equal(seen[-1], ATTENTIONS["flash"](q, k, v, **options))
        assert not any(torch.equal(seen[-1], other) for other in seen[:-1])


@pytest.mark.slow
def test_a_compiled_call_never_takes_the_numerics_of_an_object_that_is_gone():
    q, k, v, _ = draw(Shape(1, 2, 1, 17, 33, 16), torch.bfloat16)
    compiled = torch.compile(ATTENTIONS["flash"], fullgraph=True, backend="aot_eager")
    for scores in ("e5m2", "fp32", "bf16") * 2:
        numerics = PROFILES["fa2"].with_(scores=scores)
        expected = ATTENTIONS["flash"](q, k, v, numerics=numerics)
        assert torch.equal(compiled(q, k, v, numerics=numerics), expected)
        del numerics
        gc.collect()


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_one_graph_serves_lengths_that_change(attention):
    graphs = []

    def counting(graph, inputs):
        graphs.append(graph)
        return graph.forward

    q, k, v, _ = draw(Shape(1, 2, 2, 65, 65, 16), torch.float32)
    compiled = torch.compile(ATTENTIONS[attention], fullgraph=True, dynamic=True, backend=counting)
    for length in (65, 40, 17):
        part = [x[:, :, :length].clone() for x in (q, k, v)]
        expected = ATTENTIONS[attention](*part, causal=True)
        assert torch.equal(compiled(*part, causal=True), expected)
    assert len(graphs) == 1


def operator_arguments(engine, numerics, dtype, **masks):
    call = dict.fromkeys((*Call._fields[:TENSORS], "mask_mod", "left", "right")) | {"causal": True}
    plan = plan_to_text(engine, numerics and numerics.text, dtype)
    call |= {"dropout_p": 0.25, "dropout_seed": 2**40 + 1, "dropout_offset": 3}
    call |= {"rounding": (1, 2**40, 3, 4, 1, 0, 4)}
    return Call(**call | {"softcap": 0.0, "scale": 0.3, "plan": plan} | masks)


@pytest.mark.parametrize("engine", ["twin", "baseline", "golden"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_operators_keep_the_contract_of_torch(engine, dtype):
    q, k, v, dout = draw(Shape(1, 2, 1, 5, 9, 16), dtype)
    operators = torch.ops.attention_kernels
    trained = {"sinks": torch.ones(2), "bias": torch.zeros(1, 1, 5, 9)}
    if engine == "twin":
        masks = {"left": 3, "alibi_slopes": torch.ones(1, 2)} | trained
        call = operator_arguments(engine, WIDE_OUT, dtype, **masks)
        forward, backward = operators.flash_forward, operators.flash_backward
        saved = (q.to(torch.float32), q[..., 0].to(torch.float32))
    else:
        numerics = BASELINE_PROFILES["plain"] if engine == "baseline" else None
        call = operator_arguments(engine, numerics, dtype, **trained)
        forward, backward = operators.reference_forward, operators.reference_backward
        saved, dout = (), dout.double() if engine == "golden" else dout
    for bias_trained in (False, True):
        torch.library.opcheck(backward.default, (dout, q, k, v, *saved, bias_trained, *call))
    q, k, v, *leaves = (x.clone().requires_grad_() for x in (q, k, v, *trained.values()))
    call = call._replace(**dict(zip(trained, leaves, strict=True)))
    torch.library.opcheck(forward.default, (q, k, v, *call))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_what_only_values_tell_is_refused_with_the_same_words(attention, compiled):
    q, k, v = (packed(x) for x in draw(SHAPE, torch.float32)[:3])
    call = ATTENTIONS[attention]
    if compiled:
        call = torch.compile(call, fullgraph=True, backend="aot_eager")
    falling = torch.tensor([0, 20, 10, 33], dtype=torch.int32)
    message = f"{attention}_attention: cu_seqlens_q must be offsets that rise from 0 to the 33"
    with pytest.raises(ValueError, match=message):
        call(q, k, v, cu_seqlens_q=falling, cu_seqlens_k=OFFSETS)


def test_what_shapes_tell_is_refused_when_a_model_is_compiled():
    q, k, v, _ = draw(SHAPE, torch.float32)
    compiled = torch.compile(ATTENTIONS["flash"], backend="aot_eager")
    with pytest.raises(ValueError, match=r"flash_attention: window must be \(left, right\)"):
        compiled(q, k, v, window=(-1, 0))


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_gradcheck_passes_through_the_golden_profile(causal):
    shape = Shape(1, 2, 1, 5, 18, 16)
    leaves = [x.requires_grad_() for x in draw(shape, torch.float64)[:3]]

    def attend(q, k, v):
        numerics = PROFILES["golden"].with_(block_q=16, block_k=16)
        return flash_attention(q, k, v, causal=causal, numerics=numerics, engine="twin")

    assert torch.autograd.gradcheck(attend, leaves)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_autocast_around_forward_and_backward_changes_no_bit(attention, dtype):
    inputs = draw(SHAPE, dtype)
    plain = with_gradients(ATTENTIONS[attention], *inputs, causal=True)
    with torch.autocast("cpu", torch.bfloat16):
        under = with_gradients(ATTENTIONS[attention], *inputs, causal=True)
    assert_same(under, plain)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_matmul_precision_changes_no_bit_and_is_given_back(attention):
    inputs = draw(SHAPE, torch.float32)
    plain = with_gradients(ATTENTIONS[attention], *inputs)
    with matmul_precision("medium"):
        under = with_gradients(ATTENTIONS[attention], *inputs)
    assert_same(under, plain)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_strides_change_no_bit(attention):
    inputs = draw(SHAPE, torch.bfloat16)
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs]
    assert not strided[0].is_contiguous()
    plain = with_gradients(ATTENTIONS[attention], *inputs)
    assert_same(with_gradients(ATTENTIONS[attention], *strided), plain)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_inputs_are_left_as_they_were(dtype):
    inputs = draw(SHAPE, dtype)
    before = [x.clone() for x in inputs]
    with_gradients(ATTENTIONS["flash"], *inputs, causal=True)
    for x, copy in zip(inputs, before, strict=True):
        assert torch.equal(x, copy)


@pytest.mark.parametrize("wanted", [0, 1, 2], ids=["q", "k", "v"])
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_a_single_input_can_want_its_gradient(attention, wanted):
    *qkv, dout = draw(SHAPE, torch.bfloat16)
    every = with_gradients(ATTENTIONS[attention], *qkv, dout)
    qkv[wanted].requires_grad_()
    out = ATTENTIONS[attention](*qkv)
    out.backward(dout.to(out.dtype))
    assert torch.equal(qkv[wanted].grad, list(every.values())[1 + wanted])


def test_gradients_accumulate_over_two_uses():
    q, k, v, dout = draw(SHAPE, torch.float32)
    once = with_gradients(ATTENTIONS["flash"], q, k, v, dout)
    q.requires_grad_()
    for _ in range(2):
        ATTENTIONS["flash"](q, k, v).backward(dout)
    assert torch.equal(q.grad, 2 * once["dq"])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_results_have_the_dtype_and_shape_of_the_inputs(dtype):
    q, k, v, dout = draw(SHAPE, dtype)
    results = with_gradients(ATTENTIONS["flash"], q, k, v, dout)
    for name, like in zip(results, (q, q, k, v), strict=True):
        assert (results[name].dtype, results[name].shape) == (dtype, like.shape)


def test_an_fp64_result_is_stored_in_bf16_with_one_rounding():
    q = k = torch.zeros(1, 1, 4, 16, dtype=torch.bfloat16)
    values = torch.tensor([1, 1, 2 + 2**-6, 2**-38], dtype=torch.bfloat16)
    v = values.view(1, 1, 4, 1).expand(k.shape)
    out = flash_attention(q, k, v, numerics=PROFILES["golden"], engine="twin")
    # The mean is 1 + 2**-8 + 2**-40; through FP32 it would lose the last term, tie and become 1.
    assert (out == 1 + 2**-7).all()


def test_the_backward_reads_the_output_as_it_was_rounded_not_as_it_is_returned():
    inputs = draw(SHAPE, torch.bfloat16)
    narrow = PROFILES["fa2"].with_(gradients="fp32", ds="fp32")
    wide = with_gradients(ATTENTIONS["flash"], *inputs, numerics=narrow.with_(output="fp32"))
    stored = with_gradients(ATTENTIONS["flash"], *inputs, numerics=narrow)
    assert torch.equal(wide["out"], stored["out"])
    assert not torch.equal(wide["dq"], stored["dq"])
    assert torch.equal(wide["dv"], stored["dv"])


def test_lse_carries_no_gradient():
    q, k, v, dout = draw(SHAPE, torch.bfloat16)
    q.requires_grad_()
    out, lse = flash_attention(q, k, v, engine="twin", return_lse=True)
    assert out.requires_grad
    assert not lse.requires_grad
    assert lse.dtype == torch.float32
    out.backward(dout)
    assert q.grad.isfinite().all()


@pytest.mark.parametrize("attention", ["flash", "baseline"])
def test_a_second_derivative_is_refused(attention):
    q, k, v, _ = draw(Shape(1, 1, 1, 3, 4, 16), torch.float64)
    q.requires_grad_()
    out = ATTENTIONS[attention](q, k, v)
    (gradient,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match=r"differentiated at most once|once_differentiable"):
        gradient.sum().backward()


def test_the_golden_has_second_derivatives():
    leaves = [x.requires_grad_() for x in draw(Shape(1, 1, 1, 3, 4, 16), torch.float64)[:3]]
    assert torch.autograd.gradgradcheck(golden_attention, leaves)


@pytest.mark.parametrize("alone", ["q", "k", "v", "attn_mask", "sinks"])
def test_a_tensor_that_alone_is_trained_gets_its_gradient(alone):
    """Without autograd's function an eager call would give an output that leads back to nothing."""
    q, k, v = make_qkv(SHAPE, torch.float32, torch.Generator().manual_seed(0))
    given = {"q": q, "k": k, "v": v, "attn_mask": BIAS.clone(), "sinks": torch.zeros(4)}
    for x in given.values():
        x.requires_grad_(False)
    given[alone].requires_grad_()
    tensors = {name: given.pop(name) for name in ("q", "k", "v")}
    trained = (tensors | given)[alone]
    out = flash_attention(*tensors.values(), engine="twin", **given)
    exact = golden_attention(*tensors.values(), **given)
    for each in (out, exact):
        assert each.requires_grad
    found, expected = (torch.autograd.grad(x.square().sum(), trained)[0] for x in (out, exact))
    torch.testing.assert_close(found, expected.to(found.dtype), rtol=1e-3, atol=1e-3)
    with torch.no_grad():
        assert not flash_attention(*tensors.values(), engine="twin", **given).requires_grad


def test_a_mode_and_a_subclass_see_the_operator():
    """They take operators apart; an eager call beside them goes a shorter way, to the same bits."""

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append(str(func))
            return func(*args, **(kwargs or {}))

    class Named(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            names.append(str(func))
            return super().__torch_function__(func, types, args, kwargs or {})

    q, k, v = make_qkv(SHAPE, torch.float32, torch.Generator().manual_seed(0))
    plain = flash_attention(q, k, v, engine="twin")
    names = []
    with Seen():
        seen = flash_attention(q, k, v, engine="twin")
    assert any("attention_kernels.flash_forward" in name for name in names)
    assert torch.equal(seen, plain)
    names.clear()
    named = flash_attention(q.as_subclass(Named), k, v, engine="twin")
    assert any("attention_kernels" in name and "flash_forward" in name for name in names)
    assert torch.equal(named.as_subclass(torch.Tensor), plain)
