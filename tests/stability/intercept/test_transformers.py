"""Every attention call of a transformers model is caught, and what can't be is refused before."""

import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import (
    AlbertConfig,
    AlbertModel,
    AttentionInterface,
    BartConfig,
    BartForConditionalGeneration,
)

from attention_kernels import baseline_attention, golden_attention
from stability import shadow
from stability.intercept.doors import catch_attention
from stability.intercept.transformers import (
    check_transformers,
    is_transformers_model,
)

tiny = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("tiny_transformers.py"))))
EVERY = [
    pytest.param(name, implementation, id=f"{name}-{implementation}")
    for name, model in tiny.TINY.items()
    for implementation in model.implementations
]
PADDED = [case for case in EVERY if tiny.TINY[case.values[0]].takes_padding]

# In FP64, eager's mask is FP64's lowest number, which its FP32 softmax takes for -inf: rows of
# left padding become NaN, and through 0 * NaN all rows that follow.
NAN = [(name, "eager", "left", torch.float64) for name in ("llama", "qwen3", "gemma2")]


def leave_alone(call, primary):
    return primary(call.q, call.k, call.v)[0]


def copied(call, primary):
    return leave_alone(call, primary).clone()


class Recorder:
    """Leaves the model alone, and keeps what was called and what came of it."""

    def __init__(self):
        self.calls = []

    def __call__(self, call, primary):
        out = primary(call.q, call.k, call.v)[0]
        self.calls.append((call, out.detach()))
        return out


def built(name, implementation):
    model = tiny.TINY[name].build()
    model.set_attn_implementation(implementation)
    return model


def inputs(name, side="right"):
    padding = {"attention_mask": tiny.padding(side)} if tiny.TINY[name].takes_padding else {}
    return {**tiny.TINY[name].inputs(), **padding}


def trained(model, given):
    """Return the logits and each parameter's gradient."""
    model.zero_grad()
    logits = model(**given).logits
    logits.square().mean().backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return logits.detach(), {name: grad.clone() for name, grad in grads.items()}


def rounding_bound(call, out, implementation):
    """Bound |out - exact| of softmax(scale q k^T) v in out's format, of unit roundoff u.

    The softmax of an eager model is FP32 even in FP64.

    A score is a dot product of D terms, scaled, masked and perhaps capped: off by (D + 4) u S, S
    the largest sum of its absolute terms. So a weight is off by the factor exp(2 (D + 4) u S), and
    (K + 4) u for exp, sum and division; the sum of K weighted values adds (K + 1) u.
    """
    coarsest = torch.float32 if implementation == "eager" else out.dtype
    unit = torch.finfo(coarsest).eps / 2
    q, k = call.q.detach().double().abs(), call.k.detach().double().abs()
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    largest = (q @ k.mT).max() * call.mask.get("scale", q.shape[-1] ** -0.5)
    factor = 2 * (q.shape[-1] + 4) * largest + 2 * k.shape[2] + 5
    return 1.1 * unit * factor * call.v.detach().double().abs().max()


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(("name", "implementation"), EVERY)
def test_caught_model_computes_the_same_bits(name, implementation, side):
    model, given, recorder = built(name, implementation), inputs(name, side), Recorder()
    logits, grads = trained(model, given)
    with catch_attention(model, recorder):
        caught_logits, caught_grads = trained(model, given)
    assert recorder.calls
    assert torch.equal(caught_logits, logits)
    assert caught_grads.keys() == grads.keys()
    different = [key for key, grad in grads.items() if not torch.equal(caught_grads[key], grad)]
    assert different == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(("name", "implementation"), EVERY)
