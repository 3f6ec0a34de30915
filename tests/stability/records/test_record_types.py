"""A record's fields have the types that it declares, however deep; else a line says which one."""

from typing import Annotated, Any, Literal, NotRequired, TypedDict

import pytest

from stability.records.record_types import (
    DEEPEST,
    FILLED,
    Count,
    Number,
    Pair,
    check_plain_json,
    check_type,
)


class Inner(TypedDict):
    name: str
    pairs: dict[str, Pair]
    values: NotRequired[list[list[Number]]]


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        (0, Count),
        (2.5, Number),
        (2, Number),
        ("-inf", Number),
        (None, dict[str, Any] | None),
        ({"anything": [{}]}, dict[str, Any]),
        ("b", Literal["a", "b"]),
        ({"name": "x", "pairs": {"p": [None, 3]}}, Inner),
        ({"name": "x", "pairs": {}, "values": [[1.5, "nan"], []], "later": 1}, Inner),
    ],
)
def test_what_is_declared_is_taken(value, hint):
    check_type(value, hint, "key")


@pytest.mark.parametrize(
    ("value", "hint", "message"),
    [
        ([], Annotated[list[int], FILLED], r"^key must be one value at least, is \[\]$"),
        (True, Count, "^key must be of type int, is True$"),
        (-1, Count, "^key must be >= 0, is -1$"),
        (1, bool, "^key must be of type bool, is 1$"),
        (1, Literal[True], r"^key must be one of \(True,\), is 1$"),
        ("NaN", Number, "^key must be of type float or one of .*, is 'NaN'$"),
        (True, Number, "^key must be of type float or one of .*, is True$"),
        ([], dict[str, Any] | None, r"^key must be of type dict or null, is \[\]$"),
        ([1, "2"], list[int], "^key.1 must be of type int, is '2'$"),
        ([1], Inner, r"^key must be of type dict, is \[1\]$"),
        ({"name": "x"}, Inner, r"^key must have the key pairs, has \['name'\]$"),
        ({"name": "x", "pairs": {"p": [1]}}, Inner, r"^key.pairs.p must be a pair of values, is"),
        ({"name": "x", "pairs": {"p": 1}}, Inner, "^key.pairs.p must be of type list, is 1$"),
        ({"name": "x", "pairs": {}, "values": [[None]]}, Inner, "^key.values.0.0 must be .* None$"),
        ("x" * 10**5, int, r"^key must be of type int, is 'x{199}\.\.\.$"),
    ],
)
def test_what_is_not_is_named_with_its_place(value, hint, message):
    with pytest.raises(ValueError, match=message):
        check_type(value, hint, "key")


def test_json_deeper_or_larger_than_any_record_is_refused():
    deep: Any = 0
    for _ in range(DEEPEST):
        deep = [deep]
    check_plain_json(deep)
    with pytest.raises(ValueError, match="is nested too deep"):
        check_plain_json({"a": deep})
    check_plain_json([2**63 - 1, -(2**63), 1e308])
    for number in (2**63, -(2**63) - 1, 10**4000):
        with pytest.raises(ValueError, match="more than 64 bits"):
            check_plain_json({"a": [number]})
