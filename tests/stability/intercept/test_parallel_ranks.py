"""What is computed beside a training on several ranks tells the other ranks nothing."""

import math
from contextlib import nullcontext

import pytest
import torch
from torch import multiprocessing
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from stability import shadow
from tests.stability.intercept.torch_models import Attention, Decoder, tokens

WAYS = {
    "gradient evidence": {"gradient_every": 1, "every": 0},
    "inherited error": {"inherited": True},
    "of what DDP wraps": {"gradient_every": 1, "every": 0},
}


def _trained(rank, way, micro_batches):
    """Train, where micro-batches are accumulated under `no_sync`; return all the model's state."""
    torch.manual_seed(0)
    model = Decoder(depth=2)
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    latest = []

    def loss():
        batch = latest[-1]
        return F.cross_entropy(parallel(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    watched = model if way == "of what DDP wraps" else parallel
    options = WAYS.get(way, {})
    looks = shadow(watched, loss=loss, **options) if way else nullcontext()
    with looks as probe:
        for step in range(2):
            for micro_batch in range(micro_batches):
                latest.append(tokens(10 * step + 2 * micro_batch + rank))
                is_last = micro_batch == micro_batches - 1
                with nullcontext() if is_last else parallel.no_sync():
                    loss().backward()
            optimizer.step()
            optimizer.zero_grad()
            if probe:
                probe.step()
    if probe:
        assert not probe.findings, probe.findings
        assert probe.gradient_metrics or "deviation/layers.0/total/rel_fro" in probe.metrics
    return model.state_dict()


def _rank(rank, folder):
    store = torch.distributed.FileStore(f"{folder}/store", 2)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    torch.set_num_threads(1)
    states = {(way, n): _trained(rank, way, n) for way in ("", *WAYS) for n in (1, 2)}
    torch.save(states, f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_a_look_beside_ddp_leaves_each_rank_its_bits(tmp_path):
    """Weights, and the buffers that each rank has by itself until the next forward."""
    multiprocessing.spawn(_rank, (str(tmp_path),), nprocs=2)
    for rank in range(2):
        states = torch.load(tmp_path / f"{rank}.pt")
        for way, n in states:
            for name, x in states["", n].items():
                assert torch.equal(states[way, n][name], x), (rank, way, n, name)


class _Blocks(torch.nn.Module):
    def __init__(self, *, reentrant: bool):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Attention(64, 4) for _ in range(2))
        self.reentrant = reentrant

    def forward(self, x):
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=self.reentrant)
        return x


def test_the_gradient_of_checkpointed_layers_is_that_of_the_same_layers_kept():
    """They are computed again in the backward pass, which has to be with the same attention."""
    x = torch.randn(2, 24, 64, generator=torch.Generator().manual_seed(0))
    found = []
    for is_checkpointed in (True, False):
        torch.manual_seed(0)
        model = _Blocks(reentrant=False)
        if not is_checkpointed:
            model.forward = lambda x, model=model: _kept(model, x)

        def loss(model=model):
            return model(x).square().mean()

        with shadow(model, "flash:all_bf16", gradient_every=1, every=0, loss=loss) as probe:
            probe.step()
        assert not probe.findings
        found.append(probe.gradient_metrics)
    assert found[0] == found[1]
    assert found[0]["gradient/all/ratio"] > 1


def _kept(model, x):
    for block in model.blocks:
        x = x + block(x)
    return x


def test_a_sharded_models_gradient_is_refused_and_never_taken_for_exact():
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = Decoder(depth=1)

        def loss():
            return model(tokens(0)[:, :-1]).square().mean()

        with shadow(model, gradient_every=1, every=0, loss=loss) as probe:
            fully_shard(model)
            probe.step()
        assert {layer for _, layer, _ in probe.findings} == {"gradient"}
        for _, _, text in probe.findings:
            assert text.endswith("look at a run that is not sharded")
        ratio = probe.gradient_metrics.get("gradient/all/ratio", math.nan)
        assert math.isnan(ratio)
        with pytest.raises(ValueError, match=r"needs whole weights, embedding\.weight is sharded"):
            shadow(model, gradient_every=1, loss=loss).__enter__()
    finally:
        torch.distributed.destroy_process_group()


def test_a_loss_that_reaches_no_weight_is_no_exact_gradient():
    model = Decoder(depth=1)
    free = torch.ones((), requires_grad=True)

    def loss():
        return free * model(tokens(0)[:, :-1]).detach().square().mean()

    with shadow(model, gradient_every=1, every=0, loss=loss) as probe:
        probe.step()
    assert probe.findings
    for _, _, text in probe.findings:
        assert text.endswith("the gradient of the loss reaches none of the model's weights")
    assert math.isnan(probe.gradient_metrics.get("gradient/all/ratio", math.nan))
