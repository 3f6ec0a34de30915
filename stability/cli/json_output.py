"""What a verb prints for machines, with `--json`."""

import json
import sys
from typing import Any

from stability.records.sealed_json import jsonable

__all__ = ["print_json"]


def print_json(content: Any) -> None:
    """Print `content` as JSON; numbers that JSON has not are text."""
    text = json.dumps(jsonable(content), indent=2, ensure_ascii=False, allow_nan=False)
    sys.stdout.write(text + "\n")
