"""The roles of arms: those that follow from a change, those that are given, and each refusal."""

from pathlib import Path

import pytest
import yaml

from stability.config.arms import describe_change, expand
from stability.config.commands import command_training
from stability.config.convert import ConfigError, to_dict
from stability.config.load import load_study
from stability.config.study import PolicyConfig

BASE = {
    "name": "tiny",
    "question": "Does it matter?",
    "base": {
        "model": {"depth": 2, "width": 32, "heads": 2, "context": 32},
        "train": {"steps": 10, "snapshot_steps": [2, 5]},
    },
    "arms": {
        "flash": {"attention": {"implementation": "flash"}},
        "broken": {"attention": {"implementation": "flash", "fault": "out_gain_1pct"}},
        "rerun": None,
        "nudge": {"nudge": {"ulps": 1}, "until": 5},
        "nudge_2": {"nudge": {"ulps": 1, "draw": 1}, "until": 5},
        "fp32": {"precision": "32-true"},
        "fp16": {"precision": "16-mixed"},
        "init_seed": {"seed": {"init_offset": 7}},
        "xavier": {"model": {"init": "xavier"}},
        "order": {"seed": {"order_offset": 7}},
        "eps": {"optimizer": {"eps": 1.0e-6}},
    },
    "yardstick": "fp32",
}


def _write(folder: Path, arms=(), base=(), **top) -> Path:
    content = yaml.safe_load(yaml.safe_dump(BASE)) | top
    content["arms"] |= dict(arms)
    content["base"] |= dict(base)
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


@pytest.fixture
def read(tmp_path):
    """Return a function that gives the arms of a study by name."""

    def load(arms=(), base=(), overrides=None, **top):
        study = load_study(_write(tmp_path, arms, base, **top), overrides)
        return {arm.name: arm for arm in expand(study)}

    return load


def test_a_role_that_is_not_given_follows_from_the_change(read):
    roles = {name: arm.role for name, arm in read().items()}
    assert roles == {
        "baseline": "baseline",
        "flash": "candidate",
        "broken": "broken",
        "rerun": "rerun",
        "nudge": "nudge",
        "nudge_2": "nudge",
        "fp32": "yardstick",
        "fp16": "candidate",
        "init_seed": "yardstick",
        "xavier": "yardstick",
        "order": "yardstick",
        "eps": "candidate",
    }


def test_a_given_role_goes_before_the_one_that_would_follow(read):
    arms = read({"again": {"role": "candidate"}, "fp16": {"role": "yardstick"}}, base={})
    assert arms["again"].role == "candidate"
    assert not arms["again"].diff
    assert arms["fp16"].role == "yardstick"


@pytest.mark.parametrize(
    ("baseline", "expected"),
    [
        ("bf16-mixed", "32-true"),
        ("bf16-true", "32-true"),
        ("16-mixed", "32-true"),
        ("emulated:e4m3", "32-true"),
        ("32-true", "64-true"),
    ],
)
def test_a_reference_is_one_precision_higher(read, baseline, expected):
    found = read({"truth": {"role": "reference"}}, {"precision": baseline})["truth"]
    assert found.role == "reference"
    assert found.diff == {"precision": (baseline, expected)}


def test_a_reference_may_be_given_a_precision_higher_still(read):
    found = read({"truth": {"role": "reference", "precision": "64-true"}})["truth"]
    assert found.config.precision == "64-true"


@pytest.mark.parametrize(
    "attention",
    [
        {"implementation": "flash", "numerics": {"block_k": 32}},
        {"implementation": "baseline", "profile": "fp16_softmax"},
    ],
    ids=["flash", "another profile"],
)
def test_a_reference_is_plain_whatever_the_baseline_is(read, attention):
    found = read({"truth": {"role": "reference"}}, {"attention": attention})["truth"]
    assert found.config.attention.implementation == "baseline"
    assert not found.config.attention.profile
    assert not found.config.attention.numerics
    assert {path.partition(".")[0] for path in found.diff} == {"attention", "precision"}


def test_a_plain_baseline_keeps_its_attention_in_the_reference(read):
    found = read({"truth": {"role": "reference"}}, {"attention": {"profile": "plain"}})["truth"]
    assert found.diff == {"precision": ("bf16-mixed", "32-true")}


def test_an_arm_ends_where_its_entry_says_and_else_with_the_baseline(read):
    ends = {name: arm.until for name, arm in read().items()}
    assert ends.pop("nudge") == ends.pop("nudge_2") == 5
    assert set(ends.values()) == {10}


def test_role_and_end_are_no_part_of_the_config(read):
    plain, ended = read()["nudge"], read({"nudge": {"nudge": {"ulps": 1}}})["nudge"]
    assert to_dict(plain.config) == to_dict(ended.config)
    assert (plain.until, ended.until) == (5, 10)


def test_an_end_on_the_command_line_brings_the_arms_forward(read):
    ends = {name: arm.until for name, arm in read(overrides={"train.steps": "4"}).items()}
    assert set(ends.values()) == {4}


