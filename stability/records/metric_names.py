"""The names of metrics, the same in the metric log, in W&B and in the report.

`train/loss`, `eval/loss`, `deviation/<layer>/<what>/<metric>`,
`gradient/<group or "all">/<metric>`, `drift/<parameter or "all">/<metric>`, `watch/<name>` and
`watch/<layer>/<name>`. A deviation's name has one part more for a single head (`head_3`) or a range
of positions (`positions_0_63`), and one for the shadow if a probe has several.
`weights/all/histogram` holds counts. Leaves out what a metric says and how it is drawn
(`metric_table`).
"""

import re
from collections.abc import Iterable
from typing import NamedTuple

__all__ = [
    "ALL_WEIGHTS",
    "AS_NUMBERS",
    "AS_TRAINED",
    "BATCH_HASH",
    "BATCH_INPUTS",
    "BATCH_LABELS",
    "BATCH_ORDER",
    "COMPARED",
    "DRIFTS",
    "DRIFT_FROM",
    "DRIFT_OF",
    "ENTRIES",
    "EVAL_LOSS",
    "IN_FLOATING_POINT",
    "NAME_PARTS",
    "NONFINITE_WEIGHTS",
    "STEP_AXIS",
    "TRAIN_LOSS",
    "ULP_HISTOGRAM",
    "WEIGHT_HISTOGRAM",
    "DeviationName",
    "DriftName",
    "GradientName",
    "at_batch",
    "at_rank",
    "deviation_name",
    "drift_name",
    "gradient_name",
    "head_part",
    "in_order",
    "is_made_here",
    "of_rank",
    "parse_deviation",
    "parse_drift",
    "parse_gradient",
    "positions_part",
    "watch_name",
    "without_batch",
]

TRAIN_LOSS = "train/loss"
EVAL_LOSS = "eval/loss"
"""On text that no arm trains on, the same batches for all: nats a token."""
ALL_WEIGHTS = "all"
"""Stands for every parameter pooled, where a name has a parameter or a group of them."""
AS_TRAINED = "_as_trained"
"""Ends the name of a gradient metric that was measured in the run's own precision throughout."""
BATCH_HASH, BATCH_INPUTS = "batch_hash", "batch_inputs"
BATCH_LABELS, BATCH_ORDER = "batch_labels", "batch_order"
AS_NUMBERS = ", numbers of the script"
"""Ends the name of indices, which are no tensor, as `recorder.inside.loss_targets` names them."""
IN_FLOATING_POINT = ", in floating point"
"""Ends the name of a target that is no whole number, as it is named there."""
DRIFTS = "drift/"
"""How the names of drifts begin."""
DRIFT_OF, DRIFT_FROM = "drift_of", "drift_from"

ENTRIES = {
    "step": "how many updates the weights have had that the line is of",
    "crc": "CRC-32 of what stands before it in the line",
    "event": "of an event: `finding` or `alert`",
    "layer": "of an event: the layer, empty for the whole run",
    "text": "of an event: what happened, in words",
    BATCH_HASH: "running hash of every batch so far",
    BATCH_INPUTS: "as JSON, a hash of each input of this batch, where there are several",
    BATCH_LABELS: "as JSON, a hash of each target that only the loss was given, with the samples "
    "it was for",
    BATCH_ORDER: "how often models were called in an update on each rank, and a hash of the "
    "samples in order",
    DRIFT_OF: "SHA-256 of the run's own snapshot, which the drifts of the line were computed of",
    DRIFT_FROM: "SHA-256 of the baseline's snapshot, which they were computed from",
}
"""What a line of the metric log holds besides metrics; W&B gets the step of these, and of
an alert its layer and text."""

STEP_AXIS = "trainer/global_step"
"""W&B's x axis: the number of optimizer updates made before the measurement."""

COMPARED = {
    "out": "output, on the same inputs",
    "lse": "log-sum-exp, on the same inputs",
    "dq": "gradient of q, under the same gradient of the output",
    "dk": "gradient of k, under the same gradient of the output",
    "dv": "gradient of v, under the same gradient of the output",
    "dbias": "gradient of what is added to the scores, under the same gradient of the output",
    "dsinks": "gradient of the sinks, under the same gradient of the output",
    "carried": "candidate on its own stream's inputs against candidate on the baseline's",
    "total": "candidate in its own stream against baseline in its own",
}
"""What is compared of an attention. `out` is error made in the layer, `carried` what earlier layers
brought in, `total` both. Of other modules it is `out`, or `out_<key>` of several results, and
`d<argument>` and `d<parameter>`, e.g. `dx`, `dweight`."""

