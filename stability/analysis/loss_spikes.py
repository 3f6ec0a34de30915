"""Spikes of a run's training loss that the baseline of the same seed does not have.

Two runs of a seed see the same batches, so a hard batch makes both losses jump, and that says
nothing. A spike is a run's own if the other run has none within 8 steps, as far as a spike follows
its cause (arXiv 2304.13013), and was not half way to one on the same batch. Without the second
condition a loss just below the limit in one run and just above it in the other would count.

Whether own spikes are more than chance is asked seed by seed, since one bad stretch of a run makes
many spikes: of the seeds that tell the two runs apart, a coin would give each to either (McNemar's
exact test).

The rule compares a loss with the 50 before it, so nothing is seen up to there, however far a loss
jumps; in a run of 50 losses or fewer it never sees a spike. Leaves out what a spike is
(`metrics.instability`) and what follows from it.
"""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

__all__ = ["WINDOW", "SpikeTest", "loss_deviations", "own_spikes", "seen_from", "spike_test"]

DEVIATIONS = 3.2
WINDOW = 50
"""As `metrics.instability` has them, which needs torch; a test holds the two together."""
REACH = 8
"""Steps by which chaos or a different cause may move a spike that both runs have."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SpikeTest:
    """In how many seeds either run has more spikes of its own, and what chance makes of it."""

    candidate: Mapping[int, Sequence[int]]
    """The candidate's own spikes by seed: steps."""
    more: int
    """Seeds in which the candidate has more of its own than the baseline."""
    fewer: int
    p: float
    """How likely at least `more` of these seeds are if neither run is prone to spikes."""
    blind: tuple[int, ...]
    """Seeds in which a run has too few losses for any spike to be seen."""
    seen_from: int
    """The step from which on spikes are seen in all the other seeds; 0 if there are none."""

    @property
    def smallest_p(self) -> float:
        """The least that `p` could have been with as many seeds that tell the runs apart."""
        return 0.5 ** (self.more + self.fewer)


def own_spikes(losses: Mapping[int, float], others: Mapping[int, float]) -> list[int]:
    """Return the steps at which `losses` spike and `others`, the other run's by step, do not."""
    mine, theirs = loss_deviations(losses), loss_deviations(others)
    near = sorted(step for step, size in theirs.items() if size > DEVIATIONS)
    return [
        step
        for step, size in mine.items()
        if size > DEVIATIONS
        and not theirs.get(step, 0.0) > DEVIATIONS / 2
        and not _has_near(near, step)
    ]


def seen_from(losses: Mapping[int, float]) -> int | None:
    """Return the first step at which a spike of `losses` can be seen; None if there is none."""
    finite = [step for step in sorted(losses) if math.isfinite(losses[step])]
    return finite[WINDOW] if len(finite) > WINDOW else None


def spike_test(
    candidate: Mapping[int, Mapping[int, float]], baseline: Mapping[int, Mapping[int, float]]
) -> SpikeTest:
    """Return the test of the training losses by seed, then step; seeds of only one are left out."""
    seeds = [seed for seed in candidate if seed in baseline]
    own = {seed: own_spikes(candidate[seed], baseline[seed]) for seed in seeds}
    others = {seed: own_spikes(baseline[seed], candidate[seed]) for seed in seeds}
    more = sum(len(own[seed]) > len(others[seed]) for seed in seeds)
    fewer = sum(len(own[seed]) < len(others[seed]) for seed in seeds)
    told = more + fewer
    tail = sum(math.comb(told, count) for count in range(more, told + 1))
    first = {seed: (seen_from(candidate[seed]), seen_from(baseline[seed])) for seed in seeds}
    blind = tuple(seed for seed in seeds if None in first[seed])
    seen = [step for seed in seeds if seed not in blind for step in first[seed] if step is not None]
    return SpikeTest(
        candidate=own,
        more=more,
        fewer=fewer,
        p=tail / 2**told,
        blind=blind,
        seen_from=max(seen, default=0),
    )


def loss_deviations(losses: Mapping[int, float]) -> dict[int, float]:
    """Return by step how far a loss is above the mean before it, in standard deviations.

    The same as `LossSpikes` asks of each loss as it comes, for all at once: over the last
    `WINDOW` finite losses, 0 before there are so many, infinite for a loss that is not.
    """
    steps = sorted(losses)
    values = np.array([losses[step] for step in steps], np.float64)
    found = np.where(np.isfinite(values), 0.0, np.inf)
    places = np.flatnonzero(np.isfinite(values))
    if len(places) > WINDOW:
        finite = values[places]
        before = sliding_window_view(finite, WINDOW)[:-1]
        above, spread = finite[WINDOW:] - before.mean(axis=1), before.std(axis=1)
        # where the loss has become flat, anything above it stands out
        flat = np.where(above > 0, np.inf, 0.0)
        found[places[WINDOW:]] = np.divide(above, spread, out=flat, where=spread > 0)
    return dict(zip(steps, found.tolist(), strict=True))


def _has_near(steps: Sequence[int], step: int) -> bool:
    place = bisect_left(steps, step - REACH)
    return place < len(steps) and steps[place] <= step + REACH
