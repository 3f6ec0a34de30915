"""What of a model's attention an instrument sees, layer by layer, so that nothing goes unsaid.

In the first step that is looked at, each module that looks like attention is seen, seen in part or
not seen, with why and the line that would mend it. A module looks like attention by the calls that
were caught in it, by what flows through it (`handwritten`), or by the name of its class. Leaves out
catching (`doors`) and measuring (`probe`).
"""

import re
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from stability.intercept.catcher import Catcher
from stability.intercept.handwritten import HandWritten

__all__ = ["Coverage", "LayerCoverage"]

State = Literal["seen", "seen in part", "not seen"]

_NAME = re.compile("attention|attn|(?-i:SDPA)|(?-i:MHA)", re.IGNORECASE)

_WRAP = (
    "wrap the function that computes it: attend = stability.attention_call(attend), to be called "
    "as attend(q, k, v, causal=...)"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerCoverage:
    """What is seen of the attention of one module, why not all of it, and what would mend that."""

    layer: str
    state: State
    why: str = ""
    mend: str = ""
    is_found_anyway: bool = False
    """Whether the probe finds as much by itself, call by call."""

    def __str__(self) -> str:
        """Return the state, the reason and the cure, without the layer."""
        said = self.state + (f": {self.why}" if self.why else "")
        return said + (f"; {self.mend}" if self.mend else "")


class Coverage:
    """Gathers what happens in one step, until `layers` is asked for."""

    def __init__(self) -> None:
        self._by_hand: set[str] = set()
        self._caught: dict[str, dict[str, None]] = {}
        """Reasons why a caught call could not be measured, by module; none if it could."""
        self._catchers: list[Catcher] = []
        self._is_over = False

    def watch(self, catcher: Catcher) -> None:
        """Look at what the model does in this catch, too."""

        def mode() -> AbstractContextManager[Any]:
            return nullcontext() if self._is_over else HandWritten(catcher, self._by_hand)

        self._catchers.append(catcher)
        catcher.modes.append(mode)

    def note(self, layer: str, unsupported: str) -> None:
        """Note a caught call, and what of it can't be repeated."""
        module = layer.partition("#")[0]
        reasons = self._caught.setdefault(module, {})
        if unsupported:
            reasons.setdefault(unsupported)

    def end(self) -> tuple[LayerCoverage, ...]:
        """Look no further, and return every module that looks like attention, in their order."""
        self._is_over = True
        names, ran = self._names_and_those_that_ran()
        known = {*self._caught, *self._by_hand}
        layers = {name: self._of_layer(name) for name in names if name in known}
        for name, module in names.items():
            looks_like_it = _NAME.search(type(module).__name__)
            # attention inside another is listed once, where it was seen
            if looks_like_it and not any(_are_nested(name, other) for other in layers):
                layers[name] = _of_name(name, module, name in ran)
        return tuple(layers[name] for name in names if name in layers)

    def _names_and_those_that_ran(self) -> tuple[Mapping[str, nn.Module], set[str]]:
        names: dict[str, nn.Module] = {}
        ran: set[str] = set()
        for catcher in self._catchers:
            # a wrapper has the name of what it wraps: the innermost is the module itself
            names |= {name: module for module, name in catcher.names.items()}
            ran |= {catcher.names[module] for module in catcher.ran}
        return names, ran

    def _of_layer(self, name: str) -> LayerCoverage:
        by_hand = "it multiplies the result of a softmax with a matrix by itself"
        if name not in self._caught:
            return LayerCoverage(layer=name, state="not seen", why=by_hand, mend=_WRAP)
        reasons = list(self._caught[name])
        if name in self._by_hand:
            why = "; ".join([*reasons, f"beside what was caught {by_hand}"])
            return LayerCoverage(layer=name, state="seen in part", why=why, mend=_WRAP)
        if reasons:
            why = f"its call can't be repeated: {', '.join(reasons)}"
            return LayerCoverage(layer=name, state="seen in part", why=why, is_found_anyway=True)
        return LayerCoverage(layer=name, state="seen")


def _of_name(name: str, module: nn.Module, has_run: bool) -> LayerCoverage:
    kind = type(module).__name__
    if not has_run:
        why = f"{kind} was not run in the step that was looked at"
        return LayerCoverage(layer=name, state="not seen", why=why)
    why = f"{kind} ran, and no call of attention was caught in it"
    mend = _WRAP
    if isinstance(module, nn.MultiheadAttention):
        mend = "call it with need_weights=False: else torch does not use SDPA in it"
    return LayerCoverage(layer=name, state="not seen", why=why, mend=mend)


def _are_nested(name: str, other: str) -> bool:
    return f"{name}.".startswith(f"{other}.") or other.startswith(f"{name}.")
