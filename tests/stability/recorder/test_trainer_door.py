"""A Lightning training as its writer is told of it: losses, batches, divergence, what goes on."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils._python_dispatch import TorchDispatchMode

from stability.recorder import trainer_door
from stability.recorder.inside.batch_hash import hash_in_order, hash_inputs
from stability.recorder.trainer_door import TrainerDoor
from stability.recorder.witnessing import Witnessing
from stability.recorder.writer import PATIENCE, RunWriter, running_hashes
from stability.records.metric_log import MetricLog, read_metrics, read_text
from stability.records.metric_names import BATCH_HASH, NONFINITE_WEIGHTS, TRAIN_LOSS
from stability.records.paths import snapshot_steps
from stability.records.run_files import RunFiles
from stability.tracking.loggers import RecordsLogger

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*log_every_n_steps",
    "ignore:Checkpoint directory .* is not empty",
)


class _Identity(LightningModule):
    """Its loss is the mean of the batch, and its weights never change."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def training_step(self, batch, batch_idx):
        return batch.float().mean() + 0 * self.weight

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class _Losses(_Identity):
    """Its loss is the next of a list, whatever the batch."""

    def __init__(self, losses):
        super().__init__()
        self.losses = losses

    def training_step(self, batch, batch_idx):
        return self.losses[batch_idx] + 0 * self.weight


class _Batches:
    """Batches of two rows; to Lightning it has a state, so that it skips none where it goes on."""

    def __init__(self, data, first):
        self.batches, self.first = data.split(2), first

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        return iter(self.batches[self.first :])

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


def _told(folder, module, data, *, start=0, steps=(), log_every=1, before=(), after=(), **options):
    """Train `module` on `data`, go on from `start` if it is one; return the door and the trainer.

    A checkpoint of each step is left in `folder`.
    """
    files = RunFiles.unnamed(folder)
    log = MetricLog(files.paths.metrics)
    writer = RunWriter(files, log, log_every=log_every)
    door = TrainerDoor(writer, module, steps, Witnessing(module, 100, before={}), start=start)
    saving = ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=1)
    trainer = Trainer(
        accelerator="cpu",
        plugins=[LightningEnvironment()],
        max_epochs=1,
        callbacks=[*before, door, *after, saving],
        logger=[RecordsLogger(log)],
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **options,
    )
    try:
        at = folder / f"step={start}.ckpt" if start else None
        trainer.fit(module, _Batches(data, start), ckpt_path=at, weights_only=True)
    finally:
        log.close()
    return door, trainer


@pytest.mark.parametrize(
    ("accumulate", "every", "steps", "values"),
    [
        (1, 1, [0, 1, 2, 3], [1.5, 3.5, 5.5, 7.5]),
        (1, 2, [0, 2], [1.5, 5.5]),
        (2, 1, [0, 1], [2.5, 6.5]),
    ],
)
def test_loss_is_the_mean_of_the_micro_batches(tmp_path, accumulate, every, steps, values):
    options = {"accumulate_grad_batches": accumulate, "log_every": every}
    _told(tmp_path, _Identity(), torch.arange(1, 9), **options)
    found = read_metrics(tmp_path / "metrics.jsonl")[TRAIN_LOSS]
    assert (found.steps, found.values) == (steps, values)


def test_the_hash_of_batches_is_the_recorders_and_blind_to_micro_batches(tmp_path):
    data = torch.arange(40).view(8, 5)
    hashes = []
    for accumulate in (1, 2):
        folder = tmp_path / str(accumulate)
        _told(folder, _Identity(), data, accumulate_grad_batches=accumulate)
        hashes.append(read_text(folder / "metrics.jsonl", BATCH_HASH))

    def of(rows):
        return f"{int(hash_in_order(hash_inputs([rows])[0], 0)) % 2**64:016x}"

    for found, size in zip(hashes, (2, 4), strict=True):
        expected = running_hashes(of(rows) for rows in data.split(size))
        assert found == dict(enumerate(expected, start=1))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_no_two_samples_may_change_places(tmp_path, accumulate):
    """Sums in another order are other numerics: within an update, or its part, it is no pair."""
    data = torch.arange(40).view(8, 5)
    exchanged = [(0, 0), (0, 1), (0, 3), (3, 4)]
    found = []
    for index, (one, other) in enumerate(exchanged):
        folder, rows = tmp_path / str(index), data.clone()
        rows[[one, other]] = data[[other, one]]
        _told(folder, _Identity(), rows, accumulate_grad_batches=accumulate)
        found.append(read_text(folder / "metrics.jsonl", BATCH_HASH)[4 // accumulate])
    assert len({*found}) == 4


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.integers(0, 2**40))
def test_parts_of_an_update_add_up_to_its_hash_at_their_places_alone(sizes, first):
    samples = torch.randint(
        -(2**62), 2**62, (sum(sizes),), generator=torch.Generator().manual_seed(0)
    )
    starts = [first + sum(sizes[:i]) for i in range(len(sizes))]
    parts = zip(samples.split(sizes), starts, strict=True)
    whole = hash_in_order(samples, 0, first)
    assert sum(hash_in_order(part, 0, start) for part, start in parts) == whole
    assert hash_in_order(samples, 0, first + 1) != whole


def test_an_update_is_brought_to_the_host_in_one_transfer(monkeypatch):
    transfers = []

    class _Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten._local_scalar_dense.default:
                transfers.append(func)
            return func(*args, **(kwargs or {}))

    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda x: transfers.append("all") or tolist(x))
    losses = [torch.tensor(0.5), torch.tensor(math.inf)]
    batch = torch.arange(6).view(2, 3)
    with _Mode():
        hashes = [hash_inputs([batch])[0].sum() for _ in losses]
        assert not transfers
        loss, digest = trainer_door._on_host(losses, hashes)
    assert transfers == ["all"]
    assert (loss, int(digest, 16)) == (math.inf, 2 * int(hashes[0]) % 2**64)


