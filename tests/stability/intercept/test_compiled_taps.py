"""Compiled attention calls are observed as they are, told by layer, and every bit is kept."""

import copy
import threading
from contextlib import ExitStack, nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from stability.config.schema import ProbeConfig
from stability.intercept.compiled_taps import compiled_taps
from stability.probe.attention_probe import AttentionProbe, as_shadows
from stability.probe.attention_registry import resolve_attention
from stability.records.metric_names import deviation_name
from tests.stability.intercept.compiled_models import (
    COMPILES,
    Checkpointed,
    Seen,
    compile_blocks,
    compile_forward,
    decoder,
    inductor,
    observe,
    train,
)
from tests.stability.intercept.torch_models import VOCABULARY, Decoder, tokens, train_step

pytestmark = COMPILES


def _assert_same_bits(plain, watched):
    for name, value in plain.items():
        assert torch.equal(value, watched[name]), name


LAYERS = ["layers.2", "layers.1", "layers.0"]
"""In the order of the backward pass."""


@inductor
def test_compiled_blocks_are_told_apart_and_end_in_the_same_bits():
    """Blocks of one class share one graph: only the run tells which of them it is."""
    plain, watched, seen = observe(decoder(depth=2), compile_blocks, steps=3)
    _assert_same_bits(plain, watched)
    assert seen.layers == LAYERS[1:] * 2
    assert not seen.missed
    assert all(mask == {"causal": True} for _, mask, *_ in seen.calls)


@inductor
@pytest.mark.slow
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16], ids=["fp32", "bf16-mixed"])
@pytest.mark.parametrize("compile_model", [torch.compile, compile_forward])
def test_a_model_compiled_as_a_whole_is_seen_and_ends_in_the_same_bits(compile_model, precision):
    model = Decoder(dropout=0.1)
    plain, watched, seen = observe(model, compile_model, precision=precision, micro_batches=2)
    _assert_same_bits(plain, watched)
    assert seen.layers == LAYERS * 4
    assert not seen.missed
    assert {x.dtype for _, _, copies, _ in seen.calls for x in copies} == {precision}


@inductor
@pytest.mark.slow
@pytest.mark.parametrize("use_reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@pytest.mark.parametrize("compile_model", [torch.compile, compile_blocks])
def test_checkpointed_attention_is_seen_once_with_its_gradients(compile_model, use_reentrant):
    plain, watched, seen = observe(Checkpointed(use_reentrant), compile_model)
    _assert_same_bits(plain, watched)
    assert seen.layers == [f"inner.{layer}" for layer in LAYERS] * 2
    assert not seen.missed


@inductor
@pytest.mark.slow
def test_recomputed_calls_of_equal_batches_are_told_apart():
    model, seen = compile_blocks(Checkpointed()), Seen()
    with compiled_taps(model, seen.call, seen.miss) as taps, taps.listening():
        train_step(model, 0)
        train_step(model, 0)
    assert seen.layers == [f"inner.{layer}" for layer in LAYERS] * 2
    assert not seen.missed


@inductor
@pytest.mark.slow
def test_attention_that_the_observer_computes_is_none_of_the_model():
    model, seen = decoder(depth=2), Seen()

    def call_again(observed):
        seen.call(observed)
        q, k, v = (x.detach() for x in (observed.call.q, observed.call.k, observed.call.v))
        F.scaled_dot_product_attention(q, k, v)

    with compiled_taps(model, call_again, seen.miss) as taps, taps.listening():
        train_step(torch.compile(model), 0)
    assert seen.layers == LAYERS[1:]
    assert not seen.missed


class Watching(TorchDispatchMode):
    """A mode that leaves what it sees alone, as the witness of what was executed."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))

    @classmethod
    def ignore_compile_internals(cls):
        return True


@inductor
@pytest.mark.slow
@pytest.mark.parametrize("is_around", [True, False])
def test_an_observer_can_differentiate_whatever_mode_is_on(is_around):
    model, seen = decoder(depth=2), Seen()

    def differentiate(observed):
        seen.call(observed)
        x = observed.call.q.detach().clone().requires_grad_()
        with torch.enable_grad():
            (gradient,) = torch.autograd.grad(x.square().sum(), x)
        assert torch.equal(gradient, 2 * x)

    compile_blocks(model)
    with compiled_taps(model, differentiate, seen.miss) as taps, ExitStack() as stack:
        for context in (Watching(), taps.listening())[:: 1 if is_around else -1]:
            stack.enter_context(context)
        train_step(model, 0)
    assert seen.layers == LAYERS[1:]
    assert not seen.missed


def _train_lengths(model, compiled, taps=None):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step, length in enumerate((24, 17, 31, 9)):
        optimizer.zero_grad()
        batch = tokens(step, length=length)
        with taps.listening() if taps is not None else nullcontext():
            logits = compiled(batch[:, :-1])
            F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).backward()
        optimizer.step()
    return {name: value.clone() for name, value in model.state_dict().items()}


@inductor
@pytest.mark.slow
def test_lengths_that_vary_are_seen_and_end_in_the_same_bits():
    plain, watched, seen = observe(decoder(), torch.compile, _train_lengths)
    _assert_same_bits(plain, watched)
    assert seen.layers == LAYERS * 4
    assert [copies[0].shape[2] for _, _, copies, _ in seen.calls[::3]] == [24, 17, 31, 9]
    assert not seen.missed


@inductor
@pytest.mark.slow
def test_the_tensors_are_those_of_the_run():
    """The figures of each are those of the definition, and weights' gradients come from them."""
    model, seen = decoder(depth=2).double(), Seen()
    with compiled_taps(model, seen.call, seen.miss) as taps, taps.listening():
        train_step(compile_blocks(model), 0)
    assert seen.layers == ["layers.1", "layers.0"]
    for layer, _, copies, dout in seen.calls:
        q, k, v, out, *gradients = copies
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        scores = leaves[0] @ leaves[1].transpose(-1, -2) / q.shape[-1] ** 0.5
        hidden = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
        exact = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ leaves[2]
        torch.testing.assert_close(out, exact.detach(), rtol=1e-12, atol=1e-14)
        for x, y in zip(gradients, torch.autograd.grad(exact, leaves, dout), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-14)
        # the gradient of the bias of q, k and v is the sum over the tokens of theirs
        bias = torch.cat([x.sum((0, 2)).flatten() for x in gradients])
        own = model.get_submodule(layer).qkv.bias.grad
        torch.testing.assert_close(bias, own, rtol=1e-12, atol=1e-15)


def _off_in_one_head(q, k, v, *, causal, scale=None):
    out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)
    factor = torch.ones(q.shape[1], 1, 1)
    if q.shape[1] == 2:
        factor[1] = 1.001
    return out * factor


