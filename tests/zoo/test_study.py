"""A study of a tiny GPT tells right attentions from wrong ones: no right FAIL, no wrong PASS.

The model has what a kernel's mistakes need to show: fewer kv heads than heads, a head_dim that is
no power of two, a length that no tile divides, q, k and v with strides of their own. What a study
of it can't reach, it can't see, and `check` must: lengths of 512 and more, fewer queries than keys,
calls that are not causal or have a scale, logits above 88, the LSE.
"""

import argparse
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml

from stability.analysis.assay import ArmAssay
from stability.analysis.study_records import RecordedStudy, read_study
from stability.analysis.verdict import ArmVerdict, judge_arms
from stability.config.load import load_study
from tests.conftest import run_quietly
from tests.zoo import test_zoo
from tests.zoo.in_studies import DEPTH, LATE, RIGHT_NAMES, WRONG_NAMES, implementation
from tests.zoo.wrong import WRONG

STEP, STEPS = 10, 20
UNWATCHED = {"every": 0, "gradient_every": 0}
MODEL = {"depth": DEPTH, "width": 96, "heads": 4, "kv_heads": 2, "context": 70}
BASE = {
    "model": MODEL,
    "attention": {"implementation": "baseline"},
    "precision": "bf16-mixed",
    "held_out": {"batches": 1},
    # where it learns faster, single batches have errors ten times as large as the others, and what
    # repeats from look to look drowns in them
    "optimizer": {"lr": 2e-4, "warmup_steps": 20},
    "train": {
        "steps": STEPS,
        "batch_size": 4,
        "snapshot_steps": [STEP],
        "checkpoint_every": STEPS,
        "accelerator": "cpu",
    },
    "probe": {
        "every": 2,
        "shadows": [{"implementation": "flash", "profile": "fa2"}],
        "gradient_every": 1,
        "gradient_sequences": 2,
        "seeds": "first",
    },
    "watch": {"every": 0},
}
CONTROLS = {
    "baseline": {},
    "reference": {"role": "reference", "until": STEP, "probe": UNWATCHED},
    "nudge": {"nudge": {"ulps": 1}, "until": STEP, "probe": UNWATCHED},
    # whole, since studies of wrong attentions name it as the arm that is judged
    "rerun": {"probe": UNWATCHED},
    "broken": {
        "attention": {"implementation": "flash", "profile": "fa2", "fault": "out_gain_1pct"},
        "until": STEP,
    },
}
GOLDEN, SCALE = "right_golden", "wrong_scale_x_1_005"
SAMPLE = {
    "right": (GOLDEN, "right_flash_fa2"),
    "wrong": (SCALE,),
    "training": ("late_sign", "bias_fifth_ulp"),
}

OUT_OF_REACH = {
    "scale given is ignored": "a GPT leaves the scale to its attention",
    "LSE in base 2": "a GPT asks for no LSE",
    "LSE x 1.005": "a GPT asks for no LSE",
    "LSE without the maximum": "a GPT asks for no LSE",
    "causal mask top-left": "a GPT has as many keys as queries",
    "causal whatever is asked": "a GPT asks for a causal mask",
    "empty rows are the mean of v": "each row attends itself",
    "empty rows are NaN": "each row attends itself",
    "keys from 1024 on are not read": "the context is 70",
    "window of 512 though none was asked": "the context is 70",
    "no maximum is subtracted": "logits stay below 88",
    "accumulator in BF16 over the keys": "70 keys are a short sum",
    "dk summed in BF16": "70 queries are a short sum",
}
"""Wrong attentions that are right in every call of this study, and why."""


def _train(folder: Path, keys: tuple[str, ...], assayed: tuple[str, ...]) -> Path:
    text = folder / "words.txt"
    # long enough that no batch stands out
    lines = (line.strip() for line in Path(argparse.__file__).read_text().splitlines())
    text.write_text("\n".join(filter(None, lines)))
    arms = {key: {"attention": {"implementation": implementation(key)}} for key in keys}
    content = {
        "name": "zoo",
        "question": "Which of these attentions are right?",
        "base": {**BASE, "data": {"source": str(text)}},
        "arms": {**CONTROLS, **arms},
        "seeds": [0, 1, 2],
        "yardstick": "nudge",
        "early_step": STEP,
        "policy": {"step": STEP, "candidates": list(assayed)},
    }
    path = folder / "zoo.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    # isolated: a kernel that scales q in place takes its process down, by a segmentation fault
    run_quietly(load_study(path), folder / "runs", isolated=True)
    return folder / "runs" / "zoo"


def _assume_sensitive(*_: object) -> ArmAssay:
    return ArmAssay(state="sensitive", sentence="taken for granted")


def _judged(study: RecordedStudy, key: str, **options) -> ArmVerdict:
    """Return the verdict on an arm judged alone, so that no other shares its error rate."""
    alone = replace(study.policy, candidates=(key,))
    return judge_arms(study, alone, **options).arms[0]


# a wrong one must not need the assay to be kept from a PASS
_judged_wrong = partial(_judged, assay=_assume_sensitive)


def _row(verdict: ArmVerdict) -> str:
    cells = "  ".join(f"{x.state:10} {x.cell:16}" for x in verdict.levels.values())
    return f"{verdict.arm:55} {verdict.outcome:12} {cells}"


@pytest.fixture(scope="module")
def sample(tmp_path_factory) -> RecordedStudy:
    """A study of golden, another right attention, and wrong ones of three kinds."""
    keys = tuple(key for kind in SAMPLE.values() for key in kind)
    return read_study(_train(tmp_path_factory.mktemp("sample"), keys, (GOLDEN,)))


