"""The instrument on a training that is recorded, in its own process: `probe` of a recorded run.

It is `shadow` on the model that trains, and what it measures goes to the run's spool under the
names of any run. Where the recorder has put another attention in the place of
`scaled_dot_product_attention`, that one is the candidate, and the script's own runs beside it.
Evidence on the whole model's gradient calls the model once more on the batch. Where it returns the
loss, as those of Hugging Face and nanoGPT do, that is the loss; else the gradient that the script's
own backward() left at what the model returned is held fixed (`inside.returned_gradient`), and that
is a finding. Only this file of the recorder needs
`stability` in the script's environment. Leaves out what is done with the figures (`probed`).
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from attention_kernels import MaskArguments
from stability.config.commands import GRADIENT_NEEDS
from stability.config.schema import ProbeConfig
from stability.intercept.session import Shadow, shadow
from stability.metrics.instability import crossings
from stability.probe.attention_registry import ResolvedAttention, resolve_attention
from stability.probe.captured_call import AttentionCall, BoundAttention
from stability.probe.measurements import StepMeasurements
from stability.records.events import GRADIENT_IN_PART

if TYPE_CHECKING:  # in the process of a script it has another name
    from stability.recorder.inside.returned_gradient import ReturnedGradient

__all__ = ["GivenCall", "Instrument", "attend_by", "script_own"]

_OF_RETURNED_LOSS = (
    "seen in part: it is of the loss that the model returned, which is not all that the script's "
    "loss is made of"
)


class GivenCall(NamedTuple):
    """What the model was given in a pass that trains, and the dtype of autocast, if it was on."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    autocast: torch.dtype | None
    returned: "ReturnedGradient"
    """What the script's backward() leaves at what it returned."""


