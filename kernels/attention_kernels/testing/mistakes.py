"""Mistakes that an attention kernel can have, and what each would have computed, in FP64.

A `Mistake` with `results` is all or nothing: a key dropped, a mask off by one, a wrong kv head. One
with a `direction` has a size that the diagnosis fits: a factor, a bias. The `noun` is what the
kernel's author would look for, `words` say it in a sentence.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from attention_kernels.formats import FORMATS, input_format
from attention_kernels.testing.cells import Reference
from attention_kernels.testing.formula import RESULTS, Formula, Intermediates
from attention_kernels.testing.golden_faults import spacing
from attention_kernels.testing.missed_keys import missed_keys
from attention_kernels.testing.unwritten import TILES, zeros_of_unwritten_rows

__all__ = ["Mistake", "mistakes"]

Results = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Mistake:
    """One hypothesis: results as they would be, or the direction in which they would be off."""

    noun: str
    words: str
    """With `{size}` for a fitted factor, `{ulp}`, `{outward}` or `{offset}` for another size."""
    results: Callable[[], Results] | None = None
    direction: Callable[[], Results] | None = None
    at: Callable[[float], Results] | None = None
    """What a mistake of that size gives, where its direction changes with it."""
    unwritten: bool = False
    """Whether its zeros are what no sum has written, and no rounding is near them."""
    kind: str = ""
    """What it is in any cell, where its words name keys, heads or rows of this one."""

    def is_that(self, other: "Mistake") -> bool:
        """Whether it is the same mistake in another cell."""
        return (self.noun, self.kind or self.words) == (other.noun, other.kind or other.words)


def mistakes(where: Reference, whole: bool = False) -> Iterator[Mistake]:
    """Yield every mistake that could be made in a cell, and if `whole` those that leave nothing."""
    formula = where.formula()
    yield from _factors(where, formula)
    yield from _scales(where, formula)
    yield from _masks(where, formula)
    yield from _keys(where, formula, whole)
    yield from _heads(where, formula)
    yield from _softmax(where, formula)
    yield from _sums(where, formula, whole)
    yield from _strides(where, formula)
    yield from _empty_rows(where, formula)


def _all_or_nothing(
    noun: str, words: str, formula: Formula, *, kind: str = "", **changes: object
) -> Mistake:
    return Mistake(noun=noun, words=words, results=formula.with_(**changes).results, kind=kind)


def _factors(where: Reference, formula: Formula) -> Iterator[Mistake]:
    """Factors on results and on what they are made of, and a bias."""
    golden = where.golden

    def on(*names: str) -> Callable[[], Results]:
        return lambda: {name: golden[name] for name in names}

    def delta() -> Results:
        off, right = formula.with_(delta=2.0).results(), formula.results()
        return {name: off[name] - right[name] for name in ("dq", "dk")}

    def out_and_delta() -> Results:
        return {"out": golden["out"], **delta()}

    def bias() -> Results:
        format = FORMATS[input_format(where.dtype)]
        return {"out": spacing(golden["out"], format)}

    def outward() -> Results:
        return {"out": bias()["out"] * golden["out"].sign()}

    for name in RESULTS:
        sums = "" if name in ("out", "lse") else "'s sum"
        words = f"{name} is {{size}} times what it should be, a factor on {name}{sums}"
        yield Mistake(noun=name, words=words, direction=on(name))
    words = "{names} are {size} times what they should be: a factor on "
    yield Mistake(
        noun="dS",
        words=words.format(names="dq and dk", size="{size}") + "dS, the scale of dS",
        direction=on("dq", "dk"),
    )
    yield Mistake(
        noun="dk and dv",
        words=words.format(names="dk and dv", size="{size}") + "the sum over queries",
        direction=on("dk", "dv"),
    )
    yield Mistake(
        noun="P of the backward",
        words=words.format(names="dq, dk and dv", size="{size}")
        + "P in the backward, as of an LSE that is off",
        direction=on("dq", "dk", "dv"),
    )
    yield Mistake(
        noun="out",
        words=words.format(names="out and all gradients", size="{size}") + "out",
        direction=on("out", "dq", "dk", "dv"),
    )
    yield Mistake(
        noun="out",
        words="out is {size} times what it should be, and delta reads it so: a factor on out",
        direction=out_and_delta,
    )
    words = "delta = rowsum(dO * O) is {size} times what it should be"
    yield Mistake(noun="delta", words=words, direction=delta)
    yield Mistake(noun="bias", words="out has a bias of {ulp} ULP upwards", direction=bias)
    words = "out has a bias of {outward}: a rounding that is not to nearest"
    yield Mistake(noun="bias", words=words, direction=outward)


def _scales(where: Reference, formula: Formula) -> Iterator[Mistake]:
    """The scale of the scores, in both directions or in the backward alone."""
    right, head_dim = formula.scale, where.cell.shape.head_dim
    root, padded = math.sqrt(head_dim), 1 << (head_dim - 1).bit_length()

    def slope(field: str) -> Callable[[], Results]:
        step = 1e-4

        def direction() -> Results:
            up = formula.with_(**{field: right * (1 + step)}).results()
            down = formula.with_(**{field: right * (1 - step)}).results()
            return {name: (up[name] - down[name]) / (2 * step) for name in up}

        return direction

    for field, words in (
        ("scale", "the softmax scale is {size} times what it should be"),
        ("backward_scale", "the backward's softmax scale is {size} times the forward's"),
    ):
        yield Mistake(
            noun="scale",
            words=words,
            direction=slope(field),
            at=lambda size, field=field: formula.with_(**{field: right * (1 + size)}).results(),
        )

    def scores_alone(size: float) -> Results:
        return formula.with_(scale=right * (1 + size), gradient_scale=right).results()

    def slope_of_scores() -> Results:
        up, down = scores_alone(1e-4), scores_alone(-1e-4)
        return {name: (up[name] - down[name]) / 2e-4 for name in up}

    words = "the scores are {size} times what they should be, and the scale of dS is right"
    yield Mistake(noun="scale", words=words, direction=slope_of_scores, at=scores_alone)
    yield from _scales_of_gradients(where, right)
    wrong = {
        "missing, it is 1": 1.0,
        "applied twice": right * right,
        "1/head_dim": 1 / root**2,
        "log2(e) times what it should be": right * math.log2(math.e),
        "ln(2) times what it should be: exp2 without log2(e)": right * math.log(2),
        "half of what it should be": right / 2,
        "twice what it should be": right * 2,
        "1/sqrt of the head_dim padded to a power of two": 1 / math.sqrt(padded),
    }
    if where.cell.scale is not None:
        wrong = {"ignored, it is 1/sqrt(head_dim)": 1 / root} | wrong
    whose = {"scale": "the", "backward_scale": "the backward's"}
    for (what, scale), field in itertools.product(wrong.items(), whose):
        if scale != right:
            words = f"{whose[field]} softmax scale is {what}"
            yield Mistake(
                noun="scale", words=words, results=formula.with_(**{field: scale}).results
            )


def _scales_of_gradients(where: Reference, right: float) -> Iterator[Mistake]:
    """The scale of dS, forgotten or applied twice in one of dq and dk."""
    for name in ("dq", "dk"):
        for what, factor in (("lacks", 1 / right), ("has twice", right)):
            wrong = where.golden | {name: where.golden[name] * factor}
            words = f"{name} {what} the softmax scale: the scale of dS in {name}"
            yield Mistake(noun="scale", words=words, results=lambda made=wrong: made)


def _masks(where: Reference, formula: Formula) -> Iterator[Mistake]:
    visible, shape = where.cell.visible(), where.cell.shape
    queries, keys = shape.query_len, shape.key_len
    ones, shift = torch.ones(queries, keys, dtype=torch.bool), keys - queries
    wrong: dict[str, Tensor] = {}
    if where.cell.causal:
        wrong["causal mask lets row i see key i+1"] = ones.tril(shift + 1)
        wrong["causal mask lets row i see key i+2"] = ones.tril(shift + 2)
        wrong["causal mask hides key i, the diagonal, from row i"] = ones.tril(shift - 1)
        wrong["causal mask is ignored: each row sees every key"] = ones
        before = ~(ones.tril(shift - 1) & ~ones.tril(shift - 2))
        wrong["causal mask hides key i-1, the one before the diagonal, from row i"] = (
            visible & before
        )
        if shift:
            words = "causal mask is aligned top-left, and must be bottom-right"
            wrong[f"{words}, where query_len and key_len differ"] = ones.tril()
        at = torch.arange(queries)[:, None] + shift
        for tile in TILES:
            end = (at // tile + 1) * tile
            words = f"causal mask by tile: row i sees keys to the end of its tile of {tile}"
            wrong[words] = torch.arange(keys) < end
            start = (at // tile) * tile
            words = f"causal mask hides the diagonal tile of {tile}"
            wrong[words] = torch.arange(keys) < start
    else:
        wrong["causal mask is applied though it was not asked for"] = ones.tril(shift)
        wrong["causal mask is applied, top-left, though it was not asked for"] = ones.tril()
    for window in (32, 64, 128, 256, 512, 1000, 1024):
        if window < keys:
            near = ~ones.tril(shift - window)
            words = f"keys {window} and more before the row are not seen: a window, long rows"
            wrong[words] = visible & near
    for words, mask in wrong.items():
        if not torch.equal(mask, visible):
            yield _all_or_nothing("mask", words, formula, visible=mask)
            words = f"in the backward, {words}"
            yield _all_or_nothing("mask", words, formula, backward_visible=mask)


def _keys(where: Reference, formula: Formula, whole: bool) -> Iterator[Mistake]:
    """Keys that are missed, counted twice, padded or read from another place."""
    keys = where.cell.shape.key_len
    index = torch.arange(keys)
    for words, (kind, dropped) in missed_keys(index, whole).items():
        if dropped.any() and (whole or not dropped.all()):
            hidden = formula.visible & ~dropped
            yield _all_or_nothing("key", words, formula, visible=hidden, kind=kind)
            words = f"dq's sum over keys is short: in dq {words}"
            yield _all_or_nothing("key", words, formula, dq_keys=~dropped, kind=f"dq, {kind}")
    twice = {"the last key counts twice": index == keys - 1}
    twice["the first key counts twice"] = index == 0
    for tile in TILES:
        if keys > tile and keys % tile:
            # the last tile begins early, so that it is full
            again = (index >= keys - tile) & (index < keys // tile * tile)
            words = f"keys before the tail count twice: the last tile of {tile} begins early"
            twice[words] = again
    for words, again in twice.items():
        yield _all_or_nothing("key", words, formula, count=1 + again.double())
    yield from _stale(keys, formula)
    for tile in TILES:
        if keys % tile:
            words = f"the tail's {-keys % tile} keys of padding to a tile of {tile} are not masked"
            kind = f"padding to a tile of {tile}"
            yield _all_or_nothing("tail", words, formula, padding=-keys % tile, kind=kind)


def _stale(keys: int, formula: Formula) -> Iterator[Mistake]:
    """Tiles of k or v in which another tile's still stands."""
    index = torch.arange(keys)
    for tile in {*TILES, (keys + 1) // 2} - {keys}:
        if tile >= keys:
            continue
        last = (keys - 1) // tile
        for kind, block in (("tile 1", 1), ("the last tile", last)):
            held = (index >= block * tile) & (index < (block + 1) * tile)
            for names in (("k", "v"), ("v",), ("k",)):
                what = " and ".join(names)
                words = f"a stale block: tile {block} of {tile} keys reads the {what} of the tile "
                source = torch.where(held, index - tile, index)
                wrong, of = formula.with_(source=source, sources=names), f"{kind} of {tile}, {what}"
                words += "before it"
                yield Mistake(noun="stale", words=words, results=wrong.results, kind=of)


def _heads(where: Reference, formula: Formula) -> Iterator[Mistake]:
    heads, kv_heads = where.cell.shape.heads, where.cell.shape.kv_heads
    group = heads // kv_heads
    right = tuple(h // group for h in range(heads))
    maps = {
        "all the first": (0,) * heads,
        "no more than there are": tuple(min(h, kv_heads - 1) for h in range(heads)),
        "in turn": tuple(h % kv_heads for h in range(heads)),
        "the next": tuple((g + 1) % kv_heads for g in right),
        "from the last": tuple(kv_heads - 1 - g for g in right),
    }
    for kind, wrong in maps.items():
        if wrong == right:
            continue
        head = next(h for h in range(heads) if wrong[h] != right[h])
        words = f"GQA mapping: head {head} reads kv head {wrong[head]}, and must read {right[head]}"
        yield _all_or_nothing("GQA", words, formula, kv_heads=wrong, kind=kind)
        words += ", though dk and dv are summed over the right heads"
        kind = f"{kind}, sums right"
        yield _all_or_nothing("GQA", words, formula, kv_heads=wrong, sums_right=True, kind=kind)
    if heads > 1:
        before = torch.tensor([*range(heads - 1), heads - 2])
        for names in (("q", "dout"), ("q",)):
            read = {name: getattr(where.inputs, name)[:, before] for name in names}
            words = f"the last head reads {' and '.join(names)} of the head before it"
            inputs = where.inputs._replace(**read)
            yield _all_or_nothing("head", words, formula, inputs=inputs)
    if group > 1:
        sums = {
            "the first query head of each group alone": lambda r: float(r == 0),
            "the last query head of each group alone": lambda r: float(r == group - 1),
            "the mean over each group, and must be its sum": lambda r: 1 / group,
        }
        for words, weight in sums.items():
            weights = tuple(weight(h % group) for h in range(heads))
            wrong = formula.with_(group=weights)
            yield from _of_dk_dv(where, "GQA", f"are of {words}: GQA", wrong, words)


def _of_dk_dv(
    where: Reference, noun: str, words: str, wrong: Formula, kind: str
) -> Iterator[Mistake]:
    """Yield a mistake of the sums of dk and dv, as one of both and of either alone."""

    results = functools.cache(wrong.results)

    def some(names: tuple[str, ...]) -> Callable[[], Results]:
        return lambda: where.golden | {name: results()[name] for name in names}

    for names in (("dk", "dv"), ("dk",), ("dv",)):
        which = " and ".join(names)
        said = f"the sums of {which} {words}"
        yield Mistake(noun=noun, words=said, results=some(names), kind=f"{which} {kind}")


def _softmax(where: Reference, formula: Formula) -> Iterator[Mistake]:
    """Running statistics, the normalisation, and the LSE."""
    golden = where.golden
    lse = golden["lse"]

    def lse_is(value: Tensor) -> Callable[[], Results]:
        return lambda: {**golden, "lse": value}

    largest = _largest(formula)
    for words, value in (
        ("LSE is in base 2, log2, and must be natural", lse / math.log(2)),
        ("LSE is ln(2) times what it should be: natural of base-2 scores", lse * math.log(2)),
        ("LSE lacks the maximum of the row", lse - largest),
        ("LSE is the maximum of the row alone", largest),
        ("LSE has the maximum of the row twice", lse + largest),
        ("LSE is negated", -lse),
        ("LSE is the sum of exp itself, without the log", lse.exp()),
    ):
        yield Mistake(noun="LSE", words=words, results=lse_is(value))
    offset = torch.ones_like(lse)
    words = "LSE is off by {offset}"
    yield Mistake(noun="LSE", words=words, direction=lambda: {"lse": offset})

    def not_divided(known: Intermediates) -> tuple[Tensor, Tensor]:
        return known.out * (lse - largest).nan_to_num(0, 0, 0).exp(), known.lse

    words = "out is not divided by its row sum l"
    yield _all_or_nothing("normalisation", words, formula, change=not_divided)
    for tile in TILES:
        words = f"the accumulator is not rescaled when the maximum grows: no alpha, tile of {tile}"
        yield _all_or_nothing("rescale", words, formula, change=_not_rescaled(formula, tile, "acc"))
        words = f"the row sum l is not rescaled when the maximum grows: no alpha, tile of {tile}"
        yield _all_or_nothing("rescale", words, formula, change=_not_rescaled(formula, tile, "l"))


def _largest(formula: Formula) -> Tensor:
    """Return the largest score of each row, `(B, H, Q, 1)`; -inf where it attends nothing."""
    return formula.scores().amax(-1, keepdim=True)


def _not_rescaled(
    formula: Formula, tile: int, what: str
) -> Callable[[Intermediates], tuple[Tensor, Tensor]]:
    """Return a recurrence over tiles of keys in which acc or l keeps an old maximum.

    It gives out and the LSE, which is off where l is.
    """

    def changed(known: Intermediates) -> tuple[Tensor, Tensor]:
        scores_BHQK = formula.scores()
        m_BHQ1 = scores_BHQK.new_full((*scores_BHQK.shape[:3], 1), -torch.inf)
        l_BHQ1, acc_BHQD = torch.zeros_like(m_BHQ1), torch.zeros_like(known.out)
        for start in range(0, scores_BHQK.shape[-1], tile):
            part = slice(start, start + tile)
            new_BHQ1 = torch.maximum(m_BHQ1, scores_BHQK[..., part].amax(-1, keepdim=True))
            shift_BHQ1 = new_BHQ1.masked_fill(new_BHQ1 == -torch.inf, 0.0)
            p_BHQK = (scores_BHQK[..., part] - shift_BHQ1).exp()
            alpha_BHQ1 = (m_BHQ1 - shift_BHQ1).exp()
            l_BHQ1 = l_BHQ1 * (1.0 if what == "l" else alpha_BHQ1) + p_BHQK.sum(-1, keepdim=True)
            acc_BHQD = acc_BHQD * (1.0 if what == "acc" else alpha_BHQ1)
            acc_BHQD = acc_BHQD + p_BHQK @ known.v[:, :, part]
            m_BHQ1 = new_BHQ1
        lse_BHQ = (m_BHQ1 + l_BHQ1.log()).squeeze(-1) if what == "l" else known.lse
        return (acc_BHQD / l_BHQ1).nan_to_num(0, 0, 0), lse_BHQ

    return changed


def _sums(where: Reference, formula: Formula, whole: bool) -> Iterator[Mistake]:
    """Rows that no result has, and sums of the backward that end early."""
    queries = torch.arange(where.cell.shape.query_len)
    for noun, words, results in zeros_of_unwritten_rows(where, formula, whole):
        yield Mistake(noun=noun, words=words, results=results, unwritten=True)
    count = len(queries)
    missed = [
        ("miss the last query", "", queries == count - 1),
        ("miss the first query", "", queries == 0),
    ]
    for tile in TILES:
        last = (count - 1) // tile * tile
        words = f"miss the tail, the last tile of queries, from {last} on"
        missed.append((words, f"miss the last tile of {tile}", queries >= last))
        words = f"have the last tile of {tile} queries alone: written, not added"
        missed.append((words, "", queries < last))
    for words, kind, without in missed:
        if without.any() and (whole or not without.all()):
            wrong = formula.with_(dkv_queries=~without)
            yield from _of_dk_dv(where, "queries", words, wrong, kind or words)
    keys = torch.arange(where.cell.shape.key_len)
    for tile in TILES:
        # the last tile of keys that a tile of queries attends
        ends = (queries // tile + 1) * tile - 1 + len(keys) - count
        ends = ends.clamp(0, len(keys) - 1) if where.cell.causal else keys[-1].expand(count)
        words = f"dq has the last tile of {tile} keys alone: written, not added"
        last_Q1 = (ends // tile * tile)[:, None]
        if last_Q1.any():
            yield _all_or_nothing("dq", words, formula, dq_keys=keys >= last_Q1)
    yield _all_or_nothing("delta", "delta = rowsum(dO * O) is missing, it is 0", formula, delta=0.0)
    for tile in TILES:
        has = keys < (len(keys) - 1) // tile * tile
        if whole or has.any():
            words = f"delta = rowsum(dO * O) is missing, it is 0, in the last tile of {tile} keys"
            yield _all_or_nothing("delta", words, formula, delta=has.double())


def _strides(where: Reference, formula: Formula) -> Iterator[Mistake]:
    """Inputs that are not contiguous, read as if they were."""
    if where.misread is None:
        return
    for names in ("q k v dout", "q k v", "q dout", "k v", "q", "k", "v", "dout"):
        which = names.split()
        read = where.inputs._replace(**{name: getattr(where.misread, name) for name in which})
        words = f"strides of {' and '.join(which)} are ignored: read as if contiguous"
        yield _all_or_nothing("strides", words, formula, inputs=read)


def _empty_rows(where: Reference, formula: Formula) -> Iterator[Mistake]:
    """Rows that attend no key, as a mask of a large negative number in place of -inf makes them."""
    empty_Q1 = ~where.cell.visible().any(-1, keepdim=True)
    if not empty_Q1.any():
        return
    v_BHKD = formula.values()
    mean_BHQD = torch.where(empty_Q1, v_BHKD.mean(2, keepdim=True), where.golden["out"])
    words = "rows that attend no key are the mean of v, and must be 0: empty rows"
    yield Mistake(
        noun="empty rows", words=words, results=lambda: {**where.golden, "out": mean_BHQD}
    )
    dout_BHQD = where.inputs.dout.double() * empty_Q1
    to_v_BHKD = dout_BHQD.sum(2, keepdim=True).expand_as(v_BHKD) / v_BHKD.shape[2]

    def with_dv() -> Results:
        group = where.cell.shape.heads // where.cell.shape.kv_heads
        dv = where.golden["dv"] + to_v_BHKD.unflatten(1, (-1, group)).sum(2)
        return {**where.golden, "out": mean_BHQD, "dv": dv}

    words = f"{words}, and dv has their gradient"
    yield Mistake(noun="empty rows", words=words, results=with_dv)
