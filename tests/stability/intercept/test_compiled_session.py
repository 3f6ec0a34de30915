"""`shadow` on compiled models: what it sees, what it says it does not, and that no bit changes."""

import copy
import shutil
import threading
import warnings

import pytest
import torch
from torch import nn
from torch._dynamo import eval_frame
from torch._dynamo.utils import counters
from torch.nn import functional as F
from torch.nn.modules import module as torch_module

import stability
from attention_kernels import golden_attention
from stability import shadow
from tests.stability.intercept.compiled_models import (
    Checkpointed,
    compile_blocks,
    compile_forward,
    decoder,
    one_thread_and_no_compiled_graphs,
)
from tests.stability.intercept.torch_models import VOCABULARY, tokens, train_step

# torch 2.13 itself uses what it deprecates, once Inductor is imported, and Dynamo reads `grad`.
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning",
    "ignore::FutureWarning",
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",
)

inductor = pytest.mark.skipif(
    shutil.which("g++") is None, reason="Inductor needs a C++ compiler on the CPU"
)

LAYERS = ("layers.0", "layers.1", "layers.2")


@pytest.fixture(autouse=True)
def _one_thread_and_no_compiled_graphs():
    with one_thread_and_no_compiled_graphs():
        counters.clear()
        yield


def _compile_root(model):
    model.compile()
    return model


def _compile_one(model):
    model.layers[1].compile()
    return model


def _wrap_one(model):
    model.layers[1] = torch.compile(model.layers[1])
    return model


def _run(model, compiled, probe=None, *, steps=5, step_of=train_step):
    """Train as a user does; return the weights, and how often Dynamo has compiled."""
    counters.clear()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(5)
    for step in range(steps):
        optimizer.zero_grad()
        step_of(compiled, step)
        optimizer.step()
        if probe is not None:
            probe.step()
    compilations = {name: dict(counters[name]) for name in ("frames", "stats")}
    return [x.detach().clone() for x in model.state_dict().values()], compilations


def _assert_same(plain, watched):
    """Equal weights, and not one compilation more."""
    assert all(torch.equal(x, y) for x, y in zip(plain[0], watched[0], strict=True))
    frames, watched_frames = (one[1]["frames"] for one in (plain, watched))
    assert plain[1]["stats"] == watched[1]["stats"]
    # the first run of a process may compile functions of a library that are compiled once
    assert watched_frames.get("total", 0) <= frames.get("total", 0)


def _compare(model, compile_model, *, inside=True, step_of=train_step, **options):
    """Train with and without `shadow`, and return the ended session."""
    twin = copy.deepcopy(model)
    plain = _run(model, compile_model(model), step_of=step_of)
    torch.compiler.reset()
    compiled = None if inside else compile_model(twin)
    with shadow(twin, every=2, **options) as probe:
        compiled = compile_model(twin) if compiled is None else compiled
        watched = _run(twin, compiled, probe, step_of=step_of)
    _assert_same(plain, watched)
    _assert_nothing_left()
    return probe


def _assert_nothing_left():
    assert not torch_module._has_any_global_hook()
    assert torch_module._has_any_global_hook.__module__ == torch_module.__name__
    assert torch._C._len_torch_function_stack() == 0
    assert not hasattr(eval_frame._maybe_set_eval_frame, "stability_tells")
    assert not hasattr(torch._TorchCompileInductorWrapper.__call__, "__wrapped__")
    dump = torch._C._dispatch_dump("aten::_scaled_dot_product_flash_attention_for_cpu")
    assert "compiled_taps.py" not in dump


def _told(probe):
    """Return the findings, but for the one that compiled graphs are not searched throughout."""
    return [(layer, text) for _, layer, text in probe.findings if "is written by hand" not in text]


def _lengths(model, step):
    batch = tokens(step, length=(24, 17, 31, 9, 12)[step])
    F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()).backward()


def _assert_seen(probe, layers=LAYERS):
    assert set(probe.layers) == set(layers)
    assert {one.layer: one.state for one in probe.coverage} == dict.fromkeys(layers, "seen")
    for layer in layers:
        for what in ("out", "dq", "dk", "dv"):
            assert probe.metrics[f"deviation/{layer}/{what}/golden_baseline_rel_fro"] < 1e-5
    assert not _told(probe)


@inductor
def test_compiled_blocks_are_seen_beside_eager_ones():
    """Two of three layers run eagerly, and are seen by the doors."""
    _assert_seen(_compare(decoder(), _compile_one))


