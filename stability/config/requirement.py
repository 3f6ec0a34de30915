"""The form in which a config dataclass refuses a value: whose it is, the rule, and the value.

Leaves out where the value stands in a file: `convert` adds that.
"""

from typing import Any

__all__ = ["require"]


def require(ok: bool, owner: str, rule: str, value: Any) -> None:
    """ValueError "<owner>: <rule>, got <value>" unless `ok`."""
    if not ok:
        raise ValueError(f"{owner}: {rule}, got {value!r}")
