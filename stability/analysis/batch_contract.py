"""Two runs saw the same batches, and their losses the same labels, as far as both logs tell.

Leaves out which of a batch's inputs differ (`batch_inputs`), and which changes may bring other
batches (`pair_contract`).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from stability.analysis.batch_inputs import (
    first_other_labels,
    first_other_order,
    labels_in_one_alone,
    which_inputs,
)
from stability.analysis.pair_proof import ProofLine, compared
from stability.records.manifest import ENDED, Manifest
from stability.records.metric_log import read_text
from stability.records.metric_names import BATCH_HASH
from stability.records.paths import RunPaths

__all__ = ["batch_line", "first_other_batch", "label_lines"]


def batch_line(
    first: RunPaths, second: RunPaths, manifests: Sequence[Manifest], *, is_free: bool
) -> ProofLine:
    """Compare the running hash of the batches step by step; `is_free` where they may differ.

    Of trainings that have ended every update's must have been seen.
    """
    if not (first.metrics.exists() and second.metrics.exists()):
        return compared("batches", None, None)
    a, b = (read_text(paths.metrics, BATCH_HASH) for paths in (first, second))
    # a run that is still going is a pair as far as both have come
    shared = sorted(a.keys() & b.keys())
    other = first_other_batch(a, b, shared)
    if other is not None:
        where = which_inputs(first, second, other)
        return compared(f"batch {other}{where}", a[other], b[other], is_free=is_free)
    if not shared:
        return compared("batches", None, None)
    last = shared[-1]
    line = compared(f"batches up to step {last}", a[last], b[last])
    if is_free:
        return line
    made = min(x.step if x.state in ENDED else last for x in manifests)
    if last < made:
        updates = f"update {made}" if last + 1 == made else f"updates {last + 1} to {made}"
        says = f"the same batches (of {updates}, whose input was not seen)"
        return replace(line, sameness="unknown", says=says)
    turned = first_other_order(first, second)
    if turned is not None:
        says = f"the same batches (that of step {turned} has the same rows in another order)"
        return replace(line, sameness="unknown", says=says)
    return line


def label_lines(
    first: RunPaths,
    second: RunPaths,
    manifests: Sequence[Manifest],
    *,
    is_free: bool,
) -> Iterator[ProofLine]:
    """Compare what only the losses of two recorded runs were given, as far as that was seen."""
    other = first_other_labels(first, second)
    made = first_other_labels(first, second, may_be_made=True)
    if is_free:
        if other:
            yield compared(f"batch {other[0]}{other[1]}", "given", "others", is_free=True)
        return
    untold = sorted({each for x in manifests for each in x.resolved.get("untold", ())})
    if other:
        yield compared(f"batch {other[0]}{other[1]}", "given", "others")
    elif said := labels_in_one_alone(first, second):
        yield replace(
            compared("labels that only the loss was given", None, None),
            says=f"the same labels ({said})",
        )
    elif made:
        yield replace(
            compared("labels that only the loss was given", None, None),
            says=f"the same targets (those of batch {made[0]}{made[1]} differ, which may be the "
            "data or made with the model)",
        )
    if untold:
        yield replace(
            compared("what the loss was given", None, None),
            says=f"the same labels ({', '.join(untold)} was not seen)",
        )


def first_other_batch(
    first: Mapping[int, str], second: Mapping[int, str], steps: Iterable[int]
) -> int | None:
    """Return the first of `steps` at which two runs' hashes of batches differ, or one has none."""
    return next((step for step in steps if first.get(step) != second.get(step)), None)
