"""Observes the attention calls of compiled graphs, which stay as they are.

An attention kernel (flash, efficient, cuDNN) is never fused: code that Inductor writes calls it
through torch's dispatcher, forward and backward. In a due step a kernel of ours stands there, calls
the one it replaces with the same arguments, and hands both arguments and results on. The graph is
the one that an unobserved run compiles, at due steps and others, compiled before or after; at steps
that are not due nothing stands there.

A backward call has all there is: q, k, v, out, dout and its gradients. It is joined with the call
of the forward by the memory of out, and by the LSE, bit by bit. Calls that Python makes
where a graph breaks are observed likewise. What can't be observed or named is reported: attention
that was decomposed into plain operators, flex_attention, replays of a CUDA graph, and graphs that
were compiled before `compiled_taps` or by another backend.

k and v are those that the kernel is given, which have q's heads where the model repeats them.
Leaves out eager calls (`doors`), where a call comes from (`compiled_callers`), and the comparison
(`probe`).
"""

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _current_graph_task_id
from torch.multiprocessing.reductions import StorageWeakRef

from attention_kernels import MaskArguments
from stability.intercept.catcher import is_in_caught_call
from stability.intercept.compiled_callers import KernelCaller, compiled_caller, python_caller
from stability.intercept.compiled_code import NOT_A_WAY_OUT, is_in_compiled_code
from stability.intercept.compiled_graphs import (
    GraphRun,
    Operation,
    alike,
    following_runs,
    naming_graphs,
)
from stability.intercept.layer_names import layer_names
from stability.probe.captured_call import AttentionCall, is_repeating, valid_rows

__all__ = ["CompiledTaps", "ObservedCall", "compiled_taps"]

_KERNELS = {
    "CPU": ("_scaled_dot_product_flash_attention_for_cpu",),
    "CUDA": (
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
    ),
}
"""The attention kernels of a device; each has a second one with `_backward` behind its name."""

_ALIASES = {"grad_out_": "grad_out", "log_sumexp": "logsumexp", "attn_bias": "attn_mask"}
"""What one kernel calls an argument, and what the others do."""

