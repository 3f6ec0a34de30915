"""The rows of a training's record: what one pass was given, one update, and their lines in a spool.

Hashes and losses stay on the device until a line is made of them. Leaves out when a row begins and
ends (`training`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Callable, Dict, List, Set, Tuple

from torch import Tensor

__all__ = ["Given", "Row", "held_out_line", "trained_on", "update_line"]


@dataclass
class Given:
    """What the model was given in one pass, and the loss of its result."""

    samples: Tensor
    """The hash of each sample."""
    keys: List[Tuple[str, Tensor]]
    """Of each input, by name, a hash of each sample's row, by which it is known again."""
    inputs: Dict[str, Tensor]
    """A hash of each input by name."""
    is_training: bool
    place: int
    """Where it came in autograd's record."""
    model: int = 0
    """Tells whole models apart that are called one after another."""
    labels: List[Tuple[str, Tensor]] = field(default_factory=list)
    """A hash, with the samples, of what only the loss was given."""
    aims: Dict[str, int] = field(default_factory=dict)
    """How many labels of each name came after the first: two heads' may have changed places."""


@dataclass
class Row:
    """One update."""

    losses: Dict[int, List[Tensor]] = field(default_factory=dict)
    """What was back-propagated, by the place of the optimizer that stepped next."""
    hashes: List[Tensor] = field(default_factory=list)
    order: List[Tensor] = field(default_factory=list)
    """As `hashes`, of the samples in their order, one for each call of a model."""
    inputs: Dict[str, List[Tensor]] = field(default_factory=dict)
    labels: Dict[str, List[Tensor]] = field(default_factory=dict)
    """What only the loss was given, apart: one that is fused or compiled hides it."""
    samples: int = 0
    stepped: Set[int] = field(default_factory=set)
    """The optimizers that have stepped in it."""
    moves: bool = False
    """Whether an optimizer had a gradient as it stepped."""
    is_backed: bool = False
    """Whether something was back-propagated before a step."""
    skipped: int = 0
    """Steps that a loss scaler left out."""


def trained_on(given: List[Given], is_reached: Callable[[int], bool]) -> List[Given]:
    """Return what models were given to train on, what they evaluate left out.

    `is_reached` says of a place in autograd's record whether a loss came of it.
    """
    # one that is frozen in part may train in evaluation mode, and so may one of two models; a
    # call of a model that is in training mode, too, is evaluation where no loss came of it
    trained = {x.model for x in given if x.is_training}
    return [x for x in given if x.model not in trained or x.is_training or is_reached(x.place)]


def held_out_line(step: int, loss: float, inputs: Any, samples: int) -> Dict[str, Any]:
    """Return the line of a held-out loss after `step` updates, and of what it was computed on."""
    digest = "" if inputs is None else f"{int(inputs) % 2**64:016x}"
    return {"kind": "held_out", "step": step, "loss": loss, "hash": digest, "samples": samples}


def update_line(step: int, row: Row) -> Dict[str, Any]:
    """Return the line of update number `step`; waits for its losses and hashes."""
    losses = {place: [float(loss) for loss in each] for place, each in row.losses.items()}
    # one input alone needs no name
    inputs = row.inputs if len(row.inputs) > 1 else {}
    return {
        "kind": "update",
        "step": step,
        "losses": {place: sum(each) for place, each in losses.items()},
        "backwards": max(map(len, losses.values()), default=0),
        "optimizers": len(row.stepped),
        "batch": _summed(row.hashes) if row.hashes else None,
        "order": f"{len(row.order)} {_summed(row.order)}",
        "inputs": {name: _summed(values) for name, values in inputs.items()},
        "labels": {name: _summed(values) for name, values in row.labels.items()},
        "samples": row.samples,
        "skipped": row.skipped,
    }


def _summed(hashes: List[Tensor]) -> str:
    return f"{sum(int(value) for value in hashes) % 2**64:016x}"
