"""Measures how far the arms of a seed are from one another, once their runs have ended.

Every snapshot is read once for each step, slice by slice, so that memory holds some values of each
arm and its vectors, and never a whole model. Two files with one checksum are the same bits: they
are read once, and are 0 apart even where they hold NaN. Of an arm whose change adds weights those
that the baseline has too are read. What is on record already is measured again only where an arm is
new or a file is another one; where a snapshot was dropped since, by sketch. Beside the distances of
all weights stand those of the values that noise moves and of the others, where there are any: which
these are, baseline and nudges say, whatever other arms there are. Leaves out the arithmetic
(`metrics.pairwise`), the rule (`analysis.left_out`), the file (`records.distances`) and what a
distance means (`analysis`).
"""

import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path

import torch
from torch import Tensor

from stability.analysis.left_out import noise_moved_at
from stability.analysis.sketch_check import SketchedWeights, sketched_weights
from stability.config.axes import CHANGES_WEIGHTS, touches
from stability.config.schema import BASELINE
from stability.metrics.noise_moved import Ranges, vector_names
from stability.metrics.pairwise import pairwise_l2
from stability.records.distances import (
    DistanceMatrix,
    LeftOut,
    SeedDistances,
    read_distances,
    write_distances,
)
from stability.records.manifest import Manifest, read_manifest
from stability.records.paths import RunPaths
from stability.records.protocol import leaves_out
from stability.records.run_files import (
    content_checksum,
    file_damage,
    predictions_of,
    snapshot_of,
)
from stability.records.weight_files import Weights, open_snapshot

__all__ = ["time_distance", "update_distances"]

FileOf = Callable[[RunPaths, Manifest, int], Path]
"""Which file of a run is meant at a step."""

_SLICE = 2**20
"""Values of one arm that are in memory at a time: 4 MB in FP32, with 20 arms 80 MB."""
_SMALL_S = 1.0
"""What takes less is measured twice where it is timed."""


def update_distances(
    study: Path, seed: int, runs: Mapping[str, RunPaths], note: Callable[[str, str], None]
) -> SeedDistances:
    """Measure what is missing of the distances between `runs`, by arm, and write it.

    Runs without a manifest are left out. `note` is told of an arm and what is wrong with a file of
    it that is damaged, or that holds other parameters than the baseline's; it is left out too.
    """
    try:
        known = read_distances(study, seed)
    except ValueError:  # damaged: all of it can be measured again
        known = SeedDistances(seed=seed)
    begun = {
        arm: (paths, read_manifest(paths.manifest))
        for arm, paths in runs.items()
        if paths.manifest.is_file()
    }
    found = SeedDistances(
        seed=seed,
        weights=_update_weights(begun, known.weights, note, leave_out=leaves_out(study)),
        predictions=_update_predictions(begun, known.predictions, note),
    )
    if found != known:
        write_distances(study, found)
    return found


def time_distance(one: Path, other: Path) -> float:
    """Return the seconds that it takes to check two files of weights and measure their distance."""
    first = _timed_distance(one, other)
    # of small files the first time warms up, which took three times as long
    return first if first > _SMALL_S else min(first, _timed_distance(one, other))


def _timed_distance(one: Path, other: Path) -> float:
    began = time.perf_counter()
    files = {"one": one, "other": other}
    _measure(files, {name: f"{name} {content_checksum(path)}" for name, path in files.items()})
    return time.perf_counter() - began


Runs = Mapping[str, tuple[RunPaths, Manifest]]
Note = Callable[[str, str], None]


def _update_predictions(
    runs: Runs, known: Mapping[int, DistanceMatrix], note: Note
) -> dict[int, DistanceMatrix]:
    """Return the matrix of each step at which two arms or more have predictions."""
    found = {}
    for step, parents in _parents(runs, predictions_of).items():
        if step in known and dict(known[step].parents) == parents:
            found[step] = known[step]
            continue
        files = _alike(*_whole(runs, predictions_of, step, parents, note), note)
        if len(files) > 1:
            found[step] = _measure(files, parents, root_mean=True).matrix
    return found