@inductor
@pytest.mark.slow
def test_a_planted_error_is_at_its_layer_and_head():
    """Only the layer of two heads gets a wrong candidate, in its head 1."""
    model = decoder(heads=4)
    model.layers[1].heads = 2
    candidate = resolve_attention(_off_in_one_head, torch.device("cpu"))
    config = ProbeConfig(heads=True)
    probe = AttentionProbe(config, as_shadows([candidate]), shadow_is_candidate=True)
    probe.arm()

    def compare(observed):
        probe.compare_given(observed.call, observed.out, observed.dout, observed.gradients)

    missed = []
    with compiled_taps(model, compare, lambda *x: missed.append(x)) as taps, taps.listening():
        train_step(compile_blocks(model), 0)
    assert not missed
    metrics = probe.collect().metrics
    assert not [name for name in metrics if "nonfinite" in name and metrics[name]]
    for what in ("out", "dv"):
        figures = {
            (layer, head): metrics[
                deviation_name(f"layers.{layer}", what, "rel_fro", part=f"head_{head}")
            ]
            for layer, heads in enumerate((4, 2, 4))
            for head in range(heads)
        }
        # in FP32 what is right is right to 1e-6
        assert figures.pop((1, 1)) == pytest.approx(1e-3, rel=1e-2), what
        assert max(figures.values()) < 1e-5, what


@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
def test_a_graph_of_another_backend_is_named_and_ends_in_the_same_bits(backend):
    def compile_model(model):
        return torch.compile(model, backend=backend)

    plain, watched, seen = observe(decoder(), compile_model, steps=2)
    _assert_same_bits(plain, watched)
    assert not seen.calls
    assert len(seen.missed) == 1
    assert seen.missed[0][0] == "model"
    assert "by another backend than Inductor" in seen.missed[0][1]


@inductor
@pytest.mark.slow
def test_a_model_compiled_before_is_named_with_what_mends_it():
    model, seen = compile_blocks(decoder(depth=2)), Seen()
    train_step(model, 0)
    with compiled_taps(model, seen.call, seen.miss) as taps:
        with taps.listening():
            train_step(model, 0)
        assert not seen.calls
        assert [layer for layer, _ in seen.missed] == ["layers.0", "layers.1"]
        assert "call torch.compiler.reset()" in seen.missed[0][1]
        torch.compiler.reset()
        with taps.listening():
            train_step(model, 0)
    assert seen.layers == ["layers.1", "layers.0"]
    # a graph that has been compiled inside is known to the next session too
    again = Seen()
    with compiled_taps(model, again.call, again.miss) as taps, taps.listening():
        train_step(model, 0)
    assert again.layers == ["layers.1", "layers.0"]
    assert not again.missed


