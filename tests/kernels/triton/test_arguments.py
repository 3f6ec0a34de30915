"""What a kernel is compiled for, and what it is handed at each call: no call compiles it again."""

import pytest
import torch
from triton._C.libtriton import native_specialize_impl
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend

from attention_kernels import PROFILES
from attention_kernels.masks import Mask
from attention_kernels.rounding_key import draws_of
from attention_kernels.triton.arguments import constants_of, masks_of

STOCHASTIC = PROFILES["all_bf16"].with_(rounding="stochastic")
BACKEND = make_backend(GPUTarget("cuda", 90, 32))


def compiled_for(mask, scale=0.25, numerics=STOCHASTIC, rounding=()):
    """What tells a compiled kernel from another: constants, and types and kinds of arguments."""
    q = torch.empty(2, 4, 64, 32)
    numerics = numerics.resolve(q.dtype)
    draws = draws_of(numerics.arithmetic.seed, rounding)
    masks = masks_of(mask, q, q, scale=scale, numerics=numerics, draws=draws)
    constants = constants_of(q, q, q, mask=mask, scale=scale, numerics=numerics)
    return repr(constants), native_specialize_impl(BACKEND, masks, False, True, True)


def test_no_step_layer_or_rank_compiles_a_kernel_again():
    keys = [(seed, step, layer, 0) for seed in (0, 9) for step in range(50) for layer in (0, 1, 16)]
    places = [(first, head, 8) for first in (0, 1, 16) for head in (0, 1, 4)]
    calls = [(*key, 0, 0, 0) for key in keys] + [(*keys[0], *place) for place in places]
    assert len({compiled_for(Mask(), rounding=call) for call in calls}) == 1
    assert len({compiled_for(Mask(), numerics=STOCHASTIC.with_(seed=s)) for s in range(20)}) == 1


@pytest.mark.parametrize("numerics", [STOCHASTIC, PROFILES["golden"]], ids=["fp32", "fp64"])
def test_no_scale_softcap_window_or_dropout_compiles_a_kernel_again(numerics):
    calls = [
        (Mask(window=window, softcap=cap, dropout_p=p, dropout_seed=seed), scale)
        for window in ((1, 2), (16, 16), (0, 1))
        for cap in (1.0, 7.3)
        for p, seed in ((0.1, 0), (0.9, 2**40), (0.5, 16))
        for scale in (1.0, 0.3, -2.0)
    ]
    assert len({compiled_for(mask, scale, numerics) for mask, scale in calls}) == 1
    assert len({compiled_for(Mask(softcap=cap), numerics=numerics) for cap in (0.0, 1.0)}) == 2
