"""Puts another attention in the place of `scaled_dot_product_attention`, by its name.

`sdpa:math` and its like choose PyTorch's backend; `module:function` is the user's own, called as
`function(q, k, v, *, causal, scale)`; any other name is one of stability's, which then must be
installed beside the script. A call that the new attention can't take is an error, never passed on
to the old one: a run would be in part what it says it is not. What the new one calls itself is
PyTorch's own, as where it only wraps that. `nn.MultiheadAttention`
calls the same function, and so do Hugging Face's models; those that are told to multiply by
themselves, as "eager", are led there by transformers' interface.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from contextlib import nullcontext
from threading import get_ident
from typing import Any, Callable, ContextManager, Dict, List, Optional, Set, Tuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import handle_torch_function, has_torch_function

from .given_start import StartRefused
from .older_torch import autocast_dtype, current_trace, is_compiling, only_backend

__all__ = ["BACKENDS", "NoAttentionError", "ReplacedCalls", "replace_attention", "replace_eager"]

BACKENDS = {
    "math": "MATH",
    "flash": "FLASH_ATTENTION",
    "efficient": "EFFICIENT_ATTENTION",
    "cudnn": "CUDNN_ATTENTION",
}
"""PyTorch's name of each backend."""
_NO_ATTENTION = (
    *("position_ids", "cache_position", "position_embeddings", "seq_idx", "token_type_ids"),
    *("mm_token_type_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"),
    *("use_cache", "past_key_value", "past_key_values", "output_attentions", "return_dict"),
    *("output_hidden_states", "output_router_logits", "num_items_in_batch", "logits_to_keep"),
    *("input_ids", "inputs_embeds", "labels", "shift_labels", "sliding_window", "deterministic"),
)
"""What Hugging Face's models hand on to an eager attention, which makes nothing of it: a window, or
several texts in a row, it is told by the mask."""


class NoAttentionError(StartRefused):
    """There is no such attention in the script's environment; the process ends."""


