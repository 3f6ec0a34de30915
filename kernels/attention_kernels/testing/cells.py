"""The cells of a check, each one attention call, and what is right there: golden, baseline, floor.

A cell is a shape, a mask, a law of inputs and a dtype. The *floor* is the least error that can be
asked of any attention in that dtype: rounding each result once, what rounding out once does to dq
and dk through delta = rowsum(dO * O), and what rounding the LSE once, to FP32, does to the weights
exp(scores - lse) of the backward; every flash attention has both. It is worked out from the golden
as a variance, element by element. Where plain attention is more exact than that (a query that
attends one key), an error ratio has the floor in its denominator.

Shape suffixes: B batch, H query heads, G kv heads, Q query_len, K key_len, D head_dim.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attention_kernels.api import baseline_attention, golden_attention
from attention_kernels.formats import FORMATS, input_format
from attention_kernels.testing.formula import RESULTS, Formula
from attention_kernels.testing.golden_faults import spacing
from attention_kernels.testing.inputs import Shape
from attention_kernels.testing.laws import Inputs, draw

__all__ = [
    "DTYPES",
    "FULL",
    "QUICK",
    "Cell",
    "Reference",
    "given_cell",
    "not_looked_at",
    "reference",
    "rounded",
]

_UNIT = 2.0**-24
"""The relative error of one rounding in FP32, in which every attention may compute its sums."""

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""The dtypes of a check by the names of their formats."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One attention call of a check, but for its dtype."""

    law: str
    shape: Shape
    causal: bool
    scale: float | None = None
    strided: str = ""
    """Which of q, k and v are views of `(batch, length, heads, head_dim)`, as "qkv" or "v".

    With q, dout is one head's, expanded; with v alone it is ones, as of `out.sum()`.
    """

    def __str__(self) -> str:
        mask = "causal" if self.causal else "full"
        extra = (", scale given" if self.scale else "") + self._strides()
        return f"{self.law}, {self.shape}, {mask}{extra}"

    def _strides(self) -> str:
        alone = "" if self.strided == "qkv" else f" {self.strided} alone"
        return f", strided{alone}" if self.strided else ""

    def is_plain(self) -> bool:
        """Whether any attention should take it: as many kv heads, equal lengths, head_dim 64."""
        shape = self.shape
        usual = shape.heads == shape.kv_heads and shape.query_len == shape.key_len
        usual = usual and shape.value_dim is None
        return usual and shape.head_dim == 64 and self.scale is None and not self.strided

    def visible(self) -> Tensor:
        """Return which key each query attends, bool `(query_len, key_len)`."""
        ones = torch.ones(self.shape.query_len, self.shape.key_len, dtype=torch.bool)
        return ones.tril(self.shape.key_len - self.shape.query_len) if self.causal else ones

    def true_scale(self) -> float:
        """Return the scale of the scores."""
        return self.shape.head_dim**-0.5 if self.scale is None else self.scale


def _cells(law: str, shape: Shape, *masks: bool) -> list[Cell]:
    return [Cell(law=law, shape=shape, causal=causal) for causal in masks or (True, False)]


_SHAPES = [
    Shape(2, 4, 4, 1, 1, 16),
    Shape(2, 4, 2, 63, 63, 32),
    Shape(2, 4, 4, 64, 64, 64),
    Shape(2, 4, 1, 65, 65, 40),
    Shape(2, 4, 2, 127, 127, 32),
    Shape(2, 4, 4, 129, 129, 32),
    Shape(2, 4, 2, 200, 200, 32),
    Shape(1, 4, 2, 100, 100, 96),
    Shape(2, 4, 2, 1, 65, 32),
    Shape(2, 4, 4, 113, 203, 32),
    Shape(2, 4, 2, 203, 113, 32),
]
_LAW_SHAPES = [Shape(8, 4, 2, 129, 129, 32), Shape(8, 4, 4, 150, 150, 32)]

