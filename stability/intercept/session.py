"""`shadow`: the instrument on any torch model, in one line.

A model whose calls cannot be caught is refused before it runs. At due steps the session catches the
calls (`doors`), or observes those of compiled graphs (`compiled_taps`), and hands them to a probe,
or makes the candidate compute in their place (`replacement`). At any other step nothing at all is
installed; what torch.compile makes meanwhile is only named. Leaves out what is refused
(`model_check`), the comparison (`probe.attention_probe`) and the record on disk
(`probe.probe_recorder`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from stability.config.schema import ProbeConfig
from stability.intercept.compiled_graphs import naming_graphs
from stability.intercept.compiled_taps import CompiledTaps, ObservedCall
from stability.intercept.coverage import Coverage, LayerCoverage
from stability.intercept.doors import catch_attention
from stability.intercept.forgotten_step import UpdateWatch
from stability.intercept.global_hooks import put_global_hooks
from stability.intercept.gradients import CaughtGradients, Loss, check_whole
from stability.intercept.layer_globs import check_globs, check_globs_of_calls
from stability.intercept.layer_names import ROOT
from stability.intercept.library_functions import watching_library_functions
from stability.intercept.model_check import check_model, nothing_caught
from stability.intercept.own_baseline import catching_as
from stability.intercept.replacement import (
    AskedDtypes,
    Direction,
    ReplacedAttention,
    Replacement,
    bind_own,
    replacement_by,
)
from stability.intercept.session_record import OWN, recorder_of
from stability.intercept.session_results import SessionResults, Sink
from stability.intercept.watched_modules import (
    ModuleCandidates,
    WatchedModules,
    described_modules,
    resolve_modules,
)
from stability.probe.attention_probe import AttentionProbe, BindShadow, as_shadows
from stability.probe.attention_registry import ResolvedAttention, resolve_attention
from stability.probe.captured_call import AttentionCall, BoundAttention
from stability.probe.gradient_evidence import GradientMeter
from stability.probe.micro_batches import Which
from stability.probe.module_candidates import ModuleCandidate
from stability.probe.schedule import Schedule
from stability.probe.second_forward import repeating_forward

__all__ = ["OWN", "Candidate", "Shadow", "shadow"]

Candidate = str | Callable[..., Tensor]
"""`flash:fa2`, `mypkg:my_attention`, an entry point's name, or a function like `AttentionFn`."""

_UNSEARCHED = (
    "some of the model runs in compiled graphs: there attention that is written by hand is not "
    "seen, and told of graphs alone that Inductor has compiled inside `with shadow(...)`"
)


