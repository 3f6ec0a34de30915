"""Paired training runs that show whether a change of numerics matters."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stability.callbacks.probe_callbacks import ShadowCallback
    from stability.integrations.lightning import RecorderCallback
    from stability.intercept.attention_call import attention_call
    from stability.intercept.module_calls import module_call
    from stability.intercept.session import shadow
    from stability.intercept.transformers_candidate import register_transformers
    from stability.study.record_call import record

__version__ = "0.2.0"
"""The version of both packages, as `stability --version` tells it."""

__all__ = [
    "RecorderCallback",
    "ShadowCallback",
    "__version__",
    "attention_call",
    "module_call",
    "record",
    "register_transformers",
    "shadow",
]

_HOMES = {
    "RecorderCallback": "stability.integrations.lightning",
    "ShadowCallback": "stability.callbacks.probe_callbacks",
    "attention_call": "stability.intercept.attention_call",
    "module_call": "stability.intercept.module_calls",
    "record": "stability.study.record_call",
    "register_transformers": "stability.intercept.transformers_candidate",
    "shadow": "stability.intercept.session",
}


def __getattr__(name: str) -> Any:
    """Load a public name when it is used: `import stability` stays light."""
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'stability' has no attribute {name!r}")
