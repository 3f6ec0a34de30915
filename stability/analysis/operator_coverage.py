"""What the probes of an arm did not see of its attention, though the arm changes it.

Right in what was looked at is not right: an attention may be judged only where out, dq, dk and dv
of each layer that it computes have been compared with FP64 and the baseline in some look. A result
can be missing because the probe was told to leave it out (`backward: false`, `layers`), because no
look gave a finite figure, or because golden, baseline or candidate raised. The last is an event of
the run, reported once however many looks were lost by it, so that one such event leaves the layer
unproven. Leaves out what the figures say (`operator_evidence`).
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from stability.analysis.place_table import JUDGED, PlaceTable
from stability.analysis.study_records import RecordedArm, RecordedStudy
from stability.records.metric_names import parse_deviation

__all__ = ["RESULTS", "changed_layers", "unseen"]

RESULTS = ("out", "dq", "dk", "dv")
"""What an attention gives, forward and backward; all of it moves weights."""


def unseen(study: RecordedStudy, arm: RecordedArm, tables: Sequence[PlaceTable]) -> str:
    """Return a sentence that names what was not seen of the arm's attention; empty if all was."""
    layers = changed_layers(study, arm)
    missing: dict[tuple[str, ...], list[str]] = {}
    for what in RESULTS:
        seen = _seen_layers(tables, what)
        lacking = tuple(layer for layer in layers if layer not in seen)
        if lacking:
            missing.setdefault(lacking, []).append(what)
    said = [f"{_listed(names)} in {_where(where, layers)}" for where, names in missing.items()]
    failed = list(_failures(study, arm, layers))
    parts = [f"not measured: {'; '.join(said)}"] if said else []
    parts += [f"a comparison failed: {'; '.join(failed)}"] if failed else []
    if not parts:
        return ""
    text = "; ".join(parts)
    return f"{text[0].upper()}{text[1:]}."


def changed_layers(study: RecordedStudy, arm: RecordedArm) -> list[str]:
    """Return the layers whose attention is the arm's own, in the model's order.

    A study of ours says how many there are. Of any other model, those that were ever seen.
    """
    depth = _setting(study, arm, "model.depth")
    names = (
        [f"layer_{index}" for index in range(depth)]
        if isinstance(depth, int)
        else _layers_on_record(study, arm)
    )
    patterns = _setting(study, arm, "attention.layers") or ["*"]
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]


def _setting(study: RecordedStudy, arm: RecordedArm, path: str) -> Any:
    """Return the arm's value at a config path; None if no config has it."""
    if path in arm.diff:
        return arm.diff[path][1]
    value: Any = study.base
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _layers_on_record(study: RecordedStudy, arm: RecordedArm) -> list[str]:
    runs = [run for one in (arm, *study.arms) for run in one.runs.values()]
    names = dict.fromkeys(name for run in runs for name in run.metrics)
    return list(dict.fromkeys(parts.layer for name in names if (parts := parse_deviation(name))))


def _seen_layers(tables: Sequence[PlaceTable], what: str) -> set[str]:
    """Return the layers in which everything that is judged of `what` has a value in some look."""
    return {
        layer
        for table in tables
        if table.what == what and all(metric in table.of_layer for metric in JUDGED.values())
        for index, layer in enumerate(table.layers)
        if all(np.isfinite(table.of_layer[metric][:, index]).any() for metric in JUDGED.values())
    }


def _failures(study: RecordedStudy, arm: RecordedArm, layers: Collection[str]) -> Iterator[str]:
    """Yield which attention raised in a layer that the arm changes, and what it said."""
    # a finding may also be of a metric of the user's own, which may fail as it likes
    who = ("golden", *_implementations(study, arm))
    where: dict[str, dict[str, None]] = {}
    for event in (event for run in arm.runs.values() for event in run.events):
        # a count of values that are not finite is a figure, and judged as such
        raised = event.text.startswith(who) and not event.text.endswith(" not finite")
        if event.kind == "finding" and event.layer in layers and raised:
            where.setdefault(event.text, {})[event.layer] = None
    for text, found in where.items():
        yield f"in {_where(list(found), list(layers))}, {text}"


def _implementations(study: RecordedStudy, arm: RecordedArm) -> list[str]:
    """Return what the names of baseline and candidate begin with."""
    path = "attention.implementation"
    base, own = arm.diff.get(path, [_setting(study, arm, path)] * 2)
    return [str(name) for name in (base, own) if name]


def _where(found: Sequence[str], layers: Sequence[str]) -> str:
    if len(found) == len(layers) > 1:
        return "every layer"
    if len(found) > 4:
        return f"{len(found)} of {len(layers)} layers ({', '.join(found[:3])}, ...)"
    return _listed(found)


def _listed(names: Sequence[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last
