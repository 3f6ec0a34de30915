"""Which rank computes gradient evidence: the first, with the weights of all."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from stability.callbacks import gradient_callback
from stability.callbacks.gradient_callback import GradientProbe


@pytest.mark.parametrize("is_first", [True, False])
def test_ranks_but_the_first_send_their_parts_and_compute_nothing(monkeypatch, is_first):
    model, sent, taken = nn.Linear(2, 3), [], []
    monkeypatch.setattr(gradient_callback, "whole", lambda value: sent.append(value) or value)

    def gradients(weights, batch, role, is_isolated, scale=1.0):
        taken.append(set(weights))
        return {name: torch.ones_like(value) for name, value in weights.items()}

    logged = []
    logger = SimpleNamespace(log_metrics=lambda metrics, step: logged.append(metrics))
    trainer = SimpleNamespace(
        global_step=0,
        is_global_zero=is_first,
        loggers=[logger],
        precision_plugin=None,
        accumulate_grad_batches=1,
    )
    probe = GradientProbe(model, gradients, 1)
    probe.setup(trainer, None, "fit")
    probe.on_train_batch_start(trainer, None, torch.zeros(4, 2), 0)
    assert [x.shape for x in sent] == [p.shape for p in model.parameters()]
    assert (len(taken), len(logged)) == ((6, 1) if is_first else (0, 0))
    assert all(names == {"weight", "bias"} for names in taken)


@pytest.mark.parametrize(
    ("sequences", "micro_batches", "scale"),
    [(0, 1, 1.0), (1, 1, 0.25), (0, 4, 0.25), (1, 2, 0.125), (3, 1, 0.5), (0, 3, 0.25)],
)
def test_a_loss_is_scaled_so_that_its_gradients_are_as_small_as_the_trainings(
    sequences, micro_batches, scale
):
    """A mean of fewer sequences than an update has larger gradients at each of them."""
    model, scales = nn.Linear(2, 3), set()

    def gradients(weights, batch, role, is_isolated, scale=1.0):
        scales.add(scale)
        return {name: torch.ones_like(value) for name, value in weights.items()}

    trainer = SimpleNamespace(
        global_step=0,
        is_global_zero=True,
        loggers=[],
        precision_plugin=None,
        accumulate_grad_batches=micro_batches,
    )
    probe = GradientProbe(model, gradients, 1, sequences=sequences)
    probe.setup(trainer, None, "fit")
    probe.on_train_batch_start(trainer, None, torch.zeros(4, 2), 0)
    assert scales == {scale}
