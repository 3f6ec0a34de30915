"""The flash attention with a profile and dials, for tests that hold several against each other."""

from typing import Any

from attention_kernels import PROFILES, flash_attention

SMALL: dict[str, Any] = {"block_q": 16, "block_k": 16}
"""Tiles of which small inputs have several."""


def flash(engine, profile="golden", **changes):
    """Return `flash_attention` of an engine, as a function of q, k, v and options."""
    numerics = PROFILES[profile].with_(**changes)

    def attend(q, k, v, **options):
        return flash_attention(q, k, v, numerics=numerics, engine=engine, **options)

    return attend
