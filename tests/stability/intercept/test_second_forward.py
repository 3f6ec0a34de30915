"""A forward pass that is repeated in the candidate's stream: which one, and what it leaves."""

import copy
import pickle
import threading
from contextlib import nullcontext

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from stability import shadow
from tests.stability.intercept.torch_models import Attention, Decoder, tokens, train_step


def _hooks(model):
    names = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
    return [len(getattr(module, name)) for module in model.modules() for name in names]


def test_a_copy_and_a_pickle_of_a_model_whose_pass_is_repeated_carry_nothing():
    model = Decoder()
    with shadow(model, inherited=True) as probe:
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        train_step(model, 0)
        probe.step()
    assert "deviation/layers.0/total/rel_fro" in probe.metrics
    for one in copies:
        assert not any(_hooks(one))
        assert isinstance(one(tokens(0)), torch.Tensor)


NOT_REPEATED = "inherited error not measured: of a step the first whole forward pass is repeated"


def _said(probe):
    return {layer: text[: len(NOT_REPEATED)] for _, layer, text in probe.findings}


def test_a_pass_that_meets_another_threads_is_not_repeated_and_changes_nothing():
    """The second pass had computed the other thread's attention too, by the candidate."""

    def train(candidate):
        torch.manual_seed(0)
        model = Decoder()
        batches, meet = (tokens(0), tokens(1)), threading.Barrier(2)

        class Meets(torch.nn.Module):
            def forward(self, x):
                meet.wait(timeout=60)
                return x

        model.head = torch.nn.Sequential(Meets(), model.head)
        results = {}

        def run(index):
            results[index] = model(batches[index])

        with shadow(model, candidate, inherited=True) if candidate else nullcontext() as probe:
            threads = [threading.Thread(target=run, args=(index,)) for index in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            sum(x.square().mean() for x in results.values()).backward()
            if probe:
                probe.step()
        return [results[0], results[1]], probe

    plain, _ = train(None)
    watched, probe = train(lambda q, k, v, *, causal, scale=None: torch.zeros_like(q))
    assert all(torch.equal(x, y) for x, y in zip(plain, watched, strict=True))
    assert _said(probe) == {f"layers.{index}": NOT_REPEATED for index in range(3)}
    assert not any("/total/" in name or "/carried/" in name for name in probe.metrics)


def test_another_thread_waits_while_a_pass_is_repeated():
    torch.manual_seed(0)
    model = Decoder()
    twin, batches = copy.deepcopy(model), (tokens(0), tokens(1))
    begun, others = threading.Event(), []
    results, main = {}, threading.get_ident()

    def candidate(q, k, v, *, causal, scale=None):
        if not begun.is_set() and threading.get_ident() == main:
            begun.set()
            others[0].start()
            others[0].join(timeout=0.5)
        return torch.zeros_like(q)

    def run():
        results[1] = model(batches[1])

    others.append(threading.Thread(target=run))
    with shadow(model, candidate, inherited=True, backward=False) as probe:
        results[0] = model(batches[0])
        others[0].join()
        probe.step()
    for index, batch in enumerate(batches):
        assert torch.equal(results[index], twin(batch)), index
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, dict(twin.named_buffers())[name]), name


def test_what_a_second_pass_would_not_be_of_is_told():
    """A pass that failed, then another batch; parts called one by one; a recomputed block."""

    class Fails(torch.nn.Module):
        fails = True

        def forward(self, x):
            if self.fails:
                self.fails = False
                raise RuntimeError("out of memory")
            return x

    model = Decoder()
    model.head = torch.nn.Sequential(Fails(), model.head)
    with shadow(model, inherited=True) as probe:
        with pytest.raises(RuntimeError, match="out of memory"):
            train_step(model, 0)
        train_step(model, 1)
        probe.step()
    assert set(_said(probe).values()) == {NOT_REPEATED}
    assert not any("/total/" in name for name in probe.metrics)


class _Halves(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Attention(64, 4), Attention(64, 4)


@pytest.mark.parametrize("way", ["parts", "reentrant"])
def test_a_layer_that_no_second_pass_reaches_is_told(way):
    model = _Halves()
    x = torch.randn(2, 24, 64, requires_grad=True)
    with shadow(model, inherited=True) as probe:
        for block in (model.first, model.second):
            x = checkpoint(block, x, use_reentrant=True) if way == "reentrant" else block(x)
        x.sum().backward()
        probe.step()
    told = {"parts": {"second"}, "reentrant": {"first", "second"}}[way]
    assert _said(probe) == dict.fromkeys(told, NOT_REPEATED)
    measured = {name.split("/")[1] for name in probe.metrics if "/total/" in name}
    assert measured == {"first", "second"} - told
