"""The zoo under names that a study may give: `implementation: tests.zoo.in_studies:right_golden`.

Each look-up makes a new copy, so that every run has counters of its own. Beside the zoo stand wrong
attentions that only training can show: those that turn wrong after some updates, and a bias of 0.2
ULP, in size an ordinary rounding error.
"""

import copy
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attention_kernels import PROFILES, flash_attention
from attention_kernels.testing.faults import injected_bias
from tests.zoo.flash_by_hand import Flash
from tests.zoo.right import RIGHT
from tests.zoo.wrong import WRONG

__all__ = ["DEPTH", "LATE", "RIGHT_NAMES", "WRONG_NAMES", "implementation"]

DEPTH = 2
"""Layers of the model that the late ones count by."""
LATE = 12
"""Updates after which they turn wrong."""


class _Late(Flash):
    """Right for LATE updates, then every out times `factor`."""

    factor = 1.0
    calls = 0

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        # training's own calls alone: a probe repeats a call on leaves, and evaluation has no graph
        self.calls += q.grad_fn is not None and torch.is_grad_enabled()
        return super().__call__(q, k, v, **options)

    def store(self, out: Tensor, lse: Tensor, rows: range, m: Tensor, l: Tensor, acc: Tensor):
        factor = self.factor if self.calls > LATE * DEPTH else 1.0
        super().store(out, lse, rows, m, l, factor * acc)


class _LateSign(_Late):
    factor = -1.0


class _LateNan(_Late):
    factor = torch.nan


def _biased(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None = None) -> Tensor:
    # `injected_bias` takes as many kv heads as heads; autograd sums over the copies
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    return _BIAS(q, k, v, causal=causal, scale=scale)


def _in_fp32(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    return flash_attention(q, k, v, numerics=PROFILES["fa2"], **options)


_BIAS = injected_bias(_in_fp32, 0.2)


def _key(kind: str, name: str) -> str:
    return f"{kind}_{re.sub(r'[^A-Za-z0-9]+', '_', name).strip('_')}"


RIGHT_NAMES = {_key("right", one.name): one.name for one in RIGHT if torch.bfloat16 in one.dtypes}
WRONG_NAMES = {_key("wrong", one.name): one.name for one in WRONG if torch.bfloat16 in one.dtypes}
"""By the name that a study gives, the name in the zoo."""

_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{_key("right", one.name): one.function for one in RIGHT},
    **{_key("wrong", one.name): one.function for one in WRONG},
    "late_sign": _LateSign(),
    "late_nan": _LateNan(),
    "bias_fifth_ulp": _biased,
}


def implementation(key: str) -> str:
    """Return what a study's YAML calls the attention of that name."""
    return f"{__name__}:{key}"


def __getattr__(name: str) -> Callable[..., Any]:
    if name not in _FUNCTIONS:
        raise AttributeError(f"in_studies: no attention is called {name!r}")
    found = _FUNCTIONS[name]
    return copy.copy(found) if isinstance(found, Flash) else found
