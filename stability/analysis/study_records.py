"""A study as its records tell it, read once: what was planned, and what each run left behind.

A study can be read at any moment: arms that have not started and runs that failed or are still
being written are part of the answer. Every judgement is left to `ladder`, `verdict` and
`pair_contract`.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal, get_args

from stability.analysis.drift_parents import Parents, check_drifts, parents_by_line
from stability.analysis.pair_contract import pair_breach, unseen_of_pair, wrong_end
from stability.analysis.witness_contract import Testimony, testimony_of, witness_gap
from stability.config.axes import MANY, NO_AXIS, axes_of, present_name
from stability.config.convert import from_dict, nearest, repeated
from stability.config.roles import default_role
from stability.config.schema import BASELINE, Role
from stability.config.study import PolicyConfig
from stability.records.events import Event, read_log_and_events
from stability.records.manifest import ENDED, Manifest, read_manifest
from stability.records.metric_columns import Column, MetricColumns, Series, column_of
from stability.records.metric_log import LogContent
from stability.records.metric_names import TRAIN_LOSS, drift_name
from stability.records.parallel_reading import ReaderProcess
from stability.records.paths import RunPaths, StudyPaths, list_runs
from stability.records.remade_drifts import RemadeDrifts, read_remade
from stability.records.run_files import file_damage, misplacement, missing_file
from stability.records.run_lock import is_held
from stability.records.study_file import StudyArm, StudyFile, read_study_file

__all__ = ["RecordedArm", "RecordedRun", "RecordedStudy", "RunState", "find_arm", "read_study"]

WORTH_A_PROCESS = 50_000_000
"""Bytes of logs that take as long to read as another process takes to start: half a second."""
MOST_PROCESSES = 4

_Reader = Callable[[Path], tuple[LogContent, list[Event]]]
_NO_ARM = "?"
"""The folder of an arm that can have none: no arm may be called so."""

RunState = Literal["running", "stopped", "interrupted", "failed", "diverged", "finished", "missing"]
"""`stopped`: the manifest says `running`, but no process trains the run: it was killed."""
STOPPED = "no process trains it any more; the same command goes on from its last checkpoint"


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedRun:
    """One arm with one seed; `manifest` is None and `error` says why where it can't be read."""

    paths: RunPaths
    seed: int
    manifest: Manifest | None
    metrics: Mapping[str, Series]
    """Without the drifts that are stale; empty where the run, or the pair, can't be relied on."""
    counts: Mapping[str, Mapping[int, list[int]]] = field(default_factory=dict)
    """Histograms by name, then step."""
    events: tuple[Event, ...] = ()
    error: str
    stamps: tuple[tuple[int, int], ...] = ()
    """Size and time of change (ns) of manifest, log, witness and folders when they were read; empty
    if unread."""
    has_process: bool = False
    """Whether a process held the run's lock when it was read; only asked if it says `running`."""
    log: MetricColumns = field(default_factory=MetricColumns)
    """All that the log says, whatever may be taken of it."""
    parents: Mapping[int, Parents] = field(default_factory=dict)
    """The snapshots that drifts were computed from, by the number of the log's line."""
    stale: Mapping[int, str] = field(default_factory=dict)
    """By step why the drifts there are left out."""
    remade: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    """By step the drifts that were computed anew, and stand in the place of those in the log."""
    unproven: tuple[int, ...] = ()
    """Steps whose drifts do not say what they were computed from."""
    unwitnessed: str = ""
    """Why it is not proven what it or its baseline executed; empty too where neither says."""
    unseen: tuple[str, ...] = ()
    """What of its start and its batches is not on record to be its baseline's, all of it."""
    breach: str = ""
    """Why it is no pair with its baseline, so that none of its metrics may be taken."""
    paired_with: tuple[tuple[int, int], ...] = ()
    """The stamps of what else the drifts were held against; empty if they were not."""

    @property
    def state(self) -> RunState:
        """The manifest's state; `missing` if never started, `failed` if unreadable."""
        if self.error or self.breach:
            return "failed"
        if self.manifest is None:
            return "missing"
        is_stopped = self.manifest.state == "running" and not self.has_process
        return "stopped" if is_stopped else self.manifest.state

    @property
    def message(self) -> str:
        """What the run or the reader had to say; mostly empty."""
        own = self.manifest.message if self.manifest else ""
        # why a run has failed itself, not what its record lacks for that
        has_failed = self.manifest is not None and self.manifest.state == "failed"
        said = self.error or (has_failed and own) or self.breach or own
        return said or (STOPPED if self.state == "stopped" else "")

    def series(self, name: str) -> dict[int, float]:
        """Return the values of a metric by step; empty if it was never logged."""
        found = self.metrics.get(name)
        return dict(zip(found.steps, found.values, strict=True)) if found else {}

    def column(self, name: str) -> Column:
        """Return a metric as arrays, in the order of the log; empty if it was never logged."""
        return column_of(self.metrics, name)

    def drift(self, metric: str, parameter: str = "all") -> dict[int, float]:
        """Return a drift metric by step."""
        return self.series(drift_name(parameter, metric))

    def loss(self) -> dict[int, float]:
        """Return the training loss by step."""
        return self.series(TRAIN_LOSS)


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedArm:
    """One arm: what it changes, and its runs by seed."""

    name: str
    axis: str
    """The path of the config that it changes; `none`, or `many`."""
    diff: Mapping[str, list[Any]]
    """Dotted config path -> [baseline's value, this arm's value]."""
    role: Role
    """What it is there for."""
    until: int
    """The last step it trains to."""
    runs: Mapping[int, RecordedRun]


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedStudy:
    """What a study planned and what is on disk; the baseline comes first."""

    name: str
    question: str
    yardstick: str
    base: Mapping[str, Any]
    """The baseline's config, as plain JSON values."""
    seeds: tuple[int, ...]
    steps: int
    early_step: int
    """The early step the config asks for; 0 if it names none (`ladder.early_step_of`)."""
    policy: PolicyConfig
    arms: tuple[RecordedArm, ...]
    folder: Path
    """Where it was read from."""
    unlisted: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Seeds by arm whose runs are on disk but not in the study: of an arm that was taken out of its
    YAML file, or of a recorded one that has failed. Nothing is computed from them."""

    def arm(self, name: str) -> RecordedArm | None:
        """Return the arm of that name, if the study has it."""
        return next((arm for arm in self.arms if arm.name == name), None)

    @property
    def candidates(self) -> tuple[RecordedArm, ...]:
        """Every arm but the baseline."""
        return tuple(arm for arm in self.arms if arm.name != BASELINE)

    @property
    def planned_snapshots(self) -> list[int]:
        """The steps at which the study compares weights, sorted, from 0 to the last."""
        asked = self.base["train"].get("snapshot_steps", ())
        return sorted({0, self.steps, *(step for step in asked if 0 <= step <= self.steps)})

    @property
    def drift_steps(self) -> list[int]:
        """The steps at which some arm's drift is on record, sorted."""
        runs = (run for arm in self.candidates for run in arm.runs.values())
        return sorted({step for run in runs for step in run.drift("rel_l2")})


