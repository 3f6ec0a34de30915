"""Sees what a script evaluates between its updates, with the weights that train: its own loss.

An evaluation is a row of outermost calls of a model that trains, in evaluation mode and without
gradients, between two passes that train. A call's loss is what the model returns as one (`.loss`,
`(logits, loss)`, a scalar), else the first one that a loss of `torch.nn.functional` is computed to
after it; these functions are wrapped from where a model is put into evaluation mode to the next
pass that trains, so that no such pass meets them. What was given to the model and to the loss is
hashed, so that two runs can be shown to be evaluated on the same, and each sample is known by a
key, so that it can be told whether it was trained on. Leaves out which of all that is held out
(`recorder.held_out`).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import torch
from torch import Tensor
from torch.nn import functional

from .batch_hash import hash_batch
from .older_torch import is_compiling

__all__ = ["Evaluations", "keys_by_name", "returned_loss"]

LOSSES = (
    "cross_entropy",
    "nll_loss",
    "mse_loss",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "kl_div",
    "poisson_nll_loss",
    "gaussian_nll_loss",
)
"""The losses of `torch.nn.functional`; those of `torch.nn` call them."""
_OF_CLASSES = ("cross_entropy", "nll_loss")
"""Their targets are numbers of classes, some of which may be left out."""
_MOST_KEYS = 2**22
"""Samples of evaluations whose keys are kept."""
_SETTLED_AT = 64
"""Batches whose keys lie on the device, before they are moved."""
_LEAST_UNIQUE = 2**16
"""Keys that are kept as they came, before each is kept once."""


class _TrainedKeys:
    """The keys of the samples in one input that were trained on: each once, and how many."""

    def __init__(self) -> None:
        self.times = 0
        self._recent: List[Tensor] = []
        """Those of the last batches, where they were computed."""
        self._settled: List[Tensor] = []
        self._kept = 0
        self._most = _LEAST_UNIQUE

    def add(self, keys: Tensor) -> None:
        """Add those of a batch."""
        self._recent.append(keys)
        if len(self._recent) > _SETTLED_AT:
            self._settle()

    def unique(self) -> Tensor:
        """Return each key once, on the CPU."""
        self._settle()
        return self._shrink()

    def _settle(self) -> None:
        if not self._recent:
            return
        moved = torch.cat(self._recent).cpu()
        self._recent.clear()
        self.times += len(moved)
        self._kept += len(moved)
        self._settled.append(moved)
        if self._kept > self._most:  # epochs over the same samples take no more memory
            self._most = max(2 * len(self._shrink()), _LEAST_UNIQUE)

    def _shrink(self) -> Tensor:
        known = torch.cat(self._settled).unique()
        self._settled, self._kept = [known], len(known)
        return known


@dataclass
class _Call:
    """What was given until a loss of it was computed."""

    hashes: List[Tensor] = field(default_factory=list)
    keys: Dict[str, List[Tensor]] = field(default_factory=dict)
    samples: int = 0
    is_last: bool = False
    """Whether what is given next belongs to another loss, though none was seen of this."""
    loss: Optional[Tensor] = None


@dataclass
class _Evaluation:
    """The calls between two passes that train."""

    step: int
    calls: List[_Call] = field(default_factory=list)


class Evaluations:
    """What one process evaluates; `watches` is False where none of it is to be seen."""

    def __init__(self, *, watches: bool = True) -> None:
        self.watches = watches
        self._open: Optional[_Evaluation] = None
        self._closed: List[_Evaluation] = []
        self._undo: List[Callable[[], None]] = []
        self._trained: Dict[str, _TrainedKeys] = {}
        """By the input's name."""
        self._keys: Dict[str, Dict[str, Tensor]] = {}
        self._kept_keys = 0
        self._is_inside = False
        """Whether a model or a loss computes now: what it calls itself is not looked at."""

    def trained_on(self, keys: List[Tuple[str, Tensor]]) -> None:
        """Tell of the samples of a batch that is trained on, by their keys in each input."""
        if not self.watches:
            return
        for name, of_rows in keys:
            if name not in self._trained:
                self._trained[name] = _TrainedKeys()
            self._trained[name].add(of_rows)

    def may_begin(self) -> None:
        """Tell that a model was put into evaluation mode, before what is then computed with it."""
        if self.watches and not self._undo:
            known = [name for name in LOSSES if hasattr(functional, name)]
            self._undo = [self._wrap(name) for name in known]

    def may_end(self) -> None:
        """Tell that a model was put into training mode: what a graph then holds is the original."""
        for undo in reversed(self._undo):
            undo()
        self._undo = []

    def model_called(self, step: int, tensors: List[Tensor], names: Sequence[str]) -> None:
        """Tell what a model is given after `step` updates, in evaluation, without gradients."""
        if not self.watches:
            return
        if self._open is None:
            self._open = _Evaluation(step)
        calls = self._open.calls
        if not calls or calls[-1].loss is not None or calls[-1].is_last:
            # `loss(model(x), y)` has looked up its loss before the model is called
            calls.append(_Call(is_last=not self._undo))
        self.may_begin()
        if tensors:
            value, samples, keys = hash_batch(tensors)
            calls[-1].hashes.append(value)
            for name, of_rows in keys_by_name(names, keys):
                calls[-1].keys.setdefault(name, []).append(of_rows)
            calls[-1].samples += samples
        self._is_inside = True

    def model_returned(self, result: Any) -> None:
        """Tell what that call returned; None if it raised."""
        self._is_inside = False
        loss = returned_loss(result)
        if self._open is not None and loss is not None and self._open.calls[-1].loss is None:
            self._open.calls[-1].loss = _copied(loss)

    def end(self) -> None:
        """End the evaluation that lasts, if one does: a pass that trains begins."""
        self.may_end()
        if self._open is not None:
            self._closed.append(self._open)
        self._open = None

    def take_lines(self) -> List[Dict[str, Any]]:
        """Return a line of the spool for each evaluation that has ended since; waits for them."""
        closed, self._closed = self._closed, []
        return [
            {
                "kind": "evaluated",
                "step": each.step,
                "calls": [self._line(call) for call in each.calls if call.loss is not None],
            }
            for each in closed
        ]

    def keys(self) -> Dict[str, Any]:
        """Return the keys by input of what was evaluated, by a call's hash, and was trained on.

        Of the latter each once, and how many there were; also where nothing was evaluated, since
        another rank may have evaluated that.
        """
        if not self._keys and not self._trained:
            return {}
        return {
            "evaluated": self._keys,
            "trained": {name: each.unique() for name, each in self._trained.items()},
            "times": {name: each.times for name, each in self._trained.items()},
        }

    def _line(self, call: _Call) -> Dict[str, Any]:
        total = sum(int(value) for value in call.hashes) % 2**64
        digest = f"{total:016x}" if call.hashes else ""
        if call.keys and digest not in self._keys and self._kept_keys < _MOST_KEYS:
            kept = {name: torch.cat(keys).cpu() for name, keys in call.keys.items()}
            # an input that only a part of the samples has tells nothing of the others
            kept = {name: keys for name, keys in kept.items() if len(keys) == call.samples}
            self._keys[digest] = kept
            self._kept_keys += sum(map(len, kept.values()))
        assert call.loss is not None
        return {"hash": digest, "samples": call.samples, "loss": float(call.loss)}

    def _wrap(self, name: str) -> Callable[[], None]:
        original = getattr(functional, name)

        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if is_compiling() or self._is_inside or torch.is_grad_enabled():
                return original(*args, **kwargs)
            self._is_inside = True
            try:
                result = original(*args, **kwargs)
            finally:
                self._is_inside = False
            self._note_loss(name, args, kwargs, result)
            return result

        # also where a script has imported it by its name
        places = [vars(x) for x in list(sys.modules.values()) if isinstance(x, ModuleType)]
        places = [place for place in places if place.get(name) is original]
        for place in places:
            place[name] = wrapped

        def undo() -> None:
            for place in places:
                if place.get(name) is wrapped:
                    place[name] = original

        return undo

    def _note_loss(self, name: str, args: Any, kwargs: Dict[str, Any], result: Tensor) -> None:
        call = self._open.calls[-1] if self._open is not None else None
        target = kwargs.get("target", args[1] if len(args) > 1 else None)
        if call is None or call.loss is not None or not isinstance(target, Tensor):
            return
        call.loss = _mean(name, target, kwargs, result)
        if call.samples and target.numel() and target.numel() % call.samples == 0:
            target = target.reshape(call.samples, -1)
        call.hashes.append(hash_batch([target])[0])


