"""The statistics of a check are those of their definitions, and sure beyond their limits alone."""

import pytest
import torch

from attention_kernels.testing.cells import reference
from attention_kernels.testing.formula import RESULTS
from attention_kernels.testing.limits import excesses
from attention_kernels.testing.measured import measure
from attention_kernels.testing.statistics import angle, gain, over_looks, t_quantile
from tests.kernels.testing.checked import FEW


def test_gain_and_angle_tell_a_factor_from_noise():
    golden = torch.randn(
        1, 2, 50, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    torch.testing.assert_close(gain(1.01 * golden, golden), torch.full((1, 2), 0.01).double())
    assert angle(1.01 * golden, golden).max() < 1e-7
    turned = golden + 0.1 * golden.flip(-1)
    assert angle(turned, golden).min() > 0.05


def test_students_t_is_that_of_the_tables():
    assert t_quantile(0.05, 10) == pytest.approx(2.228, abs=1e-3)
    assert t_quantile(0.001, 3) == pytest.approx(12.92, abs=1e-2)
    assert t_quantile(2e-6, 15) == pytest.approx(7.43, abs=0.3)


def test_a_mean_over_looks_is_sure_only_beyond_its_limit():
    near = over_looks([1.0, 1.1, 0.9, 1.05])
    assert near.surely_beyond(0.5, 0.01)
    assert not near.surely_beyond(0.99, 0.01)
    assert not over_looks([7.0]).surely_beyond(1.0, 0.5)


@pytest.mark.parametrize("result", RESULTS)
def test_a_result_rounded_once_exceeds_nothing(result):
    wheres = [reference(cell, torch.bfloat16) for cell in FEW]
    rounded = [
        measure(
            where,
            result,
            where.golden[result].to(torch.float32 if result == "lse" else where.dtype),
        )
        for where in wheres
    ]
    assert not excesses(rounded, "bf16")
    off = [measure(x.where, result, 1.02 * x.values.double()) for x in rounded]
    assert excesses(off, "bf16")
