"""Multiplies matrices as a tensor core does: blocks of products, aligned, cut and added exactly.

`tensor_core_matmul` executes one of the models of `tensor_core_models`, where the arithmetic is
described. It computes in FP64, which holds every step: a product of two FP32 values that have at
most 11 significant bits each, a term in units of the last bit that alignment keeps (an integer
below 2**29), and the sum of a block. So the only rounding is that of the accumulator, once.

`promote_every` is the cure that DeepSeek-V3's report (arXiv 2412.19437, section 3.3.2) and CUTLASS
give FP8 on Hopper: partial sums over that many products are added in FP32 outside the tensor core.

Leaves out what happens to the operands before, and the order in which a library cuts K between
thread blocks (split K): here K runs from its first element to its last.
"""

import torch
from torch import Tensor

from attention_kernels.formats import Format, format_named
from attention_kernels.rounding import round_to
from attention_kernels.tensor_core_models import TensorCoreModel, tensor_core_named

__all__ = ["tensor_core_matmul"]

# Products held at once, by device: on a CPU temporary tensors should stay in its caches.
PRODUCTS_AT_ONCE = {"cpu": 2**19, "cuda": 2**24}

# Below every `zero_exponent`, and so no exponent for what is aligned.
_NO_EXPONENT = -10_000


def tensor_core_matmul(
    a: Tensor,
    b: Tensor,
    model: str | TensorCoreModel,
    *,
    c: Tensor | None = None,
    promote_every: int | None = None,
    formats: tuple[str, str] | None = None,
) -> Tensor:
    """Return a b + c in FP32, as the tensor core `model` computes it.

    `a` is FP32 `(..., M, K)` and `b` FP32 `(..., K, N)` with the same leading axes; `c`, the
    accumulator at the start, is FP32 `(..., M, N)` or None for zeros. `formats` names the formats
    of a and b, and is the first that the model takes, for both, if left out; the exponent of a
    subnormal operand depends on it. `promote_every` products, a multiple of those that the model
    adds at once, are added from zero, and their sum to the others' in FP32, to nearest even.
    ValueError for another dtype or shape, an operand that is not on the grid of its format, and
    another `promote_every`.
    """
    model = model if isinstance(model, TensorCoreModel) else tensor_core_named(model)
    formats = formats or (model.operands[0], model.operands[0])
    held = [_held(model, name) for name in formats]
    _check_shapes(a, b, c)
    for name, x, format in (("a", a, held[0]), ("b", b, held[1])):
        _check_grid(name, x, format)
    total = a.new_zeros((*a.shape[:-1], b.shape[-1])) if c is None else c
    if promote_every is None:
        return _chain(a, b, total, model, held)
    if promote_every < 1 or promote_every % model.products:
        raise ValueError(
            f"tensor_core_matmul: promote_every must be a multiple of {model.products}, the "
            f"products that {model.name} adds at once, got {promote_every}"
        )
    for k in range(0, a.shape[-1], promote_every):
        part_a, part_b = a[..., k : k + promote_every], b[..., k : k + promote_every, :]
        total = total + _chain(part_a, part_b, torch.zeros_like(total), model, held)
    return total


def _held(model: TensorCoreModel, name: str) -> Format:
    format = model.operand_format(name)
    if format is None:
        raise ValueError(
            f"tensor_core_matmul: formats must be held by {', '.join(model.operands)}, the "
            f"operands of {model.name}, got {name!r}"
        )
    return format


def _check_shapes(a: Tensor, b: Tensor, c: Tensor | None) -> None:
    given = {"a": a, "b": b} | ({} if c is None else {"c": c})
    for name, x in given.items():
        if x.dtype != torch.float32:
            raise ValueError(
                f"tensor_core_matmul: {name} must be float32, got {x.dtype}; convert it first"
            )
    if a.dim() < 2 or a.shape[:-2] != b.shape[:-2] or a.shape[-1] != b.shape[-2]:
        raise ValueError(
            "tensor_core_matmul: a and b must be (..., M, K) and (..., K, N), got "
            f"{tuple(a.shape)} and {tuple(b.shape)}"
        )
    if c is not None and c.shape != (*a.shape[:-1], b.shape[-1]):
        raise ValueError(
            f"tensor_core_matmul: c must be {(*a.shape[:-1], b.shape[-1])}, got {tuple(c.shape)}"
        )


def _check_grid(name: str, x: Tensor, format: Format) -> None:
    # infinity is a value of any tensor, also where its format has none
    rounded = torch.where(x.isfinite(), round_to(x, format), x)
    wrong = (rounded != x) & ~x.isnan()
    if wrong.any():
        raise ValueError(
            f"tensor_core_matmul: {name} must hold values of {format.name}, got "
            f"{x[wrong][0].item()!r}; round it first"
        )


