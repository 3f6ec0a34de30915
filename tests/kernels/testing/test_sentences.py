"""The words of a check: which rows are meant, and where a defect is seen."""

import pytest

from attention_kernels.testing.sentences import rows_in_words


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([39], "row 39 of 40, the last row"),
        ([7], "row 7 of 40"),
        ([36, 37, 38, 39], "rows 36 to 39, the tail of 40"),
        ([3, 4, 5], "rows 3 to 5 of 40"),
        ([8, 4, 12], "rows 4, 8 and 12, 4 apart, of 40"),
        ([1, 3], "rows 1 and 3, 2 apart, of 40"),
        ([1, 3, 4], "rows 1, 3 and 4 of 40"),
        (list(range(36)), "every row"),
        ([], "every row"),
    ],
)
def test_rows_are_told_by_their_pattern(rows, said):
    assert rows_in_words(rows, 40) == said
