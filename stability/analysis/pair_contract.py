"""The pair contract as the records prove it: which hashes of each run equal its baseline's.

Leaves out refusing a run (`study.contract`): this only shows what the manifests hold.

The pair contract of two runs, proven from their records: what is the same, and the first break.

Nothing is believed: the files' checksums, both configs, both environments, the hashes and every
line of both batch logs are compared. Leaves out a whole study's summary of hashes (`proofs`) and
refusing a run while it trains (`study.contract`), which compares the same parts.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from stability.analysis.study_records import RecordedRun, RecordedStudy
from stability.config.convert import Place, from_mapping
from stability.config.diff import changed_axes, changes, diff, hash_without
from stability.config.schema import AXES, BASELINE, ArmConfig, Axis
from stability.records.manifest import Manifest, read_manifest
from stability.records.metric_log import read_text
from stability.records.metric_names import BATCH_HASH
from stability.records.paths import RunPaths
from stability.records.run_files import damage

__all__ = [
    "HASHES",
    "WEIGHT_AXES",
    "PairProof",
    "Proof",
    "ProofLine",
    "Sameness",
    "environment_of",
    "first_other_batch",
    "hash_proofs",
    "prove_pair",
    "start_parts",
]

HASHES = ("init_weights", "text", "batches", "final_weights")
"""The hashes of a manifest, in the order of a run."""

Sameness = Literal["same", "different by design", "different", "unknown"]
"""Two records of one thing; `different` breaks the contract, `unknown` is not on record yet."""

WEIGHT_AXES: tuple[Axis, ...] = ("init", "seed")
"""Axes that change the initial weights by design."""

FREE: dict[str, tuple[Axis, ...]] = {
    "init_weights": WEIGHT_AXES,
    "text": (),
    "batches": ("data_order",),
}
"""Axes that are meant to change a hash. Final weights may differ on every axis but `none`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Proof:
    """One hash of one run beside its baseline's; empty strings where a manifest has none yet."""

    arm: str
    seed: int
    name: str
    found: str
    expected: str
    sameness: Sameness


def hash_proofs(study: RecordedStudy) -> list[Proof]:
    """Return a proof for each run of each candidate and each hash, in the study's order."""
    baseline = study.arm(BASELINE)
    proofs = []
    for arm in study.candidates:
        for seed, run in arm.runs.items():
            reference = baseline.runs.get(seed) if baseline else None
            for name in HASHES:
                found, expected = _hash(run, name), _hash(reference, name)
                proofs.append(
                    Proof(
                        arm=arm.name,
                        seed=seed,
                        name=name,
                        found=found,
                        expected=expected,
                        sameness=_sameness(name, arm.diff, found, expected),
                    )
                )
    return proofs


def environment_of(study: RecordedStudy) -> dict[str, list[Any]]:
    """Return the values found for each entry of the environment; there should be one of each."""
    found: dict[str, list[Any]] = {}
    for run in _runs(study):
        for key, value in (run.manifest.environment if run.manifest else {}).items():
            if value not in found.setdefault(key, []):
                found[key].append(value)
    return found


def _runs(study: RecordedStudy) -> Iterator[RecordedRun]:
    for arm in study.arms:
        yield from arm.runs.values()


def _hash(run: RecordedRun | None, name: str) -> str:
    return run.manifest.hashes.get(name, "") if run and run.manifest else ""


def _sameness(name: str, diff: Mapping[str, Any], found: str, expected: str) -> Sameness:
    if not found or not expected:
        return "unknown"
    if found == expected:
        return "same"
    free = bool(diff) if name == "final_weights" else changes(diff, FREE[name])
    return "different by design" if free else "different"


@dataclass(frozen=True, kw_only=True, slots=True)
class ProofLine:
    """One thing compared, in the order in which it is laid down: `found` is what it says."""

    field: str
    first: str
    second: str
    sameness: Sameness


