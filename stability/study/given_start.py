"""The start weights that an arm is given: the baseline's of its seed, bit by bit.

For arms whose code would make others, as under another version of torch. It is asked for, and said
of the run: without it an arm that starts from other bits is refused. Leaves out how the weights get
into the training (`recorder.inside.given_start`).
"""

from collections.abc import Mapping
from pathlib import Path

from stability.analysis.pair_contract import may_differ
from stability.recorder.spooled import Spooled
from stability.records.run_files import read_run_snapshot
from stability.study.foreign_plan import ForeignRun

__all__ = ["GIVEN", "check_given", "start_notes", "start_variables"]

GIVEN = "given"
"""How the record of a run says that its start weights are not of its script's own making."""

_FILE = "start.pt"


def start_variables(run: ForeignRun, folder: Path) -> Mapping[str, str]:
    """Put the weights that a run is to be given into `folder`; return the variables that say so.

    None for the baseline, and where the start is meant to be another one. ValueError if the
    baseline's are not on record as they were written.
    """
    if not run.asked.same_start or run.baseline is None or may_differ("init_weights", run.diff):
        return {}
    import torch  # heavy

    path = folder.resolve() / _FILE
    torch.save(read_run_snapshot(run.baseline, 0), path)
    return {"STABILITY_START": str(path)}


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
