"""Runs experiments for `stability experiment`, which starts this as a process of its own.

Its words are the experiments' folder, the one that keeps results, a name, a size, and `redraw`; the
last three may be empty.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from experiments.kit.runner import KEPT, SIZES, names, run_experiments
from stability.cli.output import INTERRUPTED, WRONG


def main(words: Sequence[str]) -> int:
    """Return the exit code of `run_experiments`; what is wrong is one line on standard error."""
    folder, kept, name, size, redraw = words
    (chosen,) = (each for each in SIZES if each == size)
    try:
        if name in (*names(Path(folder)), "all") and size in KEPT:
            # before anything is measured, which takes minutes
            (Path(kept) / "results").mkdir(parents=True, exist_ok=True)
        return run_experiments(Path(folder), name or None, chosen, bool(redraw), Path(kept))
    except (ValueError, OSError) as error:
        sys.stderr.write(f"stability: {' '.join(str(error).split())}\n")
        return WRONG
    except KeyboardInterrupt:
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
