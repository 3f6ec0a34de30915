"""The pair contract: two runs are compared only if they differ in one declared change.

Both start from the same bits and see the same text, the same batches and the same environment, and
their configs are equal but for one axis. The contract serves twice, from the same parts:

- a study refuses a run that breaks it (`axis_of`, `check_start`, `check_batches`), by a
  `ContractError` with the two values that differ;
- a reader is shown it (`prove_pair` for two runs, `compare_hashes` for the runs of a study).
  Nothing is believed there: the files' checksums, both configs, both environments, the hashes and
  every line of both batch logs are compared.

Everything here only reads.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from stability.analysis.study_records import RecordedArm, RecordedRun, RecordedStudy
from stability.config.arms import INDEPENDENT_AXES, Arm
from stability.config.convert import from_dict
from stability.config.diff import changed_axes, diff, hash_without, touches
from stability.config.schema import AXES, BASELINE, ArmConfig, Axis
from stability.records.identity import may_be_missing
from stability.records.manifest import Manifest, read_manifest
from stability.records.metric_log import read_text
from stability.records.metric_names import BATCH_HASH
from stability.records.paths import RunPaths
from stability.records.run_files import damage

__all__ = [
    "HASHES",
    "ContractError",
    "PairProof",
    "ProofLine",
    "Sameness",
    "axis_of",
    "check_batches",
    "check_start",
    "compare_hashes",
    "environments_of",
    "may_differ",
    "prove_pair",
]

HASHES = ("init_weights", "text", "held_out", "batches", "final_weights")
"""The hashes of a manifest, in the order of a run."""

CHANGED_BY: dict[str, tuple[Axis, ...]] = {
    "init_weights": INDEPENDENT_AXES,
    "text": (),
    "held_out": (),
    "batches": ("data_order",),
}
"""Axes that are meant to change a hash. Final weights may differ on every axis but `none`."""

Sameness = Literal["same", "different by design", "different", "unknown"]
"""Two records of one thing; `different` breaks the contract, `unknown` is not on record yet."""


class ContractError(ValueError):
    """Two runs are not a pair."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProofLine:
    """One thing that was compared, and what each of the two runs says of it."""

    field: str
    first: str
    second: str
    sameness: Sameness


