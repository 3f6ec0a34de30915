"""How the parts of the pair contract stand of two series of checkpoints that were adopted.

Each is proven, declared or unknown: a checkpoint shows its weights and, at step 0, its start; what
was changed is the user's word, and of batches, code and machine nothing is on record. Leaves out
the comparison of the files (`pair_contract`).
"""

from collections.abc import Iterator, Mapping
from typing import Any

from stability.analysis.pair_proof import ProofLine
from stability.config.axes import touches
from stability.config.commands import is_adopted
from stability.records.manifest import Manifest

__all__ = ["contract_text", "unknown_lines"]

NOT_DECLARED = "unknown"
"""What stands for a change that the user has not told."""


def contract_text(first: Manifest, second: Manifest, differences: Mapping[str, Any]) -> str:
    """Return a clause on each part of the contract, in the order proven, declared, unknown.

    Empty of runs that were no checkpoints alone.
    """
    if not all(is_adopted(manifest.config) for manifest in (first, second)):
        return ""
    proven, unknown = ["the same weights"], ["batches", "code and machine"]
    starts = [each.hashes.get("init_weights") for each in (first, second)]
    others = ""
    if all(starts) and starts[0] == starts[1]:
        proven.append("the same start")
    elif all(starts):
        others = "another start is proven; "
    else:
        unknown.insert(0, "the start")
    change = _declared(second)
    if change == NOT_DECLARED:
        unknown.insert(0, "the change")
    said = f"declared: {change}; " if change and change != NOT_DECLARED else ""
    said = said or ("declared: no change; " if not touches(differences, ("config",)) else "")
    return f"proven: {', '.join(proven)}; {others}{said}unknown: {', '.join(unknown)}"


def unknown_lines() -> Iterator[ProofLine]:
    """Give a line for each part of the contract of which no checkpoint tells."""
    for field in ("batches", "code and machine"):
        yield ProofLine(field=field, first="nothing", second="nothing", sameness="unknown")


def _declared(manifest: Manifest) -> str:
    config: Any = manifest.config.get("config", {})
    return str(config.get("declared", ""))
