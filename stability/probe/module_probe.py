"""The same question beyond attention: any module or function repeated beside itself by a candidate.

A captured call is made three times more outside of the run, on the same inputs and under the same
gradient of its output: by the module itself, which has to give the run's own bits, by the candidate
and in FP64. Results and gradients are measured and judged as those of an attention are. All three
run in the backward pass once the gradient of the output is there, so that one layer's results live
at a time; until then the output is kept. A call that draws random numbers or writes into its inputs
is not looked at, and a module whose repeat gives other bits is not measured: both are findings.

Leaves out how a call is repeated (`module_call`), by what (`module_candidates`), and how it is
caught (`intercept.module_calls`).
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from threading import RLock
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from attention_kernels.formats import input_format
from stability.config.schema import ProbeConfig
from stability.metrics.deviation import LAYER_COLUMNS, compare
from stability.metrics.golden_error import GOLDEN_COLUMNS
from stability.probe.captured_call import repeating
from stability.probe.executed import unwitnessed
from stability.probe.isolation import isolated
from stability.probe.measurements import DeviationMeter, ProbeFinding
from stability.probe.micro_batches import MicroBatches, Which
from stability.probe.module_call import ModuleCall, repeat, repeat_in_double
from stability.probe.module_candidates import ModuleCandidate
from stability.probe.optimizer_update import Step, copy_of, own_step, updates
from stability.probe.schedule import Budget

__all__ = ["ModuleProbe"]

FEW_VALUES = 16
"""Of fewer values there is no error ratio and no bias: the error of one number, as of a loss, is
chance, and that of the module's own may be next to nothing by chance. They are judged by gain."""

_NEED_MANY = (
    "error_ratio",
    "golden_bias_ulp",
    "golden_bias_ulp_baseline",
    "baseline_over_rounding",
)
_NOT_OF_FEW = [len(LAYER_COLUMNS) + GOLDEN_COLUMNS.index(metric) for metric in _NEED_MANY]


