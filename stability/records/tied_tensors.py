"""Whether two names in a file stand for one tensor, told by its bits.

Safetensors and torch.distributed.checkpoint write tied weights once for each name. Leaves out files
of torch.save, which know it (`weight_files`).
"""

import hashlib
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

__all__ = ["same_bits"]


def same_bits(name: str, outlines: Mapping[str, Tensor], load: Callable[[str], Tensor]) -> object:
    """Return what is the same for two names of the same bits, shape and dtype.

    `outlines` are the tensors without values; `load` is called where another one is alike. Weights
    that are all one number, as many are at first, are not the same: for them it is the name.
    """
    like = outlines[name]
    twins = [x for x in outlines.values() if (x.shape, x.dtype) == (like.shape, like.dtype)]
    if len(twins) < 2:
        return name
    tensor = load(name).contiguous().flatten()
    if not tensor.numel() or bool((tensor == tensor[0]).all()):
        return name
    digest = hashlib.sha256(tensor.view(torch.uint8).numpy().tobytes()).hexdigest()
    return digest, like.shape, like.dtype
