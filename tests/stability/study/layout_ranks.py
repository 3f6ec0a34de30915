"""Short trainings over ranks, in processes that are started once for many of them."""

import tempfile
from contextlib import nullcontext
from pathlib import Path

from stability.model.layouts import whole_state
from stability.model.ranks import ALONE, joined, part
from stability.recorder.following import FollowingWriter
from stability.recorder.trainer_door import TrainerDoor
from stability.recorder.witnessing import Witnessing
from stability.recorder.writer import RunWriter
from stability.records.metric_log import MetricLog, read_metrics
from stability.records.run_files import RunFiles
from stability.study.assemble import assemble, fit, load_data, make_trainer, resolve_device
from stability.study.process_switches import switched
from stability.tracking.loggers import RecordsLogger


def train_all(configs, ranks):
    """Return, by name, what each of `configs` has trained to over `ranks`."""
    device = resolve_device(next(iter(configs.values())))
    with joined(ranks, device) if ranks.count > 1 else nullcontext():
        found = {name: train_one(config, ranks) for name, config in configs.items()}
        part(ranks)
    return found


def train_one(config, ranks=ALONE):
    """Train `config`, and return its hashes, its losses and its weights."""
    with switched(config.train), tempfile.TemporaryDirectory() as folder:
        parts, data = assemble(config), load_data(config, ranks)
        files = RunFiles.unnamed(Path(folder))
        log = MetricLog(files.paths.metrics)
        door = TrainerDoor(
            RunWriter(files, log, ranks=ranks) if ranks.is_first else FollowingWriter(ranks),
            parts.model,
            [config.train.steps],
            Witnessing(parts.model, config.train.steps, before={}),
            held_out=data.held_out_batches,
            ranks=ranks,
            parallel=config.parallel,
        )
        callbacks = [*parts.callbacks, door]
        fit(make_trainer(config, files, [RecordsLogger(log)], callbacks, 0, ranks), parts, data)
        log.close()
        series = read_metrics(files.paths.metrics)
        return {
            "init": parts.init_hash,
            "ended_at": door.writer.step,
            "batches": getattr(door.writer, "batches", None),
            "metrics": {name: list(each.values) for name, each in series.items()},
            "weights": {
                k: v.detach().double().numpy() for k, v in whole_state(parts.model).items()
            },
        }
