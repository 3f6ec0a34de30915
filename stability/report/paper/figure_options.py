"""What `stability figure` can be asked for: kinds, results, metrics, formats and widths.

Nothing heavy is imported here, so that a misspelled option is told before matplotlib is loaded.
"""

__all__ = ["FORMATS", "HEATMAP_METRICS", "KINDS", "RESULTS", "WIDTHS"]

KINDS = ("ladder", "drift", "heatmap", "waterfall")

RESULTS = ("out", "lse", "dq", "dk", "dv")
"""The results of attention that a heat map can show."""

HEATMAP_METRICS = {
    "rel_fro": "relative Frobenius\ndeviation",
    "error_ratio": "error over\nthe baseline's",
    "bias_ulp": "bias (ULP)",
}
"""The metrics that a heat map can show, with the titles of its colour bar."""

FORMATS = ("pdf", "svg", "png")

WIDTHS = {"column": 3.35, "page": 6.9}
"""In inches: a column of 85 mm, and a page of two columns."""
