"""Checks of what users pass to an attention call, before any work is done.

Every message reads "<function>: <argument> must be <rule>, got <value>; <what to do>". What shapes
and types tell is checked at once. What only values tell (offsets that fall, a slope that is NaN) is
checked by `check_mask_values` inside the operator, where a compiled model runs it too. The numerics
check their own fields.
"""

import difflib
import itertools
import math
from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.autograd import forward_ad

from attention_kernels.block_recipes import OPERAND_RECIPES
from attention_kernels.dropout import MAX_DROPOUT, MAX_SEED
from attention_kernels.formats import format_named
from attention_kernels.masks import Mask, MaskArguments, mask_fields
from attention_kernels.numerics import BaselineNumerics, FlashNumerics
from attention_kernels.rounding import INPUT_DTYPES
from attention_kernels.rounding_key import RoundingPlace

__all__ = [
    "ENGINES",
    "MAX_HEAD_DIM",
    "MIN_HEAD_DIM",
    "Engine",
    "PeerRefusalError",
    "check_dropout",
    "check_droppable",
    "check_engine",
    "check_mask",
    "check_mask_values",
    "check_numerics",
    "check_packable",
    "check_rounding",
    "check_tensors",
    "check_transforms",
    "read_mask",
    "require",
    "scale_of",
]

Engine = Literal["auto", "twin", "triton"]
ENGINES = get_args(Engine)
MIN_HEAD_DIM, MAX_HEAD_DIM = 16, 256


def require(ok: bool, where: str, rule: str, got: object, advice: str) -> None:
    """Raise ValueError "<where> must be <rule>, got <got>; <advice>" unless `ok`."""
    if not ok:
        raise ValueError(f"{where} must be {rule}, got {got}; {advice}")