def test_a_call_says_what_the_model_computed(name, implementation, side, dtype):
    if (name, implementation, side, dtype) in NAN:
        pytest.skip("transformers itself gives NaN")
    model, recorder = built(name, implementation).to(dtype), Recorder()
    given = {k: x.to(dtype) if x.is_floating_point() else x for k, x in inputs(name, side).items()}
    with torch.no_grad(), catch_attention(model, recorder):
        model(**given)
    assert [call.layer for call, _ in recorder.calls] == tiny.TINY[name].layers
    for call, out in recorder.calls:
        assert call.unsupported == ""
        assert call.k.shape[1] == call.v.shape[1] == tiny.TINY[name].kv_heads
        assert call.q.shape == out.shape
        rows = slice(None) if call.valid is None else call.valid
        for again in (golden_attention, baseline_attention):
            error = (again(call.q, call.k, call.v, **call.mask) - out).abs().amax(dim=(1, 3))
            assert error[rows].max() <= rounding_bound(call, out, implementation), call.layer


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(("name", "implementation"), PADDED)
def test_padding_is_told_from_the_mask(name, implementation, side):
    model, recorder = built(name, implementation), Recorder()
    with torch.no_grad(), catch_attention(model, recorder):
        model(**inputs(name, side))
    assert all(torch.equal(call.valid, tiny.padding(side).bool()) for call, _ in recorder.calls)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_padding_of_the_encoder_is_none_of_the_decoder(implementation):
    sizes = {f"{part}_layers": 1 for part in ("encoder", "decoder")}
    heads = {f"{part}_attention_heads": tiny.HEADS for part in ("encoder", "decoder")}
    config = BartConfig(vocab_size=tiny.VOCABULARY, d_model=tiny.WIDTH, **sizes, **heads)
    model, recorder = BartForConditionalGeneration(config).eval(), Recorder()
    model.set_attn_implementation(implementation)
    given = {**inputs("bert"), "decoder_input_ids": tiny.tokens()["input_ids"]}
    with torch.no_grad(), catch_attention(model, recorder):
        model(**given)
    valid = {call.layer.rpartition(".")[2]: call.valid for call, _ in recorder.calls[1:]}
    assert recorder.calls[0][0].valid.equal(tiny.padding("right").bool())
    assert valid == {"self_attn": None, "encoder_attn": None}


@pytest.mark.parametrize(("name", "implementation"), EVERY)
def test_all_rows_count_without_padding(name, implementation):
    model, recorder = built(name, implementation), Recorder()
    with torch.no_grad(), catch_attention(model, recorder):
        model(**tiny.TINY[name].inputs())
    assert all(call.valid is None or call.valid.all() for call, _ in recorder.calls)


@pytest.mark.parametrize(("name", "implementation"), PADDED)
def test_one_dropped_key_changes_one_call(name, implementation):
    model, given = built(name, implementation), inputs(name)
    target, changed = tiny.TINY[name].layers[2], {}

    def planted(call, primary):
        out = primary(call.q, call.k, call.v)[0]
        shown = out.detach().clone()
        if call.layer == target:
            visible = torch.ones(1, call.q.shape[1], call.q.shape[2], call.k.shape[2]).bool()
            visible[:, 1, :, 5] = False
            mask = call.mask.get("attn_mask")
            if call.mask["causal"]:
                visible = visible.tril()
            if mask is not None:
                visible = visible & (mask if mask.dtype == torch.bool else mask > -torch.inf)
            arguments = {**call.mask, "causal": False, "attn_mask": visible}
            shown = golden_attention(call.q, call.k, call.v, **arguments)
        rows = slice(None) if call.valid is None else call.valid
        error = (shown - out).abs().amax(dim=-1).transpose(1, 2)[rows]
        changed[call.layer] = (
            error.amax(dim=0) > rounding_bound(call, out, implementation)
        ).tolist()
        return out

    with torch.no_grad(), catch_attention(model, planted):
        model(**given)
    nothing = [False] * tiny.HEADS
    assert changed.pop(target) == [False, True, False, False]
    assert changed == dict.fromkeys(tiny.TINY[name].layers[:2], nothing)


@pytest.mark.parametrize(("name", "implementation"), EVERY)
def test_what_is_returned_is_what_the_model_goes_on_with(name, implementation):
    model, given = built(name, implementation), inputs(name)
    with torch.no_grad():
        before = model(**given).logits
        with catch_attention(model, lambda call, primary: torch.zeros_like(call.q)):
            zeroed = model(**given).logits
        with catch_attention(model, copied):
            same = model(**given).logits
    assert not torch.equal(before, zeroed)
    assert torch.equal(before, same)


@pytest.mark.parametrize("attend", [leave_alone, copied], ids=["own", "copied"])
def test_attention_weights_are_still_returned(attend):
    model, given = built("llama", "eager"), inputs("llama")
    with torch.no_grad(), catch_attention(model, attend):
        weights = model(**given, output_attentions=True).attentions
    assert [tuple(x.shape) for x in weights] == [(2, tiny.HEADS, tiny.LENGTH, tiny.LENGTH)] * 3


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_generation_with_a_cache_is_caught(implementation):
    model, recorder = built("llama", implementation), Recorder()
    given = {**inputs("llama", "left"), "max_new_tokens": 3, "do_sample": False}
    expected = model.generate(**given)
    with catch_attention(model, recorder):
        assert torch.equal(model.generate(**given), expected)
    assert {call.q.shape[2] for call, _ in recorder.calls} == {tiny.LENGTH, 1}
    for call, out in recorder.calls:
        rows = slice(None) if call.valid is None else call.valid
        error = golden_attention(call.q, call.k, call.v, **call.mask) - out
        assert error.abs().amax(dim=(1, 3))[rows].max() <= rounding_bound(call, out, implementation)


