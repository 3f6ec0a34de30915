"""Which mistake makes a wrong result: the one whose FP64 results come closest to it.

On one small cell where the attention fails, every mistake of `mistakes` is computed (or, where it
has a size, fitted), and the squared distance to what the attention gave is summed over results,
each row in units of the error that plain attention or rounding has there. The mistake that leaves
least is named if it takes away most of the error. A mistake may hold in some rows only: then each
row may choose between it and no mistake, at a price.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attention_kernels.testing.cells import Cell, Reference
from attention_kernels.testing.computed_in import computed_in
from attention_kernels.testing.formula import RESULTS
from attention_kernels.testing.laws import Inputs
from attention_kernels.testing.limits import MAX_RATIO, Excess
from attention_kernels.testing.measured import Measured, measure
from attention_kernels.testing.mistakes import Mistake, mistakes
from attention_kernels.testing.rounded_weights import rounded_weights
from attention_kernels.testing.running_maximum import through_the_maximum
from attention_kernels.testing.sentences import (
    excess_sentence,
    factor_in_words,
    heads_in_words,
    numbers_in_words,
    outward_in_words,
    rows_in_words,
    where_in_words,
)
from attention_kernels.testing.unexplained import least_unexplained
from attention_kernels.testing.unwritten import other_values_in_the_tail

__all__ = ["Diagnosis", "diagnose"]

_BY_QUERY = ("out", "lse", "dq")
_PRICE = 4.0
"""What a row pays for choosing the mistake, in units of its own noise."""
_MOST = 1e16
"""The largest squared error of a row, in units of its noise: 100 times that of an FP32 row that is
wrong altogether."""
_NAMED = 0.8
"""The share of the error that a mistake must take away to be named."""
_FREE = 0.9999
"""The worth of a share that a fitted size takes away: one without a choice is named before it."""
_SURE = 8.0
"""Standard errors that a fitted size must have to be named though most of the error is rounding."""
_ALIKE = 8
"""Mistakes that are alike in a cell and are laid beside all others, at most."""
_SMALL = 150_000
"""Scores of a cell that are compared with a hundred mistakes in a second or two; those cells are
taken first."""


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What is wrong in one sentence, and the noun for it."""

    noun: str
    sentence: str
    explained: float
    """The share of the error that it explains, 0 to 1."""
    left: tuple[Excess, ...] | None = None
    """What is too large beside what follows from it; None where that was not asked."""


@dataclass(frozen=True, kw_only=True)
class _Fit:
    """One mistake beside the results: what it leaves, and where it holds."""

    mistake: Mistake
    explained: float
    size: float = 0.0
    error: float = 0.0
    left: float = 0.0
    """The squared error that a row keeps, in units of its noise."""
    rows: tuple[int, ...] = ()
    """The rows that chose it; empty for all of them."""
    heads: tuple[int, ...] = ()
    batches: tuple[int, ...] = ()
    alike: tuple[Mistake, ...] = ()
    """Mistakes that give the very same results in this cell."""

    def names_it(self) -> bool:
        """Whether it explains enough to be named: most of the error, or all but rounding."""
        sized = self.error > 0 and abs(self.size) > _SURE * self.error and self.left < 4
        return self.explained > _NAMED or sized


def diagnose(found: Sequence[Excess], measured: Sequence[Measured]) -> Diagnosis:
    """Return what is most likely wrong, given the excesses of one dtype, the worst first."""
    best: tuple[_Fit, _Case] | None = None
    for where in _cells_to_try(found):
        case = _Case(where, found, measured)
        fit = case.best_fit()
        if fit is not None and (best is None or fit.explained > best[0].explained):
            best = fit, case
        if best is not None and (best[0].explained > 0.8 or best[0].names_it()):
            break
    common = where_in_words(_failing_cells(found), {x.where.cell for x in measured})
    ending = f"; {common}" if common else ""
    if best is None or not best[0].names_it():
        wheres = _cells_to_try(found)
        empty = _in_empty_rows(found)
        for noun, said in (
            ("empty rows", empty and empty + ending),
            ("tail", other_values_in_the_tail(found)),
            # these hold in every cell, whichever of them are beyond a limit
            ("format", computed_in(found, measured, wheres)),
            ("P", rounded_weights(found, measured, wheres)),
            ("maximum", through_the_maximum(found, measured, wheres)),
        ):
            if said:
                return Diagnosis(noun=noun, sentence=said, explained=1.0)
        return Diagnosis(noun=found[0].result, sentence=_plain(found) + ending, explained=0.0)
    fit, case = best
    fit, left = _told_apart(fit, found, measured)
    sentence = f"{_in_words(fit, case, found)}{ending}"
    return Diagnosis(noun=fit.mistake.noun, sentence=sentence, explained=fit.explained, left=left)


