"""The dual-attention probe: the primary decides the run, shadows and the golden only watch.

At a probed step each attention call is repeated on the very same q, k and v by every shadow and by
the FP64 golden, and compared forward (out, LSE) and backward (dq, dk, dv under the run's own dout).
The primary's gradients exist only while autograd runs, so hooks take them: the hook on out is given
dout and runs shadows and golden there, which lets one layer's results live at a time instead of all
layers' until the backward ends; hooks on the call's own nodes are given dq, dk and dv
(`own_gradients`). No hook returns anything, so autograd goes on with the tensors it had.

Repeating a call leaves no trace in the run (`repeated_call`). Values stay on the device until the
step's one transfer. A deviation is always candidate minus baseline, so its
sign means the same whichever of the two is the primary. With gradient accumulation the first
micro-batch of a step is looked at. Leaves out when to look (`schedule`) and how the calls of other
models than a study's are caught (`intercept`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from threading import RLock, get_ident
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from attention_kernels import MaskArguments
from stability.config.schema import ProbeConfig
from stability.probe.attention_registry import ResolvedAttention
from stability.probe.captured_call import (
    AttentionCall,
    BoundAttention,
    CapturedCall,
    as_computed,
    dtype_not_told,
    repeating,
)
from stability.probe.executed import unwitnessed
from stability.probe.isolation import isolated
from stability.probe.measurements import (
    DeviationMeter,
    HostTransfer,
    ProbeFinding,
    StepMeasurements,
)
from stability.probe.micro_batches import MicroBatches, Which
from stability.probe.own_gradients import beginning, watch_gradients
from stability.probe.repeated_call import (
    GRADIENTS,
    gradient_of,
    repeat_call,
    repeat_golden,
)
from stability.probe.schedule import Budget
from stability.records.metric_names import COMPARED, without_batch

__all__ = ["AttentionProbe", "BindShadow", "DualAttention", "as_shadows"]

_NOT_REPEATED = (
    "inherited error not measured: of a step the first whole forward pass is repeated, not a later "
    "one, one that two threads make at once, nor what a backward pass recomputes"
)

BindShadow = Callable[[AttentionCall, BoundAttention], BoundAttention]
"""Gives the shadow with the mask of a call bound. It is also given the call's primary: where the
model's own attention is replaced, that is what holds the shadow."""


def as_shadows(attentions: Sequence[ResolvedAttention]) -> dict[str, BindShadow]:
    """Return attentions as a probe takes them, by name."""
    return {attention.name: partial(_bind, attention) for attention in attentions}


def _bind(
    attention: ResolvedAttention, call: AttentionCall, primary: BoundAttention
) -> BoundAttention:
    def bound(q: Tensor, k: Tensor, v: Tensor, **trained: Tensor) -> tuple[Tensor, Tensor | None]:
        return drawing.with_lse(q, k, v, **call.mask_with(**trained))

    drawing = attention.drawing_by(call.rounding)
    return bound


_TRAINED_LSE = "all gradients but dv not measured: the loss takes the LSE, too"
_ONE_TENSOR = "they are one tensor, of which autograd keeps the sum; pass x.view_as(x) in the model"


def _made_already(*tensors: Tensor) -> tuple[Tensor, Tensor | None]:
    raise ValueError("a call that was given with its results can't be made again")


@dataclass(frozen=True, kw_only=True, slots=True)
class DualAttention:
    """The attention of a layer in a study: computes with the primary and lets the probe watch."""

    layer: str
    primary: ResolvedAttention
    probe: "AttentionProbe"
    rounding: Callable[[Tensor], Mapping[str, Any]] = lambda q: {}
    """What a call with this q draws by where it rounds stochastically, as its shadows do."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **mask: Unpack[MaskArguments]) -> Tensor:
        """Return the primary's result, untouched."""
        rounding = self.rounding(q)
        primary = self.primary.drawing_by(rounding)
        if not self.probe.is_armed:
            # and not `with_lse`: a step that is not looked at runs what a run without a probe runs
            return primary.function(q, k, v, **mask)
        call = AttentionCall(layer=self.layer, q=q, k=k, v=v, mask=mask, rounding=rounding)
        return self.probe.attend(call, partial(primary.with_lse, **mask))


