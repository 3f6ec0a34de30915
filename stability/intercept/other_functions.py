"""Finds layers that compute something else than their golden does, so that no figure means a thing.

There golden and candidate agree on what the call says, e.g. by its arguments, and the model does
something else, e.g. with a mask that is no argument. Such an error is far beyond what any format
explains. Leaves out how errors are measured (`metrics.golden_error`).
"""

import math
from collections.abc import Iterator, Mapping

from stability.probe.measurements import ProbeFinding
from stability.records.metric_names import parse_deviation

__all__ = ["OtherFunctions"]

_OTHER_FUNCTION = 0.3
"""A relative error of out that no format explains (e4m3 errs by 0.03): another mask does, 0.8."""
_NOT_FINITE = "golden_baseline_rel_fro", "golden_nonfinite"
"""The metric that is judged, and that which counts the candidate's values that are not finite."""


class OtherFunctions:
    """Tells of each such layer once."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def found(self, metrics: Mapping[str, float]) -> Iterator[ProbeFinding]:
        """Yield a finding for each layer of a step's `metrics` that was not told before."""
        for name, value in metrics.items():
            parsed = parse_deviation(name)
            if (
                parsed is None
                or (parsed.what, parsed.metric) != ("out", "golden_baseline_rel_fro")
                or parsed.part
                or parsed.layer in self._told
            ):
                continue
            text = ""
            if value > _OTHER_FUNCTION:
                text = (
                    f"the model's own out is {value:.2g} away from FP64, relative to it: it "
                    "computes something else than its call says, e.g. with a mask that is not an "
                    "argument; no figure of this layer can be trusted"
                )
            # values count where candidate, model and FP64 are all finite: the candidate's are told
            elif math.isnan(value) and not metrics[name.replace(*_NOT_FINITE)]:
                text = (
                    "nothing is compared: all rows are padding or see no key, or not one value of "
                    "the model's own out is finite beside FP64's"
                )
            if text:
                self._told.add(parsed.layer)
                yield ProbeFinding(parsed.layer, text)
