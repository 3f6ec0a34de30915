"""Values as JSON can hold them: it has no NaN and no infinity, so those stand as text.

Leaves out writing them (`sealed_json`, `metric_log`).
"""

import math
from collections.abc import Mapping
from typing import Any

__all__ = ["NON_FINITE", "jsonable"]

NON_FINITE = frozenset({"nan", "inf", "-inf"})
"""What stands for a number that JSON does not have."""


def jsonable(content: Any) -> Any:
    """Return `content` with "nan", "inf" and "-inf" for such numbers, however deep they are."""
    if isinstance(content, Mapping):
        return {name: jsonable(value) for name, value in content.items()}
    if isinstance(content, list | tuple):
        return [jsonable(value) for value in content]
    if isinstance(content, float) and not math.isfinite(content):
        return str(content)
    return content
