"""Why harm would not have been seen, so that there is NO ASSAY, and what is to be done about it.

An arm that is broken on purpose has to fail, and training has to see it. More seeds help only where
they may show that; otherwise the study lacks something that no seed adds, and another study has to
have it, since a study's arms are sealed with its first run, but for one that is recorded run by
run. Leaves out the faults that are planted on a candidate (`assay`).
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from stability.analysis.more_looks import likely_look, next_look_is_at
from stability.analysis.sequential import LOOKS
from stability.analysis.unseen_harm import HARDLY

if TYPE_CHECKING:  # `verdict` imports this module
    from stability.analysis.verdict import ArmVerdict

__all__ = ["to_show_harm", "unseen"]

_ELSEWHERE = "in a study of another name unless its runs are recorded one by one"


def unseen(planted: Iterable["ArmVerdict"]) -> list[str]:
    """Return why the arms that are broken on purpose do not prove that harm is seen."""
    planted = list(planted)
    if not planted:
        return ["no arm is broken on purpose, so that training could show that it sees harm"]
    reasons = []
    for arm in filter(_is_unseen, planted):
        training = arm.levels.get("training")
        more = f"; to have it seen: {training.decides}" if training and training.decides else ""
        if arm.outcome != "FAIL":
            reasons.append(f"{arm.arm}, which is broken on purpose, does not fail{more}")
        else:
            reasons.append(f"training does not see {arm.arm}, which is broken on purpose{more}")
    return reasons


def to_show_harm(
    candidates: Iterable["ArmVerdict"], controls: Sequence["ArmVerdict"], next_look: int | None
) -> str:
    """Return what ends the NO ASSAY of `candidates`, a clause.

    `controls` are the arms that are broken on purpose; `next_look` is None after the last.
    """
    todo, unsure = [], []
    if not controls:
        todo.append(f"add an arm that is broken on purpose, its role `broken`, {_ELSEWHERE}")
    for arm in filter(_is_unseen, controls):
        training = arm.levels.get("training")
        if arm.seeds < LOOKS[0]:
            todo.append(
                f"{arm.arm} has to end in {LOOKS[0]} seeds or more: train those that are missing, "
                "or where it stops break it by a smaller error"
            )
        elif training and training.state == "not measured" and training.decides:
            todo.append(f"have the training of {arm.arm} measured: {training.decides}")
        elif next_look and _seeds_may_show(arm):
            unsure.append(arm)
        else:
            todo.append(f"break {arm.arm} by a larger error, {_ELSEWHERE}")
    blind = [arm.arm for arm in candidates if arm.assay.state in ("blind", "not measured")]
    if blind:
        todo.append(
            f"do what the assay of {' and '.join(blind)} asks for, so that faults are found"
        )
    said = [f"more seeds alone do not end NO ASSAY: {', and '.join(todo)}"] if todo else []
    if unsure:
        trainings = [arm.levels["training"] for arm in unsure if "training" in arm.levels]
        likely = likely_look(trainings, next_look)
        harm = f"the harm of {' and '.join(arm.arm for arm in unsure)}"
        said.append(f"{next_look_is_at(next_look, likely)}, which may show {harm}")
    return "; ".join(said)


def _is_unseen(arm: "ArmVerdict") -> bool:
    training = arm.levels.get("training")
    by_training = training is None or training.state in ("harmed", "not applicable")
    return arm.outcome != "FAIL" or not by_training


def _seeds_may_show(arm: "ArmVerdict") -> bool:
    """Whether more seeds may show the harm of an arm that is broken on purpose."""
    training = arm.levels.get("training")
    if training is None or training.state == "not applicable":
        return bool(arm.gains)
    return "training" in arm.gains and not training.decides.startswith(HARDLY)
