"""`shadow`: the instrument on any torch model, in one line.

A model whose calls cannot be caught is refused before it runs. At due steps the session catches the
calls in the way that fits the model (`sdpa`, `transformers`) and hands them to a probe, or makes
the candidate compute in their place (`replacement`). At any other step nothing at all is installed
in the model. Leaves out the comparison (`probe.attention_probe`) and the record on disk
(`probe.probe_recorder`).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from stability.config.schema import ProbeConfig
from stability.intercept.gradients import CaughtGradients, Loss
from stability.intercept.replacement import Direction, Replacement
from stability.intercept.sdpa import catch_sdpa
from stability.intercept.transformers import (
    catch_transformers,
    check_transformers,
    is_transformers_model,
)
from stability.probe.attention_probe import AttentionProbe, BindShadow, as_shadows
from stability.probe.attention_registry import ResolvedAttention, resolve_attention
from stability.probe.captured_call import AttentionCall, BoundAttention, Interceptor
from stability.probe.gradient_evidence import GradientMeter
from stability.probe.measurements import HostTransfer, StepMeasurements
from stability.probe.probe_recorder import ProbeRecorder
from stability.probe.schedule import Schedule
from stability.probe.second_forward import repeating_forward

__all__ = ["OWN", "Candidate", "Shadow", "shadow"]

Candidate = str | Callable[..., Tensor]
"""`flash:fa2`, `mypkg:my_attention`, an entry point's name, or a function like `AttentionFn`."""

OWN = "own"
"""The name of the model's own attention where it is the shadow of a replaced one."""

Sink = Callable[[int, StepMeasurements], None]
"""Is given each probed step's number and measurements, in order, once they have arrived."""

_SHOWN = 12
"""The most module classes that a message names."""


@contextmanager
def shadow(
    model: nn.Module,
    candidate: Candidate | list[Candidate] = "flash:fa2",
    *,
    every: int = 1,
    steps: Sequence[int] = (),
    per_decade: int = 0,
    layers: Sequence[str] = ("*",),
    golden: bool = True,
    backward: bool = True,
    heads: bool = False,
    positions: int = 0,
    inside: bool = False,
    inherited: bool = False,
    overhead: float | str = 0.0,
    gradient_every: int = 0,
    loss: Loss | None = None,
    replace: Sequence[str] = (),
    direction: Direction = "both",
    records: Path | str | None = None,
    sinks: Sequence[Sink] = (),
    first_step: int = 0,
) -> Iterator["Shadow"]:
    """Compare `candidate` with the model's own attention, call by call, while the model trains.

    Call `step()` on what this yields after each update. The model's results and its training are
    those without it, to the bit, unless `replace`, globs of layer names, makes the candidate
    compute in these layers, in both directions or only the "forward" or "backward" one; then the
    model's own attention is the shadow there.

    `every`, `steps` and `per_decade` say which steps are looked at, counted from 0. `golden` also
    measures both against FP64, `backward` also dq, dk and dv; `heads` and `positions` (a number of
    ranges) also measure each head and range, `inside` logits, entropy and the like,
    `inherited` runs the forward a second time in the candidate's stream. `overhead`, e.g. "5%",
    bounds the probe's share of the time. Every `gradient_every` steps `loss`, a function that
    computes the loss of the current batch as the training does, autocast included, is called six
    times inside `step()`: for the whole model's gradient under the (first) candidate, the model's
    own attention and FP64, isolated and as trained (`probe.gradient_evidence`). `records` is a
    folder for the measurements, which `stability show` and `stability report` read; `sinks` are
    given each step's, e.g. `lambda step, measured: wandb.log(measured.metrics)`. `first_step` is
    the number of updates made before. ValueError, before anything runs, for an unknown candidate,
    attention dropout or a compiled model; and after the first due step, if no attention call could
    be caught in it.
    """
    config = ProbeConfig(
        every=every,
        steps=tuple(steps),
        per_decade=per_decade,
        layers=tuple(layers),
        golden=golden,
        backward=backward,
        heads=heads,
        positions=positions,
        inside=inside,
        inherited=inherited,
        overhead=overhead,
        gradient_every=gradient_every,
    )
    if gradient_every and loss is None:
        raise ValueError(
            "shadow: loss must be a function where gradient_every is given, got None; e.g. "
            "loss=lambda: criterion(model(x), y)"
        )
    _check_model(model)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    several = candidate if isinstance(candidate, list) else [candidate]
    named = [resolve_attention(one, device) for one in several]
    replacement = None
    if replace:
        if len(named) > 1:
            raise ValueError(f"shadow: candidate must be one to replace with, got {len(named)}")
        replacement = Replacement(candidate=named[0], layers=tuple(replace), direction=direction)
    recorder = None
    if records is not None:
        recorder = _recorder(Path(records), model, named, replacement, golden)
        sinks = [*sinks, recorder.write]
    session = Shadow(model, config, named, replacement, sinks, first_step, loss)
    if recorder is not None:
        recorder.describe((), first_step)
    try:
        yield session
    finally:
        session.close()
        if recorder is not None:
            recorder.end(session.layers, session.steps)


