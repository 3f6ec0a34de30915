"""`shadow` on compiled models: what it sees, and that no bit changes."""

import copy
import warnings
from functools import partial
from types import MethodType

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from attention_kernels import golden_attention
from stability import shadow
from tests.sampling import others_long
from tests.stability.intercept.compiled_models import (
    COMPILES,
    Checkpointed,
    compile_blocks,
    compile_forward,
    decoder,
    inductor,
)
from tests.stability.intercept.compiled_sessions import (
    LAYERS,
    assert_nothing_left,
    assert_same_run,
    assert_seen,
    compare_sessions,
    compile_one,
    compile_root,
    run_session,
    step_of_another_length,
    told_of,
    wrap_one,
)
from tests.stability.intercept.torch_models import VOCABULARY, tokens, train_step

pytestmark = COMPILES


@inductor
def test_compiled_blocks_are_seen_beside_eager_ones():
    """Two of three layers run eagerly, and are seen by the doors."""
    assert_seen(compare_sessions(decoder(), compile_one))


@inductor
@pytest.mark.slow
@pytest.mark.parametrize("inside", [True, False], ids=["inside", "before"])
@pytest.mark.parametrize(
    "compile_model",
    [torch.compile, compile_blocks, compile_forward, compile_root, wrap_one],
)
def test_every_way_to_compile_is_seen_and_ends_in_the_same_bits(compile_model, inside):
    probe = compare_sessions(decoder(), compile_model, inside=inside)
    assert_seen(probe)
    assert ["by hand" in text for *_, text in probe.findings] == [True]


def _compile_wrapped(model):
    """Wrap the forward as accelerate does for autocast: the model stands in `args`."""
    own = type(model).forward

    def forward(*args, **kwargs):
        return own(*args, **kwargs)

    model.forward = MethodType(forward, model)
    return torch.compile(model)


@inductor
@pytest.mark.slow
def test_a_forward_that_is_wrapped_and_compiled_is_seen():
    assert_seen(compare_sessions(decoder(), _compile_wrapped))


@inductor
@pytest.mark.slow
def test_a_model_that_is_given_compiled_is_seen_and_warns_of_nothing():
    compiled = torch.compile(decoder())
    with warnings.catch_warnings(), shadow(compiled, every=2) as probe:
        warnings.filterwarnings("error", message="Using `torch.compile")
        run_session(compiled, compiled, probe)
    assert_seen(probe)
    assert_nothing_left()


@inductor
@pytest.mark.slow
@pytest.mark.parametrize(
    "compile_model",
    others_long([torch.compile, compile_blocks, compile_one], slow=[compile_blocks, compile_one]),
)
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
    probe = compare_sessions(decoder(), compile_model, step_of=step_of)
    assert_seen(probe)
    # the figures are those of the training batch
    torch.compiler.reset()
    with shadow(twin, every=2) as alone:
        run_session(twin, compile_model(twin), alone)
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
    assert not told_of(probe)
    with shadow(model) as probe, torch.no_grad():
        model(tokens(0))
        with pytest.raises(ValueError, match="3 layers attended in evaluation"):
            probe.step()


@inductor
@pytest.mark.slow
@pytest.mark.parametrize(
    "precision",
    others_long([torch.float32, torch.bfloat16], slow=[torch.float32]),
    ids=["fp32", "bf16"],
)
@pytest.mark.parametrize("compile_model", [torch.compile, compile_blocks])
def test_the_first_micro_batch_of_an_accumulated_step_is_the_one(compile_model, precision):
    def accumulated(model, step):
        for micro_batch in range(2):
            train_step(model, 10 * step + micro_batch, precision)

    probe = compare_sessions(decoder(), compile_model, step_of=accumulated)
    assert set(probe.layers) == set(LAYERS)
    assert not told_of(probe)
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
@pytest.mark.parametrize("compile_model", [torch.compile, compile_blocks])
@pytest.mark.parametrize(
    "dynamic", others_long([None, True], slow=[None]), ids=["once they vary", "from the first"]
)
def test_lengths_that_vary_are_seen(compile_model, dynamic):
    compiled = partial(compile_model, dynamic=dynamic)
    assert_seen(compare_sessions(decoder(), compiled, step_of=step_of_another_length))


@inductor
@pytest.mark.slow
def test_twelve_looks_compile_nothing_anew():
    """More looks than Dynamo's limit of recompilations, after which it would run eagerly."""
    model, twin = decoder(depth=2), decoder(depth=2)
    plain = run_session(model, compile_blocks(model), steps=24)
    torch.compiler.reset()
    with shadow(twin, every=2) as probe:
        watched = run_session(twin, compile_blocks(twin), probe, steps=24)
    assert_same_run(plain, watched)


@inductor
@pytest.mark.slow
@pytest.mark.parametrize("compile_model", [compile_blocks, compile_one])
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
@pytest.mark.parametrize("compile_model", [torch.compile, compile_one])
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

    probe = compare_sessions(decoder(), compile_model)
    assert_seen(probe)


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
    assert_seen(compare_sessions(model, torch.compile), ["model", "inner.layers.0"])


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


@pytest.mark.long
@inductor
@pytest.mark.slow
@pytest.mark.parametrize("compile_model", [torch.compile, _compile_encoder_layers])
def test_torchs_own_multi_head_attention_is_seen(compile_model):
    layers = [f"encoder.layers.{index}.self_attn" for index in range(2)]
    assert_seen(compare_sessions(_Encoder(), compile_model), layers)


@inductor
@pytest.mark.slow
@pytest.mark.parametrize("use_reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@pytest.mark.parametrize("compile_model", [torch.compile, compile_blocks])
def test_checkpointed_attention_is_seen_with_its_gradients(compile_model, use_reentrant):
    probe = compare_sessions(Checkpointed(use_reentrant), compile_model)
    assert_seen(probe, [f"inner.{layer}" for layer in LAYERS])


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
    assert_seen(compare_sessions(model, compile_model, step_of=step_of), TINY[kind].layers)


@inductor
@pytest.mark.slow
@pytest.mark.parametrize("compile_model", [torch.compile, compile_blocks])
def test_each_micro_batch_has_the_figures_of_itself_alone(compile_model):
    model = decoder()

    def measured(batches, **options):
        torch.compiler.reset()
        one = copy.deepcopy(model)
        compiled = compile_model(one)
        with shadow(one, "flash:all_bf16", **options) as probe:
            for batch in batches:
                train_step(compiled, batch)
            probe.step()
        return probe.metrics

    together = measured(range(2), micro_batches="all")
    for batch in range(2):
        alone = measured([batch])
        suffix = "@batch1" if batch else ""
        for name, value in alone.items():
            _, layer, *rest = name.split("/")
            found = together["/".join(["deviation", layer + suffix, *rest])]
            assert found == pytest.approx(value, rel=1e-6, nan_ok=True), name
        assert len(together) == 2 * len(alone)
