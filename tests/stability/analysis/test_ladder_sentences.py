"""The sentences: what they say, and what they must not say."""

import json
import re
from dataclasses import replace

import pytest

from stability.analysis.ladder import ladder_of
from stability.analysis.ladder_sentences import candidate_sentences, notes, sentence
from stability.analysis.number_text import times
from stability.analysis.study_records import read_study
from stability.records.sealed_json import read_sealed, write_sealed
from tests.stability.sealing import seal


def rewrite(study, arm, change):
    """Pass each logged line of an arm through `change`."""
    for path in (study / arm).glob("seed-*/metrics.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        path.write_text("".join(seal(change(line)) for line in lines))


def rewrite_seed(study, arm, seed, change):
    path = study / arm / f"seed-{seed}" / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(seal(change(line)) for line in lines))


def scaled(factor, steps=None):
    def change(line):
        if steps is None or line["step"] in steps:
            names = [name for name in line if name.startswith("drift/")]
            line |= {name: line[name] * factor for name in names}
        return line

    return change


@pytest.fixture
def study(synthetic, tmp_path):
    return synthetic.write_synthetic(tmp_path / "quickstart")


def test_late_figure_is_disowned_once_the_nudge_has_caught_up(finished):
    ladder = ladder_of(read_study(finished))
    row, nudge = ladder.row("flash_fa2"), ladder.row("nudge")
    share = nudge.rel_l2.last.over(row.rel_l2.last).mean
    said = sentence(ladder, "flash_fa2")
    assert said.startswith(f"flash_fa2 moves the weights {times(row.ratio.early.mean)} (")
    assert "as far as fp32 does at step 20 and " in said
    assert said.endswith(
        f"(2 seeds); by step 200 the 1-ULP nudge has itself gone {times(share)} as far, so only "
        "the early figure can be told from chaos."
    )


@pytest.mark.parametrize(
    ("share", "disowned"), [(0.49, False), (0.51, True)], ids=["below-half", "above-half"]
)
def test_chaos_begins_where_the_nudge_has_gone_half_as_far(study, share, disowned):
    ladder = ladder_of(read_study(study))
    arm, nudge = ladder.row("flash_fa2").rel_l2.last, ladder.row("nudge").rel_l2.last
    rewrite(study, "nudge", scaled(share / nudge.over(arm).mean, steps={200}))
    assert ("told from chaos" in sentence(ladder_of(read_study(study)), "flash_fa2")) is disowned


def test_both_figures_are_disowned_if_the_nudge_is_early(study):
    rewrite(study, "nudge", scaled(100.0))
    assert "already at step 20" in sentence(ladder_of(read_study(study)), "flash_fa2")
    assert "neither figure" in sentence(ladder_of(read_study(study)), "flash_fa2")


@pytest.mark.parametrize(
    ("share", "said"),
    [(0.9, "most of that is chaos, though surely not all"), (1.2, "neither figure can be told")],
)
def test_with_five_seeds_chaos_is_told_by_the_interval_as_in_a_verdict(
    synthetic, tmp_path, share, said
):
    study = synthetic.write_synthetic(tmp_path / "five", seeds=[0, 1, 2, 3, 4])
    row = ladder_of(read_study(study)).row("flash_fa2")
    nudge = ladder_of(read_study(study)).row("nudge")
    factor = share / nudge.rel_l2.early.over(row.rel_l2.early).mean
    rewrite(study, "nudge", scaled(factor, steps=(20,)))
    for seed in range(5):  # the same share in each seed
        ladder = ladder_of(read_study(study))
        now = ladder.row("nudge").rel_l2.early.per_seed[seed]
        want = share * ladder.row("flash_fa2").rel_l2.early.per_seed[seed]
        rewrite_seed(study, "nudge", seed, scaled(want / now, steps=(20,)))
    rewrite(study, "nudge", scaled(1e-6, steps=(200,)))
    assert said in sentence(ladder_of(read_study(study)), "flash_fa2")


def test_missing_nudge_is_said(study, synthetic):
    content = read_sealed(study / "study.json", "")
    content["arms"] = [arm for arm in content["arms"] if arm["name"] != "nudge"]
    write_sealed(study / "study.json", content)
    said = sentence(ladder_of(read_study(study)), "flash_fa2")
    assert said.endswith("no nudge arm says how much of that is chaos.")


def test_sentence_without_a_yardstick_gives_the_drift_itself(synthetic, tmp_path):
    study = synthetic.write_synthetic(tmp_path / "quickstart", yardstick="")
    said = sentence(ladder_of(read_study(study)), "flash_fa2")
    assert re.match(r"flash_fa2 moves the weights by \d\.\de-\d\d .*relative L2\) at step 20", said)


def test_a_reference_is_the_yardstick_of_a_study_that_names_none(synthetic, tmp_path):
    study = read_study(synthetic.write_synthetic(tmp_path / "quickstart", yardstick=""))
    arms = [replace(x, role="reference") if x.name == "fp32" else x for x in study.arms]
    ladder = ladder_of(replace(study, arms=tuple(arms)))
    assert " as far as fp32 does at step 20 " in sentence(ladder, "flash_fa2")
    assert "and is the yardstick" in sentence(ladder, "fp32")


