"""Makes a study of checkpoints that exist already: a series of them is an arm.

Only what the checkpoints themselves show is proven: that the weights are alike in name and shape,
and whether both start from the same bits. What else the pair contract asks is declared by the user,
or unknown, and both are said. Leaves out how a file of weights is read (`records.weight_files`).
"""

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from stability.config.axes import NO_AXIS
from stability.config.commands import ADOPTED, training_config
from stability.config.convert import Place
from stability.config.diff import diff, hash_without
from stability.config.load import check_name
from stability.config.roles import role_of
from stability.config.schema import BASELINE
from stability.recorder.inside.names import without_wrappers
from stability.recorder.launch import Asked
from stability.records.dcp_folders import find_dcp
from stability.records.identity import hash_environment
from stability.records.manifest import Manifest
from stability.records.protocol import protocol_hash
from stability.records.run_files import RunFiles
from stability.records.snapshots import hash_state
from stability.records.weight_files import (
    HF_OLD_FILE,
    TORCH_SUFFIXES,
    Weights,
    open_weights,
    tied_names,
)
from stability.study.foreign import measure_study, writing
from stability.study.foreign_checks import check_final
from stability.study.foreign_plan import ForeignRun, check_free, given_role
from stability.study.recorded_plan import write_study
from stability.study.run import locked

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Adopted", "Adoption", "adopt", "plan_adoption"]

Standing = Literal["proven", "declared", "unknown", "not so"]
_MOST_NAMES = 4
_UNKNOWN = "its change is declared, not checked; batches, code and machine are unknown"
_LOW = ("bfloat16", "float16", "float8")


