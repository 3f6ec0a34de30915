"""Opens every door at once: all the ways in which a model may call attention, in one context.

A model with parts of several makes calls of several kinds, and each is caught by the door it goes
through. A new way to catch calls is one more line in `_doors`.
"""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Literal

from torch import nn

from stability.intercept.catcher import Catcher, Door
from stability.intercept.coverage import Coverage
from stability.intercept.eager import check_eager, check_unscripted
from stability.intercept.library_functions import catch_late_imports
from stability.intercept.sdpa import catch_sdpa
from stability.intercept.transformers import catch_transformers
from stability.probe.captured_call import CallHandler

__all__ = ["catch_attention"]


@contextmanager
def catch_attention(
    model: nn.Module,
    handler: CallHandler,
    coverage: Coverage | None = None,
    *,
    compiled: Literal["refused", "left alone"] = "refused",
) -> Iterator[None]:
    """Inside, each attention call that `model` makes in a forward pass is handed to `handler`.

    The layer is the dotted path of the module that calls, without the segments of wrappers such as
    DDP; a second call of one module in the same forward pass gets `#1` behind it, and so on. Where
    the handler returns the primary's own out, the model computes the same bits as outside.
    Contexts may be nested; calls that an instrument makes to repeat one are not caught. `coverage`
    is told what else looks like attention. Compiled code is left alone: none of its calls is
    caught. ValueError in a forward pass of a model that has been scripted meanwhile, or compiled
    where that is "refused".
    """
    catcher = Catcher(model, handler)
    catcher.checks.append(check_eager if compiled == "refused" else check_unscripted)
    if coverage is not None:
        coverage.watch(catcher)
    with ExitStack() as opened:
        for door in _doors():
            opened.enter_context(door(catcher))
        opened.enter_context(catcher.watching())
        yield


def _doors() -> Iterator[Door]:
    yield catch_sdpa
    yield catch_late_imports
    # a model with parts of the library has imported it
    if "transformers" in sys.modules:
        yield catch_transformers