class _Room:
    """Memory for the products of one block and their exponents, used again for each block.

    A new tensor of 2 MiB is new pages at each step: 2.8 ns an element, where a product takes 0.1.
    """

    def __init__(self, products: int, device: torch.device) -> None:
        self._terms = torch.empty(products, dtype=torch.float64, device=device)
        self._integers = torch.empty(products, dtype=torch.int32, device=device)
        self._exponents = torch.empty(products, dtype=torch.int16, device=device)

    def terms(self, *like: Tensor) -> Tensor:
        return _shaped(self._terms, like)

    def integers(self, *like: Tensor) -> Tensor:
        return _shaped(self._integers, like)

    def exponents(self, *like: Tensor) -> Tensor:
        return _shaped(self._exponents, like)


def _shaped(room: Tensor, like: tuple[Tensor, ...]) -> Tensor:
    """Return the beginning of `room` in the shape that `like` broadcasts to."""
    shape = torch.broadcast_shapes(*(x.shape for x in like))
    return room[: shape.numel()].view(shape)


def _chain(
    a: Tensor, b: Tensor, c: Tensor, model: TensorCoreModel, formats: list[Format]
) -> Tensor:
    """Return a b + c, block after block of products, some rows at a time."""
    if c.numel() == 0 or a.shape[-1] == 0:
        return c.clone()
    rows, columns = a.shape[-2], b.shape[-1]
    flat_a, flat_b = a.reshape(-1, rows, a.shape[-1]), b.reshape(-1, b.shape[-2], columns)
    result = c.reshape(-1, rows, columns).clone()
    finite = bool(a.isfinite().all() and b.isfinite().all())
    step = max(1, PRODUCTS_AT_ONCE.get(a.device.type, 2**19) // (columns * model.products))
    room = _Room(min(step, rows) * columns * model.products, a.device)
    for matrix, (a_MK, b_KN) in enumerate(zip(flat_a, flat_b, strict=True)):
        exponents_b, wide_b = _exponents(b_KN, formats[1]), b_KN.double()
        for row in range(0, rows, step):
            part = a_MK[row : row + step].T.contiguous()
            exponents_a, wide_a = _exponents(part, formats[0]), part.double()
            sums = result[matrix, row : row + step]
            for k in range(0, len(part), model.products):
                at = slice(k, k + model.products)
                # [products, rows, columns]: additions over the first axis run along memory
                exponents = exponents_a[at, :, None], exponents_b[at, None, :]
                largest = torch.add(*exponents, out=room.exponents(*exponents)).amax(dim=0)
                factors = wide_a[at, :, None], wide_b[at, None, :]
                terms = torch.mul(*factors, out=room.terms(*factors))
                sums = _add_block(terms, largest, sums, model, finite, room)
            result[matrix, row : row + step] = sums
    return result.reshape(c.shape)


def _add_block(
    terms: Tensor, largest: Tensor, c: Tensor, model: TensorCoreModel, finite: bool, room: "_Room"
) -> Tensor:
    """Return c plus the products `terms` of one block, whose largest exponents are given."""
    largest = torch.maximum(largest, _exponents(c, format_named("fp32")))
    largest = largest.clamp_(min=model.zero_exponent)
    # Of FP64's exponents, these are between 2**-254 and 2**158: nothing here is subnormal.
    unit, per_unit = _power(largest - model.fraction_bits), _power(model.fraction_bits - largest)
    terms.mul_(per_unit)
    cut = torch.trunc if model.cut == "toward_zero" else torch.floor
    # A cast to integers cuts toward zero too: 0.2 ns a term, where trunc takes 1.4 (torch 2.13 on a
    # Xeon). A term is below 4 * 2**fraction_bits.
    fits = model.products * 2 ** (model.fraction_bits + 2) <= 2**31
    if cut is torch.trunc and finite and fits:
        total = room.integers(terms).copy_(terms).sum(dim=0, dtype=torch.int32).double()
    else:
        total = cut(terms).sum(dim=0)
    total = total.add_(cut(c.double() * per_unit)).mul_(unit)
    rounded = round_to(total, model.accumulator, "toward_zero")
    # Rounding toward zero ends at the largest value; the exponent of a tensor core's sum overflows.
    overflows = total.abs() >= 2.0**128
    return torch.where(overflows, total * torch.inf, rounded).float()


def _exponents(x: Tensor, format: Format) -> Tensor:
    """Return the exponent of each value as its format stores it; far too small for zero."""
    # frexp's mantissa is in [0.5, 1)
    exponents = (torch.frexp(x).exponent - 1).clamp_(min=format.min_exponent)
    return exponents.masked_fill_(x == 0, _NO_EXPONENT).to(torch.int16)


def _power(exponents: Tensor) -> Tensor:
    """Return 2**exponents in FP64, exactly, by the bits."""
    return (exponents.long() + 1023).bitwise_left_shift_(52).view(torch.float64)
