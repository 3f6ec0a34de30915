"""The tables of the report as plain cells of text: the ladder, what each arm changed, the hashes.

Leaves out markup and escaping, which are the template's.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from stability.analysis.arm_summary import groups_of_arm
from stability.analysis.ladder import Ladder, Row
from stability.analysis.number_text import MISSING, finely, nats
from stability.analysis.pair_proof import ProofLine
from stability.analysis.seed_values import SeedValues
from stability.analysis.study_hashes import compare_hashes, environments_of, shown_hashes
from stability.analysis.study_records import RecordedArm, RecordedStudy
from stability.config.commands import is_command
from stability.config.masking import is_secret
from stability.config.schema import BASELINE
from stability.report.view.error_bars import written_bar
from stability.report.view.ladder import Number, has_held_out, is_candidate, numbers

__all__ = [
    "Cell",
    "Change",
    "HashLine",
    "LadderLine",
    "changes",
    "environment_lines",
    "hash_lines",
    "ladder_lines",
    "numerics_text",
    "proof_legend",
    "value_text",
]

RATIOS = ("ratio_early", "ratio_last")
NUMBERS = (
    "final_loss",
    "held_out_loss",
    "drift_early",
    "drift_last",
    "w1_last",
    *RATIOS,
)
SHORT_HASH = 10
MARKS = {"same": "✓", "different by design": "≠", "different": "✗", "unknown": "?"}
MEANINGS = {
    "same": "it is the baseline's",
    "different by design": "it is another because of what the arm changes, or of where it ends",
    "different": "it must be the baseline's and is not",
    "unknown": "one of the two runs has none on record, or none yet, so that nothing is proven",
}


@dataclass(frozen=True, slots=True)
class Cell:
    """What a cell says, in small print below, on hovering, and its style class."""

    text: str
    small: str = ""
    title: str = ""
    kind: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class LadderLine:
    """One arm in the ladder's table."""

    arm: str
    kind: str
    change: str
    message: str
    cells: list[Cell]


class Change(NamedTuple):
    """One config path in which an arm differs from the baseline."""

    arm: str
    group: str
    axis: str
    path: str
    before: str
    after: str


class HashLine(NamedTuple):
    """One arm's hashes: for each name of `shown_hashes` its cells, one a seed or one a verdict."""

    arm: str
    cells: list[list[Cell]]


def ladder_lines(ladder: Ladder, shown: Sequence[str] = ()) -> list[LadderLine]:
    """Return the rows of the ladder's table with the numbers `shown`, named as in `view.ladder`.

    Without any these are all that the study can have: losses on held-out text have no column where
    there are none, ratios none without a yardstick.
    """
    lacking = () if has_held_out(ladder) else ("held_out_loss",)
    lacking += () if ladder.yardstick else RATIOS
    shown = shown or [name for name in NUMBERS if name not in lacking]
    return [
        LadderLine(
            arm=row.arm,
            kind="candidate" if is_candidate(row) else "",
            change=row.change,
            message=row.message,
            cells=[
                _held_out_cell(ladder, row)
                if name == "held_out_loss"
                else _number_cell(found[name])
                for name in shown
            ],
        )
        for row in ladder.rows
        for found in [numbers(row)]
    ]


def changes(study: RecordedStudy) -> list[Change]:
    """Return every path in which an arm differs from the baseline, arm by arm."""
    found = []
    text = _of_command if is_command(study.base) else _of_config
    for arm in study.candidates:
        differing = [
            (path, text(path, before), text(path, after))
            for path, (before, after) in arm.diff.items()
        ]
        rows = differing or [("nothing differs", "", "")]
        group = " + ".join(groups_of_arm(study, arm)) or MISSING
        found += [Change(arm.name, group, arm.axis, *row) for row in rows]
    return found


def hash_lines(study: RecordedStudy) -> list[HashLine]:
    """Return the hashes of the baseline that are shown, then how each other run's compare."""
    baseline, names = study.arm(BASELINE), shown_hashes(study)
    lines = [HashLine(BASELINE, _own_hashes(baseline, names))] if baseline else []
    for arm in study.candidates:
        compared = compare_hashes(arm, baseline)
        lines.append(HashLine(arm.name, [_hash_cells(compared[k]) for k in names]))
    return lines


