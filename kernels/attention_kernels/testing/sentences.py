"""The words in which a check says what it found, as the author of a kernel would."""

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from attention_kernels.testing.calls import Breach
from attention_kernels.testing.cells import Cell
from attention_kernels.testing.limits import Excess
from attention_kernels.testing.measured import RANGE

__all__ = [
    "breach_sentence",
    "excess_sentence",
    "factor_in_words",
    "heads_in_words",
    "listed",
    "numbers_in_words",
    "outward_in_words",
    "refusals_in_words",
    "rows_in_words",
    "where_in_words",
]


def listed(words: Sequence[str]) -> str:
    """Return "dq", "dq and dk" or "out, dq and dk"."""
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def numbers_in_words(numbers: Sequence[int], most: int = 4) -> str:
    """Return "63", "63 and 127" or "63, 127, 191, ..."."""
    words = [str(number) for number in numbers]
    return ", ".join(words[:3]) + ", ..." if len(words) > most else listed(words)


def factor_in_words(gain: float, error: float) -> str:
    """Return "1.0050 +- 0.0001", with a digit more where the error is smaller than that."""
    digits = 4 if error >= 5e-5 else 6
    return f"{1 + gain:.{digits}f} +- {error:.{digits}f}"


def outward_in_words(bias: float, error: float) -> str:
    """Return "0.500 +- 0.010 ULP toward zero", or away from it: a bias of -0.5 away from zero."""
    return f"{abs(bias):.3f} +- {error:.3f} ULP {'away from' if bias > 0 else 'toward'} zero"


def heads_in_words(heads: Collection[int], of_heads: int) -> str:
    """Return "in every head" or "in head 1"."""
    if len(heads) >= of_heads:
        return "in every head"
    plural = "heads" if len(heads) > 1 else "head"
    return f"in {plural} {numbers_in_words(sorted(heads))} alone"


def inputs_in_words(law: str) -> str:
    """Return which inputs those of a law are; those of a recorded run are the "given inputs"."""
    return f"the {law}" if law == "given inputs" else f"{law!r} inputs"


def rows_in_words(rows: Sequence[int], length: int, what: str = "row") -> str:
    """Return which rows of so many are meant, by their pattern if they have one."""
    if not rows or len(rows) >= 0.9 * length:
        return f"every {what}"
    rows = sorted(rows)
    if len(rows) == 1:
        last = f", the last {what}" if rows[0] == length - 1 else ""
        return f"{what} {rows[0]} of {length}{last}"
    if rows == list(range(rows[0], length)):
        return f"{what}s {rows[0]} to {rows[-1]}, the tail of {length}"
    if rows == list(range(rows[0], rows[-1] + 1)):
        return f"{what}s {rows[0]} to {rows[-1]} of {length}"
    steps = {b - a for a, b in itertools.pairwise(rows)}
    if len(steps) == 1:
        return f"{what}s {numbers_in_words(rows)}, {steps.pop()} apart, of {length}"
    return f"{what}s {numbers_in_words(rows)} of {length}"


def where_in_words(failing: Iterable[Cell], healthy: Iterable[Cell], traits: int = 1) -> str:
    """Return what the failing cells have in common that no healthy one has, or "".

    Each trait is a sentence's end: "only under a causal mask". Up to so many `traits` are sought of
    which each failing cell has at least one.
    """
    failing, healthy = set(failing), set(healthy) - set(failing)
    if not failing or not healthy:
        return ""
    for count in range(1, traits + 1):
        for some in itertools.combinations(_TRAITS, count):
            if _are_those_with(some, failing, healthy):
                first, *others = some
                return ", or ".join([first, *(trait.removeprefix("only ") for trait in others)])
    laws = {cell.law for cell in failing}
    if len(laws) == 1 and laws != {"normal"}:
        return f"only on {inputs_in_words(laws.pop())}"
    shared = [
        trait
        for trait, has in _TRAITS.items()
        if all(map(has, failing)) and not all(map(has, healthy))
    ]
    return shared[0] if shared else ""


def _are_those_with(traits: Iterable[str], failing: set[Cell], healthy: set[Cell]) -> bool:
    """Whether each failing cell has one of the traits, and no healthy cell has any."""
    have = [_TRAITS[trait] for trait in traits]
    return all(any(has(cell) for has in have) for cell in failing) and not any(
        has(cell) for has in have for cell in healthy
    )


