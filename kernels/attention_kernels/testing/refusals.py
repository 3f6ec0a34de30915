"""What an attention says it does not do, told from a mistake by its words.

NotImplementedError always refuses. A ValueError, a RuntimeError (which a check in C++ raises) or an
AssertionError refuses if it says in a word of refusal that an option of this very call is not
taken, as in "head_dim must be at most 64, got 96".
"""

import re
from collections.abc import Callable
from typing import NamedTuple

from attention_kernels.testing.cells import Reference

__all__ = ["UnsupportedError", "is_refusal"]


class _Option(NamedTuple):
    """The words for an option of a call, and the values that a cell has for it; none if unused."""

    words: str
    values: Callable[[Reference], tuple[object, ...]]


def _lengths(where: Reference) -> tuple[object, ...]:
    return where.cell.shape.query_len, where.cell.shape.key_len


def _head_dims(where: Reference) -> tuple[object, ...]:
    shape = where.cell.shape
    return (shape.head_dim,) if shape.value_dim is None else (shape.head_dim, shape.value_dim)


def _groups(where: Reference) -> tuple[object, ...]:
    shape = where.cell.shape
    return () if shape.heads == shape.kv_heads else (shape.heads, shape.kv_heads)


_OPTIONS = (
    _Option(r"causal", lambda where: (where.cell.causal,)),
    _Option(
        r"dtype|float\d*|bfloat16|half|bf16|fp16|fp32",
        lambda where: (where.dtype, str(where.dtype).removeprefix("torch.")),
    ),
    _Option(r"head[_ ]?dim|head[_ ]size", _head_dims),
    _Option(r"gqa|mqa|grouped|(kv|num)[_ ]heads|heads", _groups),
    _Option(r"(query|key|kv|seq|sequence)[_ ]?len\w*|lengths?|seqlens?", _lengths),
    _Option(r"scale", lambda where: () if where.cell.scale is None else (where.cell.scale,)),
    _Option(r"contiguous|strides?", lambda where: (True,) if where.cell.strided else ()),
)
_REFUSES = re.compile(
    r"support|not implemented|unavailable|\bonly\b|\bmust\b|requires?\b|multiple of|divisible",
    re.IGNORECASE,
)
_GOT = re.compile(r"\bgot:? +([\w.]+)", re.IGNORECASE)


class UnsupportedError(Exception):
    """The attention says that it does not do what it was asked for."""


def is_refusal(message: str, where: Reference) -> bool:
    """Whether an error of these words refuses an option that the cell has, or is a mistake.

    It must say in a word of refusal that an option is not taken, and one that the cell uses. Where
    it ends "got <value>", that value must be the cell's own.
    """
    if not _REFUSES.search(message):
        return False
    got = _GOT.search(message)
    for option in _OPTIONS:
        values = [str(value).lower() for value in option.values(where)]
        named = values and re.search(rf"\b({option.words})\b", message, re.IGNORECASE)
        if named and (got is None or got[1].lower().rstrip(".") in values):
            return True
    return False
