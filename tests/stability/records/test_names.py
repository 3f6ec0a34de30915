"""Metric names are the documented ones and can be read back."""

from hypothesis import given, settings
from hypothesis import strategies as st

from stability.records.names import (
    STEP_AXIS,
    TRAIN_LOSS,
    deviation_name,
    drift_name,
    parse_deviation,
    parse_drift,
)

WORDS = st.text("abc._-0", min_size=1, max_size=6)


def test_names_are_the_documented_ones():
    assert (TRAIN_LOSS, STEP_AXIS) == ("train/loss", "trainer/global_step")
    assert deviation_name("layer_3", "dq", "rel_fro") == "deviation/layer_3/dq/rel_fro"
    assert drift_name("all", "w1") == "drift/all/w1"


@settings(deadline=None, max_examples=50)
@given(layer=st.text("ab/.", min_size=1, max_size=6), what=WORDS, metric=WORDS)
def test_a_name_is_read_back_also_where_a_layer_has_slashes(layer, what, metric):
    assert parse_deviation(deviation_name(layer, what, metric)) == (layer, what, metric)
    assert parse_drift(drift_name(layer, metric)) == (layer, metric)


def test_other_names_are_told_apart():
    for name in (TRAIN_LOSS, "", "deviation", "deviation/layer_0/out", "watch/x"):
        assert parse_deviation(name) is None
    for name in (TRAIN_LOSS, "drift", "drift/all", "deviation/layer_0/out/bias"):
        assert parse_drift(name) is None
