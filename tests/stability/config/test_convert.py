"""Mappings become dataclasses exactly, or are refused where the mistake stands."""

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stability.config.arms import override
from stability.config.convert import ConfigError, from_dict, to_dict
from stability.config.precision import NATIVE
from stability.config.schema import (
    ArmConfig,
    AttentionConfig,
    DataConfig,
    ModelConfig,
    NudgeConfig,
    OptimizerConfig,
    ProbeConfig,
    SeedConfig,
    TrainConfig,
)

MIXED = "bf16-mixed, *.mlp_*=fp32, blocks.layer_0=emulated:e4m3"
NAMES = st.text(st.characters(codec="utf-8", categories=["L", "N", "P"]), max_size=8)
POSITIVE = st.integers(1, 10**9)
RATES = st.floats(1e-12, 1e3)

ATTENTION = st.builds(
    AttentionConfig,
    implementation=NAMES,
    profile=NAMES,
    numerics=st.dictionaries(NAMES, NAMES | st.integers(), max_size=3),
    engine=st.sampled_from(["auto", "twin", "triton"]),
)
ARMS = st.builds(
    ArmConfig,
    model=st.builds(
        ModelConfig, depth=st.integers(1, 4096), width=st.just(24),
        heads=st.sampled_from([1, 2, 3, 4]),
        context=POSITIVE, vocab_size=POSITIVE, qk_norm=st.booleans(),
        init=st.sampled_from(["gpt2", "xavier", "kaiming", "orthogonal"]),
    ),
    attention=ATTENTION,
    precision=st.sampled_from([*NATIVE, "emulated:fp16", "emulated:e5m6", MIXED]),
    seed=st.builds(
        SeedConfig, base=st.integers(0, 2**32 - 1), init_offset=st.integers(-(10**9), 10**9)
    ),
    nudge=st.builds(NudgeConfig, ulps=st.integers(0, 9)),
    data=st.builds(DataConfig, source=NAMES, tokenizer=NAMES),
    optimizer=st.builds(
        OptimizerConfig, lr=RATES, eps=RATES, betas=st.tuples(st.floats(0, 0.9), st.floats(0, 0.9))
    ),
    train=st.builds(
        TrainConfig,
        steps=POSITIVE,
        snapshot_steps=st.lists(st.integers(0, 99), max_size=4).map(tuple),
        trainer=st.fixed_dictionaries(
            {},
            optional={
                "accumulate_grad_batches": POSITIVE,
                "gradient_clip_algorithm": st.sampled_from(["norm", "value"]),
            },
        ),
    ),
    probe=st.builds(
        ProbeConfig,
        every=st.integers(0, 9),
        shadows=st.lists(ATTENTION, min_size=1, max_size=3).map(tuple),
        golden=st.booleans(),
        overhead=st.sampled_from([0.0, 0.25, "5%"]),
    ),
)  # fmt: skip


@settings(max_examples=60)
@given(ARMS)
def test_a_config_survives_json_exactly(arm):
    stored = json.loads(json.dumps(to_dict(arm)))
    assert from_dict(ArmConfig, stored, "stored") == arm


