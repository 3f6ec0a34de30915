"""Which micro-batches of a step are looked at, and that each has the figures of itself alone."""

import copy

import pytest
import torch
from torch.nn import functional as F

from stability import shadow
from stability.analysis.probe_answer import answer_of_probe
from stability.analysis.probe_records import read_probe
from stability.probe.micro_batches import MicroBatches
from stability.records.metric_names import without_batch
from tests.sampling import one_in
from tests.stability.intercept.module_models import Language
from tests.stability.intercept.torch_models import (
    Decoder,
    Recomputed,
    drops_a_key,
    tokens,
    train_step,
)

LAYERS = ["layers.0", "layers.1", "layers.2"]


def _loss(model, batch):
    ids = tokens(batch).clamp(max=36)
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def _backward_each(model, batches):
    for batch in batches:
        _loss(model, batch).backward()


def _backward_at_the_end(model, batches):
    torch.stack([_loss(model, batch) for batch in batches]).sum().backward()


def _measured(model, train, batches, candidate=None, **options):
    model = copy.deepcopy(model)
    with shadow(model, candidate, **options) as probe:
        train(model, batches)
        probe.step()
    assert not probe.findings
    return probe.metrics


def _of_batch(metrics, batch):
    """Return the metrics of one micro-batch, by the names that they have in the first."""
    suffix = f"@batch{batch}"
    is_of = {name: suffix in name if batch else "@" not in name for name in metrics}
    return {without_batch(name): x for name, x in metrics.items() if is_of[name]}


def _same(metrics, others):
    return metrics == pytest.approx(others, rel=0, abs=0, nan_ok=True)


def _assert_each_is_as_alone(model, train, candidate=None, **options):
    together = _measured(model, train, range(3), candidate, micro_batches="all", **options)
    alone = [_measured(model, train, [batch], candidate, **options) for batch in range(3)]
    assert len(together) == sum(len(one) for one in alone)
    for batch, one in enumerate(alone):
        assert _same(_of_batch(together, batch), one)
    assert not _same(alone[0], alone[1])


@pytest.mark.parametrize("train", one_in(2, [_backward_each, _backward_at_the_end]))
def test_each_micro_batch_has_the_figures_of_itself_alone(train):
    torch.manual_seed(0)
    _assert_each_is_as_alone(Decoder(), train, "flash:all_bf16", heads=True, inside=True)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recomputed_call_is_not_another_micro_batch(reentrant):
    torch.manual_seed(0)
    model = Recomputed()
    model.reentrant = reentrant
    _assert_each_is_as_alone(model, _backward_each, "flash:all_bf16")


@pytest.mark.slow
def test_recomputation_after_the_last_forward_adds_nothing():
    torch.manual_seed(0)
    model = Recomputed()
    model.reentrant = False
    _assert_each_is_as_alone(model, _backward_at_the_end, "flash:all_bf16")


@pytest.mark.parametrize("recomputes", one_in(2, [True, False]))
def test_modules_functions_and_losses_too(recomputes):
    torch.manual_seed(0)
    model = Language()
    model.recomputes = recomputes
    modules = {
        "*.mlp": "emulated:e4m3",
        "*.rotate": "emulated:bf16",
        "loss": "emulated:bf16",
    }
    _assert_each_is_as_alone(model, _backward_each, modules=modules)


def test_without_being_asked_for_the_first_alone_is_looked_at():
    torch.manual_seed(0)
    model = Decoder()
    first = _measured(model, _backward_each, range(3), "flash:all_bf16")
    assert first == _measured(model, _backward_each, [0], "flash:all_bf16")


def test_training_ends_in_the_same_bits():
    torch.manual_seed(0)
    model = Decoder(dropout=0.1)
    ends = []
    for watched in (False, True):
        one = copy.deepcopy(model)
        torch.manual_seed(1)
        if watched:
            with shadow(one, micro_batches="all", heads=True) as probe:
                _backward_each(one, range(3))
                probe.step()
        else:
            _backward_each(one, range(3))
        ends.append([parameter.grad for parameter in one.parameters()])
    for plain, seen in zip(*ends, strict=True):
        assert torch.equal(plain, seen)


def test_an_error_in_one_micro_batch_is_named_there(tmp_path):
    """The fault is in the fifth call: of the second micro-batch, layer 1."""
    torch.manual_seed(0)
    model, calls = Decoder(), [0]
    faulty = drops_a_key(calls, layer=4, head=2)
    with shadow(model, faulty, heads=True, micro_batches="all", records=tmp_path) as probe:
        for step in range(4):
            calls[0] = 0
            for micro_batch in range(2):
                train_step(model, 10 * step + micro_batch)
            probe.step()
    probed = read_probe(tmp_path)
    assert probed.layers == [name for layer in LAYERS for name in (layer, f"{layer}@batch1")]
    (said,) = answer_of_probe(probed).places
    assert "layers.1@batch1, head 2" in said


def test_a_call_that_a_compiled_graph_has_made_is_told_at_any_time():
    """An evaluation's is told at its end, and the next one's inside the backward pass."""
    named = MicroBatches("all")
    assert named.name("layer", is_made=True) == "layer"
    x = torch.ones(1, requires_grad=True)
    found = []
    x.register_hook(lambda _: found.append(named.name("layer", is_made=True)))
    x.register_hook(lambda _: found.append(named.name("layer")))
    x.sum().backward()
    assert found == ["layer@batch1", ""]


def test_another_word_is_refused():
    with (
        pytest.raises(ValueError, match=r"micro_batches must be 'first' or 'all', got 'last'"),
        shadow(Decoder(), micro_batches="last"),  # pyright: ignore[reportArgumentType]
    ):
        pass
