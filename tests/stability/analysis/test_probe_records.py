"""Tables by layer: the means are those of plain sums, and thinning loses no spike."""

import math
import struct
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stability.analysis.probe_records import LayerTable, layer_table, mean_column, thinned
from stability.analysis.study_records import read_study
from stability.records.metric_columns import Column, Series

# few steps, so that some are logged twice and some by one seed alone
SEED = st.lists(st.tuples(st.integers(0, 6), st.floats()), max_size=8)


def column(entries):
    steps, values = [step for step, _ in entries], [value for _, value in entries]
    return Column(np.array(steps, np.int64), np.array(values, np.float64))


@settings(max_examples=300)
@given(st.lists(SEED, max_size=4))
def test_mean_is_that_of_plain_sums_at_the_steps_that_every_seed_has(seeds):
    by_seed = [dict(entries) for entries in seeds if entries]
    shared = set.intersection(*map(set, by_seed)) if by_seed else ()
    expected = {}
    for step in sorted(shared):
        total = 0.0
        for values in by_seed:
            total += values[step]
        expected[step] = total / len(by_seed)
    found = mean_column(map(column, seeds))
    assert found.steps.tolist() == list(expected)
    for mean, plain in zip(found.values, expected.values(), strict=True):
        same = struct.pack("d", mean) == struct.pack("d", plain)
        assert same or (math.isnan(mean) and math.isnan(plain))


def test_table_holds_the_mean_of_the_seeds_layer_by_layer(finished):
    arm = read_study(finished).arm("flash_fa2")
    table = layer_table(arm, "out", "bias_ulp")
    assert table.layers == tuple(f"layer_{i}" for i in range(5))
    assert table.steps.tolist() == list(range(0, 200, 20))
    for layer, row in zip(table.layers, table.values, strict=True):
        seeds = [run.series(f"deviation/{layer}/out/bias_ulp") for run in arm.runs.values()]
        means = [sum(seed[step] for seed in seeds) / 2 for step in table.steps.tolist()]
        assert row.tolist() == means
    assert layer_table(arm, "dq", "bias_ulp") is None


def test_first_shadow_counts_and_single_heads_do_not(finished):
    arm = read_study(finished).arm("flash_fa2")
    names = ("l/b/out/rel_fro", "l/a/out/rel_fro", "l_10/a/out/rel_fro", "l_9/a/out/rel_fro")
    metrics = {f"deviation/{name}": Series([1], [float(i)]) for i, name in enumerate(names)}
    metrics["deviation/l/a/head_0/out/rel_fro"] = Series([2], [9.0])
    arm = replace(arm, runs={0: replace(arm.runs[0], metrics=metrics)})
    table = layer_table(arm, "out", "rel_fro")
    assert table.layers == ("l", "l_9", "l_10")
    assert table.values.tolist() == [[1.0], [3.0], [2.0]]


def test_a_layer_that_was_not_looked_at_has_no_number():
    table = LayerTable.of_steps({"a": {3: 1.0, 1: 2.0}, "b": {2: 5.0}})
    assert table.steps.tolist() == [1, 2, 3]
    np.testing.assert_array_equal(table.values, [[2, np.nan, 1], [np.nan, 5, np.nan]])


@settings(max_examples=200)
@given(
    count=st.integers(1, 60),
    columns=st.integers(1, 30),
    spike=st.floats(50, 1e300),
    sign=st.sampled_from([-1, 1]),
    where=st.floats(0, 1),
    ratio=st.booleans(),
)
def test_thinning_keeps_every_spike_at_its_own_step(count, columns, spike, sign, where, ratio):
    steps = np.arange(count) * 7
    values = 1 + (steps % 5) / 10
    at = round(where * (count - 1))
    values[at] = spike**sign if ratio else spike * sign
    table = LayerTable.of_columns({"a": Column(steps, values)})
    thin = thinned(table, columns, ratio=ratio)
    assert thin.values.shape == thin.at.shape == (1, min(count, columns))
    assert thin.steps[0] == 0
    place = thin.at[0].tolist().index(steps[at])
    assert thin.values[0, place] == values[at]
    by_step = dict(zip(steps.tolist(), values.tolist(), strict=True))
    assert thin.values[0].tolist() == [by_step[step] for step in thin.at[0].tolist()]
    ends = [*thin.steps[1:].tolist(), count * 7]
    stretches = zip(thin.steps.tolist(), thin.at[0].tolist(), ends, strict=True)
    assert all(first <= step < end for first, step, end in stretches)


@pytest.mark.parametrize("ratio", [False, True])
def test_numbers_that_cannot_be_drawn_hide_no_others(ratio):
    values = np.array([np.nan, 3.0, np.inf, 0.0 if ratio else -np.inf, np.nan, np.nan])
    table = LayerTable.of_columns({"a": Column(np.arange(6), values)})
    thin = thinned(table, 2, ratio=ratio)
    assert thin.values[0].tolist() == [3.0, values[3]]
