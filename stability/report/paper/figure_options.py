"""What `stability figure` can be asked for: kinds, results, formats and widths.

The metrics are those of `records.metric_table`. Nothing heavy is imported here, so that a
misspelled option is told before matplotlib is loaded.
"""

__all__ = ["FORMATS", "KINDS", "RESULTS", "WIDTHS", "NothingToDrawError"]

KINDS = ("ladder", "drift", "heatmap", "waterfall")

RESULTS = ("out", "lse", "dq", "dk", "dv")
"""The results of attention that a heat map can show."""

FORMATS = ("pdf", "svg", "png")

WIDTHS = {"column": 3.35, "page": 6.9}
"""In inches: a column of 85 mm, and a page of two columns."""


class NothingToDrawError(ValueError):
    """What was asked for is not on record."""
