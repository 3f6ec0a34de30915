"""The pair contract as the records prove it: which hashes of each run equal its baseline's.

Leaves out refusing a run (`study.contract`): this only shows what the manifests hold.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from stability.analysis.study_records import RecordedRun, RecordedStudy
from stability.config.diff import changes
from stability.config.schema import BASELINE, Axis

__all__ = ["HASHES", "WEIGHT_AXES", "Proof", "Sameness", "environment_of", "hash_proofs"]

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
