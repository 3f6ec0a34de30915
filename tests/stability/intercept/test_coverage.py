"""Nothing that is not seen goes unsaid: every kind of attention is listed, and nothing else is."""

import copy

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F

from attention_kernels import baseline_attention
from stability import attention_call, shadow
from tests.stability.intercept.torch_models import (
    Attention,
    train_step,
    unseen,
)

WIDTH, HEADS = 32, 2


def _by_softmax(q, k, v, *, causal, scale=None):
    scores = q @ k.transpose(-2, -1) * (q.shape[-1] ** -0.5)
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    scores = scores.masked_fill(hidden, -torch.inf).float()
    return F.dropout(scores.softmax(-1), 0.0).to(v.dtype) @ v


def _by_exp(q, k, v, *, causal, scale=None):
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * (q.shape[-1] ** -0.5)
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    weights = torch.exp(scores.masked_fill(hidden, -torch.inf) - scores.amax(-1, keepdim=True))
    return torch.einsum("bhqk,bhkd->bhqd", weights, v) / weights.sum(-1, keepdim=True)


def _in_chunks(q, k, v, *, causal, scale=None):
    """The recurrence of flash attention over two blocks of keys, without a mask."""
    total, out, largest = 0.0, 0.0, torch.full((*q.shape[:-1], 1), -torch.inf)
    for keys, values in zip(k.chunk(2, 2), v.chunk(2, 2), strict=True):
        scores = torch.matmul(q, keys.mT)
        new = torch.maximum(largest, scores.amax(-1, keepdim=True))
        weights = (scores - new).exp_()
        total = total * (largest - new).exp() + weights.sum(-1, keepdim=True)
        out = out * (largest - new).exp() + weights @ values
        largest = new
    return out / total


def _with_sink(q, k, v, *, causal, scale=None):
    scores = torch.cat([q @ k.mT, torch.zeros(*q.shape[:-1], 1)], -1)
    return F.softmax(scores, dim=-1)[..., :-1] @ v


def _by_logsumexp(q, k, v, *, causal, scale=None):
    scores = q @ k.mT
    return (scores - scores.logsumexp(-1, keepdim=True)).exp() @ v


def _by_log_softmax(q, k, v, *, causal, scale=None):
    return F.log_softmax(q @ k.mT, -1).exp() @ v


def _by_power(q, k, v, *, causal, scale=None):
    weights = 2.0 ** (q @ k.mT)
    return (weights / weights.sum(-1, keepdim=True)) @ v


def _by_sums(q, k, v, *, causal, scale=None):
    scores = (q.unsqueeze(-2) * k.unsqueeze(-3)).sum(-1)
    return (scores.softmax(-1).unsqueeze(-1) * v.unsqueeze(-3)).sum(-2)


def _by_a_kernel(q, k, v, *, causal, scale=None):
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)[0]


def _by_the_math_kernel(q, k, v, *, causal, scale=None):
    return torch.ops.aten._scaled_dot_product_attention_math.default(q, k, v)[0]


class CSA(Attention):
    """Attention under a name that does not say so, by any function."""

    def __init__(self, function):
        super().__init__(WIDTH, HEADS)
        self.function = function

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return self.out(self.function(q, k, v, causal=True).transpose(1, 2).flatten(2))


class Router(nn.Module):
    """A mixture of experts: a softmax of linear scores, whose result weighs the experts."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        weights = F.softmax(self.gate(x), -1)
        each = torch.stack([expert(x) for expert in self.experts], -2)
        picked, _ = weights.topk(2, -1)
        return torch.einsum("bte,btew->btw", weights, each) + 0 * picked.sum()


class Torchs(nn.Module):
    def __init__(self, need_weights):
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.need_weights = need_weights

    def forward(self, x):
        return self.inner(x, x, x, need_weights=self.need_weights)[0]


class Stack(nn.Module):
    def __init__(self, **layers):
        super().__init__()
        self.layers = nn.ModuleDict(layers)
        self.embedding = nn.Embedding(40, WIDTH)
        self.head = nn.Linear(WIDTH, 40)

    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers.values():
            x = x + layer(x)
        return self.head(x)


class Llama(nn.Module):
    """A block of transformers in a model of one's own."""

    def __init__(self):
        super().__init__()
        config = transformers.LlamaConfig(
            hidden_size=WIDTH,
            num_attention_heads=HEADS,
            num_key_value_heads=HEADS,
            intermediate_size=WIDTH,
            num_hidden_layers=1,
            vocab_size=40,
        )
        self.inner = transformers.LlamaModel(config)

    def forward(self, x):
        return self.inner(inputs_embeds=x).last_hidden_state


