"""All of an attention call beside q, k and v, in the order in which an operator takes it.

A custom operator of torch takes tensors, numbers and strings, so numerics reach it as text. Leaves
out what a mask means (`masks`) and what is done with any of it (`operators`).
"""

import functools
import json
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from attention_kernels.baseline_numerics import BaselineNumerics
from attention_kernels.masks import Mask
from attention_kernels.numerics import FlashNumerics

F = TypeVar("F", bound=Callable[..., Any])

__all__ = [
    "TENSORS",
    "Call",
    "Plan",
    "constant_to_the_compiler",
    "plan_from_text",
    "plan_to_text",
]

TENSORS = 6
"""How many of a call's values are tensors; they come first."""


class Call(NamedTuple):
    """The values of an operator after q, k and v; tensors as in `Mask`."""

    key_padding: Tensor | None
    visible: Tensor | None
    bias: Tensor | None
    alibi_slopes: Tensor | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    causal: bool
    left: int | None
    right: int | None
    softcap: float
    scale: float
    plan: str

    def mask(self) -> Mask:
        """Return the mask of the call."""
        return Mask(
            causal=self.causal,
            window=(self.left, self.right),
            softcap=self.softcap,
            key_padding=self.key_padding,
            visible=self.visible,
            bias=self.bias,
            alibi_slopes=self.alibi_slopes,
            cu_seqlens_q=self.cu_seqlens_q,
            cu_seqlens_k=self.cu_seqlens_k,
        )


def constant_to_the_compiler(function: F) -> F:
    """Mark a function of constants, whose result torch.compile takes without tracing it.

    What `torch.compiler.assume_constant_result` does, which imports Dynamo, and Triton with it, and
    takes 1.5 s when this package is imported.
    """
    function._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]
    return function


class Plan(NamedTuple):
    """Who computes ("twin", "triton", "baseline", "golden") and at what resolved numerics.

    The golden has none.
    """

    engine: str
    numerics: FlashNumerics | BaselineNumerics | None


# A constant to torch.compile, which would otherwise trace the reading and writing of JSON. It takes
# nothing but constants, which are what torch.compile guards.
@constant_to_the_compiler
def plan_to_text(engine: str, numerics: str | None, dtype: torch.dtype) -> str:
    """Return the plan for inputs of `dtype` as text, given the text of unresolved numerics.

    ValueError for numerics that contradict themselves in that dtype.
    """
    return _resolved(engine, numerics, dtype)


@functools.cache
def _resolved(engine: str, numerics: str | None, dtype: torch.dtype) -> str:
    if numerics is None:
        return json.dumps({"engine": engine, "numerics": None})
    read = _numerics(engine, json.loads(numerics)).resolve(dtype)
    return json.dumps({"engine": engine, "numerics": read.to_dict()})


@functools.cache
def plan_from_text(text: str) -> Plan:
    """Return the plan that `plan_to_text` wrote."""
    fields = json.loads(text)
    engine, values = fields["engine"], fields["numerics"]
    return Plan(engine, None if values is None else _numerics(engine, values))


def _numerics(engine: str, values: dict[str, object]) -> FlashNumerics | BaselineNumerics:
    if engine == "baseline":
        return BaselineNumerics().with_(**values)
    return FlashNumerics.from_dict(values)
