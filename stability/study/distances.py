"""Measures how far the arms of a seed are from one another, once their runs have ended.

Every snapshot is read once for each step, slice by slice, so that memory holds some values of each
arm and never a whole model. Two files with one checksum are the same bits: they are read once, and
are 0 apart even where they hold NaN. Of an arm whose change adds weights those that the baseline
has too are read. What is on record already is measured again only where an arm is new or a file is
another one; where a snapshot was dropped since, by sketch. Beside the distances of all weights
stand those without the values that noise moves, where there are any; which these are is measured
once the controls are there, and is not changed by arms that come later. Leaves out the arithmetic
(`metrics.pairwise`), the rule (`analysis.left_out`), the file (`records.distances`) and what a
distance means (`analysis`).
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path

import torch
from torch import Tensor

from stability.analysis.left_out import noise_moved_at
from stability.analysis.sketch_check import SketchedWeights, sketched_weights
from stability.config.axes import CHANGES_WEIGHTS, touches
from stability.config.schema import BASELINE
from stability.metrics.noise_moved import Ranges
from stability.metrics.pairwise import pairwise_l2
from stability.records.distances import (
    DistanceMatrix,
    SeedDistances,
    read_distances,
    write_distances,
)
from stability.records.manifest import Manifest, read_manifest
from stability.records.paths import RunPaths
from stability.records.protocol import leaves_out
from stability.records.run_files import file_damage, predictions_of, snapshot_of
from stability.records.weight_files import Weights, open_snapshot

__all__ = ["update_distances"]

FileOf = Callable[[RunPaths, Manifest, int], Path]
"""Which file of a run is meant at a step."""

_SLICE = 2**20
"""Values of one arm that are in memory at a time: 4 MB in FP32, with 20 arms 80 MB."""


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
    leave_out = leaves_out(study)
    found = SeedDistances(
        seed=seed,
        weights=_update(begun, snapshot_of, known.weights, note, leave_out=leave_out),
        predictions=_update(begun, predictions_of, known.predictions, note),
    )
    if found != known:
        write_distances(study, found)
    return found


def _update(
    runs: Mapping[str, tuple[RunPaths, Manifest]],
    file: FileOf,
    known: Mapping[int, DistanceMatrix],
    note: Callable[[str, str], None],
    *,
    leave_out: bool = False,
) -> dict[int, DistanceMatrix]:
    """Return the matrix of each step at which two arms or more have the file."""
    found = {}
    for step, parents in _parents(runs, file).items():
        before = known.get(step)
        if before is not None and dict(before.parents) == parents:
            found[step] = before
            continue
        whole = {}
        for arm in parents:
            paths, manifest = runs[arm]
            path = file(paths, manifest, step)
            if paths.name_of(path) in manifest.dropped:
                continue
            wrong = file_damage(paths, manifest, path)
            if wrong:
                note(arm, f"{path}: {wrong}")
            else:
                whole[arm] = path
        larger = {arm for arm in whole if touches(runs[arm][1].diff, CHANGES_WEIGHTS)}
        kept = _alike(whole, larger, note)
        left_out = _left_out(runs, step, parents, before) if leave_out else None
        if len(kept) > 1:
            of_kept = {arm: parents[arm] for arm in kept}
            found[step] = _measure(kept, of_kept, left_out, root_mean=file is predictions_of)
        dropped = [arm for arm in parents if arm not in whole and _is_dropped(*runs[arm], step)]
        if dropped and file == snapshot_of:
            there = [arm for arm in parents if arm in kept or arm in dropped]
            exact = [matrix for matrix in (found.get(step), before) if matrix]
            joined = _joined(
                runs, step, {arm: parents[arm] for arm in there}, exact, note, left_out
            )
            found |= {step: joined} if joined else {}
    return found


def _left_out(
    runs: Mapping[str, tuple[RunPaths, Manifest]],
    step: int,
    parents: Mapping[str, str],
    before: DistanceMatrix | None,
) -> Mapping[str, Ranges] | None:
    """Return the values that noise moves, as they are on record while the controls are the same."""
    controls = {arm for arm in parents if arm == BASELINE or runs[arm][1].role == "nudge"}
    if before and all(before.parents.get(arm) == parents[arm] for arm in controls):
        return before.left_out
    found = noise_moved_at(runs, step)
    if found is None:  # what was dropped can't be asked again
        return before.left_out if before else None
    return found


def _is_dropped(paths: RunPaths, manifest: Manifest, step: int) -> bool:
    return paths.name_of(snapshot_of(paths, manifest, step)) in manifest.dropped


def _joined(
    runs: Mapping[str, tuple[RunPaths, Manifest]],
    step: int,
    parents: Mapping[str, str],
    exact: Sequence[DistanceMatrix],
    note: Callable[[str, str], None],
    left_out: Mapping[str, Ranges] | None,
) -> DistanceMatrix | None:
    """Return the distances that are known or were measured, and by sketch those that can't be.

    None if a sketch is missing that one of them needs. A sketch is of all weights.
    """
    exact = [matrix for matrix in exact if matrix.left_out == left_out]
    sketches: dict[str, SketchedWeights] = {}
    norms: dict[str, float] = {}
    rows = {arm: dict.fromkeys(parents, 0.0) for arm in parents}
    kept_rows = {arm: dict.fromkeys(parents, 0.0) for arm in parents}
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
            both = _exact_distances(exact, parents, one, other)
            if both is None:
                both = sketches[one].distance(sketches[other]), math.nan
                sketched.append((one, other))
            for a, b in ((one, other), (other, one)):
                rows[a][b], kept_rows[a][b] = both
    except ValueError as error:
        note(next(iter(parents)), f"no distances at step {step}: {error}")
        return None
    tables = [tuple(tuple(of[arm].values()) for arm in parents) for of in (rows, kept_rows)]
    return DistanceMatrix(
        parents=parents,
        norms=norms,
        rows=tables[0],
        sketched=tuple(sketched),
        left_out=left_out,
        kept_rows=tables[1] if left_out else (),
    )


def _exact_distances(
    exact: Sequence[DistanceMatrix], parents: Mapping[str, str], one: str, other: str
) -> tuple[float, float] | None:
    """Return the distance of two arms of all weights, and of those that are not left out."""
    for matrix in exact:
        same = all(matrix.parents.get(arm) == parents[arm] for arm in (one, other))
        if same and (one, other) not in matrix.sketched and (other, one) not in matrix.sketched:
            of_all, of_kept = matrix.between(one, other), matrix.kept_between(one, other)
            if of_all is not None and of_kept is not None:
                return of_all, of_kept
    return None


def _parents(
    runs: Mapping[str, tuple[RunPaths, Manifest]], file: FileOf
) -> dict[int, dict[str, str]]:
    """Return by step the checksum of each arm's file, where at least two arms list one."""
    by_step: dict[int, dict[str, str]] = {}
    for arm, (paths, manifest) in runs.items():
        folder = paths.name_of(file(paths, manifest, 0).parent)
        for name, checksum in manifest.all_files.items():
            if name.startswith(f"{folder}/step-"):
                step = int(Path(name).stem.removeprefix("step-"))
                by_step.setdefault(step, {})[arm] = checksum
    return {step: by_step[step] for step in sorted(by_step) if len(by_step[step]) > 1}


