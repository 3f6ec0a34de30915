"""The numerics contract on paper lists every rounding point with the formats the profiles hold."""

from pathlib import Path

import pytest

from attention_kernels import BASELINE_PROFILES, PROFILES

README = (Path(__file__).parents[2] / "kernels" / "README.md").read_text(encoding="utf-8")


def rows():
    for line in README.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `"):
            yield cells[0].split("`")[1], cells[2:]


@pytest.mark.parametrize(
    ("profiles", "columns"),
    [(PROFILES, ("fa2", "all_bf16", "golden")), (BASELINE_PROFILES, ("plain", "golden"))],
    ids=["flash", "baseline"],
)
def test_each_rounding_point_is_listed_with_its_formats(profiles, columns):
    assert set(columns) == set(profiles)
    listed = [(point, formats) for point, formats in rows() if len(formats) == len(columns)]
    flat = {name: profiles[name].to_dict() for name in columns}
    expected = [
        (point, [flat[name][point] for name in columns])
        for point in flat[columns[0]]
        if not point.startswith("block_")
    ]
    assert listed == expected
