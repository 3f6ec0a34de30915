"""What a study of commands will take: hours, bytes on disk and memory, from a few recorded updates.

Each arm's command is recorded for a few updates in a temporary folder, as `stability init` does,
once for all arms that differ in their seed, nudge or planted fault alone, a commit's in its
checkout. Where a probe looks, it looks at some of these updates and not at others. An update's time
is that between two kept states, each of which waits for the GPU; the first update warms up and does
not count. A run is its updates, the looks of its probe, the states that it keeps (copied, gathered,
with the held-out loss if that is a function of the user's), and what lay beside these in the trial.
What a script evaluates after these updates is not seen, so that a study may take longer; distances,
planted faults and the report come on top.

Disk. The records of the trial, states by their number, and the log by its updates. Memory. The most
that the processes which train have held in a trial, of the host's together, of a GPU's one of them.
"""

import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from stability.config.masking import without_secrets
from stability.config.schema import BASELINE
from stability.probe.schedule import Schedule
from stability.recorder.held_out import NONE_SEEN
from stability.recorder.inside.start_dtypes import other_dtypes
from stability.recorder.spooled import Spooled, read_spool
from stability.records.snapshots import snapshot_dtypes
from stability.study.cost_estimate import REPORT_BYTES
from stability.study.foreign import RunFailedError, commanded
from stability.study.foreign_plan import ForeignRun
from stability.study.named_functions import check_named_functions
from stability.study.run_commands import folder_of

__all__ = ["CommandCost", "CommandTrial", "cost_of_commands", "time_command"]

_PLAIN = (1, 4)
"""Updates after which a state is kept: between the two none is looked at."""
_EVERY, _GRADIENT_EVERY = 3, 6
"""How often a probe looks in a trial: at attention in updates 0 and 3, at the gradient after 6."""
_LOOKED = (1, 3, 4, 5, 6)
"""Where there is one: neither looks from 1 to 3 and from 4 to 5, each once in what follows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandTrial:
    """What a few updates of a command have taken on this machine."""

    update_seconds: float
    look_seconds: float
    """What a look at attention adds to its update; 0 if there is none."""
    gradient_seconds: float
    """What a look at the gradient adds."""
    state_seconds: float
    """What it takes to keep a state, and then to record it."""
    start_seconds: float
    """All else: the program's start and end, its first update, the start's state."""
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


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandCost:
    """What a study of commands will take."""

    runs: int
    seconds: float
    """One run after another."""
    seconds_by_arm: dict[str, float]
    """The same, of all seeds of each arm."""
    seconds_by_seed: dict[int, float]
    look_seconds: float
    """What of it the looks add to the updates that they are made at."""
    disk: dict[str, int]
    """Bytes that stay, by what they are."""
    memory: dict[str, int]
    """The most bytes that a run's processes hold of the `host`, and one of them of its `gpu`."""
    unevaluated: int = 0
    """The updates of a trial, if no script was seen to evaluate in them; else 0."""

    @property
    def bytes(self) -> int:
        """All that the study leaves on disk."""
        return sum(self.disk.values())

    def to_dict(self) -> dict[str, Any]:
        """Return all of it in JSON values."""
        return {
            "runs": self.runs,
            "hours": self.seconds / 3600,
            "hours_by_arm": {name: each / 3600 for name, each in self.seconds_by_arm.items()},
            "hours_by_seed": {seed: each / 3600 for seed, each in self.seconds_by_seed.items()},
            "hours_of_looks": self.look_seconds / 3600,
            "disk_bytes": self.bytes,
            "disk": self.disk,
            "memory": self.memory,
            "unevaluated": self.unevaluated,
        }


