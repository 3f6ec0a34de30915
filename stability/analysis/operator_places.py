"""The figures that the operator level judges: of each result, in the model, each layer and head.

A figure is the error ratio, the gain or the signed error of one result at one place, over the looks
of all runs. Leaves out what the level says of them (`operator_evidence`).
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from stability.analysis.looks import (
    OperatorLimits,
    Samples,
    p_harmed,
    p_holds,
    plain_looks,
    standard_error,
)
from stability.analysis.place_table import (
    Judged,
    PlaceTable,
    joined,
    place_tables,
    samples_of,
)
from stability.analysis.sequential import look_alpha
from stability.analysis.study_records import RecordedArm
from stability.config.study import PolicyConfig

__all__ = [
    "KINDS",
    "OperatorPlace",
    "decides_holding",
    "families_of",
    "tables_of",
    "worst_places",
]

KINDS: tuple[Judged, ...] = ("error", "gain", "bias")


class OperatorPlace(NamedTuple):
    """One judged number at one place, over looks."""

    kind: Judged
    what: str
    layer: str
    """Empty for the whole model."""
    head: int | None
    mean: float
    """A factor for an error ratio, else the value in its own unit."""
    error: float
    """The standard error, of an error ratio that of its log."""
    limit: float
    p_harmed: float
    p_holds: float
    samples: Samples
    plain: int = 0
    """How many looks are plainly beyond the limit by themselves."""
    wildest: float = math.nan
    """The value that is furthest from nothing in a single look, in the unit of `mean`."""
    wildest_at: int = 0
    """The step of that look."""

    @property
    def where(self) -> str:
        """The layer, and the head in it; or the whole model."""
        if not self.layer:
            return "the mean of all layers"
        return self.layer if self.head is None else f"head {self.head} of {self.layer}"

    def interval(self, alpha: float) -> tuple[float, float]:
        """Return one-sided t-bounds of the mean at `alpha` each; NaN with fewer than two looks."""
        reach = self.reach(alpha)
        if self.kind == "error":
            return self.mean * math.exp(-min(reach, 700.0)), self.mean * math.exp(min(reach, 700.0))
        return self.mean - reach, self.mean + reach

    def reach(self, alpha: float) -> float:
        """Return how far a one-sided t-bound lies from the mean; NaN with fewer than two looks."""
        if self.looks < 2:
            return math.nan
        from scipy.special import stdtrit  # heavy: a quarter of a second

        return float(stdtrit(self.looks - 1, 1 - alpha)) * self.error

    def is_beyond(self, alpha: float) -> bool:
        """Whether the whole interval lies beyond the limit."""
        low, high = self.interval(alpha)
        return low > self.limit or (self.kind != "error" and high < -self.limit)

    @property
    def looks(self) -> int:
        """How many looks there were at this place."""
        return int(np.isfinite(self.samples.values).sum())

    @property
    def of_limit(self) -> float:
        """How many times its limit the mean is."""
        return abs(self.mean) / self.limit


def decides_holding(place: OperatorPlace, several_layers: bool) -> bool:
    """Whether a place must surely be within its limit for the level to hold."""
    if place.kind != "bias":
        return bool(place.layer)
    return place.head is None and bool(place.layer) != several_layers


def _places(
    tables: Sequence[PlaceTable], limits: OperatorLimits, family: str
) -> Iterator[OperatorPlace]:
    for table in tables:
        for kind in KINDS:
            found = samples_of(table, kind, limits)
            if found is None:
                continue
            layers, heads = found
            if family == "model" and len(table.layers) > 1:
                yield from _each(table, kind, layers.mean(axis=1), family)
            elif family == "layer":
                yield from _each(table, kind, layers, family)
            elif family == "head" and heads is not None:
                yield from _each(table, kind, heads, family)


def _each(
    table: PlaceTable, kind: Judged, samples: Samples, family: str
) -> Iterator[OperatorPlace]:
    harmed, holds, error = p_harmed(samples), p_holds(samples), standard_error(samples.values)
    with np.errstate(invalid="ignore"):
        mean = np.nansum(samples.values, 0) / np.isfinite(samples.values).sum(0)
    # a signed error scatters: single looks of right attentions are up to 29 times beyond its limit
    plain = plain_looks(samples) if kind != "bias" else np.zeros(samples.values.shape, bool)
    size = samples.values if kind == "error" else np.abs(samples.values)
    for at in np.ndindex(harmed.shape):
        if not math.isfinite(mean[at]):
            continue
        one = (slice(None), *at)
        value = float(mean[at])
        wildest = int(np.nanargmax(size[one]))
        extreme = float(samples.values[one][wildest])
        yield OperatorPlace(
            kind=kind,
            what=table.what,
            layer="" if family == "model" else table.layers[at[0]],
            head=at[1] if family == "head" else None,
            mean=math.exp(value) if kind == "error" else value,
            error=float(error[at]),
            limit=math.exp(samples.limit) if kind == "error" else samples.limit,
            p_harmed=float(harmed[at]),
            p_holds=float(holds[at]),
            samples=Samples(
                values=samples.values[one],
                limit=samples.limit,
                signed=samples.signed,
                baseline=None if samples.baseline is None else samples.baseline[one],
            ),
            plain=int(plain[one].sum()),
            wildest=math.exp(extreme) if kind == "error" else extreme,
            wildest_at=int(table.steps[wildest]),
        )


def tables_of(arm: RecordedArm) -> list[PlaceTable]:
    """Return what the probes of all of the arm's runs have measured."""
    return joined([place_tables(run.metrics) for run in arm.runs.values() if run.metrics])


def families_of(tables: Sequence[PlaceTable], limits: OperatorLimits) -> list[list[OperatorPlace]]:
    """Return the figures of the whole model, of its layers and of their heads."""
    return [list(_places(tables, limits, family)) for family in ("model", "layer", "head")]


def worst_places(arm: RecordedArm, policy: PolicyConfig) -> tuple[OperatorPlace, ...]:
    """Return of each result the worst error ratio, gain and bias, the worst of all first.

    Of places that are surely beyond their limit or that decide whether the level holds: the bias of
    a single head scatters beyond its limit in a right attention. Empty without a golden.
    """
    families = families_of(tables_of(arm), OperatorLimits.of(policy))
    alpha = look_alpha(policy.alpha)
    worst: dict[tuple[str, Judged], OperatorPlace] = {}
    for family in families:
        for one in family:
            is_sure = 3 * len(family) * one.p_harmed <= alpha
            if not (is_sure or decides_holding(one, bool(families[0]))):
                continue
            known = worst.setdefault((one.what, one.kind), one)
            if one.of_limit > known.of_limit:
                worst[one.what, one.kind] = one
    return tuple(sorted(worst.values(), key=lambda one: -one.of_limit))
