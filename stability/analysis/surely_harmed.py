"""Why an arm fails: at which levels it is surely harmed, and whether training came to harm by it.

A kernel that errs more than the policy allows may be harmless in the training that was run. What
the levels that saw the training say of it stands beside the FAIL, and that it may not have been
seen: a study in which the arm that is broken on purpose was not found proves nothing by it.
"""

from collections.abc import Mapping, Sequence

from stability.analysis.evidence import Level, LevelEvidence, LevelState, agreeing, listed

__all__ = ["why_it_fails"]

_OF_TRAINING: tuple[Level, ...] = ("training", "outcome")
_SILENT: tuple[LevelState, ...] = ("not measured", "not applicable")


def why_it_fails(role: str, levels: Mapping[Level, LevelEvidence], unshown: Sequence[str]) -> str:
    """Return why an arm with a level that is harmed fails, as a sentence's end.

    `unshown` is why the arms that are broken on purpose do not prove that harm is seen; empty if
    they do. Of an arm that is itself broken on purpose only the levels are told.
    """
    harmed: list[Level] = [level for level, one in levels.items() if one.state == "harmed"]
    said = f"it is surely harmed at {listed(harmed)}"
    states: dict[Level, LevelState] = {
        level: levels[level].state for level in _OF_TRAINING if level in levels
    }
    if role == "broken" or "harmed" in states.values():
        return said
    if all(state in _SILENT for state in states.values()):
        return f"{said}; whether training comes to harm was not measured"
    if "undecided" in states.values():
        return f"{said}; harm to training is not shown: {_in_words(states)}"
    would = ", and whether one would have been is not shown" if unshown else ""
    return f"{said}; no harm to training was seen{would}: {_in_words(states)}"


def _in_words(states: Mapping[Level, LevelState]) -> str:
    """Return the state of each level, those of one state together: `the outcome level holds`."""
    said = []
    for state in dict.fromkeys(states.values()):
        alike: list[Level] = [level for level, one in states.items() if one == state]
        verb = agreeing(alike, "holds") if state == "holds" else f"{agreeing(alike, 'is')} {state}"
        said.append(f"{listed(alike)} {verb}")
    return ", and ".join(said)
