"""What an arm changes, as one short human sentence made from its diff against the baseline.

Leaves out whether the change is allowed (`study.contract`). The probe only looks, so a diff
(`config.diff`) never names it.
"""

from collections.abc import Mapping
from typing import Any

from stability.analysis.study_records import RecordedArm, RecordedStudy
from stability.config.schema import BASELINE

__all__ = ["attention_label", "describe_change"]


def describe_change(study: RecordedStudy, arm: RecordedArm) -> str:
    """Return what `arm` changes, e.g. `attention: baseline -> flash:all_bf16`."""
    if arm.name == BASELINE:
        attention = attention_label(study.base.get("attention", {}))
        return f"the reference: {attention}, {study.base.get('precision', '?')}"
    if not arm.diff:
        return "nothing (A/A)"
    attention = {path: values for path, values in arm.diff.items() if path.startswith("attention.")}
    rest = {path: values for path, values in arm.diff.items() if path not in attention}
    parts = [_describe_attention(study, attention)] if attention else []
    parts += [_describe(path, *values) for path, values in rest.items()]
    return f"confounded: {'; '.join(parts)}" if arm.axis == "many" else "; ".join(parts)


def attention_label(attention: Mapping[str, Any]) -> str:
    """Return an attention's name: `flash:fa2`, `flash:fa2 (block_k=32)`, `baseline`."""
    label = str(attention.get("implementation", "baseline"))
    if attention.get("profile"):
        label += f":{attention['profile']}"
    numerics = attention.get("numerics", {})
    extras = [f"{key}={value}" for key, value in numerics.items() if value is not None]
    if attention.get("engine", "auto") != "auto":
        extras.append(f"engine={attention['engine']}")
    return f"{label} ({', '.join(extras)})" if extras else label


def _describe_attention(study: RecordedStudy, diff: Mapping[str, list[Any]]) -> str:
    before = dict(study.base.get("attention", {}))
    after = {**before, "numerics": dict(before.get("numerics", {}))}
    for path, (_, value) in diff.items():
        _, key, *field = path.split(".")
        if field:
            after[key][field[0]] = value
        else:
            after[key] = value
    return f"attention: {attention_label(before)} -> {attention_label(after)}"


def _describe(path: str, before: Any, after: Any) -> str:
    if path == "nudge.ulps":
        return f"initial weights moved by {after} ULP"
    if path == "precision":
        return f"{before} -> {after}"
    if path == "seed.init_offset":
        return f"other initial weights (seed {after - before:+d})"
    if path == "seed.order_offset":
        return f"other batch order (seed {after - before:+d})"
    if path == "optimizer.eps":
        return f"epsilon of Adam: {before:g} -> {after:g}"
    if path == "model.init":
        return f"initialisation: {before} -> {after}"
    return f"{path}: {before} -> {after}"
