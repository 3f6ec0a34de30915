"""The `modules` of a session: which calls they mean, and whether those were met.

A key is a glob of modules or of wrapped functions, `loss`, `<glob>+loss` or `optimizer`; the first
that matches a layer has it. Leaves out catching (`module_calls`, `loss_calls`, `optimizer_steps`)
and comparing (`probe.module_probe`).
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from stability.config.schema import ProbeConfig
from stability.intercept.layer_globs import check_globs, check_globs_of_calls
from stability.intercept.layer_names import layer_names
from stability.intercept.loss_calls import LOSS, LossCalls, is_of_loss
from stability.intercept.module_calls import FUNCTIONS, ModuleCalls, Noted
from stability.intercept.optimizer_steps import OPTIMIZER, OptimizerSteps
from stability.probe.measurements import DeviationMeter, ProbeFinding
from stability.probe.micro_batches import Which
from stability.probe.module_candidates import ModuleCandidate, resolve_candidate
from stability.probe.module_probe import ModuleProbe

__all__ = ["ModuleCandidates", "WatchedModules", "described_modules", "resolve_modules"]

ModuleCandidates = Mapping[str, str | Callable[..., Any]]
"""Candidates as a user gives them, by glob."""

_NO_UPDATE = (
    "not seen: no optimizer of the model made a step in the step that was looked at, e.g. as "
    "GradScaler skips it, or as step() of what shadow yields was called before"
)


def resolve_modules(model: nn.Module, modules: ModuleCandidates) -> dict[str, ModuleCandidate]:
    """Return the candidates by glob; ValueError for a glob of nothing or an unknown candidate."""
    for glob in modules:
        of_modules = glob.removesuffix(f"+{LOSS}")
        if glob not in (LOSS, OPTIMIZER) and not _is_of_function(model, of_modules):
            check_globs(model, modules=[of_modules])
    found = {glob: resolve_candidate(one, glob) for glob, one in modules.items()}
    if OPTIMIZER in found and found[OPTIMIZER].function is None:
        raise ValueError(
            "shadow: modules['optimizer'] must be a function of an optimizer that makes one "
            f"update, got {found[OPTIMIZER].name!r}"
        )
    return found


def _is_of_function(model: nn.Module, glob: str) -> bool:
    names = layer_names(model).values()
    return any(fnmatchcase(f"{name}.{each}", glob) for name in names for each in FUNCTIONS)


def described_modules(candidates: Mapping[str, ModuleCandidate]) -> dict[str, dict[str, Any]]:
    """Return what each candidate is, by name, with the globs it is for, as JSON values."""
    described: dict[str, dict[str, Any]] = {}
    for glob, one in candidates.items():
        described.setdefault(one.name, {**one.description, "modules": []})["modules"].append(glob)
    return described


class WatchedModules:
    """Looks at the calls that `candidates` mean at due steps; measurements go to `meter`."""

    def __init__(
        self,
        model: nn.Module,
        candidates: Mapping[str, ModuleCandidate],
        config: ProbeConfig,
        meter: DeviationMeter,
        noted: Noted,
        micro_batches: Which = "first",
    ) -> None:
        self._globs = list(candidates)
        self._probe = ModuleProbe(config, meter, micro_batches)
        of_modules = {
            key: one for key, one in candidates.items() if not is_of_loss(key) and key != OPTIMIZER
        }
        of_losses = {key: one for key, one in candidates.items() if is_of_loss(key)}
        self._calls = ModuleCalls(model, of_modules, self._probe, noted)
        self._losses = LossCalls(model, of_losses, self._calls)
        self._steps = OptimizerSteps(model, candidates.get(OPTIMIZER), self._probe, noted)
        self._is_checked = not candidates

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Look at the calls of a due step inside, and compare them by its end."""
        if not self._globs:
            yield
            return
        self._probe.arm()
        try:
            with self._calls.catching(), self._losses.catching(), self._steps.catching():
                yield
        finally:
            self._probe.disarm()

    @property
    def awaits_optimizer(self) -> bool:
        """Whether an optimizer is to be looked at and none has made a step yet."""
        return OPTIMIZER in self._globs and not self._steps.called

    def check(self) -> Iterator[ProbeFinding]:
        """Yield what was not met in the first step; ValueError if a glob has met nothing."""
        if self._is_checked:
            return
        self._is_checked = True
        called = {layer.partition("#")[0] for layer in self._calls.called | self._steps.called}
        # a scaler of gradients skips steps, of which the first may well be one
        check_globs_of_calls(
            sorted(called),
            of="modules, functions, losses or optimizers that are called",
            modules=[glob for glob in self._globs if glob != OPTIMIZER],
        )
        if self.awaits_optimizer:
            yield ProbeFinding(OPTIMIZER, _NO_UPDATE)
        for layer in self._calls.not_called():
            yield ProbeFinding(layer, "not seen: it was not called in the step that was looked at")
