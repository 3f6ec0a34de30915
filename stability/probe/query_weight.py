"""The weight W_Q that made an attention's queries, where a module has it under a usual name.

Leaves out its norm (`metrics.inside_attention`).
"""

from torch import Tensor, nn

__all__ = ["query_weight"]

_NAMES = ("query", "q_proj", "q_lin", "to_q", "wq", "q")
_FUSED = ("c_attn", "qkv", "query_key_value", "qkv_proj", "Wqkv")


def query_weight(module: nn.Module | None, rows: int) -> Tensor | None:
    """Return W_Q, `(rows, width)` with rows = heads * head_dim, of an attention module, or None.

    Known are a linear layer of its own, one fused over q, k and v in this order, as a `Linear` or
    as GPT-2's transposed `Conv1D`, and `nn.MultiheadAttention`'s `in_proj_weight`.
    """
    if module is None:
        return None
    fused = getattr(module, "in_proj_weight", None)
    if isinstance(fused, Tensor):
        return fused[:rows]
    children = dict(module.named_children())
    for name in (*_NAMES, *_FUSED):
        weight = getattr(children.get(name), "weight", None)
        if not isinstance(weight, Tensor) or weight.dim() != 2:
            continue
        if type(children[name]).__name__ == "Conv1D":
            weight = weight.T
        if weight.shape[0] == rows or (name in _FUSED and weight.shape[0] > rows):
            return weight[:rows]
    return None