def proof_legend(study: RecordedStudy) -> str:
    """Return what each mark means that the table of the study's hashes shows."""
    baseline, names = study.arm(BASELINE), shown_hashes(study)
    found = [compare_hashes(arm, baseline) for arm in study.candidates]
    shown = {line.sameness for each in found for name in names for line in each[name].values()}
    said = [f"{MARKS[key]} {key}: {MEANINGS[key]}" for key in MARKS if key in shown]
    return f"{'; '.join(said)}." if said else ""


def environment_lines(study: RecordedStudy) -> list[tuple[str, Cell]]:
    """Return each entry of the environment; one that differs between runs is marked as bad."""
    return [
        (key, Cell(" / ".join(map(value_text, values)), kind="bad" if len(values) > 1 else ""))
        for key, values in sorted(environments_of(study).items())
    ]


def numerics_text(arm: RecordedArm) -> str:
    """Return what the arm's attention was resolved to, as indented JSON; empty if unknown.

    Of a command's variables those alone that the study sets: what else a shell has is its user's,
    and of a short value even the hash that is on record tells. Of a secret none is shown.
    """
    manifests = [run.manifest for run in arm.runs.values() if run.manifest]
    if not manifests:
        return ""
    resolved, given = dict(manifests[0].resolved), manifests[0].config.get("env", {})
    if launched := dict(resolved.get("launched", {})):
        hashes, on_the_way = launched.get("variables", {}), launched.get("set_on_the_way", [])
        shown = [name for name in given if name in hashes and not is_secret(name)]
        launched["variables"] = {name: hashes[name] for name in shown}
        launched["set_on_the_way"] = [name for name in on_the_way if name in given]
        resolved["launched"] = launched
    return json.dumps(resolved, indent=2, sort_keys=True)


def _number_cell(number: Number) -> Cell:
    """Return a mean over the seeds with its error bar, and each seed's value on hovering."""
    values, write = number
    if not values.n:
        return Cell(MISSING)
    seeds = ", ".join(f"seed {seed}: {value:.6g}" for seed, value in values.per_seed.items())
    return Cell(write(values.mean), small=written_bar(values, write), title=seeds)


def _held_out_cell(ladder: Ladder, row: Row) -> Cell:
    """Return the mean loss, below it the difference from the baseline, paired by seed."""
    cell = _number_cell(Number(row.held_out_loss, finely))
    baseline = ladder.row(BASELINE)
    if row.arm == BASELINE or not row.held_out_loss.n or baseline is None:
        return cell
    own, other = row.held_out_loss.per_seed, baseline.held_out_loss.per_seed
    paired = SeedValues({seed: own[seed] - other[seed] for seed in own if seed in other})
    return replace(cell, small=nats(paired.mean) if paired.n else "")


def _own_hashes(arm: RecordedArm, names: Iterable[str]) -> list[list[Cell]]:
    def cell(seed: int, name: str) -> Cell:
        manifest = arm.runs[seed].manifest
        found = manifest.hashes.get(name, "") if manifest else ""
        return Cell(found[:SHORT_HASH] or MISSING, small=f"seed {seed}", title=found, kind="hash")

    return [[cell(seed, name) for seed in arm.runs] for name in names]


def _hash_cells(by_seed: Mapping[int, ProofLine]) -> list[Cell]:
    """Return a cell for each way in which a hash compares, with the seeds that it holds for."""
    by_sameness: dict[str, dict[int, ProofLine]] = {}
    for seed, line in by_seed.items():
        by_sameness.setdefault(line.sameness, {})[seed] = line
    return [
        Cell(
            text=f"{MARKS[sameness]} {sameness}",
            small=f"seed {', '.join(map(str, lines))}",
            title="; ".join(
                f"seed {seed}: {line.second or 'none yet'}, baseline {line.first or 'none yet'}"
                for seed, line in lines.items()
            ),
            kind={"same": "good", "different": "bad"}.get(sameness, ""),
        )
        for sameness, lines in by_sameness.items()
    ]


def _of_config(path: str, value: Any) -> str:
    return value_text(value)


def _of_command(path: str, value: Any) -> str:
    """Return the value at a `path` of a command's config, in words where the command has none."""
    if value not in (None, ""):
        return value_text(value)
    if path == "attention.implementation":
        return "the script's own"
    group = path.partition(".")[0]
    if group not in ("env", "flags", "config"):
        return "none"
    if value == "":
        return "empty"
    return "not set" if group == "env" else "the script's own"


def value_text(value: Any) -> str:
    """Return a value of a config as text; a string stands without quotes."""
    return value if isinstance(value, str) else json.dumps(value)