def _alike(
    files: Mapping[str, Path], larger: Collection[str], note: Callable[[str, str], None]
) -> dict[str, Path]:
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


def _measure(
    files: Mapping[str, Path],
    parents: Mapping[str, str],
    left_out: Mapping[str, Ranges] | None,
    *,
    root_mean: bool,
) -> DistanceMatrix:
    # one file for all arms with the same bits
    distinct = {parents[arm]: path for arm, path in files.items()}
    order = {checksum: i for i, checksum in enumerate(distinct)}
    opened = [open_snapshot(path) for path in distinct.values()]
    shapes = _shapes(opened[0])
    norms, kept = pairwise_l2(_parts(opened, shapes, left_out or {}), len(opened))
    matrix = kept
    if left_out:
        others = (_ranged(opened, name, ranges) for name, ranges in left_out.items())
        left_norms, left = pairwise_l2(others, len(opened))
        norms, matrix = _joint(norms, left_norms), _joint(kept, left)
    values = sum(map(math.prod, shapes.values()))
    scale = math.sqrt(max(1, values)) if root_mean else 1.0
    places = {arm: order[checksum] for arm, checksum in parents.items()}

    def rows_of(found: Tensor) -> tuple[tuple[float, ...], ...]:
        rows = (found / scale).tolist()
        return tuple(tuple(rows[i][j] for j in places.values()) for i in places.values())

    return DistanceMatrix(
        parents=dict(parents),
        norms={arm: norms[place].item() / scale for arm, place in places.items()},
        rows=rows_of(matrix),
        left_out=left_out,
        kept_rows=rows_of(kept) if left_out else (),
    )


def _joint(one: Tensor, other: Tensor) -> Tensor:
    """Return the lengths of vectors of which two parts have these lengths."""
    # torch's own may differ in the last bit from one element to the next
    pairs = zip(one.flatten().tolist(), other.flatten().tolist(), strict=True)
    return torch.tensor([math.hypot(*pair) for pair in pairs], dtype=torch.float64).view_as(one)


def _parts(
    opened: Sequence[Weights],
    shapes: Mapping[str, tuple[int, ...]],
    left_out: Mapping[str, Ranges],
) -> Iterator[Tensor]:
    """Yield the values of all files in one order, `(files, values)` at a time, less `left_out`."""
    for name, shape in shapes.items():
        if not shape:
            yield torch.stack([file[name].view(1).double() for file in opened])
            continue
        if name in left_out:
            edges = [0, *(edge for pair in left_out[name] for edge in pair), *shape]
            yield _ranged(opened, name, tuple(zip(edges[::2], edges[1::2], strict=True)))
            continue
        rows = max(1, _SLICE // max(1, math.prod(shape[1:])))
        for start in range(0, shape[0], rows):
            begin = start, *(0 for _ in shape[1:])
            sizes = min(rows, shape[0] - start), *shape[1:]
            yield _stacked([file.part(name, begin, sizes).flatten() for file in opened])


def _ranged(opened: Sequence[Weights], name: str, ranges: Ranges) -> Tensor:
    """Return the values of a vector in `ranges`, `(files, values)`."""
    return _stacked([torch.cat([file[name][a:b] for a, b in ranges]) for file in opened])


def _stacked(parts: Sequence[Tensor]) -> Tensor:
    # an arm in FP64 beside arms in FP32: all as wide as the widest
    wide = len({part.dtype for part in parts}) > 1
    return torch.stack([part.double() for part in parts] if wide else [*parts])
