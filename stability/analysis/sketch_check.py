"""Checks by sketch what snapshots can no longer prove, once they were dropped.

A sketch says how far two sets of weights are apart to 0.28 % of one standard deviation
(`metrics.weight_sketch`), and equal weights have equal hashes. So a number on record that is off by
more than five of them is not that of the weights. Leaves out when snapshots are dropped
(`study.storage`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from stability.records.manifest import Manifest
from stability.records.paths import RunPaths
from stability.records.run_files import file_damage
from stability.records.weight_sketches import read_weight_sketch

if TYPE_CHECKING:
    from torch import Tensor

    from stability.metrics.weight_sketch import WeightSketch

__all__ = ["TOLERANCE", "SketchedWeights", "agrees", "sketched_weights"]

TOLERANCE = 5 / math.sqrt(2 * 2**16)
"""Relative, of an L2 distance or norm: five of its `RELATIVE_SD`."""
_ROUNDING = 2.0**-50
"""Of the weights' norm: what is nearer to 0 is not told from the rounding of sketches."""


@dataclass(frozen=True, slots=True)
class SketchedWeights:
    """The hash and the sketch of a run's weights at one step."""

    weights: str
    sketch: "WeightSketch"
    vectors: "Mapping[str, Tensor] | None" = None
    """The weights of one dimension, as they are; None where they are not on record."""

    def distance(self, other: "SketchedWeights") -> float:
        """Return the L2 distance, 0 for the same bits even where they are no numbers.

        ValueError if the two are of models with other names or shapes.
        """
        return 0.0 if self.weights == other.weights else self.sketch.distance(other.sketch)

    def parted_distance(
        self, other: "SketchedWeights", left_out: Mapping[str, Sequence[tuple[int, int]]]
    ) -> tuple[float, float]:
        """Return the distance of all but the values in `left_out`, and the exact one of these.

        Ranges of vectors stand by name. NaN if a vector is not there; ValueError as `distance`.
        """
        import torch  # heavy

        from stability.metrics.weight_sketch import weight_sketch  # heavy: torch

        if self.weights == other.weights:
            return 0.0, 0.0
        own, others = self.vectors or {}, other.vectors or {}
        if not left_out.keys() <= own.keys() & others.keys():
            return math.nan, math.nan
        apart = {}
        for name, ranges in left_out.items():
            one, two = own[name].double(), others[name].double()
            apart[name] = torch.zeros_like(one)
            for begin, end in ranges:
                apart[name][begin:end] = one[begin:end] - two[begin:end]
        left = math.sqrt(math.fsum(float(x.square().sum()) for x in apart.values()))
        # linear: the sketch of a part is taken from that of the whole
        rest = replace(self.sketch, buckets=self.sketch.buckets - weight_sketch(apart).buckets)
        return rest.distance(other.sketch), left

    def relative_distance(self, origin: "SketchedWeights") -> float:
        """Return the L2 distance over the norm of `origin`; infinite where only that is 0."""
        distance, norm = self.distance(origin), origin.sketch.norm
        if distance == 0:
            return 0.0
        return distance / norm if norm else math.inf


def sketched_weights(paths: RunPaths, manifest: Manifest, step: int) -> SketchedWeights | None:
    """Return what is on record of a run's weights; None where it has no sketch of them.

    ValueError, naming the file, for one that is damaged.
    """
    from stability.metrics.weight_sketch import WeightSketch  # heavy: torch

    path = paths.sketch(step)
    if paths.name_of(path) not in manifest.files:
        return None
    wrong = file_damage(paths, manifest, path)
    if wrong:
        raise ValueError(f"{path}: {wrong}")
    found = read_weight_sketch(path)
    sketch = WeightSketch(buckets=found.buckets, outline=found.outline, outside=found.outside)
    return SketchedWeights(found.weights, sketch, found.vectors)


def agrees(told: float, estimate: float, *, errors: int = 1, norm: float = 1.0) -> bool:
    """Whether a number on record can be that of the weights whose sketches give `estimate`.

    `errors` is how many estimates of a length are in it, and `norm` the weights', in its unit.
    Where the sketches say nothing, a NaN, it can.
    """
    if math.isnan(estimate) or told == estimate:
        return True
    # "not above": a NaN on record is no distance of weights that have one
    return abs(told - estimate) <= errors * TOLERANCE * estimate + _ROUNDING * norm
