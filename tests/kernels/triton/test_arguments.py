"""What a kernel is compiled for, and what it is handed at each call: no call compiles it again."""

import ast
from pathlib import Path

import pytest
import torch
from triton._C.libtriton import native_specialize_impl
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend

from attention_kernels import PROFILES
from attention_kernels.masks import Mask
from attention_kernels.rounding_key import draws_of
from attention_kernels.triton import fast_launch
from attention_kernels.triton.arguments import constants_of, masks_of
from tests.kernels.triton.fast_launches import launches_of

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


def compiled_for_fast(arch, scale, window, starts=None):
    """What tells the kernels of one call of the fast path, in groups of two heads, from others."""
    q = torch.empty(1, 4, 128, 64, dtype=torch.bfloat16)
    mask = Mask(window=window, cu_seqlens_q=starts, cu_seqlens_k=starts)
    launches = launches_of(arch, q, q[:, :2], q[:, :2], mask, scale)
    assert len(launches) == 5, "forward, dQ, dK with dV, and a sum over the group for either"
    return tuple(
        (
            launch.kernel.__name__,
            repr(launch.constants),
            tuple(native_specialize_impl(BACKEND, x, False, True, True) for x in launch.arguments),
        )
        for launch in launches
    )


CUTS = [torch.tensor(starts, dtype=torch.int32) for starts in ([0, 112, 128], [0, 1, 16, 128])]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("arch", [80, 90])
def test_no_scale_window_or_cut_compiles_the_fast_path_again(arch, packed):
    found = {
        compiled_for_fast(arch, scale, window, starts)
        for scale in (1.0, 0.125, 16.0, 0.3)
        for window in ((1, 2), (16, 16), (0, 1), (0, 0))
        for starts in (CUTS if packed else [None])
    }
    assert len(found) == 1
    assert compiled_for_fast(arch, 1.0, (None, 2), CUTS[0] if packed else None) not in found


FINITE = {
    "formats.py:format_named": "the names of formats that there are",
    "numerics.py:_fits_tf32": "of a format",
    "operators.py:_wider": "of a format and a dtype",
    "fp_environment.py:settle_vector_math": "no argument",
    "peers/flex.py:_compiled": "no argument",
    "testing/mistakes.py:functools.cache": "no argument; it goes with the mistake",
    "triton/runtime.py:interpreted": "the kernels that there are",
}
"""Caches without a bound, by where they are, and what bounds them."""


def caches_without_a_bound(path):
    """The functions of a file whose results are all kept, or the calls that make such."""
    tree = ast.parse(path.read_text())
    decorated = {
        id(each): node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        for decorator in node.decorator_list
        for each in ast.walk(decorator)
    }
    for node in ast.walk(tree):
        name = decorated.get(id(node), ast.unparse(node))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("lru_cache"):
            sizes = [x.value for x in node.keywords if x.arg == "maxsize"]
            if not sizes or ast.unparse(sizes[0]) == "None":
                yield name
        elif isinstance(node, ast.Attribute) and ast.unparse(node) == "functools.cache":
            yield name


def test_every_cache_has_a_bound_or_is_of_few_things():
    folder = Path(fast_launch.__file__).parents[1]
    found = {
        f"{path.relative_to(folder).as_posix()}:{name}"
        for path in folder.rglob("*.py")
        for name in caches_without_a_bound(path)
    }
    assert found == set(FINITE)
    assert fast_launch.fast_constants.cache_parameters()["maxsize"]
