"""What the server of fresh processes has ready before it forks: a run would need a second for each.

The server is told of it by name (`processes`), so that nothing imports it. It holds imports and
tables of what is installed and imported: no module of the user's, and nothing is computed with
tensors, since a process that has met several threads can't be forked safely.
"""

import contextlib
import importlib

from stability.records.distributions import imported_packages
from stability.records.module_sources import own_modules
from stability.study import processes

__all__ = ["processes"]

_FIRST_USED_IN_A_RUN = (
    "safetensors.torch",
    "wandb.apis.public",
    # what `wandb.init` imports
    "requests",
    "opentelemetry.exporter.otlp.proto.http.metric_exporter",
)

for _name in _FIRST_USED_IN_A_RUN:
    with contextlib.suppress(ImportError):  # another version of W&B needs others
        importlib.import_module(_name)
imported_packages()
own_modules()
