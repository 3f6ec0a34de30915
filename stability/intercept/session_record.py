"""What a session says of itself in its record: what computes, and what watches beside it.

Leaves out the measurements and the files (`probe.probe_recorder`).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import nn

from stability.intercept.replacement import Replacement
from stability.intercept.watched_modules import described_modules
from stability.probe.attention_registry import ResolvedAttention
from stability.probe.module_candidates import ModuleCandidate
from stability.probe.probe_recorder import ProbeRecorder

__all__ = ["OWN", "recorder_of"]

OWN = "own"
"""The name of the model's own attention where it is the shadow of a replaced one."""


def recorder_of(
    folder: Path,
    model: nn.Module,
    candidates: Sequence[ResolvedAttention],
    others: Mapping[str, ModuleCandidate],
    replacement: Replacement | None,
    golden: bool,
    first_step: int,
) -> ProbeRecorder:
    """Return the recorder of a session in `folder`; `others` are candidates for modules by glob."""
    own = {"implementation": "the model's own"}
    described = {one.name: one.description for one in candidates}
    replaced = {} if replacement is None else {**candidates[0].description, **replacement.to_dict()}
    return ProbeRecorder(
        folder,
        model=type(model).__name__,
        primary=replaced or own,
        shadows=({OWN: own} if replaced else described) | described_modules(others),
        golden=golden,
        first_step=first_step,
    )
