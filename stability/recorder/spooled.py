"""What the processes of a training left in their spool, put together.

Leaves out how they came there (`inside`) and the record that is made of it (`writer`).
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stability.recorder.held_out import HeldOut, read_held_out
from stability.recorder.probed import read_probed
from stability.recorder.rank_endings import ending, first_to_end, have_ended

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "SpoolError",
    "Spooled",
    "Update",
    "dead_rank",
    "has_ended",
    "read_spool",
    "read_state",
    "refusal",
]

_MOST_NAMES = 4
"""How many weights a note names."""


class SpoolError(ValueError):
    """What was recorded is no training: in words, why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """One update, over all ranks."""

    step: int
    loss: float | None
    """Mean over ranks of what was back-propagated; None if no loss was seen."""
    batch: str
    """A hash of what the model was given, whatever the order; empty if nothing was seen."""
    samples: int
    skipped: bool
    order: str = ""
    """How often models were called on each rank, and a hash of the samples in their order."""
    inputs: Mapping[str, str] = field(default_factory=dict)
    """A hash of each of the batch's inputs by name, where there were several."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """A hash of each target that only the loss was given, by name; none if none was seen."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Spooled:
    """A training as its processes saw it."""

    updates: Sequence[Update]
    states: Mapping[int, Path]
    """By step, the file of the first rank's state."""
    times: Mapping[int, tuple[float, float]]
    """By step, when that state began to be taken and when it was written; not of the start."""
    clock: Mapping[str, Any]
    """Of a trial, when each of its updates has `ended`, and whether that it took long has ended it,
    `is_over` (`inside.update_clock`); empty of any other training."""
    memory: Mapping[str, int]
    """The most bytes held: of the `host` by all processes that train, each at its own worst moment,
    and of a `gpu` by one of them, if they had any; empty if all were killed."""
    environment: Mapping[str, Any]
    modules: Mapping[str, str]
    attention: Mapping[str, Any]
    """How many of its calls were `replaced`, `compiled` or `without_gradient`, and the fewest and
    the most `keys` of those that were replaced, and their `dtypes`, where that is known."""
    witness: Mapping[str, Any]
    """What the first rank tells of what it executed (`inside.witness`); empty if it was killed."""
    files: Sequence[str]
    """The paths of the user's own sources that were executed."""
    init: str
    """The hash of the start state, before a nudge."""
    given: Mapping[str, str]
    """Where the start state was given: the hash of the script's `own`."""
    owners: Sequence[str]
    names: Sequence[str]
    world: int
    rank_ends: Mapping[int, str]
    """The hash of what each rank but the first held after its last update."""
    script: str
    launched: Mapping[str, Any]
    """What the first rank was started with (`inside.launched`)."""
    left_out: Sequence[str]
    untold: Sequence[str]
    """What the loss was given beside the model's results and nothing is known of."""
    doubts: Sequence[str]
    """What was not seen of the training, and makes a pair unproven, in words."""
    held_out: HeldOut
    looks: Sequence[Mapping[str, Any]]
    """What a probe has measured, if one looked."""
    assay: Mapping[str, Any]
    """What planted faults have shown, if any were planted."""
    has_end: bool
    """Whether every process came to its own end."""
    ending: str
    """How it ended, in words."""
    buffers: Sequence[str] = ()
    """Which of the state are buffers."""
    set_anew: str = ""
    """The weight that the script has set after its start was given or nudged, if any."""
    start_parts: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Hashes by name of what else a training starts from: `buffers`, state of `optimizers`."""
    notes: Sequence[str] = field(default=())
    """What was not seen, in sentences."""

    @property
    def step(self) -> int:
        """How many updates were made."""
        return len(self.updates)


def read_spool(folder: Path) -> Spooled:
    """Return what the processes of a training left in `folder`.

    SpoolError, one sentence, if there was no training, or several at once that are no group.
    """
    ranks = _ranks_that_train(folder)
    begins = [next(line for line in lines if line["kind"] == "begin") for lines in ranks]
    _check_group(begins)
    first = min(range(len(ranks)), key=lambda index: begins[index]["rank"])
    begin, ends = begins[first], [_end_of(lines) for lines in ranks]
    updates, of_losses = _merged([_updates_of(lines) for lines in ranks], ends[first] or {})
    states = {
        line["step"]: folder / line["file"]
        for line in ranks[first]
        if line["kind"] == "state" and line["file"]
    }
    # what is hashed sooner is nearer to what was executed
    modules = {**(ends[first] or {}).get("modules", {}), **begin["modules"]}
    held_out = read_held_out(ranks, folder, len(updates))
    left_out = sorted({each for end in ends if end for each in end["left_out"]})
    untold = sorted({each for end in ends if end for each in end["untold"]})
    doubts = [*_doubts([end for end in ends if end]), *_other_ranks(begins)]
    doubts += [*_other_code(begins, ends), *_other_weights(begins, ends)]
    return Spooled(
        updates=updates,
        states={step: path for step, path in states.items() if step <= len(updates)},
        times={
            line["step"]: (line["began"], line["time"])
            for line in ranks[first]
            if line["kind"] == "state" and "began" in line
        },
        clock=(ends[first] or {}).get("clock", {}),
        memory=_memory([end.get("memory", {}) for end in ends if end]),
        environment={**begin["environment"], **(ends[first] or {}).get("code", {})},
        modules=modules,
        attention=(ends[first] or {}).get("attention", {}),
        witness=(ends[first] or {}).get("witness", {}),
        files=sorted({file for end in ends if end for file in end.get("files", ())}),
        init=begin["init"],
        given=begin.get("given", {}),
        buffers=begin.get("buffers", ()),
        set_anew=begin.get("set_anew", ""),
        owners=begin["owners"],
        names=begin["names"],
        world=begin["world"],
        rank_ends={
            begins[index]["rank"]: end["state"]
            for index, end in enumerate(ends)
            if index != first and end
        },
        script=begin["script"],
        launched=_launched(begin, ends[first] or {}),
        left_out=left_out,
        untold=untold,
        doubts=doubts,
        held_out=held_out,
        looks=read_probed(ranks[first]),
        assay=next((line for line in ranks[first] if line["kind"] == "assay"), {}),
        has_end=have_ended(ends),
        ending=ending(begins, ends),
        start_parts=_start_parts(begins),
        notes=[
            *_notes(updates, begin, ends[first] or {}, left_out),
            *of_losses,
            *([f"that labels are alike can't be checked: {', '.join(untold)}"] if untold else []),
            *(f"unproven: {each}" for each in doubts),
            *held_out.notes,
        ],
    )


def _ranks_that_train(folder: Path) -> list[list[dict[str, Any]]]:
    """Return the lines of each process that trained; SpoolError if there is none, or a refusal."""
    processes = [_read_lines(path) for path in sorted(folder.glob("rank-*.jsonl"))]
    ranks = [lines for lines in processes if any(line["kind"] == "begin" for line in lines)]
    if why := _refusal(processes):
        raise SpoolError(why)
    backwards = [x["backwards"] for lines in processes for x in lines if x["kind"] == "none"]
    if not ranks and backwards:
        said = f"{sum(backwards)} backward calls, but no optimizer step"
        said = said.replace("calls", "call", sum(backwards) == 1)
        raise SpoolError(f"{said}: weights must be updated by an optimizer of torch.optim")
    if not ranks:
        raise SpoolError(
            "no training was seen: no optimizer of torch.optim made a step in a Python process "
            "that this command started; python's options -I, -E and -S keep the recorder out"
        )
    return ranks


def refusal(folder: Path) -> str:
    """Return why a process was refused what was asked of its training; mostly empty."""
    return _refusal([_read_lines(path) for path in sorted(folder.glob("rank-*.jsonl"))])


def _refusal(processes: Sequence[Sequence[Mapping[str, Any]]]) -> str:
    refused = [x["why"] for lines in processes for x in lines if x["kind"] == "refused"]
    return refused[0] if refused else ""


def dead_rank(folder: Path, output: str) -> str:
    """Return which of a training's ranks ended first, and how; empty where that is not known.

    `output` is the last that its command has printed.
    """
    return first_to_end([_read_lines(x) for x in sorted(folder.glob("rank-*.jsonl"))], output)


def has_ended(folder: Path) -> bool:
    """Whether every rank of the group that trains has written its last line."""
    processes = [_read_lines(path) for path in folder.glob("rank-*.jsonl")]
    begins = [line for lines in processes for line in lines if line["kind"] == "begin"]
    ends = sum(_end_of(lines) is not None for lines in processes)
    return not begins or ends >= begins[0]["world"]


def read_state(path: Path) -> "dict[str, Tensor]":
    """Return a state by name, on the CPU."""
    import torch  # heavy

    return torch.load(path, map_location="cpu", weights_only=True)


def _read_lines(path: Path) -> list[dict[str, Any]]:
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    # a process that was killed may have left half a line
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _end_of(lines: list[dict[str, Any]]) -> dict[str, Any] | None:
    return next((line for line in lines if line["kind"] == "end"), None)


def _memory(held: Sequence[Mapping[str, int]]) -> dict[str, int]:
    found = {}
    for where, together in (("host", sum), ("gpu", max)):
        if counts := [each[where] for each in held if where in each]:
            found[where] = together(counts)
    return found


def _updates_of(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [line for line in lines if line["kind"] == "update"]


def _check_group(begins: list[dict[str, Any]]) -> None:
    ranks, world = sorted(begin["rank"] for begin in begins), begins[0]["world"]
    if len(begins) > 1 and world == 1:
        raise SpoolError(
            f"{len(begins)} processes trained, and they are no group of torch.distributed: record "
            "one training at a time"
        )
    if len(begins) > world and ranks == sorted([*range(world)] * (len(begins) // world)):
        raise SpoolError(
            f"{len(begins) // world} trainings of {world} ranks each ran: record one training at a "
            "time"
        )
    if len(begins) != world or ranks != list(range(world)):
        raise SpoolError(
            f"ranks 0 to {world - 1} must have trained, got {', '.join(map(str, ranks))}"
        )


def _merged(
    ranks: list[list[dict[str, Any]]], end: Mapping[str, Any]
) -> tuple[list[Update], list[str]]:
    """Return the updates that all ranks have made, and what is to be said of their losses."""
    found = []
    shared = list(zip(*ranks, strict=False))
    place, notes = _main_loss([lines[0] for lines in shared], end.get("optimizers", []))
    for lines in shared:
        losses = [line["losses"] for line in lines]
        # the loss of one optimizer of several, and else whichever there is
        losses = [
            value
            for of in losses
            for value in ([of.get(place)] if place else of.values())
            if value is not None
        ]
        hashes = [line["batch"] for line in lines]
        found.append(
            Update(
                step=lines[0]["step"],
                loss=sum(losses) / len(losses) if losses else None,
                batch=_summed(hashes) if all(hashes) else "",
                order=_in_order([line["order"] for line in lines]),
                inputs=_by_name([line["inputs"] for line in lines]),
                labels=_by_name([line["labels"] for line in lines]),
                samples=sum(line["samples"] for line in lines),
                skipped=any(line["skipped"] for line in lines),
            )
        )
    return found, notes


def _main_loss(lines: Sequence[Mapping[str, Any]], names: Sequence[str]) -> tuple[str, list[str]]:
    """Return whose loss an update's is where optimizers step on losses of their own, and a note.

    It is the optimizer that has one in most updates, the first to step of several. Empty for one
    loss an update.
    """
    together = [line for line in lines if line["backwards"] > 1 and line["optimizers"] > 1]
    if all(len(line["losses"]) < 2 for line in lines):
        most = max((line["backwards"] for line in together), default=0)
        many = max((line["optimizers"] for line in together), default=0)
        said = (
            f"{most} losses are back-propagated before {many} optimizers step, and whose they are "
            "can't be told: an update's loss is their sum"
        )
        return "", [said] if together else []
    counts = Counter(place for line in lines for place in line["losses"])
    place = min(counts, key=lambda each: (-counts[each], int(each)))
    of = [names[int(each)] if int(each) < len(names) else "" for each in sorted(counts, key=int)]
    own = of[sorted(counts, key=int).index(place)]
    others = [each for each in of if each != own]
    return place, [
        f"{len(counts)} optimizers step on losses of their own: an update's loss is that of the "
        f"one that begins with {own}, and not those of {_listed(others)}"
    ]


def _doubts(ends: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what makes a pair unproven, in words, by the last lines of all ranks."""
    later = sorted({name for end in ends for name in end.get("later", ())})
    kinds = ("doubts", "unhashed")
    doubts = sorted({each for end in ends for kind in kinds for each in end.get(kind, ())})
    changed = sorted({each for end in ends for each in end.get("changed", ())})
    if changed:
        doubts.append(
            f"what was executed of {_listed(changed)}: changed after the process had begun"
        )
    calls = ends[0].get("attention", {}) if ends else {}
    idle = calls.get("without_gradient", 0)
    if idle and not calls["replaced"] and not calls["compiled"]:
        doubts.append(
            f"that the attention which was replaced trains: none of its {idle} calls is "
            "back-propagated, as in an evaluation, a teacher or a model that is frozen"
        )
    if later:
        doubts.append(
            f"the {len(later)} weights that first train, or take another's place, after the first "
            f"update ({_listed(later)}): they are in no snapshot"
        )
    return doubts