class _Place(NamedTuple):
    """Where a series goes on record."""

    study: Path
    arm: str
    seed: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Adoption:
    """Series of checkpoints that are to be arms, with what they share."""

    series: Mapping[str, Mapping[int, Path]]
    """By arm and step; the baseline first."""
    steps: Sequence[int]
    """Those that all have."""
    names: Mapping[str, Mapping[str, str]]
    """By arm, the name in its files of each weight that all have."""
    notes: Sequence[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Adopted:
    """A study that was made of checkpoints."""

    folder: Path
    contract: Sequence[tuple[str, Standing, str]]
    """Part, how it stands, and what there is to say."""
    notes: Sequence[str]


def plan_adoption(
    folders: Mapping[str, Path], renamed: Mapping[str, str] | None = None
) -> Adoption:
    """Find the checkpoints of each arm, and the steps and weights that all of them have.

    `renamed` maps what names begin with to what they are to begin with. ValueError if an arm has no
    checkpoints, or if they share no step, or no weight.
    """
    if len(folders) < 2 or BASELINE not in folders:
        raise ValueError(
            f"adopt: two series or more must be named, one of them {BASELINE}, got "
            f"{', '.join(folders) or 'none'}"
        )
    for name in folders:
        check_name(name, Place(source="adopt"))
    ordered = {BASELINE: folders[BASELINE], **folders}
    series = {name: _checkpoints(folder) for name, folder in ordered.items()}
    steps = sorted(set.intersection(*(set(found) for found in series.values())))
    if not steps or not steps[-1]:
        listed = "; ".join(f"{name}: {_listed(found)}" for name, found in series.items())
        raise ValueError(f"adopt: the series must share a step above 0, they have {listed}")
    notes = [
        f"{len(left)} checkpoints of {name} were left out, whose steps another arm has not: "
        f"{_listed(left)}"
        for name, found in series.items()
        if (left := sorted(found.keys() - set(steps)))
    ]
    opened = {name: open_weights(found[steps[0]]) for name, found in series.items()}
    names, said = _matched(opened, renamed or {})
    names, tied = _each_once(names, {name: found[steps[-1]] for name, found in series.items()})
    return Adoption(series=series, steps=steps, names=names, notes=[*notes, *said, *tied])


def adopt(
    adoption: Adoption,
    out: Path,
    study: str,
    seed: int = 0,
    *,
    changes: Mapping[str, str] | None = None,
    roles: Mapping[str, str] | None = None,
    question: str = "",
    urls: Mapping[str, str] | None = None,
) -> Adopted:
    """Write the study's records, and return how each part of the pair contract stands.

    `changes` says by arm what it declares to differ in, `roles` what it is there for, and `urls`
    where a series is of which the disk has a copy. ValueError for an arm that is not there, a role
    that can't be, or a folder that holds another run.
    """
    check_name(study, Place(source="adopt: study"), ())
    told = dict(changes or {})
    for name in [*told, *(roles or {})]:
        if name not in adoption.series or name == BASELINE:
            arms = ", ".join(x for x in adoption.series if x != BASELINE)
            raise ValueError(f"adopt: {name} must be one of the arms {arms}")
    starts = {name: _start(adoption, name) for name in adoption.series}
    base = _config(adoption, "", is_other_start=False)
    runs = [
        _run(
            adoption,
            base,
            _Place(out / study, name, seed),
            change=told.get(name, "unknown"),
            role=(roles or {}).get(name, ""),
            is_other_start=starts[name] != starts[BASELINE],
            question=question,
        )
        for name in adoption.series
    ]
    for run in runs:
        check_free(run)
        last = adoption.series[run.arm][adoption.steps[-1]]
        names = adoption.names[run.arm]
        final = functools.partial(_final_hash, last, names)
        check_final(run, final, f"{run.arm} needs the folder of its own seed, got {last.parent}")
    low = [_write(adoption, run, starts[run.arm], (urls or {}).get(run.arm, "")) for run in runs]
    notes = [*adoption.notes, *measure_study(runs[0]), *(note for note in low if note)]
    return Adopted(folder=out / study, contract=_contract(adoption, starts, told), notes=notes)


def _run(
    adoption: Adoption,
    base: Mapping[str, Any],
    place: _Place,
    *,
    change: str,
    role: str,
    is_other_start: bool,
    question: str,
) -> ForeignRun:
    name = place.arm
    declared = "" if name == BASELINE or role == "rerun" else change
    config = _config(adoption, declared, is_other_start=is_other_start)
    differences = diff(base, config)
    return ForeignRun(
        study=place.study.name,
        folder=place.study,
        arm=name,
        seed=place.seed,
        config=config,
        diff={path: list(values) for path, values in differences.items()},
        axis="config.declared" if declared else NO_AXIS,
        role=role_of(given_role(role), name, differences, "", Place(source=f"adopt: {name}")),
        asked=Asked(seed=place.seed),
        question=question or f"How far apart do the checkpoints of {place.study.name} lie?",
    )


def _config(adoption: Adoption, change: str, *, is_other_start: bool) -> dict[str, Any]:
    return training_config(
        {"program": ADOPTED, "config": {"declared": change}, "env": {}},
        steps=adoption.steps[-1],
        snapshot_steps=[step for step in adoption.steps if step],
        may_change=["init"] if is_other_start else [],
    )


def _write(adoption: Adoption, run: ForeignRun, start: str, url: str) -> str:
    """Write the record of one series; return what there is to say of its dtypes."""
    names, places = adoption.names[run.arm], adoption.series[run.arm]
    dtypes = {str(x).removeprefix("torch.") for x in _dtypes(places[adoption.steps[0]], names)}
    low = sorted(dtype for dtype in dtypes if dtype.startswith(_LOW))
    said = f"{run.arm} is stored in {', '.join(low)}, which hides what is below its last place"
    with locked(run.paths):
        place = url or str(places[adoption.steps[-1]].parent.resolve())
        files = RunFiles(run.paths, _manifest(adoption, run, place, start, said if low else ""))
        files.update()
        state = {}
        with writing(run, files, lambda step: None) as writer:
            for step in adoption.steps:
                state = _state(places[step], names)
                writer.state(step, state)
            writer.ended(hash_state(state))
    write_study(run, run.config)
    return said if low else ""


def _final_hash(place: Path, names: Mapping[str, str]) -> str:
    return hash_state(_state(place, names))


def _manifest(adoption: Adoption, run: ForeignRun, place: str, start: str, said: str) -> Manifest:
    return Manifest(
        study=run.study,
        arm=run.arm,
        seed=run.seed,
        axis=run.axis,
        config=dict(run.config),  # pyright: ignore[reportArgumentType] a command's
        diff={path: list(values) for path, values in run.diff.items()},
        environment={},
        resolved={
            "folder": place,
            "names": sorted(adoption.names[run.arm]),
            "models": [],
            "ranks": 1,
            "notes": [_UNKNOWN, *([said] if said else [])],
        },
        hashes={
            "config_less_axis": hash_without(run.config, run.diff),
            "environment": hash_environment({}),
            "protocol": protocol_hash(run.folder),
            **({"init_weights": start} if start else {}),
        },
        state="running",
        step=0,
        message="",
        until=adoption.steps[-1],
        role=run.role,
    )


def _contract(
    adoption: Adoption, starts: Mapping[str, str], changes: Mapping[str, str]
) -> list[tuple[str, Standing, str]]:
    others = [name for name in adoption.series if name != BASELINE]
    apart = [name for name in others if starts[name] != starts[BASELINE]]
    start: tuple[Standing, str] = ("proven", "the same bits at step 0")
    if not starts[BASELINE]:
        start = ("unknown", "no checkpoint of step 0")
    elif apart:
        start = ("not so", f"{', '.join(apart)} starts from other bits")
    silent = [name for name in others if name not in changes]
    change: tuple[Standing, str] = ("declared", "by you; nothing here can check it")
    if silent:
        change = ("unknown", f"not declared of {', '.join(silent)}; say it by --change")
    return [
        ("same weights", "proven", f"{len(adoption.names[BASELINE])} names and shapes"),
        ("same start", start[0], start[1]),
        ("one change", change[0], change[1]),
        ("same batches", "unknown", "checkpoints do not tell"),
        ("same code and machine", "unknown", "checkpoints do not tell"),
    ]


def _start(adoption: Adoption, name: str) -> str:
    """Return the hash of an arm's weights at step 0; empty without such a checkpoint."""
    if adoption.steps[0]:
        return ""
    return hash_state(_state(adoption.series[name][0], adoption.names[name]))


def _state(path: Path, names: Mapping[str, str]) -> "dict[str, Tensor]":
    weights = open_weights(path)
    missing = [given for given in names.values() if given not in weights]
    if missing:
        raise ValueError(f"{path}: must hold what the first checkpoint does, has no {missing[0]}")
    # a copy: what is mapped from a file is read anew each time
    return {name: weights[given].clone() for name, given in names.items()}


def _dtypes(path: Path, names: Mapping[str, str]) -> "list[Any]":
    dtypes = open_weights(path).dtypes
    return [dtypes[given] for given in names.values()]


def _checkpoints(folder: Path) -> dict[int, Path]:
    """Return the checkpoints in a folder by the step in their names."""
    if not folder.is_dir():
        raise ValueError(f"adopt: {folder}: must be a folder of checkpoints, is none")
    found: dict[int, Path] = {}
    for path in sorted(folder.iterdir()):
        # one that is being written, or whose writing was killed
        if path.name.startswith("."):
            continue
        is_file = path.suffix in (".safetensors", *TORCH_SUFFIXES)
        is_folder = path.is_dir() and (
            any(path.glob("*.safetensors*")) or (path / HF_OLD_FILE).is_file() or find_dcp(path)
        )
        step = _step_in(path.name if path.is_dir() else path.stem)
        if step is None or not (is_file or is_folder):
            continue
        if step in found:
            raise ValueError(
                f"adopt: {folder}: must hold one checkpoint a step, has {found[step].name} and "
                f"{path.name}"
            )
        found[step] = path
    if not found:
        held = ", ".join(sorted(path.name for path in folder.iterdir())[:_MOST_NAMES])
        raise ValueError(
            f"adopt: {folder}: must hold checkpoints with their step in the name, as "
            f"checkpoint-100/ or step_100.pt, holds {held or 'nothing'}"
        )
    return found


def _step_in(name: str) -> int | None:
    """Return the step that a file's name tells: the number after `step`, or its last one."""
    told = re.findall(r"(?:step|iter|checkpoint)[^0-9]{0,2}(\d+)", name, re.IGNORECASE)
    told = told or re.findall(r"\d+", name)
    return int(told[-1]) if told else None


def _matched(
    opened: Mapping[str, Weights], renamed: Mapping[str, str]
) -> tuple[dict[str, dict[str, str]], list[str]]:
    """Return by arm the own name of each weight that all have, and what is left out."""
    plain = {arm: _plain_names(weights, renamed) for arm, weights in opened.items()}
    first = plain[BASELINE]
    for arm, names in plain.items():
        if first.keys() & names.keys():
            continue
        # a head that wraps the model has one more word before each name
        for prefix in ("model.", "transformer."):
            if {f"{prefix}{name}" for name in names} & first.keys():
                plain[arm] = {f"{prefix}{name}": own for name, own in names.items()}
            elif any(name.removeprefix(prefix) in first for name in names):
                plain[arm] = {name.removeprefix(prefix): own for name, own in names.items()}
    shared = set.intersection(*(set(names) for names in plain.values()))
    if not shared:
        listed = "; ".join(f"{arm} has {_listed(sorted(names))}" for arm, names in plain.items())
        raise ValueError(
            f"adopt: the checkpoints share no name: {listed}; match them by --rename OLD=NEW"
        )
    for name in sorted(shared):
        shapes = {arm: opened[arm].shapes[plain[arm][name]] for arm in plain}
        if len(set(shapes.values())) > 1:
            listed = ", ".join(f"{arm} {shape}" for arm, shape in shapes.items())
            raise ValueError(f"adopt: {name} must have one shape, has {listed}")
    notes = [
        f"{len(left)} weights of {arm} were left out, which another arm has not: {_listed(left)}"
        for arm, names in plain.items()
        if (left := sorted(names.keys() - shared))
    ]
    return {arm: {x: names[x] for x in sorted(shared)} for arm, names in plain.items()}, notes


def _each_once(
    names: Mapping[str, Mapping[str, str]], last: Mapping[str, Path]
) -> tuple[dict[str, dict[str, str]], list[str]]:
    """Return the names less those of a weight that has another one in every arm, and say so.

    It is asked of each arm's `last` checkpoint: what begins alike moves apart, if it is two.
    """
    opened = [open_weights(last[arm]) for arm in names]
    each = list(zip(opened, names.values(), strict=True))
    held = all(given in weights for weights, own in each for given in own.values())
    place = {own: index for index, own in enumerate(opened[0])}
    # the first name in the state dict stands for the others
    order = sorted(names[BASELINE], key=lambda name: place.get(names[BASELINE][name], 0))
    shared = {name: [own[name] for own in names.values()] for name in order}
    tied = tied_names(opened, shared) if held else {}  # what lacks is told as it is read
    notes = [
        f"{name} is the same tensor as {stands}, which stands for both: a weight counts once"
        for name, stands in tied.items()
    ]
    kept = {arm: {x: y for x, y in own.items() if x not in tied} for arm, own in names.items()}
    return kept, notes


def _plain_names(weights: Weights, renamed: Mapping[str, str]) -> dict[str, str]:
    """Return by its name less wrappers the own name of each floating-point weight."""
    found = {}
    for own, dtype in weights.dtypes.items():
        if not dtype.is_floating_point:
            continue
        name = without_wrappers(own)
        for old, new in renamed.items():
            name = new + name.removeprefix(old) if name.startswith(old) else name
        found[name] = own
    while found and all(name.startswith("module.") for name in found):
        found = {name.removeprefix("module."): own for name, own in found.items()}
    return found


def _listed(items: Iterable[object]) -> str:
    shown = [str(item) for item in items]
    return ", ".join(shown[:_MOST_NAMES]) + (", ..." if len(shown) > _MOST_NAMES else "")
