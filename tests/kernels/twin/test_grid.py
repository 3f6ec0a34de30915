"""flash-attn's own grid under flash-attn's own rule, every kind of mask among it, in the twin.

All its pairs of lengths meet all its head dims; masks, groups and dtypes take turns, so that
`make test` sees each of them many times. `python tests/kernels/twin/test_grid.py` runs the whole
product, 5,760 cases, in an hour or so.
"""

import itertools
import sys

import pytest
import torch

from attention_kernels import baseline_attention, flash_attention, golden_attention
from attention_kernels.testing import Shape, assert_within_budget, make_qkv, with_gradients
from tests.sampling import one_in

LENGTHS = [
    (113, 203),
    (128, 217),
    (113, 211),
    (108, 256),
    (256, 512),
    (512, 256),
    (1024, 1024),
    (1023, 1024),
    (1024, 1023),
    (2048, 2048),
]
HEAD_DIMS = [32, 40, 59, 64, 80, 96, 111, 128, 160, 192, 224, 256]
GROUPS = [1, 2, 4]
DTYPES = [torch.bfloat16, torch.float16]
MASKS = ["full", "causal", "window", "window_causal", "alibi", "softcap", "padding", "bias"]


def mask_named(name, shape, generator):
    """Arguments of one kind of mask, at this shape."""
    left, right = torch.randint(0, shape.key_len, (2,), generator=generator).tolist()
    padding = torch.rand(shape.batch, shape.key_len, generator=generator) > 0.2
    return {
        "full": {},
        "causal": {"causal": True},
        "window": {"window": (left, right)},
        "window_causal": {"window": (left, None), "causal": True},
        "alibi": {"alibi_slopes": 0.3 * torch.rand(shape.heads, generator=generator)},
        "softcap": {"softcap": 15.0, "causal": True},
        "padding": {"key_padding": padding},
        "bias": {"attn_mask": torch.randn(shape.key_len, generator=generator), "causal": True},
    }[name]


def hold_against_the_rule(lengths, head_dim, mask, group, dtype):
    """Raise AssertionError if out errs over 2x or a gradient over 3x what plain attention does."""
    heads = 4 if max(lengths) < 1000 else 2
    shape = Shape(1, heads, max(1, heads // group), *lengths, head_dim)
    generator = torch.Generator().manual_seed(sum(lengths) + head_dim)
    q, k, v = make_qkv(shape, dtype, generator)
    dout = torch.randn(q.shape, generator=generator).to(dtype)
    options = mask_named(mask, shape, generator)
    golden = with_gradients(golden_attention, *(x.double() for x in (q, k, v, dout)), **options)
    baseline = with_gradients(baseline_attention, q, k, v, dout, **options)
    found = with_gradients(flash_attention, q, k, v, dout, engine="twin", **options)
    for name, value in found.items():
        factor = 2.0 if name == "out" else 3.0
        assert_within_budget(value, baseline[name], golden[name], factor, name)


def in_turns():
    for index, (lengths, head_dim) in enumerate(itertools.product(LENGTHS, HEAD_DIMS)):
        # One further from a pair of lengths to the next, so that no head dim keeps its mask.
        mask = MASKS[(index + index // len(HEAD_DIMS)) % len(MASKS)]
        dtype = DTYPES[index // len(MASKS) % 2]
        yield lengths, head_dim, mask, GROUPS[index % 3], dtype


@pytest.mark.parametrize(
    ("lengths", "head_dim", "mask", "group", "dtype"),
    one_in(5, in_turns(), slow=3),
    ids=lambda value: "x".join(map(str, value)) if isinstance(value, tuple) else str(value),
)
def test_the_twin_passes_flash_attns_rule(lengths, head_dim, mask, group, dtype):
    hold_against_the_rule(lengths, head_dim, mask, group, dtype)


def test_the_turns_reach_every_pair_of_mask_group_and_dtype():
    cases = list(in_turns())
    assert {(m, g) for _, _, m, g, _ in cases} == set(itertools.product(MASKS, GROUPS))
    assert {(m, d) for _, _, m, _, d in cases} == set(itertools.product(MASKS, DTYPES))


def run_all() -> int:
    failures = 0
    for case in itertools.product(LENGTHS, HEAD_DIMS, MASKS, GROUPS, DTYPES):
        try:
            hold_against_the_rule(*case)
        except AssertionError as error:
            failures += 1
            sys.stdout.write(f"{case}: {error}\n")
    sys.stdout.write(f"{failures} of the grid failed\n")
    return failures


if __name__ == "__main__":
    sys.exit(run_all() > 0)