NOT_HERE = "arms.x.role: must be baseline in the arm of that name alone, got 'baseline'"


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"role": "refrence"}, "arms.x.role: must be a role, got 'refrence'; nearest: reference"),
        ({"role": 3}, "arms.x.role: must be a role, got 3; nearest: baseline"),
        ({"role": "baseline"}, NOT_HERE),
        ({"role": "rerun", "nudge": {"ulps": 1}}, "arms.x.role: .* not be rerun .* changes nudge"),
        ({"role": "nudge"}, "arms.x.role: must not be nudge in an arm that changes nothing"),
        ({"role": "nudge", "precision": "32-true"}, "arms.x.role: .* nudge .* changes precision"),
        ({"role": "broken"}, "arms.x.role: .* broken in an arm that changes nothing; plant a fau"),
        ({"role": "reference", "nudge": {"ulps": 1}}, "arms.x.role: .* that also changes nudge"),
        (
            {"role": "reference", "precision": "16-mixed"},
            "arms.x.precision: must be higher than the baseline's bf16-mixed .* got '16-mixed'",
        ),
        (
            {"role": "reference", "attention": {"implementation": "sdpa"}},
            "arms.x.attention: must be plain in a reference, got 'sdpa'",
        ),
        ({"until": 4}, "arms.x.until: must be a step with a snapshot, got 4; they are 2, 5, 10"),
        ({"until": 0}, "arms.x.until: must be a step with a snapshot, got 0; they are 2, 5, 10"),
        ({"until": 20}, "arms.x.until: must not lie beyond the last step, 10, got 20"),
        ({"until": "5"}, "arms.x.until: must be a whole number, got '5'"),
        ({"until": True}, "arms.x.until: must be a whole number, got True"),
        ({"rolle": "nudge"}, "arms.x.rolle: unknown key"),
    ],
)
def test_a_role_or_end_that_can_not_be_is_refused(read, entry, message):
    with pytest.raises(ConfigError, match=f"tiny.yaml: {message}"):
        read({"x": entry})


def test_the_baseline_has_no_end_of_its_own(read):
    with pytest.raises(ConfigError, match=r"arms.baseline: must override nothing"):
        read({"baseline": {"until": 5}})


def test_a_study_has_one_reference(read):
    with pytest.raises(ConfigError, match=r"arms.two.role: must be reference in one arm .* one is"):
        read({"one": {"role": "reference"}, "two": {"role": "reference"}})


def test_the_reference_is_in_no_question(read):
    policy = {"policy": {"candidates": ["exact", "flash"]}}
    arms = {"exact": {"role": "reference"}, "flash": {"attention": {"implementation": "flash"}}}
    with pytest.raises(ConfigError, match=r"arms.exact.role: must not be reference in an arm of"):
        read(arms, **policy)


def test_nothing_is_higher_than_64_true(read):
    with pytest.raises(ConfigError, match=r"arms.x.role: must not be reference .* 64-true already"):
        read({"x": {"role": "reference"}}, {"precision": "64-true"})


def test_an_arm_that_is_judged_trains_to_the_end(read):
    message = r"arms.flash.until: must be the last step, 10, in an arm that is judged, got 5"
    short = {"flash": {"attention": {"implementation": "flash"}, "until": 5}}
    with pytest.raises(ConfigError, match=message):
        read(short)
    assert read({"flash": {**short["flash"], "until": 10}})["flash"].until == 10
    assert read(short, policy={"candidates": ["fp16"]})["flash"].until == 5, "it is not judged"
    named = {"fp32": {"precision": "32-true", "until": 5}}
    assert read(named)["fp32"].until == 5, "a yardstick may end early"
    with pytest.raises(ConfigError, match=r"arms.fp32.until: must be the last step"):
        read(named, policy={"candidates": ["fp32"]})


def test_a_control_reaches_the_step_that_is_judged(read):
    with pytest.raises(ConfigError, match=r"policy.step: .* end of nudge, step 5, got 10"):
        read(policy={"step": 10})
    assert read({"nudge": {"nudge": {"ulps": 1}, "until": 10}, "nudge_2": None}, policy={"step": 5})


def test_the_yardstick_reaches_the_early_step(read):
    with pytest.raises(ConfigError, match=r"early_step: .* yardstick fp32, step 2, got 5"):
        read({"fp32": {"precision": "32-true", "until": 2}}, early_step=5)


def test_a_description_tells_faults_and_coins_apart(read):
    arms = read()
    described = {}
    for name in ("broken", "nudge", "nudge_2"):
        base = to_dict(arms["baseline"].config)
        changes = {path: list(values) for path, values in arms[name].diff.items()}
        described[name] = describe_change(name, "none", changes, base)
    assert described["broken"] == "attention: baseline -> flash (fault=out_gain_1pct)"
    assert described["nudge"] == "initial weights moved by 1 ULP"
    assert described["nudge_2"] == "initial weights moved by 1 ULP; another coin (draw 1)"


