"""What gives a level of the verdict more looks: seeds, steps, or a probe that looks oftener.

The verdict looks at a number of seeds, the probe at steps: a seed that nobody looks at adds nothing
to evidence over looks. So is every seed but the first at the gradient, always, and at the operator
where `probe.seeds` is `first`. Steps and probe are sealed: other ones are another study. Leaves out
how many looks are lacking (the levels' evidence).
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from stability.analysis.advice import StudyKind, kind_of
from stability.analysis.evidence import Level, LevelEvidence, agreeing, listed
from stability.analysis.study_records import RecordedArm, RecordedStudy
from stability.records.metric_names import parse_deviation

__all__ = [
    "gaining",
    "likely_look",
    "more_looks",
    "more_seeds",
    "next_look_is_at",
    "outlook",
    "unmeasured",
]

_EVERY: dict[Level, str] = {"operator": "every", "gradient": "gradient_every"}
"""The levels that are judged over looks, and the probe's setting of how often each is made."""

_ASKED_BY: dict[StudyKind, dict[Level, str]] = {
    "config": {"operator": "`probe.every`", "gradient": "`probe.gradient_every`"},
    "commands": {"operator": "`probe.every`", "gradient": "`probe.gradient_every`"},
    "recorded": {"operator": "`--every`", "gradient": "`--gradient-every`"},
}
"""What its reader sets it by."""


def gaining(
    study: RecordedStudy, arm: RecordedArm, levels: Mapping[Level, LevelEvidence]
) -> tuple[Level, ...]:
    """Return which of the `levels` of `arm` are undecided and may be decided by more seeds."""
    return tuple(
        level
        for level, evidence in levels.items()
        if evidence.state == "undecided"
        and evidence.seeds_decide
        and _seeds_count(study, arm, level)
    )


def outlook(undecided: Sequence[Level], gaining: Sequence[Level], next_look: int | None) -> str:
    """Return what more seeds would do for the levels that are `undecided`, a clause.

    `gaining` are those of them that they may decide; `next_look` is None after the last.
    """
    rest: list[Level] = [level for level in undecided if level not in gaining]
    if not gaining:
        return f"{_why_none(rest)}, so more seeds decide nothing"
    if not next_look:
        return "this was the last look"
    but = f", which add nothing at {listed(rest)}" if rest else ""
    return f"{next_look_is_at(next_look)}{but}"


def _why_none(levels: Sequence[Level]) -> str:
    """Return why more seeds decide none of the `levels`, a clause."""
    first: list[Level] = [level for level in levels if level in _EVERY]
    left: list[Level] = [level for level in levels if level not in _EVERY]
    said = []
    if first:
        whose = listed(first) if left else "it" if len(first) == 1 else "they"
        said.append(f"{whose} {agreeing(first, 'is')} looked at in the first seed alone")
    if left:
        said.append(f"the controls are not within the limit where {listed(left)} is judged")
    return ", and ".join(said)


def next_look_is_at(seeds: int | None, likely: int | None = None) -> str:
    """Return how many seeds the next look is at, a clause; empty without one.

    `likely` is the look that is likely to decide.
    """
    if not seeds:
        return ""
    later = f", and by the scatter it takes {likely}" if likely and likely > seeds else ""
    return f"the next look is at {seeds} seeds{later}"


def likely_look(levels: Iterable[LevelEvidence], next_look: int | None) -> int | None:
    """Return the number of seeds that the `levels` ask for by their scatter, of the looks.

    None after the last look; the next one where none says how many it takes, be it that no look is
    enough.
    """
    asked = [one.likely_seeds for one in levels if one.state == "undecided"]
    return max(next_look, *asked) if next_look and asked else next_look


def more_seeds(next_look: int | None) -> str:
    """Return that more seeds are asked for, with the number of the next look if there is one."""
    return f"more seeds (--seeds {next_look})" if next_look else "more seeds"


def unmeasured(levels: Mapping[Level, LevelEvidence]) -> str:
    """Return what is missing at the `levels` that are not measured, a clause; empty if none is."""
    lacking: list[Level] = [name for name in levels if levels[name].state == "not measured"]
    if not lacking:
        return ""
    todo = "; ".join(
        dict.fromkeys(levels[name].decides for name in lacking if levels[name].decides)
    )
    said = f"no PASS while {listed(lacking)} {agreeing(lacking, 'is')} not measured"
    return f"{said}: {todo}" if todo else said


def more_looks(study: RecordedStudy, arm: RecordedArm, level: Level) -> str:
    """Return what would add looks at the operator or the gradient, and what would not: a clause."""
    by_seeds, ways = _seeds_count(study, arm, level), _ways(study, arm, level)
    anew = f"{' or '.join(ways)}, in a study of another name"
    if by_seeds:
        return f"by more seeds, or by {anew}"
    return f"by {anew}; more seeds add none, since only the first is looked at"


def _ways(study: RecordedStudy, arm: RecordedArm, level: Level) -> list[str]:
    kind, probe = kind_of(study), _probe(arm)
    every = probe.get(_EVERY[level])
    if level == "operator" and probe.get("steps"):
        ways = ["more of `probe.steps`"]  # which stands in the place of `every`
    elif kind not in _ASKED_BY or every == 1:
        ways = ["more steps"]
    else:
        asked = _ASKED_BY[kind][level]
        ways = ["more steps", f"{asked} above 0" if every == 0 else f"a smaller {asked}"]
    if level == "operator" and kind == "config" and not _seeds_count(study, arm, level):
        ways.append("`probe: {seeds: all}`")
    return ways


def _seeds_count(study: RecordedStudy, arm: RecordedArm, level: Level) -> bool:
    """Whether more seeds add to the evidence of `level`, as those on record were looked at."""
    if level not in _EVERY:
        return True
    if level == "gradient":
        return False
    # whoever records runs one by one says of each whether it is looked at, and of commands each is
    if kind_of(study) != "config" or _probe(arm).get("seeds") == "all":
        return True
    return len(_looked_at(arm)) > 1


def _looked_at(arm: RecordedArm) -> list[int]:
    """Return the seeds in which the probe has left a look at attention."""
    return [
        seed
        for seed, run in arm.runs.items()
        if any(series.steps and parse_deviation(name) for name, series in run.metrics.items())
    ]


def _probe(arm: RecordedArm) -> Mapping[str, Any]:
    """Return the settings of the seed of `arm` that is looked at most: the first one's."""
    probes = [run.manifest.config.get("probe", {}) for run in arm.runs.values() if run.manifest]
    often = ("gradient_every", "every", "steps")
    return max(probes, key=lambda each: [bool(each.get(name)) for name in often], default={})