@contextmanager
def shadow(
    model: nn.Module,
    candidate: Candidate | list[Candidate] | None = None,
    *,
    modules: ModuleCandidates | None = None,
    every: int | None = None,
    steps: Sequence[int] = (),
    per_decade: int = 0,
    layers: Sequence[str] = ("*",),
    golden: bool = True,
    backward: bool = True,
    heads: bool = False,
    positions: int = 0,
    inside: bool = False,
    inherited: bool = False,
    evaluation: bool = False,
    micro_batches: Which = "first",
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

    `modules` asks the same of any other parts: candidates by globs of their names, `"loss"` or
    `"<glob>+loss"` (`probe.module_candidates`, `intercept.loss_calls`); without `candidate`, else
    "flash:fa2", no attention is looked at then. Call `step()` on what this yields after each
    update. The model's results and its training are those without it, to the bit, unless `replace`,
    globs of layer names, makes the candidate compute in these layers, in both directions or only
    the "forward" or "backward" one; then the model's own attention is the shadow there.

    `steps`, else `every`, and `per_decade` say which steps are looked at, counted from 0: every one
    where none of them is given, none where `every` alone is and is 0. A call counts where the model
    trains: gradients are enabled and it is in training mode; with `evaluation` any call does. Of
    several micro-batches of a step the first is looked at, or "all", later ones as `layer@batch1`
    and so on. `golden` also measures both against FP64, `backward` also dq, dk and dv; `heads` and
    `positions` (a number of ranges) also measure each head and range, `inside` logits, entropy and
    the like, `inherited` runs the forward a second time in the candidate's stream. `overhead`, e.g.
    "5%", bounds the probe's share of the time. Every `gradient_every` steps `loss`, a function that
    computes the loss of the current batch as the training does, autocast included, is called six
    times inside `step()`: for the whole model's gradient under the (first) candidate, the model's
    own attention and FP64, isolated and as trained (`probe.gradient_evidence`); weights must be
    whole on each rank. `records` is a folder for the measurements, which `stability show` and
    `stability report` read; `sinks` are given each step's, e.g. `lambda step, measured:
    wandb.log(measured.metrics)`. `first_step` is the number of updates made before: a resumed job
    gives it, and goes on with its `records`; what `state_dict()` of this returns belongs into its
    checkpoints. ValueError, before anything runs, for an unknown candidate, a glob that matches no
    module, or attention dropout; and after the first due step, if no attention call could be caught
    in it or a glob matches none of its layers.

    The model may be compiled, as a whole or in parts, before or after. Its graphs stay as they are,
    and their attention calls are only observed: `replace`, `inherited`, `gradient_every` and
    `modules` need a model that runs eagerly, ValueError otherwise. A graph that ran before has to
    be compiled anew, by `torch.compiler.reset()` inside.
    """
    config = ProbeConfig(
        every=(0 if steps or per_decade else 1) if every is None else every,
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
    if modules and candidate is None and (replace or inherited or inside or gradient_every):
        raise ValueError(
            "shadow: candidate must be given for replace, inherited, inside or gradient_every, got "
            "None; beside modules alone no attention is looked at"
        )
    several = candidate if isinstance(candidate, list) else [candidate or "flash:fa2"]
    if modules and candidate is None:
        several = []
    elif not several:
        raise ValueError("shadow: candidate must name at least one, got []; or give modules alone")
    if gradient_every:
        check_whole(model)
    is_eager = bool(replace or inherited or gradient_every or modules)
    check_model(model, compiled=not is_eager, attends=bool(several))
    check_globs(model, layers=layers, replace=replace)
    others = resolve_modules(model, modules or {})
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    named = [resolve_attention(one, device) for one in several]
    replacement = replacement_by(named, replace, direction) if replace else None
    recorder = None
    if records is not None:
        recorder = recorder_of(Path(records), model, named, others, replacement, golden, first_step)
        sinks = [*sinks, recorder.write]
    session = Shadow(
        *(model, config, named, replacement, sinks, first_step, loss, others),
        evaluation=evaluation,
        micro_batches=micro_batches,
    )
    with ExitStack() as ends:
        if recorder is not None:
            recorder.describe((), first_step)
            ends.callback(lambda: recorder.end(session.layers, session.steps))
        yield ends.enter_context(session.running())


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
        others: Mapping[str, ModuleCandidate] = MappingProxyType({}),
        *,
        evaluation: bool = False,
        micro_batches: Which = "first",
        baseline: BindShadow | None = None,
    ) -> None:
        self.candidates = tuple(candidates)
        self.gradient_meter = GradientMeter()
        self.gradient_metrics: dict[str, float] = {}
        """The values of the last look at the whole model's gradient, by name."""
        self._model = model
        self._config = config
        self._loss = loss
        self._replacement, self._catch = replacement, catching_as(baseline)
        self._results = SessionResults(sinks)
        self._schedule = Schedule(
            every=config.every, steps=config.steps, per_decade=config.per_decade
        )
        own = baseline if replacement is None else bind_own
        shadows = {OWN: own} if own else as_shadows(candidates)
        self.probe = AttentionProbe(
            config,
            shadows,
            shadow_is_candidate=own is None,
            modules=dict(model.named_modules()),
            others=list(described_modules(others)),
            micro_batches=micro_batches,
        )
        self._modules = WatchedModules(
            *(model, others, config, self.probe.meter, self._note_call, micro_batches)
        )
        self._evaluation = evaluation
        self._is_eager_only = replacement is not None or config.inherited
        self._was_announced = False
        self._has_state = not first_step
        """Whether running sums are those of all looks from the first step on."""
        self._step = self._first_step = first_step
        self._layers: dict[str, None] = {}
        self._attending: dict[str, None] = {}
        """Those of `_layers` that are attentions."""
        self._as_computed = AskedDtypes(self._find)
        self._called: set[str] = set()
        """The layers that were called since the last step."""
        self._has_counted = False
        """Whether one of these calls was one to look at."""
        self._looking_round: Coverage | None = Coverage() if candidates else None
        """None once a step has shown what is seen, and where no attention is looked at."""
        self.coverage: tuple[LayerCoverage, ...] = ()
        """What is seen of each module that looks like attention, as the first due step has shown
        it."""
        before_update = self._looking_round.warn_of_graphs if self._looking_round else None
        self._updates = UpdateWatch(model, self._find, before_update)
        self._installed: ExitStack | None = None
        self._open = ExitStack()
        """What is open from the beginning to the end."""
        self._replacing = self._open.enter_context(ExitStack())
        self._missed: dict[tuple[str, str], bool] = {}
        """The (layer, text) of what was not seen in compiled graphs, and whether it was told."""
        self._taps = CompiledTaps(
            model, self._take_compiled, self._miss, backward=config.backward, evaluation=evaluation
        )

    @contextmanager
    def running(self) -> Iterator["Shadow"]:
        """Look at the steps inside; to be entered once."""
        try:
            self._open.enter_context(watching_library_functions(self._model))
            self._open.enter_context(naming_graphs())
            self._open.enter_context(self._updates.watching())
            if self._replacement is not None:
                self._replacing.enter_context(self._catching())
            self._begin()
            yield self
            self._check_unended_step()
        finally:
            self.close()

    @property
    def findings(self) -> list[tuple[int, str, str]]:
        """(step, layer, what was wrong), as they arrive."""
        return self._results.findings

    @property
    def layers(self) -> tuple[str, ...]:
        """The layers whose calls have been caught so far, in the order of these."""
        return tuple(self._layers)

    @property
    def steps(self) -> int:
        """How many steps have been ended, those before the first one included."""
        return self._step

    @property
    def metrics(self) -> dict[str, float]:
        """The values measured at the last due step, by name; waits for them on CUDA."""
        return self._results.latest.metrics

    @property
    def counts(self) -> dict[str, list[int]]:
        """The histograms of the last due step, by name."""
        return self._results.latest.counts

    def step(self) -> None:
        """End a step: to be called after each update of the weights.

        ValueError after the first due step if no attention was caught in it, or a glob of layers
        matches none of it; where this is never called, the end of `shadow` raises it.
        """
        self._was_announced = True
        self._updates.announce()
        try:
            if self._installed is not None or self._called:
                self._check_calls()
        finally:
            self._called.clear()
            self._has_counted = False
        self._end()
        self._step += 1
        if self._config.gradient_every and self._step % self._config.gradient_every == 0:
            self._look_at_gradient()
        self._begin()

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed job needs: running sums, and findings that were told."""
        self.deliver()
        gradient = self.gradient_meter.state_dict()
        return {"probe": self.probe.state_dict(), "gradient": gradient}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        self.probe.load_state_dict(state["probe"])
        self.gradient_meter.load_state_dict(state["gradient"])
        self._has_state = True

    def close(self) -> None:
        """End the last step, and leave the model as it was."""
        try:
            self._end()
            self.deliver()
        finally:
            self._open.close()
        is_any_due = self._schedule != Schedule()
        if is_any_due and not self._was_announced and self._updates.has_seen_one:
            self._updates.warn()

    def _check_unended_step(self) -> None:
        """Tell of the calls since the last `step()`, too, with its ValueErrors."""
        has_run = self._has_counted
        if not self._was_announced and (self._installed is not None or self._called):
            looking_round = self._looking_round
            has_run |= self._updates.has_seen_one or bool(self._called)
            has_run |= looking_round is not None and looking_round.has_run
        # an evaluation after the last step is none of its own
        if has_run:
            self._check_calls()

    def _begin(self) -> None:
        if not self._schedule.is_due(self._step):
            return
        self.probe.arm()
        self._updates.mark()
        self._installed = ExitStack()
        self._installed.enter_context(self._modules.watching())
        if self._replacement is None and self.candidates:
            self._installed.enter_context(self._catching())
        self._installed.enter_context(self._taps.listening())
        if self._config.inherited:
            roots = [self._model, *self._model.children()]
            put = partial(put_global_hooks, with_kwargs=True)
            self._installed.enter_context(repeating_forward(roots, self.probe, put))

    def _end(self) -> None:
        if self._installed is None:
            return
        installed, self._installed = self._installed, None
        installed.close()
        for (layer, text), was_told in self._missed.items():
            if not was_told:
                self._find(layer, text)
        self._missed = dict.fromkeys(self._missed, True)
        self.probe.disarm()
        transfer = self.probe.start_transfer()
        if transfer is not None:
            self._results.wait_for(self._step, transfer)

    def _look_at_gradient(self) -> None:
        """Look at the gradient on the weights as they are now, and the batch that made them so."""
        assert self._loss is not None
        if not self._has_state:
            text = f"its running figures begin anew at step {self._first_step}: no state was loaded"
            self._find("gradient", text)
            self._has_state = True
        replacement = self._replacement
        # the model's own attention is the baseline, also where it is replaced
        self._replacing.close()
        compared = replacement or Replacement(
            candidate=self.candidates[0], layers=self._config.layers
        )
        try:
            taken = CaughtGradients(
                self._model, self._loss, compared, self._catch, self._as_computed
            )
            measured = self.gradient_meter.look(taken.of)
        finally:
            if replacement is not None:
                self._replacing.enter_context(self._catching())
        self.gradient_metrics = measured.metrics
        self._results.take(self._step, measured)

    def deliver(self) -> None:
        """Hand the last due step's measurements to the sinks; waits for them on CUDA."""
        self._results.deliver()

    def _attend(self, call: AttentionCall, primary: BoundAttention) -> Tensor:
        counts = self._note(call)
        if self._replacement is not None:
            if not self._replacement.covers(call.layer):
                return primary(call.q, call.k, call.v)[0]
            call = self._as_computed(call, primary)
            primary = ReplacedAttention(self._replacement.of(call, primary), primary)
        if not counts:
            return primary(call.q, call.k, call.v)[0]
        return self.probe.attend(call, primary)

    def _take_compiled(self, observed: ObservedCall) -> None:
        """Compare a call that a compiled graph has made."""
        call = observed.call
        if self._is_eager_only:
            raise ValueError(
                f"shadow: {call.layer} must run eagerly where replace or inherited is given; a "
                "compiled graph calls its attention"
            )
        if self._note(call):
            self.probe.compare_given(call, observed.out, observed.dout, observed.gradients)

    def _miss(self, layer: str, text: str) -> None:
        """Note what was not seen of a compiled graph, to be told when the step ends."""
        layer = layer or ROOT
        if self._looking_round is not None:
            self._looking_round.note_missed(layer, text)
        self._missed.setdefault((layer, text), False)

    def _note(self, call: AttentionCall) -> bool:
        """Note that a call was seen, and return whether it is one to look at."""
        self._attending.setdefault(call.layer)
        if self._looking_round is not None:
            self._looking_round.note(call.layer, call.unsupported)
        counts = self._note_call(call.layer, call.trains)
        return counts or self.probe.is_in_second_forward

    def _note_call(self, layer: str, trains: bool) -> bool:
        """Note the call of any layer, and return whether it counts."""
        self._layers.setdefault(layer)
        counts = trains or self._evaluation
        # an evaluation may well lie between an update and its step()
        is_due = self._installed is not None and trains
        if is_due and layer in self._called and self._updates.has_seen_one:
            self._updates.warn()
        self._called.add(layer)
        self._has_counted |= counts
        return counts

    def _catching(self) -> AbstractContextManager[None]:
        compiled = "refused" if self._is_eager_only else "left alone"
        return catch_attention(self._model, self._attend, self._looking_round, compiled=compiled)

    def _check_calls(self) -> None:
        """ValueError if the first step's calls can't be what was meant; a finding if later ones."""
        self._taps.end_step()
        for layer, text in self._modules.check() if self._installed is not None else ():
            self._find(layer, text)
        if self._looking_round is not None:
            self.coverage = self._looking_round.end()
            is_compiled = self._looking_round.unsearched
            if not self._attending:
                raise ValueError(nothing_caught(self._model, self.coverage, compiled=is_compiled))
            if is_compiled:
                self._find("model", _UNSEARCHED)
        has_skipped = self._modules.awaits_optimizer and not self._called
        if self._installed is not None and not self._has_counted and not has_skipped:
            kind, did = ("attention call", "attended") if self.candidates else ("call", "ran")
            text = (
                f"no {kind} of step {self._step} was one of training (gradients enabled, "
                f"model in training mode): {len(self._called)} layers {did} in evaluation; "
                "shadow(..., evaluation=True) looks at these too; a function that "
                "checkpoint(..., use_reentrant=True) recomputes outside of any module is not seen, "
                "with use_reentrant=False it is"
            )
            if self._step == self._first_step:
                raise ValueError(f"shadow: {text}")
            self._find("model", text)
        if self._looking_round is not None:
            replace = () if self._replacement is None else self._replacement.layers
            check_globs_of_calls(self._attending, layers=self._config.layers, replace=replace)
            for one in self.coverage:
                if one.state != "seen" and not one.is_found_anyway:
                    self._find(one.layer, str(one))
            self._looking_round.warn(self.coverage)
            self._looking_round = None

    def _find(self, layer: str, text: str) -> None:
        self._results.find(self._step, layer, text)
