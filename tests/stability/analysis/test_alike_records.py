"""What two runs that differ in nothing must have alike, and what of it is of other data."""

from pathlib import Path
from typing import Any

import pytest

from stability.analysis.alike_records import rerun_line
from stability.records.manifest import Manifest
from stability.records.metric_log import MetricLog
from stability.records.metric_names import EVAL_LOSS, TRAIN_LOSS
from stability.records.paths import RunPaths

COMMAND = {"program": "python", "flags": {}, "env": {}}


def _run(folder: Path, held_out: str, losses: tuple[float, float], config: Any) -> Any:
    """Return the paths and the manifest of a run with these losses, on training and other data."""
    paths = RunPaths(folder)
    log = MetricLog(paths.metrics)
    log.append(1, {TRAIN_LOSS: losses[0], EVAL_LOSS: losses[1]})
    log.close()
    manifest = Manifest(
        study="study",
        arm=folder.name,
        seed=0,
        axis="none",
        config=config,
        diff={},
        environment={},
        resolved={},
        hashes={"final_weights": "w", **({"held_out": held_out} if held_out else {})},
        state="finished",
        step=1,
        message="",
    )
    return paths, manifest


def _found(folder: Path, one: Any, other: Any, config: Any = COMMAND) -> list[tuple[str, str]]:
    first = _run(folder / "one", one[0], one[1], config)
    second = _run(folder / "other", other[0], other[1], config)
    lines = rerun_line((first[0], second[0]), (first[1], second[1]), {})
    return [(x.field, x.sameness) for x in lines]


@pytest.mark.parametrize("held_out", [("a", "b"), ("a", ""), ("", "")])
def test_held_out_losses_of_other_data_are_no_contradiction(
    held_out: tuple[str, str], tmp_path: Path
) -> None:
    runs = [(data, (2.0, loss)) for data, loss in zip(held_out, (2.5, 3.0), strict=True)]
    assert _found(tmp_path, *runs) == [("losses", "same")]


def test_losses_that_must_be_alike_and_are_not_are_refused(tmp_path: Path) -> None:
    known = ("a", (2.0, 2.5))
    said = [(f"{EVAL_LOSS} at step 1", "different")]
    assert _found(tmp_path / "held out", known, ("a", (2.0, 3.0))) == said
    assert _found(tmp_path / "our own", ("", (2.0, 2.5)), ("", (2.0, 3.0)), {}) == said
    trained = _found(tmp_path / "trained", known, ("b", (1.0, 2.5)))
    assert trained == [(f"{TRAIN_LOSS} at step 1", "different")]


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        ({"1": "x", "2": "y"}, {"1": "x", "2": "y"}, ("losses", "same")),
        ({"1": "x", "2": "y", "10": "z"}, {"1": "x", "2": "n", "10": "m"}, ("2", "different")),
        ({"1": "x"}, {"1": "x", "2": "y"}, ("losses", "same")),  # its end was not told
        ({"1": "x"}, ["1"], ("losses", "same")),  # no record of ours
        ({}, None, ("losses", "same")),  # a run of one process, and one of before
    ],
)
def test_what_the_other_ranks_held_at_the_end_is_compared_too(
    one: Any, other: Any, said: tuple[str, str], tmp_path: Path
) -> None:
    runs = [_run(tmp_path / name, "", (2.0, 2.5), COMMAND) for name in ("one", "other")]
    for (_, manifest), ends in zip(runs, (one, other), strict=True):
        manifest.resolved.update({} if ends is None else {"rank_ends": ends})
    lines = list(rerun_line((runs[0][0], runs[1][0]), (runs[0][1], runs[1][1]), {}))
    field = said[0] if said[0] == "losses" else f"what rank {said[0]} held at the end"
    assert [(x.field, x.sameness) for x in lines] == [(field, said[1])]
