"""The pair contract: two runs are compared only if they differ in one declared change.

Both start from the same bits and see the same text, the same batches and the same environment, and
their configs are equal but for one axis. The contract serves twice, from the same parts:

- a study refuses a run that breaks it (`axis_of`, `check_start`, `check_batches`), by a
  `ContractError` with the two values that differ;
- a reader takes nothing from two runs that break it (`pair_breach`), and is shown it
  (`prove_pair` for two runs, `study_hashes` for the runs of a study). Nothing is believed there:
  the files' checksums, both configs, both environments, the hashes, every line of both batch logs
  and what both have executed (`witness_contract`) are compared.

Everything here only reads.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from stability.analysis.adopted_contract import contract_text, unknown_lines
from stability.analysis.alike_records import given_start_line, rerun_line, start_line
from stability.analysis.batch_contract import batch_line, first_other_batch, label_lines
from stability.analysis.batch_inputs import first_other_labels, which_inputs
from stability.analysis.environment_contract import (
    is_free_entry,
    is_in_doubt,
    is_known_of_both,
    thread_lines,
)
from stability.analysis.launch_contract import launch_lines
from stability.analysis.pair_proof import OTHER_WEIGHTS, PairProof, ProofLine, compared
from stability.analysis.run_consistency import consistency_line, doubt_lines
from stability.analysis.start_contract import start_part_lines
from stability.analysis.witness_contract import (
    Testimony,
    testimony_of,
    witness_breach,
    witness_lines,
)
from stability.config.arms import INDEPENDENT_AXES, Arm
from stability.config.axes import (
    CHANGES_WEIGHTS,
    MANY,
    NO_AXIS,
    axes_of,
    change_problem,
    fixed_problem,
    present_name,
    touches,
    why_fixed,
)
from stability.config.commands import is_adopted, is_command
from stability.config.diff import RunConfig, are_same, diff, hash_without, leaves, recorded_config
from stability.config.roles import REFERENCE_AXES
from stability.config.schema import BASELINE, Role
from stability.records.identity import is_compared
from stability.records.manifest import ENDED, Manifest, read_manifest
from stability.records.metric_log import read_text
from stability.records.metric_names import BATCH_HASH
from stability.records.module_sources import UNHASHED
from stability.records.paths import RunPaths
from stability.records.run_files import damage

__all__ = [
    "HASHES",
    "ContractError",
    "axis_of",
    "check_batches",
    "check_labels",
    "check_start",
    "may_differ",
    "pair_breach",
    "prove_pair",
    "recorded_axis",
    "start_breach",
    "unseen_of_pair",
    "wrong_end",
]

HASHES = ("init_weights", "text", "held_out", "batches", "final_weights")
"""The hashes of a manifest, in the order of a run."""

AT_THE_END = ("batches", "hashes.held_out", "hashes.final_weights")
"""Fields of comparisons that are no doubt while a run trains: they are not on record yet."""

CHANGED_BY: dict[str, tuple[str, ...]] = {
    "start": ("start",),
    "init_weights": (
        *INDEPENDENT_AXES,
        *CHANGES_WEIGHTS,
        "model.init_std",
        "start",
        "changes.init",
    ),
    "text": (),
    "held_out": (),
    "batches": (
        "seed.order_offset",
        "train.batch_size",
        "train.trainer.accumulate_grad_batches",
        "changes.batches",
    ),
}
"""Axes that are meant to change a hash. Final weights may differ on every axis but `none`."""


class ContractError(ValueError):
    """Two runs are not a pair."""


def axis_of(arm: Arm, allow_many: bool = False) -> str:
    """Return the one axis that `arm` changes, a path of the config, `none` if nothing differs.

    `many` if it changes several and the study allows it, or if it is the reference: that one is
    plain attention *and* one precision higher, where the baseline's attention is another. It is
    what distances are measured from, so nobody asks which of the two changes moved it. Else several
    are a ContractError, and so is a change of what no arm may change.
    """
    return recorded_axis(f"arms.{arm.name}", arm.diff, arm.role, arm.change, allow_many=allow_many)


def recorded_axis(
    place: str,
    differences: Mapping[str, Any],
    role: Role | None,
    change: str = "",
    *,
    allow_many: bool = False,
) -> str:
    """Return the axis of an arm by its `differences`, as `axis_of`; `place` opens an error."""
    axes = axes_of(differences, change)
    # from a reference that trains otherwise, e.g. at another rate, all arms seem equally far
    may_be_many = set(axes) <= set(REFERENCE_AXES) if role == "reference" else allow_many
    is_many = len(axes) > 1 and not change and may_be_many
    said = fixed_problem(differences)
    said = said or ("" if is_many else change_problem(differences, change))
    if said:
        raise ContractError(f"{place}: {said}")
    return MANY if is_many else axes[0] if axes else NO_AXIS


def may_differ(name: str, differences: Mapping[str, Any]) -> bool:
    """Whether configs with these `differences` are meant to differ in the hash `name`."""
    # any difference may move the weights, and without one they must be the same bits
    if name == "final_weights":
        return bool(differences)
    return touches(differences, CHANGED_BY[name])


def check_start(baseline: Manifest, candidate: Manifest) -> None:
    """Check all that is known before the first step: environment, text, initial weights, config.

    ContractError names the field and both values.
    """
    config = recorded_config(baseline.config, "manifest.json")
    # the declared diff is not believed: with its fields taken out, the baseline's config must have
    # the hash that the candidate has recorded of its own
    less_axis = hash_without(config, candidate.diff)
    parts = [
        *_start_parts(baseline, candidate, candidate.diff),
        ("hashes.config_less_axis", less_axis, candidate.hashes.get("config_less_axis"), False),
    ]
    for field, expected, found, is_free in parts:
        if expected != found and not is_free:
            raise ContractError(
                f"{candidate.arm}, seed {candidate.seed}: {field} must be the {BASELINE}'s "
                f"{_quoted(expected)}, is {_quoted(found)}"
            )
    if line := _other_launch(baseline, candidate, candidate.diff):
        raise ContractError(
            f"{candidate.arm}, seed {candidate.seed}: {line.field} must be the {BASELINE}'s "
            f"{line.first}, is {line.second}"
        )


def start_breach(baseline: Manifest, candidate: Manifest, planned: Mapping[str, list[Any]]) -> str:
    """Return why two manifests are no pair that differs as `planned`; empty if they are one.

    For readers: it compares what both say of their start, and needs no file but the manifests.
    Configs are compared as they were written, so that those of an older version can be read.
    """
    if candidate.diff != planned:
        return (
            f"no pair: it was trained with the change {_quoted(candidate.diff)}, the study has "
            f"{_quoted(planned)}"
        )
    first, second = leaves(baseline.config), leaves(candidate.config)
    parts = [
        *_start_parts(baseline, candidate, planned),
        *(
            (f"config.{path}", first.get(path), second.get(path), path in planned)
            for path in dict.fromkeys([*first, *second])
            if not path.startswith(("probe.", "watch."))
        ),
    ]
    for field, expected, found, is_free in parts:
        if not is_free and not are_same(expected, found):
            return (
                f"no pair: {field} must be the {BASELINE}'s {_quoted(expected)}, is "
                f"{_quoted(found)}"
            )
    line = _other_launch(baseline, candidate, planned)
    return (
        f"no pair: {line.field} must be the {BASELINE}'s {line.first}, is {line.second}"
        if line
        else ""
    )


def _other_launch(
    baseline: Manifest, candidate: Manifest, differences: Mapping[str, Any]
) -> ProofLine | None:
    """Return the first thing that the two were started with and that had to be the same."""
    lines = launch_lines(baseline, candidate, differences)
    return next((line for line in lines if line.sameness == "different"), None)


def pair_breach(first: Testimony, second: Testimony, planned: Mapping[str, list[Any]]) -> str:
    """Return why two runs are no pair that differs as `planned`; empty if they are one.

    For whoever takes numbers from them, `verify` too: what both manifests say, of the start and of
    the batches, and what both runs executed, each held against its label and one another. `first`
    is the baseline's.
    """
    said = start_breach(first.manifest, second.manifest, planned)
    said = said or _batches_breach(first.manifest, second.manifest, planned)
    if said:
        return said
    executed = witness_breach(first, second, planned)
    return f"no pair: {executed}" if executed else ""


def unseen_of_pair(
    runs: tuple[RunPaths, RunPaths],
    manifests: tuple[Manifest, Manifest],
    planned: Mapping[str, list[Any]],
) -> tuple[str, ...]:
    """Return all that the records leave unproven of a pair, but for the witness.

    In the words of `prove_pair`, whose comparisons these are: what it reads of snapshots alone is
    the same or different, never unknown. Only recorders of trainings that are not ours leave
    something. `runs` and `manifests` begin with the baseline's. ValueError if a log can't be read.
    """
    if not is_command(manifests[1].config) or is_adopted(manifests[1].config):
        return ()
    lines = _told_lines(runs, manifests, dict(planned), are_whole=True, tells=False)
    have_ended = all(manifest.state in ENDED for manifest in manifests)
    return tuple(
        line.says or line.field
        for line in lines
        if line.sameness == "unknown" and (have_ended or line.field not in AT_THE_END)
    )


def _batches_breach(baseline: Manifest, candidate: Manifest, planned: Mapping[str, Any]) -> str:
    """Return why two runs of one length saw other batches; which one differs the logs tell."""
    expected, found = (each.hashes.get("batches") for each in (baseline, candidate))
    is_comparable = bool(expected and found) and baseline.step == candidate.step
    if not is_comparable or expected == found or may_differ("batches", planned):
        return ""
    return (
        f"no pair: hashes.batches must be the {BASELINE}'s {_quoted(expected)}, is {_quoted(found)}"
    )


def wrong_end(manifest: Manifest, planned: int) -> str:
    """Return what is wrong with the end that a run says it has come to; empty if nothing is."""
    if manifest.state != "finished" or manifest.step == planned:
        return ""
    return f"says that it finished at step {manifest.step} of {planned}"


def check_batches(baseline: RunPaths, candidate: RunPaths, step: int) -> None:
    """Check that both runs saw the same batches in the first `step` updates.

    Not for arms whose batches `may_differ`. ContractError names the first step that differs.
    """
    if step == 0:
        return
    first, second = (read_text(paths.metrics, BATCH_HASH) for paths in (baseline, candidate))
    # a running hash stays different after the first other batch, so its last value would decide;
    # all are read because the first step that differs is what a reader looks for
    at = first_other_batch(first, second, range(1, step + 1))
    if at is not None:
        where = which_inputs(baseline, candidate, at)
        raise ContractError(
            f"{candidate.arm}: batch {at} differs from the {BASELINE}'s{where}: running hash "
            f"{_quoted(second.get(at))}, {BASELINE} {_quoted(first.get(at))}"
        )


def prove_pair(
    first: RunPaths,
    second: RunPaths,
    find_damage: Callable[[RunPaths], list[str]] = damage,
    *,
    reads_weights: bool = True,
) -> PairProof:
    """Compare the records of two runs; `first` is taken as the baseline.

    `find_damage` is for who has summed a run's files already; without `reads_weights` no snapshot
    is read. ValueError if one of them is no run, or its manifest can't be read.
    """
    manifests = read_manifest(first.manifest), read_manifest(second.manifest)
    configs = [
        recorded_config(manifest.config, str(paths.manifest))
        for paths, manifest in zip((first, second), manifests, strict=True)
    ]
    differences = diff(*configs)
    records = [
        _records(paths, find_damage(paths), wrong_end(manifest, manifest.until or steps))
        for paths, manifest, steps in zip(
            (first, second), manifests, [_steps_of(config) for config in configs], strict=True
        )
    ]
    are_whole = all(line.sameness == "same" for line in records)
    # a manifest says what its arm declared: that is one change only if it holds all that differs
    said = present_name(manifests[1].axis)
    declared = said if said not in (MANY, NO_AXIS) else ""
    # what follows from the files themselves: damaged ones, or those that may not be read, tell none
    tells = are_whole and reads_weights
    lines = [
        *records,
        *_configs(configs, differences, declared, may_be_confounded=said == MANY),
        *_told_lines((first, second), manifests, differences, are_whole=are_whole, tells=tells),
        *_executed_lines((first, second), manifests, differences),
        # last: what two runs say of one another tells more
        *map(consistency_line, (first, second) if tells else (), manifests),
    ]
    return PairProof(
        first=str(first.root),
        second=str(second.root),
        axes=tuple(axes_of(differences, declared)),
        is_of_scripts=is_command(manifests[0].config),
        lines=tuple(lines),
        standing=contract_text(*manifests, differences),
    )


def _told_lines(
    runs: tuple[RunPaths, RunPaths],
    manifests: tuple[Manifest, Manifest],
    differences: dict[str, Any],
    *,
    are_whole: bool,
    tells: bool,
) -> Iterator[ProofLine]:
    """Give every comparison of two runs but those of their configs and of their witnesses.

    In the order of a run.
    """
    for field, a, b, is_free in _start_parts(*manifests, differences):
        yield compared(field, a, b, is_free=is_free)
    if tells:
        is_free = may_differ("init_weights", differences)
        yield from start_line(runs, manifests, is_free=is_free, differences=differences)
    if all(is_adopted(manifest.config) for manifest in manifests):
        yield _final_weights(*manifests, differences)
        yield from unknown_lines()
        return
    yield from thread_lines(*manifests, differences)
    yield from launch_lines(*manifests, differences)
    yield from start_part_lines(*manifests, differences)
    yield from _held_out(*manifests)
    yield from [OTHER_WEIGHTS] if touches(differences, CHANGES_WEIGHTS) else []
    yield from given_start_line(manifests[1])
    # a log that is not the one its manifest lists proves nothing about batches
    is_free = may_differ("batches", differences)
    if are_whole:
        yield batch_line(*runs, manifests, is_free=is_free)
    else:
        yield compared("batches", None, None)
    if are_whole:
        yield from label_lines(*runs, manifests, is_free=is_free)
    yield from doubt_lines(*manifests)
    if tells:
        yield from rerun_line(runs, manifests, differences)
    yield _final_weights(*manifests, differences)


def _executed_lines(
    runs: tuple[RunPaths, RunPaths],
    manifests: tuple[Manifest, Manifest],
    differences: Mapping[str, Any],
) -> Iterator[ProofLine]:
    if all(is_adopted(manifest.config) for manifest in manifests):
        return
    first, second = (testimony_of(*each) for each in zip(runs, manifests, strict=True))
    yield from witness_lines(first, second, differences)


def _steps_of(config: RunConfig) -> int:
    return config["train"]["steps"] if isinstance(config, Mapping) else config.train.steps


def _records(paths: RunPaths, found: list[str], end: str) -> ProofLine:
    """Say whether the run's files are those that its manifest lists, and its end the planned one.

    `found` is what is wrong with the files, `end` what is with the end.
    """
    wrong = [*found, *([f"{paths.manifest}: {end}"] if end else [])]
    return ProofLine(
        field=f"records of {paths.arm}, seed {paths.seed}",
        first=wrong[0] if wrong else "whole",
        second="whole",
        sameness="different" if wrong else "same",
    )


def _configs(
    configs: list[RunConfig],
    differences: dict[str, Any],
    declared: str,
    *,
    may_be_confounded: bool,
) -> Iterator[ProofLine]:
    on_axis = [path for path in differences if not why_fixed(path)]
    # with two axes changed neither is free: which of them moved the weights can't be told
    allowed = may_be_confounded or not change_problem(on_axis, declared)
    for path, (a, b) in differences.items():
        yield compared(f"config.{path}", a, b, is_free=allowed and path in on_axis)
    yield compared("config less the axis", *(hash_without(config, on_axis) for config in configs))


def _start_parts(
    first: Manifest, second: Manifest, differences: Mapping[str, Any]
) -> Iterator[tuple[str, Any, Any, bool]]:
    """Give what is known before the first step: its name, both values, whether they may differ.

    The hash of the initial weights is taken before a nudge; `differences` are those of the configs.
    """
    was, now = first.environment, second.environment
    for key in sorted(key for key in {*was, *now} if is_compared(key)):
        one, other = was.get(key), now.get(key)
        is_free = one != other and is_free_entry(key, first, second, differences)
        is_unhashed = UNHASHED in (one, other) and (is_free or one == other)
        is_doubtful = is_unhashed or is_in_doubt(key, first, second, differences)
        if is_doubtful or not is_known_of_both(key, first, second):
            one = other = None  # what one alone has on record proves nothing of both
        yield f"environment.{key}", one, other, is_free
    # the text of a command is what its batches are made of; what is held out decides no weight, so
    # that other data takes away the losses alone (`held_out_losses`)
    of_text = () if is_command(first.config) else ("text", "held_out")
    for key in (*of_text, "start", "init_weights"):
        is_free = may_differ(key, differences)
        one, other = first.hashes.get(key), second.hashes.get(key)
        if key == "start":
            if not (one or other):
                continue  # weights were drawn
            one, other = one or "", other or ""
        yield f"hashes.{key}", one, other, is_free
    if touches(differences, CHANGES_WEIGHTS):
        one, other = (each.hashes.get("shared_weights") for each in (first, second))
        yield "hashes.shared_weights", one, other, False


def _held_out(first: Manifest, second: Manifest) -> Iterator[ProofLine]:
    """Compare what two recorded runs were evaluated on, where that was seen of one."""
    expected, found = (each.hashes.get("held_out") for each in (first, second))
    if not is_command(first.config) or not (expected or found):
        return
    line = compared("hashes.held_out", expected, found)
    if line.sameness == "different":  # no weight depends on it
        says = "held-out losses of the same data (both are there, of other data)"
        line = replace(line, sameness="unknown", says=says)
    yield line


def _final_weights(first: Manifest, second: Manifest, differences: Mapping[str, Any]) -> ProofLine:
    is_free = may_differ("final_weights", differences) or first.step != second.step
    name = "final_weights"
    line = compared(
        f"hashes.{name}", first.hashes.get(name), second.hashes.get(name), is_free=is_free
    )
    if line.sameness != "different":
        return line
    return replace(
        line,
        says=f"{second.arm} changes nothing and ends in other weights than {first.arm}: the "
        "training is not deterministic",
    )


def check_labels(baseline: RunPaths, candidate: RunPaths, step: int) -> None:
    """Check that both losses were given the same labels in the first `step` updates, if seen.

    Not for arms whose batches `may_differ`. ContractError names the first step that differs.
    """
    other = first_other_labels(baseline, candidate, step)
    if other:
        raise ContractError(
            f"{candidate.arm}: batch {other[0]} differs from the {BASELINE}'s{other[1]}, which "
            "only the loss was given; where the script makes them with its model, say "
            "--may_change batches"
        )


def _quoted(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 72 else f"{text[:32]}...{text[-32:]}"
