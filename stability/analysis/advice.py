"""What would let a level of the verdict be measured, in the words of the study's own kind.

A study of our trainer is a YAML file with a config, one of commands a YAML file with a `command`;
one that is recorded run by run has no file, only the flags of `stability record`, and checkpoints
that were adopted tell no more than they hold. Leaves out what is missing (the levels' evidence).
"""

from typing import Literal

from stability.analysis.study_records import RecordedArm, RecordedStudy
from stability.config.commands import GRADIENT_NEEDS, is_adopted, is_command

__all__ = ["StudyKind", "Topic", "advice", "attention_is_not_its", "kind_of"]

StudyKind = Literal["config", "commands", "recorded", "adopted"]
Topic = Literal[
    "reference",
    "nudge",
    "held_out",
    "operator",
    "all_looks",
    "wild_look",
    "gradient",
    "distances",
]

_ADVICE: dict[Topic, dict[StudyKind, str]] = {
    "reference": {
        "config": "add an arm `reference: {role: reference}`",
        "commands": "add an arm one precision higher, like `reference: {role: reference, flags: "
        "{dtype: fp32}}` beside BF16, in flags of the script's own; beside a baseline in FP32 none "
        "will do: make BF16 the baseline and FP32 the reference",
        "recorded": "record such an arm with `--role reference`",
        "adopted": "adopt such a series with `--role NAME=reference`",
    },
    "nudge": {
        "config": "add an arm `nudge: {nudge: {ulps: 1}}`",
        "commands": "add an arm `nudge: {nudge: {ulps: 1}}`",
        "recorded": "record an arm with `--nudge 1`",
    },
    "held_out": {
        "config": "run the study with held_out.share above 0",
        "commands": "name a function of the held-out loss in the base, `held_out: module:function`",
        "recorded": "name a function of the held-out loss, `--held-out module:function`",
    },
    "operator": {
        "config": "runs with `probe.every` or `probe.steps`, and `probe.golden: true`",
        "commands": "runs with `probe: {candidate: flash:fa2, every: 10}` in the arm, or in the "
        "base for all",
        "recorded": "runs with `--probe flash:fa2`",
    },
    "all_looks": {
        "config": "looks at all four results of every layer (`probe.backward: true`, "
        "`probe.layers: ['*']`) in which nothing raises",
        "commands": "looks at all four results of every layer in which nothing raises",
        "recorded": "looks at all four results of every layer in which nothing raises",
    },
    "wild_look": {
        "config": "`stability check --from RUN` shows it on inputs of the run",
        # a run of a command has no model that could be built again outside of its script
        "commands": "`stability check` of it alone may show it, on inputs that are drawn",
        "recorded": "`stability check` of it alone may show it, on inputs that are drawn",
    },
    "gradient": {
        "config": "probe.gradient_every in the study's YAML, e.g. 2, and 20 looks",
        "commands": "`gradient_every: 2` in the arm's `probe`, or in the base's for all, and 20 "
        f"looks, for which {GRADIENT_NEEDS}",
        "recorded": f"runs with `--gradient-every 2`, and 20 looks, for which {GRADIENT_NEEDS}",
    },
    "distances": {
        "config": "run `stability run` again",
        "commands": "run `stability run` again",
        "recorded": "record another arm of that seed: it is made anew",
    },
}


def advice(study: RecordedStudy, topic: Topic) -> str:
    """Return what would let it be measured, a clause; empty where nothing would."""
    return _ADVICE[topic].get(kind_of(study), "")


def attention_is_not_its(study: RecordedStudy, arm: RecordedArm) -> str:
    """Return why no attention of an arm that names none is looked at, a clause.

    What a flag, variable or commit changes inside of a script is not known.
    """
    if kind_of(study) == "config":
        return f"{arm.name} does not change the attention"
    return f"{arm.name} names no attention: what it changes is not looked at by itself"


def kind_of(study: RecordedStudy) -> StudyKind:
    """Return how a study came to be: what its reader can change about it follows."""
    if is_adopted(study.base):
        return "adopted"
    if not is_command(study.base):
        return "config"
    # a study's file has its command as it is written there, with this key beside it
    return "commands" if "setup" in study.base else "recorded"