def test_a_word_of_a_command_that_is_no_flag_is_told_by_its_place():
    base = command_training(["python", "train.py", "a.yaml", "--lr", "1"], {})
    changes = {"flags.argument_1": ["a.yaml", "b.yaml"], "flags.lr": ["1", "2"]}
    said = describe_change("b", "flags", changes, base)
    assert said == "argument 1: a.yaml -> b.yaml; --lr: 1 -> 2"


@pytest.mark.parametrize(
    ("before", "changes", "said"),
    [
        ({}, {"implementation": ["", "mine:f"]}, "not given -> mine:f"),
        (
            {},
            {"implementation": ["", "mine:f"], "fault": [None, "out_gain_1pct"]},
            "not given -> mine:f+out_gain_1pct",
        ),
        (
            {"implementation": "mine:f"},
            {"fault": [None, "out_gain_1pct"]},
            "mine:f -> mine:f+out_gain_1pct",
        ),
        (
            {"implementation": "mine:f", "fault": "out_gain_1pct"},
            {"implementation": ["mine:f", ""], "fault": ["out_gain_1pct", None]},
            "mine:f+out_gain_1pct -> not given",
        ),
    ],
)
def test_a_fault_on_the_attention_of_a_command_is_told_as_its_yaml_has_it(before, changes, said):
    base = command_training(["python", "train.py"], {}) | {"attention": before}
    diff = {f"attention.{name}": pair for name, pair in changes.items()}
    assert describe_change("b", "attention", diff, base) == f"attention: {said}"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"candidates": ["flesh"]}, "policy.candidates.0: must be an arm besides .* flash"),
        ({"candidates": ["baseline"]}, "policy.candidates.0: must be an arm besides baseline"),
        ({"candidates": ["flash", "flash"]}, "policy: candidates must name each arm once"),
        ({"max_excess": 1}, "policy: max_excess must be above 1, .* got 1.0"),
        ({"max_error_ratio": 0.5}, "policy: max_error_ratio must be above 1, .* got 0.5"),
        ({"max_gradient_ratio": float("nan")}, "policy: max_gradient_ratio must be above 1, .*nan"),
        ({"max_gain": 0}, "policy: max_gain must be > 0 and finite, got 0"),
        ({"max_bias_ulp": float("inf")}, "policy: max_bias_ulp must be > 0 and finite, got inf"),
        ({"window_limit": -1}, "policy: window_limit must be > 0 and finite, got -1"),
        ({"margin_nats": 0}, "policy: margin_nats must be > 0 and finite, got 0"),
        ({"max_share": 1}, r"policy: max_share must be in \(0, 1\), got 1"),
        ({"alpha": 0.5}, r"policy: alpha must be in \(0, 0.5\), got 0.5"),
        ({"alpha": 0.009}, r"policy.alpha: must be >= 0.01, got 0.009: nothing could pass"),
    ],
)
def test_a_policy_that_judges_nothing_is_refused(read, values, message):
    with pytest.raises(ConfigError, match=message):
        read(policy=values)


def test_the_limits_of_a_policy_have_the_documented_defaults():
    policy = PolicyConfig()
    assert (policy.candidates, policy.step, policy.window_limit) == ((), 0, 0.04)
    assert (policy.max_error_ratio, policy.max_gain, policy.max_bias_ulp) == (2, 1e-3, 0.05)
    assert (policy.max_gradient_ratio, policy.max_share, policy.max_excess) == (2, 0.01, 1.1)
    assert (policy.margin_nats, policy.alpha) == (0.005, 0.05)


@pytest.mark.parametrize(
    ("base", "message"),
    [
        ({"nudge": {"ulps": 1025}}, "base.nudge: ulps must be from 0 to 1024: .*, got 1025"),
        ({"nudge": {"ulps": 10**30}}, "base.nudge: ulps must be from 0 to 1024: .*, got 10000"),
        ({"nudge": {"ulps": 1e30}}, "base.nudge.ulps: must be a whole number, got 1e"),
        ({"nudge": {"ulps": 1, "draw": -1}}, "base.nudge: draw must be >= 0, got -1"),
        ({"nudge": {"draw": 1}}, "base.nudge: draw must be 0 where ulps is 0 .* got 1"),
        ({"probe": {"gradient_every": -1}}, "base.probe: gradient_every must be >= 0, got -1"),
        ({"probe": {"seeds": "frist"}}, "base.probe.seeds: must be a known .*nearest: first"),
    ],
)
def test_a_wrong_value_of_nudge_or_probe_is_refused(read, base, message):
    with pytest.raises(ConfigError, match=message):
        read(base=base)


def test_a_baseline_is_told_with_the_arguments_that_are_no_flags():
    base = command_training(["python", "train.py", "a.yaml", "b.yaml", "--lr", "1"], {})
    assert describe_change("baseline", "none", {}, base) == "python train.py a.yaml b.yaml"
    plain = command_training(["python", "train.py", "--lr", "1"], {})
    assert describe_change("baseline", "none", {}, plain) == "python train.py"
