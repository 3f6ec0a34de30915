"""One table of rounding points: complete, without a stream used twice, and read by both engines."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from attention_kernels.points import (
    DROPOUT_STREAM,
    FIELDS,
    POINTS,
    ROUNDING_STREAM,
    SIGNS_STREAM,
    BackwardNumerics,
    ForwardNumerics,
)

KERNELS = Path(__file__).parents[2] / "kernels" / "attention_kernels"
OPERANDS = {"q", "k", "v", "dout"}


def test_every_field_has_a_rounding_and_every_rounding_a_field():
    groups = (ForwardNumerics, BackwardNumerics)
    assert tuple(field.name for group in groups for field in fields(group)) == FIELDS


def test_no_two_roundings_draw_the_same_bits():
    streams = [
        SIGNS_STREAM,
        DROPOUT_STREAM,
        ROUNDING_STREAM,
        *(point.stream for point in POINTS.values()),
    ]
    assert len(set(streams)) == len(streams)


def test_streams_keep_their_numbers_which_decide_bits():
    known = {
        **{"q": 1, "k": 2, "v": 3, "dout": 4},
        **{"scores": 16, "max": 17, "p": 18, "alpha": 19, "sum": 20, "probabilities": 21},
        **{"accumulator": 22, "output": 23, "lse": 24, "split_weights": 25, "split_total": 26},
        **{"delta": 27, "dp": 28, "ds": 29, "dq_accumulator": 30, "dk_accumulator": 31},
        **{"dv_accumulator": 32, "dq": 33, "dk": 34, "dv": 35, "backward_p": 36},
        **{"backward_probabilities": 37, "split_output": 38, "split_lse": 39},
        **{"products": 41, "exponents": 42, "alpha_exponent": 43, "block_sum": 44},
        **{"rescaled_sum": 45, "log_sum": 46, "rescaled_accumulator": 47, "block_output": 48},
        **{"split_exponent": 49, "split_log": 50, "split_rescaled": 51, "delta_products": 52},
        **{"backward_exponents": 53, "ds_difference": 54, "ds_probabilities": 55},
        **{"dq_product": 56, "dk_product": 57, "dv_product": 58},
    }
    assert known.items() <= {name: point.stream for name, point in POINTS.items()}.items()
    assert (SIGNS_STREAM, DROPOUT_STREAM, ROUNDING_STREAM) == (5, 40, 59)


@pytest.mark.parametrize("engine", ["twin", "triton"])
def test_an_engine_executes_every_rounding(engine):
    source = "".join(path.read_text() for path in (KERNELS / engine).glob("*.py"))
    assert set(re.findall(r'"(\w+)"', source)) >= set(POINTS) - OPERANDS