@inductor
@pytest.mark.slow
@pytest.mark.parametrize("inside", [True, False], ids=["inside", "before"])
@pytest.mark.parametrize(
    "compile_model",
    [torch.compile, compile_blocks, compile_forward, _compile_root, _wrap_one],
)
def test_every_way_to_compile_is_seen_and_ends_in_the_same_bits(compile_model, inside):
    probe = _compare(decoder(), compile_model, inside=inside)
    _assert_seen(probe)
    assert ["by hand" in text for *_, text in probe.findings] == [True]


@inductor
@pytest.mark.slow
def test_a_model_that_is_given_compiled_is_seen_and_warns_of_nothing():
    compiled = torch.compile(decoder())
    with warnings.catch_warnings(), shadow(compiled, every=2) as probe:
        warnings.filterwarnings("error", message="Using `torch.compile")
        _run(compiled, compiled, probe)
    _assert_seen(probe)
    _assert_nothing_left()


@inductor
@pytest.mark.slow
@pytest.mark.parametrize("compile_model", [torch.compile, compile_blocks, _compile_one])
def test_evaluation_between_steps_is_passed_over(compile_model):
    def evaluate(model, step):
        with torch.no_grad():
            model(tokens(100 + step, length=40))
        model.eval()
        model(tokens(200 + step, length=40))  # with gradients that nobody asks for
        model.train()

    def step_of(model, step):
        evaluate(model, step)
        train_step(model, step)
        evaluate(model, step)

    twin = decoder()
    probe = _compare(decoder(), compile_model, step_of=step_of)
    _assert_seen(probe)
    # the figures are those of the training batch
    torch.compiler.reset()
    with shadow(twin, every=2) as alone:
        _run(twin, compile_model(twin), alone)
    assert probe.metrics == alone.metrics


@inductor
@pytest.mark.slow
def test_evaluation_is_looked_at_on_request():
    model = decoder().eval()
    with shadow(model, evaluation=True) as probe, torch.no_grad():
        compile_blocks(model)(tokens(0))
        probe.step()
    assert probe.layers == LAYERS
    assert probe.metrics["deviation/layers.1/out/golden_baseline_rel_fro"] < 1e-5
    assert "deviation/layers.1/dq/rel_fro" not in probe.metrics
    assert not _told(probe)
    with shadow(model) as probe, torch.no_grad():
        model(tokens(0))
        with pytest.raises(ValueError, match="3 layers attended in evaluation"):
            probe.step()


@inductor
@pytest.mark.slow
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("compile_model", [torch.compile, compile_blocks])
def test_the_first_micro_batch_of_an_accumulated_step_is_the_one(compile_model, precision):
    def accumulated(model, step):
        for micro_batch in range(2):
            train_step(model, 10 * step + micro_batch, precision)

    probe = _compare(decoder(), compile_model, step_of=accumulated)
    assert set(probe.layers) == set(LAYERS)
    assert not _told(probe)
    torch.compiler.reset()
    model = decoder()
    with shadow(model) as first:
        train_step(compile_model(model), 0, precision)
        first.step()
    model = decoder()
    with shadow(model) as both:
        accumulated(compile_model(model), 0)
        both.step()
    assert first.metrics == both.metrics
    assert first.metrics["deviation/layers.1/dq/rel_fro"] > 0


@inductor
@pytest.mark.slow
def test_lengths_that_vary_are_seen():
    _assert_seen(_compare(decoder(), torch.compile, step_of=_lengths))


@inductor
@pytest.mark.slow
def test_twelve_looks_compile_nothing_anew():
    """More looks than Dynamo's limit of recompilations, after which it would run eagerly."""
    model, twin = decoder(depth=2), decoder(depth=2)
    plain = _run(model, compile_blocks(model), steps=24)
    torch.compiler.reset()
    with shadow(twin, every=2) as probe:
        watched = _run(twin, compile_blocks(twin), probe, steps=24)
    _assert_same(plain, watched)


