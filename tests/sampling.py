"""Samples of parametrized cases: `make test` runs some of them, the slow tests the others."""

from collections.abc import Iterable
from typing import Any

import pytest

__all__ = ["one_in"]


def one_in(count: int, cases: Iterable[Any]) -> list[Any]:
    """Return `cases` for `parametrize`, of which all but each `count`th, from the first, are slow.

    A case of several arguments is a tuple.
    """
    return [
        case
        if index % count == 0
        else pytest.param(*(case if type(case) is tuple else (case,)), marks=pytest.mark.slow)
        for index, case in enumerate(cases)
    ]
