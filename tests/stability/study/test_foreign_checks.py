"""What a recorded run is held against once it has ended."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stability.records.paths import RunPaths
from stability.records.run_files import read_run_snapshot
from stability.study.foreign_checks import check_nudge


def _check(baseline: RunPaths | None, states: dict[int, Path], ulps: int = 1) -> None:
    run: Any = SimpleNamespace(baseline=baseline, asked=SimpleNamespace(nudge=(ulps, 0)))
    spooled: Any = SimpleNamespace(states=states)
    check_nudge(run, spooled)


@pytest.mark.parametrize(
    ("step", "said"), [(1, "after the first update all"), (4, "after 4 updates all")]
)
def test_a_nudge_that_left_no_trace_is_refused(trained, tmp_path, step, said):
    baseline = RunPaths.for_run(trained, "baseline", 0)
    state = read_run_snapshot(baseline, step)
    start, kept = tmp_path / "start.pt", tmp_path / "state.pt"
    # a start that was nudged proves nothing: the script may have set its weights since
    torch.save({name: x.nextafter(x + 1) for name, x in state.items()}, start)
    torch.save(state, kept)
    with pytest.raises(ValueError, match=f"the nudge left no trace: {said}"):
        _check(baseline, {0: start, step: kept})
    _check(baseline, {0: start, step: kept}, ulps=0)
    _check(None, {0: start, step: kept})
    _check(baseline, {0: start})


def test_one_bit_of_one_weight_is_a_trace(trained, tmp_path):
    baseline = RunPaths.for_run(trained, "baseline", 0)
    state, kept = read_run_snapshot(baseline, 2), tmp_path / "state.pt"
    weight = next(reversed(state.values())).view(-1)
    weight[-1] = weight[-1].nextafter(weight[-1] + 1)
    torch.save(state, kept)
    _check(baseline, {2: kept})
