"""Begins to record the process it is loaded in, as soon as that imports torch.

What is asked for stands in the environment (`recorder.launch` puts it there):

- `STABILITY_SPOOL`: the folder to write into
- `STABILITY_SEED`, `STABILITY_DETERMINISTIC`: set before the script's own first line about torch,
  which may then set others
- `STABILITY_STEPS`: after how many updates it ends; 0 for never
- `STABILITY_SNAPSHOTS`, `STABILITY_LOOKS`: the updates after which weights are kept, and those
  whose dtypes are looked at; empty for a series of their own
- `STABILITY_START`: the file of the weights that it is given
- `STABILITY_START_DTYPES`: the file of the dtypes that its own have to have
- `STABILITY_NUDGE`: units in the last place and the number of the draw, on top of these
- `STABILITY_ATTENTION`: what takes the place of `scaled_dot_product_attention`
- `STABILITY_HELD_OUT`: what the held-out loss is of
- `STABILITY_PROBE`: what the instrument looks at, as JSON
- `STABILITY_OBSERVES`: 0 where updates alone are counted
"""

from __future__ import annotations

import atexit
import os
import random
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Callable, Dict

from .launched import note_start, started

__all__ = ["start"]


def start() -> None:
    """Seed Python, note what it was given, and wait for torch and numpy to be imported."""
    note_start()
    random.seed(_seed())
    after: Dict[str, Callable[[ModuleType], None]] = {"torch": _record, "numpy": _seed_numpy}
    if os.environ.get("STABILITY_ATTENTION"):
        after["transformers.modeling_utils"] = _replace_eager
    sys.meta_path.insert(0, _After(after))


def _seed() -> int:
    return int(os.environ.get("STABILITY_SEED", "0"))


class _After(MetaPathFinder):
    """Calls a function once a module has been imported."""

    def __init__(self, after: Dict[str, Callable[[ModuleType], None]]) -> None:
        self._after = after

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return the module's own spec, whose loader then calls the function.

        A module may be looked for long before it is imported, or never be: transformers asks in
        this way whether there is a torch.
        """
        if name not in self._after:
            return None
        for finder in sys.meta_path:
            search = None if finder is self else getattr(finder, "find_spec", None)
            spec = None if search is None else search(name, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Then(spec.loader, self._imported)
                return spec
        return None

    def _imported(self, module: ModuleType) -> None:
        then = self._after.pop(module.__name__, None)  # once: a module may be loaded again
        if then is not None:
            then(module)


class _Then(Loader):
    """A module's own loader, and what comes after it."""

    def __init__(self, loader: Any, then: Callable[[ModuleType], None]) -> None:
        self._loader, self._then = loader, then

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> Any:
        """Make the module as its loader does."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Execute the module, then call."""
        spec = module.__spec__
        if spec is not None:
            spec.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._then(module)


def _seed_numpy(numpy: Any) -> None:
    numpy.random.seed(_seed() % 2**32)


def _replace_eager(modeling: Any) -> None:
    from .attention import replace_eager  # needs torch, which transformers has imported

    replace_eager(modeling)


def _record(torch: Any) -> None:
    started()
    torch.manual_seed(_seed())
    if os.environ.get("STABILITY_DETERMINISTIC") == "1":
        # warned of, not refused: the script's own words would hide behind the error
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.benchmark = False
    from .recorded import record_process  # needs torch

    atexit.register(record_process(dict(os.environ)))
