"""The instrument on a training that is recorded, in its own process: `probe` of a recorded run.

It is `shadow` on the model that trains, and what it measures goes to the run's spool under the
names of any run. Where the recorder has put another attention in the place of
`scaled_dot_product_attention`, that one is the candidate, and the script's own runs beside it.
Evidence on the whole model's gradient needs the loss of a batch a second time, so there the model
must return it, as those of Hugging Face and nanoGPT do. Only this file of the recorder needs
`stability` in the script's environment. Leaves out what is done with the figures (`probed`).
"""

import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor, nn

from attention_kernels import MaskArguments
from stability.config.commands import GRADIENT_NEEDS
from stability.config.schema import ProbeConfig
from stability.intercept.session import Shadow, shadow
from stability.metrics.instability import crossings
from stability.probe.attention_registry import ResolvedAttention, resolve_attention
from stability.probe.captured_call import AttentionCall, BoundAttention
from stability.probe.measurements import StepMeasurements

__all__ = ["GivenCall", "Instrument", "attend_by", "script_own"]


class GivenCall(NamedTuple):
    """What the model was given in a pass that trains, and the dtype of autocast, if it was on."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    autocast: torch.dtype | None


class Instrument:
    """Looks at the model that trains; `asked` is JSON, as the launcher gives it.

    `write` takes a line of the spool, `apart` is a context in which the recorder looks away.
    `attention` is what the recorder has put in the place of the script's own `sdpa`; empty for
    nothing. What it calls while it is `marked` is PyTorch's own. `returned_loss` finds the loss in
    what a model returned, `state` gives the weights by name, `refusal` makes the error that ends a
    training which lacks what is needed, of a sentence.
    """

    def __init__(
        self,
        asked: str,
        write: Callable[[dict[str, Any]], None],
        apart: Callable[[], Any],
        returned_loss: Callable[[Any], Tensor | None],
        attention: str = "",
        sdpa: Callable[..., Tensor] | None = None,
        marked: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
        state: Callable[[], Mapping[str, Tensor]] = dict,
        refusal: Callable[[str], BaseException] = ValueError,
    ) -> None:
        self._state, self._refusal = state, refusal
        self._asked: dict[str, Any] = json.loads(asked)
        self._write, self._apart, self._returned_loss = write, apart, returned_loss
        self._attention, self._sdpa, self._marked = attention, sdpa, marked
        self._ends = ExitStack()
        self._session: Shadow | None = None
        self._model: nn.Module | None = None
        self._call: GivenCall | None = None
        self._watched: dict[str, float] = {}

    def begin(self, model: nn.Module, first_step: int = 0) -> None:
        """Look at `model` from now on, after `first_step` updates that were not looked at.

        ValueError, as of `shadow`, for one that can't be seen.
        """
        self._model = model
        every = int(self._asked.get("every", 10))
        gradient_every = int(self._asked.get("gradient_every", 0))
        loss = self._loss if gradient_every else None
        sinks = [self._take]
        if not self._attention:
            candidate = self._asked["candidate"]
            looking = shadow(
                *(model, candidate),
                every=every,
                gradient_every=gradient_every,
                loss=loss,
                sinks=sinks,
                first_step=first_step,
            )
        else:
            assert self._sdpa is not None
            config = ProbeConfig(every=every, gradient_every=gradient_every)
            looking = Shadow(
                *(model, config, [self._candidate(model)], None, sinks, first_step),
                loss=loss,
                baseline=partial(script_own, self._sdpa),
            ).running()
        self._session = self._ends.enter_context(looking)

    def _candidate(self, model: nn.Module) -> ResolvedAttention:
        """Return what the recorder has put in the place of the script's own."""
        found = resolve_attention(self._attention, next(model.parameters()).device)
        return replace(found, function=self._marked(found.function)) if self._marked else found

    def called(self, model: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        """Tell of a pass that trains; refused if its loss is needed, and not in its result."""
        every = int(self._asked.get("gradient_every", 0))
        if self._session is None or not every or model is not self._model:
            return
        if (self._session.steps + 1) % every:
            return
        self._call = self._given(model, args, kwargs, result)

    def _given(self, model: nn.Module, args: Any, kwargs: Any, result: Any) -> GivenCall:
        """Return what is needed to compute the loss of a pass once more; refused without one."""
        if self._returned_loss(result) is None:
            raise self._refusal(
                "probe.gradient_every of the arm, or --gradient-every of `stability record`: "
                f"{GRADIENT_NEEDS}, {type(model).__name__} returns {type(result).__name__}; let "
                "it return both, or leave gradient_every out, and the gradient is not measured"
            )
        kind = next(model.parameters()).device.type
        is_on = torch.is_autocast_enabled(kind)
        return GivenCall(args, dict(kwargs), torch.get_autocast_dtype(kind) if is_on else None)

    def step(self) -> None:
        """Tell that an update was made."""
        if self._session is not None:
            with self._apart():
                self._session.step()
            self._call = None

    def end(self) -> None:
        """Write what is left, and leave the model as it was."""
        self._session = None
        with self._apart():
            self._ends.close()

    def _loss(self) -> Tensor:
        """Compute the loss of the last batch once more."""
        model, call = self._model, self._call
        if call is None or model is None:
            raise ValueError(
                "probe.gradient_every: the model that trains was not called as a whole"
            )
        kind = next(model.parameters()).device.type
        with torch.autocast(kind, dtype=call.autocast, enabled=call.autocast is not None):
            loss = self._returned_loss(model(*call.args, **call.kwargs))
        assert loss is not None
        return loss

    def _take(self, step: int, measured: StepMeasurements) -> None:
        watched = measured.watched()
        found = crossings(watched, self._watched)
        self._watched |= watched
        self._write(
            {
                "kind": "probe",
                "step": step,
                "metrics": measured.metrics,
                "counts": measured.counts,
                "events": [
                    *(["finding", layer, text] for layer, text in measured.findings),
                    *(["alert", one.layer, one.text] for one in found),
                ],
            }
        )


def script_own(
    sdpa: Callable[..., Tensor], call: AttentionCall, primary: BoundAttention
) -> BoundAttention:
    """Return the script's own attention, with the mask of a call that another one has taken."""

    def attend(q: Tensor, k: Tensor, v: Tensor, **trained: Tensor) -> tuple[Tensor, None]:
        return attend_by(sdpa, q, k, v, **call.mask_with(**trained)), None

    return attend


def attend_by(
    sdpa: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, **mask: Unpack[MaskArguments]
) -> Tensor:
    """Attend by PyTorch's own function with a mask as `MaskArguments` says it."""
    return sdpa(
        q,
        k,
        v,
        attn_mask=mask.get("attn_mask"),
        is_causal=mask.get("causal", False),
        scale=mask.get("scale"),
        enable_gqa=q.shape[1] != k.shape[1],
    )
