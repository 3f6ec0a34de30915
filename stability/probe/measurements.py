"""The weight W_Q that made an attention's queries, where a module has it under a usual name.

Leaves out its norm (`metrics.inside_attention`).

What a probe has gathered at one step: tensors on the device with a name for each value.

One transfer brings all of them to the host; on CUDA it runs beside the training and is waited for
only when the numbers are read. Leaves out measuring (`probe`) and logging (`callbacks`, `session`).

The probe's figures under their names: deviations of each layer, head and range of positions.

Leaves out the arithmetic (`metrics.deviation`, `metrics.inside_attention`) and when it is done
(`probe`).
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from attention_kernels.formats import input_format
from stability.config.plugins import METRICS, plugins
from stability.config.schema import ProbeConfig
from stability.metrics.deviation import (
    DEVIATION_METRICS,
    GOLDEN_METRICS,
    PART_METRICS,
    compare,
    position_ranges,
)
from stability.metrics.inside_attention import (
    INSIDE_METRICS,
    delta_gap,
    inside_tensor,
    spectral_norms,
)
from stability.probe.captured_call import Pending
from stability.records.metric_names import (
    ULP_HISTOGRAM,
    deviation_name,
    head_part,
    parse_deviation,
    positions_part,
    watch_name,
)

__all__ = ["Figures", "Finding", "Gathered", "Reading", "Transfer", "query_weight"]

_NAMES = ("query", "q_proj", "q_lin", "to_q", "wq", "q")
_FUSED = ("c_attn", "qkv", "query_key_value", "qkv_proj", "Wqkv")


def query_weight(module: nn.Module | None, rows: int) -> Tensor | None:
    """Return W_Q, `(rows, width)` with rows = heads * head_dim, of an attention module, or None.

    Known are a linear layer of its own, one fused over q, k and v in this order, as a `Linear` or
    as GPT-2's transposed `Conv1D`, and `nn.MultiheadAttention`'s `in_proj_weight`.
    """
    if module is None:
        return None
    fused = getattr(module, "in_proj_weight", None)
    if isinstance(fused, Tensor):
        return fused[:rows]
    children = dict(module.named_children())
    for name in (*_NAMES, *_FUSED):
        weight = getattr(children.get(name), "weight", None)
        if not isinstance(weight, Tensor) or weight.dim() != 2:
            continue
        if type(children[name]).__name__ == "Conv1D":
            weight = weight.T
        if weight.shape[0] == rows or (name in _FUSED and weight.shape[0] > rows):
            return weight[:rows]
    return None


class Finding(NamedTuple):
    """Something that a probe could not compare, or that is no number: a layer and a sentence."""

    layer: str
    text: str


class Reading(NamedTuple):
    """The probe's figures of one step."""

    metrics: dict[str, float]
    counts: dict[str, list[int]]
    findings: tuple[Finding, ...]


class Gathered:
    """Collects named values on the device."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._tensors: list[Tensor] = []
        self._counts: list[tuple[str, Tensor]] = []

    def add(self, names: Sequence[str], values: Tensor) -> None:
        """Take in one value a name."""
        assert len(names) == values.numel()
        self._names += names
        self._tensors.append(values.detach().double().flatten())

    def add_counts(self, name: str, counts: Tensor) -> None:
        """Take in a histogram."""
        self._counts.append((name, counts.detach().double().flatten()))

    def transfer(self, findings: Sequence[Finding]) -> "Transfer | None":
        """Start the one transfer of everything gathered, and forget it; None if there's nothing."""
        tensors = [*self._tensors, *(counts for _, counts in self._counts)]
        if not tensors and not findings:
            return None
        sizes = [(name, counts.numel()) for name, counts in self._counts]
        values = torch.cat(tensors) if tensors else torch.empty(0, dtype=torch.float64)
        made = Transfer(self._names, sizes, values, tuple(findings))
        self._names, self._tensors, self._counts = [], [], []
        return made


