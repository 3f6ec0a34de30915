"""What the probe measures at one step, from the arithmetic on the device to numbers on the host.

`DeviationMeter` compares results and names each value, `MeasurementBuffer` keeps them on the
device, `HostTransfer` brings all layers' values over in one copy. A copy for each value would make
the host wait for the device some hundred times a step; on CUDA this one runs beside the training
and is waited for only when the numbers are read. Leaves out the arithmetic (`metrics.deviation`,
`metrics.inside_attention`), when to measure (`attention_probe`), and logging.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from threading import Lock
from typing import NamedTuple

import torch
from torch import Tensor, nn

from attention_kernels.formats import format_named, input_format
from stability.config.plugins import METRICS, plugins
from stability.config.schema import ProbeConfig
from stability.metrics.deviation import (
    LAYER_COLUMNS,
    PART_COLUMNS,
    Comparison,
    compare,
    position_ranges,
)
from stability.metrics.golden_error import GOLDEN_COLUMNS, PART_GOLDEN_COLUMNS
from stability.metrics.inside_attention import (
    INSIDE_METRICS,
    delta_gap,
    inside_tensor,
    spectral_norms,
)
from stability.probe.captured_call import CapturedCall
from stability.records.metric_names import (
    ULP_HISTOGRAM,
    deviation_name,
    head_part,
    parse_deviation,
    positions_part,
    watch_name,
    without_batch,
)

__all__ = ["DeviationMeter", "HostTransfer", "ProbeFinding", "StepMeasurements", "query_weight"]

DELTA_SUM, QUERY_NORM = "delta_gap_sum", "query_norm"
"""What is watched of a layer besides `INSIDE_METRICS`, and of a head, as `metric_table` says it."""
OF_THE_MASK = ("dbias", "dsinks")
"""The gradients that are not those of q, k and v."""


class ProbeFinding(NamedTuple):
    """A fact about an implementation in words, e.g. that a layer could not be compared, and why."""

    layer: str
    text: str


class StepMeasurements(NamedTuple):
    """What the probe measured at one step: values and histograms by name, and findings."""

    metrics: dict[str, float]
    counts: dict[str, list[int]]
    findings: tuple[ProbeFinding, ...]

    def watched(self) -> dict[str, float]:
        """Return the values that have published thresholds: `watch/...`."""
        return {name: x for name, x in self.metrics.items() if name.startswith("watch/")}


class MeasurementBuffer:
    """Collects named values on the device; threads that run the model may add to it at once."""

    def __init__(self) -> None:
        # names and values run in parallel: what belongs together is added together
        self._lock = Lock()
        self._names: list[str] = []
        self._values: list[Tensor] = []
        self._counts: list[tuple[str, Tensor]] = []

    def add(self, names: Sequence[str], values: Tensor) -> None:
        """Add one value a name."""
        assert len(names) == values.numel()
        # all in one dtype, so that one tensor can carry them to the host
        flat = values.detach().double().flatten()
        with self._lock:
            self._names += names
            self._values.append(flat)

    def add_counts(self, name: str, counts: Tensor) -> None:
        """Add a histogram."""
        # FP64 holds counts exactly up to 2^53, so they can travel with the values
        self._counts.append((name, counts.detach().double().flatten()))

    def transfer(self, findings: Sequence[ProbeFinding]) -> "HostTransfer | None":
        """Empty the buffer into one transfer to the host; None if there is nothing to report."""
        with self._lock:
            names, added, histograms = self._names, self._values, self._counts
            self._names, self._values, self._counts = [], [], []
        tensors = [*added, *(counts for _, counts in histograms)]
        if not tensors and not findings:
            return None
        sizes = [(name, counts.numel()) for name, counts in histograms]
        values = torch.cat(tensors) if tensors else torch.empty(0, dtype=torch.float64)
        return HostTransfer(names, sizes, values, tuple(findings))


class HostTransfer:
    """One step's measurements on their way to the host."""

    def __init__(
        self,
        names: list[str],
        counts: list[tuple[str, int]],
        values: Tensor,
        findings: tuple[ProbeFinding, ...],
    ) -> None:
        self._names, self._counts, self._findings = names, counts, findings
        self._arrived = None
        if values.is_cuda:
            # into pageable memory the copy would be synchronous
            self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._host.copy_(values, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()
        else:
            self._host = values

    @property
    def is_here(self) -> bool:
        """Whether nothing had to be copied, so that reading never waits."""
        return self._arrived is None

    def result(self) -> StepMeasurements:
        """Wait for the values and return them. Tensors with values that are not finite become
        findings.
        """
        if self._arrived is not None:
            self._arrived.synchronize()
        values = self._host.tolist()
        # the values come first; the histograms behind them are cut out below
        metrics = dict(zip(self._names, values, strict=False))
        counts, start = {}, len(self._names)
        for name, size in self._counts:
            counts[name] = [int(count) for count in values[start : start + size]]
            start += size
        return StepMeasurements(metrics, counts, (*self._findings, *_nonfinite(metrics)))


def _nonfinite(metrics: dict[str, float]) -> list[ProbeFinding]:
    findings = []
    for name, value in metrics.items():
        parts = parse_deviation(name)
        # heads and ranges are part of the layer's own count
        if parts and parts.metric == "nonfinite" and not parts.part and value > 0:
            who = f"{parts.shadow}: " if parts.shadow else ""
            text = f"{who}{value:g} values of {parts.what} not finite"
            findings.append(ProbeFinding(parts.layer, text))
    return findings


class DeviationMeter:
    """Compares captured calls with their shadows and golden, into a `MeasurementBuffer`."""

    def __init__(
        self, config: ProbeConfig, shadows: Sequence[str], modules: Mapping[str, nn.Module]
    ) -> None:
        self.buffer = MeasurementBuffer()
        self.findings: list[ProbeFinding] = []
        """Errors that metrics of the user's own have raised."""
        self._config = config
        self._modules = modules
        single = len(shadows) == 1
        self._name_of_shadow = {name: "" if single else _metric_part(name) for name in shadows}
        self._user_metrics = {name: entry.load() for name, entry in plugins(METRICS).items()}
        self._delta_sums: dict[str, Tensor] = {}

    def compare(
        self,
        captured: CapturedCall,
        what: str,
        candidate: Tensor,
        baseline: Tensor,
        golden: Tensor | None,
        shadow: str,
    ) -> None:
        """Measure `candidate` against `baseline`, and both against `golden`, by every metric."""
        golden_ulp, valid = 0.0, captured.valid
        if valid is not None and what in ("dk", "dv") and valid.shape[-1] != candidate.shape[2]:
            valid = None  # a key is not a query's own token
        if what in OF_THE_MASK:
            # a sum over the batch where they are shared, in which no row is one of padding
            candidate, baseline = _rank_4(candidate), _rank_4(baseline)
            golden, valid = None if golden is None else _rank_4(golden), None
        if what == "lse":  # one value a row
            candidate, baseline = candidate.unsqueeze(-1), baseline.unsqueeze(-1)
            golden = None if golden is None else golden.unsqueeze(-1)
            # its error is a relative one of each probability, which is of the inputs' format
            golden_ulp = 2.0 ** -format_named(input_format(captured.call.q.dtype)).mantissa_bits
        compared = compare(
            candidate,
            baseline,
            golden=golden,
            # ULPs of the format it is stored in: in a wider one the rounding that no result of that
            # format can avoid would look large
            output_format=input_format(candidate.dtype),
            valid=valid,
            heads=self._config.heads,
            positions=self._config.positions,
            golden_ulp=golden_ulp,
        )

        names = partial(self._names, captured.layer, what, shadow)
        self.add(captured.layer, what, compared, golden is not None, shadow)
        part_golden = () if golden is None else PART_GOLDEN_COLUMNS
        part_metrics = (*PART_COLUMNS, *part_golden)
        for parts, values in self._parts(compared, candidate.shape[2]):
            self.buffer.add(names(part_metrics, parts), values)
        for metric, measure in self._user_metrics.items():
            try:
                self.buffer.add(names([metric]), measure(candidate, baseline, valid))
            except Exception as error:  # a run must not die of a user's metric
                reason = f"{metric}: {type(error).__name__}: {error}"
                self.findings.append(ProbeFinding(captured.layer, reason))

    def add(
        self, layer: str, what: str, compared: Comparison, has_golden: bool, shadow: str
    ) -> None:
        """Add the metrics of a whole layer, which `metrics.deviation.compare` has returned."""
        # names must run parallel to the columns
        metrics = (*LAYER_COLUMNS, *(GOLDEN_COLUMNS if has_golden else ()))
        self.buffer.add(self._names(layer, what, shadow, metrics), compared.layer)
        self.buffer.add_counts(
            self._names(layer, what, shadow, [ULP_HISTOGRAM])[0], compared.histogram
        )

    def _names(
        self,
        layer: str,
        what: str,
        shadow: str,
        metrics: Iterable[str],
        parts: Iterable[str] = ("",),
    ) -> list[str]:
        of_shadow = self._name_of_shadow[shadow]
        return [
            deviation_name(layer, what, metric, shadow=of_shadow, part=part)
            for part in parts
            for metric in metrics
        ]

    def _parts(self, compared: Comparison, length: int) -> list[tuple[list[str], Tensor]]:
        """Return the names and values of heads and of ranges of positions, where asked for."""
        parts = []
        if compared.heads is not None:
            parts.append(([head_part(head) for head in range(len(compared.heads))], compared.heads))
        if compared.positions is not None:
            ranges = position_ranges(length, self._config.positions)
            parts.append(([positions_part(one) for one in ranges], compared.positions))
        return parts

    def compare_lse_to_golden(
        self, captured: CapturedCall, candidate: Tensor, golden: Tensor, shadow: str
    ) -> None:
        """Measure the distance of the candidate's LSE from the golden's, relative to its norm."""
        compared = compare(
            candidate.unsqueeze(-1),
            golden.unsqueeze(-1),
            output_format=input_format(candidate.dtype),
            valid=captured.valid,
        )
        name = deviation_name(
            captured.layer, "lse", "golden_candidate_rel_fro", shadow=self._name_of_shadow[shadow]
        )
        self.buffer.add([name], compared.layer[LAYER_COLUMNS.index("rel_fro")])

    def measure_inside(
        self, captured: CapturedCall, dout: Tensor | None, candidate: Tensor | None
    ) -> None:
        """Measure what arXiv 2510.04212 and 2309.14322 watch inside of attention.

        `candidate` is the candidate's out; with it, `dout` and the golden's out, the error of
        delta = rowsum(dO * O) is added to the layer's running sum.
        """
        q, k, _ = captured.qkv
        values = inside_tensor(q, k, mask=captured.call.mask_with(), valid=captured.call.valid)
        self.buffer.add(
            [watch_name(metric, layer=captured.layer) for metric in INSIDE_METRICS], values
        )
        weight = query_weight(
            self._modules.get(without_batch(captured.layer)), q.shape[1] * q.shape[3]
        )
        if weight is not None:
            norms = spectral_norms(weight.detach(), q.shape[1])
            names = [
                watch_name(QUERY_NORM, layer=captured.layer, part=head_part(head))
                for head in range(len(norms))
            ]
            self.buffer.add(names, norms)
        golden = captured.golden.get("out")
        if dout is None or candidate is None or golden is None:
            return
        # summed over steps, an unbiased error averages out and a biased one grows
        gap = delta_gap(dout, candidate, golden, valid=captured.valid)
        total = self._delta_sums.get(captured.layer)
        # a sum that was read from a checkpoint lies on the CPU
        total = gap if total is None else total.to(gap.device) + gap
        self._delta_sums[captured.layer] = total
        self.buffer.add([watch_name(DELTA_SUM, layer=captured.layer)], total)

    def state_dict(self) -> dict[str, float]:
        """Return the running sums of delta's error, by layer."""
        layers = list(self._delta_sums)
        if not layers:
            return {}
        # one wait for the device, not one a layer
        values = torch.stack([self._delta_sums[layer] for layer in layers]).tolist()
        return dict(zip(layers, values, strict=True))

    def load_state_dict(self, sums: Mapping[str, float]) -> None:
        """Continue from a checkpoint's sums."""
        self._delta_sums = {
            layer: torch.tensor(value, dtype=torch.float64) for layer, value in sums.items()
        }


def _rank_4(x: Tensor) -> Tensor:
    """Return the gradient of a bias, or of sinks `(heads,)`, with an axis of heads."""
    return x[None, :, None, None] if x.dim() == 1 else x.reshape((1,) * (4 - x.dim()) + x.shape)


def _metric_part(name: str) -> str:
    """Return a shadow's name as part of a metric's: W&B wants letters, digits and underscores."""
    return "".join(c if c.isalnum() else "_" for c in name)


_QUERY_LAYERS = ("query", "q_proj", "q_lin", "to_q", "wq", "q")
_FUSED_LAYERS = ("c_attn", "qkv", "query_key_value", "qkv_proj", "Wqkv")


def query_weight(module: nn.Module | None, rows: int) -> Tensor | None:
    """Return W_Q, `(rows, width)` with rows = heads * head_dim, of an attention module.

    Found are a linear layer of one of the usual names, one fused over q, k and v in this order (a
    `Linear` or GPT-2's transposed `Conv1D`), and `nn.MultiheadAttention`'s `in_proj_weight`. None
    for any other module.
    """
    if module is None:
        return None
    fused = getattr(module, "in_proj_weight", None)
    if isinstance(fused, Tensor):
        return fused[:rows]
    children = dict(module.named_children())
    for name in (*_QUERY_LAYERS, *_FUSED_LAYERS):
        weight = getattr(children.get(name), "weight", None)
        if not isinstance(weight, Tensor) or weight.dim() != 2:
            continue
        # by its name: transformers, which has it, need not be installed
        if type(children[name]).__name__ == "Conv1D":
            weight = weight.T
        # fewer kv heads have fewer rows for k and v, so a fused weight need not have 3 * rows
        if weight.shape[0] == rows or (name in _FUSED_LAYERS and weight.shape[0] > rows):
            return weight[:rows]
    return None
