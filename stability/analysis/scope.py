"""What a verdict is of: how many values were trained, for how long and on what.

Other models, lengths and devices were not tried, and it says nothing of them.
"""

from collections.abc import Mapping
from typing import Any

from stability.analysis.study_records import RecordedStudy
from stability.config.commands import is_command
from stability.config.schema import BASELINE
from stability.records.snapshots import count_values

__all__ = ["scope_of"]


def scope_of(study: RecordedStudy) -> str:
    """Return a clause of the baseline's run: trained values, length of sequences, updates, device.

    What is not on record is left out, as of a command its device where there is a GPU; in place of
    the length it tells of one how many keys an attention had that was replaced. Empty if no run is.
    """
    baseline = study.arm(BASELINE)
    runs = list(baseline.runs.values()) if baseline else []
    run = next((run for run in runs if run.manifest is not None), None)
    if run is None or run.manifest is None:
        return ""
    count = count_values(run.paths.held_snapshot(0))
    parts = [f"{count:,} trained values"] if count else []
    model = study.base.get("model")
    context = model.get("context") if isinstance(model, Mapping) else None
    if isinstance(context, int) and not is_command(study.base):
        parts.append(f"sequences of {context:,} tokens")
    if is_command(study.base) and (keys := _keys(study)):
        parts.append(f"attention over {keys} keys")
    device = _device(study.base, run.manifest.environment)
    return ", ".join([*parts, f"{study.steps:,} updates", *([device] if device else [])])


def _keys(study: RecordedStudy) -> str:
    """Return how many keys the replaced calls had; empty if of a candidate nobody knows."""
    runs = [run.manifest for arm in study.candidates for run in arm.runs.values() if run.manifest]
    told = [run.resolved["keys"] for run in runs if "keys" in run.resolved]
    if not told or len(told) < len(runs):
        return ""
    least, most = min(each[0] for each in told), max(each[1] for each in told)
    return f"{least:,} to {most:,}" if least < most else f"{most:,}"


def _device(base: Mapping[str, Any], environment: Mapping[str, Any]) -> str:
    """Return what it was trained on; empty where that is not known: a GPU may have lain idle."""
    if not environment.get("gpu"):
        return str(environment.get("cpu", ""))
    if is_command(base):
        return ""
    accelerator = base.get("train", {}).get("accelerator")
    return str(environment.get("cpu" if accelerator == "cpu" else "gpu", ""))