@dataclass(frozen=True, kw_only=True, slots=True)
class PairProof:
    """Two runs, the axes in which they differ, and every comparison in the order of a run."""

    first: str
    second: str
    axes: tuple[str, ...]
    lines: tuple[ProofLine, ...]

    @property
    def breach(self) -> ProofLine | None:
        """The first comparison that breaks the contract."""
        return next((line for line in self.lines if line.sameness == "different"), None)

    @property
    def sentence(self) -> str:
        """What the proof comes to, in one sentence."""
        if self.breach is not None:
            field, first, second = self.breach.field, self.breach.first, self.breach.second
            return f"no pair: {field} is {first} in one, {second} in the other"
        unknown = [line.field for line in self.lines if line.sameness == "unknown"]
        said = f"a pair: they differ in {self.axes[0]} alone" if self.axes else "an A/A pair"
        if len(self.axes) > 1:
            said = f"a confounded pair: they differ in {', '.join(self.axes)}"
        return f"{said}; not on record yet: {', '.join(unknown)}" if unknown else said

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-able values."""
        return {
            "first": self.first,
            "second": self.second,
            "axes": list(self.axes),
            "is_pair": self.breach is None,
            "sentence": self.sentence,
            "lines": [asdict(line) for line in self.lines],
        }


def axis_of(arm: Arm, allow_many: bool = False) -> Axis:
    """Return the one axis that `arm` changes, `none` if nothing differs.

    `many` if it changes several and the study allows it, or if it is the reference: that one is
    plain attention *and* one precision higher, where the baseline's attention is another. It is
    what distances are measured from, so nobody asks which of the two changes moved it. Else several
    are a ContractError, and so is a change that lies on no axis.
    """
    changed = changed_axes(arm.diff)
    strangers = [name for name in changed if name not in AXES]
    if strangers:
        values = " / ".join(map(repr, arm.diff[strangers[0]]))
        raise ContractError(
            f"arms.{arm.name}: {strangers[0]} differs from the {BASELINE} ({values}) and is no "
            f"axis; allowed: {', '.join(AXES)}"
        )
    if len(changed) > 1 and (allow_many or arm.role == "reference"):
        return "many"
    if len(changed) > 1:
        raise ContractError(
            f"arms.{arm.name}: must differ in one axis, differs in {', '.join(changed)}; "
            "make an arm of each, or say allow_many: true"
        )
    axes: list[Axis] = [axis for axis in AXES if axis in changed]
    return axes[0] if axes else "none"


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
    config = from_dict(ArmConfig, baseline.config, "manifest.json")
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


def check_batches(baseline: RunPaths, candidate: RunPaths, step: int) -> None:
    """Check that both runs saw the same batches in the first `step` updates.

    Not for arms whose batches `may_differ`. ContractError names the first step that differs.
    """
    if step == 0:
        return
    first, second = (read_text(paths.metrics, BATCH_HASH) for paths in (baseline, candidate))
    # a running hash stays different after the first other batch, so its last value would decide;
    # all are read because the first step that differs is what a reader looks for
    at = _first_other_batch(first, second, range(1, step + 1))
    if at is not None:
        raise ContractError(
            f"{candidate.arm}: batch {at} differs from the {BASELINE}'s: running hash "
            f"{_quoted(second.get(at))}, {BASELINE} {_quoted(first.get(at))}"
        )


def compare_hashes(
    arm: RecordedArm, baseline: RecordedArm | None
) -> dict[str, dict[int, ProofLine]]:
    """Return each hash of `arm` beside its baseline's, by name and seed; "" is not on record yet.

    `first` is the baseline's. Where one of the two has made fewer updates, by plan or because it
    diverged, its batches are held against the other's of that many, and its final weights are
    other ones by design.
    """

    def hash_of(run: RecordedRun | None, name: str) -> str:
        return run.manifest.hashes.get(name, "") if run and run.manifest else ""

    lines: dict[str, dict[int, ProofLine]] = {name: {} for name in HASHES}
    for name in HASHES:
        is_free = may_differ(name, arm.diff)
        for seed, run in arm.runs.items():
            paired = baseline.runs.get(seed) if baseline else None
            first, second = hash_of(paired, name), hash_of(run, name)
            is_short = bool(first and second) and _steps_of(paired) != _steps_of(run)
            if is_short and name == "batches":
                first, second = _batches_of_both(paired, run)
            may_be_other = is_free or (is_short and name == "final_weights")
            sameness = _sameness(first, second, may_be_other) if first and second else "unknown"
            lines[name][seed] = ProofLine(field=name, first=first, second=second, sameness=sameness)
    return lines


def _steps_of(run: RecordedRun | None) -> int:
    return run.manifest.step if run and run.manifest else 0


def _batches_of_both(first: RecordedRun | None, second: RecordedRun) -> tuple[str, str]:
    """Return the running hashes of two runs' batches after the updates that both have made."""
    shared = min(_steps_of(first), _steps_of(second))
    assert first is not None  # it has a hash
    found = []
    for run in (first, second):
        try:
            found.append(read_text(run.paths.metrics, BATCH_HASH).get(shared, ""))
        except (ValueError, OSError):  # a damaged log is told of elsewhere, and proves nothing
            found.append("")
    return found[0], found[1]


def environments_of(study: RecordedStudy) -> dict[str, list[Any]]:
    """Return the values found for each entry of the environment; there should be one of each."""
    found: dict[str, list[Any]] = {}
    for arm in study.arms:
        for run in arm.runs.values():
            for key, value in (run.manifest.environment if run.manifest else {}).items():
                if value not in found.setdefault(key, []):
                    found[key].append(value)
    return found


def prove_pair(first: RunPaths, second: RunPaths) -> PairProof:
    """Compare the records of two runs; `first` is taken as the baseline.

    ValueError if one of them is no run, or its manifest can't be read.
    """
    manifests = read_manifest(first.manifest), read_manifest(second.manifest)
    configs = [
        from_dict(ArmConfig, manifest.config, str(paths.manifest))
        for paths, manifest in zip((first, second), manifests, strict=True)
    ]
    differences = diff(*configs)
    records = [_records(first), _records(second)]
    are_whole = all(line.sameness == "same" for line in records)
    final = [manifest.hashes.get("final_weights") for manifest in manifests]
    lines = [
        *records,
        *_configs(configs, differences, may_be_confounded=manifests[1].axis == "many"),
        *(
            _line(field, a, b, is_free=is_free)
            for field, a, b, is_free in _start_parts(*manifests, differences)
        ),
        # a log that is not the one its manifest lists proves nothing about batches
        _batches(first, second, differences) if are_whole else _line("batches", None, None),
        _line(
            "hashes.final_weights",
            *final,
            is_free=may_differ("final_weights", differences)
            or manifests[0].step != manifests[1].step,
        ),
    ]
    return PairProof(
        first=str(first.root),
        second=str(second.root),
        axes=tuple(changed_axes(differences)),
        lines=tuple(lines),
    )