_IN_BOTH = (
    # the usual head_dim, eight heads on one kv head, an odd batch, and a tail
    Cell(law="normal", shape=Shape(3, 8, 1, 97, 97, 128), causal=True),
    # one new query on more than a thousand keys, as in generation: 32 rows of out and dq
    Cell(law="long rows", shape=Shape(8, 4, 2, 1, 1160, 64), causal=True),
    Cell(law="normal", shape=Shape(2, 2, 2, 48, 48, 32), causal=False, strided="v"),
    # lengths of training, multiples of 128, and groups of three heads
    Cell(law="normal", shape=Shape(1, 6, 2, 256, 256, 64), causal=True),
    # long rows at the usual head_dim, with a given scale below the default one
    Cell(law="normal", shape=Shape(1, 2, 2, 128, 384, 128), causal=False),
    Cell(law="normal", shape=Shape(1, 4, 2, 37, 158, 128), causal=True, scale=0.05),
    # as generation calls it: a cache that is a view, several new queries at once
    Cell(law="normal", shape=Shape(8, 6, 2, 1, 520, 128), causal=False, scale=0.2, strided="kv"),
    Cell(law="normal", shape=Shape(2, 4, 2, 5, 300, 64), causal=True),
    # a running maximum that begins at 0 is never reached
    Cell(law="far below zero", shape=Shape(4, 1, 1, 70, 70, 32), causal=True),
)
_LONGEST = Cell(law="long rows", shape=Shape(1, 2, 2, 2400, 40, 32), causal=False)

FULL: tuple[Cell, ...] = (
    *(cell for shape in _SHAPES for cell in _cells("normal", shape)),
    *_cells("normal", Shape(8, 4, 2, 160, 160, 32)),
    # v's head_dim below and above that of q and k: 192 and 128 in multi-head latent attention
    Cell(law="normal", shape=Shape(2, 4, 2, 65, 97, 96, 64), causal=True),
    Cell(law="normal", shape=Shape(2, 2, 2, 70, 70, 32, 40), causal=False, strided="qkv"),
    Cell(law="normal", shape=Shape(2, 4, 2, 96, 96, 32), causal=True, scale=0.3),
    Cell(law="normal", shape=Shape(2, 4, 2, 130, 130, 32), causal=True, strided="qkv"),
    *_IN_BOTH,
    *(
        Cell(law=law, shape=shape, causal=causal)
        for law in ("outliers", "one-signed v", "tied maxima", "rare rows", "large logits")
        for shape, causal in zip(_LAW_SHAPES, (True, False), strict=True)
    ),
    *_cells("long rows", Shape(1, 4, 2, 1000, 1000, 32), True),
    *_cells("long rows", Shape(1, 4, 2, 70, 2050, 32)),
    _LONGEST,
)
"""Each shape under N(0, 1), every other law with 16 independent draws, long rows."""

QUICK: tuple[Cell, ...] = (
    *_cells("normal", Shape(8, 4, 2, 130, 130, 32)),
    *_cells("normal", Shape(1, 2, 2, 1, 1, 16), True),
    *_cells("normal", Shape(1, 4, 1, 65, 97, 40), True),
    *_cells("normal", Shape(1, 2, 2, 64, 64, 64)),
    Cell(law="normal", shape=Shape(1, 2, 2, 64, 64, 64), causal=False, scale=0.3),
    Cell(law="normal", shape=Shape(2, 4, 2, 66, 66, 32), causal=True, strided="qkv"),
    *_IN_BOTH,
    # rows 0 to 29 attend no key
    *_cells("normal", Shape(2, 2, 1, 70, 40, 32), True),
    *_cells("outliers", Shape(8, 2, 2, 70, 70, 32), True),
    *_cells("one-signed v", Shape(8, 2, 2, 70, 70, 32), True),
    *_cells("tied maxima", Shape(8, 2, 2, 70, 70, 32), True),
    *_cells("large logits", Shape(4, 2, 2, 70, 70, 32), True),
    *_cells("long rows", Shape(1, 2, 1, 40, 1160, 32), True),
    # sums of one sign over many keys, and dk's and dv's over many queries
    *_cells("one-signed v", Shape(1, 2, 1, 40, 1160, 32), True),
    _LONGEST,
)
"""For a test suite, as few as will do: of each class of mistakes a cell that shows it."""


def not_looked_at(cells: Sequence[Cell]) -> tuple[str, ...]:
    """Return what these cells leave out, a line each: of the full check, and beyond any of them.

    Of each size, such as the head_dim, nothing is known beyond the largest that a cell has.
    """
    words = [f"{law!r} inputs" for law in _laws(FULL) if law not in _laws(cells)]
    full_alone = [law for law in _laws(FULL, False) if law not in _laws(cells, False)]
    words += [f"{len(full_alone)} laws of inputs without a causal mask"] if full_alone else []
    for what in ("head_dim", "length"):
        unseen = sorted(_sizes(FULL, what) - _sizes(cells, what))
        many = f"{len(unseen)} {what}s from {min(unseen)} to {max(unseen)}" if unseen[3:] else ""
        words += [many or f"{what} {', '.join(map(str, unseen))}"] if unseen else []
    if all(cell.shape.value_dim is None for cell in cells):
        words.append("a head_dim of v that is not q's")
    of_full = (f"of the full check {', '.join(words)}",) if words else ()
    return of_full + _beyond(cells)


