"""The held-out loss of a recorded training: of what its script evaluates, which part is held out.

A loss that was told, by the user's function or by `recorder.held_out`, is taken as it is. Of what a
script evaluates by itself that part counts which is the same at every evaluation and of which no
sample was trained on; it is weighed by samples, over all ranks. What was drawn anew at each
evaluation, as random crops of the training and of another text in one loop, can't be told apart, so
none of it is used. Leaves out how evaluations are seen (`inside.evaluations`) and whether two runs
were evaluated on the same (`analysis.held_out_losses`).
"""

import hashlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from stability.recorder.trained_samples import read_trained_samples

__all__ = ["NAME_IT", "NONE_SEEN", "NO_LOSS", "SEEN_ONCE", "HeldOut", "read_held_out"]

NAME_IT = (
    "name a function that returns it, called with the model alone: `held_out: MODULE:FUNCTION` in "
    "the base of the study's YAML"
)
_ASK = f"{NAME_IT}, `--held-out MODULE:FUNCTION` of `stability record`"

_IN_OTHER_BITS = (
    "no sample was trained on twice in the same bits: whether held-out ones were trained on in "
    "others, as with noise or in another crop, can't be told"
)

NO_LOSS = "no held-out loss: "
"""How a note on why there is none begins."""
NONE_SEEN = (
    "no call of the model in evaluation mode (`model.eval()`) and without gradients was seen"
)
SEEN_ONCE = "the script evaluates once"

