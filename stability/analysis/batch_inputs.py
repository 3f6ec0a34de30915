"""What of a batch differs between two runs: which of the model's inputs, and which labels.

A run whose model is given several tensors has a hash of each on record beside that of the batch,
and one of the labels that only its loss was given. Labels are compared where both runs have some: a
loss that is fused or compiled hides them. Leaves out whether the inputs differ at all
(`pair_contract`).
"""

import json
import math
from collections.abc import Mapping

from stability.records.metric_log import read_text
from stability.records.metric_names import (
    AS_NUMBERS,
    BATCH_INPUTS,
    BATCH_LABELS,
    BATCH_ORDER,
    IN_FLOATING_POINT,
)
from stability.records.paths import RunPaths

__all__ = ["first_other_labels", "first_other_order", "labels_in_one_alone", "which_inputs"]

_MAY_BE_MADE = (IN_FLOATING_POINT, AS_NUMBERS)
"""How the name of a label ends that another numeric, or another code, may have made."""


def which_inputs(baseline: RunPaths, candidate: RunPaths, step: int) -> str:
    """Return a clause that names the inputs in which both runs' batch of `step` differs.

    As " in `labels`"; empty if the record does not tell.
    """
    first, second = (read_text(x.metrics, BATCH_INPUTS).get(step) for x in (baseline, candidate))
    return _where(_differing(first, second)) if first and second else ""


def first_other_labels(
    baseline: RunPaths, candidate: RunPaths, until: float = math.inf, *, may_be_made: bool = False
) -> tuple[int, str] | None:
    """Return the first step, up to `until`, whose labels differ, and a clause that names them.

    Labels are whole numbers; with `may_be_made` it is asked of targets in floating point, which the
    script may have made with its model, and of indices, which may be its code's.
    """
    first, second = _labels(baseline), _labels(candidate)
    for step in sorted(step for step in first.keys() & second.keys() if step <= until):
        # a target that one loss alone has is another loss, which is no other batch
        names = _differing(first[step], second[step], shared=True)
        names = [name for name in names if name.endswith(_MAY_BE_MADE) == may_be_made]
        if names:
            return step, _where(names)
    return None


def first_other_order(baseline: RunPaths, candidate: RunPaths) -> int | None:
    """Return the first step whose samples came in another order, in as many calls of models.

    In others, as on other ranks or in micro-batches of another size, the order can't be the same.
    """
    first, second = (read_text(x.metrics, BATCH_ORDER) for x in (baseline, candidate))
    for step in sorted(first.keys() & second.keys()):
        one, other = (json.loads(x[step]).partition(" ") for x in (first, second))
        if one[0] == other[0] and one != other:
            return step
    return None


def labels_in_one_alone(baseline: RunPaths, candidate: RunPaths) -> str:
    """Return which labels were seen of one run alone, so that nothing is known of both; or "".

    Another loss may be given the same labels under another name.
    """
    first, second = _labels(baseline), _labels(candidate)
    reached = min(max(first, default=0), max(second, default=0))
    for step in sorted(first.keys() ^ second.keys()):
        if step <= reached or not (first and second):
            return f"those of batch {step} were seen of one run alone"
    for step in sorted(first.keys() & second.keys()):
        one, other = (json.loads(each[step]) for each in (first, second))
        if one.keys() != other.keys() and sorted(one.values()) != sorted(other.values()):
            names = (" and ".join(f"`{name}`" for name in each) or "none" for each in (one, other))
            return f"batch {step} has the {' in one, the '.join(names)} in the other"
    return ""


def _labels(paths: RunPaths) -> Mapping[int, str]:
    return read_text(paths.metrics, BATCH_LABELS) if paths.metrics.exists() else {}


def _differing(one: str, other: str, *, shared: bool = False) -> list[str]:
    if one == other:
        return []
    first, second = json.loads(one), json.loads(other)
    names = dict.fromkeys([*first, *second])
    if shared:
        names = {name: None for name in names if name in first and name in second}
    return [name for name in names if first.get(name) != second.get(name)]


def _where(names: list[str]) -> str:
    return f" in {', '.join(f'`{name}`' for name in names)}" if names else ""
