"""Looks at Liger's kernels beside the parts of a model, in Triton's interpreter.

    TRITON_INTERPRET=1 python -m tests.stability.intercept.liger_models

Prints JSON: of each candidate what was judged, and whether training beside it kept its bits. The
variable acts on a whole process, so this is one of its own.
"""

import json
import sys
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from liger_kernel.ops import rms_norm as rms_norm_kernels
from liger_kernel.ops.swiglu import LigerSiLUMulFunction
from liger_kernel.transformers import LigerCrossEntropyLoss, LigerFusedLinearCrossEntropyLoss
from liger_kernel.transformers.rope import liger_rotary_pos_emb
from torch import nn
from triton.runtime import interpreter

from stability import shadow
from tests.stability.intercept.module_models import Language, judged, look, train

BLOCK = "layers.0"


def rms_norm(norm, x, eps=None):
    """Liger's RMSNorm, with the eps of the model's own unless another is given."""
    return rms_norm_kernels.LigerRMSNormFunction.apply(
        x, norm.weight, norm.eps if eps is None else eps
    )


def gated(mlp, x):
    """The MLP with Liger's product of silu(gate) and up."""
    return mlp.down(LigerSiLUMulFunction.apply(mlp.gate(x), mlp.up(x)))


def rotary(q, k, cos, sin, sign=1.0):
    """Liger's rotation, which takes cos and sin with a batch, and writes into what it is given."""
    return liger_rotary_pos_emb(q.clone(), k.clone(), cos[None], sign * sin[None])


def cross_entropy(logits, targets, **options):
    """Liger's loss, which writes its gradient into what it is given."""
    return LigerCrossEntropyLoss(**options)(logits.clone(), targets)


def fused_cross_entropy(head, hidden, targets, **options):
    """Liger's head and loss in one."""
    return LigerFusedLinearCrossEntropyLoss(**options)(head.weight, hidden, targets)


CANDIDATES: dict[str, dict[str, Any]] = {
    "norm": {
        "right": rms_norm,
        "eps 10 % larger": lambda norm, x: rms_norm(norm, x, 1.1 * norm.eps),
    },
    f"{BLOCK}.mlp": {
        "right": gated,
        "gate and up exchanged": lambda mlp, x: mlp.down(
            LigerSiLUMulFunction.apply(mlp.up(x), mlp.gate(x))
        ),
    },
    f"{BLOCK}.rotate": {
        "right": rotary,
        "turned the other way": lambda *tensors: rotary(*tensors, sign=-1.0),
    },
    "loss": {
        "right": cross_entropy,
        "smoothed": lambda logits, targets: cross_entropy(logits, targets, label_smoothing=0.01),
    },
    "lm_head+loss": {
        "right": fused_cross_entropy,
        "smoothed": lambda *tensors: fused_cross_entropy(*tensors, label_smoothing=0.01),
    },
}


@triton.jit
def reciprocal_root(x):
    """1 / sqrt(x)."""
    return tl.rsqrt(x)


def complete_interpreter() -> None:
    """Let it hand floats over as scalars, as a launch does, and give it a root that it knows."""
    convert = interpreter._implicit_cvt

    def converted(arg: object) -> object:
        if type(arg) is not float:
            return convert(arg)
        handle = interpreter.TensorHandle(np.array([arg], np.float32), tl.float32)
        return tl.tensor(handle, tl.float32)

    interpreter._implicit_cvt = converted
    # of libdevice, of which the interpreter has no function
    rms_norm_kernels.rsqrt = reciprocal_root


def main() -> int:
    """Print what was found."""
    complete_interpreter()
    found: dict[str, Any] = {"triton": triton.__version__, "judged": {}}
    for key, candidates in CANDIDATES.items():
        for name, candidate in candidates.items():
            probe = look({key: candidate})
            found["judged"][f"{key}: {name}"] = judged(probe, key)
            found.setdefault("findings", []).extend(map(str, probe.findings))
    right = {key: each["right"] for key, each in CANDIDATES.items() if key != "loss"}
    ends = []
    for watched in (False, True):
        torch.manual_seed(0)
        model: nn.Module = Language()
        if not watched:
            ends.append(train(model))
            continue
        with shadow(model, modules=right) as probe:
            ends.append(train(model, probe=probe))
    found["bits_equal"] = all(torch.equal(x, ends[1][name]) for name, x in ends[0].items())
    json.dump(found, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