def _told_apart(
    fit: _Fit, found: Sequence[Excess], measured: Sequence[Measured]
) -> tuple[_Fit, tuple[Excess, ...] | None]:
    """Return which of mistakes that are alike in a cell leaves least in all, and what that is.

    None where it holds in some rows alone: dk and dv are then of both, and of no formula.
    """
    if fit.rows:
        return fit, None
    choices = (fit.mistake, *fit.alike[: _ALIKE - 1])
    (best, *alike), left = least_unexplained(choices, fit.size, found, measured)
    return replace(fit, mistake=best, alike=tuple(alike)), left


def _failing_cells(found: Sequence[Excess]) -> set[Cell]:
    """Return the cells that fail; a mean over draws blames all of its law, healthy ones too."""
    alone = [excess for excess in found if len(excess.evidence) == 1]
    return {x.where.cell for excess in alone or found for x in excess.evidence}


def _cells_to_try(found: Sequence[Excess]) -> list[Reference]:
    """Return up to two cells that fail, N(0, 1) and small ones with several rows first."""
    wheres: dict[int, tuple[tuple[bool, ...], Reference]] = {}
    one_head = any(len(excess.heads) < excess.of_heads for excess in found)
    for excess in found:
        for one in excess.evidence:
            shape = one.where.cell.shape
            scores = min(2, shape.batch) * shape.heads * shape.query_len * shape.key_len
            rank = (
                shape.query_len < 8,
                not bool(one.where.cell.visible().any(-1).all()),
                # under a law that fails there are cells that do not
                one.log_ratio()[0].max().item() < math.log(MAX_RATIO),
                scores > _SMALL,
                shape.query_len < 60,
                one.where.cell.law != "normal",
                # where nothing is left of a tile, many mistakes are alike
                shape.key_len % 16 == 0,
                one_head and shape.heads != shape.kv_heads,
            )
            wheres.setdefault(id(one.where), (rank, one.where))
    ranked = sorted(wheres.values(), key=lambda case: case[0])
    return [where for _, where in ranked[:2]]


