"""Whether autocast changes an attention's bits, as where a kernel in PyTorch widens to FP32.

A training in mixed precision calls its attention under autocast, which rounds the operands of each
product in PyTorch, those too that the kernel widened on purpose, so that its error there is not the
one that was checked. The backward runs outside of autocast, as in such a training. Leaves out how
large the error becomes.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from attention_kernels.testing.calls import Called, Signature, call_once
from attention_kernels.testing.cells import Reference
from attention_kernels.testing.formula import RESULTS
from attention_kernels.testing.refusals import UnsupportedError

__all__ = ["autocast_sentence"]

_WHERE = "Under autocast, as in a bf16-mixed study, it"


def autocast_sentence(
    attention: Callable[..., Any],
    signature: Signature,
    calls: Sequence[tuple[Reference, Called]],
    device: torch.device,
) -> str:
    """Return what autocast to BF16 changes in one of the calls, a plain one first; "" if no bit.

    Of a call that broke a promise nothing is said: its bits may differ by themselves.
    """
    sound = [(where, called) for where, called in calls if called.results and not called.breaches]
    if not sound:
        return ""
    where, called = next((x for x in sound if x[0].cell.is_plain()), sound[0])

    def within(q: Tensor, *inputs: Tensor, **options: Any) -> Any:
        with torch.autocast(q.device.type, dtype=torch.bfloat16):
            return attention(q, *inputs, **options)

    try:
        under = call_once(within, signature, where, device)
    except UnsupportedError as refusal:
        return f"{_WHERE} refuses what it takes without: {refusal}"
    if under.breaches:
        return f"{_WHERE} breaks its promises: {under.breaches[0].sentence}"
    results = under.results
    other = [x for x in RESULTS if x in results and not torch.equal(results[x], called.results[x])]
    if not other:
        return ""
    return (
        f"{_WHERE} gives other bits ({', '.join(other)}), as where autocast rounds the operands of "
        "products or widens those of a softmax; if that is not meant, switch it off inside, with "
        "torch.autocast(q.device.type, enabled=False)."
    )
