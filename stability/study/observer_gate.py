"""The observer gate: a few steps with every instrument and with none must end in the same bits.

Both trainings start as the run itself would, in a temporary folder. What the instruments measure
there is thrown away.
"""

import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback

from stability.config.schema import ArmConfig, ProbeConfig, WatchConfig
from stability.model.layouts import hash_whole
from stability.model.ranks import ALONE, Ranks
from stability.recorder.following import FollowingWriter
from stability.recorder.trainer_door import TrainerDoor
from stability.recorder.witnessing import Witnessing
from stability.recorder.writer import RunWriter
from stability.records.metric_log import MetricLog
from stability.records.run_files import RunFiles
from stability.study.assemble import assemble, fit, load_data, make_trainer
from stability.tracking.loggers import RecordsLogger

__all__ = ["OBSERVER_STEPS", "ObserverCheck", "ObserverError", "check_observer"]

OBSERVER_STEPS = 4
"""Updates of each of the two runs; the probe looks at every one."""


class ObserverError(ValueError):
    """The instruments have changed the weights of a run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ObserverCheck:
    """The hashes of the weights after `steps` updates, watched and unwatched."""

    steps: int
    watched: str
    unwatched: str

    @property
    def equal(self) -> bool:
        """Whether the instruments have changed nothing."""
        return self.watched == self.unwatched

    def to_dict(self) -> dict[str, Any]:
        """Return the manifest's entry about the gate."""
        return {**asdict(self), "equal": self.equal}


def check_observer(
    config: ArmConfig, steps: int = OBSERVER_STEPS, ranks: Ranks = ALONE
) -> ObserverCheck:
    """Train `config` for `steps` updates with everything on and everything off.

    "On" is the arm's own shadows with the golden, gradients, heads, positions, logits and a second
    forward pass, at every step and layer, the whole model's gradient where the arm changes the
    attention, the instability watch and the witness; ValueError as `assemble`.
    """
    on = replace(
        config.probe,
        every=1,
        steps=(),
        layers=("*",),
        golden=True,
        backward=True,
        heads=True,
        positions=4,
        inside=True,
        inherited=True,
        overhead=0.0,
        gradient_every=1,
        shadows=config.probe.shadows or ProbeConfig().shadows,
    )
    off = replace(config.probe, every=0, steps=(), per_decade=0, gradient_every=0)
    return ObserverCheck(
        steps=steps,
        watched=_trained(replace(config, probe=on, watch=WatchConfig(every=1)), steps, ranks),
        unwatched=_trained(replace(config, probe=off, watch=WatchConfig(every=0)), steps, ranks),
    )


def _trained(config: ArmConfig, steps: int, ranks: Ranks) -> str:
    train = replace(config.train, steps=steps, checkpoint_every=10 * steps, snapshot_steps=())
    config = replace(config, train=train)
    parts, data = assemble(config), load_data(config, ranks)
    with tempfile.TemporaryDirectory(prefix="observer-") as folder:
        files = RunFiles.unnamed(Path(folder))
        log = MetricLog(files.paths.metrics)
        callbacks: list[Callback] = list(parts.callbacks)
        if config.watch.every:
            unproven = "torch.compile" if config.train.compile else ""
            door = TrainerDoor(
                RunWriter(files, log, ranks=ranks) if ranks.is_first else FollowingWriter(ranks),
                parts.model,
                range(steps + 1),
                Witnessing(parts.model, steps, before={}, unproven=unproven),
                held_out=data.held_out_batches,
                kept=config.held_out.prediction_batches,
                ranks=ranks,
                parallel=config.parallel,
            )
            callbacks.append(door)
        try:
            trainer = make_trainer(config, files, [RecordsLogger(log)], callbacks, 0, ranks)
            fit(trainer, parts, data)
        finally:
            log.close()
    return hash_whole(parts.model)
