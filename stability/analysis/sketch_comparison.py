"""Two sets of weights compared by sketches, where a snapshot of either was dropped.

A sketch gives the L2 distance of all weights together, and the cosine of the angle between them;
their hashes say whether they are the same bits. Nothing is known of a single parameter, of W1 and
of signs. Weights that are there are sketched as they are read. Leaves out the comparison of weights
themselves (`weight_comparison`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from stability.analysis.sketch_check import SketchedWeights, sketched_weights
from stability.records.manifest import read_manifest
from stability.records.metric_names import ALL_WEIGHTS
from stability.records.paths import RunPaths, is_run, snapshot_steps
from stability.records.run_files import recorded_steps
from stability.records.sealed_json import jsonable

if TYPE_CHECKING:  # heavy: both import torch
    from stability.records.weight_files import Weights

__all__ = ["SketchComparison", "compare_by_sketch", "is_sketch_alone", "sketch_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SketchComparison:
    """How far the candidate a is from the reference b, as far as sketches tell."""

    a: str
    b: str
    dropped: tuple[str, ...]
    """Of a and b those whose snapshot was dropped."""
    equal: bool
    """Whether both hold the same names, shapes and bits."""
    l2: float
    rel_l2: float
    """The L2 distance over the norm of b."""
    cosine: float
    relative_sd: float
    """Of the distance, at most."""
    cosine_sd: float
    """Of the cosine, at most; far less where the two are near one another."""

    def to_dict(self) -> dict[str, object]:
        """Return JSON-able values; numbers that are not finite as strings."""
        return jsonable(
            {
                "a": self.a,
                "b": self.b,
                "drift": {ALL_WEIGHTS: {"rel_l2": self.rel_l2, "cosine": self.cosine}},
                "by_sketch": {
                    "dropped": self.dropped,
                    "equal": self.equal,
                    "l2": self.l2,
                    "relative_sd": self.relative_sd,
                    "cosine_sd": self.cosine_sd,
                },
            }
        )


def is_sketch_alone(path: Path, step: int | None) -> bool:
    """Whether `path` is a run whose snapshot of a step was dropped; None is its last step."""
    if not is_run(path):
        return False
    run = RunPaths(path)
    steps = recorded_steps(run)
    step = max(steps, default=None) if step is None else step
    return step in steps and step not in snapshot_steps(run)


def compare_by_sketch(a: tuple[Path, int | None], b: tuple[Path, int | None]) -> SketchComparison:
    """Return how far a is from b, each a path and, of a run, the step: None is its last.

    ValueError for a sketch that is damaged or missing, for weights as `open_weights`, and for
    models of other names or shapes.
    """
    from stability.metrics.weight_sketch import RELATIVE_SD  # heavy: torch

    sides = [_side(*each) for each in (a, b)]
    own, other = (side.found for side in sides)
    if own.sketch.outline != other.sketch.outline:
        raise ValueError(_other_model(sides))
    is_equal = own.weights == other.weights
    return SketchComparison(
        a=sides[0].label,
        b=sides[1].label,
        dropped=tuple(side.label for side in sides if side.weights is None),
        equal=is_equal,
        l2=own.distance(other),
        rel_l2=own.relative_distance(other),
        # of the same bits too where they are no numbers
        cosine=1.0 if is_equal and other.sketch.norm != 0 else own.sketch.cosine(other.sketch),
        relative_sd=RELATIVE_SD,
        cosine_sd=2 * RELATIVE_SD,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Side:
    """One of two that are compared."""

    path: Path
    label: str
    found: SketchedWeights
    weights: "Weights | None"
    """None where they were dropped."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes that were sketched, of a dropped snapshot those of another; or none."""
        from stability.records.weight_files import open_weights  # heavy: torch

        weights = self.weights
        if weights is None:
            there = snapshot_steps(RunPaths(self.path))
            if not there:
                return {}
            weights = open_weights(self.path, there[0])
        return {x: s for x, s in weights.shapes.items() if weights.dtypes[x].is_floating_point}


def _side(path: Path, step: int | None) -> _Side:
    from stability.records.weight_files import open_weights  # heavy: torch

    if not is_sketch_alone(path, step):
        weights = open_weights(path, step)
        return _Side(path=path, label=weights.label, found=sketch_of(weights), weights=weights)
    run = RunPaths(path)
    step = recorded_steps(run)[-1] if step is None else step
    found = sketched_weights(run, read_manifest(run.manifest), step)
    if found is None:
        raise ValueError(
            f"{run.root}: its snapshot of step {step} was dropped, and there is no sketch of it; "
            "--retrain trains it anew"
        )
    return _Side(path=path, label=f"{run.root}, step {step}", found=found, weights=None)


def sketch_of(weights: "Weights") -> SketchedWeights:
    """Return the hash and the sketch of weights on disk; one tensor is in memory at a time."""
    import torch  # heavy

    from stability.metrics.pieces import Piece, pieces_of
    from stability.metrics.weight_hash import finished_weight_hash, local_weight_hash
    from stability.metrics.weight_sketch import finished_weight_sketch, local_weight_sketch

    lanes, digits = local_weight_hash({}), local_weight_sketch({})
    outlines: dict[str, Piece] = {}
    for name in weights:
        piece = pieces_of({name: weights[name]})
        lanes += local_weight_hash(piece)
        digits += local_weight_sketch(piece)
        dtype, shape = piece[name].values.dtype, piece[name].shape
        outlines[name] = Piece(values=torch.empty(0, dtype=dtype), places=(), shape=shape)
    sketch = finished_weight_sketch(digits, outlines)
    return SketchedWeights(finished_weight_hash(lanes, outlines), sketch)


def _other_model(sides: Sequence[_Side]) -> str:
    """Return what two models differ in, as far as weights are there to tell."""
    rule = "compare: both must hold the same names and shapes where a snapshot was dropped, got "
    one, other = shapes = [side.shapes() for side in sides]
    names = dict.fromkeys([*one, *other]) if one and other else ()
    for name in names:
        if one.get(name) != other.get(name):
            got = " and ".join(str(shape.get(name, "nothing")) for shape in shapes)
            return f"{rule}{name}: {got}; --retrain trains what was dropped anew"
    return f"{rule}other ones: {sides[0].label} and {sides[1].label}"
