"""Two arms: which values differ, and on which axes those lie."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stability.config.arms import override
from stability.config.axes import axes_of
from stability.config.diff import are_same, diff
from stability.config.schema import ArmConfig, AttentionConfig, ModelConfig

ARM = ArmConfig(
    model=ModelConfig(depth=1, width=8, heads=1, context=4),
    attention=AttentionConfig(implementation="flash", numerics={"block_k": 32}),
)


@pytest.mark.parametrize(
    ("changes", "expected", "axes"),
    [
        ({}, {}, []),
        (
            {"attention": {"implementation": "baseline"}},
            {
                "attention.implementation": ("flash", "baseline"),
                "attention.numerics.block_k": (32, None),
            },
            ["attention"],
        ),
        ({"precision": "32-true"}, {"precision": ("bf16-mixed", "32-true")}, ["precision"]),
        ({"model": {"init": "xavier"}}, {"model.init": ("gpt2", "xavier")}, ["model.init"]),
        ({"seed": {"init_offset": 3}}, {"seed.init_offset": (0, 3)}, ["seed.init_offset"]),
        ({"seed": {"order_offset": 3}}, {"seed.order_offset": (0, 3)}, ["seed.order_offset"]),
        ({"nudge": {"ulps": 1}}, {"nudge.ulps": (0, 1)}, ["nudge"]),
        ({"probe": {"every": 3, "shadows": [{"implementation": "sdpa"}]}}, {}, []),
        ({"watch": {"every": 0}}, {}, []),
        (
            {"model": {"depth": 2}, "nudge": {"ulps": 1}, "seed": {"base": 1}},
            {"model.depth": (1, 2), "seed.base": (0, 1), "nudge.ulps": (0, 1)},
            ["model.depth", "seed.base", "nudge"],
        ),
        (
            {"train": {"trainer": {"accumulate_grad_batches": 2}}},
            {"train.trainer.accumulate_grad_batches": (None, 2)},
            ["train.trainer.accumulate_grad_batches"],
        ),
    ],
)
def test_differences_are_named_by_path_and_axis(changes, expected, axes):
    differences = diff(ARM, override(ARM, changes, "arms.x"))
    assert differences == expected
    assert axes_of(differences) == axes


def test_a_value_that_is_no_number_is_the_same_as_itself():
    nan = float("nan")
    assert are_same([1, nan], [1, float("nan")])
    assert not are_same(nan, 1.0)
    assert not are_same(True, 1)
    one, other = ({"program": "t.py", "flags": {"clip": x}} for x in (nan, float("nan")))
    assert diff(one, other) == {}


@settings(max_examples=30)
@given(st.integers(1, 3), st.sampled_from(["gpt2", "xavier"]), st.integers(0, 2))
def test_a_difference_seen_from_the_other_side_is_swapped(depth, init, ulps):
    changes = {"model": {"depth": depth, "init": init}, "nudge": {"ulps": ulps}}
    other = override(ARM, changes, "arms.x")
    assert {p: (b, a) for p, (a, b) in diff(ARM, other).items()} == diff(other, ARM)
    assert bool(diff(ARM, other)) == (other != ARM)
