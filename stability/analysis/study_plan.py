"""What a study planned, by `study.json`, its sealed protocol and the manifests of its runs.

The three must say one thing: which arms there are, what each is there for, what it changes, and
under which protocol its runs were made. Leaves out whether the runs of a pair keep the contract
(`pair_contract`) and what was changed for a verdict (`protocol_check`).
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from stability.analysis.protocol_check import other_protocols
from stability.analysis.study_records import RecordedArm, RecordedStudy
from stability.config.axes import present_name
from stability.config.commands import is_command
from stability.config.convert import Place
from stability.config.diff import leaves
from stability.config.roles import default_role, role_of
from stability.config.schema import BASELINE
from stability.records.manifest import ENDED, Manifest, read_manifest
from stability.records.paths import RunPaths, StudyPaths
from stability.records.protocol import Protocol, read_protocol

__all__ = [
    "Unplanned",
    "left_out_runs",
    "plan_note",
    "plan_troubles",
    "planned_pairs",
    "unplanned",
]


class Unplanned(NamedTuple):
    """A run that is not what the study says of its arm."""

    said: str
    is_contradicted: bool
    """Whether something on record says otherwise; else nothing does, and nothing says so either."""


def planned_pairs(study: RecordedStudy) -> list[tuple[str, int]]:
    """Return the pairs that the study plans now, and those that only its protocol planned."""
    pairs = {(arm.name, seed): None for arm in study.candidates for seed in study.seeds}
    protocol = _protocol(study)
    for arm in protocol.arms if protocol else ():
        for seed in protocol.seeds if protocol and arm != BASELINE else ():
            pairs[arm, seed] = None
    return list(pairs)


def plan_troubles(study: RecordedStudy) -> list[str]:
    """Return why it can't be told what a study planned; empty if it can.

    Every study is sealed before its first run, without the seal a pair that is gone is not missed;
    but for one that is recorded run by run, which nobody has planned (`plan_note`).
    """
    return [*_protocol_troubles(study), *_same_runs(study), *_lost_entries(study)]


def plan_note(study: RecordedStudy) -> str:
    """Return what is to be said of a study that was recorded run by run, unsealed; else nothing."""
    manifests = [run.manifest for arm in study.arms for run in arm.runs.values() if run.manifest]
    is_sealed = any(manifest.hashes.get("protocol") for manifest in manifests)
    if is_sealed or not is_command(study.base) or StudyPaths(study.folder).protocol.exists():
        return ""
    return "recorded run by run, without a sealed plan: a run that was taken away is not missed"


def left_out_runs(study: RecordedStudy) -> list[str]:
    """Return a sentence for each run on disk that is no part of the study, with how it went.

    Those that `plan_troubles` tells of are left out.
    """
    found, is_unsealed = [], bool(plan_note(study))
    for arm, seeds in study.unlisted.items():
        for seed in seeds:
            try:
                manifest = read_manifest(RunPaths.for_run(study.folder, arm, seed).manifest)
            except ValueError as error:
                found.append(f"{arm}/seed-{seed} can't be read: {error}")
                continue
            if is_unsealed and manifest.state in ENDED:
                continue
            why = f": {manifest.message}" if manifest.message else ""
            found.append(f"{arm}/seed-{seed} is no part of the study, {manifest.state}{why}")
    return found


def unplanned(study: RecordedStudy, arm: RecordedArm, manifest: Manifest) -> Unplanned | None:
    """Return what the run of `manifest` is not, of what the study says of its arm; None if it is.

    What the arm changes is compared with the run's config by the pair contract.
    """
    protocol = _protocol(study)
    sealed = protocol.arms.get(arm.name) if protocol else None
    run = f"{arm.name}, seed {manifest.seed}"
    try:
        role_of(arm.role, arm.name, arm.diff, study.yardstick, Place(source=f"study.json: {run}"))
    except ValueError as error:
        return Unplanned(str(error), is_contradicted=True)
    if present_name(manifest.axis, manifest.diff) != arm.axis:
        said = f"{run}, was trained as a change of {manifest.axis}, the study has {arm.axis}"
        return Unplanned(said, is_contradicted=True)
    kept = manifest.role or (sealed["role"] if sealed else "")
    if kept and kept != arm.role:
        said = f"{run}, was there as {kept} when it was trained, the study has it as {arm.role}"
        return Unplanned(said, is_contradicted=True)
    if sealed and sealed["role"] != arm.role:
        said = f"{arm.name} was sealed as {sealed['role']}, the study has it as {arm.role}"
        return Unplanned(said, is_contradicted=True)
    if arm.name == BASELINE and (said := _other_base(study.base, manifest)):
        return Unplanned(said, is_contradicted=True)
    if not kept and arm.role != default_role(arm.name, arm.diff, study.yardstick):
        return Unplanned(f"that {run}, is there as {arm.role}", is_contradicted=False)
    return None


def _other_base(base: Mapping[str, Any], manifest: Manifest) -> str:
    """Return where the study's base is not the baseline's config; empty if nowhere.

    What only looks is left out, and so is the seed. Of our own trainer a key that only one of them
    has is of another version.
    """
    planned, own = leaves(base), leaves(manifest.config)
    both = planned.keys() & own.keys()
    for path in sorted(planned.keys() | own.keys() if is_command(base) else both):
        is_free = path.startswith(("probe.", "watch.")) or path == "seed.base"
        if not is_free and planned.get(path) != own.get(path):
            return (
                f"{BASELINE}, seed {manifest.seed}, was trained with {path} = {own.get(path)!r}, "
                f"the study's base has {planned.get(path)!r}"
            )
    return ""


def _protocol(study: RecordedStudy) -> Protocol | None:
    path = StudyPaths(study.folder).protocol
    try:
        return read_protocol(path) if path.exists() else None
    except (ValueError, OSError):  # `plan_troubles` tells of it
        return None


def _protocol_troubles(study: RecordedStudy) -> Iterator[str]:
    path = StudyPaths(study.folder).protocol
    uncounted = "planned pairs that study.json leaves out are not counted"
    if not path.exists():
        if not plan_note(study):
            yield f"{path} is not there: {uncounted}"
        return
    try:
        read_protocol(path)
    except (ValueError, OSError) as error:
        yield f"{error}: {uncounted}"
        return
    yield from other_protocols(study)


def _same_runs(study: RecordedStudy) -> Iterator[str]:
    """Tell of seeds of one arm that are one run, which would count as several."""
    for arm in study.arms:
        ends: dict[str, int] = {}
        for seed, run in arm.runs.items():
            end = run.manifest.hashes.get("final_weights") if run.manifest else None
            if not end or (run.manifest and run.manifest.state not in ENDED):
                continue
            if end in ends:
                yield (
                    f"{arm.name}, seed {seed}, ends in the same bits as seed {ends[end]}: it is "
                    "one run, no repetition"
                )
            ends.setdefault(end, seed)


def _lost_entries(study: RecordedStudy) -> Iterator[str]:
    """Tell of whole runs that an unsealed study does not list: each was added when it ended."""
    if not plan_note(study):
        return
    for arm, seeds in study.unlisted.items():
        for seed in seeds:
            try:
                manifest = read_manifest(RunPaths.for_run(study.folder, arm, seed).manifest)
            except ValueError:
                continue
            if manifest.state in ENDED:
                yield (
                    f"{arm}/seed-{seed} has ended and study.json does not list it, which lists "
                    "each run that was recorded"
                )