class ReplacedCalls:
    """How often an attention was replaced in this process."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.count = self.untrained = 0
        """Calls that can be back-propagated, and others, as of a teacher or an evaluation."""
        self.keys: Tuple[int, int] = (0, 0)
        """The fewest and the most keys of those that can be back-propagated, outside of graphs."""
        self.dtypes: Set[torch.dtype] = set()
        """What keys are in there, as autocast hands them on."""
        self.original: Optional[Callable[..., Tensor]] = None
        """PyTorch's own function."""
        self.is_watched = False
        """Whether an instrument looks at the calls."""
        self.function: Optional[Callable[..., Any]] = None
        """What takes the place, once it is imported; PyTorch's own backends need none."""
        self.refusing: Callable[[], ContextManager[Any]] = nullcontext
        """Tells of a `StartRefused`: a script may evaluate before anything else could."""
        self.callers: Set[str] = set()
        """The modules whose calls were replaced, outside of backward passes."""
        self._running: Set[int] = set()
        """The threads in which the function computes."""
        self._is_traced = False
        """Whether it is the function itself that is being compiled."""
        self._traced: Dict[Any, Dict[int, int]] = {}
        """How many calls each graph holds, by each attempt to trace it: the last one is the graph.
        How often a graph runs is not counted."""

    def is_running(self) -> bool:
        """Whether what is called now is called by the function: PyTorch's own is meant."""
        if is_compiling():
            return self._is_traced
        return get_ident() in self._running or self._is_in_its_backward()

    def _is_in_its_backward(self) -> bool:
        """Whether code of the function's own module calls it while gradients are computed.

        As a backward pass of its own, or a checkpoint inside of it. Where the model's own calls
        come from that module, too, nobody knows which of them is computed once more.
        """
        own = self.name.partition(":")[0]
        if torch._C._current_graph_task_id() == -1 or own in self.callers:
            return False
        return _caller() == own

    def marked(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function`, told apart from what is replaced while it runs."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if is_compiling():
                was, self._is_traced = self._is_traced, True
                out = function(*args, **kwargs)
                self._is_traced = was
                return out
            thread = get_ident()
            if thread in self._running:
                return function(*args, **kwargs)
            self._running.add(thread)
            try:
                return function(*args, **kwargs)
            finally:
                self._running.discard(thread)

        return call

    def prepare(self, device: torch.device) -> None:
        """Import what takes the place, before the first update; NoAttentionError if that fails.

        A graph can't import, and an import at the start may find a module that is half executed.
        """
        if self.function is None and not self.name.startswith("sdpa:"):
            with self.refusing():
                try:
                    self.function = self.marked(_imported(self.name, device))
                except ValueError as error:
                    raise NoAttentionError(str(error)) from error

    def told(self) -> Dict[str, Any]:
        """Return what the record's end says of it."""
        # of a graph that was compiled nobody knows with which lengths it ran
        keys = list(self.keys) if self.keys[1] and not self.traced else None
        return {
            "replaced": self.count,
            "compiled": self.traced,
            "without_gradient": self.untrained,
            **({"keys": keys, "dtypes": self._dtype_names()} if keys else {}),
        }

    def add(self, key: Any) -> None:
        """Tell of a call of these keys that can be back-propagated."""
        self.count += 1
        if isinstance(key, Tensor) and key.dim() > 1:
            keys = int(key.shape[-2])
            least, most = self.keys
            self.keys = (min(least or keys, keys), max(most, keys))
            self.dtypes.add(_autocast_dtype_of(key))

    def _dtype_names(self) -> List[str]:
        return sorted(str(dtype).partition(".")[2] for dtype in self.dtypes)

    @property
    def traced(self) -> int:
        """How many calls compiled graphs hold, each counted once for each graph."""
        return sum(attempts[max(attempts)] for attempts in self._traced.values())

    def add_traced(self) -> None:
        """Tell of a call that is traced now."""
        graph, attempt = current_trace()
        attempts = self._traced.setdefault(graph, {})
        attempts[attempt] = attempts.get(attempt, 0) + 1


def replace_attention(name: str) -> ReplacedCalls:
    """Replace the attention for the life of this process; ValueError if `name` can't be had."""
    original = functional.scaled_dot_product_attention
    calls = ReplacedCalls(name)
    calls.original = original
    attend = _attention(calls, original)

    def traced() -> bool:
        calls.add_traced()
        return True

    # dynamo calls it while it traces, and holds what it returns
    traced._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]

    @functools.wraps(original)
    def replaced(*args: Any, **kwargs: Any) -> Tensor:
        if calls.is_running():
            return original(*args, **kwargs)
        if is_compiling():
            if _trains(args, kwargs):
                traced()
        elif calls.is_watched and has_torch_function(args):
            # an instrument watches calls of torch's functions: this one stands for one of them
            return handle_torch_function(replaced, args, *args, **kwargs)
        elif _trains(args, kwargs):
            calls.add(args[1] if len(args) > 1 else kwargs.get("key"))
            if torch._C._current_graph_task_id() == -1:
                calls.callers.add(_caller())
        else:
            calls.untrained += 1
        return attend(*args, **kwargs)

    functional.scaled_dot_product_attention = replaced
    return calls


def _caller() -> str:
    """Return the module whose code has called, less those of torch and this one."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name != __name__ and name.partition(".")[0] != "torch":
            return name
        frame = frame.f_back
    return ""


def _trains(args: Any, kwargs: Any) -> bool:
    """Whether a call's result can be back-propagated."""
    given = [*args[:3], *kwargs.values()]
    return torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in given)


def replace_eager(modeling: Any) -> None:
    """Let models of Hugging Face that are told to be "eager" call `scaled_dot_product_attention`.

    `modeling` is the module `transformers.modeling_utils`. Versions without the interface, and
    models that don't ask it, go on multiplying by themselves, which is then told as 0 calls.
    """
    interface = getattr(modeling, "AttentionInterface", None)
    if interface is not None:
        interface.register("eager", _strict(modeling.sdpa_attention_forward))


def _strict(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return Hugging Face's call of SDPA, refusing what it would leave out without a word."""
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    named = [x.name for x in inspect.signature(forward).parameters.values() if x.kind not in kinds]
    known = frozenset([*named, *_NO_ATTENTION])

    @functools.wraps(forward)
    def strict(*args: Any, **kwargs: Any) -> Any:
        for name, value in kwargs.items():
            # `softcap` is named by some versions, which have no SDPA for it either
            if value is not None and (name not in known or name == "softcap"):
                raise ValueError(
                    f"attention: this model's eager attention is given {name}, which "
                    "scaled_dot_product_attention can't take: it can't be replaced"
                )
        return forward(*args, **kwargs)

    return strict


def _attention(calls: ReplacedCalls, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    kind, _, profile = calls.name.partition(":")
    if kind == "sdpa":
        return _of_backend(profile, original)

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: Any = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        is_uneven = is_causal and query.shape[-2] != key.shape[-2]
        for what, is_given, givers in (
            ("a mask", attn_mask is not None, "; padded batches and eager models give one"),
            ("dropout", dropout_p > 0, ""),
            # which PyTorch aligns at the first key, and others at the last
            ("a causal mask over more or fewer keys than queries", is_uneven, ""),
        ):
            if is_given:
                said = f"a call has {what}: it takes none, sdpa:... does{givers}"
                raise ValueError(f"attention {calls.name}: {said}")
        if calls.function is None:
            calls.prepare(query.device)
        q, k, v = _as_autocast(query), _as_autocast(key), _as_autocast(value)
        out = calls.function(q, k, v, causal=is_causal, scale=scale)  # pyright: ignore
        return out[0] if isinstance(out, tuple) else out

    return attend


def _of_backend(profile: str, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    backend = BACKENDS[profile]

    def attend(*args: Any, **kwargs: Any) -> Tensor:
        with only_backend(backend):
            return original(*args, **kwargs)

    return attend


def _as_autocast(x: Tensor) -> Tensor:
    """Return what autocast hands to SDPA: the same values in its dtype, where it is on."""
    return x.to(_autocast_dtype_of(x))


def _autocast_dtype_of(x: Tensor) -> torch.dtype:
    dtype = autocast_dtype(x.device.type)
    return x.dtype if dtype is None or x.dtype == torch.float64 else dtype


def _imported(name: str, device: torch.device) -> Callable[..., Any]:
    """Return one of stability's attentions, or the user's own function."""
    module, _, function = name.partition(":")
    try:
        from stability.probe.attention_registry import resolve_attention
    except ImportError:
        resolve_attention = None
    if resolve_attention is not None:
        return resolve_attention(name, device).function
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"attention {name}: must be a function that can be imported here, or one of "
            f"stability's, which is not installed in this environment: {error}"
        ) from error
