"""What keeps every candidate of a study from a PASS, as its plan alone says, before anything runs.

A run takes minutes to days, and what is missing then takes it anew. Leaves out what only runs can
show, such as whether a script evaluates anything, and what each level makes of what is there (the
levels' evidence).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from stability.analysis.advice import advice
from stability.analysis.assay import why_training_is_unshown
from stability.analysis.gradient_evidence import LOOKS_NEEDED
from stability.analysis.sequential import LOOKS
from stability.analysis.study_distances import why_itself
from stability.analysis.study_records import RecordedArm, RecordedStudy
from stability.analysis.training_evidence import missing_controls, why_inapplicable
from stability.analysis.verdict import judged_candidates
from stability.config.axes import touches
from stability.config.commands import GRADIENT_NEEDS

__all__ = ["NO_QUESTION", "lacking_seeds", "plan_gaps"]

NO_QUESTION = (
    "no arm is in question, so that the ladder alone is made; for a verdict add one, as "
    "`candidate: {flags: {a-flag: its-other-value}}`"
)


def plan_gaps(study: RecordedStudy, configs: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return a clause for each thing that a PASS of `study` lacks, with what to do about it.

    `configs` are those of the first seed's runs, by arm. Of a study that judges no arm NO_QUESTION
    alone.
    """
    try:
        candidates = judged_candidates(study, study.policy)
    except ValueError:
        return [NO_QUESTION]
    found: list[str] = []
    if any(not why_inapplicable(study, arm) for arm in candidates):
        found += [": ".join(missing_controls(study))]
    found += [": ".join(why_itself(study, arm)) for arm in candidates]
    swaps = any(touches(arm.diff, ("attention",)) for arm in candidates)
    if not any(arm.role == "broken" and arm not in candidates for arm in study.arms):
        found.append(
            "no arm is broken on purpose, so that it is not known that harm is seen: add one with "
            "`role: broken`"
        )
    elif swaps and (why := why_training_is_unshown(study)):
        found.append(f"{why}: add an arm `broken: {{attention: flash:fa2+out_gain_1pct}}`")
    found.append(lacking_seeds(study.seeds))
    if any(_measures_no_loss(configs[arm.name].get("held_out")) for arm in candidates):
        found.append(f"no outcome is measured, as held_out is off: {advice(study, 'held_out')}")
    found += [said for arm in candidates if (said := _unseen(arm, configs[arm.name]))]
    return [said for said in dict.fromkeys(found) if said]


def _measures_no_loss(held_out: Any) -> bool:
    """Whether it is switched off, in a study of commands or of our own trainer."""
    share = held_out.get("share", 1) if isinstance(held_out, Mapping) else 1
    return held_out == "none" or share == 0


def lacking_seeds(seeds: Sequence[int]) -> str:
    """Return that these are too few for the first look, and what to do; empty if they are not."""
    if len(seeds) >= LOOKS[0]:
        return ""
    return (
        f"it has {len(seeds)} of the {LOOKS[0]} seeds of the first look: `stability run` with "
        f"--seeds {LOOKS[0]} trains more"
    )


def _unseen(arm: RecordedArm, config: Mapping[str, Any]) -> str:
    """Return why looks at an attention that is swapped are none or too few; empty if they do."""
    if not touches(arm.diff, ("attention",)):
        return ""
    probe, steps = config.get("probe", {}), config["train"]["steps"]
    every, of_gradient = (probe.get(name, 0) for name in ("every", "gradient_every"))
    enough = max(1, steps // LOOKS_NEEDED)
    if not (every and of_gradient):
        what = "its attention" if not every else "the whole model's gradient"
        name = arm.diff.get("attention.implementation", ("", ""))[-1] or "flash:fa2"
        return (
            f"{arm.name}: nothing looks at {what} there: `probe: {{candidate: {name}, every: "
            f"{enough}, gradient_every: {enough}}}` in the arm, or in the base for all; for the "
            f"gradient {GRADIENT_NEEDS}"
        )
    if steps // of_gradient < LOOKS_NEEDED:
        fewer = f"gradient_every {enough}, or " if enough < of_gradient else ""
        return (
            f"{arm.name}: the gradient is judged from {LOOKS_NEEDED} looks on, and train.steps "
            f"{steps} with gradient_every {of_gradient} has {steps // of_gradient}: {fewer}more "
            "updates"
        )
    return ""