class _Case:
    """The results of an attention in one cell, cut to two batch entries, to lay mistakes beside."""

    def __init__(
        self, where: Reference, found: Sequence[Excess], measured: Sequence[Measured]
    ) -> None:
        ours = [one for one in measured if one.where is where]
        worst = sum(one.row_ratio().square().sum((1, 2)) for one in ours)
        assert isinstance(worst, Tensor)
        self.batches = worst.topk(min(2, len(worst))).indices.sort().values
        self.where = _cut(where, self.batches)
        self.ours = {
            one.result: measure(self.where, one.result, one.values[self.batches]) for one in ours
        }
        failing = {excess.result for excess in found}
        self.heads = {result: _failing_heads(found, result, x) for result, x in self.ours.items()}
        self.failing = failing & set(self.ours)
        self.before = {name: self.cost(name, self.where.golden[name]) for name in self.ours}

    def cost(self, result: str, assumed: Tensor) -> Tensor:
        """Return the squared distance of the result from `assumed` in each row, over its noise."""
        one = self.ours[result]
        distance = one.values.double() - assumed
        distance = distance.masked_fill(one.values == assumed, 0.0).nan_to_num(0, 1e30, 1e30)
        # capped: an infinity in a row that must be finite would drown what other rows tell
        rows = (distance.square().sum(-1) / one.row_noise()).clamp(max=_MOST)
        heads = self.heads[result]
        return rows if heads is None else rows[:, heads]

    def best_fit(self) -> _Fit | None:
        """Return the mistake that explains most."""
        best: _Fit | None = None
        for mistake in mistakes(self.where):
            for fit in self._fits(mistake):
                if best is None or fit.explained > best.explained + 1e-9:
                    best = fit
                elif fit.explained == best.explained and self._alike(fit, best):
                    best = replace(best, alike=(*best.alike, mistake))
        return best

    def _alike(self, one: _Fit, other: _Fit) -> bool:
        fitted = one.error > 0 or other.error > 0
        return one.mistake is not other.mistake and not fitted

    def _fits(self, mistake: Mistake) -> Iterator[_Fit]:
        if mistake.direction is not None:
            yield self._fitted(mistake)
            return
        assert mistake.results is not None
        assumed = mistake.results()
        after = {name: self.cost(name, assumed[name]) for name in self.ours}
        yield _Fit(mistake=mistake, explained=self._explained(after))
        fit = self._in_some_rows(mistake, after)
        if fit is not None:
            yield fit

    def _explained(self, after: dict[str, Tensor]) -> float:
        before = sum(self.before[name].sum().item() for name in after)
        left = sum(x.sum().item() for x in after.values())
        noise = sum(x.clamp(max=1.0).sum().item() for x in after.values())
        return (before - left) / max(before - 0.5 * noise, 1e-9)

    def _in_some_rows(self, mistake: Mistake, after: dict[str, Tensor]) -> _Fit | None:
        """Return the mistake as one of some rows of out, lse and dq, if any row gains by it."""
        # what holds is counted too: a mistake that would change it is none
        names = [name for name in _BY_QUERY if name in after]
        if not set(names) & self.failing:
            return None
        widths = {self.before[name].shape[1] for name in names}
        if len(widths) > 1:
            return None
        before = torch.stack([self.before[name] for name in names]).sum(0)
        mixed = torch.stack([after[name] for name in names]).sum(0) + _PRICE * len(names)
        chosen = mixed < before
        if not chosen.any() or chosen.float().mean() > 0.5:
            return None
        left = torch.where(chosen, mixed, before).sum().item()
        total = before.sum().item()
        heads = self.heads[names[0]]
        columns = chosen.any(2).any(0).nonzero().flatten().tolist()
        return _Fit(
            mistake=mistake,
            # less than a mistake of every row that leaves as much: it had a choice
            explained=0.97
            * (total - left)
            / max(total - 0.5 * before.clamp(max=1).sum().item(), 1e-9),
            rows=tuple(chosen.any(0).any(0).nonzero().flatten().tolist()),
            heads=tuple(heads[i] for i in columns) if heads is not None else tuple(columns),
            batches=tuple(self.batches[chosen.any(2).any(1)].tolist()),
        )

    def _fitted(self, mistake: Mistake) -> _Fit:
        """Return the mistake at the size that leaves least."""
        assert mistake.direction is not None
        direction = mistake.direction()
        size, error, assumed = 0.0, math.inf, self.where.golden
        for _ in range(3 if mistake.at is not None else 1):
            step, error = self._step(direction, assumed)
            size += step
            if mistake.at is not None and abs(size) < 0.9:
                assumed = mistake.at(size)
            else:
                assumed = {
                    name: x + size * direction[name] if name in direction else x
                    for name, x in self.where.golden.items()
                }
        after = {name: self.cost(name, assumed[name]) for name in self.ours}
        rows = sum(x.numel() for x in after.values())
        return _Fit(
            mistake=mistake,
            explained=_FREE * self._explained(after),
            size=size,
            error=error,
            left=sum(x.sum().item() for x in after.values()) / rows,
        )

    def _step(
        self, direction: dict[str, Tensor], assumed: dict[str, Tensor]
    ) -> tuple[float, float]:
        """Return the least-squares size of what `assumed` leaves, and its error over rows."""
        top, bottom = [], []
        for name in set(direction) & set(self.ours):
            one, heads = self.ours[name], self.heads[name]
            left = (one.values.double() - assumed[name]).nan_to_num(0, 0, 0)
            along = direction[name].nan_to_num(0, 0, 0)
            # one weight a head: where plain attention happens to be exact, a result is no more so
            noise = one.row_noise().mean(-1, keepdim=True)
            rows = (left * along).sum(-1) / noise, along.square().sum(-1) / noise
            keep = slice(None) if heads is None else heads
            top.append(rows[0][:, keep].flatten())
            bottom.append(rows[1][:, keep].flatten())
        if not top:
            return 0.0, math.inf
        upper, lower = torch.cat(top), torch.cat(bottom)
        power = lower.sum().item()
        if power == 0:
            return 0.0, math.inf
        size = upper.sum().item() / power
        return size, (upper - size * lower).square().sum().sqrt().item() / power


