"""The pair contract: two runs that may be compared, and the reason when they may not.

Same bits at step 0, same batches, same text, same environment, exactly one declared axis.
Everything here only reads; a breach raises `ContractError` with the two values that differ.
"""

from typing import Any

from stability.analysis.proofs import WEIGHT_AXES
from stability.config.convert import Place, from_mapping
from stability.config.diff import changed_axes, changes, hash_without
from stability.config.schema import AXES, BASELINE, ArmConfig, Axis
from stability.records.layout import RunPaths
from stability.records.manifest import Manifest
from stability.records.metric_log import read_text
from stability.records.names import BATCH_HASH
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
    """Check all that is known before the first step: environment, text, initial weights.

    The hash of the weights is taken before a nudge. ContractError names the field and both values.
    """
    for key in sorted({*baseline.environment, *candidate.environment}):
        _same(
            f"environment.{key}",
            candidate,
            baseline.environment.get(key),
            candidate.environment.get(key),
        )
    _same(
        "hashes.config_less_axis",
        candidate,
        hash_without(_config(baseline), candidate.diff),
        candidate.hashes.get("config_less_axis"),
    )
    _same("hashes.text", candidate, baseline.hashes.get("text"), candidate.hashes.get("text"))
    if not changes(candidate.diff, WEIGHT_AXES):
        _same(
            "hashes.init_weights",
            candidate,
            baseline.hashes.get("init_weights"),
            candidate.hashes.get("init_weights"),
        )


def check_batches(baseline: RunPaths, candidate: RunPaths, step: int) -> None:
    """Check that both runs saw the same batches in the first `step` updates.

    An arm on the `data_order` axis is exempt: leave it out. ContractError names the first step that
    differs.
    """
    if step == 0:
        return
    first = read_text(baseline.metrics, BATCH_HASH)
    second = read_text(candidate.metrics, BATCH_HASH)
    for at in range(1, step + 1):
        if first.get(at) != second.get(at):
            raise ContractError(
                f"{candidate.arm}: batch {at} differs from the {BASELINE}'s: running hash "
                f"{_short(second.get(at))}, {BASELINE} {_short(first.get(at))}"
            )


def _config(manifest: Manifest) -> ArmConfig:
    return from_mapping(ArmConfig, manifest.config, Place(source="manifest.json"))


def _same(field: str, candidate: Manifest, expected: Any, found: Any) -> None:
    if expected != found:
        raise ContractError(
            f"{candidate.arm}, seed {candidate.seed}: {field} must be the {BASELINE}'s "
            f"{_short(expected)}, is {_short(found)}"
        )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 72 else f"{text[:32]}...{text[-32:]}"