def _beyond(cells: Sequence[Cell]) -> tuple[str, ...]:
    """Return the largest of each size that a cell has, as "head_dim above 128", in one line."""
    shapes = [cell.shape for cell in cells]
    if not shapes:
        return ()
    largest = {
        "head_dim": max(x.head_dim for x in shapes),
        "lengths": max(max(x.query_len, x.key_len) for x in shapes),
        "heads": max(x.heads for x in shapes),
        "heads per kv head (GQA)": max(x.heads // x.kv_heads for x in shapes),
        "batch": max(x.batch for x in shapes),
    }
    names: dict[int, list[str]] = {}
    for what, size in largest.items():
        names.setdefault(size, []).append(what)
    said = [f"{' or '.join(named)} above {size}" for size, named in names.items()]
    return (", ".join([*said, "combinations that no cell has"]),)


def _laws(cells: Sequence[Cell], *masks: bool) -> list[str]:
    return list(dict.fromkeys(x.law for x in cells if x.causal in (masks or (True, False))))


def _sizes(cells: Sequence[Cell], what: str) -> set[int]:
    names = ("query_len", "key_len") if what == "length" else (what,)
    return {getattr(cell.shape, name) for cell in cells for name in names}


@dataclass(frozen=True, kw_only=True)
class Reference:
    """Inputs of a cell in a dtype, and what is right: each result by name, `(B, heads, rows, D)`.

    The LSE has a last axis of 1. `floor` is a variance, the other two are values.
    """

    cell: Cell
    dtype: torch.dtype
    inputs: Inputs
    golden: dict[str, Tensor]
    baseline: dict[str, Tensor]
    floor: dict[str, Tensor]
    misread: Inputs | None = None
    """The inputs of a strided cell as a kernel that takes them for contiguous reads them."""

    def noise(self, result: str) -> Tensor:
        """Return the squared error allowed for in each row, `(B, heads, rows)`.

        It is the baseline's or the floor's, whichever is larger.
        """
        error = self.baseline[result].double() - self.golden[result]
        error = error.masked_fill(self.golden[result] == self.baseline[result], 0.0)
        return torch.maximum(error.square().sum(-1), self.floor[result].sum(-1))

    def formula(self) -> Formula:
        """Return the cell's attention as a formula that can be got wrong."""
        scale, visible = self.cell.true_scale(), self.cell.visible()
        return Formula(inputs=self.inputs, visible=visible, scale=scale)


@functools.lru_cache(maxsize=64)
def reference(cell: Cell, dtype: torch.dtype) -> Reference:
    """Return the reference of a cell with drawn inputs; kept, since many checks ask for it."""
    inputs = draw(cell.law, cell.shape, dtype, seed=_seed(cell))
    return _reference(cell, dtype, inputs)


def given_cell(inputs: Inputs, dtype: torch.dtype, what: str) -> Reference:
    """Return the reference of causal attention on given inputs, rounded to `dtype`."""
    batch, heads, query_len, head_dim = inputs.q.shape
    value_dim = inputs.v.shape[3] if inputs.v.shape[3] != head_dim else None
    shape = Shape(
        batch, heads, inputs.k.shape[1], query_len, inputs.k.shape[2], head_dim, value_dim
    )
    cell = Cell(law=what, shape=shape, causal=True)
    return _reference(cell, dtype, Inputs(*(x.to(dtype) for x in inputs)))


def rounded(where: Reference, dtype: torch.dtype) -> Reference:
    """Return the reference of the same cell on its inputs rounded to `dtype`."""
    return _reference(where.cell, dtype, Inputs(*(x.to(dtype) for x in where.inputs)))


def _seed(cell: Cell) -> int:
    """Return a number that differs from cell to cell and is the same in each process."""
    return int.from_bytes(str(cell).encode(), "big") % (2**61 - 1)


def _reference(cell: Cell, dtype: torch.dtype, inputs: Inputs) -> Reference:
    misread = None
    if cell.strided:
        views = {
            name: getattr(inputs, name).transpose(1, 2).contiguous().transpose(1, 2)
            for name in cell.strided
        }
        if "q" in views:
            views["dout"] = inputs.dout[:, :1].expand_as(inputs.dout)
        elif cell.strided == "v":
            views["dout"] = torch.ones((), dtype=dtype).expand_as(inputs.dout)
        inputs = inputs._replace(**views)
        misread = Inputs(*map(_as_if_contiguous, inputs))
    options = {"causal": cell.causal, "scale": cell.scale}
    wide = Inputs(*(x.double() for x in inputs))
    golden = _results(golden_attention, wide, options)
    return Reference(
        cell=cell,
        dtype=dtype,
        inputs=inputs,
        golden=golden,
        baseline=_results(baseline_attention, inputs, options),
        floor=_floor(cell, dtype, wide, golden),
        misread=misread,
    )


def _as_if_contiguous(x: Tensor) -> Tensor:
    if x.untyped_storage().nbytes() < x.numel() * x.element_size():
        return x  # expanded: it would be read beyond its memory
    plain = torch.empty(x.shape, device="meta").stride()
    return x.as_strided(x.shape, plain).clone()


def _results(attention: object, inputs: Inputs, options: dict[str, object]) -> dict[str, Tensor]:
    leaves = [x.detach().requires_grad_() for x in inputs[:3]]
    out, lse = attention(*leaves, return_lse=True, **options)  # pyright: ignore[reportCallIssue]
    gradients = torch.autograd.grad(out, leaves, inputs.dout)
    values = (out.detach(), lse.detach().unsqueeze(-1), *gradients)
    return dict(zip(RESULTS, values, strict=True))


def _floor(
    cell: Cell, dtype: torch.dtype, wide: Inputs, golden: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Return the variance that rounding alone gives each result."""
    format, single = FORMATS[input_format(dtype)], FORMATS["fp32"]
    floor = {name: _rounding(golden[name], format) for name in RESULTS if name != "lse"}
    lse_BHQ1 = golden["lse"].nan_to_num(0, 0, 0)
    floor["lse"] = _rounding(lse_BHQ1, single)
    formula = Formula(inputs=wide, visible=cell.visible(), scale=cell.true_scale())
    weights_BHQK = formula.weights()
    group, scale2 = wide.q.shape[1] // wide.k.shape[1], cell.true_scale() ** 2
    k_BHKD, v_BHKD = (x.repeat_interleave(group, dim=1) for x in (wide.k, wide.v))
    # delta errs by out's rounding, and by the sum of its products in FP32
    delta_BHQ1 = (wide.dout.square() * floor["out"]).sum(-1, keepdim=True)
    delta_BHQ1 += ((wide.dout * golden["out"]).abs().sum(-1, keepdim=True) * _UNIT).square()
    # weights computed again err as a row by the LSE's rounding, and each by that of its score
    of_score_BHQ1 = scale2 * _UNIT**2 * wide.q.square().sum(-1, keepdim=True)
    of_score_BHQ1 = of_score_BHQ1 * wide.k.square().sum(-1).mean()
    dp_BHQK = wide.dout @ v_BHKD.mT
    ds2_BHQK = (weights_BHQK * (dp_BHQK - (wide.dout * golden["out"]).sum(-1, True))).square()
    weights2_BHQK = weights_BHQK.square()
    floor["dq"] = (
        floor["dq"]
        + scale2 * delta_BHQ1 * (weights_BHQK @ k_BHKD).square()
        + floor["lse"] * golden["dq"].square()
        + scale2 * of_score_BHQ1 * (ds2_BHQK @ k_BHKD.square())
    )
    againsQ1 = floor["lse"] + of_score_BHQ1
    of_dk = delta_BHQ1 * weights2_BHQK + againsQ1 * ds2_BHQK
    of_dk_BHKD = scale2 * (of_dk.mT @ wide.q.square())
    of_dv_BHKD = weights2_BHQK.mT @ (againsQ1 * wide.dout.square())
    for name, by_head_BHKD in (("dk", of_dk_BHKD), ("dv", of_dv_BHKD)):
        floor[name] = floor[name] + by_head_BHKD.unflatten(1, (-1, group)).sum(2)
    return floor


def _rounding(x: Tensor, format: object) -> Tensor:
    """Return the variance of rounding x once to the nearest: a uniform error of one spacing."""
    return spacing(x, format).square() / 12  # pyright: ignore[reportArgumentType]