def _cut(where: Reference, batches: Tensor) -> Reference:
    """Return the reference of these batch entries alone."""
    shape = where.cell.shape._replace(batch=len(batches))
    parts = {
        name: {result: x[batches] for result, x in getattr(where, name).items()}
        for name in ("golden", "baseline", "floor")
    }
    return replace(
        where,
        cell=replace(where.cell, shape=shape),
        inputs=Inputs(*(x[batches] for x in where.inputs)),
        misread=where.misread and Inputs(*(x[batches] for x in where.misread)),
        **parts,
    )


def _failing_heads(found: Sequence[Excess], result: str, one: Measured) -> list[int] | None:
    """Return the heads of `result` to look at; None for all of them.

    They are those that fail in the same kind of result, by query or by key.
    """
    alike = [e for e in found if (e.result in _BY_QUERY) == (result in _BY_QUERY)]
    # a range of positions is taken over all heads, and tells of none
    alike = [e for e in alike if e.statistic != "range"] or alike
    of_heads = one.squared_errors.shape[1]
    heads = {head for excess in alike for head in excess.heads if excess.of_heads == of_heads}
    return sorted(heads) if 0 < len(heads) < of_heads else None


def _in_words(fit: _Fit, case: _Case, found: Sequence[Excess]) -> str:
    """Return the mistake's words with its size, its heads and its rows."""
    size, error = fit.size, fit.error
    gains = [e for e in found if e.statistic == "gain" and e.result == fit.mistake.noun]
    if gains and "{size}" in fit.mistake.words:
        best = min(gains, key=lambda e: (e.law != "normal", e.error))
        size, error = best.value, best.error
    words = fit.mistake.words.format(
        size=factor_in_words(size, error),
        ulp=f"{size:+.3f} +- {error:.3f}",
        outward=outward_in_words(size, error),
        offset=f"{size:+.4g} +- {error:.1g}",
    )
    results = [name for name in RESULTS if name in case.failing]
    of_heads = case.where.cell.shape.heads
    scope = case.heads[results[0]] if results and results[0] in case.heads else None
    heads = fit.heads or (tuple(scope) if scope is not None else tuple(range(of_heads)))
    all_heads = of_heads if results and results[0] in _BY_QUERY else case.where.cell.shape.kv_heads
    text = f"{words}, {heads_in_words(heads, min(of_heads, all_heads))}"
    if fit.rows:
        text += f", in {rows_in_words(fit.rows, case.where.cell.shape.query_len)} alone"
    if fit.batches and len(fit.batches) < case.where.cell.shape.batch:
        text += f", in batch entry {numbers_in_words(fit.batches)} alone"
    others = dict.fromkeys(mistake.words for mistake in fit.alike)
    others.pop(fit.mistake.words, None)
    alike = f"; or {'; or '.join([*others][:2])}: alike in these cells" if others else ""
    return f"{text} (seen in {', '.join(results)}){alike}"


def _in_empty_rows(found: Sequence[Excess]) -> str:
    """Return that rows which attend no key hold what no mistake gives; "" if others are off."""
    if any(cell.visible().any(-1).all() for cell in _failing_cells(found)):
        return ""
    by_query = [e for e in found if e.statistic == "row" and e.result in _BY_QUERY]
    outs = [excess for excess in by_query if excess.result == "out"]
    for excess in by_query:
        visible = excess.evidence[0].where.cell.visible().any(-1)
        if visible[list(excess.rows)].any():
            return ""
    if not outs:
        return ""
    failing = {excess.result for excess in found}
    return (
        "rows that attend no key hold other values, and must be 0: empty rows, "
        f"{heads_in_words(outs[0].heads, outs[0].of_heads)} "
        f"(seen in {', '.join(name for name in RESULTS if name in failing)})"
    )


def _plain(found: Sequence[Excess]) -> str:
    """Return what is measured, where no mistake explains it: the worst excess of each result."""
    worst: dict[str, Excess] = {}
    for excess in sorted(found, key=lambda excess: excess.statistic != "error ratio"):
        worst.setdefault(excess.result, excess)
    said = [excess_sentence(worst[name]) for name in RESULTS if name in worst]
    return f"{'; '.join(said[:3])}; nothing known explains it"
