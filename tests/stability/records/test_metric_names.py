"""Metric names are the documented ones and can be read back."""

from hypothesis import given, settings
from hypothesis import strategies as st

from stability.records.metric_names import (
    STEP_AXIS,
    TRAIN_LOSS,
    deviation_name,
    drift_name,
    gradient_name,
    head_part,
    parse_deviation,
    parse_drift,
    parse_gradient,
    positions_part,
    watch_name,
)

WORDS = st.text("abc._-0", min_size=1, max_size=6)
PARTS = st.one_of(
    st.just(""),
    st.integers(0, 99).map(head_part),
    st.tuples(st.integers(0, 99), st.integers(1, 99)).map(
        lambda at: positions_part(range(at[0], at[0] + at[1]))
    ),
)


def test_names_are_the_documented_ones():
    assert (TRAIN_LOSS, STEP_AXIS) == ("train/loss", "trainer/global_step")
    assert deviation_name("layer_3", "dq", "rel_fro") == "deviation/layer_3/dq/rel_fro"
    name = deviation_name("layer_3", "dq", "rel_fro", shadow="flash_fa2", part=head_part(1))
    assert name == "deviation/layer_3/flash_fa2/head_1/dq/rel_fro"
    assert positions_part(range(0, 64)) == "positions_0_63"
    assert drift_name("all", "w1") == "drift/all/w1"
    assert gradient_name("all", "share") == "gradient/all/share"
    assert gradient_name("mlp", "ratio", as_trained=True) == "gradient/mlp/ratio_as_trained"
    assert watch_name("max_logit", layer="layer_3") == "watch/layer_3/max_logit"
    assert watch_name("grad_norm") == "watch/grad_norm"


@settings(max_examples=100)
@given(layer=WORDS, what=WORDS, metric=WORDS, shadow=st.one_of(st.just(""), WORDS), part=PARTS)
def test_a_deviation_is_read_back(layer, what, metric, shadow, part):
    name = deviation_name(layer, what, metric, shadow=shadow, part=part)
    assert parse_deviation(name) == (layer, what, metric, shadow, part)


@settings(max_examples=50)
@given(parameter=st.text("ab/.", min_size=1, max_size=6), metric=WORDS)
def test_a_drift_is_read_back_also_where_a_parameter_has_slashes(parameter, metric):
    assert parse_drift(drift_name(parameter, metric)) == (parameter, metric)


def test_a_gradient_metric_is_read_back():
    assert parse_gradient(gradient_name("mlp", "share")) == ("mlp", "share")
    name = parse_gradient(gradient_name("all", "ratio", as_trained=True))
    assert name == ("all", "ratio_as_trained")
    for other in (TRAIN_LOSS, "gradient", "gradient/all", "gradient/a/b/c", "drift/all/w1"):
        assert parse_gradient(other) is None


def test_other_names_are_told_apart():
    for name in (TRAIN_LOSS, "", "deviation", "deviation/layer_0/out", "watch/x"):
        assert parse_deviation(name) is None
    assert parse_deviation("deviation/a/b/c/d/e") is None
    for name in (TRAIN_LOSS, "drift", "drift/all", "deviation/layer_0/out/bias"):
        assert parse_drift(name) is None