class ModuleProbe:
    """Compares captured calls of modules with their candidates; measurements go to `meter`."""

    def __init__(
        self, config: ProbeConfig, meter: DeviationMeter, micro_batches: Which = "first"
    ) -> None:
        self._config = config
        self._meter = meter
        self._budget = Budget(config.overhead_share or 0.0)
        self._captured: dict[str, _Captured] = {}
        self._micro_batches = MicroBatches(micro_batches)
        self._is_armed = False
        # autograd runs hooks in threads of its own on a GPU
        self._lock = RLock()

    def arm(self) -> None:
        """Look at calls from now on: a due step begins."""
        self._is_armed = True
        self._micro_batches.begin_step()
        self._budget.begin_step()

    def name_if_due(self, layer: str) -> str:
        """Return the name of a call of `layer` that begins now; "" if it is not to be captured."""
        named = self._micro_batches.name(layer) if self._is_armed else ""
        return named if named and self._budget.grants(named) else ""

    def find(self, layer: str, text: str) -> None:
        """Add a finding."""
        self._meter.findings.append(ProbeFinding(layer, text))

    def capture(
        self, call: ModuleCall, candidate: ModuleCandidate, out: Mapping[str, Tensor]
    ) -> None:
        """Take a call that has just been made; `out` are its results, with their graph."""
        captured = _Captured(call, candidate)
        with self._lock:
            if self._captured.setdefault(call.layer, captured) is not captured:
                return
        trained = {name: x for name, x in out.items() if x.requires_grad}
        if not (self._config.backward and trained):
            self._evaluate(captured, {})
            return
        if (
            len(trained) == 1
        ):  # also the root of the backward pass, of which a multi-hook is not told
            (name, x), *_ = trained.items()
            x.register_hook(lambda gradient: self._backward(captured, [name], [gradient]))
            return
        # called once the gradients of all are there, with None for one that has none
        torch.autograd.graph.register_multi_grad_hook(
            tuple(trained.values()), partial(self._backward, captured, list(trained))
        )

    def compare_update(
        self, layer: str, candidate: ModuleCandidate, before: Optimizer, after: Optimizer
    ) -> None:
        """Compare the step that took an optimizer, `before` a copy, to what it is now."""
        own = updates(after, before)
        device = next(iter(own.values())).device

        def by(step: Step, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
            copy = copy_of(before, dtype)
            with isolated(device), torch.enable_grad():
                step(copy)
            return updates(copy, before)

        with unwitnessed(), self._budget.spending(device):
            again = self._try("its own repeat", layer, partial(by, own_step))
            if again is None or not all(torch.equal(own[what], again[what]) for what in own):
                self.find(layer, "not measured: repeated on copies its update is another")
                return
            assert candidate.function is not None
            found = self._try(candidate.name, layer, partial(by, candidate.function))
            golden: dict[str, Tensor] | None = {}
            if self._config.golden:
                golden = self._try("golden", layer, partial(by, own_step, torch.float64))
            for what, x in own.items() if found is not None else ():
                self._compare(layer, what, candidate.name, found or {}, x, (golden or {}).get(what))

    def disarm(self) -> None:
        """End the step: compare what no backward has reached, by its results alone."""
        self._is_armed = False
        for captured in self._captured.values():
            if not captured.is_seen:
                text = "its gradients are not measured: no backward reached it"
                self.find(captured.call.layer, text)
            self._evaluate(captured, {})
        self._captured.clear()

    def _backward(
        self, captured: "_Captured", names: Sequence[str], gradients: Sequence[Tensor | None]
    ) -> None:
        found = zip(names, gradients, strict=True)
        self._evaluate(captured, {name: x.detach() for name, x in found if x is not None})

    def _evaluate(self, captured: "_Captured", douts: Mapping[str, Tensor]) -> None:
        with self._lock:
            if captured.is_seen:
                return
            captured.is_seen = True
            with unwitnessed(), self._budget.spending(captured.call.device):
                self._compare_all(captured, douts)
            captured.forget()

    def _compare_all(self, captured: "_Captured", douts: Mapping[str, Tensor]) -> None:
        call, candidate = captured.call, captured.candidate
        if call.was_overwritten():
            self.find(call.layer, "inputs or out overwritten in place")
            return
        own = self._try("its own repeat", call.layer, partial(repeat, call, call.own, douts))
        if own is None:
            return
        changed = [x for x in call.out if x in own and not _equal(own[x], call.out[x])]
        if changed:
            text = (
                f"not measured: repeated on the same inputs it gives another {changed[0]}: it "
                "keeps state, has hooks, or depends on more than its inputs"
            )
            self.find(call.layer, text)
            return
        found = self._try(
            candidate.name, call.layer, partial(_by_candidate, candidate, call, douts)
        )
        golden = {}
        if self._config.golden:
            golden = self._try("golden", call.layer, partial(repeat_in_double, call, douts)) or {}
        for operator in candidate.left_alone:
            self.find(call.layer, f"{candidate.name} leaves {operator} in it as it is")
        for what, x in own.items():
            if found is not None:
                self._compare(call.layer, what, candidate.name, found, x, golden.get(what))

    def _try(
        self, name: str, layer: str, by: Callable[[], dict[str, Tensor]]
    ) -> dict[str, Tensor] | None:
        """Return what a repeat gives; if it fails, None and a finding: the run must go on."""
        try:
            with repeating():
                return by()
        except torch.AcceleratorError:
            raise  # the device is lost, and the run with it
        except Exception as error:
            text = str(error).strip().splitlines() or [""]
            self.find(layer, f"{name}: {type(error).__name__}: {text[0]}")
            return None

    def _compare(
        self,
        layer: str,
        what: str,
        name: str,
        found: Mapping[str, Tensor],
        own: Tensor,
        golden: Tensor | None,
    ) -> None:
        if what not in found:
            self.find(layer, f"{name}: BadResultError: no gradient reaches {what[1:]}")
            return
        if not own.numel():
            return
        # a loss is a row of one value
        columns = own.shape[-1] if own.dim() else 1
        compared = compare(
            found[what].reshape(-1, columns),
            own.reshape(-1, columns),
            golden=None if golden is None else golden.reshape(-1, columns),
            output_format=input_format(own.dtype),
        )
        if golden is not None and own.numel() < FEW_VALUES:
            compared.layer[_NOT_OF_FEW] = torch.nan
        self._meter.add(layer, what, compared, golden is not None, name)


class _Captured:
    """A call until its gradients have come."""

    def __init__(self, call: ModuleCall, candidate: ModuleCandidate) -> None:
        self.call: Any = call
        self.candidate = candidate
        self.is_seen = False

    def forget(self) -> None:
        """Free the call: only that it was seen is still to be known."""
        self.call = None


def _by_candidate(
    candidate: ModuleCandidate, call: ModuleCall, douts: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    return repeat(call, candidate.of(call), douts, within=candidate.within())


def _equal(x: Tensor, y: Tensor) -> bool:
    # at a due step alone; on a GPU it waits for the device
    return bool(((x == y) | (torch.isnan(x) & torch.isnan(y))).all())
