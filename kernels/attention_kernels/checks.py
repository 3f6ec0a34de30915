"""Checks of what users pass to an attention call, before any work; one form of message.

Every message reads "<function>: <argument> must be <rule>, got <value>; <what to do>". Leaves out
the fields of the numerics, which check themselves.
"""

import difflib

from torch import Tensor

from attention_kernels.formats import INPUT_DTYPES

__all__ = [
    "ENGINES",
    "MAX_HEAD_DIM",
    "MIN_HEAD_DIM",
    "check_engine",
    "check_numerics",
    "check_tensors",
    "require",
]

ENGINES = ("auto", "twin", "triton")
MIN_HEAD_DIM, MAX_HEAD_DIM = 16, 256


def require(ok: bool, where: str, rule: str, got: object, advice: str) -> None:
    """Raise ValueError "<where> must be <rule>, got <got>; <advice>" unless `ok`."""
    if not ok:
        raise ValueError(f"{where} must be {rule}, got {got}; {advice}")


def check_tensors(function: str, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise ValueError unless q, k and v fit each other and what the engines can do."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        where = f"{function}: {name}"
        require(isinstance(x, Tensor), where, "a tensor", type(x).__name__, "pass a torch.Tensor")
        require(
            x.dim() in (3, 4) and x.numel() > 0,
            where,
            "(batch, heads, length, head_dim), or packed (total_tokens, heads, head_dim), with no "
            "empty axis",
            tuple(x.shape),
            "add the missing axes or drop the empty batch",
        )
        require(
            x.dtype in INPUT_DTYPES,
            where,
            "float64, float32, bfloat16 or float16",
            x.dtype,
            "convert it first",
        )
    _check_same(function, q, k, v)
    _check_shapes(function, q, k, v)


def check_numerics(function: str, numerics: object, kind: type, profiles: str) -> None:
    """Raise ValueError unless `numerics` are of `kind`."""
    if not isinstance(numerics, kind):
        advice = f"take one of {profiles}"
        require(False, f"{function}: numerics", f"a {kind.__name__}", repr(numerics), advice)


def _check_same(function: str, q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("k", k), ("v", v)):
        for what in ("dtype", "device"):
            expected, got = getattr(q, what), getattr(x, what)
            require(
                expected == got,
                f"{function}: {name}",
                f"of q's {what} {expected}",
                got,
                "convert q, k and v alike",
            )


def _check_shapes(function: str, q: Tensor, k: Tensor, v: Tensor) -> None:
    packed, head_dim = q.dim() == 3, q.shape[-1]
    heads, kv_heads = (x.shape[1] for x in (q, k))
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    require(
        MIN_HEAD_DIM <= head_dim <= MAX_HEAD_DIM,
        f"{function}: head_dim",
        f"from {MIN_HEAD_DIM} to {MAX_HEAD_DIM}",
        f"{head_dim} ({shapes})",
        f"pad q, k and v with zeros to {MIN_HEAD_DIM} and pass scale, or use more heads",
    )
    require(
        k.shape == v.shape,
        f"{function}: v",
        "shaped as k",
        shapes,
        "pass one value for each key",
    )
    require(
        k.dim() == q.dim() and k.shape[-1] == head_dim and (packed or k.shape[0] == q.shape[0]),
        f"{function}: k",
        f"of q's batch and head_dim {head_dim}",
        shapes,
        "axes are (batch, heads, length, head_dim), packed (total_tokens, heads, head_dim)",
    )
    require(
        heads % kv_heads == 0,
        f"{function}: heads",
        "a multiple of kv_heads",
        f"{heads} and {kv_heads} ({shapes})",
        "each kv head serves heads / kv_heads query heads",
    )


def check_engine(function: str, engine: str) -> None:
    """Raise ValueError unless `engine` is a known name."""
    if engine in ENGINES:
        return
    near = difflib.get_close_matches(str(engine), ENGINES, n=1, cutoff=0.4) or ENGINES
    require(
        False,
        f"{function}: engine",
        f"one of {', '.join(ENGINES)}",
        repr(engine),
        f"nearest: {', '.join(near)}",
    )