def _records(paths: RunPaths) -> ProofLine:
    """Compare the run's files with the checksums that its manifest lists."""
    found = damage(paths)
    return ProofLine(
        field=f"records of {paths.arm}, seed {paths.seed}",
        first=found[0] if found else "whole",
        second="whole",
        sameness="different" if found else "same",
    )


def _configs(
    configs: list[ArmConfig], differences: dict[str, Any], *, may_be_confounded: bool
) -> Iterator[ProofLine]:
    declared = [axis for axis in changed_axes(differences) if axis in AXES]
    # with two axes changed neither is free: which of them moved the weights can't be told
    allowed = may_be_confounded or len(declared) <= 1
    on_axis = {path: values for path, values in differences.items() if touches({path: 0}, AXES)}
    for path, (a, b) in differences.items():
        yield _line(f"config.{path}", a, b, is_free=allowed and path in on_axis)
    yield _line("config less the axis", *(hash_without(config, on_axis) for config in configs))


def _start_parts(
    first: Manifest, second: Manifest, differences: Mapping[str, Any]
) -> Iterator[tuple[str, Any, Any, bool]]:
    """Give what is known before the first step: its name, both values, whether they may differ.

    The hash of the initial weights is taken before a nudge; `differences` are those of the configs.
    """
    # keys of both: an entry that only one manifest has is a difference too
    for key in sorted({*first.environment, *second.environment}):
        one, other = first.environment.get(key), second.environment.get(key)
        is_free = may_be_missing(key) and (one is None or other is None)
        yield f"environment.{key}", one, other, is_free
    for key in ("text", "held_out", "init_weights"):
        is_free = may_differ(key, differences)
        yield f"hashes.{key}", first.hashes.get(key), second.hashes.get(key), is_free


def _batches(first: RunPaths, second: RunPaths, differences: dict[str, Any]) -> ProofLine:
    """Compare the running hash of the batches step by step."""
    if not (first.metrics.exists() and second.metrics.exists()):
        return _line("batches", None, None)
    a, b = (read_text(paths.metrics, BATCH_HASH) for paths in (first, second))
    # a run that is still going is a pair as far as both have come
    shared = sorted(a.keys() & b.keys())
    other = _first_other_batch(a, b, shared)
    if other is not None:
        is_free = may_differ("batches", differences)
        return _line(f"batch {other}", a[other], b[other], is_free=is_free)
    last = shared[-1] if shared else None
    return _line(f"batches up to step {last}", a.get(last or 0), b.get(last or 0))


def _first_other_batch(
    first: Mapping[int, str], second: Mapping[int, str], steps: Iterable[int]
) -> int | None:
    """Return the first of `steps` at which two runs' hashes of batches differ, or one has none."""
    return next((step for step in steps if first.get(step) != second.get(step)), None)


def _line(field: str, a: Any, b: Any, *, is_free: bool = False) -> ProofLine:
    # a hash that only one run has is not on record yet; of anything else that is a difference
    is_unknown = a is None and b is None
    is_unknown |= field.startswith("hashes.") and not is_free and (a is None or b is None)
    sameness = "unknown" if is_unknown else _sameness(a, b, is_free)
    return ProofLine(field=field, first=_short(a), second=_short(b), sameness=sameness)


def _sameness(a: Any, b: Any, is_free: bool) -> Sameness:
    if a == b:
        return "same"
    return "different by design" if is_free else "different"


def _short(value: Any) -> str:
    text = "nothing" if value is None else str(value)
    return text if len(text) <= 32 else f"{text[:16]}..."


def _quoted(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 72 else f"{text[:32]}...{text[-32:]}"
