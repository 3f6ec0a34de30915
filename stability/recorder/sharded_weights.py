"""What is recorded of weights that several ranks hold, which no process gathers.

The first rank, which keeps the record, tells all of them what is due (`Due`); each rank then does
its part of it: writes what it holds into one snapshot, adds what its values add to the hash, the
sketch and the counts, and measures the drift of its part from the baseline's. All of them find the
same numbers, and the first one writes them down. Leaves out one process, which holds all that it
records (`writer`), and what is due when.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch import distributed as dist

from stability.metrics.instability import count_nonfinite
from stability.metrics.pieces import Piece, pieces_of
from stability.metrics.sharded_drift import sharded_drift
from stability.metrics.weight_counts import weight_counts
from stability.model.ranks import beside
from stability.recorder.sketching import stored_sketch
from stability.records.dcp_files import DcpWrite, fill_state, write_dcp
from stability.records.snapshots import check_same_weights
from stability.records.weight_files import open_snapshot
from stability.records.weight_sketches import StoredSketch

__all__ = ["Due", "Found", "record_weights"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Due:
    """What is to be recorded of the weights at one step."""

    snapshot: Path | None = None
    """The folder to write them into, which all ranks see."""
    sketch: bool = False
    counts: bool = False
    baseline: Path | None = None
    """The snapshot to measure the drift from, known to be whole."""
    of_both: bool = False
    """Whether drift is over the weights that both have: else they must have the same."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """What was recorded; what was not due is None."""

    write: DcpWrite | None
    """The snapshot, which may still be on its way to the disk."""
    sketch: StoredSketch | None
    counts: tuple[float, list[int]] | None
    """How many weights are not finite, and their histogram (`WEIGHT_EDGES`)."""
    drift: dict[str, dict[str, float]] | None


def record_weights(state: Mapping[str, Tensor], due: Due) -> Found:
    """Do this rank's part of what is due; all ranks must call it, with what each holds.

    ValueError on every rank if the baseline has weights of other names or shapes, OSError where a
    part can't be read.
    """
    write = write_dcp(due.snapshot, state, process_group=beside()) if due.snapshot else None
    pieces = pieces_of(state)
    return Found(
        # the disk is written to while the ranks measure
        write=write,
        sketch=stored_sketch(pieces, _added_up) if due.sketch else None,
        counts=_counted(pieces) if due.counts else None,
        drift=_drift(state, due.baseline, of_both=due.of_both) if due.baseline else None,
    )


def _added_up(own: Tensor) -> Tensor:
    dist.all_reduce(own)
    return own


def _counted(pieces: Mapping[str, Piece]) -> tuple[float, list[int]]:
    weights = [x.values for x in pieces.values() if x.values.is_floating_point()]
    filled = [values for values in weights if values.numel()]
    nonfinite = int(count_nonfinite(filled)) if filled else 0
    found = torch.tensor([nonfinite, *weight_counts(filled)]).to(_device(pieces))
    total, *counts = _added_up(found).tolist()
    return float(total), counts


def _device(pieces: Mapping[str, Piece]) -> torch.device:
    return next(iter(pieces.values())).values.device


def _drift(
    state: Mapping[str, Tensor], baseline: Path, *, of_both: bool
) -> dict[str, dict[str, float]]:
    weights = open_snapshot(baseline)
    own = dict(state)
    if of_both:
        own = {name: own[name] for name in weights if name in own}
    else:
        check_same_weights({name: tuple(x.shape) for name, x in own.items()}, weights.shapes)
    # in the dtype that the baseline has: rounded to this run's it would be another
    kinds = weights.dtypes
    other = {name: torch.empty_like(value, dtype=kinds[name]) for name, value in own.items()}
    fill_state(other, weights)
    return sharded_drift(own, other)
