"""A verdict without a study: two candidates and an arm that is broken on purpose."""

from stability.analysis.assay import ArmAssay
from stability.analysis.evidence import LEVELS, LevelEvidence
from stability.analysis.verdict import ArmVerdict, StudyVerdict

STATES = ("holds", "harmed", "undecided", "not measured")


def arm_verdict(name, outcome, role="candidate", states=STATES):
    levels = {
        level: LevelEvidence(
            level=level,
            state=state,
            sentence=f"{name} at the {level} is {state}, [bold]1.02[/] of 1.10.",
            cell="1.02x +0.0001%ab" if state != "not measured" else "not measured",
            decides="5 seeds" if state == "undecided" else "",
        )
        for level, state in zip(LEVELS, states, strict=True)
    }
    return ArmVerdict(
        arm=name,
        role=role,
        outcome=outcome,
        levels=levels,
        assay=ArmAssay(state="sensitive", sentence="all were found"),
        sentence=f"{name} is what it is",
        seeds=3,
        gains=("training",) if "undecided" in states else (),
    )


def study_verdict(look=3, exploratory=(), broken="FAIL"):
    arms = (
        arm_verdict("a_candidate_of_a_long_name", "FAIL"),
        arm_verdict("flash_fa2", "PASS", states=("holds",) * 4),
        arm_verdict("broken", broken, role="broken", states=("harmed",) * 4),
    )
    return StudyVerdict(
        outcome="FAIL",
        sentence="",
        arms=arms,
        look=look,
        next_look=5,
        alpha=0.014,
        exploratory=exploratory,
    )
