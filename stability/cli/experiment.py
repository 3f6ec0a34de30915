"""`stability experiment NAME`: the door to the experiments (`experiments/kit`).

Experiments depend on this package, never the other way round. So this file only finds their folder
and has their own runner do it, in a process where they can be imported.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Literal

from stability.config import shipped

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
    here = Path.cwd() / "experiments"
    folder = here if (here / "kit" / "runner.py").is_file() else shipped.experiments()
    # of an installed package nothing is written over
    kept = here if folder.parent.name == "stability_experiments" else folder
    return _run_alone(folder, kept, name, size, redraw)


def _run_alone(folder: Path, kept: Path, name: str | None, size: str, redraw: bool) -> int:
    """Run the runner of `folder` in a process of its own, and return its exit code."""
    words = [str(folder), str(kept), name or "", size, "redraw" if redraw else ""]
    searched = [str(folder.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(searched)}
    # -P: a folder `experiments` of the user's is not taken for it
    line = [sys.executable, "-P", "-m", "experiments.kit", *words]
    return subprocess.run(line, env=environment, check=False).returncode