class AttentionProbe:
    """What the layers of one model share: shadows, golden, and the measurements of this step.

    `shadows` are by name; a second forward pass follows the first of them. `modules` are the
    model's modules by layer name, for the norms of W_Q. `others` are the names of candidates for
    other modules, whose measurements arrive with these (`module_probe`). `micro_batches` says which
    of a step are looked at; a second forward pass is the first's.
    """

    def __init__(
        self,
        config: ProbeConfig,
        shadows: Mapping[str, BindShadow],
        *,
        shadow_is_candidate: bool,
        modules: Mapping[str, nn.Module] | None = None,
        others: Sequence[str] = (),
        micro_batches: Which = "first",
    ) -> None:
        self.is_armed = False
        """Whether a due step is running."""
        self._config = config
        self._shadows = dict(shadows)
        self._shadow_is_candidate = shadow_is_candidate
        self._budget = Budget(config.overhead_share or 0.0)
        # not copied: the caller fills it once the model exists, which is built on the probe
        known = {} if modules is None else modules
        self.meter = DeviationMeter(config, [*shadows, *others], known)
        self._captured: dict[str, CapturedCall] = {}
        self._micro_batches = MicroBatches(micro_batches)
        self._had_second_forward = False
        self._repeating_thread = 0
        """The thread that runs the second forward pass now."""
        # two threads may run the model, and autograd runs hooks in threads of its own on a GPU
        self._lock = RLock()
        self._findings: list[ProbeFinding] = []
        self._reported: set[ProbeFinding] = set()

    @property
    def has_captured(self) -> bool:
        """Whether this step has calls that were captured."""
        return bool(self._captured)

    @property
    def is_in_second_forward(self) -> bool:
        """Whether this thread runs the second forward pass."""
        return self._repeating_thread == get_ident()

    @property
    def wants_second_forward(self) -> bool:
        """Whether the forward pass now running is to be repeated in the shadow's stream."""
        return self.is_armed and not self._had_second_forward and bool(self._captured)

    def arm(self) -> None:
        """Look at the calls from now on: a due step begins."""
        self.is_armed, self._had_second_forward = True, False
        self._budget.begin_step()

    def disarm(self) -> None:
        """Look at no more calls; `start_transfer` finishes those that were captured."""
        self.is_armed = False

    def abandon(self) -> None:
        """Forget the calls of a step that an exception has ended, and look at no more."""
        self.is_armed = False
        self._forget_step()

    def attend(self, call: AttentionCall, primary: BoundAttention) -> Tensor:
        """Return the primary's result, untouched, and capture the call if it is due."""
        if self.is_in_second_forward:
            return self._attend_in_second_forward(call, primary)
        named = self._named_if_due(call)
        if named is None:
            return primary(call.q, call.k, call.v)[0]
        call = named
        qkv = (call.q, call.k, call.v)
        since = beginning()
        out, lse = primary(*qkv)
        call = self._as_computed(call, out, (*qkv, *call.trained.values()))
        captured = CapturedCall.of(call, primary, qkv, out, lse)
        with self._lock:
            # another thread may have made the same call meanwhile
            if self._captured.setdefault(call.layer, captured) is not captured:
                return out
        if self._config.backward and call.trains:
            self._find_untrained(call, qkv)
        # under no_grad no hook would ever run
        if self._config.backward and out.requires_grad:
            # autograd reaches out before q, k and v, so shadows are evaluated when these hooks run
            names = (*GRADIENTS, *map(gradient_of, call.trained))
            given = dict(zip(names, (*qkv, *call.trained.values()), strict=True))
            captured.awaited.update(name for name, x in given.items() if x.requires_grad)
            compare = partial(self._compare_gradient, captured)
            untold = watch_gradients(out, given, since, compare)
            if untold:
                captured.awaited -= untold
                text = ", ".join(name for name in given if name in untold)
                self._add_finding(call.layer, f"{text} not measured: {_ONE_TENSOR}")
            out.register_hook(partial(self._evaluate, captured))
            if lse is not None and lse.requires_grad:
                lse.register_hook(partial(self._note_trained_lse, captured))
        # evaluating frees the forward's tensors, which the second forward is compared with
        elif not self._config.inherited:
            self._evaluate(captured, None)
        return out

    def compare_given(
        self,
        call: AttentionCall,
        out: Tensor,
        dout: Tensor | None = None,
        gradients: Sequence[Tensor | None] = (),
    ) -> None:
        """Compare a call that the run has made already, with its dq, dk and dv if it has them.

        Nothing is kept of the tensors, which a compiled graph writes over.
        """
        named = self._named_if_due(call, is_made=True)
        if named is None:
            return
        call = named
        qkv = (call.q, call.k, call.v)
        captured = CapturedCall.of(call, _made_already, qkv, out, None)
        self._captured[call.layer] = captured
        self._evaluate(captured, dout)
        for name, gradient in zip(GRADIENTS, gradients, strict=False):
            if gradient is not None:
                self._compare_gradient(captured, name, gradient)

    @contextmanager
    def second_forward(self) -> Iterator[None]:
        """Inside, each call follows the first shadow and is compared with the pass before."""
        self._repeating_thread, self._had_second_forward = get_ident(), True
        try:
            yield
        finally:
            self._repeating_thread = 0

    def start_transfer(self) -> HostTransfer | None:
        """End the step: evaluate what no backward has reached, and send the values to the host."""
        # e.g. under no_grad, or in a layer whose out does not reach the loss: forward alone
        for captured in self._captured.values():
            self._evaluate(captured, None)
            if captured.awaited:
                names = ", ".join(name for name in COMPARED if name in captured.awaited)
                self._add_finding(captured.layer, f"{names} not measured: no backward reached it")
            # later micro-batches have names of their own, and no second pass
            is_first = captured.layer == without_batch(captured.layer)
            if self._config.inherited and is_first and not captured.in_second_forward:
                self._add_finding(captured.layer, _NOT_REPEATED)
        self._forget_step()
        new = [
            finding
            for finding in (*self._findings, *self.meter.findings)
            if finding not in self._reported
        ]
        self._reported.update(new)
        self._findings.clear()
        self.meter.findings.clear()
        return self.meter.buffer.transfer(list(dict.fromkeys(new)))

    def collect(self) -> StepMeasurements:
        """End the step and wait for its measurements."""
        transfer = self.start_transfer()
        return transfer.result() if transfer else StepMeasurements({}, {}, ())

    def state_dict(self) -> dict[str, object]:
        """Return what a resume needs: the running sums, and the findings that were reported."""
        # a set has no order: sorted, equal states are written alike
        reported = sorted(tuple(finding) for finding in self._reported)
        return {"sums": self.meter.state_dict(), "reported": [list(pair) for pair in reported]}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Continue from a checkpoint."""
        reported = state["reported"]
        assert isinstance(reported, list)
        self._reported = {ProbeFinding(*pair) for pair in reported}
        self.meter.load_state_dict(state["sums"])  # pyright: ignore[reportArgumentType]

    def __deepcopy__(self, memo: dict[int, Any]) -> "AttentionProbe":
        """Return a probe that is never armed: a copy of a model, e.g. an average, isn't watched."""
        return AttentionProbe(
            self._config, self._shadows, shadow_is_candidate=self._shadow_is_candidate
        )

    def _forget_step(self) -> None:
        self._captured.clear()
        self._micro_batches.begin_step()

    def _find_untrained(self, call: AttentionCall, qkv: Sequence[Tensor]) -> None:
        layer = call.layer
        for name, argument in (("bias", "attn_mask"), ("sinks", "sinks")):
            x = call.mask.get(argument)
            if isinstance(x, Tensor) and x.requires_grad and name not in call.trained:
                self._add_finding(layer, f"d{name} not measured: no gradient of its own is seen")
        frozen = [name for name, x in zip(GRADIENTS, qkv, strict=True) if not x.requires_grad]
        if frozen:
            text = f"{', '.join(frozen)} not measured: nothing before it is trained"
            self._add_finding(layer, text)

    def _named_if_due(self, call: AttentionCall, *, is_made: bool = False) -> AttentionCall | None:
        """Return a call that is to be looked at, named after its micro-batch, else None."""
        if not self.is_armed:
            return None
        if not any(fnmatchcase(call.layer, pattern) for pattern in self._config.layers):
            return None
        layer = self._micro_batches.name(call.layer, is_made=is_made)
        if not layer:
            return None
        if call.unsupported:
            self._add_finding(layer, f"not looked at: {call.unsupported}")
            return None
        return replace(call, layer=layer) if self._budget.grants(layer) else None

    def _as_computed(
        self, call: AttentionCall, out: Tensor, inputs: Sequence[Tensor]
    ) -> AttentionCall:
        """Return the call with the dtype in which the model's attention has really computed."""
        told = as_computed(call, out, inputs)
        if told is None:
            self._add_finding(call.layer, dtype_not_told(call))
        return told or call

    def _note_trained_lse(self, captured: CapturedCall, gradient: Tensor | None) -> None:
        if gradient is not None and not captured.lse_is_trained:
            captured.lse_is_trained = True
            self._add_finding(captured.layer, _TRAINED_LSE)

    def _evaluate(self, captured: CapturedCall, dout: Tensor | None) -> None:
        """Run shadows and golden, and compare all that the forward gave."""
        with self._lock:
            if not captured.seen:
                # first, so that a call that can't be compared is not tried again at the step's end
                captured.seen = True
                self._compare_forward(captured, dout)

    def _compare_forward(self, captured: CapturedCall, dout: Tensor | None) -> None:
        with unwitnessed(), torch.no_grad(), self._budget.spending(captured.out.device):
            # the captured tensors share the run's memory, which it may have written to since
            if captured.was_overwritten():
                self._add_finding(captured.layer, "inputs or out overwritten in place")
                return
            dout = None if dout is None else dout.detach().to(captured.out.dtype)
            for name, bind in self._shadows.items():
                repeat = partial(repeat_call, bind(captured.call, captured.primary))
                captured.shadows[name] = self._try(name, repeat, captured, dout)
                self._find_missing(captured, name, dout)
            if self._config.golden:
                repeat = partial(repeat_golden, captured.call)
                captured.golden = self._try("golden", repeat, captured, dout)
            self._compare(captured, "out", captured.out)
            self._compare_lse(captured)
            if self._config.inside:
                with isolated(captured.out.device):
                    self.meter.measure_inside(captured, dout, self._candidate_out(captured))
            captured.forget_forward()

    def _compare_gradient(self, captured: CapturedCall, name: str, gradient: Tensor) -> None:
        budget = self._budget.spending(gradient.device)
        with self._lock, unwitnessed(), torch.no_grad(), budget:
            captured.awaited.discard(name)
            if not captured.lse_is_trained or name == "dv":
                self._compare(captured, name, gradient.detach())
            captured.forget(name)

    def _try(
        self,
        name: str,
        repeat: Callable[..., dict[str, Tensor]],
        captured: CapturedCall,
        dout: Tensor | None,
    ) -> dict[str, Tensor]:
        """Return what `repeat` gives; if it fails, nothing and a finding: the run must go on."""
        try:
            with repeating():
                return repeat(*captured.qkv, dout, captured.call.trained)
        except torch.AcceleratorError:
            raise  # the device is lost, and the run with it
        except Exception as error:
            text = str(error).strip().splitlines() or [""]
            self._add_finding(captured.layer, f"{name}: {type(error).__name__}: {text[0]}")
            return {}

    def _find_missing(self, captured: CapturedCall, shadow: str, dout: Tensor | None) -> None:
        """Tell which gradients of the mask a shadow does not give that gives others."""
        found = captured.shadows[shadow]
        for name in captured.call.trained if found and dout is not None else ():
            if gradient_of(name) not in found:
                text = f"{shadow}: d{name} not measured: no gradient reaches {name}"
                self._add_finding(captured.layer, text)

    def _add_finding(self, layer: str, text: str) -> None:
        self._findings.append(ProbeFinding(layer, text))

    def _compare(self, captured: CapturedCall, what: str, primary: Tensor) -> None:
        for name, results in captured.shadows.items():
            shadow = results.get(what)
            if shadow is None:
                continue
            # candidate first in both roles, so that the sign of an error keeps its meaning
            pair = (shadow, primary) if self._shadow_is_candidate else (primary, shadow)
            self.meter.compare(captured, what, *pair, captured.golden.get(what), name)

    def _compare_lse(self, captured: CapturedCall) -> None:
        """Compare LSEs; where the primary gives none, the candidate's with the golden's."""
        if captured.lse is not None:
            self._compare(captured, "lse", captured.lse)
            return
        golden = captured.golden.get("lse")
        for name, results in captured.shadows.items() if self._shadow_is_candidate else ():
            shadow = results.get("lse")
            if shadow is not None and golden is not None:
                self.meter.compare_lse_to_golden(captured, shadow, golden, name)

    def _candidate_out(self, captured: CapturedCall) -> Tensor | None:
        if not self._shadow_is_candidate:
            return captured.out
        return captured.shadows[next(iter(self._shadows))].get("out")

    def _attend_in_second_forward(self, call: AttentionCall, primary: BoundAttention) -> Tensor:
        """Attend as the first shadow on its own stream; compare with the first pass.

        "total" is the deviation of out on the two streams, "carried" the part of it that the
        inputs brought along: the same attention on the inputs of either pass.
        """
        name, bind = next(iter(self._shadows.items()))
        repeat = partial(repeat_call, bind(call, primary))
        # there is no out yet: q stands in its place, as only the inputs are read of this one
        second = CapturedCall.of(call, primary, [call.q, call.k, call.v], call.q, None)
        own = None
        if not call.unsupported:
            own = self._try(name, repeat, second, None).get("out")
        if own is None:
            return primary(call.q, call.k, call.v)[0]
        first = self._captured.get(call.layer)
        if first is not None:
            first.in_second_forward = True
        if first is not None and not first.was_overwritten():
            if self._shadow_is_candidate:
                on_first = self._try(name, repeat, first, None).get("out")
                pairs = {"total": (own, first.out), "carried": (own, on_first)}
            else:
                on_second, _ = primary(call.q, call.k, call.v)
                pairs = {"total": (first.out, own), "carried": (first.out, on_second)}
            for what, (x, reference) in pairs.items():
                if reference is not None:
                    self.meter.compare(first, what, x, reference, None, name)
        return own