def keys_by_name(
    names: Sequence[str], keys: Sequence[Optional[Tensor]]
) -> List[Tuple[str, Tensor]]:
    """Return the samples' keys in each input that has rows, under its name, each name once."""
    found: Dict[str, Tensor] = {}
    for name, of_rows in zip(names, keys):  # noqa: B905 Python 3.9 has no strict
        if of_rows is not None:
            found.setdefault(name, of_rows)
    return list(found.items())


def returned_loss(result: Any) -> Optional[Tensor]:
    """Return the loss in what a model returned; None if it has none."""
    found = getattr(result, "loss", None)
    if found is None and isinstance(result, Mapping):
        found = result.get("loss")
    if found is None:
        parts = result if isinstance(result, (list, tuple)) else [result]
        scalars = [x for x in parts if _is_scalar(x)]
        found = scalars[0] if len(scalars) == 1 else None
    return found if isinstance(found, Tensor) and _is_scalar(found) else None


def _is_scalar(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dim() == 0 and x.is_floating_point()


def _copied(loss: Tensor) -> Tensor:
    # the script may well divide it, or sum it over ranks, in its place
    return loss.detach().to(torch.float64, copy=True)


def _mean(name: str, target: Tensor, kwargs: Mapping[str, Any], result: Tensor) -> Tensor:
    """Return the mean over what is predicted, FP64 `()`, whatever the reduction."""
    wide = _copied(result)
    reduction = kwargs.get("reduction", "mean")
    if reduction not in ("sum", "none"):
        return wide
    is_classes = name in _OF_CLASSES and not target.is_floating_point()
    count = (target != kwargs.get("ignore_index", -100)).sum() if is_classes else target.numel()
    return wide.sum() / count
