"""Distances on record count for the files that their runs still list, a file's or a folder's."""

from types import SimpleNamespace

import pytest

from stability.records.distances import DistanceMatrix, SeedDistances, with_parents
from stability.records.paths import RunPaths


@pytest.mark.parametrize("where", ["snapshot", "sharded_snapshot"])
@pytest.mark.parametrize("now", ["same", "another"])
def test_a_row_counts_where_its_parent_is_listed(tmp_path, where, now):
    runs = {}
    for arm, kind in {"baseline": "snapshot", "other": where}.items():
        paths = RunPaths.for_run(tmp_path, arm, 0)
        listed = "the baseline's" if arm == "baseline" else now
        files = {
            paths.name_of(getattr(paths, kind)(4)): listed,
            paths.name_of(paths.predictions(4)): listed,
        }
        runs[arm] = (paths, SimpleNamespace(all_files=files))
    matrix = DistanceMatrix(
        parents={"baseline": "the baseline's", "other": "same"},
        norms={"baseline": 1.0, "other": 1.0},
        rows=((0.0, 0.5), (0.5, 0.0)),
    )
    recorded = SeedDistances(seed=0, weights={4: matrix}, predictions={4: matrix})
    found = with_parents(recorded, runs)
    arms = ("baseline", "other") if now == "same" else ("baseline",)
    assert found.weights[4].arms == found.predictions[4].arms == arms