@settings(max_examples=40)
@given(ARMS, ARMS)
def test_overriding_with_a_whole_config_gives_that_config(arm, other):
    arm = replace(arm, attention=other.attention, train=other.train)  # mappings merge by key
    other = replace(other, probe=arm.probe)
    assert override(arm, to_dict(other), "arm") == other


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"stepz": 5}, r"^here: stepz: unknown key; nearest: steps, snapshot_steps$"),
        ({"steps": True}, r"^here: steps: must be a whole number, got True$"),
        ({"steps": "5"}, r"^here: steps: must be a whole number, got '5'$"),
        ({"steps": 5.0}, r"^here: steps: must be a whole number, got 5.0$"),
        ({"steps": None}, r"^here: steps: must be a whole number, got None$"),
        ({"steps": 0}, r"^here: train: steps must be >= 1, got 0$"),
        ({"grad_clip": "1"}, r"^here: grad_clip: must be a number, got '1'$"),
        ({"snapshot_steps": 3}, r"^here: snapshot_steps: must be a list, got 3$"),
        (
            {"snapshot_steps": [1, "x"]},
            r"^here: snapshot_steps.1: must be a whole number, got 'x'$",
        ),
        ({"accelerator": "gpux"}, r"^here: accelerator: must be a known name, got 'gpux'; .*gpu"),
        ({"grad_clip": -1}, r"^here: train: grad_clip must be >= 0 and finite .*, got -1.0$"),
        ({"grad_clip": math.inf}, r"^here: train: grad_clip must be >= 0 and finite .*, got inf$"),
        ({"grad_clip": math.nan}, r"^here: train: grad_clip must be >= 0 and finite .*, got nan$"),
        ({"snapshot_steps": [1, -2]}, r"^here: train: snapshot_steps must be >= 0, got \[1, -2\]$"),
        ({"trainer": [1]}, r"^here: trainer: must be a mapping, got \[1\]$"),
        ({"trainer": {3: 1}}, r"^here: trainer.3: the key must be a string, got 3; quote it$"),
        ("fast", r"^here: must be a mapping, got 'fast'$"),
    ],
)
def test_a_mistake_is_named_where_it_stands(mapping, message):
    with pytest.raises(ConfigError, match=message):
        from_dict(TrainConfig, mapping, "here")


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"betas": [0.9]}, "betas: must be a list of 2 values"),
        ({"betas": [0.9, 1]}, r"betas must be in \[0, 1\), got \(0.9, 1.0\)"),
        ({"weight_decay": -1}, "weight_decay must be >= 0 and finite, got -1.0"),
        ({"weight_decay": math.inf}, "weight_decay must be >= 0 and finite, got inf"),
        ({"eps": math.inf}, "eps must be > 0 and finite, got inf"),
        ({"warmup_steps": -1}, "warmup_steps must be >= 0, got -1"),
        ({"lr": 0}, "lr must be > 0 and finite, got 0.0"),
        ({"lr": -1e-3}, "lr must be > 0 and finite, got -0.001"),
        ({"lr": math.inf}, "lr must be > 0 and finite, got inf"),
        ({"lr": math.nan}, "lr must be > 0 and finite, got nan"),
        ({"lr": 10**400}, "lr: must be a number that FP64 holds"),
    ],
)
def test_an_optimizer_that_cannot_work_is_refused(mapping, message):
    with pytest.raises(ConfigError, match=message):
        from_dict(OptimizerConfig, mapping, "here")


def test_a_whole_number_is_accepted_as_a_float():
    assert type(from_dict(OptimizerConfig, {"lr": 1}, "here").lr) is float


def test_a_missing_key_is_named():
    with pytest.raises(ConfigError, match=r"^here: model.context: missing; it has no default$"):
        from_dict(ArmConfig, {"model": {"depth": 1, "width": 8, "heads": 1}}, "here")


def test_heads_that_do_not_divide_are_refused_once_named():
    mapping = {"model": {"depth": 1, "width": 8, "heads": 3, "context": 4}}
    with pytest.raises(ConfigError, match=r"^here: model: width must be a multiple of heads \(3\)"):
        from_dict(ArmConfig, mapping, "here")


def test_an_override_changes_what_it_names_and_nothing_else():
    model = ModelConfig(depth=1, width=8, heads=1, context=4)
    arm = ArmConfig(model=model, attention=AttentionConfig(numerics={"softmax": "fp32"}))
    changed = override(arm, {"optimizer": {"lr": 5}, "nudge": None}, "arms.x")
    assert changed == replace(arm, optimizer=OptimizerConfig(lr=5.0))


def test_another_implementation_starts_from_its_own_defaults():
    arm = ArmConfig(
        model=ModelConfig(depth=1, width=8, heads=1, context=4),
        attention=AttentionConfig(profile="plain", numerics={"softmax": "fp32"}),
    )
    flash = override(arm, {"attention": {"implementation": "flash"}}, "arms.x").attention
    assert flash == AttentionConfig(implementation="flash")
    same = override(arm, {"attention": {"numerics": {"scores": "fp32"}}}, "arms.x").attention
    assert same.numerics == {"softmax": "fp32", "scores": "fp32"}
    assert same.profile == "plain"