def _other_ranks(begins: Sequence[Mapping[str, Any]]) -> list[str]:
    """Tell of ranks whose environment is another one than the first's, which is on record."""
    first = min(begins, key=lambda begin: begin["rank"])["environment"]
    said = []
    for begin in sorted(begins, key=lambda begin: begin["rank"]):
        own = begin["environment"]
        names = sorted(name for name in {*first, *own} if first.get(name) != own.get(name))
        if names:
            said.append(f"the same environment on rank {begin['rank']}: another {_listed(names)}")
    return said


def _other_weights(
    begins: Sequence[Mapping[str, Any]], ends: Sequence[Mapping[str, Any] | None]
) -> list[str]:
    """Tell of ranks that ended with other weights than the first, whose are on record."""
    ranks = {begin["rank"]: end["weights"] for begin, end in zip(begins, ends, strict=True) if end}
    others = sorted(rank for rank, found in ranks.items() if found != ranks[min(ranks)])
    if not others:
        return []
    return [
        f"the weights of rank {', '.join(map(str, others))}: they are others than the first's, as "
        "in a pipeline, under FSDP1 or between the averages of local SGD"
    ]


def _start_parts(begins: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, str]]:
    """Return what else ranks start from: the first one's, and where others have other hashes."""
    first, *others = sorted(begins, key=lambda begin: begin["rank"])
    parts = {}
    for part in ("buffers", "optimizers", "models"):
        own = parts[part] = dict(first.get(f"start_{part}", {}))
        for begin in others:
            told = begin.get(f"start_{part}", {})
            rank = f"on rank {begin['rank']}"
            own.update({f"{x} {rank}": told[x] for x in told if told[x] != own.get(x)})
    return parts