def _update_weights(
    runs: Runs, known: Mapping[int, DistanceMatrix], note: Note, *, leave_out: bool
) -> dict[int, DistanceMatrix]:
    """Return the matrix of each step at which two arms or more have weights.

    `leave_out` says whether it is asked which values noise moves.
    """
    found = {}
    for step, parents in _parents(runs, snapshot_of).items():
        before = known.get(step)
        if before is not None and dict(before.parents) == parents:
            was_asked = before.left_out is not None or not leave_out
            if was_asked or noise_moved_at(runs, step, before) is None:
                found[step] = before
                continue
        whole, larger = _whole(runs, snapshot_of, step, parents, note)
        files = _alike(whole, larger, note)
        measured = _measure(files, parents) if len(files) > 1 else None
        matrix = measured.matrix if measured else None
        dropped = [arm for arm in parents if arm not in whole and _is_dropped(*runs[arm], step)]
        if dropped:
            there = {arm: parents[arm] for arm in parents if arm in files or arm in dropped}
            matrix = _joined(runs, step, there, [x for x in (matrix, before) if x], note) or matrix
        if matrix is not None and leave_out:
            matrix = replace(matrix, left_out=_left_out(runs, step, matrix, measured, before))
        if matrix is not None:
            found[step] = matrix
    return found


def _whole(
    runs: Runs, file: FileOf, step: int, arms: Iterable[str], note: Note
) -> tuple[dict[str, Path], set[str]]:
    """Return the files of a step that are as they were written, and whose arms add weights."""
    whole = {}
    for arm in arms:
        paths, manifest = runs[arm]
        path = file(paths, manifest, step)
        if paths.name_of(path) in manifest.dropped:
            continue
        wrong = file_damage(paths, manifest, path)
        if wrong:
            note(arm, f"{path}: {wrong}")
        else:
            whole[arm] = path
    return whole, {arm for arm in whole if touches(runs[arm][1].diff, CHANGES_WEIGHTS)}


def _left_out(
    runs: Runs,
    step: int,
    matrix: DistanceMatrix,
    measured: "_Measured | None",
    before: DistanceMatrix | None,
) -> LeftOut | None:
    """Return what noise moves, with the distances of it and of the rest; None if nobody can say.

    A distance is exact where it was measured, now or before, and else the sketches'.
    """
    found = noise_moved_at(runs, step, matrix)
    known = before.left_out if before else None
    same = {arm for arm in matrix.arms if before and before.parents.get(arm) == matrix.parents[arm]}
    controls = {BASELINE, *(arm for arm in matrix.arms if runs[arm][1].role == "nudge")}
    if found is None and known is not None and {*known.asked} == controls <= same:
        found = known.asked, dict(known.values)
    if found is None:
        return None
    asked, values = found
    if not values:
        return LeftOut(asked=asked, values={})
    exact = measured.parted(values) if measured else {}
    rows = {(arm, arm): (0.0, 0.0) for arm in matrix.arms}
    for one, other in combinations(matrix.arms, 2):
        both = exact.get((one, other))
        if both is None and before and known and known.values == values and {one, other} <= same:
            both = _parted_before(before, one, other)
        if both is None:
            both = _parted_by_sketch(runs, step, values, one, other)
        rows[one, other] = rows[other, one] = both
    kept, left = (
        tuple(tuple(rows[one, other][i] for other in matrix.arms) for one in matrix.arms)
        for i in (0, 1)
    )
    return LeftOut(asked=asked, values=values, kept_rows=kept, left_rows=left)


def _parted_before(before: DistanceMatrix, one: str, other: str) -> tuple[float, float] | None:
    kept, left = before.kept_between(one, other), before.left_between(one, other)
    return None if kept is None or left is None else (kept, left)