@dataclass(frozen=True, kw_only=True, slots=True)
class PairProof:
    """Two runs, the axes in which they differ, and every comparison."""

    first: str
    second: str
    axes: tuple[str, ...]
    lines: tuple[ProofLine, ...]

    @property
    def break_(self) -> ProofLine | None:
        """The first comparison that breaks the contract."""
        return next((line for line in self.lines if line.sameness == "different"), None)

    @property
    def sentence(self) -> str:
        """What the proof comes to, in one sentence."""
        broken = self.break_
        if broken is not None:
            return f"no pair: {broken.field} is {broken.first} in one, {broken.second} in the other"
        unknown = [line.field for line in self.lines if line.sameness == "unknown"]
        said = f"a pair: they differ in {self.axes[0]} alone" if self.axes else "an A/A pair"
        if len(self.axes) > 1:
            said = f"a confounded pair: they differ in {', '.join(self.axes)}"
        return f"{said}; not on record yet: {', '.join(unknown)}" if unknown else said

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-able values."""
        lines = [
            {"field": x.field, "first": x.first, "second": x.second, "sameness": x.sameness}
            for x in self.lines
        ]
        return {
            "first": self.first,
            "second": self.second,
            "axes": list(self.axes),
            "is_pair": self.break_ is None,
            "sentence": self.sentence,
            "lines": lines,
        }


def prove_pair(first: RunPaths, second: RunPaths) -> PairProof:
    """Compare the records of two runs; `first` is taken as the baseline.

    ValueError if one of them is no run, or its manifest can't be read.
    """
    manifests = read_manifest(first.manifest), read_manifest(second.manifest)
    configs = [
        from_mapping(ArmConfig, manifest.config, Place(source=str(paths.manifest)))
        for paths, manifest in zip((first, second), manifests, strict=True)
    ]
    differences = diff(*configs)
    parts = start_parts(*manifests, differences)
    records = list(_records(first, second))
    whole = all(line.sameness == "same" for line in records)
    lines = [
        *records,
        *_config(configs, differences, confounded=manifests[1].axis == "many"),
        *(_line(field, *values, free=free) for field, *values, free in parts),
        _batches(first, second, differences) if whole else _line("batches", None, None),
        _end(manifests, differences),
    ]
    return PairProof(
        first=str(first.root),
        second=str(second.root),
        axes=tuple(changed_axes(differences)),
        lines=tuple(lines),
    )


def _records(first: RunPaths, second: RunPaths) -> Iterator[ProofLine]:
    for paths in (first, second):
        found = damage(paths)
        yield ProofLine(
            field=f"records of {paths.arm}, seed {paths.seed}",
            first="whole" if not found else found[0],
            second="whole",
            sameness="different" if found else "same",
        )


def _config(
    configs: list[ArmConfig], differences: dict[str, Any], *, confounded: bool
) -> Iterator[ProofLine]:
    declared = [axis for axis in changed_axes(differences) if axis in AXES]
    allowed = confounded or len(declared) <= 1
    on_axis = {path: values for path, values in differences.items() if changes({path: 0}, AXES)}
    for path, (a, b) in differences.items():
        yield _line(f"config.{path}", a, b, free=allowed and path in on_axis)
    yield _line("config less the axis", *(hash_without(config, on_axis) for config in configs))


def start_parts(
    first: Manifest, second: Manifest, differences: Mapping[str, Any]
) -> Iterator[tuple[str, Any, Any, bool]]:
    """Give what is known before the first step: its name, both values, whether they may differ.

    The hash of the initial weights is taken before a nudge; `differences` are those of the configs.
    """
    for key in sorted({*first.environment, *second.environment}):
        name = f"environment.{key}"
        yield name, first.environment.get(key), second.environment.get(key), False
    for key, free in (("text", False), ("init_weights", changes(differences, WEIGHT_AXES))):
        yield f"hashes.{key}", first.hashes.get(key), second.hashes.get(key), free


def first_other_batch(
    first: Mapping[int, str], second: Mapping[int, str], steps: Iterable[int]
) -> int | None:
    """Return the first of `steps` at which two runs' hashes of batches differ, or one has none."""
    return next((step for step in steps if first.get(step) != second.get(step)), None)


def _batches(first: RunPaths, second: RunPaths, differences: dict[str, Any]) -> ProofLine:
    """Compare the running hash of the batches step by step."""
    if not (first.metrics.exists() and second.metrics.exists()):
        return _line("batches", None, None)
    a, b = (read_text(paths.metrics, BATCH_HASH) for paths in (first, second))
    shared = sorted(a.keys() & b.keys())
    free = changes(differences, ["data_order"])
    other = first_other_batch(a, b, shared)
    if other is not None:
        return _line(f"batch {other}", a[other], b[other], free=free)
    last = shared[-1] if shared else None
    return _line(f"batches up to step {last}", a.get(last or 0), b.get(last or 0))


def _end(manifests: tuple[Manifest, Manifest], differences: dict[str, Any]) -> ProofLine:
    hashes = [manifest.hashes.get("final_weights") for manifest in manifests]
    return _line("hashes.final_weights", *hashes, free=bool(differences))


def _line(field: str, a: Any, b: Any, *, free: bool = False) -> ProofLine:
    sameness: Sameness = "different"
    if a is None and b is None:
        sameness = "unknown"
    elif a == b:
        sameness = "same"
    elif free:
        sameness = "different by design"
    elif a is None or b is None:
        sameness = "unknown" if field.startswith("hashes.") else "different"
    return ProofLine(field=field, first=_short(a), second=_short(b), sameness=sameness)


def _short(value: Any) -> str:
    text = "nothing" if value is None else str(value)
    return text if len(text) <= 32 else f"{text[:16]}..."
