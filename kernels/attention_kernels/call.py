"""All of an attention call that is no tensor, as one frozen value and as text.

A custom operator of torch takes tensors and strings, so that is how numerics reach it. Leaves out
the tensors of the mask (`masks`) and what is done with any of it (`operators`).
"""

import functools
import json
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attention_kernels.baseline_numerics import BaselineNumerics
from attention_kernels.masks import Mask
from attention_kernels.numerics import FlashNumerics

__all__ = ["Call", "call_from_text", "call_to_text"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """Who computes ("twin", "triton", "baseline", "golden"), at what scale, mask and numerics."""

    engine: str
    scale: float
    causal: bool
    window: tuple[int | None, int | None]
    softcap: float
    numerics: FlashNumerics | BaselineNumerics | None

    def mask(self, tensors: dict[str, Tensor | None]) -> Mask:
        """Return the mask, given its tensors by the names of its fields."""
        return Mask(causal=self.causal, window=self.window, softcap=self.softcap, **tensors)


# A constant to torch.compile, which would otherwise trace the writing of JSON.
@torch.compiler.assume_constant_result
def call_to_text(
    engine: str,
    scale: float,
    causal: bool,
    window: tuple[int | None, int | None],
    softcap: float,
    numerics: FlashNumerics | BaselineNumerics | None,
    dtype: torch.dtype,
) -> str:
    """Return the call as JSON, its numerics resolved for `dtype`; they are None for the golden.

    ValueError for numerics that contradict themselves in that dtype.
    """
    return _write(engine, scale, causal, window, softcap, numerics, dtype)


@functools.cache
def _write(
    engine: str,
    scale: float,
    causal: bool,
    window: tuple[int | None, int | None],
    softcap: float,
    numerics: FlashNumerics | BaselineNumerics | None,
    dtype: torch.dtype,
) -> str:
    fields: dict[str, Any] = {
        "engine": engine,
        "scale": scale,
        "causal": causal,
        "window": window,
        "softcap": softcap,
        "numerics": numerics and numerics.resolve(dtype).to_dict(),
    }
    return json.dumps(fields)


@functools.cache
def call_from_text(text: str) -> Call:
    """Return the call that `call_to_text` wrote."""
    fields = json.loads(text)
    values = fields.pop("numerics")
    numerics: FlashNumerics | BaselineNumerics | None = None
    if fields["engine"] == "baseline":
        numerics = BaselineNumerics().with_(**values)
    elif values is not None:
        numerics = FlashNumerics.from_dict(values)
    left, right = fields.pop("window")
    return Call(**fields, window=(left, right), numerics=numerics)
