"""What the server of fresh processes has ready before it forks: a run would need a second for each.

Only imports, and a table of what is installed. No module of the user's, and nothing is computed
with tensors: a process that has met several threads can't be forked safely.
"""

import contextlib
import importlib

from stability.records.identity import environment_of_packages
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
environment_of_packages()