@inductor
@pytest.mark.slow
@pytest.mark.parametrize("compile_model", [compile_blocks, _compile_one])
def test_figures_are_those_of_an_eager_run_on_the_same_tensors(compile_model):
    """In FP64, where the compiled and the eager model differ by rounding alone."""
    figures = []
    for make in (lambda x: x, compile_model):
        model = decoder().double()
        with shadow(model, "flash:all_bf16", heads=True) as probe:
            train_step(make(model), 0)
            probe.step()
        figures.append(probe.metrics)
    eager, compiled = figures
    assert set(compiled) == set(eager)
    compared = [name for name in eager if name.endswith("/rel_fro")]
    assert len(compared) > 3 * 4 * 4
    for name in compared:
        # the candidate rounds to BF16: a value that differs in its last bit may fall elsewhere
        assert compiled[name] == pytest.approx(eager[name], rel=1e-3), name
        assert eager[name] > 1e-4, name


def _planted(q, k, v, *, causal, scale=None):
    out = golden_attention(q, k, v, causal=causal, scale=scale).to(q.dtype)
    factor = torch.ones(q.shape[1], 1, 1, dtype=q.dtype)
    if q.shape[1] == 2:
        factor[1] = 1.001
    return out * factor


@inductor
@pytest.mark.slow
@pytest.mark.parametrize("compile_model", [torch.compile, _compile_one])
def test_a_planted_error_is_at_its_layer_and_head(compile_model):
    """The candidate is wrong in head 1 of the one layer that has two heads, a compiled one."""
    model = decoder()
    model.layers[1].heads = 2
    with shadow(model, _planted, heads=True) as probe:
        train_step(compile_model(model), 0)
        probe.step()
    for what in ("out", "dv"):
        figures = {
            name: value
            for name, value in probe.metrics.items()
            if f"/{what}/" in name and "/head_" in name and name.endswith("/rel_fro")
        }
        wrong = [name for name in figures if "layers.1/" in name and "head_1" in name]
        assert len(figures) == 10
        assert len(wrong) == 1
        # in FP32 what is right is right to 1e-6
        assert figures.pop(wrong[0]) == pytest.approx(1e-3, rel=1e-2)
        assert max(figures.values()) < 1e-5


@inductor
@pytest.mark.slow
def test_what_a_model_disables_inside_its_compiled_code_is_seen_by_the_doors():
    def compile_model(model):
        layer = model.layers[1]
        layer.forward = torch.compiler.disable(layer.forward)
        return torch.compile(model)

    probe = _compare(decoder(), compile_model)
    _assert_seen(probe)


class _Breaking(nn.Module):
    """Calls attention in a frame that Dynamo leaves to Python."""

    def __init__(self):
        super().__init__()
        self.inner = decoder(depth=2)

    def forward(self, ids):
        x = self.inner.embedding(ids)
        x = x + self.inner.layers[0](x)
        q = x.unflatten(-1, (4, -1)).transpose(1, 2)
        torch._dynamo.graph_break()
        out = _in_python(q)
        return self.inner.head(out.transpose(1, 2).flatten(2))


@torch.compiler.disable(recursive=False)
def _in_python(q):
    return F.scaled_dot_product_attention(q, q, q)


@inductor
@pytest.mark.slow
def test_a_call_between_two_graphs_is_seen():
    model = _Breaking()
    model.inner.layers[1] = nn.Identity()
    _assert_seen(_compare(model, torch.compile), ["model", "inner.layers.0"])


class _Encoder(nn.Module):
    """Torch's own layers, which Dynamo leaves to Python where one is compiled by itself."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, 64)
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(64, VOCABULARY)

    def forward(self, ids):
        return self.head(self.encoder(self.embedding(ids)))


def _compile_encoder_layers(model):
    for layer in model.encoder.layers:
        layer.compile()
    return model


@inductor
@pytest.mark.slow
@pytest.mark.parametrize("compile_model", [torch.compile, _compile_encoder_layers])
def test_torchs_own_multi_head_attention_is_seen(compile_model):
    layers = [f"encoder.layers.{index}.self_attn" for index in range(2)]
    _assert_seen(_compare(_Encoder(), compile_model), layers)


class _Biased(nn.Module):
    """Calls SDPA in a way that no kernel takes: its mask wants a gradient."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(24, 24))

    def forward(self, x):
        q = x.unflatten(-1, (2, -1)).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, q, q, self.bias)
        return out.transpose(1, 2).flatten(2)


@inductor
@pytest.mark.slow
def test_what_no_kernel_computes_is_told_as_not_seen():
    model = decoder()
    model.layers[2] = _Biased()
    probe = _compare(model, torch.compile)
    assert [one.state for one in probe.coverage] == ["seen", "seen", "not seen"]
    told = _told(probe)
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
    _assert_nothing_left()
    with shadow(model) as probe:
        torch.compiler.reset()
        train_step(model, 0)
        probe.step()
    _assert_seen(probe)


