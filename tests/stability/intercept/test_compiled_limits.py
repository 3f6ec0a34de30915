"""`shadow` on compiled models: what it does not see is told, and what lies around stays."""

import contextlib
import copy
import threading
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import stability
from attention_kernels import golden_attention
from stability import shadow
from stability.probe.optimizer_update import own_step
from tests.sampling import others_long
from tests.stability.intercept.compiled_models import COMPILES, compile_blocks, decoder, inductor
from tests.stability.intercept.compiled_sessions import (
    LAYERS,
    assert_nothing_left,
    assert_seen,
    compare_sessions,
    run_session,
    step_of_another_length,
    told_of,
)
from tests.stability.intercept.torch_models import train_step, unseen

pytestmark = COMPILES


class _Biased(nn.Module):
    """Calls SDPA in a way that no kernel takes: its mask wants a gradient."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(24, 24))

    def forward(self, x):
        q = x.unflatten(-1, (2, -1)).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, q, q, self.bias)
        return out.transpose(1, 2).flatten(2)


@pytest.mark.long
@unseen
@inductor
@pytest.mark.slow
def test_what_no_kernel_computes_is_told_as_not_seen():
    model = decoder()
    model.layers[2] = _Biased()
    probe = compare_sessions(model, torch.compile)
    assert [one.state for one in probe.coverage] == ["seen", "seen", "not seen"]
    told = told_of(probe)
    assert len(told) == 1  # once, not once a step
    assert told[0][0] == "layers.2"
    assert "calls no attention kernel" in told[0][1]
    assert set(probe.layers) == {"layers.0", "layers.1"}


@inductor
@pytest.mark.slow
def test_a_model_that_was_compiled_and_run_before_says_what_mends_it():
    model = compile_blocks(decoder())
    train_step(model, 0)
    with shadow(model) as probe:
        train_step(model, 0)
        with pytest.raises(ValueError, match=r"layers.0: not seen: .*torch.compiler.reset\(\)"):
            probe.step()
    assert_nothing_left()
    with shadow(model) as probe:
        torch.compiler.reset()
        train_step(model, 0)
        probe.step()
    assert_seen(probe)


def test_a_graph_of_another_backend_is_told_and_ends_in_the_same_bits():
    model, twin = decoder(depth=2), decoder(depth=2)
    plain = run_session(model, torch.compile(model, backend="eager"), steps=1)
    torch.compiler.reset()
    with shadow(twin) as probe:
        compiled = torch.compile(twin, backend="eager")
        train_step(compiled, 0)
        with pytest.raises(ValueError, match=r"(?s)by another backend.*Compiled code has run"):
            probe.step()
    torch.optim.AdamW(twin.parameters(), lr=1e-2).step()
    assert all(torch.equal(x, y) for x, y in zip(plain[0], twin.state_dict().values(), strict=True))
    assert_nothing_left()


def test_the_hint_is_shown_only_where_something_was_compiled():
    model = nn.Linear(4, 4)
    with shadow(model) as probe:
        model(torch.randn(2, 4)).sum().backward()
        with pytest.raises(ValueError, match="no attention that could be seen") as raised:
            probe.step()
    assert "ompiled" not in str(raised.value)


@inductor
@pytest.mark.slow
def test_a_layer_that_is_replaced_must_not_run_in_a_compiled_graph():
    model = decoder()
    compiled = torch.compile(model)
    text = r"layers.2 must run eagerly where replace"
    with pytest.raises(ValueError, match=text), shadow(model, replace=["layers.*"]):
        train_step(compiled, 0)
    assert_nothing_left()


@inductor
@pytest.mark.slow
def test_an_error_in_compiled_code_leaves_nothing_behind():
    @torch.compiler.disable
    def fail(*_):
        raise KeyError("planted")

    model = decoder()
    model.layers[1].register_forward_hook(fail)
    for compiled in (torch.compile(model), compile_blocks(model)):
        torch.compiler.reset()
        with pytest.raises(KeyError, match="planted"), shadow(model):
            train_step(compiled, 0)
    assert_nothing_left()


@inductor
@pytest.mark.slow
def test_a_compiled_function_in_an_eager_layer_stays_what_it_is():
    """Neither the function modes nor the hooks around it may reach Dynamo."""

    class Scaled(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner
            self.scale = torch.compile(lambda x: torch.tanh(x) * torch.sigmoid(x) + x.exp().log())

        def forward(self, x):
            return self.inner(self.scale(x))

    def compile_model(model):
        for index, layer in enumerate(model.layers):
            model.layers[index] = Scaled(layer)
        return model

    probe = compare_sessions(decoder(), compile_model, inside=False)
    assert set(probe.layers) == {f"{layer}.inner" for layer in LAYERS}
    assert not probe.findings


@inductor
@pytest.mark.slow
def test_a_candidate_that_is_compiled_is_none_of_the_models_calls():
    def attend(q, k, v, *, causal, scale=None):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)

    model, twin = decoder(), decoder()
    plain = run_session(model, model)
    with shadow(twin, torch.compile(attend), every=2) as probe:
        watched = run_session(twin, twin, probe)
    assert all(torch.equal(x, y) for x, y in zip(plain[0], watched[0], strict=True))
    assert probe.layers == LAYERS
    assert not probe.findings


@inductor
@pytest.mark.slow
def test_two_threads_train_a_compiled_and_an_eager_model():
    """Where one steps aside the other stays, and a compiler meets no hook that comes or goes."""

    def train(models, probes):
        ends = [[], []]

        def run(index):
            ends[index] = run_session(models[index], models[index], probes[index], steps=3)[0]

        compile_blocks(models[0])
        threads = [threading.Thread(target=run, args=(index,)) for index in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return ends

    models = [decoder(), decoder()]
    plain = train(copy.deepcopy(models), (None, None))
    torch.compiler.reset()
    with shadow(models[0]) as first, shadow(models[1]) as second:
        watched = train(models, (first, second))
    # the eager one's bits vary from one unwatched run to the next while another thread compiles
    assert all(torch.equal(x, y) for x, y in zip(plain[0], watched[0], strict=True))
    for probe in (first, second):
        assert set(probe.layers) == set(LAYERS)
    assert_nothing_left()


@inductor
@pytest.mark.slow
def test_a_copy_of_a_compiled_model_at_a_due_step_carries_nothing():
    model = compile_blocks(decoder())
    with shadow(model) as probe:
        train_step(model, 0)
        other = copy.deepcopy(model)
        probe.step()
    for module in other.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    assert_nothing_left()
    torch.compiler.reset()
    train_step(other, 0)


@unseen
@inductor
@pytest.mark.slow
def test_attention_call_leaves_a_compiled_graph_as_it_is():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.attend = stability.attention_call(golden_attention)

        def forward(self, x):
            q = x.unflatten(-1, (2, -1)).transpose(1, 2)
            return self.attend(q, q, q, causal=True).transpose(1, 2).flatten(2).to(x.dtype)

    model = decoder()
    model.layers[1] = Own()
    probe = compare_sessions(model, compile_blocks)
    assert set(probe.layers) == {"layers.0", "layers.2"}
    ((layer, text),) = told_of(probe)
    assert layer == "layers.1"
    assert "calls the operator attention_kernels::reference_forward" in text


class _ByHand(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(64, 192)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        probabilities = torch.softmax(torch.matmul(q, k.transpose(-1, -2)), -1)
        return torch.matmul(probabilities, v).transpose(1, 2).flatten(2)


class _Router(nn.Module):
    """Probabilities that are no attention: they come of an activation and a weight."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(64, 5)
        self.experts = nn.Parameter(torch.ones(5, 64))

    def forward(self, x):
        return self.gate(x).softmax(-1) @ self.experts


