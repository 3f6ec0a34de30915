"""What of a model's attention an instrument sees, layer by layer, so that nothing goes unsaid.

In the first step that is looked at, each module that looks like attention is seen, seen in part or
not seen, with why and the line that would mend it. A module looks like attention by the calls that
were caught in it, by what flows through it (`handwritten`), or by the name of its class. Leaves out
catching (`doors`) and measuring (`probe`).
"""

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

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

_DISABLE = "if it does attend, torch.compiler.disable on its forward lets it run eagerly"


_MOST_TOLD = 8
"""How many layers a warning names."""


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
        self._missed: dict[str, dict[str, None]] = {}
        """Reasons why calls of compiled graphs were not seen, by module."""
        self._catchers: list[Catcher] = []
        self._warned: set[str] = set()
        """The layers of which a warning has told."""
        self._is_over = False

    def watch(self, catcher: Catcher) -> None:
        """Look at what the model does in this catch, too."""

        def mode() -> HandWritten | None:
            return None if self._is_over else HandWritten(catcher, self._by_hand)

        self._catchers.append(catcher)
        catcher.modes.append(mode)

    def note(self, layer: str, unsupported: str) -> None:
        """Note a caught call, and what of it can't be repeated."""
        module = layer.partition("#")[0]
        reasons = self._caught.setdefault(module, {})
        if unsupported:
            reasons.setdefault(unsupported)

    def note_missed(self, layer: str, text: str) -> None:
        """Note that a call of a compiled graph was not seen, and why."""
        reasons = self._missed.setdefault(layer.partition("#")[0], {})
        reasons.setdefault(text.removeprefix("not seen: "))

    @property
    def has_run(self) -> bool:
        """Whether any module of the model has run, in compiled code or not."""
        return any(catcher.ran or catcher.met_compiled_code for catcher in self._catchers)

    @property
    def unsearched(self) -> bool:
        """Whether modules of the model may have run in compiled code, where little is seen."""
        names, ran = self._names_and_those_that_ran()
        runs = {name for name, x in names.items() if type(x).forward is not nn.Module.forward}
        return any(x.met_compiled_code for x in self._catchers) and not runs <= ran

    def end(self) -> tuple[LayerCoverage, ...]:
        """Look no further, and return every module that looks like attention, in their order."""
        self._is_over = True
        names, ran = self._names_and_those_that_ran()
        known = {*self._caught, *self._by_hand, *self._missed}
        compiled = any(catcher.met_compiled_code for catcher in self._catchers)
        layers = {name: self._of_layer(name) for name in names if name in known}
        # torch's own first: of what wraps it, it alone can be told what would mend it
        torchs = {name: m for name, m in names.items() if isinstance(m, nn.MultiheadAttention)}
        for name, module in (torchs | dict(names)).items():
            looks_like_it = _NAME.search(type(module).__name__)
            # attention inside another is listed once, where it was seen
            if looks_like_it and not any(_are_nested(name, other) for other in layers):
                layers[name] = _of_name(name, module, name in ran, compiled)
        return tuple(layers[name] for name in names if name in layers)

    def warn_of_graphs(self) -> None:
        """Warn of what compiled graphs hide, which may be before the weights are first changed."""
        if self._is_over or self._missed.keys() <= self._warned:
            return
        names, _ = self._names_and_those_that_ran()
        self.warn([self._of_layer(name) for name in names if name in self._missed])

    def warn(self, layers: Sequence[LayerCoverage]) -> None:
        """Warn, once for all of them, of layers that are not seen, or in part."""
        unseen = [one for one in layers if one.state != "seen" and one.layer not in self._warned]
        if not unseen:
            return
        self._warned.update(one.layer for one in unseen)
        told = "".join(f"\n  {one.layer}: {one}" for one in unseen[:_MOST_TOLD])
        more = len(unseen) - _MOST_TOLD
        told += f"\n  and {more} more, in `coverage`" if more > 0 else ""
        text = f"shadow: of {len(layers)} attention layers {len(unseen)} are not seen whole:{told}"
        # beyond this, the session's two methods
        warnings.warn(text, stacklevel=4)

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
        missed = "; ".join(self._missed.get(name, ()))
        if missed:
            state = "seen in part" if name in self._caught else "not seen"
            return LayerCoverage(layer=name, state=state, why=missed, is_found_anyway=True)
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


def _of_name(name: str, module: nn.Module, has_run: bool, compiled: bool) -> LayerCoverage:
    kind = type(module).__name__
    if not has_run and compiled:
        why = f"{kind} did not run eagerly, and no call of it was seen in a compiled graph"
        return LayerCoverage(layer=name, state="not seen", why=why, mend=_DISABLE)
    if not has_run:
        why = f"{kind} was not run in the step that was looked at"
        mend = "give steps=[...] in the first of which it runs"
        return LayerCoverage(layer=name, state="not seen", why=why, mend=mend)
    why = f"{kind} ran, and no call of attention was caught in it"
    mend = _WRAP
    if isinstance(module, nn.MultiheadAttention):
        mend = "call it with need_weights=False: else torch does not use SDPA in it"
    return LayerCoverage(layer=name, state="not seen", why=why, mend=mend)


def _are_nested(name: str, other: str) -> bool:
    return f"{name}.".startswith(f"{other}.") or other.startswith(f"{name}.")
