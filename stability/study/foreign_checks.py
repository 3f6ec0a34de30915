"""What a recorded training must hold to count: its end, its seed, what was asked of it.

Each check raises a ValueError of one sentence. Leaves out what two runs must have alike
(`pair_contract`) and the plan (`foreign_plan`).
"""

from collections.abc import Callable
from pathlib import Path

from stability.analysis.pair_contract import (
    ContractError,
    check_batches,
    check_labels,
    may_differ,
)
from stability.recorder.spooled import Spooled, read_state
from stability.recorder.writer import running_hashes
from stability.records.manifest import ENDED, read_manifest
from stability.records.metric_log import read_text
from stability.records.metric_names import BATCH_HASH
from stability.records.paths import list_runs, snapshot_steps
from stability.records.run_files import read_run_snapshot
from stability.study.foreign_plan import ForeignRun
from stability.study.rerun_notes import UNSEEDED
from stability.study.worktree import repository, sources_outside

__all__ = [
    "SAME_RUN",
    "check_attention",
    "check_end",
    "check_final",
    "check_nudge",
    "check_same_batches",
    "check_seeds",
    "check_sources",
]

SAME_RUN = "must be another run than seed"
"""What is said of two seeds that make one run."""


def check_end(run: ForeignRun, spooled: Spooled) -> None:
    """ValueError if a training did not come to its planned end."""
    planned = run.config["train"]["steps"]
    if not spooled.has_end or (planned and spooled.step != planned):
        of = f" of {planned}" if planned else ""
        raise ValueError(f"training {spooled.ending} after {spooled.step} updates{of}")


def check_attention(run: ForeignRun, spooled: Spooled) -> None:
    """ValueError if an attention was to be replaced, and none was called."""
    calls = spooled.attention
    kinds = ("replaced", "compiled", "without_gradient")
    if run.asked.attention and not any(calls.get(kind) for kind in kinds):
        raise ValueError(
            "0 attention calls were replaced: this script does not call "
            "scaled_dot_product_attention"
        )


def check_sources(run: ForeignRun, spooled: Spooled, folder: Path | None) -> None:
    """ValueError if a run of a commit has executed a source of the working tree."""
    if run.checkout is None or folder is None:
        return
    outside = sources_outside(spooled.files, run.checkout, repository(folder))
    if outside:
        raise ValueError(
            f"ref: all sources must be those of {run.config['ref'][:12]}, and {outside[0]} of the "
            "working tree was executed, as from an editable install; install it from the commit "
            "in `setup`, into an environment of its own in `python`"
        )


def check_same_batches(run: ForeignRun, step: int) -> None:
    """ContractError if batches up to `step` are not the baseline's, as far as both are known."""
    if run.baseline is None or may_differ("batches", run.diff):
        return
    own, other = (read_text(x.metrics, BATCH_HASH) for x in (run.paths, run.baseline))
    # what was not seen of both proves nothing; `verify` says so
    if own.keys() != other.keys():
        return
    try:
        check_batches(run.baseline, run.paths, min(step, max(own, default=0)))
        check_labels(run.baseline, run.paths, step)
    except ContractError as error:
        if run.diff:
            raise
        raise ContractError(f"{error}; {UNSEEDED}") from None


def check_nudge(run: ForeignRun, spooled: Spooled) -> None:
    """ValueError if the first update shows no trace of the nudge: the weights were set anew."""
    if run.baseline is None or not run.asked.nudge[0]:
        return
    kept = {*spooled.states} & {*snapshot_steps(run.baseline)}
    step = min((step for step in kept if step), default=0)
    if not step:
        return
    other = read_run_snapshot(run.baseline, step)
    own = read_state(spooled.states[step])
    if all(name in own and own[name].equal(value) for name, value in other.items()):
        after = "the first update" if step == 1 else f"{step} updates"
        raise ValueError(
            f"the nudge left no trace: after {after} all weights are the baseline's; the script "
            "sets its weights after its first forward pass"
        )


def check_final(
    run: ForeignRun,
    final: Callable[[], str],
    advice: str = "the command does not take its seed; put {seed} into it",
) -> None:
    """ValueError if another seed of the arm ended in the same weights, whatever it was given.

    `final` gives their hash, and is asked only where there is another seed.
    """
    for other in list_runs(run.folder):
        if other.arm != run.arm or other.seed == run.seed or not other.manifest.exists():
            continue
        manifest = read_manifest(other.manifest)
        if manifest.state in ENDED and manifest.hashes.get("final_weights") == final():
            raise ValueError(
                f"seed {run.seed} {SAME_RUN} {other.seed}, ends in the same weights: {advice}"
            )


def check_seeds(run: ForeignRun, spooled: Spooled) -> None:
    """ValueError if another seed of the arm was the same run: it would count as a repetition."""
    own = list(running_hashes(update.batch for update in spooled.updates))
    for other in list_runs(run.folder):
        if other.arm != run.arm or other.seed == run.seed or not other.manifest.exists():
            continue
        manifest = read_manifest(other.manifest)
        if manifest.state not in ENDED or manifest.hashes.get("init_weights") != spooled.init:
            continue
        batches = read_text(other.metrics, BATCH_HASH)
        if own and own[-1] and batches.get(len(own)) == own[-1]:
            raise ValueError(
                f"seed {run.seed} {SAME_RUN} {other.seed}, has the same start "
                "and the same batches: the command does not take its seed; put {seed} into it"
            )
