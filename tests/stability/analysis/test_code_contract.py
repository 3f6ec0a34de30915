"""Two commands that ran other installed code or other libraries are no pair, or unproven."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from stability.analysis.environment_contract import is_in_doubt, other_entries, thread_lines
from stability.analysis.pair_contract import _start_parts
from stability.analysis.pair_proof import compared
from stability.records.identity import hash_environment
from tests.stability.analysis.test_launch_contract import run

PACKAGE, LIBRARY = "code.my_kernel", "library./opt/libmine.so"


def judged(key: str, one: Any, other: Any, differences: Mapping[str, Any]) -> str:
    first, second = (replace(run(), environment={key: x} if x else {}) for x in (one, other))
    (line,) = [
        compared(field, a, b, is_free=is_free)
        for field, a, b, is_free in _start_parts(first, second, differences)
        if field == f"environment.{key}"
    ]
    refused = list(other_entries(first, second, differences))
    assert bool(refused) == (line.sameness == "different")
    assert is_in_doubt(key, first, second, differences) == (line.sameness == "unknown")
    return line.sameness


LR = {"flags.lr": (1, 2)}
REF = {"ref": ("a", "b")}
PYTHON = {"python": ("a", "b")}


@pytest.mark.parametrize(
    ("key", "values", "differences", "said"),
    [
        (PACKAGE, ("1.0 a", "1.0 a"), {}, "same"),
        (PACKAGE, ("1.0 a", "1.0 b"), {}, "different"),
        (PACKAGE, ("1.0 a", "1.0 b"), LR, "different"),
        (PACKAGE, ("1.0 a", "1.0 b"), REF, "unknown"),
        (PACKAGE, ("1.0 a", "1.0 b"), PYTHON, "different by design"),
        # a flag may import more, and older records have no such entry
        (PACKAGE, ("1.0 a", None), LR, "different by design"),
        # where nothing was declared that imports it, another kernel may have been there to import
        (PACKAGE, ("1.0 a", None), {}, "unknown"),
        (PACKAGE, (None, "1.0 a"), {"nudge.ulps": (0, 1)}, "unknown"),
        ("package.my_kernel", (None, "1.0"), {}, "unknown"),
        ("package.my_kernel", (None, "1.0"), LR, "different by design"),
        (LIBRARY, ("a", "a"), {}, "same"),
        (LIBRARY, ("a", "b"), {}, "different"),
        (LIBRARY, ("a", "b"), LR, "different"),
        (LIBRARY, ("a", "b"), REF, "different"),
        (LIBRARY, ("a", None), {}, "unknown"),
        (LIBRARY, ("a", None), {"nudge.ulps": (0, 1)}, "unknown"),
        (LIBRARY, ("a", None), LR, "different by design"),
        (LIBRARY, ("a", "b"), PYTHON, "different by design"),
    ],
)
def test_other_code_is_told(
    key: str, values: tuple[Any, Any], differences: dict[str, Any], said: str
) -> None:
    assert judged(key, *values, differences) == said


@pytest.mark.parametrize(
    ("differences", "threads", "names"),
    [
        (LR, (1, 1), []),
        (LR, (1, 2), ["environment.threads"]),
        (REF, (1, 2), ["environment.threads"]),
        # an A/A pair is refused by the environment's hash; what sets threads, and another
        # environment, may have other ones
        ({}, (1, 2), []),
        ({"flags.num_threads": (1, 2)}, (1, 2), []),
        ({"env.OMP_NUM_THREADS": ("1", "2")}, (1, 2), []),
        (PYTHON, (1, 2), []),
    ],
)
def test_another_number_of_threads_is_unproven_where_nothing_declares_it(
    differences: dict[str, Any], threads: tuple[int, int], names: list[str]
) -> None:
    first, second = (replace(run(), environment={"threads": x}) for x in threads)
    lines = list(thread_lines(first, second, differences))
    assert [line.field for line in lines] == names
    assert all(line.sameness == "unknown" for line in lines)
    if names:
        assert "1 in one and 2 in the other, which was not declared" in lines[0].says


def test_what_older_records_lack_is_no_part_of_the_environments_hash() -> None:
    assert hash_environment({"threads": 1, PACKAGE: "a", LIBRARY: "b"}) == hash_environment(
        {"threads": 1}
    )
