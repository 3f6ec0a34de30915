"""What a study of commands will take: hours, bytes on disk and memory, from a few recorded updates.

Each arm's command is recorded for a few updates in a temporary folder, as `stability init` does,
once for all arms that differ in their seed, nudge or planted fault alone, a commit's in its
checkout. Up to _MOST updates are timed, and none is begun once _LONGEST_S have gone since the
first one; over ranks, which can't be stopped alike by their clocks, only the least are made. Where
a probe looks, it looks at some of these updates and not at others. A run warms up: libraries choose
their code in its first updates, up to seconds each. So what an update takes, and what a look adds,
is the median of the later half of its kind, and all that was slower counts once for each run, with
the program's start and end. A run is its updates, the looks of its probe, the states that it keeps
(copied, gathered, with the held-out loss if that is a function of the user's), and what lay beside
these in the trial. What a script evaluates after these updates is not seen, so that a study may
take longer. Distances, planted faults and the report are counted apart (`measuring_cost`).

Disk. The records of the trial, states by their number, and the log by its updates. Memory. The most
that the processes which train have held in a trial, of the host's together, of a GPU's one of them.
"""

import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from stability.config.masking import without_secrets
from stability.config.schema import BASELINE
from stability.probe.planted_faults import MOST
from stability.probe.schedule import Schedule
from stability.recorder.held_out import NONE_SEEN
from stability.recorder.inside.start_dtypes import other_dtypes
from stability.recorder.spooled import Spooled, read_spool
from stability.records.snapshots import snapshot_dtypes
from stability.study.distances import time_distance
from stability.study.foreign import RunFailedError, commanded
from stability.study.foreign_assay import FIRST_LOOKS, LOOK_GRADIENTS, planted_on
from stability.study.foreign_plan import ForeignRun
from stability.study.measuring_cost import (
    REPORT_BYTES,
    USUAL,
    MeasuringCost,
    most_gradients,
    settled,
)
from stability.study.named_functions import check_named_functions
from stability.study.run_commands import folder_of

__all__ = ["CommandCost", "CommandTrial", "cost_of_commands", "time_command"]

_LEAST, _LEAST_LOOKED = 4, 6
"""Updates of a trial without a probe, and with one, however long they take."""
_MOST = 24
_LONGEST_S = 8.0
"""Seconds after which a trial begins no further update."""
_KEPT = (1, 3)
"""Updates of a trial after which a state is kept, beside its last one."""
_EVERY, _GRADIENT_EVERY = 3, 6
"""How often a probe looks in a trial: at attention in the first update and each third one from
there, at the gradient after each sixth one, so that no update has both."""
_LOOKS = ("every", "gradient_every")


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandTrial:
    """What a few updates of a command have taken on this machine."""

    updates: int
    """How many."""
    update_seconds: float
    look_seconds: float
    """What a look at attention adds to its update; 0 if there is none."""
    gradient_seconds: float
    """What a look at the gradient adds."""
    state_seconds: float
    """What it takes to keep a state, and then to record it."""
    start_seconds: float
    """All else: the program's start and end, what warms up, the first update, the start's state."""
    distance_seconds: float
    """What it takes to measure how far two states are apart."""
    state_bytes: int
    """Of a state and its sketch."""
    update_bytes: float
    """Of the log."""
    fixed_bytes: int
    """Of what is written once."""
    memory: Mapping[str, int]
    """The most bytes that its processes have held, as `Spooled.memory`."""
    dtypes: Mapping[str, str] = field(default_factory=dict)
    """Of its start weights, by name."""
    evaluates: bool = True
    """Whether its script was seen to evaluate, or was not asked for it."""
    has_loss: bool = False
    """Whether a held-out loss was seen, which a PASS needs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandCost:
    """What a study of commands will take."""

    runs: int
    seconds_by_arm: dict[str, float]
    """One run after another, of all seeds of each arm."""
    seconds_by_seed: dict[int, float]
    look_seconds: float
    """What of it the looks add to the updates that they are made at."""
    measuring: MeasuringCost
    """What is measured beside the runs takes."""
    disk: dict[str, int]
    """Bytes that stay, by what they are."""
    memory: dict[str, int]
    """The most bytes that a run's processes hold of the `host`, and one of them of its `gpu`."""
    unevaluated: int = 0
    """The updates of a trial, if no script was seen to evaluate in them; else 0."""
    has_loss: bool = False
    """Whether a held-out loss was seen in each trial."""
    timed: int = 0
    """The least updates of a trial: of what a script does later nothing is known."""

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

    def to_dict(self) -> dict[str, Any]:
        """Return all of it in JSON values."""
        return {
            "runs": self.runs,
            "hours": self.seconds / 3600,
            "hours_of_runs": self.run_seconds / 3600,
            "hours_by_arm": {name: each / 3600 for name, each in self.seconds_by_arm.items()},
            "hours_by_seed": {seed: each / 3600 for seed, each in self.seconds_by_seed.items()},
            "hours_of_looks": self.look_seconds / 3600,
            "hours_of_measuring": self.measuring.hours,
            "disk_bytes": self.bytes,
            "disk": self.disk,
            "memory": self.memory,
            "unevaluated": self.unevaluated,
            "held_out_loss": self.has_loss,
            "timed_updates": self.timed,
        }


