"""Whether the samples that a script evaluates were trained on, by any rank: keys are compared.

A key is a hash of a sample's row in one input. Two samples are the same where their rows are, in
the input that tells most of the training's samples apart: an attention mask, or a label, is many
samples'. Where an evaluation isn't given that input, by its name, nobody can tell. Leaves out how
keys are kept (`inside.evaluations`) and what is made of the answer (`held_out`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["TrainedSamples", "read_trained_samples"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedSamples:
    """What is known of the samples that were trained on."""

    calls: Mapping[str, int]
    """By the hash of what was evaluated, how many of its samples were trained on; without those of
    which it can't be told."""
    recur: bool
    """Whether a sample was trained on twice in the same bits."""


def read_trained_samples(
    ranks: Sequence[Sequence[Mapping[str, Any]]], folder: Path
) -> TrainedSamples:
    """Return what the keys say that the lines of `ranks` name, of files in `folder`."""
    import torch  # heavy

    files = [line["file"] for lines in ranks for line in lines if line["kind"] == "keys"]
    kept: list[dict[str, Any]] = [
        torch.load(folder / name, map_location="cpu", weights_only=True) for name in files
    ]
    names = {name for keys in kept for name in keys["trained"]}
    trained: dict[str, Tensor] = {
        name: torch.cat([k["trained"][name] for k in kept if name in k["trained"]]).unique()
        for name in names
    }
    times = {name: sum(keys["times"].get(name, 0) for keys in kept) for name in names}
    calls, told_by = {}, set()
    most = max(map(len, trained.values()), default=0)
    telling = [name for name in sorted(names) if len(trained[name]) == most]
    for digest, keys in ((d, k) for each in kept for d, k in each["evaluated"].items()):
        name = next((name for name in telling if name in keys), None)
        if name is not None:
            calls[digest] = int(torch.isin(keys[name], trained[name]).sum())
            told_by.add(name)
    return TrainedSamples(
        calls=calls, recur=all(times[name] > len(trained[name]) for name in told_by)
    )