@pytest.mark.long
def test_golden_passes_with_every_planted_fault_found(sample):
    judged = judge_arms(sample, sample.policy)
    assert judged.outcome == "PASS", _row(judged.arms[0]) + judged.arms[0].sentence
    assert not judged.exploratory
    assert "all 11 planted faults were found" in judged.arms[0].sentence


@pytest.mark.slow
@pytest.mark.parametrize("key", SAMPLE["right"])
def test_a_right_attention_does_not_fail(sample, key):
    judged = _judged(sample, key)
    assert judged.outcome != "FAIL", judged.sentence
    assert not any(level.state == "not measured" for level in judged.levels.values())


@pytest.mark.slow
@pytest.mark.parametrize("key", [*SAMPLE["wrong"], *SAMPLE["training"]])
def test_a_wrong_attention_does_not_pass(sample, key):
    judged = _judged_wrong(sample, key)
    assert judged.outcome != "PASS", _row(judged)
    assert not any(level.state == "not measured" for level in judged.levels.values())


@pytest.mark.slow
def test_half_a_percent_of_scale_is_seen_at_the_operator_alone(sample):
    judged = _judged_wrong(sample, SCALE)
    assert judged.outcome == "FAIL"
    states = {level: found.state for level, found in judged.levels.items()}
    assert states.pop("operator") == "harmed"
    assert "harmed" not in states.values(), states


@pytest.mark.slow
def test_a_late_divergence_is_seen_by_its_outcome_though_training_held(sample):
    assert LATE > STEP
    levels = _judged_wrong(sample, "late_sign").levels
    assert levels["training"].state == "holds", levels["training"].sentence
    # of 3 seeds the loss is sure to be worse in none: they scatter by as much as it is
    assert levels["outcome"].state != "holds", levels["outcome"].sentence
    assert levels["outcome"].figures["difference"] > 10 * sample.policy.margin_nats


@pytest.mark.slow
def test_a_bias_adds_up_in_the_gradient(sample):
    found = _judged_wrong(sample, "bias_fifth_ulp").levels
    assert found["training"].state != "harmed", "else it would be no test of a bias"
    assert found["gradient"].figures["share_low"] > sample.policy.max_share, found[
        "gradient"
    ].sentence


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["reference", "nudge", "broken"])
def test_without_a_control_not_even_golden_passes(sample, lost):
    arms = tuple(arm for arm in sample.arms if arm.role != lost)
    assert _judged(replace(sample, arms=arms), GOLDEN).outcome in ("INCONCLUSIVE", "NO ASSAY")


@pytest.mark.slow
def test_nudges_that_are_the_baseline_to_the_bit_let_nothing_pass(sample):
    moved = [arm for arm in sample.arms if arm.role not in ("nudge", "rerun")]
    rerun = next(arm for arm in sample.arms if arm.role == "rerun")
    same = replace(sample, arms=(*moved, replace(rerun, role="nudge")))
    assert _judged(same, GOLDEN).outcome == "INCONCLUSIVE"


@pytest.mark.slow
def test_the_yardstick_has_no_part_in_the_answer(sample):
    # the sample's own is a nudge, which everything is further from than a rerun
    assert sample.yardstick == "nudge"
    for other in ("", "reference"):
        changed = replace(sample, yardstick=other)
        assert _judged(changed, GOLDEN).outcome == "PASS"
        assert _judged_wrong(changed, SCALE).outcome == "FAIL"


def test_what_the_study_cannot_reach_is_listed(monkeypatch):
    # an oracle of its own: it shares no code with the evidence
    heads, kv_heads, length = MODEL["heads"], MODEL["kv_heads"], MODEL["context"]
    shape = (heads, kv_heads, length, length, MODEL["width"] // heads)
    monkeypatch.setitem(test_zoo.PROBLEMS, "zoo study", test_zoo.Problem(4, *shape, strided=True))
    faults = partial(test_zoo._faults, name="zoo study", dtype=torch.bfloat16, with_lse=False)
    unseen = {
        one.name
        for one in WRONG
        # thrice: one is wrong in every third call
        if torch.bfloat16 in one.dtypes and not any(faults(one.function) for _ in range(3))
    }
    assert unseen == set(OUT_OF_REACH)


VISIBLE = [key for key, name in WRONG_NAMES.items() if name not in OUT_OF_REACH]
CHUNK = 9


def _chunks(keys: Iterable[str]) -> list[tuple[str, ...]]:
    left = list(keys)
    return [tuple(left[at : at + CHUNK]) for at in range(0, len(left), CHUNK)]


@pytest.mark.long
@pytest.mark.parametrize("keys", _chunks(RIGHT_NAMES), ids=lambda keys: f"from {keys[0]}")
def test_no_right_attention_of_the_zoo_fails(keys, tmp_path):
    study = read_study(_train(tmp_path, keys, keys))
    judged = [_judged(study, key) for key in keys]
    print("", *map(_row, judged), sep="\n")  # noqa: T201 -- the table, shown by `pytest -s`
    assert [one.arm for one in judged if one.outcome == "FAIL"] == []


@pytest.mark.long
@pytest.mark.parametrize(
    "keys", _chunks([*VISIBLE, "late_nan"]), ids=lambda keys: f"from {keys[0]}"
)
def test_no_wrong_attention_of_the_zoo_passes(keys, tmp_path):
    # none is assayed, which could only keep more of them from a PASS; a rerun has nothing to assay
    study = read_study(_train(tmp_path, keys, ("rerun",)))
    judged = [_judged_wrong(study, key) for key in keys]
    print("", *map(_row, judged), sep="\n")  # noqa: T201 -- the table, shown by `pytest -s`
    assert [one.arm for one in judged if one.outcome == "PASS"] == []
