"""Which path a change is called by, which group it belongs to, and what no arm may change."""

from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stability.config.axes import (
    Group,
    axes_of,
    change_problem,
    fixed_problem,
    groups_of,
    lies_on,
    present_name,
    touches,
    why_fixed,
)
from stability.config.convert import to_dict
from stability.config.diff import leaves
from stability.config.roles import default_role
from stability.config.schema import ArmConfig, ModelConfig

ARM = ArmConfig(model=ModelConfig(depth=1, width=8, heads=1, context=4))
PATHS = [path for path in leaves(to_dict(ARM)) if not path.startswith(("probe.", "watch."))]


def test_a_single_value_is_its_own_axis():
    assert axes_of(["optimizer.lr"]) == ["optimizer.lr"]
    assert change_problem(["optimizer.lr"]) == ""


def test_an_attention_is_one_change_whatever_differs_in_it():
    paths = ["attention.implementation", "attention.numerics.block_k"]
    assert axes_of(paths) == axes_of(paths, "attention") == ["attention"]
    assert change_problem(paths) == change_problem(paths, "attention") == ""


def test_a_part_of_an_attention_may_be_declared_and_is_called_attention():
    paths = ["attention.numerics.block_k"]
    assert axes_of(paths, "attention.numerics") == ["attention"]
    assert change_problem(paths, "attention.numerics") == ""
    assert "hold all" in change_problem([*paths, "attention.implementation"], "attention.numerics")


def test_a_path_that_merely_begins_like_an_axis_lies_elsewhere():
    assert axes_of(["nudges", "nudge.ulps"]) == ["nudges", "nudge"]
    assert not lies_on("optimizer.lr2", "optimizer.lr")
    assert not touches(["precisions"], ("precision",))
    assert touches(["attention.numerics.exp"], ("precision", "attention"))


@pytest.mark.parametrize("path", PATHS)
def test_each_value_of_a_config_has_one_group_or_a_reason(path):
    assert (len(groups_of([path])) == 1) == (why_fixed(path) == "")
    assert why_fixed(path) != why_fixed("of.nowhere")


GROUPS = {
    "attention": [
        *("attention.implementation", "attention.profile", "attention.numerics.block_k"),
        *("attention.engine", "attention.layers", "attention.direction", "attention.fault"),
    ],
    "precision": ["precision", "train.matmul_precision"],
    "optimizer": [
        *("optimizer.name", "optimizer.lr", "optimizer.betas", "optimizer.weight_decay"),
        *("optimizer.state", "optimizer.options.beta", "optimizer.momentum", "optimizer.eps"),
        *("train.grad_clip", "train.trainer.gradient_clip_algorithm"),
    ],
    "schedule": ["optimizer.warmup_steps"],
    "data": ["seed.order_offset"],
    "batch": ["train.batch_size", "train.trainer.accumulate_grad_batches"],
    "init": [
        *("model.init", "model.init_std", "seed.init_offset", "nudge.ulps", "nudge.draw", "start"),
    ],
    "model": ["model.dropout", "model.heads", "model.qk_norm", "model.options.rope_theta"],
    "compile": ["train.compile", "train.compile_options.mode"],
    # and those that values tell: `test_launchers`
    "layout": [
        *("parallel.data", "parallel.shard", "parallel.tensor", "parallel.sequence"),
        *("parallel.reduce", "parallel.accumulate", "parallel.fault"),
    ],
    "code": ["program", "ref", "setup"],
    "flags": ["flags.lr", "flags", "config.lr"],
    "environment": ["env.OMP_NUM_THREADS", "python", "deterministic", "train.deterministic"],
}
"""Each group, and which paths of ours and of commands belong to it."""


@pytest.mark.parametrize("group", get_args(Group))
def test_each_group_has_its_paths(group):
    assert all(groups_of([path]) == [group] for path in GROUPS[group])
    assert all(why_fixed(path) == "" for path in GROUPS[group])


def test_every_free_value_of_a_config_is_in_the_table_of_groups():
    listed = [path for paths in GROUPS.values() for path in paths]
    free = [path for path in PATHS if not why_fixed(path)]
    missing = [path for path in free if not touches(listed, (path,)) and path not in listed]
    assert missing == []


def test_the_longest_path_decides_the_group():
    assert groups_of(["optimizer.lr"]) == ["optimizer"]
    assert groups_of(["optimizer.warmup_steps"]) == ["schedule"]
    assert groups_of(["optimizer.warmup_steps", "attention.fault", "optimizer.lr"]) == [
        "attention",
        "optimizer",
        "schedule",
    ]


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("train.steps", "step by step"),
        ("model.depth", "other shapes"),
        ("held_out.share", "held out from training"),
        ("data.source", "held out from training"),
        ("data.workers", "decides no bit"),
        ("seed.base", "list it in `seeds`"),
        ("of.nowhere", "no value of an arm's config"),
    ],
)
def test_what_no_arm_may_change_has_a_reason(path, reason):
    said = fixed_problem({"precision": ["a", "b"], path: [1, 2]})
    assert said.startswith(f"{path} must be 1 as in the baseline, is 2: ")
    assert reason in said


@settings(max_examples=60)
@given(st.sets(st.sampled_from(PATHS), min_size=1, max_size=4))
def test_one_change_is_what_lies_on_one_axis(paths):
    axes = axes_of(paths)
    assert all(any(lies_on(path, axis) for axis in axes) for path in paths)
    assert bool(change_problem(paths)) == (len(axes) > 1)
    # a change that is declared by the name of each single one of several never holds them all
    for axis in axes:
        if len(axes) > 1:
            assert change_problem(paths, axis)


def test_names_of_older_records_are_read_as_todays():
    assert [present_name(name) for name in ("seed", "init", "optimizer.lr", "none")] == [
        "seed.init_offset",
        "model.init",
        "optimizer.lr",
        "none",
    ]


@pytest.mark.parametrize(
    ("path", "group"), [("changes.batches", "batch"), ("changes.init", "init")]
)
def test_batches_or_a_start_that_are_meant_to_differ_are_a_change_of_their_own(path, group):
    differences = {path: (False, True)}
    assert axes_of(differences) == axes_of(differences, path) == [path]
    assert change_problem(differences) == change_problem(differences, path) == ""
    assert groups_of(differences) == [group]
    assert default_role("x", differences, "") == "candidate"
    # beside another change they are what that one is meant to change
    both = {"flags.batch_size": (1, 2), **differences}
    assert axes_of(both) == ["flags.batch_size"]
    assert groups_of(both) == ["flags"]
    assert change_problem(both, "flags") == ""


def test_batches_and_a_start_that_are_meant_to_differ_are_two_changes():
    differences = {f"changes.{name}": (False, True) for name in ("init", "batches")}
    assert "differs in changes.init, changes.batches" in change_problem(differences)


def test_older_records_called_batches_that_are_meant_to_differ_no_change():
    assert present_name("none", ["changes.batches"]) == "changes.batches"
    assert present_name("none", ["changes.init", "changes.batches"]) == "many"
    assert present_name("none", []) == present_name("none") == "none"