class Unseen(nn.Module):
    """Calls SDPA in a way that no kernel takes: its mask wants a gradient."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(6, 6))

    def forward(self, x):
        q = x.unflatten(-1, (2, -1)).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q, self.bias)


@inductor
@pytest.mark.slow
def test_attention_in_plain_operators_is_named_before_the_backward():
    model, seen = nn.Sequential(Unseen()), Seen()
    with compiled_taps(model, seen.call, seen.miss) as taps, taps.listening():
        torch.compile(model)(torch.randn(2, 6, 16))
        assert [layer for layer, _ in seen.missed] == ["0"]
        assert "calls no attention kernel" in seen.missed[0][1]
    assert not seen.calls


@inductor
@pytest.mark.slow
def test_what_has_no_backward_is_seen_forward_alone_or_named():
    model, seen, forward_alone = decoder(depth=2), Seen(), Seen()
    with ExitStack() as stack:
        whole = stack.enter_context(compiled_taps(model, seen.call, seen.miss))
        alone = stack.enter_context(
            compiled_taps(model, forward_alone.call, forward_alone.miss, backward=False)
        )
        compile_blocks(model)
        with whole.listening(), alone.listening(), torch.no_grad():
            model(tokens(0))
        assert seen.passed == forward_alone.passed == [("layers.0", 0), ("layers.1", 0)]
        with whole.listening(), alone.listening():
            model(tokens(0))
    assert not seen.calls
    assert [layer for layer, _ in seen.missed] == ["layers.0", "layers.1"]
    assert all("no backward of it ran" in text for _, text in seen.missed)
    assert forward_alone.layers == ["layers.0", "layers.1"]
    assert not forward_alone.missed
    assert all(len(copies) == 4 for _, _, copies, _ in forward_alone.calls)


class Shared(nn.Module):
    """Calls the same attention twice in a forward pass."""

    def __init__(self):
        super().__init__()
        self.inner = decoder(depth=1)

    def forward(self, tokens):
        x = self.inner.embedding(tokens)
        layer = self.inner.layers[0]
        return self.inner.head(layer(x + layer(x)))


@inductor
@pytest.mark.slow
def test_a_second_call_of_one_module_has_a_name_of_its_own():
    model, seen = Shared(), Seen()
    with compiled_taps(model, seen.call, seen.miss) as taps, taps.listening():
        train_step(compile_blocks(model), 0)
        train_step(model, 1)
    assert seen.layers == ["inner.layers.0#1", "inner.layers.0"] * 2
    assert not seen.missed


@inductor
@pytest.mark.slow
def test_another_model_is_none_of_its_business():
    model, other, seen = decoder(depth=1), decoder(depth=1), Seen()
    with compiled_taps(model, seen.call, seen.miss) as taps, taps.listening():
        train_step(compile_blocks(other), 0)
        train_step(other, 0)
    assert not seen.calls
    assert not seen.missed


def _kernels_of_ours():
    name = "aten::_scaled_dot_product_flash_attention_for_cpu"
    dumps = [torch._C._dispatch_dump(name), torch._C._dispatch_dump(f"{name}_backward")]
    return sum("compiled_taps.py" in dump for dump in dumps)


def test_nothing_stays_behind_whatever_happens():
    backend = torch._TorchCompileInductorWrapper
    before, model, seen = backend.__call__, decoder(depth=1), Seen()

    def fail():
        with compiled_taps(model, seen.call, seen.miss) as taps, taps.listening():
            assert backend.__call__ is not before
            assert _kernels_of_ours() == 2
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert backend.__call__ is before
    assert _kernels_of_ours() == 0
    # two that end in the order in which they began
    one, two = ExitStack(), ExitStack()
    for stack in (one, two):
        taps = stack.enter_context(compiled_taps(model, seen.call, seen.miss))
        stack.enter_context(taps.listening())
    one.close()
    assert _kernels_of_ours() == 2
    two.close()
    assert backend.__call__ is before
    assert _kernels_of_ours() == 0


def test_eager_calls_are_left_alone():
    """They go the way of the interceptors, with the same bits, in this thread and in others."""
    model, seen = decoder(depth=2), Seen()
    twin = copy.deepcopy(model)
    plain = train(model, model, steps=2)
    with compiled_taps(twin, seen.call, seen.miss) as taps, taps.listening():
        thread = threading.Thread(target=train_step, args=(copy.deepcopy(twin), 0))
        thread.start()
        watched = train(twin, twin, steps=2)
        thread.join()
    _assert_same_bits(plain, watched)
    assert not seen.calls
    assert not seen.missed


@inductor
@pytest.mark.long
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_hugging_face_models_are_seen_and_end_in_the_same_bits(kind):
    """Compiled as their Trainer does, with padding and with lengths that vary."""
    pytest.importorskip("transformers")
    from tests.stability.intercept.tiny_transformers import TINY

    def train(model, compiled, taps=None):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for step, length in enumerate((12, 9)):
            optimizer.zero_grad()
            batch = tokens(step, length=length)[:, :-1].clamp(max=VOCABULARY - 1)
            mask = torch.ones_like(batch)
            mask[1, length - 2 :] = 0
            with taps.listening() if taps is not None else nullcontext():
                loss = compiled(input_ids=batch, attention_mask=mask, labels=batch).loss
                loss.backward()
            optimizer.step()
        return {name: value.clone() for name, value in model.state_dict().items()}

    model = TINY[kind].build()
    model.set_attn_implementation("sdpa")
    plain, watched, seen = observe(model, compile_forward, train)
    _assert_same_bits(plain, watched)
    assert seen.layers == TINY[kind].layers[::-1] * 2
    assert not seen.missed
    assert "attn_mask" in seen.calls[-1][1]