def cost_of_commands(
    runs: Sequence[ForeignRun], *, told: Callable[[str], None] = lambda _: None
) -> CommandCost:
    """Return what `runs`, of `plan_commands`, take from their beginning.

    `told` is given a line of how many updates are timed, and one before each trial, which takes
    seconds to minutes. ValueError, before the
    first one, for a function that is named and not there; and, naming the arm, for a command that
    fails, makes less updates than a trial, or has weights of other dtypes than the baseline's.
    """
    first, first_arm = runs[0].seed, runs[0].arm
    check_named_functions(runs, {run.arm: folder_of(run) for run in runs if run.seed == first})
    keys = {run.arm: _key(run) for run in runs if run.seed == first}
    trials: dict[str, CommandTrial] = {}
    by_arm, by_seed = dict.fromkeys(keys, 0.0), dict.fromkeys((run.seed for run in runs), 0.0)
    of_looks, states, records = 0.0, 0, 0.0
    count = len(set(keys.values()))
    told(_trials_ahead(runs, keys))
    for run in runs:
        key = keys[run.arm]
        if key not in trials:
            least, most = _updates(run)
            up_to = "up to " if most > least else ""
            told(f"timing {len(trials) + 1} of {count}: {run.arm}, {up_to}{most} updates")
            trials[key] = time_command(run)
        trial = trials[key]
        seconds, looks = _seconds(run, trial)
        by_arm[run.arm] += seconds
        by_seed[run.seed] += seconds
        of_looks += looks
        states += (1 + len(run.asked.snapshot_steps)) * trial.state_bytes
        records += trial.fixed_bytes + run.asked.steps * trial.update_bytes
    first_key = keys[first_arm]
    for arm, key in keys.items():
        if said := other_dtypes(trials[key].dtypes, trials[first_key].dtypes):
            raise ValueError(f"arm {arm}: {said}")
    known = dict.fromkeys(x for each in trials.values() for x in each.memory)
    return CommandCost(
        runs=len(runs),
        seconds_by_arm=by_arm,
        seconds_by_seed=by_seed,
        look_seconds=of_looks,
        measuring=_measuring(runs, {arm: trials[key] for arm, key in keys.items()}),
        disk={"snapshots": states, "records": round(records), "report": REPORT_BYTES},
        unevaluated=0 if any(x.evaluates for x in trials.values()) else trials[first_key].updates,
        has_loss=all(x.has_loss for x in trials.values()),
        timed=min(x.updates for x in trials.values()),
        memory={x: max(each.memory.get(x, 0) for each in trials.values()) for x in known},
    )


def _trials_ahead(runs: Sequence[ForeignRun], keys: Mapping[str, str]) -> str:
    """Return how many updates are timed, of the arms whose `keys` tell them apart."""
    kinds = {keys[run.arm]: run for run in reversed(runs)}
    most = sum(_updates(run)[1] for run in kinds.values())
    many = f"{len(kinds)} kind{'' if len(kinds) == 1 else 's'}"
    return (
        f"{len(runs)} runs are of {many}: up to {most} updates are timed in all; of each no "
        f"further one is begun {_LONGEST_S:.0f} seconds after the first"
    )


