"""`stability experiment NAME`: the door to the experiments of a checkout (`experiments/kit`).

Experiments depend on this package, never the other way round, and are not part of the installed
package. So this file only finds their folder and hands over to their own runner.
"""

import importlib
import sys
from pathlib import Path
from typing import Literal

__all__ = ["experiment"]


def experiment(
    name: str | None = None,
    size: Literal["quick", "cpu", "gpu"] = "cpu",
    redraw: bool = False,
) -> int:
    """Run an experiment, or `all`; without a name list them.

    Exit code 1 if a control is refuted or one of several experiments can't be run, 3 if a control
    is undecided.

    Args:
        name: the experiment, e.g. stable_fig3, or all
        size: cpu (minutes) and gpu (hours) are kept in experiments/; quick (seconds) is not
        redraw: run nothing; draw figure and table anew from the result that is kept
    """
    folder = _experiments_folder()
    if str(folder.parent) not in sys.path:
        sys.path.insert(0, str(folder.parent))
    runner = importlib.import_module("experiments.kit.runner")
    return runner.run_experiments(folder, name, size, redraw)


def _experiments_folder() -> Path:
    """Return the folder `experiments` here, or beside the package; ValueError if there is none."""
    for root in (Path.cwd(), Path(__file__).parents[2]):
        if (root / "experiments" / "kit" / "runner.py").is_file():
            return root / "experiments"
    raise ValueError(
        f"experiment: must be run in a checkout of the repository, {Path.cwd()} has no folder "
        "experiments; clone it, and run `make install` there"
    )