def read_study(
    study_dir: Path, known: RecordedStudy | None = None, *, has_logs: bool = True
) -> RecordedStudy:
    """Read the records of the study in `study_dir`.

    Runs whose manifest and log have not changed since `known` was read are taken from there.
    Without `has_logs` no log is opened: the runs have states, but no metrics and no events.
    ValueError if `study.json` is missing or is no study; nothing else on disk can make it fail.
    """
    path = StudyPaths(study_dir).study
    content = read_study_file(study_dir)
    config = content.config
    return RecordedStudy(
        name=config["name"],
        question=config["question"],
        yardstick=config.get("yardstick", ""),
        base=config["base"],
        seeds=_seeds(config["seeds"], path),
        steps=config["base"]["train"]["steps"],
        early_step=config.get("early_step", 0),
        policy=_policy(config.get("policy") or {}, path),
        arms=_read_arms(study_dir, content, known, has_logs=has_logs),
        folder=study_dir,
        unlisted=_unlisted(study_dir, content),
    )


def _seeds(seeds: Sequence[int], path: Path) -> tuple[int, ...]:
    """Return the recorded seeds; ValueError for one that is listed, and would count, twice."""
    again = repeated(seeds)
    if again is not None:
        raise ValueError(f"{path} lists seed {again} twice, in {list(seeds)}")
    return tuple(seeds)