def test_a_run_is_stopped_where_it_has_diverged(tmp_path):
    losses = [1.0, 1.0, *[math.nan] * PATIENCE, 1.0]
    door, trainer = _told(tmp_path, _Losses(losses), torch.arange(2 * len(losses)))
    assert (door.writer.diverged, trainer.global_step) == (2, 2 + PATIENCE)


def test_updates_are_counted_not_their_micro_batches(tmp_path):
    """One bad micro-batch makes the update bad, whichever it is, and counts once."""
    bad = [[math.nan, 1.0, 1.0], [1.0, math.inf, 1.0], [math.nan] * 3, [1.0, 1.0, math.nan]]
    for updates, stopped_at in (
        ([[1.0] * 3, *bad, [1.0] * 3, [1.0] * 3], None),
        ([[1.0] * 3, *bad, bad[2], [1.0] * 3], 6),
    ):
        losses, folder = [loss for update in updates for loss in update], tmp_path / str(stopped_at)
        data = torch.arange(2 * len(losses))
        door, trainer = _told(folder, _Losses(losses), data, accumulate_grad_batches=3)
        assert door.writer.diverged == (None if stopped_at is None else 1)
        assert trainer.global_step == (stopped_at or len(updates))


def test_what_was_told_goes_on_from_a_checkpoint_and_a_diverged_run_nowhere(tmp_path):
    losses, data = [1.0, *[math.nan] * 7], torch.arange(16)
    whole, _ = _told(tmp_path / "whole", _Losses(losses), data)
    folder = tmp_path / "stopped"
    _told(folder, _Losses(losses), data, max_steps=5)
    for start in (4, 6):
        door, trainer = _told(folder, _Losses(losses), data, start=start)
        assert (door.writer.diverged, trainer.global_step) == (1, 6)
        assert door.writer.batches == whole.writer.batches
    logs = [(tmp_path / name / "metrics.jsonl").read_bytes() for name in ("whole", "stopped")]
    assert logs[0] == logs[1]


def test_a_checkpoint_without_its_loops_is_no_place_to_go_on_from(tmp_path):
    data, at = torch.arange(16), tmp_path / "step=4.ckpt"
    _told(tmp_path, _Identity(), data)
    content = torch.load(at, weights_only=True)
    del content["loops"]
    torch.save(content, at)
    with pytest.raises(ValueError, match="must go on from step 4, what was restored is at step 0"):
        _told(tmp_path, _Identity(), data, start=4)


class _LogsLate(Callback):
    """Logs what it still holds when it is asked for its state, as the probe does."""

    def __init__(self):
        self.trainer = None

    def on_train_start(self, trainer, pl_module):
        self.trainer = trainer

    def state_dict(self):
        step = self.trainer.global_step
        self.trainer.loggers[0].log_metrics({"late": 1.0}, step=step)
        return {}


def test_a_checkpoint_counts_what_is_logged_when_others_are_asked_for_their_state(tmp_path):
    _told(tmp_path, _Identity(), torch.arange(8), max_steps=2, before=[_LogsLate()])
    _told(tmp_path, _Identity(), torch.arange(8), start=2)
    assert read_metrics(tmp_path / "metrics.jsonl")["late"].steps == [1, 2]


def test_a_snapshot_that_a_kill_kept_from_the_disk_is_written_where_the_run_goes_on(tmp_path):
    _told(tmp_path, _Identity(), torch.arange(8), max_steps=2)
    _told(tmp_path, _Identity(), torch.arange(8), start=2, steps=[0, 2, 4])
    assert snapshot_steps(RunFiles.unnamed(tmp_path).paths) == [2, 4]
    # what the log tells of step 2, it told before the checkpoint
    assert read_metrics(tmp_path / "metrics.jsonl")[NONFINITE_WEIGHTS].steps == [4]
