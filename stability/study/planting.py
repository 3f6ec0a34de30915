"""Plants known faults on an attention that was put into a script, in the process of that script.

The script is run again (`foreign_assay`) for the first updates of its training, in which it gives
its model the run's own batches. Then the run's snapshots take the place of the weights, and each
fault is measured on those batches (`probe.planted_faults`), by what the instrument measures the
candidate by: the calls are caught, and the gradient is isolated, as `shadow` does it. Loaded there
by its name. Leaves out whether it is the run's own training: what the recorder sees of it tells.
"""

from collections.abc import Hashable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from stability.analysis.assay import faults_due, is_settled
from stability.config.convert import from_dict
from stability.config.study import PolicyConfig
from stability.intercept.gradients import CaughtGradients
from stability.intercept.own_baseline import catching_as
from stability.intercept.replacement import AskedDtypes, Replacement
from stability.probe.attention_registry import ResolvedAttention
from stability.probe.gradient_evidence import AttentionRole, Gradients
from stability.probe.planted_faults import FaultLook, Plant, distinct_looks, plant_faults
from stability.recorder import instrument
from stability.recorder.inside.batch_hash import hash_batch
from stability.recorder.instrument import GivenCall, attend_by, script_own
from stability.records.assay import FaultRecord, unplanted
from stability.records.sealed_json import jsonable
from stability.records.snapshots import read_snapshot

if TYPE_CHECKING:  # in the process of a script it has another name
    from stability.recorder.inside.returned_gradient import ReturnedGradient

__all__ = ["Instrument"]

_MOST_BYTES = 2**33
"""The most that kept gradients may hold; no batch is added once they hold more."""


class Instrument(instrument.Instrument):
    """Keeps what the model is given in its first passes, and plants the faults at the end.

    `asked` also has `snapshots`, the paths of the weights to plant them at, the `policy`, the names
    of the `faults`, at how many `looks` at most, and `after` how many the first may be settled.
    """

    def begin(self, model: nn.Module, first_step: int = 0) -> None:
        """Keep what `model` is given from now on, whatever the step."""
        self._model = model
        self._calls = []
        self._modes: dict[nn.Module, bool] = {}

    def called(self, model: nn.Module, args: Any, kwargs: Any, result: Any, begin: int) -> None:
        """Tell of a pass that trains, and of the place in autograd's record at which it began."""
        is_full = sum(call.returned.nbytes for call in self._calls) > _MOST_BYTES
        if model is not self._model or is_full or len(self._calls) >= self._asked["looks"]:
            return
        self._modes = {module: module.training for module in model.modules()}
        given = self._given(model, args, kwargs, result, begin)
        args, kwargs = tree_map(_kept, (given.args, dict(given.kwargs)))
        self._calls.append(given._replace(args=args, kwargs=kwargs))

    def step(self) -> None:
        """Tell that an update was made."""
        for call in self._calls:
            call.returned.move_to_host()

    def _entered(self, returned: "ReturnedGradient") -> None:
        """Keep every call: the others' batches are looked at too."""

    def end(self) -> None:
        """Plant the faults, and write what they show, or why they could not be planted."""
        with self._apart():
            try:
                own, faults = self._planted()
            except (ValueError, RuntimeError) as error:
                said = str(error).strip().splitlines() or [type(error).__name__]
                own, faults = unplanted(said[0]), ()
            figures = {"own": asdict(own), "faults": [asdict(fault) for fault in faults]}
            self._write({"kind": "assay", **jsonable(figures)})

    def _planted(self) -> tuple[FaultRecord, tuple[FaultRecord, ...]]:
        assert self._model is not None
        assert self._sdpa is not None
        for module, mode in self._modes.items():
            module.training = mode
        candidate = self._candidate(self._model)
        # a fault moves results, and the statistics are none that is judged
        candidate = replace(candidate, gives_lse=False)
        taken = CaughtGradients(
            self._model,
            self._loss,
            Replacement(candidate=candidate, layers=("*",)),
            catching_as(partial(script_own, self._sdpa)),
            AskedDtypes(lambda layer, text: None),
        )
        weights = [read_snapshot(Path(path)) for path in self._asked["snapshots"]]
        batches = [_batch_of(call, place) for place, call in enumerate(self._calls)]
        looks = []
        for place, at in distinct_looks(batches, len(weights))[: self._asked["looks"]]:
            gradient = partial(self._gradient, taken, candidate, weights[at], self._calls[place])
            looks.append(FaultLook(gradient=gradient, operator=gradient))
        due = faults_due("")
        policy = from_dict(PolicyConfig, self._asked["policy"], "policy")
        after = self._asked["after"]
        return plant_faults(
            looks,
            {name: due[name] for name in self._asked["faults"]},
            partial(attend_by, self._sdpa),
            lambda fault: fault.share_looks > after and is_settled(policy, fault),
            self._told,
        )

    def _told(self, done: int, most: int, faults: int) -> None:
        self._write({"kind": "planted", "done": done, "most": most, "faults": faults})

    def _gradient(
        self,
        taken: CaughtGradients,
        candidate: ResolvedAttention,
        weights: dict[str, Tensor],
        call: GivenCall,
        plant: Plant,
        role: AttentionRole,
        is_isolated: bool,
    ) -> Gradients:
        args, kwargs = tree_map(_given_again, (call.args, call.kwargs))
        self._call = call._replace(args=args, kwargs=kwargs)
        with torch.no_grad():
            # nothing is put back: this process ends with the assay
            for name, x in self._state().items():
                if name in weights:  # a constant is in no snapshot
                    x.copy_(weights[name])
        planted = replace(candidate, function=plant(candidate.function))
        return taken.with_candidate(planted).of(role, is_isolated)


@dataclass(frozen=True, slots=True)
class _Kept:
    """A copy of a tensor in the host's memory, where there is room for that of every batch."""

    values: Tensor
    device: torch.device


def _kept(x: Any) -> Any:
    # a copy: a script may write its next batch into the same tensor
    return _Kept(x.detach().to("cpu", copy=True), x.device) if isinstance(x, Tensor) else x


def _given_again(x: Any) -> Any:
    return x.values.to(x.device, copy=True) if isinstance(x, _Kept) else x


def _batch_of(call: GivenCall, place: int) -> Hashable:
    """Return what is equal for calls with the same samples, in any order; else their place."""
    leaves = tree_leaves((call.args, call.kwargs))
    tensors = [x.values for x in leaves if isinstance(x, _Kept)]
    others = [x for x in leaves if not isinstance(x, _Kept)]
    # what a batch of another kind holds is not seen: the candidate's own figures stand guard there
    is_read = all(x is None or isinstance(x, bool | int | float | str) for x in others)
    is_dense = all(x.layout == torch.strided and not x.is_quantized for x in tensors)
    if not tensors or not is_read or not is_dense or any(x.is_nested for x in tensors):
        return place
    return f"{int(hash_batch(tensors)[0])}, {others}"