class Transfer:
    """Values on their way to the host."""

    def __init__(
        self,
        names: list[str],
        counts: list[tuple[str, int]],
        values: Tensor,
        findings: tuple[Finding, ...],
    ) -> None:
        self._names, self._counts, self._findings = names, counts, findings
        self._arrived = None
        if values.is_cuda:
            self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._host.copy_(values, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()
        else:
            self._host = values

    @property
    def is_here(self) -> bool:
        """Whether there is nothing to wait for, because nothing had to be moved."""
        return self._arrived is None

    def result(self) -> Reading:
        """Return the reading, once it has arrived. Values that are no numbers become findings."""
        if self._arrived is not None:
            self._arrived.synchronize()
        values = self._host.tolist()
        metrics = dict(zip(self._names, values, strict=False))
        counts, start = {}, len(self._names)
        for name, size in self._counts:
            counts[name] = [int(count) for count in values[start : start + size]]
            start += size
        return Reading(metrics, counts, (*self._findings, *_nonfinite(metrics)))


def _nonfinite(metrics: dict[str, float]) -> list[Finding]:
    found = []
    for name, value in metrics.items():
        parts = parse_deviation(name)
        if parts and parts.metric == "nonfinite" and not parts.part and value > 0:
            who = f"{parts.shadow}: " if parts.shadow else ""
            found.append(Finding(parts.layer, f"{who}{value:g} values of {parts.what} not finite"))
    return found


DELTA_SUM = "delta_gap_sum"


class Figures:
    """Measures pairs of results and gathers the numbers, named, on the device."""

    def __init__(
        self, config: ProbeConfig, shadows: Sequence[str], modules: Mapping[str, nn.Module]
    ) -> None:
        self.gathered = Gathered()
        self.findings: list[Finding] = []
        """What metrics of the user's own have failed with."""
        self._config = config
        self._modules = modules
        single = len(shadows) == 1
        self._part_of = {name: "" if single else _plain(name) for name in shadows}
        self._own_metrics = {name: entry.load() for name, entry in plugins(METRICS).items()}
        self._sums: dict[str, Tensor] = {}

    def compare(
        self,
        pending: Pending,
        what: str,
        candidate: Tensor,
        baseline: Tensor,
        golden: Tensor | None,
        shadow: str,
    ) -> None:
        """Gather all metrics of `candidate` against `baseline`, and of both against `golden`."""
        if what == "lse":  # one value a row
            candidate, baseline = candidate.unsqueeze(-1), baseline.unsqueeze(-1)
            golden = None if golden is None else golden.unsqueeze(-1)
        found = compare(
            candidate,
            baseline,
            golden=golden,
            output_format=input_format(candidate.dtype),
            valid=pending.valid,
            heads=self._config.heads,
            positions=self._config.positions,
        )
        part_of = {"shadow": self._part_of[shadow]}
        golden_metrics = () if golden is None else GOLDEN_METRICS
        names = [
            deviation_name(pending.layer, what, metric, **part_of)
            for metric in (*DEVIATION_METRICS, *golden_metrics)
        ]
        self.gathered.add(names, found.layer)
        histogram = deviation_name(pending.layer, what, ULP_HISTOGRAM, **part_of)
        self.gathered.add_counts(histogram, found.histogram)
        parts: list[tuple[list[str], Tensor]] = []
        if found.heads is not None:
            heads = [head_part(head) for head in range(len(found.heads))]
            parts.append((heads, found.heads))
        if found.positions is not None:
            ranges = position_ranges(candidate.shape[2], self._config.positions)
            parts.append(([positions_part(positions) for positions in ranges], found.positions))
        metrics = PART_METRICS if golden is None else (*PART_METRICS, "error_ratio")
        for labels, values in parts:
            names = [
                deviation_name(pending.layer, what, metric, **part_of, part=label)
                for label in labels
                for metric in metrics
            ]
            self.gathered.add(names, values)
        for metric, measure in self._own_metrics.items():
            name = deviation_name(pending.layer, what, metric, **part_of)
            try:
                self.gathered.add([name], measure(candidate, baseline, pending.valid))
            except Exception as error:  # a run must not die of a user's metric
                reason = f"{metric}: {type(error).__name__}: {error}"
                self.findings.append(Finding(pending.layer, reason))

    def compare_to_golden(
        self, pending: Pending, candidate: Tensor, golden: Tensor, shadow: str
    ) -> None:
        """Gather how far the candidate's LSE is from the golden's, relative to its norm."""
        found = compare(
            candidate.unsqueeze(-1),
            golden.unsqueeze(-1),
            output_format=input_format(candidate.dtype),
            valid=pending.valid,
        )
        name = deviation_name(
            pending.layer, "lse", "golden_candidate_rel_fro", shadow=self._part_of[shadow]
        )
        self.gathered.add([name], found.layer[DEVIATION_METRICS.index("rel_fro")])

    def look_inside(self, pending: Pending, dout: Tensor | None, candidate: Tensor | None) -> None:
        """Gather what arXiv 2510.04212 and 2309.14322 watch inside of attention."""
        q, k, _ = pending.qkv
        values = inside_tensor(q, k, mask=pending.call.mask, valid=pending.call.valid)
        names = [watch_name(metric, layer=pending.layer) for metric in INSIDE_METRICS]
        self.gathered.add(names, values)
        weight = query_weight(self._modules.get(pending.layer), q.shape[1] * q.shape[3])
        if weight is not None:
            norms = spectral_norms(weight.detach(), q.shape[1])
            names = [
                watch_name("query_norm", layer=pending.layer, part=head_part(head))
                for head in range(len(norms))
            ]
            self.gathered.add(names, norms)
        golden = pending.golden.get("out")
        if dout is None or candidate is None or golden is None:
            return
        gap = delta_gap(dout, candidate, golden, valid=pending.valid)
        total = self._sums.get(pending.layer)
        self._sums[pending.layer] = gap if total is None else total.to(gap.device) + gap
        self.gathered.add([watch_name(DELTA_SUM, layer=pending.layer)], self._sums[pending.layer])

    def sums(self) -> dict[str, float]:
        """Return the running sums of delta, by layer."""
        layers = list(self._sums)
        if not layers:
            return {}
        values = torch.stack([self._sums[layer] for layer in layers]).tolist()
        return dict(zip(layers, values, strict=True))

    def set_sums(self, sums: Mapping[str, float]) -> None:
        """Go on from sums of a checkpoint."""
        self._sums = {
            layer: torch.tensor(value, dtype=torch.float64) for layer, value in sums.items()
        }


def _plain(name: str) -> str:
    """Return a shadow's name as part of a metric's: W&B wants letters, digits and underscores."""
    return "".join(c if c.isalnum() else "_" for c in name)
