"""A candidate as an attention implementation of transformers computes what the model would."""

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from attention_kernels import flash_attention
from stability.intercept.doors import catch_attention
from stability.intercept.transformers_call import REGISTERED
from stability.intercept.transformers_candidate import register_transformers

tiny = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("tiny_transformers.py"))))


def logits(model, given):
    with torch.no_grad():
        return model(**given).logits


def inputs(name, side):
    padding = {"attention_mask": tiny.padding(side)} if tiny.TINY[name].takes_padding else {}
    given = {**tiny.TINY[name].inputs(), **padding}
    return {k: x.double() if x.is_floating_point() else x for k, x in given.items()}


CASES = [
    pytest.param(name, own, side, id=f"{name}-{own}-{side}")
    for name, model in tiny.TINY.items()
    for own in model.implementations
    for side in ("left", "right")
    # Eager gives NaN for left padding in FP64: `test_transformers`.
    if (own, side) != ("eager", "left")
]


@pytest.mark.parametrize(("name", "own", "side"), CASES)
def test_exact_candidate_gives_the_logits_of_the_model(name, own, side):
    model, given = tiny.TINY[name].build().double().eval(), inputs(name, side)
    model.set_attn_implementation(own)
    expected = logits(model, given)
    model.set_attn_implementation(register_transformers("flash:golden"))
    error = (logits(model, given) - expected).abs()
    if tiny.TINY[name].takes_padding:
        error = error[tiny.padding(side).bool()]
    # Eager's softmax is FP32: it errs by some u = 6e-8 in each of three layers, and weights this
    # large enlarge that by some tens. A wrong mask or softcap changes logits by a tenth and more.
    assert error.max() <= (1e-5 if own == "eager" else 1e-11) * expected.abs().max()


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_padding_reaches_the_candidate(name):
    model, seen = tiny.TINY[name].build().double().eval(), []

    def attend(q, k, v, *, causal, scale=None, attn_mask=None):
        seen.append(attn_mask)
        return flash_attention(q, k, v, causal=causal, scale=scale, attn_mask=attn_mask)

    model.set_attn_implementation(register_transformers(attend))
    logits(model, inputs(name, "right"))
    assert len(seen) == 3
    for mask in seen:
        assert torch.equal(mask.any(dim=(1, 2)), tiny.padding("right").bool())


def test_gradients_flow_through_the_candidate():
    model, given = tiny.TINY["llama"].build().double(), inputs("llama", "right")
    valid, gradients = tiny.padding("right").bool(), []
    for implementation in ("sdpa", register_transformers("flash:golden")):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        model(**given).logits[valid].square().mean().backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    for sdpa, candidate in zip(*gradients, strict=True):
        assert (sdpa - candidate).abs().max() <= 1e-10 * sdpa.abs().max()


def test_autocast_reaches_the_candidate():
    model, seen = tiny.TINY["qwen3"].build().eval(), set()

    def attend(q, k, v, *, causal, scale=None):
        seen.add((q.dtype, k.dtype, v.dtype))
        return flash_attention(q, k, v, causal=causal, scale=scale)

    model.set_attn_implementation(register_transformers(attend))
    with torch.autocast("cpu", torch.bfloat16):
        logits(model, tiny.TINY["qwen3"].inputs())
    assert seen == {(torch.bfloat16,) * 3}


def test_registered_candidate_can_be_caught():
    model, calls = tiny.TINY["llama"].build().eval(), []
    model.set_attn_implementation(register_transformers("flash:fa2"))
    expected = logits(model, inputs("llama", "left"))

    def attend(call, primary):
        calls.append(call)
        return primary(call.q, call.k, call.v)[0]

    with catch_attention(model, attend):
        assert torch.equal(logits(model, inputs("llama", "left")), expected)
    assert [call.unsupported for call in calls] == [""] * 3
    assert all(torch.equal(call.valid, tiny.padding("left").bool()) for call in calls)


def test_names_are_free_of_what_transformers_takes_for_its_own():
    name = register_transformers("flash:fa2")
    assert name == register_transformers("flash:fa2") == "stability_tiled_fa2"
    assert name in REGISTERED
    assert register_transformers("sdpa") == "stability_torch"
    others = [lambda q, k, v, *, causal, scale=None: v for _ in range(2)]
    assert len({register_transformers(other) for other in others}) == 2


def test_unknown_candidate_is_refused_at_registration():
    with pytest.raises(ValueError, match="profile of flash must be one of its profiles, got 'fa9'"):
        register_transformers("flash:fa9")


def test_dropout_is_refused_at_the_first_forward():
    model = tiny.TINY["gpt2"].build().train()
    for block in model.transformer.h:
        block.attn.attn_dropout.p = 0.1
    model.set_attn_implementation(register_transformers("flash:fa2"))
    message = (
        "register_transformers: attention of GPT2Attention must be one that flash:fa2 can do, got "
        "dropout_p 0.1; build the model without it"
    )
    with pytest.raises(ValueError, match=message):
        model(**inputs("gpt2", "right"))