def _other_code(
    begins: Sequence[Mapping[str, Any]], ends: Sequence[Mapping[str, Any] | None]
) -> list[str]:
    """Tell of ranks that loaded other code of one name; one alone may load more than another."""
    ranks = sorted(
        (begin["rank"], (end or {}).get("code", {}))
        for begin, end in zip(begins, ends, strict=True)
    )
    (_, first), *others = ranks
    said = []
    for rank, own in others:
        names = [name for name in sorted({*first} & {*own}) if first[name] != own[name]]
        if names:
            said.append(f"the same code on rank {rank}: another {_listed(names)}")
    return said


def _launched(begin: Mapping[str, Any], end: Mapping[str, Any]) -> dict[str, Any]:
    told = begin.get("launched")
    return {**told, "written": end.get("written", ())} if told else {}


def _in_order(ranks: list[str]) -> str:
    calls = ",".join(each.partition(" ")[0] for each in ranks)
    return f"{calls} {hashlib.sha256(' '.join(ranks).encode()).hexdigest()[:16]}"


def _by_name(ranks: list[dict[str, str]]) -> dict[str, str]:
    names = sorted({name for hashes in ranks for name in hashes})
    return {name: _summed(hashes.get(name) for hashes in ranks) for name in names}


def _summed(hashes: Iterable[str | None]) -> str:
    return f"{sum(int(text, 16) for text in hashes if text) % 2**64:016x}"


