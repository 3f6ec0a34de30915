"""Samples of parametrized cases: which are fast, which are slow tests and which long ones."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest

__all__ = ["one_in", "others_long", "others_slow"]


def one_in(count: int, cases: Iterable[Any], *, slow: int = 1) -> list[Any]:
    """Return `cases` for `parametrize`, of which all but each `count`th, from the first, are slow.

    Of those all but each `slow`th are long. A case of several arguments is a tuple.
    """
    return [
        case
        if index % count == 0
        else _marked(case, pytest.mark.long if index % slow else pytest.mark.slow)
        for index, case in enumerate(cases)
    ]


def others_long(cases: Iterable[Any], slow: Collection[Any]) -> list[Any]:
    """Return a slow test's `cases` for `parametrize`: those that are not in `slow` are long."""
    return [case if case in slow else _marked(case, pytest.mark.long) for case in cases]


def others_slow(
    cases: Iterable[Any], fast: Collection[Any], *, long: Collection[Any] = ()
) -> list[Any]:
    """Return `cases` for `parametrize`, slow but for the fast ones and the long ones."""
    marks = ((case, pytest.mark.long if case in long else pytest.mark.slow) for case in cases)
    return [case if case in fast else _marked(case, mark) for case, mark in marks]


def _marked(case: Any, mark: pytest.MarkDecorator) -> Any:
    return pytest.param(*(case if type(case) is tuple else (case,)), marks=mark)
