"""What a study will take: hours, bytes on disk and memory, from its config and a few timed steps.

Time. Of each kind of arm a few updates are made in a fresh process, as its runs; where a probe
looks, it looks at some of them and not at others (`arm_trial`). None is begun once some seconds
have gone since the first one, and over ranks, which can't be stopped alike by their clocks, the
least are made. An update takes the median of the later half of its kind, and what is slower as a
run warms up counts once for each run. A run is its updates, the looks of its probe, its snapshots
with the held-out loss, its checkpoints, each as long as a snapshot, and what lay beside these in
the trial: building the model, reading the text. Arms that differ in their seed, their nudge, their
planted fault or in how often they are looked at are timed once, with the looks of all of them.
Distances, planted faults and the report are counted apart (`measuring_cost`). A run over ranks is
timed over as many, on this machine.

Disk. Snapshots with their sketches, checkpoints and predictions follow from the config
(`size_check`), and which of them stay from the study's `keep` (`storage`); what is sure to be equal
counts once. The log is that of the trial for each update and each look, and the report comes once.
W&B's own files are left out. While a study trains, the first seed and one more are there whole.

Memory. The least that the largest arm does with (`memory_estimate`).
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from stability.config.axes import CHANGES_WEIGHTS, touches
from stability.config.convert import to_dict
from stability.config.roles import is_control
from stability.config.schema import (
    ArmConfig,
    NudgeConfig,
    ProbeConfig,
    SeedConfig,
)
from stability.config.study import PolicyConfig
from stability.probe.planted_faults import MOST
from stability.probe.schedule import Schedule
from stability.study.arm_trial import Trial, kinds_of_looks, most_updates, time_arm
from stability.study.assay import LOOK_GRADIENTS, SEQUENCES, gradient_updates, planted_on
from stability.study.assemble import resolve_device
from stability.study.call_over_ranks import call_over_ranks
from stability.study.fresh_process import call_alone
from stability.study.measuring_cost import (
    REPORT_BYTES,
    USUAL,
    MeasuringCost,
    most_gradients,
)
from stability.study.memory_estimate import Estimate, estimate_memory
from stability.study.run import Run, snapshot_steps_of
from stability.study.size_check import planned_files
from stability.study.storage import keeps, stored_once

__all__ = ["StudyCost", "cost_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyCost:
    """What a study will take."""

    runs: int
    seconds_by_arm: dict[str, float]
    """One run after another, of all seeds of each arm."""
    look_seconds: float
    """What of it the looks add to the updates that they are made at."""
    measuring: MeasuringCost
    """What is measured beside the runs takes."""
    keep: str
    """What stays of the snapshots."""
    disk: dict[str, int]
    """Bytes that stay, by what they are."""
    disk_of_all: dict[str, int]
    """The same, were everything kept."""
    memory: Estimate
    """Of the largest run."""
    on_gpu: bool

    @property
    def run_seconds(self) -> float:
        """What all runs take."""
        return sum(self.seconds_by_arm.values())

    @property
    def seconds(self) -> float:
        """What the study takes."""
        return self.run_seconds + self.measuring.seconds

    @property
    def bytes(self) -> int:
        """All that the study leaves on disk."""
        return sum(self.disk.values())

    @property
    def bytes_of_all(self) -> int:
        """The same, were everything kept."""
        return sum(self.disk_of_all.values())

    def to_dict(self) -> dict[str, Any]:
        """Return all of it in JSON values."""
        return {
            "runs": self.runs,
            "hours": self.seconds / 3600,
            "hours_of_runs": self.run_seconds / 3600,
            "hours_by_arm": {name: each / 3600 for name, each in self.seconds_by_arm.items()},
            "hours_of_looks": self.look_seconds / 3600,
            "hours_of_measuring": self.measuring.hours,
            "disk_bytes": self.bytes,
            "disk": self.disk,
            "keep": self.keep,
            "disk_bytes_with_keep_all": self.bytes_of_all,
            "disk_with_keep_all": self.disk_of_all,
            "memory_bytes": self.memory.bytes,
            "memory": [asdict(part) for part in self.memory.parts],
            "device": "gpu" if self.on_gpu else "cpu",
        }


def cost_of(
    runs: Sequence[Run],
    keep: str,
    *,
    policy: PolicyConfig | None = None,
    isolated: bool = True,
    told: Callable[[str], None] = lambda _: None,
) -> StudyCost:
    """Return what `runs` take from their beginning, and leave under a policy of what to keep.

    Faults are planted on the candidates of `policy`, by default on the arms of that role.
    `isolated`, the trials are in processes of their own. `told` is given a line before each of
    them, which takes seconds, and one of how many updates that is. ValueError as `assemble`.
    """
    trials = _trials(runs, isolated=isolated, told=told)
    by_arm: dict[str, float] = {}
    of_looks, records = 0.0, 0.0
    for run in runs:
        known = trials[_alike(run)]
        looks, at_gradient = _looks(run)
        added = looks * known.look_seconds + at_gradient * known.gradient_seconds
        seconds = known.start_seconds + run.last_step * known.update_seconds + added
        seconds += _kept_beside(run) * known.snapshot_seconds
        by_arm[run.arm.name] = by_arm.get(run.arm.name, 0.0) + seconds
        of_looks += added
        log = looks * known.look_bytes + at_gradient * known.gradient_bytes
        records += run.last_step * known.update_bytes + log + known.fixed_bytes
    estimates = {}
    for run in runs:
        found = estimate_memory(run.config, run.last_step)
        on_host = resolve_device(run.config).type != "cuda"
        estimates[run.arm.name] = found.of_all(run.config.parallel.ranks if on_host else 1)
    always = {"records": round(records), "report": REPORT_BYTES}
    largest = max(runs, key=lambda run: estimates[run.arm.name].bytes)
    return StudyCost(
        runs=len(runs),
        seconds_by_arm=by_arm,
        look_seconds=of_looks,
        measuring=_measuring(runs, keep, trials, policy),
        keep=keep,
        disk={**_stored(runs, keep), **always},
        disk_of_all={**_stored(runs, "all"), **always},
        memory=estimates[largest.arm.name],
        on_gpu=resolve_device(largest.config).type == "cuda",
    )


def _trials(
    runs: Sequence[Run], *, isolated: bool, told: Callable[[str], None]
) -> dict[str, Trial]:
    """Return what the updates of runs take, by `_alike`: each kind of arm is timed once."""
    looked = {_key(run.config): _alike(run) for run in runs if kinds_of_looks(run.config)}
    kinds: dict[str, list[Run]] = {}
    for run in runs:
        # what is not looked at is timed with what is, where that is the same beside its probe
        shared = "" if kinds_of_looks(run.config) else looked.get(_alike(run), "")
        kinds.setdefault(shared or _alike(run), []).append(run)
    asked = {key: _timed_as(alike) for key, alike in kinds.items()}
    most = sum(map(most_updates, asked.values()))
    kinds_of = f"{len(kinds)} kind{'' if len(kinds) == 1 else 's'}"
    told(f"{len(runs)} runs are of {kinds_of}: up to {most} updates are timed in all")
    if isolated:
        call_alone(int)  # the server that all processes are forked from begins, as before a study
    found: dict[str, Trial] = {}
    for place, (key, config) in enumerate(asked.items(), start=1):
        first = kinds[key][0]
        told(f"timing {place} of {len(asked)}: {_trial_of(first, config)}")
        found[key] = _timed(config, isolated=isolated)
    return {**{bare: found[key] for bare, key in looked.items()}, **found}


def _stored(runs: Sequence[Run], keep: str) -> dict[str, int]:
    """Return the bytes that stay of what is written at single steps; equal files count once."""
    larger = any(touches(run.arm.diff, CHANGES_WEIGHTS) for run in runs)
    seen: set[tuple[object, ...]] = set()
    found: dict[str, int] = {}
    for run in runs:
        for what, (steps, size) in planned_files(run).items():
            for step in steps:
                is_last = step == max(steps)
                key = (what, *stored_once(run, step))
                stays = keeps(run, keep, what, step=step, is_last=is_last, larger=larger)
                if what in ("snapshots", "sketches"):
                    stays &= key not in seen
                    seen |= {key} if stays else set()
                found[what] = found.get(what, 0) + stays * size
    return found


def _kept_beside(run: Run) -> int:
    """Return at how many steps a run keeps something, beside its first and last snapshot."""
    checkpoints = run.last_step // run.config.train.checkpoint_every
    return len(_snapshots(run)) - 2 + checkpoints


def _snapshots(run: Run) -> set[int]:
    return {step for step in snapshot_steps_of(run) if step <= run.last_step}


def _measuring(
    runs: Sequence[Run], keep: str, trials: Mapping[str, Trial], policy: PolicyConfig | None
) -> MeasuringCost:
    """Return what is measured beside `runs` takes, which are timed as `trials` say."""
    files = 0
    first = [run for run in runs if run.seed == runs[0].seed]
    for count, run in enumerate(first, start=1):
        # as each that is no control ends; where all are kept, once
        at_its_end = keep != "all" and not is_control(run.arm.role)
        files += len(_snapshots(run)) * (count * at_its_end + (keep == "all")) * (len(first) > 1)
    gradients = [
        _gradient_seconds(run.config, trials[_alike(run)])
        for run in planted_on(runs, policy or PolicyConfig())
    ]
    pair = max(trials[_alike(run)].distance_seconds for run in first)
    seeds = len({run.seed for run in runs})
    return MeasuringCost(
        distances=seeds * files * pair / 2,
        planted=USUAL * sum(gradients),
        planted_most=most_gradients(MOST) * sum(gradients),
    )


def _gradient_seconds(config: ArmConfig, trial: Trial) -> float:
    """Return what a gradient takes that a fault is planted in."""
    batch, probe = config.train.batch_size, config.probe
    if not probe.gradient_every:
        return gradient_updates(config) * trial.update_seconds
    sequences = min(probe.gradient_sequences or batch, batch)
    return trial.gradient_seconds / LOOK_GRADIENTS * min(SEQUENCES, batch) / sequences


def _looks(run: Run) -> tuple[int, int]:
    """Return at how many updates of a run layers are looked at, and at how many the gradient."""
    probe, steps = run.config.probe, range(run.last_step)
    of_layers = Schedule(every=probe.every, steps=probe.steps, per_decade=probe.per_decade)
    of_gradient = Schedule(every=probe.gradient_every)
    return sum(map(of_layers.is_due, steps)), sum(map(of_gradient.is_due, steps))


def _alike(run: Run) -> str:
    """Return a key that is the same for all runs that are timed once."""
    return _key(run.config, run.config.probe if kinds_of_looks(run.config) else None)


def _key(config: ArmConfig, probe: ProbeConfig | None = None) -> str:
    """Return the key of an arm with that probe, however often it looks, or without any."""
    looked = replace(probe or ProbeConfig(), every=0, steps=(), per_decade=0, gradient_every=0)
    return json.dumps(to_dict(replace(_unseeded(config), probe=looked)), sort_keys=True)


def _unseeded(config: ArmConfig) -> ArmConfig:
    """Return an arm's config less what costs nothing: its seed, nudge and planted fault."""
    attention = replace(config.attention, fault="")
    return replace(config, seed=SeedConfig(), nudge=NudgeConfig(), attention=attention)