def _seconds(run: ForeignRun, trial: CommandTrial) -> tuple[float, float]:
    """Return what a run takes, and what of it looks add."""
    probe, steps = run.asked.probe, run.asked.steps
    of_layers = Schedule(every=probe.get("every", 0))
    of_gradient = Schedule(every=probe.get("gradient_every", 0))
    # the first update, with its look, is in the start
    looks = trial.look_seconds * sum(of_layers.is_due(step) for step in range(1, steps))
    looks += trial.gradient_seconds * sum(of_gradient.is_due(x) for x in range(1, steps + 1))
    plain = trial.start_seconds + (steps - 1) * trial.update_seconds
    return plain + looks + len(run.asked.snapshot_steps) * trial.state_seconds, looks


def _key(run: ForeignRun) -> str:
    """Return the same text for all runs that are timed once."""
    own = {**run.config, "probe": _trial_probe(run.asked.probe)}
    for name in ("nudge", "changes"):
        own.pop(name, None)
    own["attention"] = run.asked.attention.partition("+")[0]
    return json.dumps(own, sort_keys=True)


def _updates(run: ForeignRun) -> tuple[int, int]:
    """Return the least and the most updates of a trial."""
    least = _LEAST_LOOKED if run.asked.probe else _LEAST
    return least, max(least, min(_MOST, run.asked.steps))


def _trial_probe(probe: Mapping[str, Any]) -> dict[str, Any]:
    """Return a probe that looks at some updates of a trial; empty for none."""
    if not probe:
        return {}
    asked = {"every": _EVERY, "gradient_every": _GRADIENT_EVERY}
    return {**probe, **{name: every * bool(probe[name]) for name, every in asked.items()}}


def time_command(run: ForeignRun) -> CommandTrial:
    """Record a few updates of a run's command in a temporary folder, and return what they take.

    ValueError as `cost_of_commands`.
    """
    least, most = _updates(run)
    kept = (*_KEPT, most)
    asked = replace(
        run.asked,
        steps=most,
        snapshot_steps=kept,
        looks=(0,),
        probe=_trial_probe(run.asked.probe),
        same_start=False,
    )
    with tempfile.TemporaryDirectory(prefix="stability-trial-") as folder:
        trial = replace(
            run,
            study="trial",
            folder=Path(folder),
            arm=BASELINE,  # a trial is paired with nothing
            role="baseline",
            diff={},
            axis="none",
            config={**run.config, "train": {"steps": most, "snapshot_steps": [*kept]}},
            asked=asked,
            # no arm's own, whose files the command may go on from
            words=[word.replace("{arm}", "trial") for word in run.words],
            env={
                **run.env,
                "WANDB_MODE": "disabled",
                "STABILITY_TRIAL": f"{least} {_LONGEST_S}",
            },
        )
        began = time.time()
        output = Path(folder) / "output.txt"
        try:
            with commanded(trial, folder=folder_of(run), output=output) as (record, command):
                spooled = read_spool(record.spool)
                ends = _end_of_trial(run, spooled)
                replace(record, run=_ended_after(ends, trial)).write(command)
        except (RunFailedError, ValueError) as error:
            said = str(error)
            if isinstance(error, RunFailedError):  # which begins with the run
                said = said.partition(": ")[2]
            said = without_secrets(said, run.words, run.env)
            raise ValueError(f"arm {run.arm}: its trial of {most} updates: {said}") from error
        return _trial(trial, spooled, time.time() - began)


def _end_of_trial(run: ForeignRun, spooled: Spooled) -> int:
    """Return the updates that a trial had to make; fewer where its clock or the run ended it."""
    _, most = _updates(run)
    if spooled.clock.get("is_over") or spooled.step == run.asked.steps:
        return spooled.step
    return most


def _ended_after(steps: int, trial: ForeignRun) -> ForeignRun:
    """Return the trial as one of so many updates."""
    kept = [step for step in trial.asked.snapshot_steps if step < steps] + [steps]
    return replace(
        trial,
        config={**trial.config, "train": {"steps": steps, "snapshot_steps": kept}},
        asked=replace(trial.asked, steps=steps, snapshot_steps=tuple(kept)),
    )