def _recorder(
    folder: Path,
    model: nn.Module,
    candidates: Sequence[ResolvedAttention],
    replacement: Replacement | None,
    golden: bool,
) -> ProbeRecorder:
    own = {"implementation": "the model's own"}
    described = {one.name: one.description for one in candidates}
    replaced = {} if replacement is None else {**candidates[0].description, **replacement.to_dict()}
    return ProbeRecorder(
        folder,
        model=type(model).__name__,
        primary=replaced or own,
        shadows={OWN: own} if replaced else described,
        golden=golden,
    )


class Shadow:
    """The running instrument that `shadow` yields."""

    def __init__(
        self,
        model: nn.Module,
        config: ProbeConfig,
        candidates: Sequence[ResolvedAttention],
        replacement: Replacement | None,
        sinks: Sequence[Sink] = (),
        first_step: int = 0,
        loss: Loss | None = None,
    ) -> None:
        self.candidates = tuple(candidates)
        self.findings: list[tuple[int, str, str]] = []
        """(step, layer, what was wrong), as they arrive."""
        self.gradient_meter = GradientMeter()
        self.gradient_metrics: dict[str, float] = {}
        """The values of the last look at the whole model's gradient, by name."""
        self._model = model
        self._config = config
        self._loss = loss
        self._replacement = replacement
        self._sinks = tuple(sinks)
        self._schedule = Schedule(
            every=config.every, steps=config.steps, per_decade=config.per_decade
        )
        shadows: dict[str, BindShadow] = {OWN: _bind_own}
        if replacement is None:
            shadows = as_shadows(candidates)
        self.probe = AttentionProbe(
            config,
            shadows,
            shadow_is_candidate=replacement is None,
            modules=dict(model.named_modules()),
        )
        self._step = first_step
        self._layers: dict[str, None] = {}
        self._latest: StepMeasurements = StepMeasurements({}, {}, ())
        self._transfer: tuple[int, HostTransfer] | None = None
        self._installed: ExitStack | None = None
        self._replacing = ExitStack()
        if replacement is not None:
            self._replacing.enter_context(self._catch(model, self._attend))
        self._begin()

    @property
    def layers(self) -> tuple[str, ...]:
        """The layers whose attention has been caught so far, in the order of their calls."""
        return tuple(self._layers)

    @property
    def steps(self) -> int:
        """How many steps have been ended, those before the first one included."""
        return self._step

    @property
    def metrics(self) -> dict[str, float]:
        """The values measured at the last due step, by name; waits for them on CUDA."""
        self.deliver()
        return self._latest.metrics

    @property
    def counts(self) -> dict[str, list[int]]:
        """The histograms of the last due step, by name."""
        self.deliver()
        return self._latest.counts

    def step(self) -> None:
        """End a step: to be called after each update of the weights.

        ValueError after the first due step if no attention was caught in it.
        """
        was_due = self._installed is not None
        self._end()
        if was_due and not self._layers:
            raise ValueError(_nothing_caught(self._model))
        self._step += 1
        if self._config.gradient_every and self._step % self._config.gradient_every == 0:
            self._look_at_gradient()
        self._begin()

    def close(self) -> None:
        """End the last step, and leave the model as it was."""
        self._end()
        self.deliver()
        self._replacing.close()

    def _begin(self) -> None:
        if not self._schedule.is_due(self._step):
            return
        self.probe.arm()
        self._installed = ExitStack()
        if self._replacement is None:
            self._installed.enter_context(self._catch(self._model, self._attend))
        if self._config.inherited:
            roots = [self._model, *self._model.children()]
            self._installed.enter_context(repeating_forward(roots, self.probe))

    def _end(self) -> None:
        if self._installed is None:
            return
        self._installed.close()
        self._installed = None
        self.probe.disarm()
        self.deliver()
        transfer = self.probe.start_transfer()
        if transfer is not None:
            self._transfer = (self._step, transfer)

    def _look_at_gradient(self) -> None:
        """Look at the gradient on the weights as they are now, and the batch that made them so."""
        assert self._loss is not None
        self.deliver()  # sinks are given steps in order
        replacement = self._replacement
        # the model's own attention is the baseline, also where it is replaced
        self._replacing.close()
        compared = replacement or Replacement(
            candidate=self.candidates[0], layers=self._config.layers
        )
        try:
            taken = CaughtGradients(self._model, self._loss, compared, self._catch)
            measured = self.gradient_meter.look(taken.of)
        finally:
            if replacement is not None:
                self._replacing.enter_context(self._catch(self._model, self._attend))
        self.gradient_metrics = measured.metrics
        self.findings += [(self._step, layer, text) for layer, text in measured.findings]
        for sink in self._sinks:
            sink(self._step, measured)

    def deliver(self) -> None:
        """Hand the last due step's measurements to the sinks; waits for them on CUDA."""
        if self._transfer is None:
            return
        step, transfer = self._transfer
        self._transfer = None
        self._latest = transfer.result()
        self.findings += [(step, layer, text) for layer, text in self._latest.findings]
        for sink in self._sinks:
            sink(step, self._latest)

    def _attend(self, call: AttentionCall, primary: BoundAttention) -> Tensor:
        self._layers.setdefault(call.layer)
        if self._replacement is None:
            return self.probe.attend(call, primary)
        if not self._replacement.covers(call.layer):
            return primary(call.q, call.k, call.v)[0]
        replaced = _ReplacedAttention(self._replacement.of(call, primary), primary)
        return self.probe.attend(call, replaced)

    @property
    def _catch(self) -> Interceptor:
        return catch_transformers if is_transformers_model(self._model) else catch_sdpa


