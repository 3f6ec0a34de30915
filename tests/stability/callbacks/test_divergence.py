"""Only a loss that stays no number stops a run; one that a loss scaler leaves out does not."""

import math
from types import SimpleNamespace

import pytest
import torch

from stability.callbacks.divergence import PATIENCE, Divergence


def _told(callback, losses, start=0):
    trainer = SimpleNamespace(global_step=start, should_stop=False)
    for loss in losses:
        trainer.global_step += 1
        callback.on_train_batch_end(trainer, None, {"loss": torch.tensor(loss)}, None, 0)
    return trainer


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_it_stops_after_five_in_a_row_and_names_the_first(bad):
    callback = Divergence()
    assert not _told(callback, [1.0, 1.0, *[bad] * (PATIENCE - 1)]).should_stop
    assert callback.step is None
    callback = Divergence()
    assert _told(callback, [1.0, 1.0, *[bad] * PATIENCE]).should_stop
    assert callback.step == 2


def test_a_finite_loss_in_between_starts_the_count_anew():
    callback = Divergence()
    assert not _told(callback, [*[math.nan] * 4, 1.0, *[math.nan] * 4]).should_stop
    assert callback.step is None


def test_the_count_survives_a_checkpoint():
    first, second = Divergence(), Divergence()
    _told(first, [1.0, math.nan, math.nan, math.nan])
    second.load_state_dict(first.state_dict())
    assert _told(second, [math.nan, math.nan], start=4).should_stop
    assert second.step == 1


def test_a_checkpoint_of_the_last_step_is_gone_on_from_nowhere():
    first, second = Divergence(), Divergence()
    _told(first, [1.0, *[math.nan] * PATIENCE])
    second.load_state_dict(first.state_dict())
    trainer = SimpleNamespace(should_stop=False)
    second.on_train_start(trainer, None)
    assert (trainer.should_stop, second.step) == (True, 1)