def cost_of_commands(
    runs: Sequence[ForeignRun], *, told: Callable[[str], None] = lambda _: None
) -> CommandCost:
    """Return what `runs`, of `plan_commands`, take from their beginning.

    `told` is given a line before each trial, which takes seconds to minutes. ValueError, before the
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
    for run in runs:
        key = keys[run.arm]
        if key not in trials:
            told(f"timing {len(trials) + 1} of {count}: {run.arm}, {_updates(run)[-1]} updates")
            trials[key] = time_command(run)
        trial = trials[key]
        seconds, looks = _seconds(run, trial)
        by_arm[run.arm] += seconds
        by_seed[run.seed] += seconds
        of_looks += looks
        states += (1 + len(run.asked.snapshot_steps)) * trial.state_bytes
        records += trial.fixed_bytes + run.asked.steps * trial.update_bytes
    for arm, key in keys.items():
        if said := other_dtypes(trials[key].dtypes, trials[keys[first_arm]].dtypes):
            raise ValueError(f"arm {arm}: {said}")
    known = dict.fromkeys(x for each in trials.values() for x in each.memory)
    return CommandCost(
        runs=len(runs),
        seconds=sum(by_arm.values()),
        seconds_by_arm=by_arm,
        seconds_by_seed=by_seed,
        look_seconds=of_looks,
        disk={"snapshots": states, "records": round(records), "report": REPORT_BYTES},
        unevaluated=0 if any(x.evaluates for x in trials.values()) else _updates(runs[0])[-1],
        memory={x: max(each.memory.get(x, 0) for each in trials.values()) for x in known},
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


def _updates(run: ForeignRun) -> tuple[int, ...]:
    """Return the updates of a trial after which a state is kept, the last one its end."""
    return _LOOKED if run.asked.probe else _PLAIN


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
    steps = _updates(run)
    asked = replace(
        run.asked,
        steps=steps[-1],
        snapshot_steps=steps,
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
            config={**run.config, "train": {"steps": steps[-1], "snapshot_steps": [*steps]}},
            asked=asked,
            # no arm's own, whose files the command may go on from
            words=[word.replace("{arm}", "trial") for word in run.words],
            env={**run.env, "WANDB_MODE": "disabled"},
        )
        began = time.time()
        output = Path(folder) / "output.txt"
        try:
            with commanded(trial, folder=folder_of(run), output=output) as (record, command):
                record.write(command)
                spooled = read_spool(record.spool)
        except (RunFailedError, ValueError) as error:
            said = str(error)
            if isinstance(error, RunFailedError):  # which begins with the run
                said = said.partition(": ")[2]
            said = without_secrets(said, run.words, run.env)
            raise ValueError(f"arm {run.arm}: its trial of {steps[-1]} updates: {said}") from error
        return _trial(trial, spooled, time.time() - began)


def _trial(run: ForeignRun, spooled: Spooled, whole: float) -> CommandTrial:
    """Return what a trial says, which has taken `whole` seconds."""
    steps, times = _updates(run), spooled.times

    def between(one: int, other: int) -> float:
        return max(0.0, times[other][0] - times[one][1]) / (other - one)

    added = {}
    if not run.asked.probe:
        update = between(*steps)
    else:
        update = (2 * between(1, 3) + between(4, 5)) / 3
        looks = {"every": between(3, 4), "gradient_every": between(5, 6)}
        added = {x: max(0.0, each - update) for x, each in looks.items() if run.asked.probe[x]}
    of_updates = sum(times[b][0] - times[a][1] for a, b in pairwise(steps))
    written = [run.paths.sketch(step).stat().st_mtime for step in (0, *steps)]
    recorded = (written[-1] - written[0]) / len(steps)
    state = recorded + sum(end - begin for begin, end in times.values()) / len(times)
    sizes = {path: path.stat().st_size for path in run.paths.root.rglob("*") if path.is_file()}
    states = [run.paths.held_snapshot(steps[-1]), run.paths.sketch(steps[-1])]
    log = sizes.get(run.paths.metrics, 0)
    of_states = sum(sizes[path] for path in sizes if path.parent in {x.parent for x in states})
    return CommandTrial(
        update_seconds=update,
        look_seconds=added.get("every", 0.0),
        gradient_seconds=added.get("gradient_every", 0.0),
        state_seconds=state,
        start_seconds=max(0.0, whole - of_updates - len(steps) * state),
        state_bytes=sum(sizes[path] for path in states),
        update_bytes=log / steps[-1],
        fixed_bytes=sum(sizes.values()) - of_states - log,
        memory=spooled.memory,
        dtypes={
            name: dtype
            for name, dtype in snapshot_dtypes(run.paths.held_snapshot(0)).items()
            if name not in spooled.buffers
        },
        evaluates=not any(NONE_SEEN in note for note in spooled.held_out.notes),
    )