def test_a_graph_of_another_backend_is_told_and_ends_in_the_same_bits():
    model, twin = decoder(depth=2), decoder(depth=2)
    plain = _run(model, torch.compile(model, backend="eager"), steps=1)
    torch.compiler.reset()
    with shadow(twin) as probe:
        compiled = torch.compile(twin, backend="eager")
        train_step(compiled, 0)
        with pytest.raises(ValueError, match=r"(?s)by another backend.*Compiled code has run"):
            probe.step()
    torch.optim.AdamW(twin.parameters(), lr=1e-2).step()
    assert all(torch.equal(x, y) for x, y in zip(plain[0], twin.state_dict().values(), strict=True))
    _assert_nothing_left()


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
    _assert_nothing_left()


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
    _assert_nothing_left()


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

    probe = _compare(decoder(), compile_model, inside=False)
    assert set(probe.layers) == {f"{layer}.inner" for layer in LAYERS}
    assert not probe.findings


@inductor
@pytest.mark.slow
def test_a_candidate_that_is_compiled_is_none_of_the_models_calls():
    def attend(q, k, v, *, causal, scale=None):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)

    model, twin = decoder(), decoder()
    plain = _run(model, model)
    with shadow(twin, torch.compile(attend), every=2) as probe:
        watched = _run(twin, twin, probe)
    assert all(torch.equal(x, y) for x, y in zip(plain[0], watched[0], strict=True))
    assert probe.layers == LAYERS
    assert not probe.findings


@inductor
@pytest.mark.slow
@pytest.mark.parametrize("use_reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@pytest.mark.parametrize("compile_model", [torch.compile, compile_blocks])
def test_checkpointed_attention_is_seen_with_its_gradients(compile_model, use_reentrant):
    probe = _compare(Checkpointed(use_reentrant), compile_model)
    _assert_seen(probe, [f"inner.{layer}" for layer in LAYERS])


@inductor
@pytest.mark.slow
def test_two_threads_train_a_compiled_and_an_eager_model():
    """Where one steps aside the other stays, and a compiler meets no hook that comes or goes."""

    def train(models, probes):
        ends = [[], []]

        def run(index):
            ends[index] = _run(models[index], models[index], probes[index], steps=3)[0]

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
    _assert_nothing_left()


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
    _assert_nothing_left()
    torch.compiler.reset()
    train_step(other, 0)


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
    probe = _compare(model, compile_blocks)
    assert set(probe.layers) == {"layers.0", "layers.2"}
    ((layer, text),) = _told(probe)
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


@inductor
@pytest.mark.slow
@pytest.mark.parametrize("step_of", [train_step, _lengths])
@pytest.mark.parametrize("compile_model", [torch.compile, compile_blocks])
def test_attention_by_hand_in_a_graph_is_told_at_its_layer(compile_model, step_of):
    model = decoder(depth=4)
    torch.manual_seed(1)
    model.layers[1], model.layers[3] = _ByHand(), _Router()
    probe = _compare(model, compile_model, step_of=step_of)
    assert set(probe.layers) == {"layers.0", "layers.2"}
    assert {one.layer: one.state for one in probe.coverage} == {
        "layers.0": "seen",
        "layers.1": "not seen",
        "layers.2": "seen",
    }
    ((layer, text),) = _told(probe)
    assert layer == "layers.1"
    assert "multiplies the result of a softmax with a matrix by itself" in text


@inductor
@pytest.mark.long
@pytest.mark.parametrize("compile_model", [torch.compile, compile_forward])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_hugging_face_models_are_seen_and_end_in_the_same_bits(kind, compile_model):
    pytest.importorskip("transformers")
    from tests.stability.intercept.tiny_transformers import TINY

    def step_of(model, step):
        length = (12, 9)[step % 2]
        batch = tokens(step, length=length)[:, :-1].clamp(max=VOCABULARY - 1)
        mask = torch.ones_like(batch)
        mask[1, length - 2 :] = 0
        model(input_ids=batch, attention_mask=mask, labels=batch).loss.backward()

    model = TINY[kind].build()
    model.set_attn_implementation("sdpa")
    _assert_seen(_compare(model, compile_model, step_of=step_of), TINY[kind].layers)