def test_calls_of_one_module_in_a_forward_pass_are_numbered():
    sizes = {"hidden_size": tiny.WIDTH, "num_attention_heads": tiny.HEADS, "num_hidden_layers": 3}
    config = AlbertConfig(vocab_size=tiny.VOCABULARY, intermediate_size=tiny.WIDTH, **sizes)
    model, recorder = AlbertModel(config).eval(), Recorder()
    with torch.no_grad(), catch_attention(model, recorder):
        model(**tiny.tokens())
        model(**tiny.tokens())
    layers = [call.layer.rpartition(".")[2] for call, _ in recorder.calls]
    assert layers == ["attention", "attention#1", "attention#2"] * 2


def test_checkpointed_layers_keep_their_names_and_their_bits():
    model, recorder = built("llama", "sdpa").train(), Recorder()
    expected = trained(model, inputs("llama"))
    model.activation_checkpointing_enable()
    with catch_attention(model, recorder):
        caught = trained(model, inputs("llama"))
    assert all(torch.equal(caught[1][key], grad) for key, grad in expected[1].items())
    layers = tiny.TINY["llama"].layers
    assert [call.layer for call, _ in recorder.calls] == [*layers, *reversed(layers)]


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_autocast_names_the_dtype_that_is_computed_in(implementation):
    model, recorder = built("qwen3", implementation), Recorder()
    with torch.autocast("cpu", torch.bfloat16):
        expected = trained(model, inputs("qwen3"))
        with catch_attention(model, recorder):
            caught = trained(model, inputs("qwen3"))
    assert torch.equal(caught[0], expected[0])
    assert all(torch.equal(caught[1][key], grad) for key, grad in expected[1].items())
    for call, out in recorder.calls:
        kinds = {call.q.dtype, call.k.dtype, call.v.dtype}
        assert call.dtype == (None if kinds == {torch.bfloat16} else torch.bfloat16)
        assert out.dtype == torch.bfloat16
    assert any(call.dtype for call, _ in recorder.calls)


def hooks_of(model):
    return [(len(x._forward_hooks), len(x._forward_pre_hooks)) for x in model.modules()]


def test_everything_is_restored_after_an_exception():
    model, before = built("gpt2", "sdpa"), AttentionInterface.get_interface
    hooks = hooks_of(model)

    def fail(call, primary):
        raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"), catch_attention(model, fail):
        model(**inputs("gpt2"))
    assert AttentionInterface.get_interface is before
    assert hooks_of(model) == hooks


def test_contexts_nest_end_in_any_order_and_keep_to_their_model():
    before = AttentionInterface.get_interface
    first, second = built("gpt2", "sdpa"), built("llama", "sdpa")
    recorders = [Recorder(), Recorder(), Recorder()]
    contexts = [
        catch_attention(model, recorder)
        for model, recorder in zip((first, first, second), recorders, strict=True)
    ]
    for context in contexts:
        context.__enter__()
    with torch.no_grad():
        first(**inputs("gpt2"))
        assert [len(recorder.calls) for recorder in recorders] == [3, 3, 0]
        contexts[0].__exit__(None, None, None)
        first(**inputs("gpt2"))
        second(**inputs("llama"))
    assert [len(recorder.calls) for recorder in recorders] == [3, 6, 3]
    for context in contexts[1:]:
        context.__exit__(None, None, None)
    assert AttentionInterface.get_interface is before


ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("gpt2", "attn_pdrop"),
        ("llama", "attention_dropout"),
        ("bert", "attention_probs_dropout_prob"),
    ],
)
def test_attention_dropout_is_refused_in_training_only(name, field):
    model = tiny.TINY[name].build()
    setattr(model.config, field, 0.1)
    check_transformers(model.eval())
    message = rf"model: config.{field} of \S+ must be 0 in training, got 0.1; build"
    with pytest.raises(ValueError, match=message):
        check_transformers(model.train())
    with pytest.raises(ValueError, match="model: config"), shadow(model):
        pass


def test_models_of_transformers_are_told_without_importing_it():
    assert is_transformers_model(tiny.TINY["gpt2"].build())
    assert is_transformers_model(nn.Sequential(tiny.TINY["gpt2"].build()))
    code = (
        "import sys; from torch import nn\n"
        "from stability.intercept.transformers import is_transformers_model\n"
        "assert not is_transformers_model(nn.Linear(2, 2))\n"
        "assert 'transformers' not in sys.modules"
    )
    path = f"{ROOT}:{ROOT / 'kernels'}"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": path}, timeout=120)