_EMPTY_ROWS = "only where a row attends no key"
_BACKWARD_OF_EMPTY_ROWS = (
    ". So it is the backward of these rows: exp(scores - LSE) with an LSE of -inf, for which take "
    "0, or 0 / 0, as in a softmax of nothing, that a `where` keeps out of the result alone: divide "
    "such a row by 1"
)
_TRAITS: dict[str, Callable[[Cell], bool]] = {
    "only where v's head_dim is not q's": lambda cell: cell.shape.value_dim is not None,
    "only with a single query, as in generation": lambda cell: cell.shape.query_len == 1,
    _EMPTY_ROWS: lambda cell: not bool(cell.visible().any(-1).all()),
    "only where query_len != key_len": lambda cell: cell.shape.query_len != cell.shape.key_len,
    "only where a scale is given": lambda cell: cell.scale is not None,
    "only on strided inputs, which are not contiguous": lambda cell: bool(cell.strided),
    "only with head_dim above 64": lambda cell: cell.shape.head_dim > 64,
    "only with a single kv head": lambda cell: cell.shape.kv_heads == 1 < cell.shape.heads,
    "only with GQA, fewer kv heads than heads": lambda cell: cell.shape.kv_heads < cell.shape.heads,
    "only under a causal mask": lambda cell: cell.causal,
    "only without a causal mask": lambda cell: not cell.causal,
    "only with a batch of 1": lambda cell: cell.shape.batch == 1,
    "only where the length is no multiple of 64: the tail, the last tile": lambda cell: (
        cell.shape.key_len % 64 != 0
    ),
    "only with more than 1024 keys, in long rows": lambda cell: cell.shape.key_len > 1024,
    "only with 1000 keys and more, in long rows": lambda cell: cell.shape.key_len >= 1000,
    "only with more than 64 keys": lambda cell: cell.shape.key_len > 64,
    "only with more than 128 keys": lambda cell: cell.shape.key_len > 128,
}


def breach_sentence(
    breach: Breach, failing: Sequence[Cell], cells: Collection[Cell], right: Sequence[str] = ()
) -> str:
    """Return a breach's sentence with how many of `cells` have it, and which if not all.

    `right` are the results with which nothing is wrong, which is said beside values that are none.
    """
    values = breach.kind in ("NaN", "infinity")
    others = f"; {listed(right)} {'are' if len(right) > 1 else 'is'} right" if right else ""
    if len(failing) == len(cells):
        return f"{breach.sentence}, in every cell{others if values else ''}"
    # a kernel that lacks two features raises at either
    common = where_in_words(failing, cells, traits=2 if breach.kind == "raises" else 1)
    told = f"{breach.sentence}, in {len(failing)} of {len(cells)} cells, e.g. {failing[0]}"
    told += f", {common}" if common else ""
    if values:
        told += others
    gradient = breach.result in ("dq", "dk", "dv")
    if breach.kind == "NaN" and gradient and common == _EMPTY_ROWS and "out" in right:
        told += _BACKWARD_OF_EMPTY_ROWS
    allowed = "; what it does not support it may refuse by NotImplementedError"
    return told + (allowed if breach.may_refuse else "")


def refusals_in_words(unsupported: Mapping[str, Sequence[str]], plain: Sequence[str]) -> str:
    """Return what was refused, as the end of a sentence: the plain cells first; "" if nothing."""
    if not unsupported:
        return ""
    count = sum(map(len, unsupported.values()))
    text = f"; it refuses {count} more"
    if plain:
        more = f" and {len(plain) - 1} more" if len(plain) > 1 else ""
        text += f", {len(plain)} of them plain attention ({plain[0]}{more})"
    reasons = [f"{reason!r} ({len(cells)})" for reason, cells in unsupported.items()]
    others = f" and {len(reasons) - 3} other reasons" if len(reasons) > 3 else ""
    return f"{text}: {', '.join(reasons[:3])}{others}"


def excess_sentence(excess: Excess) -> str:
    """Return one excess with its number, standard error and limit."""
    heads, law = heads_in_words(excess.heads, excess.of_heads), f"on {inputs_in_words(excess.law)}"
    if excess.statistic == "gain":
        return (
            f"{excess.result} is {factor_in_words(excess.value, excess.error)} times what it "
            f"should be, {heads}, {law}"
        )
    if excess.statistic == "bias away from zero":
        bias = outward_in_words(excess.value, excess.error)
        return f"{excess.result} has a bias of {bias}, {heads}, {law}"
    if excess.statistic == "bias":
        return (
            f"{excess.result} has a bias of {excess.value:+.3f} +- {excess.error:.3f} ULP, "
            f"{heads}, {law}"
        )
    if excess.statistic == "error ratio":
        return (
            f"{excess.result} errs {excess.value:.3g} +- {excess.error:.2g} times as much as plain "
            f"attention, {heads}, {law}"
        )
    length = excess.evidence[0].squared_errors.shape[-1]
    what = "key" if excess.result in ("dk", "dv") else "row"
    if excess.statistic == "row":
        at = rows_in_words(excess.rows, length, what)
    else:
        at = f"ranges of {RANGE} {what}s from {numbers_in_words(excess.rows)} on"
    return (
        f"{excess.result} errs up to {excess.value:.3g} times as much as plain attention in {at}, "
        f"{heads}, {law}"
    )
