"""`shadow(modules=...)` where ranks share a model's weights or its batch, by the group of one rank.

Of two ranks there is but one here: torch's fake process group takes the other's part where a shard
has to be uneven.
"""

from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from stability import shadow
from stability.probe.optimizer_update import copy_of, own_step, updates
from tests.stability.intercept.module_models import Language, judged, language_step


@contextmanager
def _ranks(count):
    backend, store = ("gloo", HashStore())
    if count > 1:
        backend, store = "fake", FakeStore()
    torch.distributed.init_process_group(backend, store=store, rank=0, world_size=count)
    try:
        yield init_device_mesh("cpu", (count,))
    finally:
        torch.distributed.destroy_process_group()


def _sharded(mesh) -> nn.Module:
    torch.manual_seed(0)
    model = Language()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model.lm_head, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _trained(model, modules):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with shadow(model, modules=modules, micro_batches="all") as probe:
        for step in range(2):
            optimizer.zero_grad()
            for micro_batch in range(2):
                language_step(model, 10 * step + micro_batch)
            optimizer.step()
            probe.step()
    return probe


def test_parts_inside_a_sharded_block_are_looked_at_and_the_block_itself_is_told():
    with _ranks(1) as mesh:
        modules = {
            "*.mlp": "emulated:e4m3",
            "layers.1": "emulated:bf16",
            "lm_head": "emulated:bf16",
        }
        probe = _trained(_sharded(mesh), {**modules, "optimizer": own_step})
    assert {layer.partition("@")[0] for _, layer, _ in probe.findings} == {"layers.1", "lm_head"}
    for _, _, text in probe.findings:
        assert text.startswith("not looked at: fully_shard gathers its weights around each call")
    assert judged(probe, "layers.0.mlp@batch1")["dup.weight"][0] > 1000
    assert judged(probe, "optimizer")["update_0"][0] == 1.0


def test_the_update_of_unevenly_sharded_weights_is_that_of_this_ranks_shards():
    with _ranks(2) as mesh:
        whole = torch.randn(11, 8)
        parameter = nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)]))
        parameter.grad = distribute_tensor(torch.ones(11, 8), mesh, [Shard(0)])
        optimizer = torch.optim.SGD([parameter], lr=0.5)
        before = copy_of(optimizer)
        optimizer.step()
        found = updates(optimizer, before)["update_0"]
    torch.testing.assert_close(
        found, torch.full((48,), -0.5, dtype=torch.float64), atol=1e-6, rtol=0
    )


def test_ddp_itself_is_not_repeated_but_the_model_in_it_is():
    def fails(module, tokens):
        assert type(module) is Language, type(module)
        return module.forward(tokens)

    with _ranks(1):
        torch.manual_seed(0)
        model = DistributedDataParallel(Language())
        probe = _trained(model, {"model": fails})
    assert not probe.findings
    assert {name.split("/")[1] for name in probe.metrics} == {"model", "model@batch1"}


@pytest.mark.parametrize("forgets", [False, True])
def test_a_forgotten_step_is_told_of_sharded_weights_and_gathering_them_is_none(forgets):
    with _ranks(2) as mesh:
        model = _sharded(mesh)
        optimizer = torch.optim.AdamW(model.parameters())
        with shadow(model, modules={"*.mlp": "emulated:bf16"}) as probe:
            language_step(model, 0)
            if forgets:
                optimizer.step()
                with pytest.warns(UserWarning, match="the weights were updated and step"):
                    language_step(model, 1)
            for step in range(0 if forgets else 2):
                language_step(model, 1)
                optimizer.step()
                probe.step()
                language_step(model, step)
    told = [text for _, _, text in probe.findings if text.startswith("the weights were updated")]
    assert len(told) == forgets