_UNKNOWN = (
    "whether the samples were trained on can't be told: the input by which the training's are "
    "known is not given there, or they are too many"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOut:
    """The held-out losses of a run by step, and what they were computed on."""

    losses: Mapping[int, float] = field(default_factory=dict)
    digest: str = ""
    """The same for two runs that were evaluated on the same; empty if that was not seen."""
    notes: Sequence[str] = ()
    """What was found and what was not, in sentences."""


class _Call(NamedTuple):
    """One loss that was computed in an evaluation."""

    digest: str
    samples: int
    loss: float


class _TrainedShare(NamedTuple):
    """Of the losses that are left out because samples of them were trained on."""

    losses: int
    samples: int
    trained: int
    """How many of the samples."""

    @property
    def is_all(self) -> bool:
        return self.trained >= self.samples


Lines = Sequence[Mapping[str, Any]]


def read_held_out(ranks: Sequence[Lines], folder: Path, steps: int) -> HeldOut:
    """Return the held-out losses in the lines that `ranks` left in `folder`, up to `steps`."""
    ends = [line for lines in ranks for line in lines if line["kind"] == "end"]
    asked = str(ends[0].get("held_out", "")) if ends else ""
    told = [[x for x in lines if x["kind"] == "held_out" and x["step"] <= steps] for lines in ranks]
    if any(told):
        return _told(told)
    if asked in ("none", "call"):
        said = f"{NO_LOSS}none was told by recorder.held_out(loss)"
        return HeldOut(notes=[said] if asked == "call" else [])
    evaluations = [_evaluations(lines, steps) for lines in ranks]
    by_step = {
        step: [call for rank in evaluations for call in rank.get(step, [])]
        for step in sorted({step for rank in evaluations for step in rank})
    }
    if not by_step:
        return HeldOut(notes=[f"{NO_LOSS}{NONE_SEEN}; {_ASK}"])
    whole = {step: calls for step, calls in by_step.items() if calls}
    if not whole:
        said = "the script evaluates its model, but no loss of that was seen"
        return HeldOut(notes=[f"{NO_LOSS}{said}; {_ASK}"])
    return _all(whole) if asked == "all" else _of_the_same(whole, ranks, folder)


def _told(ranks: Sequence[Lines]) -> HeldOut:
    """Return the losses that were told, those of ranks weighed by their samples."""
    losses, digests = {}, {}
    for step in sorted({line["step"] for lines in ranks for line in lines}):
        # the last one that a rank has told of a step
        lines = [[x for x in lines if x["step"] == step][-1:] for lines in ranks]
        found = [line for of_rank in lines for line in of_rank]
        losses[step] = _mean([_Call(x["hash"], x["samples"], x["loss"]) for x in found])
        hashes = [line["hash"] for line in found]
        digests[step] = _over_ranks(hashes) if all(hashes) else ""
    digest = _of_steps(digests) if all(digests.values()) else ""
    unseen = "what the held-out loss was computed on was not seen: that it is the same in both runs"
    return HeldOut(
        losses=losses, digest=digest, notes=[] if digest else [f"{unseen} can't be checked"]
    )


def _all(by_step: Mapping[int, Sequence[_Call]]) -> HeldOut:
    digests = {step: _digest(calls) for step, calls in by_step.items()}
    return HeldOut(
        losses={step: _mean(calls) for step, calls in by_step.items()},
        digest=_of_steps(digests) if all(digests.values()) else "",
        notes=[f"held out: all that the script evaluates, at {_count(len(by_step), 'step')}"],
    )


def _of_the_same(
    by_step: Mapping[int, Sequence[_Call]], ranks: Sequence[Lines], folder: Path
) -> HeldOut:
    """Return the loss of the calls that are the same at every step, less those trained on."""
    if len(by_step) < 2:
        said = f"{SEEN_ONCE}, so that which part is the same each time can't be told"
        return HeldOut(notes=[f"{NO_LOSS}{said}; {_ASK}, or say `held_out: all` if none trains"])
    trained = read_trained_samples(ranks, folder)
    known = trained.calls
    # what is evaluated before the training is often less, as a trial
    later = [Counter(x.digest for x in calls) for step, calls in by_step.items() if step]
    shared = later[0] if later else Counter(x.digest for x in next(iter(by_step.values())))
    for counts in later[1:]:
        shared &= counts
    if not shared or "" in shared:
        what = "other samples at each step" if shared.keys() != {""} else "nothing that was seen"
        said = f"the script evaluates {what}, so what of it is held out can't be told"
        return HeldOut(notes=[f"{NO_LOSS}{said}; {_ASK}, or say `held_out: all` if none trains"])
    used = Counter({digest: n for digest, n in shared.items() if known.get(digest) == 0})
    unknown = shared.total() - sum(shared[digest] for digest in known)
    sizes = {call.digest: call.samples for calls in by_step.values() for call in calls}
    left_out = Counter({digest: n for digest, n in shared.items() if known.get(digest)})
    share = _TrainedShare(
        losses=left_out.total(),
        samples=sum(n * sizes[digest] for digest, n in left_out.items()),
        trained=sum(n * known[digest] for digest, n in left_out.items()),
    )
    if not used:
        said = _all_left_out(share)
        if unknown:
            said = f"for {unknown} of {shared.total()} losses {_UNKNOWN}"
        return HeldOut(notes=[f"{NO_LOSS}{said}; {_ASK}"])
    chosen = {step: _chosen(calls, used) for step, calls in by_step.items()}
    losses = {step: _mean(calls) for step, calls in chosen.items() if calls}
    calls = next(x for x in chosen.values() if x)
    return HeldOut(
        losses=losses,
        digest=_digest(calls),
        notes=[
            _said(calls, shared.total(), share, unknown, len(losses)),
            *([] if trained.recur else [_IN_OTHER_BITS]),
        ],
    )


def _all_left_out(share: _TrainedShare) -> str:
    """Return why no loss is used, where each has samples that were trained on."""
    if share.is_all:
        return "all that the script evaluates at every evaluation was trained on"
    return (
        f"{share.trained:,} of the {share.samples:,} samples that the script evaluates at every "
        "evaluation were trained on, at least one in each of its losses, and such a loss is not "
        "used"
    )


def _said(
    calls: Sequence[_Call], losses: int, share: _TrainedShare, unknown: int, steps: int
) -> str:
    samples = sum(call.samples for call in calls)
    said = (
        f"held out: {_count(samples, 'sample')} that the script evaluates at "
        f"{_count(steps, 'step')}"
    )
    if share.losses and share.is_all:
        said += f"; {share.losses} of {losses} losses are of samples it trains on, and left out"
    elif share.losses:
        said += (
            f"; {share.losses} of {losses} losses are left out: it trains on {share.trained:,} of "
            f"their {_count(share.samples, 'sample')}"
        )
    if unknown:
        said += f"; {unknown} of {losses} losses are left out: {_UNKNOWN}"
    return said


def _evaluations(lines: Lines, steps: int) -> dict[int, list[_Call]]:
    found: dict[int, list[_Call]] = {}
    for line in lines:
        if line["kind"] == "evaluated" and line["step"] <= steps:
            calls = [_Call(x["hash"], x["samples"], x["loss"]) for x in line["calls"]]
            found.setdefault(line["step"], []).extend(calls)
    return found


def _chosen(calls: Sequence[_Call], used: Counter[str]) -> list[_Call]:
    """Return the calls in `used`, as often as they stand there; none if one is lacking."""
    left, found = Counter(used), []
    for call in calls:
        if left[call.digest] > 0:
            left[call.digest] -= 1
            found.append(call)
    return [] if left.total() else found


def _mean(calls: Sequence[_Call]) -> float:
    total = sum(max(call.samples, 1) for call in calls)
    return sum(call.loss * max(call.samples, 1) for call in calls) / total


def _digest(calls: Sequence[_Call]) -> str:
    """Return a hash of what calls were computed on, in whatever order; empty if one is unseen."""
    if not all(call.digest for call in calls):
        return ""
    counts = Counter(call.digest for call in calls)
    # each of several ranks may have evaluated all of it
    times = math.gcd(*counts.values())
    return _hashed(sorted(f"{digest} {n // times}" for digest, n in counts.items()))


def _over_ranks(digests: Sequence[str]) -> str:
    """Return one hash of what all ranks were given: once, if each was given the same."""
    return _hashed(sorted(set(digests)))


def _of_steps(digests: Mapping[int, str]) -> str:
    """Return one hash for all steps: that of each step, where they are the same."""
    if len(set(digests.values())) == 1:
        return next(iter(digests.values()))
    return _hashed([f"{step} {digest}" for step, digest in sorted(digests.items())])


def _hashed(words: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(words).encode()).hexdigest()


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