def _trial(run: ForeignRun, spooled: Spooled, whole: float) -> CommandTrial:
    """Return what a trial says, which has taken `whole` seconds."""
    made, kept = spooled.step, spooled.times
    seconds: dict[str, list[float]] = {kind: [] for kind in ("plain", *_LOOKS)}
    for step in range(2, made + 1):  # the first one warms up
        began = kept[step - 1][1] if step - 1 in kept else spooled.clock["ended"][step - 2]
        took = max(0.0, spooled.clock["ended"][step - 1] - began)
        seconds[_kind(step, run.asked.probe)].append(took)
    update = settled(seconds["plain"])
    looks = {kind: max(0.0, settled(seconds[kind]) - update) for kind in _LOOKS if seconds[kind]}
    of_updates = (made - 1) * update + sum(looks[kind] * len(seconds[kind]) for kind in looks)
    steps = sorted(kept)
    written = [run.paths.sketch(step).stat().st_mtime for step in (0, *steps)]
    recorded = (written[-1] - written[0]) / len(steps)
    state = recorded + sum(end - begin for begin, end in kept.values()) / len(kept)
    sizes = {path: path.stat().st_size for path in run.paths.root.rglob("*") if path.is_file()}
    states = [run.paths.held_snapshot(steps[-1]), run.paths.sketch(steps[-1])]
    log = sizes.get(run.paths.metrics, 0)
    of_states = sum(sizes[path] for path in sizes if path.parent in {x.parent for x in states})
    return CommandTrial(
        updates=made,
        update_seconds=update,
        look_seconds=looks.get("every", 0.0),
        gradient_seconds=looks.get("gradient_every", 0.0),
        state_seconds=state,
        start_seconds=max(0.0, whole - of_updates - len(steps) * state),
        distance_seconds=time_distance(run.paths.held_snapshot(0), states[0]),
        state_bytes=sum(sizes[path] for path in states),
        update_bytes=log / made,
        fixed_bytes=sum(sizes.values()) - of_states - log,
        memory=spooled.memory,
        dtypes={
            name: dtype
            for name, dtype in snapshot_dtypes(run.paths.held_snapshot(0)).items()
            if name not in spooled.buffers
        },
        evaluates=not any(NONE_SEEN in note for note in spooled.held_out.notes),
        has_loss=bool(spooled.held_out.losses),
    )


def _kind(step: int, probe: Mapping[str, Any]) -> str:
    """Return what an update of a trial has beside itself: a look, by its key, or nothing."""
    if probe.get("every") and (step - 1) % _EVERY == 0:
        return "every"
    if probe.get("gradient_every") and step % _GRADIENT_EVERY == 0:
        return "gradient_every"
    return "plain"


def _measuring(runs: Sequence[ForeignRun], trials: Mapping[str, CommandTrial]) -> MeasuringCost:
    """Return what is measured beside `runs` takes, whose arms' `trials` are given."""
    first = [run for run in runs if run.seed == runs[0].seed]
    # each run that ends is measured from those of its seed that have ended
    files = sum(
        count * (1 + len(run.asked.snapshot_steps))
        for count, run in enumerate(first, start=1)
        if count > 1
    )
    pair = max(trials[run.arm].distance_seconds for run in first)
    seeds = len({run.seed for run in runs})
    planted = [_planted(run, trials[run.arm]) for run in planted_on(runs)]
    return MeasuringCost(
        distances=seeds * files * pair / 2,
        planted=sum(usual for usual, _ in planted),
        planted_most=sum(most for _, most in planted),
    )


def _planted(run: ForeignRun, trial: CommandTrial) -> tuple[float, float]:
    """Return what planting faults on a run usually takes, and at most."""
    steps, gradient = run.asked.steps, trial.gradient_seconds / LOOK_GRADIENTS
    # its command runs again, and once more where more batches may settle a fault
    again, more = (
        trial.start_seconds + min(looks, steps) * trial.update_seconds
        for looks in (FIRST_LOOKS, MOST)
    )
    most = again + most_gradients(steps, (FIRST_LOOKS, MOST)) * gradient
    most += more if steps > FIRST_LOOKS else 0.0
    return min(most, again + USUAL * gradient), most
