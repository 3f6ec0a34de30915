"""`shadow`: the instrument on any torch model, in one line.

Catches the model's attention calls in the way that fits (`intercept_sdpa`,
`intercept_transformers`), at the steps that are due, and hands them to a probe; or makes the
candidate compute in the model's place (`replacing`). At a step that is not due nothing is installed
in the model at all. Leaves out where the figures go besides memory (`sink`).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from stability.config.schema import ProbeConfig
from stability.intercept.model_check import check_model, nothing_caught
from stability.intercept.replacement import Direction, Replacement
from stability.intercept.sdpa import catch_sdpa
from stability.intercept.transformers import catch_transformers, is_transformers_model
from stability.probe.captured_call import AttentionCall, Catch, Primary
from stability.probe.dual_attention import as_shadows
from stability.probe.measurements import Reading, Transfer
from stability.probe.probe import AttentionProbe, BindMask, WithLse
from stability.probe.recording import RecordSink
from stability.probe.registry import ResolvedAttention, resolve_attention
from stability.probe.schedule import Schedule
from stability.probe.second_pass import repeating_forward

__all__ = ["OWN", "Candidate", "Shadow", "shadow"]

Candidate = str | Callable[..., Tensor]
"""`flash:fa2`, `mypkg:my_attention`, an entry point's name, or a function like `AttentionFn`."""

OWN = "own"
"""The name of the model's own attention where it is the shadow of a replaced one."""

Sink = Callable[[int, Reading], None]
"""Is given each probed step's number and figures, in order, once they have arrived."""


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
    ranges) also give each head's and range's figures, `inside` logits, entropy and the like,
    `inherited` runs the forward a second time in the candidate's stream. `overhead`, e.g. "5%",
    bounds the probe's share of the time. `records` is a folder that gets the figures, for
    `stability show` and `stability report`; `sinks` are given each step's, e.g.
    `lambda step, reading: wandb.log(reading.metrics)`. `first_step` is the number of updates made
    before. ValueError, before anything runs, for a candidate that
    can't be had, attention dropout, a compiled model; and after the first step looked at, if the
    model has made no attention call that can be caught.
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
    )
    check_model(model)
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
    session = Shadow(model, config, named, replacement, sinks, first_step)
    if recorder is not None:
        recorder.describe((), first_step)
    try:
        yield session
    finally:
        session.close()
        if recorder is not None:
            recorder.describe(session.layers, session.steps)
            recorder.close()


def _recorder(
    folder: Path,
    model: nn.Module,
    candidates: Sequence[ResolvedAttention],
    replacement: Replacement | None,
    golden: bool,
) -> RecordSink:
    own = {"implementation": "the model's own"}
    described = {one.name: one.description for one in candidates}
    replaced = {} if replacement is None else {**candidates[0].description, **replacement.to_dict()}
    return RecordSink(
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
    ) -> None:
        self.candidates = tuple(candidates)
        self.findings: list[tuple[int, str, str]] = []
        """(step, layer, what was wrong), as they arrive."""
        self._model = model
        self._config = config
        self._replacement = replacement
        self._sinks = tuple(sinks)
        self._schedule = Schedule(
            every=config.every, steps=config.steps, per_decade=config.per_decade
        )
        shadows: dict[str, BindMask] = {OWN: _own}
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
        self._latest: Reading = Reading({}, {}, ())
        self._underway: tuple[int, Transfer] | None = None
        self._looking: ExitStack | None = None
        self._whole = ExitStack()
        if replacement is not None:
            self._whole.enter_context(self._catch(model, self._attend))
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
        """The figures of the last step looked at, by name; waits for them on CUDA."""
        self.deliver()
        return self._latest.metrics

    @property
    def counts(self) -> dict[str, list[int]]:
        """The histograms of the last step looked at, by name."""
        self.deliver()
        return self._latest.counts

    def step(self) -> None:
        """End a step: to be called after each update of the weights.

        ValueError after the first step looked at if no attention was caught in it.
        """
        looked = self._looking is not None
        self._end()
        if looked and not self._layers:
            raise ValueError(nothing_caught(self._model))
        self._step += 1
        self._begin()

    def close(self) -> None:
        """End the last step, and leave the model as it was."""
        self._end()
        self.deliver()
        self._whole.close()

    def _begin(self) -> None:
        if not self._schedule.is_due(self._step):
            return
        self.probe.arm()
        self._looking = ExitStack()
        if self._replacement is None:
            self._looking.enter_context(self._catch(self._model, self._attend))
        if self._config.inherited:
            roots = [self._model, *self._model.children()]
            self._looking.enter_context(repeating_forward(roots, self.probe))

    def _end(self) -> None:
        if self._looking is None:
            return
        self._looking.close()
        self._looking = None
        self.probe.disarm()
        self.deliver()
        transfer = self.probe.start_transfer()
        if transfer is not None:
            self._underway = (self._step, transfer)

    def deliver(self) -> None:
        """Hand the last step's figures to the sinks; waits for them on CUDA."""
        if self._underway is None:
            return
        step, transfer = self._underway
        self._underway = None
        self._latest = transfer.result()
        self.findings += [(step, layer, text) for layer, text in self._latest.findings]
        for sink in self._sinks:
            sink(step, self._latest)

    def _attend(self, call: AttentionCall, primary: Primary) -> Tensor:
        self._layers.setdefault(call.layer)
        if self._replacement is None:
            return self.probe.attend(call, primary)
        if not self._replacement.covers(call.layer):
            return primary(call.q, call.k, call.v)
        return self.probe.attend(call, _Replaced(self._replacement.of(call, primary), primary))

    @property
    def _catch(self) -> Catch:
        return catch_transformers if is_transformers_model(self._model) else catch_sdpa


@dataclass(frozen=True, slots=True)
class _Replaced:
    """What computes in a replaced layer, and the model's own attention beside it."""

    computes: Primary
    own: Primary

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.computes(q, k, v)


def _own(call: AttentionCall, primary: Primary) -> WithLse:
    assert isinstance(primary, _Replaced)
    return lambda q, k, v: (primary.own(q, k, v), None)