def _parted_by_sketch(
    runs: Runs, step: int, values: Mapping[str, Ranges], one: str, other: str
) -> tuple[float, float]:
    try:
        sketches = [sketched_weights(*runs[arm], step) for arm in (one, other)]
        own, others = (found for found in sketches if found)
        return own.parted_distance(others, values)
    except ValueError:  # what is missing or damaged was told of with the distance of all
        return math.nan, math.nan


def _is_dropped(paths: RunPaths, manifest: Manifest, step: int) -> bool:
    return paths.name_of(snapshot_of(paths, manifest, step)) in manifest.dropped


def _joined(
    runs: Runs,
    step: int,
    parents: Mapping[str, str],
    exact: Sequence[DistanceMatrix],
    note: Note,
) -> DistanceMatrix | None:
    """Return the distances that are known or were measured, and by sketch those that can't be.

    None if a sketch is missing that one of them needs.
    """
    sketches: dict[str, SketchedWeights] = {}
    norms: dict[str, float] = {}
    rows = {arm: dict.fromkeys(parents, 0.0) for arm in parents}
    sketched = []
    try:
        for arm in parents:
            found = sketched_weights(*runs[arm], step)
            if found is None:
                raise ValueError(f"{runs[arm][0].sketch(step)}: is missing")
            sketches[arm], norms[arm] = found, found.sketch.norm
        for matrix in exact:
            norms |= {
                arm: matrix.norms[arm] for arm in parents if matrix.parents.get(arm) == parents[arm]
            }
        for one, other in combinations(parents, 2):
            value = _exact_distance(exact, parents, one, other)
            if value is None:
                value = sketches[one].distance(sketches[other])
                sketched.append((one, other))
            rows[one][other] = rows[other][one] = value
    except ValueError as error:
        note(next(iter(parents)), f"no distances at step {step}: {error}")
        return None
    table = tuple(tuple(rows[arm].values()) for arm in parents)
    return DistanceMatrix(parents=parents, norms=norms, rows=table, sketched=tuple(sketched))


def _exact_distance(
    exact: Sequence[DistanceMatrix], parents: Mapping[str, str], one: str, other: str
) -> float | None:
    for matrix in exact:
        same = all(matrix.parents.get(arm) == parents[arm] for arm in (one, other))
        if same and (one, other) not in matrix.sketched and (other, one) not in matrix.sketched:
            return matrix.between(one, other)
    return None


def _parents(runs: Runs, file: FileOf) -> dict[int, dict[str, str]]:
    """Return by step the checksum of each arm's file, where at least two arms list one."""
    by_step: dict[int, dict[str, str]] = {}
    for arm, (paths, manifest) in runs.items():
        folder = paths.name_of(file(paths, manifest, 0).parent)
        for name, checksum in manifest.all_files.items():
            if name.startswith(f"{folder}/step-"):
                step = int(Path(name).stem.removeprefix("step-"))
                by_step.setdefault(step, {})[arm] = checksum
    return {step: by_step[step] for step in sorted(by_step) if len(by_step[step]) > 1}


def _alike(files: Mapping[str, Path], larger: Collection[str], note: Note) -> dict[str, Path]:
    """Return the files that hold the tensors that the first one holds; the `larger` arms' may more.

    The first is none of these, if there is another.
    """
    kept: dict[str, Path] = {}
    expected: dict[str, tuple[int, ...]] = {}
    for arm, path in sorted(files.items(), key=lambda item: item[0] in larger):
        shapes = _shapes(open_snapshot(path))
        expected = expected or shapes
        if shapes == expected or (arm in larger and expected.items() <= shapes.items()):
            kept[arm] = path
        else:
            note(arm, f"{path}: holds other tensors than {next(iter(kept))}; no distance to it")
    return kept


def _shapes(opened: Weights) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a file's floating-point tensors; counters and masks are no weights."""
    kinds = opened.dtypes
    return {name: opened.shapes[name] for name in sorted(opened) if kinds[name].is_floating_point}


