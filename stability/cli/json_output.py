"""What a verb prints for machines, with `--json`."""

import json
import sys
from typing import Any

__all__ = ["print_json"]


def print_json(content: Any) -> None:
    """Print `content` as JSON; ValueError for a number that JSON has not."""
    sys.stdout.write(json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