NAME_PARTS = {
    "METRIC": "a name of the table below the heading; of a deviation also that of a metric of "
    "one's own",
    "PARAMETER": "a parameter, or `all` of them pooled",
    "LAYER": "a layer; `LAYER@batch1` is its call of a step's second micro-batch, and in reports "
    "`LAYER@rank1` that of rank 1",
    "SHADOW": "the shadow that is compared, where a probe has several",
    "PART": "`head_N`, or `positions_FIRST_LAST`; left out for the whole layer",
    "RESULT": "what is compared of an attention; of other modules `out`, or `out_KEY` of several "
    "results, and `dARGUMENT` and `dPARAMETER`",
    "GROUP": "a group of parameters, or `all` of them",
}
"""What stands in a name in the place of a word in capitals."""

_INHERITED = ("carried", "total")

ULP_HISTOGRAM = "ulp_histogram"
"""The metric whose value is a list of counts, not a number."""

WEIGHT_HISTOGRAM = "weights/all/histogram"
"""Counts of all weights by value, in the bins of `metrics.weight_counts`."""
NONFINITE_WEIGHTS = "weights/all/nonfinite"
"""How many weights are NaN or infinite."""

_PART = re.compile(r"head_\d+|positions_\d+_\d+")


class DeviationName(NamedTuple):
    """The parts of a deviation's name; `part` is "" for the whole layer."""

    layer: str
    what: str
    metric: str
    shadow: str = ""
    part: str = ""


class DriftName(NamedTuple):
    """The parts of a drift's name."""

    parameter: str
    metric: str


class GradientName(NamedTuple):
    """The parts of a gradient metric's name; the group is "all" for the whole model."""

    group: str
    metric: str


def deviation_name(layer: str, what: str, metric: str, *, shadow: str = "", part: str = "") -> str:
    """Return the name of a deviation; `what` is as in `COMPARED`, the layer has no "/"."""
    return "/".join(("deviation", layer, *filter(None, (shadow, part)), what, metric))


def in_order(results: Iterable[str]) -> list[str]:
    """Return what was compared, once each: an attention's in the order of `COMPARED`, then others.

    Of these the results come before the gradients, else in the order in which they are given.
    """
    found = dict.fromkeys(results)
    others = [what for what in found if what not in COMPARED]
    known = [what for what in COMPARED if what in found]
    return known + sorted(others, key=lambda what: not what.startswith("out"))


def is_made_here(what: str) -> bool:
    """Whether a result is compared on the same inputs, so that its error is the layer's own."""
    return what not in _INHERITED


def head_part(head: int) -> str:
    """Return the part of a name that means one query head (for dk and dv, one kv head)."""
    return f"head_{head}"


def positions_part(positions: range) -> str:
    """Return the part of a name that means these positions in the sequence."""
    return f"positions_{positions.start}_{positions.stop - 1}"


def drift_name(parameter: str, metric: str) -> str:
    """Return the name of a drift; `parameter` is "all" for the pooled weights."""
    return f"{DRIFTS}{parameter}/{metric}"


def gradient_name(group: str, metric: str, *, as_trained: bool = False) -> str:
    """Return the name of a metric of the gradient of a group of parameters, or of "all"."""
    return f"gradient/{group}/{metric}{AS_TRAINED if as_trained else ''}"


def watch_name(name: str, *, layer: str = "", part: str = "") -> str:
    """Return the name of a watched figure of the run, of a layer, or of a head of a layer."""
    return "/".join(("watch", *filter(None, (layer, part)), name))


def of_rank(name: str, rank: int) -> str:
    """Return the name of a layer's or a group's metric on one of several ranks: `layer@rank1`."""
    first, *others = name.split("/")
    return "/".join([first, at_rank(others[0], rank), *others[1:]]) if others else name


def at_batch(layer: str, batch: int) -> str:
    """Return what the layer's call of a later micro-batch of a step is named, counted from 0."""
    return f"{layer}@batch{batch}"


def without_batch(layer: str) -> str:
    """Return the layer of a call that `at_batch` may have named."""
    return re.sub(r"@batch\d+", "", layer)


def at_rank(layer: str, rank: int) -> str:
    """Return what a layer is called where several ranks have it."""
    return f"{layer}@rank{rank}"


def parse_deviation(name: str) -> DeviationName | None:
    """Return the parts of a deviation's name, None for any other name."""
    head, *parts = name.split("/")
    if head != "deviation" or not 3 <= len(parts) <= 5:
        return None
    layer, *middle, what, metric = parts
    part = middle.pop() if middle and _PART.fullmatch(middle[-1]) else ""
    if len(middle) > 1:
        return None
    return DeviationName(layer, what, metric, middle[0] if middle else "", part)


def parse_drift(name: str) -> DriftName | None:
    """Return the parts of a drift's name, None for any other name."""
    head, _, rest = name.partition("/")
    parts = rest.rsplit("/", 1)
    return DriftName(*parts) if head == "drift" and len(parts) == 2 else None


def parse_gradient(name: str) -> GradientName | None:
    """Return the parts of a gradient metric's name, None for any other name."""
    head, *parts = name.split("/")
    return GradientName(*parts) if head == "gradient" and len(parts) == 2 else None
