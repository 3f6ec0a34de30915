"""Arrays as a page holds them, base64 of their bytes, back to lists: for `json.loads`."""

import base64
from typing import Any

import numpy as np

__all__ = ["decode"]


def decode(found: dict[str, Any]) -> Any:
    """Return the list that `found` stands for, if it is plotly's typed array; else `found`."""
    if not {"dtype", "bdata"} <= found.keys():
        return found
    flat = np.frombuffer(base64.b64decode(found["bdata"]), np.dtype(found["dtype"]))
    shape = [int(length) for length in found.get("shape", "-1").split(",")]
    return flat.reshape(shape).tolist()
