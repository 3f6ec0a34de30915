"""What may show a harm that was planted and is not seen in the weights: another step, or nothing.

An arm that is broken on purpose has to be found beyond the limit. Where its own estimate is within
it, more seeds would only make that surer. Leaves out arms in question, of which it is asked whether
they are within (`training_evidence`).
"""

import math
from collections.abc import Mapping

from stability.analysis.excess import excess_at
from stability.analysis.number_text import three_figures
from stability.analysis.window import Window
from stability.records.distances import SeedDistances

__all__ = ["HARDLY", "what_may_show"]

HARDLY = "more seeds would hardly show it"
"""How it begins that more seeds are no help."""


def what_may_show(
    arm: str,
    reference: str,
    limit: float,
    window: Window,
    window_limit: float,
    distances: Mapping[int, SeedDistances],
) -> str:
    """Return at which step `arm` may be found beyond `limit`, as the end of `To decide it:`.

    Asked are the steps up to the one that is judged, at which no control is farther than
    `window_limit`. A step that is picked by what an arm did there is judged by other seeds.
    """
    steps = [step for step in window.log_excess if step <= window.step]
    calm = [step for step in steps if window.largest_at(step) <= window_limit]
    found = {step: each for step in calm if (each := _excess(arm, reference, step, distances))}
    within = f"{HARDLY}, since its E is estimated within the limit at step {window.step}"
    if not found:
        return within
    best = max(found, key=lambda step: found[step])
    value = three_figures(found[best])
    if found[best] > limit:
        return (
            f"{within}; at step {best} it is {value}: policy.step, in a study of another name and "
            "with other seeds"
        )
    return (
        f"{within}, as at any before it at which controls stay near 1 ({value} at most, at step "
        f"{best}); noise may hide it"
    )


def _excess(
    arm: str, reference: str, step: int, distances: Mapping[int, SeedDistances]
) -> float | None:
    """Return the geometric mean of E over all seeds; None if one has none."""
    logs = []
    for recorded in distances.values():
        matrix = recorded.weights.get(step)
        value = excess_at(matrix, arm, reference) if matrix else None
        if not value or not math.isfinite(value):
            return None
        logs.append(math.log(value))
    return math.exp(math.fsum(logs) / len(logs))