@dataclass(frozen=True, slots=True)
class _ReplacedAttention:
    """What computes in a replaced layer, with the model's own attention, which is its shadow."""

    computes: BoundAttention
    own: BoundAttention

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor | None]:
        return self.computes(q, k, v)


def _bind_own(call: AttentionCall, primary: BoundAttention) -> BoundAttention:
    assert isinstance(primary, _ReplacedAttention)
    return primary.own


def _check_model(model: nn.Module) -> None:
    """ValueError if the attention of `model` cannot be caught, or drops values at random.

    A compiled or scripted model calls attention from a graph, with no Python in between; with
    dropout a shadow would drop other values than the model does.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"shadow: model must be a torch.nn.Module, got {type(model).__name__}; "
            "functions can be given to a DualAttention"
        )
    for name, module in model.named_modules():
        kind = type(module).__name__
        if kind in (
            "OptimizedModule",
            "RecursiveScriptModule",
            "ScriptModule",
            "TopLevelTracedModule",
        ):
            raise ValueError(
                f"shadow: model must run eagerly, got {kind} at {name or 'its root'}: a compiled "
                "graph calls attention with no Python in between; give the model before it is "
                "compiled"
            )
        if module._compiled_call_impl is not None:
            raise ValueError(
                f"shadow: model must run eagerly, got {kind}.compile() at {name or 'its root'}: a "
                "compiled graph calls attention with no Python in between"
            )
    if is_transformers_model(model):
        check_transformers(model)
        return
    for name, module in model.named_modules():
        dropout = _attention_dropout(module)
        if dropout and module.training:
            raise ValueError(
                f"shadow: attention dropout must be 0, got {dropout:g} in {name or 'the model'} "
                f"({type(module).__name__}); a shadow would drop other values"
            )


def _attention_dropout(module: nn.Module) -> float:
    """Return the rate with which an attention module drops probabilities, 0 if it has none."""
    if "attention" not in type(module).__name__.lower():
        return 0.0
    for name in ("dropout", "dropout_p", "attn_dropout", "attention_dropout", "attn_pdrop"):
        value = getattr(module, name, None)
        rate = getattr(value, "p", value)
        if isinstance(rate, float) and name in ("attn_dropout", "attention_dropout", "attn_pdrop"):
            return rate
        if isinstance(value, float):  # a Dropout module of this name may follow the projection
            return value
    return 0.0


def _nothing_caught(model: nn.Module) -> str:
    """Return the message for a model in which no attention call was caught."""
    kinds = list(dict.fromkeys(type(module).__name__ for module in model.modules()))
    shown = ", ".join(kinds[:_SHOWN]) + (", ..." if len(kinds) > _SHOWN else "")
    named = [kind for kind in kinds if "attention" in kind.lower() or "attn" in kind.lower()]
    if "MultiheadAttention" in kinds:
        way = "call nn.MultiheadAttention with need_weights=False: else it does not use SDPA"
    elif named:
        way = (
            f"let {named[0]} call torch.nn.functional.scaled_dot_product_attention, or give it a "
            "stability.probe.attention_probe.DualAttention to call; a Hugging Face model needs no "
            "change"
        )
    else:
        way = "it seems to have no attention"
    return (
        f"shadow: model must call scaled_dot_product_attention, got no such call in a step of "
        f"{type(model).__name__}; module classes seen: {shown}; {way}"
    )
