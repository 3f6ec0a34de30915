"""The start weights that an arm is given: the baseline's of its seed, bit by bit; or their dtypes.

For arms whose code would make others, as under another version of torch. It is asked for, and said
of the run: without it an arm that starts from other bits is refused, and before its first update if
already the dtypes are others. Leaves out how the weights get into the training
(`recorder.inside.given_start`).
"""

import json
from collections.abc import Mapping
from pathlib import Path

from stability.analysis.pair_contract import ContractError, may_differ
from stability.recorder.inside.start_dtypes import other_dtypes
from stability.recorder.spooled import Spooled, read_state
from stability.records.atomic_files import write_text
from stability.records.manifest import read_manifest
from stability.records.paths import RunPaths
from stability.records.run_files import read_run_snapshot, snapshot_of
from stability.records.snapshots import snapshot_dtypes
from stability.study.foreign_plan import ForeignRun

__all__ = ["GIVEN", "check_dtypes", "check_given", "start_notes", "start_variables"]

GIVEN = "given"
"""How the record of a run says that its start weights are not of its script's own making."""

_FILE = "start.pt"
_DTYPES = "start_dtypes.json"


def start_variables(run: ForeignRun, folder: Path) -> Mapping[str, str]:
    """Put what a run has to begin with into `folder`; return the variables that say so.

    The weights where they are to be given, else their dtypes. Nothing for the baseline, and where
    the start is meant to be another one. ValueError if weights that are to be given are not on
    record as they were written.
    """
    if run.baseline is None or may_differ("init_weights", run.diff):
        return {}
    if not run.asked.same_start:
        path = folder.resolve() / _DTYPES
        write_text(path, json.dumps(_dtypes_of(run.baseline)))
        return {"STABILITY_START_DTYPES": str(path)}
    import torch  # heavy

    path = folder.resolve() / _FILE
    torch.save(read_run_snapshot(run.baseline, 0), path)
    return {"STABILITY_START": str(path)}


def check_dtypes(run: ForeignRun, spooled: Spooled) -> None:
    """ContractError if the run began with weights of other dtypes than the baseline's.

    For trainings that went on nevertheless, as one that opens a door itself.
    """
    if run.baseline is None or may_differ("init_weights", run.diff) or 0 not in spooled.states:
        return
    if read_manifest(run.baseline.manifest).hashes.get("init_weights") == spooled.init:
        return
    state = read_state(spooled.states[0])
    own = {x: str(state[x].dtype).replace("torch.", "") for x in state if x not in spooled.buffers}
    if said := other_dtypes(own, _dtypes_of(run.baseline)):
        raise ContractError(f"{run.arm}, seed {run.seed}: {said}")


def _dtypes_of(baseline: RunPaths) -> dict[str, str]:
    if not baseline.manifest.exists():
        return {}
    return snapshot_dtypes(snapshot_of(baseline, read_manifest(baseline.manifest), 0))


def check_given(spooled: Spooled) -> None:
    """ValueError if the script has set its weights anew after they were given or nudged."""
    if spooled.set_anew:
        said, done = (
            ("same_start had no effect", "the baseline's start weights were given")
            if spooled.given
            else ("the nudge was undone", "the start weights were nudged")
        )
        raise ValueError(
            f"{said}: {spooled.set_anew} was set anew after {done}; the script sets its weights "
            "after its first forward pass"
        )


def start_notes(run: ForeignRun, spooled: Spooled) -> list[str]:
    """Return what is to be said of a start that was asked to be the baseline's."""
    if run.asked.same_start and run.baseline is not None and not spooled.given:
        return ["start: its own, since the change is meant to change it"]
    if not spooled.given:
        return []
    made = "the same bits" if spooled.given["own"] == spooled.init else "others"
    return [f"start: given, the baseline's weights; the script had made {made}"]
