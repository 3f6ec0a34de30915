"""The witness of a recorded run: what its process told of what it executed, as one stretch.

Of several ranks the first one tells. Leaves out how it is seen (`inside.looks`) and what follows
from it (`analysis.witness_contract`).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stability.recorder.spooled import Spooled
from stability.records.git_state import git_state
from stability.records.manifest import read_manifest
from stability.records.paths import RunPaths
from stability.records.run_files import file_damage
from stability.records.witness import Stretch, Witness, read_witness

__all__ = ["looked_at", "recorded_witness", "state_of_code", "witness_notes"]


def recorded_witness(spooled: Spooled, git: Mapping[str, str]) -> Witness | None:
    """Return what a training told of what it executed; None where nothing was told.

    `git` is the state of the script's folder.
    """
    if not spooled.witness:
        return None
    stretch: Any = Stretch(
        first=0,
        last=spooled.step,
        modules=dict(spooled.modules),
        git=dict(git),
        **spooled.witness,
    )
    return Witness(stretches=[stretch.values])


def witness_notes(spooled: Spooled) -> list[str]:
    """Return what the witness of a training does not tell, in sentences."""
    told = spooled.witness
    if not told:
        return []
    notes = [f"what it multiplied is unproven: {told['unproven']}"] if told["unproven"] else []
    if spooled.world > 1 and not notes:
        notes.append(f"what it multiplied was looked at on the first of {spooled.world} ranks")
    return notes


def looked_at(run: RunPaths | None) -> list[int]:
    """Return the updates that were looked at in a run on record; none if it does not tell.

    Its candidates are looked at in the same: the length of a study's first run was not known.
    """
    if run is None or not run.manifest.exists() or not run.witness.exists():
        return []
    if file_damage(run, read_manifest(run.manifest), run.witness):
        return []
    return sorted({step for stretch in read_witness(run.witness).all for step in stretch.steps})


def state_of_code(words: Sequence[str], folder: Path | None = None) -> dict[str, str]:
    """Return commit and changes of the folder of the script that a command runs in `folder`."""
    place = folder or Path()
    script = next((word for word in words if word.endswith(".py")), "")
    return git_state((place / script).parent if script else place)
