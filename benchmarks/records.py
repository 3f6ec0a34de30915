"""What records cost a run, as shares of the demo's own time: updates, weights and checkpoints.

`python benchmarks/records.py` trains the quickstart's baseline and its FP32 reference as the demo
does, in a temporary folder. The limit is 5 % for snapshots; `updates` holds all that is recorded
after an update, weights included.
"""

import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from stability.config.load import load_study
from stability.recorder.trainer_door import TrainerDoor
from stability.recorder.writer import RunWriter
from stability.study.assemble import quieten_lightning
from stability.study.checkpoints import CheckpointFiles
from stability.study.run_study import plan_study
from stability.study.train_run import TrainOptions, train

ROOT = Path(__file__).parent.parent
WORK = {
    "snapshots": (RunWriter, "snapshot"),
    "drifts": (RunWriter, "_log_drift"),
    "updates": (TrainerDoor, "after_update"),
    "checkpoints": (CheckpointFiles, "save_checkpoint"),
}


class Silent:
    """An observer that shows nothing."""

    def run_started(self, index: int, total: int, arm: str, seed: int, steps: int) -> None:
        """Ignore."""

    def run_advanced(self, arm: str, seed: int, step: int, loss: float) -> None:
        """Ignore."""

    def run_noted(self, arm: str, seed: int, text: str) -> None:
        """Ignore."""

    def wandb_failed(self, arm: str, seed: int, text: str) -> None:
        """Ignore."""

    def run_ended(self, arm: str, seed: int, state: str, message: str) -> None:
        """Ignore."""


def timed(owner: type, method: str, spent: dict[str, float], name: str) -> None:
    """Add up the seconds that a method takes."""
    inner = getattr(owner, method)

    def measured(*arguments: Any, **keywords: Any) -> Any:
        start = time.perf_counter()
        try:
            return inner(*arguments, **keywords)
        finally:
            spent[name] += time.perf_counter() - start

    setattr(owner, method, measured)


def main() -> None:
    """Train two runs of the quickstart and print the shares."""
    quieten_lightning()
    spent: dict[str, float] = defaultdict(float)
    for name, (owner, method) in WORK.items():
        timed(owner, method, spent, name)
    study = load_study(ROOT / "configs" / "quickstart.yaml")
    with tempfile.TemporaryDirectory() as folder:
        for run in plan_study(study, Path(folder)):
            if run.seed == study.seeds[0] and run.arm.name in ("baseline", "reference"):
                start = time.perf_counter()
                train(run, TrainOptions(wandb_mode="disabled"), Silent())
                spent["training"] += time.perf_counter() - start
    total = spent.pop("training")
    for name, seconds in spent.items():
        sys.stdout.write(f"{name:12} {seconds:6.2f} s of {total:.1f} s   {seconds / total:.2%}\n")


if __name__ == "__main__":
    main()