class Instrument:
    """Looks at the model that trains; `asked` is JSON, as the launcher gives it.

    `write` takes a line of the spool, `apart` is a context in which the recorder looks away.
    `attention` is what the recorder has put in the place of the script's own `sdpa`; empty for
    nothing. What it calls while it is `marked` is PyTorch's own. `returned_loss` finds the loss in
    what a model returned, and `keep_gradient` keeps the gradient there. `state` gives the weights
    by name, `refusal` makes the error that ends a training which lacks what is needed, of a
    sentence.
    """

    def __init__(
        self,
        asked: str,
        write: Callable[[dict[str, Any]], None],
        apart: Callable[[], Any],
        returned_loss: Callable[[Any], Tensor | None],
        keep_gradient: Callable[..., "ReturnedGradient"],
        attention: str = "",
        sdpa: Callable[..., Tensor] | None = None,
        marked: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
        state: Callable[[], Mapping[str, Tensor]] = dict,
        refusal: Callable[[str], BaseException] = ValueError,
    ) -> None:
        self._state, self._refusal = state, refusal
        self._asked: dict[str, Any] = json.loads(asked)
        self._write, self._apart = write, apart
        self._returned_loss, self._keep_gradient = returned_loss, keep_gradient
        self._attention, self._sdpa, self._marked = attention, sdpa, marked
        self._ends = ExitStack()
        self._session: Shadow | None = None
        self._model: nn.Module | None = None
        self._calls: list[GivenCall] = []
        """Those of the update, but for what came before one that a loss is made of."""
        self._call: GivenCall | None = None
        """The one that is called once more."""
        self._is_refusable = True
        """Whether no gradient was looked at yet."""
        self._findings: dict[str, bool] = {}
        """What is to be told of the gradient, and whether it was."""
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

    def called(self, model: nn.Module, args: Any, kwargs: Any, result: Any, begin: int) -> None:
        """Tell of a pass that trains, and of the place in autograd's record at which it began."""
        every = int(self._asked.get("gradient_every", 0))
        if self._session is None or not every or model is not self._model:
            return
        if (self._session.steps + 1) % every:
            return
        self._calls.append(self._given(model, args, kwargs, result, begin))

    def _entered(self, returned: "ReturnedGradient") -> None:
        """Tell that a loss is made of a call: of several, as micro-batches, the last is kept."""
        last = max(x.returned.begin for x in self._calls if x.returned.is_entered)
        for call in self._calls:
            if call.returned.begin < last:
                call.returned.drop()
        self._calls = [call for call in self._calls if not call.returned.is_dropped]

    def _given(
        self, model: nn.Module, args: Any, kwargs: Any, result: Any, begin: int
    ) -> GivenCall:
        """Return what is needed to take the gradient of a pass once more."""
        kind = next(model.parameters()).device.type
        is_on = torch.is_autocast_enabled(kind)
        weights = {id(x) for x in model.parameters()}
        return GivenCall(
            *tree_map(_kept, (args, dict(kwargs))),
            autocast=torch.get_autocast_dtype(kind) if is_on else None,
            returned=self._keep_gradient(
                *(result, begin, self._returned_loss(result)),
                is_weight=lambda x: id(x) in weights,
                entered=self._entered,
            ),
        )

    def step(self) -> None:
        """Tell that an update was made; the training ends if its first look lacks a gradient."""
        if self._session is None:
            return
        # one that no loss is made of, as of an evaluation, where there is another
        self._call = next((x for x in self._calls if x.returned.is_entered), None)
        if self._call is None and self._calls:
            self._call = self._calls[-1]
        if self._call is not None and self._is_refusable:
            self._check(self._call)
        with self._apart(), _own_saved_tensors():
            self._session.step()
        for call in self._calls:
            call.returned.drop()
        self._calls, self._call = [], None

    def _check(self, call: GivenCall) -> None:
        lacks = call.returned.lacks
        if lacks and not (call.returned.is_of_loss or call.returned.reaches_loss):
            raise self._refusal(
                "probe.gradient_every of the arm, or --gradient-every of `stability record`: "
                f"{GRADIENT_NEEDS}; of {type(self._model).__name__}: {lacks}; mend that, or "
                "leave gradient_every out, and the gradient is not measured"
            )
        self._is_refusable = False

    def end(self) -> None:
        """Write what is left, and leave the model as it was."""
        self._session = None
        with self._apart():
            self._ends.close()

    def _loss(self) -> Tensor:
        """Compute the loss of the last batch once more, or what has its gradient at the result."""
        model, call = self._model, self._call
        if call is None or model is None:
            raise ValueError(
                "probe.gradient_every: the model that trains was not called as a whole"
            )
        kind = next(model.parameters()).device.type
        with torch.autocast(kind, dtype=call.autocast, enabled=call.autocast is not None):
            result = model(*call.args, **call.kwargs)
        returned, loss = call.returned, self._returned_loss(result)
        if loss is not None and returned.is_of_loss:
            return loss
        if loss is not None and returned.reaches_loss and returned.lacks:
            self._findings.setdefault(f"{_OF_RETURNED_LOSS}: {returned.lacks}", False)
            return loss
        self._findings.setdefault(GRADIENT_IN_PART, False)
        return returned.applied_to(result)

    def _take(self, step: int, measured: StepMeasurements) -> None:
        watched = measured.watched()
        found = crossings(watched, self._watched)
        self._watched |= watched
        new = [text for text, was_told in self._findings.items() if not was_told]
        self._findings.update(dict.fromkeys(new, True))
        self._write(
            {
                "kind": "probe",
                "step": step,
                "metrics": measured.metrics,
                "counts": measured.counts,
                "events": [
                    *(["finding", layer, text] for layer, text in measured.findings),
                    *(["finding", "gradient", text] for text in new),
                    *(["alert", one.layer, one.text] for one in found),
                ],
            }
        )


@contextmanager
def _own_saved_tensors() -> Iterator[None]:
    """Inside, no hook of the script's is called for what autograd saves, as a checkpoint's is.

    A look is made where the next pass begins, which may be inside of such hooks; the innermost
    alone are called. Not by torch's own context, which the recorder watches.
    """
    autograd = torch._C._autograd  # pyright: ignore[reportAttributeAccessIssue]
    autograd._push_saved_tensors_default_hooks(_itself, _itself)
    try:
        yield
    finally:
        autograd._pop_saved_tensors_default_hooks()


def _itself(x: Any) -> Any:
    return x


def _kept(x: Any) -> Any:
    # a copy: a script may write its next batch into the same tensor before the look
    if type(x) is not Tensor:
        return x
    return x.detach().clone().requires_grad_(x.requires_grad)


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