def _policy(values: Mapping[str, Any], path: Path) -> PolicyConfig:
    """Return the recorded policy; a limit of an older version, which judged drift, is left out."""
    known = {name: value for name, value in values.items() if name in PolicyConfig.__slots__}
    return from_dict(PolicyConfig, known, str(path))


def _unlisted(study_dir: Path, content: StudyFile) -> dict[str, tuple[int, ...]]:
    listed = {arm["name"] for arm in content.arms}
    seeds = set(content.config["seeds"])
    found: dict[str, tuple[int, ...]] = {}
    for run in list_runs(study_dir):
        if (run.arm not in listed or run.seed not in seeds) and run.manifest.exists():
            found[run.arm] = (*found.get(run.arm, ()), run.seed)
    return found


def find_arm(study: RecordedStudy, name: str) -> RecordedArm:
    """Return the arm called `name`; ValueError names the nearest ones if there is none."""
    arm = study.arm(name)
    if arm is None:
        known = [arm.name for arm in study.arms]
        raise ValueError(
            f"arm must be one of the study's {len(known)}, got {name!r}; nearest: "
            f"{nearest(name, known)}"
        )
    return arm


def _fault(
    paths: RunPaths,
    manifest: Manifest,
    until: int,
    stamps: tuple[tuple[int, int], ...],
    *,
    has_log: bool,
) -> str:
    """Return why nothing of a run may be taken; empty if it may.

    The bytes of snapshots and checkpoints are not looked at: `verify` does (`study_check`).
    """
    end = wrong_end(manifest, until)
    if end:
        return f"it {end}"
    missing = missing_file(paths, manifest)
    # of a run that is trained meanwhile, what is missing may be listed no more
    if missing and _stamp(paths.manifest) == stamps[0]:
        return f"damaged: {missing}"
    # a log that is still written has outgrown any checksum: only an ended one is held to it
    log = paths.metrics
    is_listed = manifest.state in ENDED and paths.name_of(log) in manifest.files
    if has_log and is_listed and file_damage(paths, manifest, log):
        return f"records can't be read: {log} is not the one that the manifest lists"
    return ""


def _read_arms(
    study_dir: Path, content: StudyFile, known: RecordedStudy | None, *, has_logs: bool
) -> tuple[RecordedArm, ...]:
    config, arms, seeds = content.config, content.arms, content.config["seeds"]
    path = StudyPaths(study_dir).study
    again = repeated([arm["name"] for arm in arms])
    if again is not None:
        raise ValueError(f"{path} lists the arm {again!r} twice; it would count twice")
    arms_before = known.arms if known else ()
    before = {(arm.name, seed): run for arm in arms_before for seed, run in arm.runs.items()}
    wanted = [(arm["name"], seed) for arm in arms for seed in seeds]
    ends = {arm["name"]: arm.get("until", config["base"]["train"]["steps"]) for arm in arms}
    with ExitStack() as stack:
        readers: SimpleQueue[_Reader] = SimpleQueue()
        readers.put(read_log_and_events if has_logs else _read_nothing)
        with suppress(OSError):  # no more processes: this one reads it all
            # read again, most logs are known: what has grown is not worth starting processes for
            for _ in range(_helpers(study_dir) if has_logs and not known else 0):
                readers.put(stack.enter_context(ReaderProcess(read_log_and_events)).read)

        def read(one: tuple[str, int]) -> RecordedRun:
            reader = readers.get()
            try:
                known_run = before.get(one)
                return _read_run(study_dir, config["name"], *one, ends[one[0]], known_run, reader)
            finally:
                readers.put(reader)

        pool = stack.enter_context(ThreadPoolExecutor(readers.qsize()))
        found = dict(zip(wanted, list(pool.map(read, wanted)), strict=True))
    remade = {seed: _remade(study_dir, seed) for seed in seeds}
    # a baseline has many candidates, and is asked once for all of them
    of_baseline = cache(lambda seed: _testimony(found[BASELINE, seed]))

    def testify(run: RecordedRun) -> Testimony:
        return of_baseline(run.seed) if run.paths.arm == BASELINE else _testimony(run)

    return tuple(
        RecordedArm(
            name=arm["name"],
            axis=_axis(arm, f"{path}: axis of {arm['name']!r}"),
            diff=arm["diff"],
            role=_one_of(Role, _role(arm, config), f"{path}: role of {arm['name']!r}"),
            until=ends[arm["name"]],
            runs={
                seed: _as_pair(
                    found[arm["name"], seed],
                    found.get((BASELINE, seed)),
                    arm["diff"],
                    testify,
                    *remade[seed],
                )
                for seed in seeds
            },
        )
        for arm in arms
    )