def _covered(**layers):
    torch.manual_seed(0)
    model = Stack(**layers)
    with shadow(model) as probe:
        train_step(model, 0)
        probe.step()
    return probe, {one.layer.removeprefix("layers."): one for one in probe.coverage}


@unseen
def test_a_model_with_every_kind_of_attention_lists_every_one():
    probe, covered = _covered(
        sdpa=Attention(WIDTH, HEADS),
        torchs=Torchs(need_weights=False),
        weights=Torchs(need_weights=True),
        llama=Llama(),
        wrapped=CSA(attention_call(_by_softmax)),
        softmax=CSA(_by_softmax),
        exp=CSA(_by_exp),
        router=Router(),
    )
    assert {name: one.state for name, one in covered.items()} == {
        "sdpa": "seen",
        "torchs.inner": "seen",
        "weights.inner": "not seen",
        "llama.inner.layers.0.self_attn": "seen",
        "wrapped": "seen",
        "softmax": "not seen",
        "exp": "not seen",
    }
    assert covered["weights.inner"].mend.startswith("call it with need_weights=False")
    assert "attention_call" in covered["softmax"].mend
    assert {layer.removeprefix("layers."): text for _, layer, text in probe.findings} == {
        name: str(one) for name, one in covered.items() if one.state != "seen"
    }
    for name in ("sdpa", "torchs.inner", "llama.inner.layers.0.self_attn", "wrapped"):
        assert f"deviation/layers.{name}/dq/rel_fro" in probe.metrics, name


@unseen
@pytest.mark.parametrize(
    "function",
    [
        *(_by_softmax, _by_exp, _in_chunks, _with_sink, _by_logsumexp, _by_log_softmax, _by_power),
        *(_by_sums, _by_a_kernel, _by_the_math_kernel),
    ],
)
def test_attention_by_hand_is_told_by_what_it_computes(function):
    probe, covered = _covered(seen=Attention(WIDTH, HEADS), own=CSA(function))
    assert covered["own"].state == "not seen"
    assert covered["own"].why == "it multiplies the result of a softmax with a matrix by itself"
    assert "deviation/layers.seen/out/rel_fro" in probe.metrics


def test_layers_that_are_not_seen_are_warned_of_once_where_step_is_called():
    model = Stack(**{f"x{index}": CSA(_by_exp) for index in range(9)}, sdpa=Attention(WIDTH, HEADS))
    with shadow(model) as probe:
        train_step(model, 0)
        with pytest.warns(UserWarning, match="of 10 attention layers 9 are") as told:
            probe.step()
        train_step(model, 1)
        probe.step()
    (one,) = told
    assert one.filename == __file__
    text = str(one.message)
    assert "layers.x7: not seen: it multiplies the result of a softmax" in text
    assert "layers.x8" not in text
    assert text.endswith("and 1 more, in `coverage`")


def test_a_router_is_no_attention():
    _, covered = _covered(seen=Attention(WIDTH, HEADS), router=Router())
    assert set(covered) == {"seen"}


@unseen
def test_a_module_with_a_call_that_is_caught_and_one_by_hand_is_seen_in_part():
    class Both(CSA):
        def forward(self, x):
            q = x.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            return super().forward(x + F.scaled_dot_product_attention(q, q, q).flatten(2).mT.mean())

    _, covered = _covered(both=Both(_by_softmax))
    assert covered["both"].state == "seen in part"
    assert covered["both"].why.startswith("beside what was caught it multiplies the result of a so")


