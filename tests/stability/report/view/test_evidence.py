"""The legend below the evidence explains the figures that are shown, and those alone."""

import pytest

from stability.report.view.evidence import legend


@pytest.mark.parametrize(
    ("text", "explained"),
    [
        ("12x", "x"),
        ("2.3x +0.31%", "x%"),
        ("its error is 1.5x, above 1.1x.", "x"),
        ("(infx)", "x"),
        ("1e+05x", "x"),
        ("1.2e-05x", "x"),
        ("-1e-05%", "%"),
        ("between -0.3% and 0", "%"),
        ("(+0.3%)", "%"),
        ("E 1.2", "E"),
        ("f -0.1", "f"),
        # names of arms
        ("lr-10x fails", ""),
        ("of lr_10x, lr.10x and 10xlr", ""),
        ("wd-5% passes", ""),
        ("90 %", ""),
    ],
)
def test_a_figure_is_explained_where_it_is_no_part_of_a_name(text, explained):
    said = legend(text).splitlines()
    assert "".join(line.partition(":")[0] for line in said) == explained