UNNAMED = (
    "attention in a graph that was compiled before shadow, or by another backend than Inductor, "
    "can't be told by layer; call torch.compiler.reset() inside `with shadow(...)`, before the "
    "first step, to compile it again"
)
_BY_HAND = (
    "not seen: in a compiled graph it multiplies the result of a softmax with a matrix by itself; "
    "stability.attention_call around the function that does, and torch.compiler.disable around that"
)
_OPERATOR = (
    "not seen: a compiled graph calls the operator {}; torch.compiler.disable on its layer's "
    "forward lets the function be called from Python"
)
_NOT_MET = {
    "scaled_dot_product_attention": (
        "not seen: its compiled graph calls no attention kernel, but plain operators in its place "
        "or the replay of a CUDA graph; torch.compiler.disable on its forward lets it run eagerly"
    ),
    "flex_attention": (
        "not seen: flex_attention is fused into code of its own in a compiled graph; "
        "torch.compiler.disable on its layer's forward lets it be called from Python"
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ObservedCall:
    """An attention call of a compiled graph; its tensors are the run's own, and valid only now."""

    call: AttentionCall
    out: Tensor
    dout: Tensor | None = None
    gradients: tuple[Tensor | None, ...] = ()
    """dq, dk and dv, None where the run needs none; empty where only the forward was observed."""


OnCall = Callable[[ObservedCall], None]

OnMissed = Callable[[str, str], None]
"""Is given a layer, empty where it is not known, and what was not seen of it, once a due step."""


@contextmanager
def compiled_taps(
    model: nn.Module,
    on_call: OnCall,
    on_missed: OnMissed,
    *,
    backward: bool = True,
    evaluation: bool = False,
) -> Iterator["CompiledTaps"]:
    """Let the compiled attention calls of `model` be observed; to be open before it is compiled.

    `model` is a module, compiled as a whole or in part, or to be compiled inside. While the result
    is `listening`, `on_call` is given each call whose gradient is recorded, once its backward has
    run; without `backward`, or under no_grad, once its forward has. A call of an evaluation (no
    gradient recorded, or a model in evaluation mode) may be without a backward, unless `evaluation`
    asks for these too. It runs under the autocast and autograd
    of the caller of `listening`, with no gradient recorded. What can't be observed goes to
    `on_missed`.
    """
    with naming_graphs():
        yield CompiledTaps(model, on_call, on_missed, backward=backward, evaluation=evaluation)


@dataclass(frozen=True, slots=True)
class _ForwardCall:
    """A call of the forward that waits for its backward."""

    layer: str
    operation: Operation | None
    """None for a call that Python makes in the middle of compiled code."""
    lse: Tensor
    """A copy: Inductor may write over the one that the kernel gave."""
    trains: bool
    storage: StorageWeakRef
    """The memory of out; if it is gone, a backward can only come after a recomputation."""


class CompiledTaps:
    """What `compiled_taps` yields: observes the calls of one model while `listening`."""

    def __init__(
        self,
        model: nn.Module,
        on_call: OnCall,
        on_missed: OnMissed,
        *,
        backward: bool,
        evaluation: bool = False,
    ) -> None:
        self._model = model
        self._evaluation = evaluation
        self._layers = layer_names(model)
        self._on_call = on_call
        self._on_missed = on_missed
        self._backward = backward
        self._made: list[_ForwardCall] = []
        """The calls of this step that have not been handed on."""
        self._waiting: dict[int, _ForwardCall] = {}
        """Those whose backward is to come, by where their out lies in memory."""
        self._whole: dict[str, bool] = {}
        """The layers of which a backward is to come, and whether one has come in this step."""
        self._told: set[tuple[str, str]] = set()

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Inside, which is a due step, calls are observed."""
        try:
            with following_runs(self._end_of_graph), _observing(self):
                yield
            self.end_step()
        finally:
            self._made.clear()
            self._waiting.clear()
            self._whole.clear()
            self._told.clear()

    def end_step(self) -> None:
        """Report the calls of which no backward has come, since none is to come any more."""
        for layer, is_whole in self._whole.items():
            if not is_whole:
                self._miss(layer, "not seen: no backward of it ran in a compiled graph")
        self._whole.clear()

    def take_forward(
        self, arguments: dict[str, Any], results: Any, caller: KernelCaller | None
    ) -> None:
        """Remember a call of a forward kernel; hand it on if no backward is asked for."""
        out, lse = results[0], results[1]
        # where out lies now, no other call's can be
        self._waiting.pop(out.data_ptr(), None)
        if caller is None:
            return
        find = self._found if caller.run or caller.is_python else self._found_again
        found = find(caller, lse)
        if found is None:
            return
        layer, operation = found
        trains = caller.graph is not None and self._model.training
        if not self._backward or caller.graph is None:
            self._hand_on(layer, trains, arguments, out)
        elif trains or self._evaluation:
            self._whole.setdefault(layer, False)
        if not self._backward:
            return
        storage = StorageWeakRef(out.untyped_storage())
        call = _ForwardCall(layer, operation, lse.clone(), trains, storage)
        self._made.append(call)
        # without a gradient it may still be computed again, by a reentrant checkpoint
        if caller.graph is not None:
            self._waiting[out.data_ptr()] = call
            if caller.run is not None:
                caller.calls.setdefault(id(self), []).append(call)

    def take_backward(
        self, arguments: dict[str, Any], results: Any, caller: KernelCaller | None
    ) -> None:
        """Hand on the call whose backward kernel has run."""
        place = arguments["out"].data_ptr()
        call = self._waiting.get(place)
        if not self._backward or (caller is None and not _is_of_python(call, arguments)):
            return
        self._waiting.pop(place, None)
        if call is None:
            assert caller is not None
            if id(self) in caller.calls:
                self._miss(
                    "", "not seen: a backward in a compiled graph, of no call of its forward"
                )
        elif not _same_bits(call.lse, arguments["logsumexp"]):
            self._miss(call.layer, "not seen: the LSE of its backward is not that of its forward")
        else:
            out, dout = arguments["out"], arguments["grad_out"]
            gradients = tuple(results[:3])
            self._whole[call.layer] = True
            self._hand_on(call.layer, call.trains, arguments, out, dout, gradients)
            # a recomputed call has taken the place of another
            self._made = [x for x in self._made if x.layer != call.layer]

    def _found(self, caller: KernelCaller, lse: Tensor) -> tuple[str, Operation | None] | None:
        """Return the layer of a call that a graph makes in a forward, None if not known."""
        run, operation = caller.run, caller.operation
        module = caller.module if caller.is_python else None
        if run and operation:
            module = run.module(operation)
        if module is None:
            self._miss("", "not seen: an attention call of a compiled graph, of no layer known")
            return None
        name = self._layers.get(module)  # None: another model's
        if name is None:
            return None
        own = [x for x in self._made if x.layer.partition("#")[0] == name]
        if _current_graph_task_id() == -1:
            count = sum(not x.storage.expired() for x in own)
            return (f"{name}#{count}" if count else name), operation
        # the backward computes the graph's forward again
        if len(own) > 1:
            own = [x for x in own if _same_bits(x.lse, lse)]
        if len(own) == 1:
            return own[0].layer, operation
        self._miss(name, "not seen: recomputed calls of it can't be told apart")
        return None

    def _found_again(
        self, caller: KernelCaller, lse: Tensor
    ) -> tuple[str, Operation | None] | None:
        """Return the layer of a call that the backward of a graph computes again."""
        made = caller.calls.get(id(self), [])
        if not made:
            is_own = caller.module is None or caller.module in self._layers
            if is_own and _current_graph_task_id() == -1:
                self._miss(self._layers.get(caller.module, ""), UNNAMED)  # pyright: ignore
            return None
        possible = alike([x.operation for x in made if x.operation], caller.names)
        calls = [x for x in made if x.operation in possible]
        if len(calls) > 1:
            calls = [x for x in calls if _same_bits(x.lse, lse)]
        if len(calls) == 1:
            return calls[0].layer, calls[0].operation
        self._miss("", "not seen: recomputed attention of a compiled graph, of no layer known")
        return None

    def _end_of_graph(self, run: GraphRun) -> None:
        if is_repeating() or is_in_caught_call():
            return
        for operation in run.not_met():
            name = self._layers.get(run.module(operation))  # pyright: ignore[reportArgumentType]
            if name is not None:
                text = _OPERATOR.format(operation.function)
                self._miss(name, _NOT_MET.get(operation.function, text))
        for module in run.modules_by_hand():
            name = self._layers.get(module)
            if name is not None:
                self._miss(name, _BY_HAND)

    def _hand_on(
        self,
        layer: str,
        trains: bool,
        arguments: dict[str, Any],
        out: Tensor,
        dout: Tensor | None = None,
        gradients: tuple[Tensor | None, ...] = (),
    ) -> None:
        q, k, v = (arguments[name] for name in ("query", "key", "value"))
        mask = arguments.get("attn_mask")
        call = AttentionCall(
            layer=layer,
            q=q,
            k=k,
            v=v,
            mask=_mask(arguments),
            valid=valid_rows(mask, q, k),
            unsupported=_unsupported(arguments),
            trains=trains,
        )
        self._on_call(ObservedCall(call=call, out=out, dout=dout, gradients=gradients))

    def _miss(self, layer: str, text: str) -> None:
        if (layer, text) not in self._told:
            self._told.add((layer, text))
            self._on_missed(layer, text)


def _mask(arguments: dict[str, Any]) -> MaskArguments:
    """Return a kernel's mask as ours: its `is_causal` is aligned top-left, ours bottom-right."""
    q, k, mask = arguments["query"], arguments["key"], arguments.get("attn_mask")
    causal = bool(arguments.get("is_causal"))
    result = MaskArguments(causal=causal and q.shape[2] == k.shape[2])
    if arguments.get("scale") is not None:
        result["scale"] = arguments["scale"]
    if causal and not result.get("causal"):
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        result["attn_mask"] = mask
    return result


def _unsupported(arguments: dict[str, Any]) -> str:
    dropout = arguments["dropout_p"]
    return f"dropout_p {dropout:g}; a shadow would drop other values" if dropout else ""


def _is_of_python(call: _ForwardCall | None, arguments: dict[str, Any]) -> bool:
    """Whether a backward that no graph calls is that of a call which no graph has made."""
    if call is None or call.operation is not None:
        return False
    return _same_bits(call.lse, arguments["logsumexp"])


def _same_bits(x: Tensor, y: Tensor) -> bool:
    """Return whether two LSEs are the same; a NaN is the same as itself."""
    integer = torch.int64 if x.dtype == torch.float64 else torch.int32
    return x.dtype == y.dtype and torch.equal(x.view(integer), y.view(integer))


_OBSERVERS: list[tuple[CompiledTaps, Any, Any]] = []
"""Those that listen, and the dispatch keys of the code around each."""
_LIBRARIES: list[torch.library.Library] = []
_LOCK = threading.Lock()
_LOCAL = threading.local()


@contextmanager
def _observing(taps: CompiledTaps) -> Iterator[None]:
    """Inside, the kernels' calls are given to `taps`; contexts may end in any order."""
    include = torch._C._dispatch_tls_local_include_set()
    # a dispatch mode that is on around us may be off where a kernel runs
    for key in (torch._C.DispatchKey.Python, torch._C.DispatchKey.PythonTLSSnapshot):
        include = include.remove(key)
    exclude = torch._C._dispatch_tls_local_exclude_set()
    observer = (taps, include, exclude)
    with _LOCK:
        if not _OBSERVERS:
            _LIBRARIES.append(_stand_in())
        _OBSERVERS.append(observer)
    try:
        yield
    finally:
        with _LOCK:
            _OBSERVERS[:] = [other for other in _OBSERVERS if other is not observer]
            if not _OBSERVERS:
                _LIBRARIES.pop()._destroy()


def _is_captured(device: str) -> bool:
    return device == "CUDA" and torch.cuda.is_current_stream_capturing()


def _stand_in() -> torch.library.Library:
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        # torch warns of the first kernel that is put in the place of another
        warnings.simplefilter("ignore")
        for device, kernels in _KERNELS.items():
            if device == "CUDA" and not torch.cuda.is_available():
                continue
            for name in kernels:
                _stand_before(library, name, device, CompiledTaps.take_forward)
                _stand_before(library, f"{name}_backward", device, CompiledTaps.take_backward)
    return library


def _stand_before(
    library: torch.library.Library,
    name: str,
    device: str,
    take: Callable[[CompiledTaps, dict[str, Any], Any, KernelCaller | None], None],
) -> None:
    operator = getattr(torch.ops.aten, name).default
    kernel = torch.library.get_kernel(operator, device)
    parameters = operator._schema.arguments

    def standing(keys: Any, *args: Any, **kwargs: Any) -> Any:
        results = kernel.call_boxed(keys, *args, **kwargs)
        # what a shadow calls is none of the model's, and a CUDA graph takes no looking into
        is_ours = getattr(_LOCAL, "is_busy", False) or is_repeating() or is_in_caught_call()
        if is_ours or _is_captured(device):
            return results
        given: dict[str, Any] = {str(x.name): x.default_value for x in parameters}
        given |= dict(zip(given, args, strict=False)) | kwargs
        named = {_ALIASES.get(name, name): value for name, value in given.items()}
        caller = compiled_caller()
        is_forward = take is CompiledTaps.take_forward
        if caller and caller.run and is_forward:
            caller = replace(caller, operation=caller.run.meet(caller.names))
        if caller is None and is_forward and is_in_compiled_code():
            qkv = [named[x] for x in ("query", "key", "value")]
            caller = python_caller(torch.is_grad_enabled() and any(x.requires_grad for x in qkv))
        _LOCAL.is_busy = True
        try:
            for taps, include, exclude in tuple(_OBSERVERS):
                # inside a kernel autograd is switched off, which a shadow needs
                with torch._C._ForceDispatchKeyGuard(include, exclude), torch.no_grad():
                    take(taps, named, results, caller)
        finally:
            _LOCAL.is_busy = False
        return results

    # where a graph breaks, Dynamo would compile this as well
    untraced = torch.compiler.disable(standing, reason=f"{NOT_A_WAY_OUT} an instrument")
    library.impl(name, untraced, device, with_keyset=True, allow_override=True)
