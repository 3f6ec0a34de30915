"""What the files of two runs must have alike: the start weights, and the losses of an A/A pair.

Both are compared in the files themselves, not by what a manifest says of them. Leaves out the
hashes, the batches and what was executed (`pair_contract`, `witness_contract`).
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from stability.analysis.drift_parents import listed_snapshot
from stability.analysis.pair_proof import ProofLine, compared
from stability.config.axes import axes_of, touches
from stability.config.commands import is_command
from stability.config.schema import BASELINE
from stability.records.manifest import Manifest
from stability.records.metric_log import read_metrics
from stability.records.metric_names import EVAL_LOSS, TRAIN_LOSS
from stability.records.paths import RunPaths, snapshot_steps
from stability.records.run_files import read_run_snapshot
from stability.records.snapshots import hash_state

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["given_start_line", "ranks_apart", "rerun_line", "start_line"]


def start_line(
    runs: tuple[RunPaths, RunPaths],
    manifests: tuple[Manifest, Manifest],
    *,
    is_free: bool,
    differences: Mapping[str, Any],
) -> Iterator[ProofLine]:
    """Compare the snapshots of step 0, where both have one; `is_free` where the start may differ.

    A nudge moves the start, and another precision may keep it in other bits.
    """
    files = [listed_snapshot(*each, 0) for each in zip(runs, manifests, strict=True)]
    if not all(files):
        return
    is_meant = is_free or touches(differences, ("nudge", "precision"))
    field = "the weights at step 0"
    if not is_free and axes_of(differences) == ["nudge"]:
        yield _nudge_line(field, runs, manifests)
        return
    if files[0] == files[1] or is_meant:
        yield compared(field, *files, is_free=is_meant)
        return
    # a file of another version of the library may say the same in other bytes
    yield compared(field, *(hash_state(read_run_snapshot(paths, 0)) for paths in runs))


def given_start_line(candidate: Manifest) -> Iterator[ProofLine]:
    """Say that a run's start weights were not made by its own code, where they were given to it."""
    if candidate.resolved.get("start") == "given":
        yield ProofLine(
            field="start",
            first="own",
            second="given",
            sameness="different by design",
            says=f"start: given; {candidate.arm} began with the {BASELINE}'s weights",
        )


def _nudge_line(
    field: str, runs: tuple[RunPaths, RunPaths], manifests: tuple[Manifest, Manifest]
) -> ProofLine:
    """Hold the start of a nudged run against the baseline's: every weight a few places away."""
    settings: list[Any] = [manifest.config.get("nudge", {}) for manifest in manifests]
    most = sum(each.get("ulps", 0) for each in settings)
    one, other = (read_run_snapshot(paths, 0) for paths in runs)
    moved = max((_places(one[name], other[name]) for name in one.keys() & other.keys()), default=0)
    # one that is kept in fewer bits than it was nudged in may show nothing of it
    least = int(all(x.element_size() >= 4 for x in one.values()))
    is_nudged = one.keys() == other.keys() and least <= moved <= most
    return ProofLine(
        field=field,
        first="the baseline's",
        second=f"moved by {moved} places",
        sameness="different by design" if is_nudged else "different",
        says=f"the weights at step 0 are moved by up to {moved} units in the last place, by a "
        f"nudge of {most}",
    )


def _places(one: "Tensor", other: "Tensor") -> int:
    """Return by how many representable numbers two tensors differ at most; large if they can't."""
    import torch  # heavy

    kinds = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    if one.dtype != other.dtype or one.shape != other.shape:
        return 2**62
    if not one.is_floating_point() or one.element_size() not in kinds or not one.numel():
        return 0 if one.equal(other) else 2**62
    bits = kinds[one.element_size()]
    lowest = torch.iinfo(bits).min
    # in the order of the numbers, from the bits of sign and magnitude
    a, b = (x.contiguous().view(bits).to(torch.int64) for x in (one, other))
    a, b = (torch.where(x < 0, lowest - x, x) for x in (a, b))
    return int((a - b).abs().max())


def rerun_line(
    runs: tuple[RunPaths, RunPaths],
    manifests: tuple[Manifest, Manifest],
    differences: Mapping[str, Any],
) -> Iterator[ProofLine]:
    """Compare losses and weights of two runs that differ in nothing and end in the same bits.

    The hash that both end in is the first rank's; what the others held is compared with it. Those
    of other pairs are each run's own word.
    """
    ends = [manifest.hashes.get("final_weights") for manifest in manifests]
    if differences or not ends[0] or ends[0] != ends[1]:
        return
    for rank, *held in ranks_apart(*manifests):
        yield compared(f"what rank {rank} held at the end", *held)
        return
    logs = [_losses(paths) for paths in runs]
    names = (TRAIN_LOSS, EVAL_LOSS) if _is_evaluated_alike(manifests) else (TRAIN_LOSS,)
    for name in names:
        one, other = (log.get(name, {}) for log in logs)
        for step in sorted({*one, *other}):
            values = one.get(step), other.get(step)
            if repr(values[0]) != repr(values[1]):  # two NaN are alike
                yield compared(f"{name} at step {step}", *values)
                return
    for step in sorted({*snapshot_steps(runs[0])} & {*snapshot_steps(runs[1])}):
        files = [listed_snapshot(*each, step) for each in zip(runs, manifests, strict=True)]
        if all(files) and files[0] != files[1]:
            states = [hash_state(read_run_snapshot(paths, step)) for paths in runs]
            if states[0] != states[1]:
                yield compared(f"the weights at step {step}", *states)
                return
    count = sum(len(logs[0].get(name, {})) for name in names)
    yield compared("losses", f"{count} alike", f"{count} alike")


def ranks_apart(first: Manifest, second: Manifest) -> list[tuple[str, str, str]]:
    """Return each rank that both runs know the end of and that ended otherwise, and both hashes."""
    found = [manifest.resolved.get("rank_ends") for manifest in (first, second)]
    # a record that was written by hand may hold anything
    one, other = (ends if isinstance(ends, dict) else {} for ends in found)
    both = sorted(one.keys() & other.keys(), key=lambda rank: (len(rank), rank))
    return [(rank, one[rank], other[rank]) for rank in both if one[rank] != other[rank]]


def _is_evaluated_alike(manifests: tuple[Manifest, Manifest]) -> bool:
    """Whether two runs are known to be evaluated on the same, as our own always are."""
    one, other = (manifest.hashes.get("held_out") for manifest in manifests)
    return not is_command(manifests[0].config) or bool(one and one == other)


def _losses(paths: RunPaths) -> dict[str, dict[int, float]]:
    if not paths.metrics.exists():
        return {}
    found = read_metrics(paths.metrics)
    return {
        name: dict(zip(series.steps, series.values, strict=True))
        for name in (TRAIN_LOSS, EVAL_LOSS)
        if (series := found.get(name))
    }