def _notes(
    updates: list[Update], begin: Mapping[str, Any], end: Mapping[str, Any], left_out: list[str]
) -> list[str]:
    notes = []
    unseen = [update.step for update in updates if not update.batch]
    if unseen:
        notes.append(
            f"no training input was seen in {len(unseen)} of {len(updates)} updates: that both "
            "runs had the same batches can't be checked; a whole step that is compiled hides it"
        )
    if all(update.loss is None for update in updates):
        notes.append("no loss was seen: no scalar was back-propagated outside of a compiled graph")
    skipped = [str(update.step) for update in updates if update.skipped]
    if skipped:
        listed = ", ".join(skipped[:_MOST_NAMES]) + (", ..." if skipped[_MOST_NAMES:] else "")
        notes.append(f"the loss scaler left out {len(skipped)} of {len(updates)} updates: {listed}")
    if left_out:
        notes.append(f"not part of the batches' hash: {', '.join(left_out)}")
    if any(name.startswith("unowned_") for name in begin["names"]):
        notes.append("some weights belong to no module, and are named by their place")
    if begin["unowned"]:
        notes.append(
            f"{len(begin['unowned'])} weights belong to no optimizer: {_listed(begin['unowned'])}"
        )
    if len(begin["owners"]) > 1:
        notes.append(f"{len(begin['owners'])} models train: {', '.join(begin['owners'])}")
    return notes


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(sorted(names)[:_MOST_NAMES])
    return f"{shown}, ..." if len(names) > _MOST_NAMES else shown
