"""Delayed scales change once an update, by what all ranks have seen."""

import math
from types import SimpleNamespace

import torch

from attention_kernels.delayed_scaling import DelayedScales, SeenAmax
from stability.callbacks import delayed_scales
from stability.callbacks.delayed_scales import DelayedScaling


def _update(callback, trainer, batches, see):
    for index in range(batches):
        callback.on_train_batch_start(trainer, None, None, index)
        see(index)
        if index == batches - 1:
            trainer.global_step += 1
        callback.on_train_batch_end(trainer, None, None, None, index)


def test_scales_stand_still_in_an_update_and_advance_once_at_its_end():
    scales = DelayedScales()
    callback, used = DelayedScaling(scales), []
    trainer = SimpleNamespace(global_step=0, global_rank=0, world_size=1)
    callback.setup(trainer, None, "fit")

    def see(index):
        x = torch.tensor([2.0 ** (2 * trainer.global_step - index)])
        # 1000 saturates at 448 under a scale of 1
        used.append(448 / scales.quantized("own", 1000 * torch.ones(1), "e4m3", 8, records=False))
        scales.quantized("own", x, "e4m3", 8)

    for _ in range(3):
        _update(callback, trainer, 2, see)
        scales.quantized("own", torch.tensor([1e6]), "e4m3", 8)  # evaluated between two updates
    assert [each.item() for each in used] == [1, 1, 448, 448, 112, 112]
    assert callback.state_dict()["own"]["amaxes"].tolist() == [1, 4, 16]


def test_an_update_that_was_cut_off_leaves_nothing():
    scales = DelayedScales()
    callback = DelayedScaling(scales)
    trainer = SimpleNamespace(global_step=0, global_rank=0, world_size=1)
    callback.setup(trainer, None, "fit")
    callback.on_train_batch_start(trainer, None, None, 0)
    scales.quantized("own", torch.tensor([1e6]), "e4m3", 8)
    callback.setup(trainer, None, "fit")
    _update(callback, trainer, 1, lambda _: scales.quantized("own", torch.ones(1), "e4m3", 8))
    assert callback.state_dict()["own"]["amaxes"].tolist() == [1]


def test_the_largest_amax_of_all_ranks_counts(monkeypatch):
    def gathered(ranks, seen):
        assert (ranks.rank, ranks.count) == (1, 2)
        other = {"own": SeenAmax(8.0, "e4m3", 4), "bad": SeenAmax(math.inf, "e4m3", 4)}
        return [other | {"there": SeenAmax(2.0, "e5m2", 1)}, seen]

    monkeypatch.setattr(delayed_scales.Ranks, "gathered", gathered)
    scales = DelayedScales()
    callback = DelayedScaling(scales)
    trainer = SimpleNamespace(global_step=0, global_rank=1, world_size=2)
    callback.setup(trainer, None, "fit")

    def see(_):
        for name in ("own", "bad"):
            scales.quantized(name, torch.tensor([7.0]), "e4m3", 4)

    _update(callback, trainer, 1, see)
    states = callback.state_dict()
    assert {name: each["scale"] for name, each in states.items()} == {
        "own": 56,
        "bad": 1,
        "there": 28672,
    }