@unseen
def test_attention_that_does_not_run_or_cant_be_repeated_is_said():
    class IdleAttention(Attention):
        pass

    class Skips(Stack):
        def forward(self, ids):
            return self.head(self.layers["drops"](self.embedding(ids)))

    class Drops(Attention):
        def forward(self, x):
            q = x.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            out = F.scaled_dot_product_attention(q, q, q, dropout_p=0.1)
            return out.transpose(1, 2).flatten(2)

    model = Skips(drops=Drops(WIDTH, HEADS), idle=IdleAttention(WIDTH, HEADS))
    with shadow(model) as probe:
        train_step(model, 0)
        probe.step()
    assert [str(one) for one in probe.coverage] == [
        "seen in part: its call can't be repeated: dropout_p 0.1; a shadow would drop other values",
        "not seen: IdleAttention was not run in the step that was looked at; give steps=[...] in "
        "the first of which it runs",
    ]


@unseen
def test_torchs_attention_in_a_class_of_that_name_is_told_with_what_mends_it():
    class Attn(Torchs):
        pass

    with shadow(Stack(seen=Attention(WIDTH, HEADS), own=Attn(need_weights=True))) as probe:
        train_step(probe._model, 0)
        probe.step()
    (unseen,) = [one for one in probe.coverage if one.state != "seen"]
    assert unseen.layer == "layers.own.inner"
    assert unseen.mend.startswith("call it with need_weights=False")


@pytest.mark.parametrize("kind", ["Falcon", "GPTJ", "Bloom"])
def test_families_with_attention_of_their_own_are_seen_or_told(kind):
    config = getattr(transformers, f"{kind}Config")(
        **{"vocab_size": 40, "hidden_size": WIDTH, "num_attention_heads": HEADS},
        **({"n_embd": WIDTH, "n_head": HEADS, "n_layer": 1, "rotary_dim": 8} | {"n_positions": 32})
        if kind == "GPTJ"
        else {"num_hidden_layers": 1, "n_layer": 1},
        **dict.fromkeys(("attention_dropout", "attn_pdrop", "hidden_dropout"), 0.0),
    )
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    ids = torch.arange(24).reshape(2, 12)
    with shadow(model) as probe:
        model(input_ids=ids, labels=ids).loss.backward()
        if kind == "Falcon":
            probe.step()
        else:
            with pytest.raises(ValueError, match="not seen: it multiplies the result of a softmax"):
                probe.step()
    states = {one.state for one in probe.coverage}
    assert states == ({"seen"} if kind == "Falcon" else {"not seen"})


@pytest.mark.parametrize("layout", ["bhtd", "bthd"])
def test_a_wrapped_attention_computes_what_it_did_and_its_fault_is_found(layout):
    def attend(q, k, v, mask):
        if layout == "bthd":
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = baseline_attention(q, k, v, attn_mask=mask) * 1.01
        return out.transpose(1, 2) if layout == "bthd" else out

    class Own(CSA):
        def forward(self, x):
            q, k, v = (t.unflatten(-1, (HEADS, -1)) for t in self.qkv(x).chunk(3, -1))
            if layout == "bhtd":
                q, k, v = (t.transpose(1, 2) for t in (q, k, v))
            mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
            out = self.function(q, k, v, mask)
            return self.out((out if layout == "bthd" else out.transpose(1, 2)).flatten(2))

    torch.manual_seed(0)
    masks = {"masks": lambda mask: {"attn_mask": mask}, "layout": layout}
    model = Stack(own=Own(attention_call(attend, **masks)))
    plain = copy.deepcopy(model)
    assert plain.layers["own"].function is not model.layers["own"].function
    train_step(plain, 0)
    with shadow(model, "flash:golden") as probe:
        train_step(model, 0)
        probe.step()
    for own, watched in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(own.grad, watched.grad)
    assert not probe.findings
    gain = probe.metrics["deviation/layers.own/out/gain"]
    assert gain == pytest.approx(0, abs=1e-5)  # the candidate is right; the model's own errs
    assert probe.metrics["deviation/layers.own/out/golden_baseline_rel_fro"] == pytest.approx(
        0.01, rel=1e-3
    )