def _timed_as(alike: Sequence[Run]) -> ArmConfig:
    """Return what runs are timed as that differ in how often they are looked at: with all looks."""
    looks = {kind for run in alike for kind in kinds_of_looks(run.config)}
    first = next((run.config for run in alike if kinds_of_looks(run.config)), alike[0].config)
    due = {kind: int(kind in looks) for kind in ("every", "gradient_every")}
    probe = replace(first.probe, steps=(), per_decade=0, **due)
    return replace(_unseeded(first), probe=probe)


def _trial_of(run: Run, config: ArmConfig) -> str:
    """Return what is made to time a run, and those that are timed with it, as `config`."""
    looks = ", some with the probe" if kinds_of_looks(config) else ""
    return f"{run.arm.name}, seed {run.seed}: up to {most_updates(config)} updates{looks}"


def _timed(config: ArmConfig, *, isolated: bool) -> Trial:
    if config.parallel.ranks > 1:
        return call_over_ranks(config.parallel.ranks, time_arm, config)[0]
    began = time.perf_counter()
    trial, inside = call_alone(_time_all, config) if isolated else _time_all(config)
    outside = time.perf_counter() - began - inside
    return replace(trial, start_seconds=trial.start_seconds + outside)


def _time_all(config: ArmConfig) -> tuple[Trial, float]:
    """Return the trial of an arm, and what all of it has taken."""
    began = time.perf_counter()
    return time_arm(config), time.perf_counter() - began
