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
        global_step=0, is_global_zero=is_first, loggers=[logger], precision_plugin=None
    )
    probe = GradientProbe(model, gradients, 1)
    probe.setup(trainer, None, "fit")
    probe.on_train_batch_start(trainer, None, torch.zeros(4, 2), 0)
    assert [x.shape for x in sent] == [p.shape for p in model.parameters()]
    assert (len(taken), len(logged)) == ((6, 1) if is_first else (0, 0))
    assert all(names == {"weight", "bias"} for names in taken)