def _read_nothing(_: Path) -> tuple[LogContent, list[Event]]:
    return LogContent(), []


def _role(arm: StudyArm, config: Mapping[str, Any]) -> str:
    """Return an arm's role; a study of before there were roles has those that follow by default."""
    return arm.get("role") or default_role(arm["name"], arm["diff"], config.get("yardstick", ""))


def _axis(arm: StudyArm, where: str) -> str:
    """Return an arm's axis; ValueError, which opens with `where`, if its changes lie elsewhere."""
    axis, paths = present_name(arm["axis"], arm["diff"]), arm["diff"]
    if axis == MANY:
        return axis
    is_none = axis == NO_AXIS
    if axes_of(paths, "" if is_none else axis) != ([] if is_none else [axis]):
        raise ValueError(f"{where} must hold all that differs, {', '.join(paths)}, is {axis!r}")
    return axis


def _one_of(kind: Any, value: str, where: str) -> Any:
    """Return a value of the Literal `kind`; ValueError, which opens with `where`, for another."""
    if value not in get_args(kind):
        raise ValueError(f"{where} must be one of {', '.join(get_args(kind))}, is {value!r}")
    return value


def _helpers(study_dir: Path) -> int:
    """Return how many more processes the study's logs are worth."""
    size = sum(_stamp(run.metrics)[0] for run in list_runs(study_dir))
    # less one, since this process reads as well
    return max(0, min(os.cpu_count() or 1, MOST_PROCESSES, size // WORTH_A_PROCESS) - 1)


def _read_run(
    study_dir: Path,
    study: str,
    arm: str,
    seed: int,
    until: int,
    known: RecordedRun | None,
    read: _Reader,
) -> RecordedRun:
    manifest, content, events, stamps = None, LogContent(), [], ()
    try:
        paths = RunPaths.for_run(study_dir, arm, seed)
    except ValueError as caught:  # a study.json from elsewhere may name an arm as it likes
        paths = RunPaths(study_dir / _NO_ARM / f"seed-{seed}")
        return RecordedRun(paths=paths, seed=seed, manifest=None, metrics={}, error=str(caught))
    error = ""
    try:
        # before reading: what is appended meanwhile leaves the stamp old, and the run is read again
        stamps = _stamps(paths)
        if known and known.paths == paths and known.stamps == stamps:
            has_process = _has_process(paths, known.manifest, stamps)
            is_same = has_process == known.has_process
            return known if is_same else replace(known, has_process=has_process)
        if paths.manifest.exists():
            manifest = _own_manifest(paths, study)
        if paths.metrics.exists():
            content, events = read(paths.metrics)
        if manifest is not None:
            error = _fault(paths, manifest, until, stamps, has_log=read is not _read_nothing)
    except (ValueError, OSError) as caught:
        error = f"records can't be read: {caught}"
    return RecordedRun(
        paths=paths,
        seed=seed,
        manifest=manifest,
        metrics={} if error else content.metrics,
        log=content.metrics,
        parents=parents_by_line(content.kept),
        counts=content.counts,
        events=tuple(events),
        error=error,
        # no stamp for a file that was perhaps caught half written: it is tried again
        stamps=() if error or read is _read_nothing else stamps,
        has_process=_has_process(paths, manifest, stamps),
    )


def _remade(study_dir: Path, seed: int) -> tuple[list[RemadeDrifts], tuple[int, int]]:
    """Return the drifts of a seed that were computed anew, and the stamp of their file."""
    stamp = _stamp(StudyPaths(study_dir).drifts(seed))
    try:
        return read_remade(study_dir, seed), stamp
    except ValueError:  # the drifts that it stood for are told of, and the next run makes it anew
        return [], stamp


def _as_pair(
    run: RecordedRun,
    baseline: RecordedRun | None,
    planned: Mapping[str, list[Any]],
    testify: Callable[[RecordedRun], Testimony],
    remade: list[RemadeDrifts],
    stamp: tuple[int, int],
) -> RecordedRun:
    """Return `run` with what of it may be held against its baseline, as both are on record now.

    One that is no pair with it has failed, whatever it says of itself. Drifts are taken if the
    snapshots that they name are the two runs' own. `testify` reads what a run executed.
    """
    if baseline is None or run.paths == baseline.paths or run.error:
        return run
    stamps = (baseline.stamps[0], baseline.stamps[2], stamp) if baseline.stamps else ()
    if stamps and run.paired_with == stamps:
        return run
    own, other = run.manifest, None if baseline.error else baseline.manifest
    said = f"no pair: {BASELINE}, seed {run.seed}: {baseline.error}" if baseline.error else ""
    gap, unseen, mine = "", (), [row for row in remade if row.arm == run.paths.arm]
    if own and other and not (own.is_awaited or other.is_awaited):
        pair = testify(baseline), testify(run)
        said, gap = pair_breach(*pair, planned), witness_gap(*pair)
        if stamps and not said:  # without stamps no log is opened
            unseen = unseen_of_pair((baseline.paths, run.paths), (other, own), planned)
    checked = check_drifts(run.log, run.parents, (run.paths, own), (baseline.paths, other), mine)
    return replace(
        run,
        breach=said,
        metrics={} if said or any(x and x.is_awaited for x in (own, other)) else checked.metrics,
        stale=checked.stale,
        remade=checked.remade,
        unproven=checked.unproven,
        unwitnessed=gap,
        unseen=unseen,
        paired_with=stamps,
    )


def _testimony(run: RecordedRun) -> Testimony:
    assert run.manifest is not None
    return testimony_of(run.paths, run.manifest)


def _has_process(
    paths: RunPaths, manifest: Manifest | None, stamps: tuple[tuple[int, int], ...]
) -> bool:
    if manifest is None or manifest.state != "running":
        return False
    # a process that ends writes its last manifest before it lets go of the lock
    return is_held(paths) or _stamp(paths.manifest) != stamps[0]


def _own_manifest(paths: RunPaths, study: str) -> Manifest:
    """Return the manifest of a run; ValueError if it is that of another run, put in its place."""
    manifest = read_manifest(paths.manifest)
    wrong = misplacement(paths, manifest, study)
    if wrong:
        raise ValueError(f"{paths.root}: {wrong}")
    return manifest


def _stamps(paths: RunPaths) -> tuple[tuple[int, int], ...]:
    # a file that is made or removed changes its folder
    of = (paths.manifest, paths.metrics, paths.witness, paths.root, paths.snapshots_dir)
    return tuple(_stamp(path) for path in of)


def _stamp(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except OSError:
        # a file that is missing has a stamp too, so that its appearance counts as a change
        return (0, 0)
    return (found.st_size, found.st_mtime_ns)
