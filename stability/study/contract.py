"""The pair contract: two runs that may be compared, and the reason when they may not.

Same bits at step 0, same batches, same text, same environment, exactly one declared axis.
Everything here only reads; a breach raises `ContractError` with the two values that differ.
"""

from typing import Any

from stability.analysis.pair_contract import first_other_batch, start_parts
from stability.config.convert import Place, from_mapping
from stability.config.diff import changed_axes, hash_without
from stability.config.schema import AXES, BASELINE, ArmConfig, Axis
from stability.records.manifest import Manifest
from stability.records.metric_log import read_text
from stability.records.metric_names import BATCH_HASH
from stability.records.paths import RunPaths
from stability.study.expand import Arm

__all__ = ["ContractError", "axis_of", "check_batches", "check_start"]


class ContractError(ValueError):
    """Two runs are not a pair."""


def axis_of(arm: Arm, allow_many: bool = False) -> Axis:
    """Return the one axis that `arm` changes, `none` if nothing differs.

    `many` if it changes several and the study allows it; else that is a ContractError, and so is
    something that is no axis.
    """
    changed = changed_axes(arm.diff)
    strangers = [name for name in changed if name not in AXES]
    if strangers:
        values = " / ".join(map(repr, arm.diff[strangers[0]]))
        raise ContractError(
            f"arms.{arm.name}: {strangers[0]} differs from the {BASELINE} ({values}) and is no "
            f"axis; allowed: {', '.join(AXES)}"
        )
    if len(changed) > 1 and allow_many:
        return "many"
    if len(changed) > 1:
        raise ContractError(
            f"arms.{arm.name}: must differ in one axis, differs in {', '.join(changed)}; "
            "make an arm of each, or say allow_many: true"
        )
    axes: list[Axis] = [axis for axis in AXES if axis in changed]
    return axes[0] if axes else "none"


def check_start(baseline: Manifest, candidate: Manifest) -> None:
    """Check all that is known before the first step: environment, text, initial weights, config.

    ContractError names the field and both values.
    """
    less_axis = hash_without(_config(baseline), candidate.diff)
    parts = [
        *start_parts(baseline, candidate, candidate.diff),
        ("hashes.config_less_axis", less_axis, candidate.hashes.get("config_less_axis"), False),
    ]
    for field, expected, found, may_differ in parts:
        if expected != found and not may_differ:
            raise ContractError(
                f"{candidate.arm}, seed {candidate.seed}: {field} must be the {BASELINE}'s "
                f"{_short(expected)}, is {_short(found)}"
            )


def check_batches(baseline: RunPaths, candidate: RunPaths, step: int) -> None:
    """Check that both runs saw the same batches in the first `step` updates.

    An arm on the `data_order` axis is exempt: leave it out. ContractError names the first step that
    differs.
    """
    if step == 0:
        return
    first, second = (read_text(paths.metrics, BATCH_HASH) for paths in (baseline, candidate))
    at = first_other_batch(first, second, range(1, step + 1))
    if at is not None:
        raise ContractError(
            f"{candidate.arm}: batch {at} differs from the {BASELINE}'s: running hash "
            f"{_short(second.get(at))}, {BASELINE} {_short(first.get(at))}"
        )


def _config(manifest: Manifest) -> ArmConfig:
    return from_mapping(ArmConfig, manifest.config, Place(source="manifest.json"))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 72 else f"{text[:32]}...{text[-32:]}"
