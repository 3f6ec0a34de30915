"""What a reader must know of a study's drifts: which are left out, and which prove nothing.

Leaves out which drifts those are (`drift_parents`).
"""

from collections.abc import Iterable, Sequence

from stability.analysis.study_records import RecordedArm, RecordedStudy
from stability.config.axes import CHANGES_WEIGHTS, touches
from stability.config.commands import is_adopted, is_command
from stability.config.schema import BASELINE
from stability.records.manifest import ENDED

__all__ = ["drift_notes", "unproven_clause", "unproven_of"]


def drift_notes(study: RecordedStudy, arms: Sequence[RecordedArm] = ()) -> tuple[str, ...]:
    """Return a sentence for each arm whose drifts are left out, and one of all unproven ones.

    Of `arms` alone if they are given.
    """
    asked = arms or study.candidates
    said = [_stale_note(arm, is_command(study.base)) for arm in asked]
    said.append(_other_weights_note(asked))
    unproven = [arm.name for arm in asked if any(run.unproven for run in arm.runs.values())]
    # what somebody else trained `stability run` does not measure again
    anew = "" if is_command(study.base) else "; `stability run` computes them anew"
    if unproven:
        said.append(
            f"Unproven: the drifts of {', '.join(unproven)} do not say which snapshots they were "
            f"computed from, as in records of an older version{anew}."
        )
    gaps = [(arm.name, gap) for arm in asked if (gap := _gap(arm))]
    if gaps:
        names = ", ".join(name for name, _ in gaps)
        said.append(f"Unproven: not all is on record of what {names} executed: {gaps[0][1]}.")
    return tuple(note for note in [*said, *_foreign_notes(study, asked)] if note)


def unproven_clause(arms: Iterable[RecordedArm]) -> str:
    """Return the end of a PASS's sentence, on what is not proven of `arms`; mostly empty."""
    found = unproven_of(arms)
    more = f" (and {len(found) - 1} more: `stability verify`)" if len(found) > 1 else ""
    return f"; unproven: {found[0]}{more}" if found else ""


def unproven_of(arms: Iterable[RecordedArm]) -> list[str]:
    """Return all that is not proven of the runs of `arms`, each once."""
    runs = [run for arm in arms for run in arm.runs.values()]
    return list(dict.fromkeys(x for run in runs for x in (run.unwitnessed, *run.unseen) if x))


def _other_weights_note(arms: Sequence[RecordedArm]) -> str:
    names = ", ".join(arm.name for arm in arms if touches(arm.diff, CHANGES_WEIGHTS))
    if not names:
        return ""
    return (
        f"Drift of {names} is over the weights that the baseline has too: qk_norm is a scale more "
        "for the queries of a layer and one for its keys."
    )


def _foreign_notes(study: RecordedStudy, arms: Sequence[RecordedArm]) -> list[str]:
    """Return what is not proven of trainings that are not ours, and what was not seen of them."""
    if not is_command(study.base):
        return []
    baseline = study.arm(BASELINE)
    # what the baseline's recorder did not see is missing in every pair; of what was adopted the
    # arms tell the same
    is_told = baseline is not None and baseline not in arms and not is_adopted(study.base)
    told = [*([baseline] if baseline and is_told else []), *arms]
    found: dict[str, list[str]] = {}
    for arm in told:
        for run in arm.runs.values():
            notes = run.manifest.resolved.get("notes", ()) if run.manifest else ()
            for note in (*notes, *(f"unproven: {each}" for each in run.unseen)):
                names = found.setdefault(note, [])
                names += [] if arm.name in names else [arm.name]
    return [
        *_unwitnessed_note(arms),
        *(f"Of {_named(names, study)}: {note}." for note, names in found.items()),
    ]


def _named(names: Sequence[str], study: RecordedStudy) -> str:
    is_every = len(names) == len(study.arms) > 1
    return "every arm" if is_every else ", ".join(names)


def _unwitnessed_note(arms: Sequence[RecordedArm]) -> list[str]:
    """Return a sentence that names the arms without a witness, but for those that have a gap."""
    # where the baseline has a witness, an arm that has none is a gap
    names = [arm.name for arm in arms if not _gap(arm) and _lacks_witness(arm)]
    if not names:
        return []
    return [
        f"Unproven: what {', '.join(names)} executed has no witness, as in records of an older "
        "version and in checkpoints that were adopted."
    ]


def _lacks_witness(arm: RecordedArm) -> bool:
    return any(
        manifest.state in ENDED and run.paths.name_of(run.paths.witness) not in manifest.files
        for run in arm.runs.values()
        if (manifest := run.manifest)
    )


def _gap(arm: RecordedArm) -> str:
    return next((run.unwitnessed for run in arm.runs.values() if run.unwitnessed), "")


def _stale_note(arm: RecordedArm, is_foreign: bool) -> str:
    stale = {seed: run.stale for seed, run in arm.runs.items() if run.stale and not run.breach}
    if not stale:
        return ""
    steps = ", ".join(map(str, sorted({step for by_step in stale.values() for step in by_step})))
    first = next(iter(stale.values()))
    anew = "" if is_foreign else " `stability run` computes them anew from snapshots."
    seeds = f"seed{'' if len(stale) == 1 else 's'} {', '.join(map(str, stale))}"
    return (
        f"Stale, and left out: drifts of {arm.name}, {seeds}, at step {steps} (at step "
        f"{min(first)}: {first[min(first)]}).{anew}"
    )
