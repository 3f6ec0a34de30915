"""Where a call of an attention kernel comes from: a compiled graph, or Python between two.

It is read off the stack of frames, in which code of Inductor, the autograd node of a graph and the
module that runs can be told. Leaves out what the call is (`compiled_graphs`) and what is done with
it (`compiled_taps`).
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

from stability.intercept.compiled_graphs import GraphRun, Operation, current_run, source_names

__all__ = ["KernelCaller", "compiled_caller", "python_caller"]

_TORCH = str(Path(torch.__file__).parent)

_OURS = (__file__, "intercept/compiled_taps.py", "torch/_ops.py")

_COMPILERS = ("torch/_inductor/compile_fx.py", "torch/_dynamo/convert_frame.py")


@dataclass(frozen=True, slots=True)
class KernelCaller:
    """Where a compiled graph calls a kernel, or Python in the middle of compiled code."""

    filename: str
    line: int
    graph: Any
    """The autograd node of the graph, the same in forward and backward; None without gradients."""
    module: nn.Module | None
    """The module whose forward was compiled, or calls what was; None in a backward."""
    run: GraphRun | None = None
    """The graph's forward; None in a backward, and where the graph is not known."""
    operation: Operation | None = None
    """What it was that is called, where the forward of a graph calls it and it is known."""
    is_python: bool = False
    """Whether no graph calls it; then `graph` is whether a gradient is recorded, else None."""

    @property
    def names(self) -> list[str]:
        """The names of the operations that are the call, and of what it reads."""
        return source_names(self.filename, self.line)

    @property
    def calls(self) -> dict[int, list[Any]]:
        """The calls that this run of the graph has made in its forward, by who observes them.

        They are kept on the node, which knows when nobody can ask for them any more.
        """
        if self.graph is None or self.is_python:
            return {}
        return self.graph.__dict__.setdefault("stability_calls", {})


def compiled_caller() -> KernelCaller | None:
    """Return where a compiled graph calls the kernel that is running; None for an eager call."""
    frames = _frames()[:40]
    files = [x.f_code.co_filename for x in frames]
    if any(x.endswith(_COMPILERS) for x in files):
        return None  # e.g. a constant that Inductor computes
    if not any("torch/_inductor/" in x or "/_aot_autograd/" in x for x in files[:8]):
        # a graph that Dynamo hands to no compiler runs as Python code without a file
        is_graph = any(x.startswith("<eval_with_key>") for x in files[:1])
        if not is_graph or not any("torch/_dynamo/" in x for x in files[:12]):
            return None
    # Inductor's code lies elsewhere than torch's, which may call a kernel in its stead
    code = next((x for x in files if not x.startswith(_TORCH)), files[0])
    line = frames[files.index(code)].f_lineno
    graph = None
    for one, file in zip(frames, files, strict=True):
        # beyond is who called the graph, which may be another one's backward
        if graph is not None or file.endswith("intercept/compiled_graphs.py"):
            break
        if "/_aot_autograd/" in file:
            graph = one.f_locals.get("ctx")
    return KernelCaller(code, line, graph, _module_above(frames), current_run())


def python_caller(records_gradient: bool) -> KernelCaller | None:
    """Return where Python calls the kernel that is running, None if the compiler does."""
    frames = _frames()
    module = _module_above(frames)
    is_compilers = any(x.f_code.co_filename.endswith(_COMPILERS) for x in frames)
    if module is None or is_compilers:
        return None
    return KernelCaller("", 0, records_gradient or None, module, is_python=True)


def _frames() -> list[FrameType]:
    """Return the frames above that of the kernel, innermost first."""
    frames: list[FrameType] = []
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        # the first is what keeps Dynamo away from the one that stands before the kernel
        is_disabling = not frames and file.endswith("_dynamo/eval_frame.py")
        if not is_disabling and not file.endswith(_OURS):
            frames.append(frame)
        frame = frame.f_back
    return frames


def _module_above(frames: list[FrameType]) -> nn.Module | None:
    for frame in frames:
        first = frame.f_locals.get(next(iter(frame.f_code.co_varnames), ""))
        if isinstance(first, nn.Module) and not isinstance(first, torch.fx.GraphModule):
            return first
    return None