@unseen
def test_a_wrapped_attention_that_is_called_with_what_nobody_knows_is_a_finding():
    @attention_call
    def attend(q, k, v, *, causal, flavour):
        return baseline_attention(q, k, v, causal=causal)

    class Own(CSA):
        def forward(self, x):
            q = x.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            return self.function(q, q, q, causal=True, flavour="salt").transpose(1, 2).flatten(2)

    probe, covered = _covered(own=Own(attend))
    assert covered["own"].state == "seen in part"
    (text,) = (text for _, _, text in probe.findings)
    assert text.startswith("not looked at: attend takes flavour, whose meaning is not known; say")
    assert "alibi_slopes, attn_mask, causal, " in text
    with pytest.raises(ValueError, match="layout must be 'bhtd' or 'bthd', got 'sbhd'"):
        attention_call(attend, layout="sbhd")


@pytest.mark.parametrize("where", ["default", "nowhere"])
def test_a_mask_that_is_not_passed_is_read_or_told(where):
    def by_default(q, k, v, causal=True):
        return baseline_attention(q, k, v, causal=causal)

    def hidden(q, k, v):
        return baseline_attention(q, k, v, causal=True)

    class Own(CSA):
        def forward(self, x):
            q, k, v = (
                t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1)
            )
            return self.out(self.function(q, k, v).transpose(1, 2).flatten(2))

    probe, _ = _covered(own=Own(attention_call(by_default if where == "default" else hidden)))
    probe.deliver()
    texts = [text for _, _, text in probe.findings]
    if where == "default":
        assert texts == []
    else:
        assert len(texts) == 1
        assert "it computes something else than its call says" in texts[0]


def test_a_wrapped_attention_is_seen_by_nested_shadows_and_copied_whole():
    torch.manual_seed(0)
    model = Stack(own=CSA(attention_call(_by_softmax)))
    with shadow(model, "sdpa") as outer, shadow(model, "sdpa") as inner:
        train_step(model, 0)
        outer.step()
        inner.step()
    assert inner.layers == outer.layers == ("layers.own",)
    assert inner.metrics == outer.metrics


@pytest.mark.parametrize("whose", ["the candidate's", "the model's"])
def test_values_that_are_not_finite_are_told_of_the_one_who_made_them(whose):
    def nan(q, k, v, *, causal, scale=None):
        return (q + k.mean() + v.mean()) * torch.nan

    def model_of(function):
        torch.manual_seed(0)
        return Stack(own=CSA(attention_call(function)))

    model = model_of(nan if whose == "the model's" else _by_softmax)
    with shadow(model, nan if whose == "the candidate's" else "flash:golden") as probe:
        train_step(model, 0)
        probe.step()
        probe.deliver()
    texts = " ".join(text for _, _, text in probe.findings)
    assert ("not one value of the model's own out is finite" in texts) == (whose == "the model's")
    assert "computes something else" not in texts
    name = "deviation/layers.own/out/golden_nonfinite"
    assert bool(probe.metrics[name]) == (whose == "the candidate's")


@pytest.mark.parametrize("replace", [(), ["*"]])
@pytest.mark.parametrize("steps", [[0], [1]])
def test_a_wrapped_function_that_returns_more_than_out_is_refused(replace, steps):
    """A bare out would be taken apart as what the function returns."""

    def with_weights(q, k, v):
        weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
        return weights @ v, weights

    model = nn.Module()
    attend = attention_call(with_weights)
    model.forward = lambda q, k, v: attend(q, k, v)[0]
    qkv = torch.randn(3, 2, 2, 32, 16, requires_grad=True).unbind()
    with shadow(model, "flash:golden", replace=replace, steps=steps) as probe:
        if steps == [1] and not replace:
            assert model(*qkv).shape == qkv[0].shape  # nothing is looked at
            probe.step()
        with pytest.raises(ValueError, match=r"with_weights must return out alone, .* got a tuple"):
            model(*qkv)
