"""What the twin's forward and backward do alike to a tile: round, multiply, score, exponentiate.

Each rounding of the twin is a call of a `Rounder`, which names the point and says where the tile
lies in the problem. The bits of stochastic rounding are a hash of that place and of nothing else,
so they depend neither on the order in which tiles are computed nor on how many go at once.

Everything else computes in the work format. That is why products are `torch.bmm` of FP32 or FP64
tensors even where the operands are 16-bit or FP8 values: the product of two such values is exact in
FP32, so only the order of additions is left to differ from a kernel, which sums in FP32 too. A
product of BF16 tensors would leave the format of the sum to the library. Where `dot` names a tensor
core, `attention_kernels.tensor_core` multiplies instead, bit by bit as the chip does.

The cubic of `exp2_polynomial` is FlashAttention-4's: Cody-Waite range reduction and a degree-3
polynomial on [0, 1), maximal relative error 8.8e-5. In P rounded to BF16 (3.9e-3) it disappears, in
FP32 it does not.

Leaves out the recurrences (`forward`, `backward`) and the rounding of operands (`operands`).

Shape suffixes: B batch, H query heads, N batch x query heads, I rows of a query block, J keys of a
key block, L length, C columns of any tile, T blocks, D head_dim.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from attention_kernels.masks import Mask, Sequence
from attention_kernels.numerics import FlashNumerics, TensorCoreProduct
from attention_kernels.operands import prepare
from attention_kernels.points import POINTS
from attention_kernels.random_bits import folded, hashed, words_after
from attention_kernels.rounding import CARRIERS, round_to
from attention_kernels.rounding_key import Draws
from attention_kernels.score_units import LOG2_E, ScoreUnits
from attention_kernels.tensor_core import tensor_core_matmul

__all__ = [
    "Flat",
    "Rounder",
    "dot",
    "exponential",
    "exponents",
    "finite_or_zero",
    "flat_kept",
    "flat_sinks",
    "flatten",
    "masked_scores",
    "refuse_fusion",
    "weights",
]

# Of 2**x on [0, 1), highest power first.
_CUBIC = (0.077119090, 0.227564394, 0.695146143, 1.0)


@dataclass(frozen=True, slots=True)
class Rounder:
    """Rounds tiles `(N, I, C)` of `heads` heads a sequence, which begin with number `sequence`.

    `group` is the number of query heads to one of these.
    """

    numerics: FlashNumerics
    heads: int
    draws: Draws
    sequence: int = 0
    group: int = 1
    _kept: dict[object, Tensor] = field(default_factory=dict, compare=False, repr=False)
    """Hashes of places, by place: tiles have rows and columns in common."""

    def __call__(self, x: Tensor, point: str, rows: range, columns: range, step: int = 0) -> Tensor:
        """Round `x` once, at a point of `POINTS`; rows, columns and step say where it lies."""
        target = self.numerics.targets[point]
        if target is None:
            return x
        arithmetic = self.numerics.arithmetic
        if arithmetic.rounding != "stochastic":
            return round_to(x, target, arithmetic.rounding)
        words_NI1 = self._words_of(rows, len(x) // self.heads, POINTS[point].stream, step, x.device)
        bits = folded(words_NI1, self._hashed(columns, x.device))
        assert isinstance(bits, Tensor)
        return round_to(x, target, "stochastic", bits=bits)

    def _words_of(
        self, rows: range, batches: int, stream: int, step: int, device: torch.device
    ) -> Tensor:
        """Return the words of some rows at a point and a step, `(N, I, 1)`."""
        key = rows, batches, stream
        if step == 0 and key in self._kept:
            return self._kept[key]
        heads = self.draws.heads(self.sequence, batches, self.heads, self.group, device)
        words = words_after(self.draws.word, stream, step, heads.view(-1, 1, 1))
        words = folded(words, self._hashed(rows, device).unsqueeze(-1))
        assert isinstance(words, Tensor)
        if step == 0:  # whole tiles; sums have a step for each block, too many to keep
            self._kept[key] = words
        return words

    def _hashed(self, places: range, device: torch.device) -> Tensor:
        """Return the hashes of rows or columns."""
        if places not in self._kept:
            words = hashed(torch.arange(places.start, places.stop, device=device))
            assert isinstance(words, Tensor)
            self._kept[places] = words
        return self._kept[places]


class Flat(NamedTuple):
    """An operand with one axis of heads: `values` `(N, L, D)` in the work dtype, `scales` `(N, T)`.

    `block` is the number of rows that share a factor.
    """

    values: Tensor
    scales: Tensor | None
    block: int

    def at(self, rows: range) -> "Flat":
        """Return some of the rows; packed sequences have no factors, which blocks would cross."""
        if len(rows) == self.values.shape[1]:
            return self
        return Flat(self.values[:, rows.start : rows.stop], None, self.block)

    def factor(self, rows: range) -> Tensor | None:
        """Return the factor of one block of rows, `(N, 1, 1)`, or None for 1."""
        return None if self.scales is None else self.scales[:, rows.start // self.block, None, None]

    def restored(self) -> Tensor:
        """Return the values multiplied by their factors, `(N, L, D)`."""
        if self.scales is None:
            return self.values
        by_row = self.scales.repeat_interleave(self.block, dim=1)[:, : self.values.shape[1], None]
        return self.values * by_row


def flatten(
    x: Tensor, name: str, heads: int, numerics: FlashNumerics, block: int, draws: Draws
) -> Flat:
    """Prepare an operand, repeat it to the number of query heads, make batch x heads one axis."""
    operand, scales = prepare(x, name, numerics, block, draws, heads // x.shape[1])
    # Heads of a group are repeated, which costs memory: one batched product then serves them all.
    values = _repeated(operand.to(numerics.work_dtype()), heads)
    if scales is not None:
        scales = _repeated(scales, heads).flatten(0, 1)
    return Flat(values.reshape(-1, *values.shape[2:]), scales, block)


def flat_sinks(mask: Mask, like_NLD: Tensor) -> Tensor | None:
    """Return the sinks `(N, 1, 1)` in the dtype of `like_NLD`, or None."""
    if mask.sinks is None:
        return None
    sinks_H = mask.sinks.detach().to(like_NLD.dtype)
    return sinks_H.repeat(len(like_NLD) // len(sinks_H))[:, None, None]


def _repeated(x_BHL: Tensor, heads: int) -> Tensor:
    if x_BHL.shape[1] == heads:
        return x_BHL
    return x_BHL.repeat_interleave(heads // x_BHL.shape[1], dim=1)


def refuse_fusion(numerics: FlashNumerics) -> None:
    """Raise ValueError if operations are to be contracted, which PyTorch has no way to do."""
    if numerics.arithmetic.fp_fusion:
        raise ValueError(
            "twin: fp_fusion must be false, got True; only compiled Triton kernels can contract a "
            "multiply and an add, pass engine='triton' on a GPU"
        )


def dot(
    left: Tensor, right: Tensor, mode: str | TensorCoreProduct, start: Tensor | None = None
) -> Tensor:
    """Return the batched product of two operands, summed in their dtype.

    `tf32` rounds both to TF32 as the hardware's conversion does, ties away from zero; `tf32x3` adds
    the products with what that dropped, the smallest first. `tf32_held` and `tf32x3_held` are the
    same of operands that TF32 holds (`FlashNumerics.product`). A tensor core sums as its model
    says, and begins with `start`, its accumulator; the other modes take none.
    """
    if isinstance(mode, TensorCoreProduct):
        return _tensor_core(left, right, mode, start)
    assert start is None
    if mode in ("ieee", "tf32_held"):
        return torch.bmm(left, right)
    if mode == "tf32x3_held":
        product = torch.bmm(left, right)
        # Of finite operands 0 is dropped, and adding it makes zero of minus zero. Of an infinity it
        # is NaN; then the product is not finite, and no sum with it is.
        if product.sum().isfinite():
            return product.add_(0.0)
    left_big, right_big = _tf32(left), _tf32(right)
    if mode == "tf32":
        return torch.bmm(left_big, right_big)
    left_small, right_small = _tf32(left - left_big), _tf32(right - right_big)
    small = torch.bmm(left_big, right_small) + torch.bmm(left_small, right_big)
    return small + torch.bmm(left_big, right_big)


def _tensor_core(
    left: Tensor, right: Tensor, product: TensorCoreProduct, start: Tensor | None
) -> Tensor:
    model, formats = product
    if "tf32" in model.operands:
        # a tensor core cuts what it is given to TF32; kernels convert before, as here
        left, right, formats = _tf32(left), _tf32(right), ("tf32", "tf32")
    return tensor_core_matmul(left, right, model, c=start, formats=formats)


def _tf32(x: Tensor) -> Tensor:
    return round_to(x, "tf32", "nearest_away")


def exponents(scores: Tensor, subtracted: Tensor, units: ScoreUnits) -> Tensor:
    """Return the exponents of weights, of e or, with `units.log2`, of 2; `scores` is overwritten.

    `subtracted` is in the units of the result: of 2 it is fma(s, log2, -subtracted). PyTorch has no
    fused multiply-add. In FP64 the product of FP32 numbers is exact, and the difference is rounded
    to 53 bits before it is to 24. The two roundings differ from one where the first ends halfway
    between FP32 numbers, and only where the product is below 2**-5 of what is subtracted: about one
    in 2**29 of those. Work in FP64 is not fused.
    """
    if units.log2 is None:
        return scores.sub_(subtracted)
    return scores.copy_(scores.double().mul_(units.log2).sub_(subtracted))


def weights(exponent: Tensor, mode: str, units: ScoreUnits) -> Tensor:
    """Return e, or with `units.log2` 2, to the `exponent`, which is overwritten."""
    return exponential(exponent, mode) if units.log2 is None else _power_of_two(exponent, mode)


def exponential(x: Tensor, mode: str) -> Tensor:
    """Return e**x by the way that `Softmax.exp` names; `x` is overwritten."""
    return x.exp_() if mode == "exact" else _power_of_two(x.mul_(LOG2_E), mode)


def _power_of_two(power: Tensor, mode: str) -> Tensor:
    if mode == "exp2":
        return power.exp2_()
    carrier = CARRIERS[power.dtype]
    smallest, mantissa = carrier.min_exponent, carrier.mantissa_bits
    # Below the smallest normal value it is 0, which is what the exponent before that stands for.
    power = power.clamp_(min=smallest - 1)
    # Cody-Waite: 2**power is 2**whole, exact, times 2**fraction with the fraction in [0, 1).
    whole = power.floor()
    fraction = power.sub_(whole)
    value = fraction * _CUBIC[0] + _CUBIC[1]
    for coefficient in _CUBIC[2:]:
        value.mul_(fraction).add_(coefficient)
    # The exponent field of 2**whole. NaN has no integer to become; its value is NaN and stays so.
    field = whole.nan_to_num_(nan=0.0).clamp_(max=-smallest).add_(carrier.bias)
    integers = torch.int64 if power.dtype == torch.float64 else torch.int32
    return value.mul_((field.to(integers) << mantissa).view(power.dtype))


def finite_or_zero(x: Tensor) -> Tensor:
    """Return 0 for -inf: what a row that attends nothing subtracts, so exp gives 0, not NaN."""
    return x.masked_fill(x == -torch.inf, 0.0)


def masked_scores(
    q: Flat,
    k: Flat,
    rows: range,
    keys: range,
    sequence: Sequence,
    units: ScoreUnits,
    rounded: Rounder,
) -> tuple[Tensor, Tensor | None]:
    """Return the rounded scores of one tile `(N, I, J)`, -inf where hidden, and the slope of the
    softcap there (None without one). `rows` and `keys` count inside the sequence.
    """
    mask, numerics = sequence.mask, rounded.numerics
    q_NID, k_NJD = q.values[:, rows.start : rows.stop], k.values[:, keys.start : keys.stop]
    scores_NIJ = dot(q_NID, k_NJD.mT, numerics.product("q", "k"))
    q_factor, k_factor = q.factor(rows), k.factor(keys)
    if q_factor is not None and k_factor is not None:
        scores_NIJ.mul_(q_factor * k_factor)
    scores_NIJ = rounded(scores_NIJ, "products", rows, keys)
    scores_NIJ = scores_NIJ if units.before == 1.0 else scores_NIJ.mul_(units.before)
    slope_NIJ = None
    if mask.softcap:
        capped_NIJ = scores_NIJ.div_(mask.softcap).tanh_()
        slope_NIJ = 1 - capped_NIJ * capped_NIJ
        scores_NIJ = capped_NIJ.mul_(mask.softcap)
    lengths = len(sequence.queries), len(sequence.keys)
    added = mask.added(rows, keys, *lengths, scores_NIJ.dtype, scores_NIJ.device)
    if added is not None:
        scores_NIJ.add_(_flat_tile(added, scores_NIJ, rounded.heads))
    # Rounded before anything is hidden: a format without infinities would turn -inf into NaN.
    scores_NIJ = rounded(scores_NIJ, "scores", rows, keys)
    hidden = mask.hidden(rows, keys, *lengths, scores_NIJ.device)
    if hidden is not None:
        scores_NIJ = scores_NIJ.masked_fill_(
            _flat_tile(hidden, scores_NIJ, rounded.heads), -torch.inf
        )
    return scores_NIJ, slope_NIJ


def flat_kept(
    rows: range, keys: range, like_NIJ: Tensor, sequence: Sequence, heads: int
) -> Tensor | None:
    """Return which weights of one tile dropout keeps, bool `(N, I, J)`; None without dropout."""
    batches = len(like_NIJ) // heads
    kept_BHIJ = sequence.mask.kept(rows, keys, batches, heads, like_NIJ.device)
    return None if kept_BHIJ is None else kept_BHIJ.flatten(0, 1)


def _flat_tile(x: Tensor, like_NIJ: Tensor, heads: int) -> Tensor:
    """Return a tile that broadcasts to (B, H, I, J) as one that broadcasts to (N, I, J)."""
    if x.dim() == 2:
        return x
    count, rows, keys = like_NIJ.shape
    return x.expand(count // heads, heads, rows, keys).reshape(count, rows, keys)
