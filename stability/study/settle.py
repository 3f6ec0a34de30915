"""What is done whenever a run has ended: it is measured, and what need not stay is dropped.

Once a seed's controls have ended, each other run of it is measured from them as it ends, and what
the study's `keep` does not keep of it goes; so a seed never holds the snapshots of all its arms,
however many train side by side. With its last run a seed is whole: all its distances are measured,
equal files stored once, its controls dropped. What waits for faults to be planted on it stays until
`run_study.finish_study` has planted them. One process at a time does this in a study. Leaves out
which files stay (`storage`) and what a distance is (`distances`).
"""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from stability.callbacks.study_observer import StudyObserver
from stability.config.axes import touches
from stability.config.roles import is_control
from stability.records.assay import read_assay
from stability.records.paths import RunPaths
from stability.records.run_lock import hold
from stability.study.distances import update_distances
from stability.study.remade_drifts import remake_drifts
from stability.study.run import Run, has_ended
from stability.study.storage import drop_by_policy, link_equal_files

__all__ = ["alone_with", "awaiting_assay", "of_seed", "settle_ended", "settle_seed"]

PAUSE_S = 1.0
"""Between two looks whether another process has finished the study."""


def settle_ended(
    runs: list[Run], keep: str, observer: StudyObserver, seed: int, *, is_over: bool | None = None
) -> None:
    """Measure and drop what can be of the runs of `seed` that have ended by now.

    `is_over` says whether none of the others will be tried again; None: they may be, by others.
    While another process does this in the study nothing is done, and where a record can't be read
    no more than a note is made: the next call, or `finish_study`, finds what is left.
    """
    its_runs = of_seed(runs, seed)
    try:
        _settle_now(runs, its_runs, keep, observer, is_over)
    except ValueError as error:
        # this run has trained; what is wrong with another's record is told again at the end
        observer.study_noted(f"seed {seed}: not measured yet: {error}")


def _settle_now(
    runs: list[Run],
    its_runs: list[Run],
    keep: str,
    observer: StudyObserver,
    is_over: bool | None,
) -> None:
    ended = [run for run in its_runs if has_ended(run.paths)]
    is_whole = len(ended) == len(its_runs) if is_over is None else is_over
    if not is_whole and (keep == "all" or not _has_its_controls(its_runs, ended)):
        return
    with ExitStack() as stack:
        try:
            stack.enter_context(hold(RunPaths(runs[0].paths.root.parent.parent)))
        except BlockingIOError:
            return
        if is_whole:
            settle_seed(runs, keep, observer, its_runs[0].seed)
        else:
            is_first = its_runs[0].seed == runs[0].seed
            waiting = awaiting_assay(its_runs) if is_first else set()
            _settle_others(ended, keep, observer, spared=waiting)


def settle_seed(runs: list[Run], keep: str, observer: StudyObserver, seed: int) -> None:
    """Measure what is missing of a seed, then store it in less room.

    The first seed keeps its snapshots until faults were planted on them.
    """
    its_runs = of_seed(runs, seed)
    found = {run.arm.name: run.paths for run in its_runs}
    folder = runs[0].paths.root.parent.parent

    def note(arm: str, text: str) -> None:
        observer.run_noted(arm, seed, text)

    update_distances(folder, seed, found, note)
    remake_drifts(folder, seed, found, note)
    link_equal_files(its_runs)
    if seed != runs[0].seed:
        drop_by_policy(folder, its_runs, keep)


def _has_its_controls(its_runs: list[Run], ended: list[Run]) -> bool:
    """Whether every control of a seed has ended, and another run too."""
    names = {run.arm.name for run in ended}
    controls = {run.arm.name for run in its_runs if is_control(run.arm.role)}
    return controls < names


def _settle_others(
    ended: list[Run], keep: str, observer: StudyObserver, *, spared: set[str]
) -> None:
    """Measure the runs of a seed that are no controls from those that are, and drop of them."""
    folder, seed = ended[0].paths.root.parent.parent, ended[0].seed
    update_distances(
        folder,
        seed,
        {run.arm.name: run.paths for run in ended},
        lambda arm, text: observer.run_noted(arm, seed, text),
    )
    controls = {run.arm.name for run in ended if is_control(run.arm.role)}
    drop_by_policy(folder, ended, keep, spared=controls | spared)


def awaiting_assay(runs: list[Run]) -> set[str]:
    """Return which arms of `runs`, all of the first seed, faults are still to be planted on.

    None if nothing goes on.
    """
    folder = runs[0].paths.root.parent.parent
    if not any(run.arm.role == "broken" for run in runs):
        return set()  # then none is made
    changed = {
        run.arm.name
        for run in runs
        if run.arm.role == "candidate" and touches(run.arm.diff, ("attention",))
    }
    return {name for name in changed if not _is_assayed(folder, name)}


def _is_assayed(folder: Path, arm: str) -> bool:
    try:
        return read_assay(folder, arm) is not None
    except ValueError:  # damaged: it is made anew
        return False


def of_seed(runs: list[Run], seed: int) -> list[Run]:
    """Return those of `runs` that have `seed`."""
    return [run for run in runs if run.seed == seed]


@contextmanager
def alone_with(folder: Path, observer: StudyObserver) -> Iterator[None]:
    """Hold the lock of a study's folder, once whoever holds it has let go."""
    with ExitStack() as stack:
        is_told = False
        while True:
            try:
                stack.enter_context(hold(RunPaths(folder)))
                break
            except BlockingIOError:
                if not is_told:
                    observer.study_noted("another process measures what follows the runs; waiting")
                is_told = True
            time.sleep(PAUSE_S)
        yield