@pytest.mark.long
@unseen
@inductor
@pytest.mark.slow
@pytest.mark.parametrize(
    "step_of", others_long([train_step, step_of_another_length], slow=[train_step])
)
@pytest.mark.parametrize("compile_model", [torch.compile, compile_blocks])
def test_attention_by_hand_in_a_graph_is_told_at_its_layer(compile_model, step_of):
    model = decoder(depth=4)
    torch.manual_seed(1)
    model.layers[1], model.layers[3] = _ByHand(), _Router()
    probe = compare_sessions(model, compile_model, step_of=step_of)
    assert set(probe.layers) == {"layers.0", "layers.2"}
    assert {one.layer: one.state for one in probe.coverage} == {
        "layers.0": "seen",
        "layers.1": "not seen",
        "layers.2": "seen",
    }
    ((layer, text),) = told_of(probe)
    assert layer == "layers.1"
    assert "multiplies the result of a softmax with a matrix by itself" in text


@inductor
@pytest.mark.slow
def test_what_a_graph_hides_is_told_by_name_before_the_weights_are_changed():
    model = decoder(depth=2)
    model.layers[1] = _ByHand()
    compile_blocks(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")

        def texts(*_):
            return [str(one.message) for one in told if "attention layers" in str(one.message)]

        before_update = []
        optimizer.register_step_pre_hook(lambda *_: before_update.extend(texts()))
        with shadow(model) as probe:
            train_step(model, 0)
            optimizer.step()
            probe.step()
    (text,) = before_update
    assert "\n  layers.1: not seen: " in text
    assert "layers.0" not in text
    assert texts() == before_update, "nothing is told twice"


@pytest.mark.slow
@inductor
@pytest.mark.parametrize("whole", [False, True], ids=["step", "a function around it"])
def test_an_optimizer_that_is_compiled_is_compiled_once_and_its_updates_are_seen(whole):
    """The hooks by which a forgotten `step()` is known are in none of its graphs."""

    def trained(watch, **options):
        torch.compiler.reset()
        torch._dynamo.utils.counters.clear()
        model = decoder(depth=1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        update = torch.compile((lambda: optimizer.step()) if whole else optimizer.step)
        told = []
        with shadow(model, every=2, **options) if watch else contextlib.nullcontext() as probe:
            for step in range(3):
                train_step(model, step)
                update()
                optimizer.zero_grad()
                if probe:
                    probe.step()
                    told += probe.findings
            if probe:
                update()
                with pytest.warns(UserWarning, match=r"step\(\) was not called since"):
                    update()
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        return graphs, told, [x.detach().clone() for x in model.state_dict().values()]

    graphs, _, weights = trained(watch=False)
    watched_graphs, told, watched = trained(watch=True)
    assert watched_graphs == graphs == 1
    assert not told
    assert all(torch.equal(x, y) for x, y in zip(weights, watched, strict=True))
    watched_graphs, told, watched = trained(watch=True, modules={"optimizer": own_step})
    assert watched_graphs == 1
    assert not told
    assert all(torch.equal(x, y) for x, y in zip(weights, watched, strict=True))