def check_tensors(function: str, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise ValueError unless q, k and v fit each other and what the engines can do."""
    # a message is made where it is needed alone: to make them takes longer than to check
    for name, x in (("q", q), ("k", k), ("v", v)):
        where = f"{function}: {name}"
        if not isinstance(x, Tensor):
            require(False, where, "a tensor", type(x).__name__, "pass a torch.Tensor")
        if x.dim() not in (3, 4) or x.numel() == 0:
            rule = (
                "(batch, heads, length, head_dim), or packed (total_tokens, heads, head_dim), with "
                "no empty axis"
            )
            advice = "add the missing axes or drop the empty batch"
            require(False, where, rule, tuple(x.shape), advice)
        if x.dtype not in INPUT_DTYPES:
            rule = "float64, float32, bfloat16 or float16"
            require(False, where, rule, x.dtype, "convert it first")
    _check_same(function, q, k, v)
    _check_shapes(function, q, k, v)


def check_transforms(
    function: str, tensors: Mapping[str, Any], *, tangents: bool, batches: bool
) -> None:
    """Raise NotImplementedError for a tensor that carries what `function` does not hand on.

    These are tangents of forward-mode differentiation, unless the function takes `tangents`, and an
    axis hidden by vmap, unless it takes `batches`. An operator without a rule for tangents would
    drop them, and torch would take the derivative for 0. Slopes of ALiBi hand on none anywhere.
    """
    functorch = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]
    # A compiled call is an operator, which torch repeats along an axis of vmap's by itself.
    compiling = torch.compiler.is_compiling()
    differentiates = forward_ad._current_level >= 0
    for name, x in tensors.items():
        batched = False
        while not compiling and isinstance(x, Tensor) and functorch.is_batchedtensor(x):
            batched, x = True, functorch.get_unwrapped(x)
        if batched and not batches:
            raise NotImplementedError(
                f"{function}: {name} must not be batched by torch.vmap, got an axis that vmap "
                "hides; make it part of the batch axis"
            )
        takes = tangents and name != "alibi_slopes"
        if differentiates and not takes and _has_tangent(x):
            raise NotImplementedError(
                f"{function}: {name} must carry no tangent of forward-mode differentiation "
                "(torch.func.jvp, jacfwd), got one; "
                + (
                    "pass -slope * distance as attn_mask to golden_attention"
                    if name == "alibi_slopes"
                    else "differentiate backward, or take golden_attention outside of torch.compile"
                )
            )


def _has_tangent(x: Any) -> bool:
    is_number = isinstance(x, Tensor) and x.is_floating_point()
    return is_number and forward_ad.unpack_dual(x).tangent is not None


def check_numerics(function: str, numerics: object, kind: type, profiles: str) -> None:
    """Raise ValueError unless `numerics` are of `kind`."""
    if not isinstance(numerics, kind):
        advice = f"take one of {profiles}"
        require(False, f"{function}: numerics", f"a {kind.__name__}", repr(numerics), advice)


def _check_same(function: str, q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("k", k), ("v", v)):
        for what in ("dtype", "device"):
            expected, got = getattr(q, what), getattr(x, what)
            if expected != got:
                rule = f"of q's {what} {expected}"
                require(False, f"{function}: {name}", rule, got, "convert q, k and v alike")


def _check_shapes(function: str, q: Tensor, k: Tensor, v: Tensor) -> None:
    q_shape, k_shape, v_shape = q.shape, k.shape, v.shape
    head_dim, packed = q_shape[-1], len(q_shape) == 3

    def shapes() -> str:
        return f"q {tuple(q_shape)}, k {tuple(k_shape)}, v {tuple(v_shape)}"

    for whose, size in (("", head_dim), (" of v", v_shape[-1])):
        if not MIN_HEAD_DIM <= size <= MAX_HEAD_DIM:
            require(
                False,
                f"{function}: head_dim{whose}",
                f"from {MIN_HEAD_DIM} to {MAX_HEAD_DIM}",
                f"{size} ({shapes()})",
                f"pad q, k and v with zeros to {MIN_HEAD_DIM} and pass scale, or use more heads",
            )
    if k_shape[:-1] != v_shape[:-1]:
        rule = "shaped as k, but for its head_dim"
        require(False, f"{function}: v", rule, shapes(), "pass one value for each key")
    if (
        len(k_shape) != len(q_shape)
        or k_shape[-1] != head_dim
        or not (packed or k_shape[0] == q_shape[0])
    ):
        rule = f"of q's batch and head_dim {head_dim}"
        advice = "axes are (batch, heads, length, head_dim), packed (total_tokens, heads, head_dim)"
        require(False, f"{function}: k", rule, shapes(), advice)
    heads, kv_heads = q_shape[1], k_shape[1]
    if heads % kv_heads != 0:
        rule, got = "a multiple of kv_heads", f"{heads} and {kv_heads} ({shapes()})"
        advice = "each kv head serves heads / kv_heads query heads"
        require(False, f"{function}: heads", rule, got, advice)


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


_NAMES = tuple(MaskArguments.__annotations__)


def check_mask(function: str, q: Tensor, k: Tensor, mask: Mapping[str, Any]) -> None:
    """Raise ValueError unless the arguments of the mask fit q and k, TypeError for other names."""
    for name in mask:
        if name not in _NAMES:
            near = difflib.get_close_matches(name, _NAMES, n=3, cutoff=0.4) or _NAMES
            raise TypeError(f"{function}: no argument {name!r}; nearest: {', '.join(near)}")
    _check_scalars(function, mask)
    _check_window(function, mask.get("window"))
    _check_packing(function, q, mask)
    _check_mask_mod(function, q, mask.get("mask_mod"))
    names = ("key_padding", "attn_mask", "alibi_slopes", "sinks", "cu_seqlens_q", "cu_seqlens_k")
    for name in names:
        x = mask.get(name)
        if x is not None:
            _check_tensor(function, name, x, q)
    _check_offset_shapes(function, mask)
    _check_mask_shapes(function, q, k, mask)
    _check_head_shapes(function, q, mask)


def read_mask(
    q: Tensor, k: Tensor, arguments: MaskArguments, function: str = "read_mask"
) -> tuple[Mask, float]:
    """Return the mask and the scale that `arguments` mean for q and k, `(batch, heads, ...)`.

    It is for code that forms the scores itself. ValueError as `flash_attention`, in the name of
    `function`.
    """
    check_mask(function, q, k, arguments)
    fields = mask_fields(arguments, q.shape[0], q.shape[1], function)
    return Mask(**fields), scale_of(q, arguments)


def scale_of(q: Tensor, arguments: MaskArguments) -> float:
    """Return the scale of the scores: 1/sqrt(head_dim) unless one is given."""
    scale = arguments.get("scale")
    return 1.0 / math.sqrt(q.shape[-1]) if scale is None else float(scale)


def _check_scalars(function: str, mask: Mapping[str, Any]) -> None:
    scale, softcap = mask.get("scale"), mask.get("softcap", 0.0)
    causal = mask.get("causal", False)
    # torch.compile has no repr of a symbolic value, so a message is made only when it is needed.
    if not isinstance(causal, bool):
        require(False, f"{function}: causal", "true or false", repr(causal), "pass a bool")
    if not (scale is None or _is_number(scale)):
        advice = "leave it None for 1/sqrt(head_dim)"
        require(False, f"{function}: scale", "a finite number", repr(scale), advice)
    if not (_is_number(softcap) and softcap >= 0):
        rule = "a finite number of at least 0"
        require(False, f"{function}: softcap", rule, repr(softcap), "leave it 0 for none")
    check_dropout(function, mask)


def check_dropout(function: str, mask: Mapping[str, Any]) -> None:
    """Raise ValueError unless dropout_p is a probability below 1, and has a seed if it is not 0."""
    p = mask.get("dropout_p", 0.0)
    if not (_is_number(p) and 0 <= p <= MAX_DROPOUT):
        rule = "a number of at least 0 and below 1 (at most 1 - 2**-32)"
        require(False, f"{function}: dropout_p", rule, repr(p), "leave it 0 for none")
    for name in ("dropout_seed", "dropout_offset"):
        x = mask.get(name, 0)
        is_word = isinstance(x, int) and not isinstance(x, bool) and 0 <= x <= MAX_SEED
        if not (is_word or (x is None and name == "dropout_seed")):
            rule, advice = "an integer from 0 to 2**63 - 1", "pass an int, not a tensor"
            require(False, f"{function}: {name}", rule, repr(x), advice)
    if p != 0 and mask.get("dropout_seed") is None:
        rule = f"given where dropout_p is not 0 but {p!r}"
        advice = "pass another integer at each step and layer, or one with dropout_offset"
        require(False, f"{function}: dropout_seed", rule, "None", advice)


def check_rounding(function: str, key: Any, place: Any) -> list[int]:
    """Return a rounding key and place one after the other; empty without a key.

    ValueError unless `key` is four integers from 0 to 2**63 - 1, and `place` at most three from 0
    to 2**31 - 1 with a key.
    """
    if key is None:
        advice = "pass rounding_key=(seed, step, layer, call), or leave both out"
        require(place is None, f"{function}: rounding_place", "None without a key", place, advice)
        return []
    words = [*key, *RoundingPlace(*place or ())] if _are_words(key, place or ()) else []
    if not (words and max(words[:4]) <= MAX_SEED and max(words[4:]) < 2**31):
        rule = "(seed, step, layer, call), integers from 0 to 2**63 - 1"
        advice = "rounding_place is (first_batch, first_head, heads), integers below 2**31"
        require(False, f"{function}: rounding_key", rule, f"{key!r} with place {place!r}", advice)
    return words


def _are_words(key: Any, place: Any) -> bool:
    """Whether the two are sequences of whole numbers, four and at most three."""
    if not (isinstance(key, tuple | list) and isinstance(place, tuple | list)):
        return False
    sizes = len(key) == 4 and len(place) <= 3
    return sizes and all(isinstance(x, int) and x >= 0 for x in (*key, *place))


def _is_number(x: Any) -> bool:
    # torch.compile cannot trace math.isfinite of a symbolic value; a comparison it can.
    return isinstance(x, int | float) and not isinstance(x, bool) and abs(x) < math.inf


def _check_window(function: str, window: Any) -> None:
    if window is None:
        return
    ok = isinstance(window, tuple | list) and len(window) == 2
    for size in window if ok else ():
        is_size = isinstance(size, int) and not isinstance(size, bool) and size >= 0
        ok = ok and (size is None or is_size)
    if not ok:
        rule = "(left, right), each an integer of at least 0 or None"
        advice = "None is no bound; flash-attn's -1 is None here"
        require(False, f"{function}: window", rule, repr(window), advice)


def _check_packing(function: str, q: Tensor, mask: Mapping[str, Any]) -> None:
    given = [name for name in ("cu_seqlens_q", "cu_seqlens_k") if mask.get(name) is not None]
    if len(given) != (2 if q.dim() == 3 else 0):
        require(
            False,
            f"{function}: cu_seqlens_q and cu_seqlens_k",
            "given exactly when q, k and v are packed as (total_tokens, heads, head_dim)",
            f"{' and '.join(given) or 'neither'} with q {tuple(q.shape)}",
            "pass both with packed tensors, neither with (batch, heads, length, head_dim)",
        )
    for name in ("key_padding", "attn_mask") if given else ():
        rule, advice = "None with packed sequences", "leave the padding out of the packed sequences"
        require(mask.get(name) is None, f"{function}: {name}", rule, "a tensor", advice)


def _check_mask_mod(function: str, q: Tensor, mask_mod: Any) -> None:
    """Raise ValueError unless it is a function, where one can be; what it returns, tiles check."""
    if mask_mod is None:
        return
    where, attn_mask = f"{function}: mask_mod", "pass the mask as attn_mask"
    rule = "a function of (batch, head, query, key) that returns a bool tensor"
    require(callable(mask_mod), where, rule, type(mask_mod).__name__, attn_mask)
    rule = "None with packed sequences"
    require(q.dim() == 4, where, rule, "a function", "attend each sequence by itself")
    if torch.compiler.is_compiling():
        # an operator takes no function, and a handle to one is no constant of a graph
        require(False, where, "None inside of torch.compile", "a function", attn_mask)


def _check_tensor(function: str, name: str, x: Any, q: Tensor) -> None:
    where = f"{function}: {name}"
    require(isinstance(x, Tensor), where, "a tensor", type(x).__name__, "pass a torch.Tensor")
    require(x.device == q.device, where, f"on q's device {q.device}", x.device, "move it there")
    # An integer or a bool cannot require one; a trained ALiBi is an attn_mask that its slopes make.
    require(
        name in ("sinks", "attn_mask") or not x.requires_grad,
        where,
        "without gradient",
        "requires_grad=True",
        "no gradient is computed for it; detach it, or pass -slope * distance as attn_mask, which "
        "gets one",
    )
    is_right, rule = {
        "key_padding": (x.dtype == torch.bool, "bool, true where the key may be attended"),
        "attn_mask": (
            x.dtype == torch.bool or x.dtype in INPUT_DTYPES,
            "bool, float64, float32, bfloat16 or float16",
        ),
        "alibi_slopes": (x.dtype in INPUT_DTYPES, "float64, float32, bfloat16 or float16"),
        "sinks": (x.dtype in INPUT_DTYPES, "float64, float32, bfloat16 or float16"),
        "cu_seqlens_q": (x.dtype == torch.int32, "int32"),
        "cu_seqlens_k": (x.dtype == torch.int32, "int32"),
    }[name]
    require(is_right, where, rule, x.dtype, "convert it first")


def _check_offset_shapes(function: str, mask: Mapping[str, Any]) -> None:
    offsets_q, offsets_k = mask.get("cu_seqlens_q"), mask.get("cu_seqlens_k")
    if offsets_q is None or offsets_k is None:
        return
    require(
        offsets_q.dim() == 1 and len(offsets_q) >= 2 and offsets_q.shape == offsets_k.shape,
        f"{function}: cu_seqlens_q and cu_seqlens_k",
        "of shape (sequences + 1,), alike for q and k",
        f"{tuple(offsets_q.shape)} and {tuple(offsets_k.shape)}",
        "start with 0 and end with the number of tokens",
    )


def _check_mask_shapes(function: str, q: Tensor, k: Tensor, mask: Mapping[str, Any]) -> None:
    padding, attn_mask = mask.get("key_padding"), mask.get("attn_mask")
    if padding is not None:
        expected = (q.shape[0], k.shape[2])
        require(
            tuple(padding.shape) == expected,
            f"{function}: key_padding",
            f"(batch, key_len) = {expected}",
            tuple(padding.shape),
            "give one truth value for each key",
        )
    if attn_mask is not None:
        full = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        short = (1,) * (4 - attn_mask.dim()) + tuple(attn_mask.shape)
        require(
            len(short) == 4 and all(a in (1, b) for a, b in zip(short, full, strict=True)),
            f"{function}: attn_mask",
            f"broadcastable to (batch, heads, query_len, key_len) = {full}",
            tuple(attn_mask.shape),
            "add axes of length 1",
        )


def _check_head_shapes(function: str, q: Tensor, mask: Mapping[str, Any]) -> None:
    slopes, sinks, heads = mask.get("alibi_slopes"), mask.get("sinks"), q.shape[1]
    if sinks is not None:
        require(
            tuple(sinks.shape) == (heads,),
            f"{function}: sinks",
            f"(heads,) = {(heads,)}",
            tuple(sinks.shape),
            "give one logit for each query head",
        )
    if slopes is None:
        return
    batch = q.shape[0] if q.dim() == 4 else len(mask["cu_seqlens_q"]) - 1
    require(
        tuple(slopes.shape) in ((heads,), (batch, heads)),
        f"{function}: alibi_slopes",
        f"(heads,) or (batch, heads) = {(batch, heads)}",
        tuple(slopes.shape),
        "give one slope for each query head",
    )


def check_mask_values(function: str, mask: Mask, query_len: int, key_len: int) -> None:
    """Raise ValueError unless offsets rise from 0 to the token count and slopes are finite."""
    for name, offsets, total in (
        ("cu_seqlens_q", mask.cu_seqlens_q, query_len),
        ("cu_seqlens_k", mask.cu_seqlens_k, key_len),
    ):
        if offsets is not None:
            values = offsets.tolist()
            rising = all(a <= b for a, b in itertools.pairwise(values))
            require(
                rising and values[0] == 0 and values[-1] == total,
                f"{function}: {name}",
                f"offsets that rise from 0 to the {total} tokens",
                values if len(values) <= 8 else f"{values[:4]} ... {values[-4:]}",
                "take the cumulative sum of the lengths, with 0 before it",
            )
    for name, x, what in (
        ("alibi_slopes", mask.alibi_slopes, "slope"),
        ("sinks", mask.sinks, "logit"),
    ):
        if x is not None:
            require(
                bool(x.isfinite().all()),
                f"{function}: {name}",
                "finite",
                x.flatten().tolist()[:8],
                f"one finite {what} for each head",
            )
    if mask.bias is not None:
        require(
            not bool((mask.bias.isnan() | (mask.bias == torch.inf)).any()),
            f"{function}: attn_mask",
            "finite, or -inf where a key is hidden",
            "NaN or +inf in it",
            "use a bool mask, or -inf",
        )


def check_packable(function: str, numerics: FlashNumerics) -> None:
    """Raise ValueError if the numerics ask for what packed sequences cannot have."""
    require(
        numerics.forward.operands not in OPERAND_RECIPES,
        f"{function}: operands",
        "a format with packed sequences, whose blocks would cross their ends",
        repr(numerics.forward.operands),
        "attend each sequence by itself",
    )
    require(
        numerics.scaling.scaling == "none",
        f"{function}: scaling",
        "'none' with packed sequences, whose blocks would cross their ends",
        repr(numerics.scaling.scaling),
        "attend each sequence by itself",
    )


def check_droppable(function: str, numerics: BaselineNumerics, mask: Mask) -> None:
    """Raise ValueError if a weight of 1 that dropout keeps, 1 / (1 - p), is beyond its format."""
    target = format_named(numerics.probabilities)
    largest = target.max_value
    if numerics.scaling == "none" and mask.kept_scale() > largest:
        rule = f"at most 1 - 1/{largest:g}, with probabilities in {target.name}"
        advice = "drop less, or take a format of more range"
        require(False, f"{function}: dropout_p", rule, mask.dropout_p, advice)


class PeerRefusalError(RuntimeError):
    """Another library's attention does not run here, or does not take this call.

    The message says why: `peers.attention` puts it into the error that a user sees, and
    `peers.peers` into the reason of a `PeerStatus`.
    """
