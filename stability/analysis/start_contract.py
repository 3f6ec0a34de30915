"""Whether two recorded runs start alike in what does not train: buffers, moments, other models.

Leaves out the start weights themselves (`pair_contract`) and how the hashes are made
(`recorder.inside.start_parts`). Where neither run has these hashes, as of our own trainer, whose
config and code decide all of it, nothing is said.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from stability.analysis.environment_contract import TELLS_OF_CODE
from stability.analysis.pair_proof import ProofLine, compared
from stability.config.axes import groups_of, touches
from stability.records.manifest import Manifest

__all__ = ["start_part_lines"]

_NOT_HASHED = "not hashed"
_MOST_NAMES = 4
_WORDS = {
    "buffers": "the same buffers at the start",
    "optimizers": "the same state of the optimizers at the start",
    "models": "the same weights of models that do not train",
}


def start_part_lines(
    first: Manifest, second: Manifest, differences: Mapping[str, Any]
) -> Iterator[ProofLine]:
    """Compare what both runs tell of their start; `differences` are those of the configs.

    What differs is unproven, unless the change is meant to change the start or the optimizer. A
    buffer that the code of one run alone makes, as a causal mask, is part of a change of code.
    """
    is_of_code = touches(differences, TELLS_OF_CODE)
    for part, words in _WORDS.items():
        one, other = (x.resolved.get("start_parts", {}).get(part) for x in (first, second))
        if one is None or other is None:
            if one is not other:
                yield _doubt(part, f"{words} (of one run alone there are hashes)")
            continue
        if not (one or other):
            continue
        names = [x for x in sorted({*one, *other}) if _differs(one.get(x), other.get(x))]
        if part != "optimizers" and is_of_code:
            # more words follow a name where its buffer was set anew, or is another rank's
            names = [x for x in names if (x in one and x in other) or " " in x]
        if names and not _is_meant(part, differences):
            yield _doubt(part, f"{words} ({_some(names)})")
        else:
            yield compared(f"start {part}", "the same hashes", "the same hashes")


def _doubt(part: str, says: str) -> ProofLine:
    return replace(compared(f"start {part}", None, None), says=says)


def _differs(one: str | None, other: str | None) -> bool:
    return one != other or one == _NOT_HASHED


def _is_meant(part: str, differences: Mapping[str, Any]) -> bool:
    if touches(differences, ("changes.init",)):
        return True
    is_named = any(map(_names_optimizer, differences))
    return part == "optimizers" and (is_named or "optimizer" in groups_of(differences))


def _names_optimizer(path: str) -> bool:
    """Whether a value is called an optimizer, as `optim` and `optimizer.name`, and no part of one.

    Another `optimizer.lr` is no reason for other moments, nor is an `optimization_level`.
    """
    words = [word for word in re.split(r"[._\-]+", path.lower()) if word]
    while words and words[-1] in ("class", "cls", "name", "target", "type"):
        words.pop()
    return bool(words) and words[-1] in ("optim", "optimizer", "optimizers")


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return f"{', '.join(names[:_MOST_NAMES])}{more}: not the same on both sides, or not hashed"