def test_an_arm_that_ends_before_the_early_step_is_not_waited_for(synthetic, tmp_path):
    study = read_study(synthetic.write_synthetic(tmp_path / "quickstart"))
    for name, until, said in [("nudge", 10, "ends at step 10"), ("fp32", 20, "no drift on record")]:
        arm = study.arm(name)
        runs = {seed: replace(run, metrics={}) for seed, run in arm.runs.items()}
        ended = replace(arm, until=until, runs=runs)
        arms = tuple(ended if x.name == name else x for x in study.arms)
        text = sentence(ladder_of(replace(study, arms=arms)), name)
        assert said in text
        assert ("yet" in text) == (name == "fp32")


def test_one_seed_is_said_to_have_no_spread(synthetic, tmp_path):
    study = synthetic.write_synthetic(tmp_path / "quickstart", seeds=[0])
    said = sentence(ladder_of(read_study(study)), "flash_fa2")
    assert "(1 seed, so no spread)" in said
    assert " to " not in said.replace("to be", "")


def test_controls_have_their_own_sentences(finished):
    ladder = ladder_of(read_study(finished))
    assert sentence(ladder, "rerun") == (
        "rerun has exactly the baseline's weights at step 200 (2 seeds)."
    )
    assert "and is the yardstick" in sentence(ladder, "fp32")
    assert "chaos" not in sentence(ladder, "nudge")
    assert sentence(ladder, "baseline") == "baseline is what every other arm is compared with."
    assert [said.split()[0] for said in candidate_sentences(ladder)] == [
        "flash_fa2",
        "flash_all_bf16",
    ]


def test_unknown_arm_is_refused_with_the_names(finished):
    with pytest.raises(ValueError, match=r"^arm must be one of baseline, rerun, .*got 'flash_fa9'"):
        sentence(ladder_of(read_study(finished)), "flash_fa9")


def test_arm_without_drift_says_why(synthetic, tmp_path):
    synthetic.write_study_json(tmp_path)
    synthetic.write_run(tmp_path, synthetic.ARMS[2], 0, state="failed", until=0)
    (tmp_path / "flash_fa2" / "seed-0" / "metrics.jsonl").unlink()
    said = sentence(ladder_of(read_study(tmp_path)), "flash_fa2")
    assert said == (
        "flash_fa2 has no drift on record at step 20 yet "
        "(seed 0 failed: ValueError: loss is not finite)."
    )


def test_aa_that_is_not_zero_becomes_the_floor(study):
    assert any("A/A is zero" in note for note in notes(ladder_of(read_study(study))))

    def leak(line):
        if "drift/all/rel_l2" in line:
            line["drift/all/rel_l2"] = 3e-7
        return line

    rewrite(study, "rerun", leak)
    found = notes(ladder_of(read_study(study)))
    assert any("A/A is not zero here: rerun drifts by up to 3.0e-07" in note for note in found)
    assert any("(2 reruns): the training is not deterministic" in note for note in found)
    # what has gone further is told from it, what has not means nothing
    nudge = ladder_of(read_study(study)).row("nudge")
    rewrite_seed(study, "rerun", 0, lambda line: scaled(nudge.rel_l2.last.high / 3e-7 * 2)(line))
    ladder = ladder_of(read_study(study))
    assert sentence(ladder, "nudge").endswith("so neither figure means anything.")
    assert "a rerun, which changes nothing" not in sentence(ladder, "init_seed")
    floor = [note for note in notes(ladder) if "A/A is not zero" in note]
    assert len(floor) == 1
    assert "(from 3.0e-07)" in floor[0], "the least of the reruns beside the largest"


def test_w1_below_its_sampling_floor_says_nothing(study):
    def noted():
        return next(n for n in notes(ladder_of(read_study(study))) if "drawn weights" in n)

    rewrite(study, "init_seed", scaled(0.5, steps=(200,)))
    assert noted().startswith("init_seed starts from independently drawn weights")
    assert noted().endswith("below it and says nothing.")
    rewrite(study, "init_seed", scaled(50.0, steps=(200,)))
    assert noted().endswith("is above it.")
    rewrite(study, "init_seed", lambda line: line if line["step"] else {"step": 0})
    assert noted().endswith("no arm with another init seed was compared at step 0 to measure it.")


def test_unfinished_study_is_announced(synthetic, tmp_path):
    synthetic.write_study_json(tmp_path)
    for arm in synthetic.ARMS:
        synthetic.write_run(tmp_path, arm, 0, state="running", until=70)
    assert "No arm has reached step 200 yet; the last figures are earlier." in notes(
        ladder_of(read_study(tmp_path))
    )


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (0.0, "0x"),
        (0.0123, "0.012x"),
        (0.5, "0.50x"),
        (1.0, "1.0x"),
        (9.96, "10x"),
        (245.4, "245x"),
    ],
)
def test_ratios_are_written_with_two_figures(value, written):
    assert times(value) == written