@dataclass(frozen=True, slots=True)
class _Measured:
    """The distances between files, and what it takes to part them."""

    matrix: DistanceMatrix
    places: Mapping[str, int]
    """Which of the distinct files an arm's is."""
    rest: Tensor
    """The distances of all weights but vectors, `(files, files)`."""
    vectors: Mapping[str, Tensor]
    """By name `(files, values)`."""

    def parted(self, left_out: Mapping[str, Ranges]) -> dict[tuple[str, str], tuple[float, float]]:
        """Return by pair the distance of all but the values in `left_out`, and that of these."""
        left, kept = [], []
        for name, values in self.vectors.items():
            is_left = torch.zeros(values.shape[1], dtype=torch.bool)
            for begin, end in left_out.get(name, ()):
                is_left[begin:end] = True
            left.append(values[:, is_left])
            kept.append(values[:, ~is_left])
        count = len(self.rest)
        of_left = pairwise_l2(left, count)[1]
        of_kept = _joint(self.rest, pairwise_l2(kept, count)[1])
        return {
            (a, b): (of_kept[i, j].item(), of_left[i, j].item())
            for a, i in self.places.items()
            for b, j in self.places.items()
        }


def _measure(
    files: Mapping[str, Path], parents: Mapping[str, str], *, root_mean: bool = False
) -> _Measured:
    parents = {arm: parents[arm] for arm in files}
    # one file for all arms with the same bits
    distinct = {parents[arm]: path for arm, path in files.items()}
    order = {checksum: i for i, checksum in enumerate(distinct)}
    opened = [open_snapshot(path) for path in distinct.values()]
    shapes = _shapes(opened[0])
    apart = [] if root_mean else vector_names(shapes)
    vectors = {name: _stacked([file[name] for file in opened]) for name in apart}
    others = {name: shape for name, shape in shapes.items() if name not in vectors}
    rest_norms, rest = pairwise_l2(_parts(opened, others), len(opened))
    vector_norms, of_vectors = pairwise_l2(vectors.values(), len(opened))
    norms, rows = _joint(rest_norms, vector_norms), _joint(rest, of_vectors)
    values = sum(map(math.prod, shapes.values()))
    scale = math.sqrt(max(1, values)) if root_mean else 1.0
    places = {arm: order[checksum] for arm, checksum in parents.items()}
    table = (rows / scale).tolist()
    matrix = DistanceMatrix(
        parents=parents,
        norms={arm: norms[place].item() / scale for arm, place in places.items()},
        rows=tuple(tuple(table[i][j] for j in places.values()) for i in places.values()),
    )
    return _Measured(matrix, places, rest, vectors)


def _joint(one: Tensor, other: Tensor) -> Tensor:
    """Return the lengths of vectors of which two parts have these lengths; NaN where one is."""
    # correctly rounded: torch's `hypot` may differ in the last bit from one element to the next
    return (one.square() + other.square()).sqrt()


def _parts(opened: Sequence[Weights], shapes: Mapping[str, tuple[int, ...]]) -> Iterator[Tensor]:
    """Yield the values of all files in one order, `(files, values)` at a time."""
    for name, shape in shapes.items():
        if not shape:
            yield torch.stack([file[name].view(1).double() for file in opened])
            continue
        rows = max(1, _SLICE // max(1, math.prod(shape[1:])))
        for start in range(0, shape[0], rows):
            begin = start, *(0 for _ in shape[1:])
            sizes = min(rows, shape[0] - start), *shape[1:]
            yield _stacked([file.part(name, begin, sizes).flatten() for file in opened])


def _stacked(parts: Sequence[Tensor]) -> Tensor:
    # an arm in FP64 beside arms in FP32: all as wide as the widest
    wide = len({part.dtype for part in parts}) > 1
    return torch.stack([part.double() for part in parts] if wide else [*parts])
