"""Studies of which only the weights' distances are on record, computed from weights of one's own.

A run's weights are a vector of a few FP64 numbers, made by a function of seed and step. The files
that the distances name as their parents are not there; their checksums in the manifests are the
vectors' own, so that equal weights have equal parents as real snapshots have.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from stability.analysis.study_records import RecordedStudy, read_study
from stability.records.distances import DistanceMatrix, LeftOut, SeedDistances, write_distances
from stability.records.manifest import Manifest, write_manifest
from stability.records.paths import RunPaths, StudyPaths
from stability.records.sealed_json import write_sealed

SIZE = 64
STEPS = (1, 10, 15, 20)
CHANGES = {
    "attention": {"attention.implementation": ["baseline", "flash"]},
    "precision": {"precision": ["bf16-mixed", "32-true"]},
    "flags.bf16": {"flags.bf16": [True, None]},
    "nudge": {"nudge.ulps": [0, 1]},
    "seed": {"seed.init_offset": [0, 1000]},
    "none": {},
}
Weights = Callable[[int, int], np.ndarray]


@dataclass
class Part:
    """An arm of such a study: its role, its axis, and its weights by seed and step."""

    role: str
    axis: str
    weights: Weights
    steps: tuple[int, ...] = STEPS
    state: str = "finished"
    extra: dict = field(default_factory=dict)


def noise(*key) -> np.ndarray:
    """Standard normal numbers, the same for the same key."""
    seed = int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:8], "little")
    return np.random.default_rng(seed).normal(size=SIZE) / SIZE**0.5


def truth(seed: int, step: int) -> np.ndarray:
    return 10 * noise("truth", seed, step)


def off(name: str, error: float = 1.0, chaos: Mapping[int, float] | float = 0.0) -> Weights:
    """Return weights `error` off the truth in the baseline's direction, and `chaos` at random."""

    def weights(seed: int, step: int) -> np.ndarray:
        size = chaos if isinstance(chaos, float) else chaos[step]
        shared = noise("rounding", seed, step)
        shared = shared / np.linalg.norm(shared)
        return truth(seed, step) + error * shared + size * noise(name, seed, step)

    return weights


def parts(**others: Part) -> dict[str, Part]:
    """Return baseline, reference and two nudges, whose E is 1 within 0.01, and `others`."""
    calm = 0.005
    return {
        "baseline": Part("baseline", "none", off("baseline")),
        "reference": Part("reference", "precision", truth),
        "nudge": Part("nudge", "nudge", off("nudge", chaos=calm)),
        "nudge_b": Part("nudge", "nudge", off("nudge_b", chaos=calm)),
        **others,
    }


def candidate(error: float = 1.0, chaos: Mapping[int, float] | float = 0.005) -> Part:
    return Part("candidate", "attention", off("candidate", error, chaos))


def write_study(
    folder: Path, arms: Mapping[str, Part], *, seeds: int = 5, base: Mapping | None = None, **config
) -> RecordedStudy:
    """Write the records of a study and return it as it is read."""
    precision = {"precision": "bf16-mixed", **(base or {})}
    content = {
        "config": {
            "name": "distances",
            "question": "?",
            "base": {"train": {"steps": STEPS[-1], "snapshot_steps": list(STEPS)}, **precision},
            "seeds": list(range(seeds)),
            **config,
        },
        "arms": [
            {
                "name": name,
                "axis": part.axis,
                "diff": {**CHANGES[part.axis], **part.extra},
                "role": part.role,
                "until": part.steps[-1] if part.steps else STEPS[-1],
            }
            for name, part in arms.items()
        ],
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_sealed(StudyPaths(folder).study, content)
    for seed in range(seeds):
        for name, part in arms.items():
            write_run(folder, name, part, seed)
        write_distances(folder, distances_of(arms, seed))
    return read_study(folder)


def write_run(folder: Path, name: str, part: Part, seed: int) -> None:
    paths = RunPaths.for_run(folder, name, seed)
    kept = {step: part.weights(seed, step) for step in part.steps}
    files = {}
    for path_of in (paths.snapshot, paths.predictions):
        for step, weights in kept.items():
            path = path_of(step)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(weights.tobytes())
            files[paths.name_of(path)] = checksum(weights)
    write_manifest(
        paths.manifest,
        Manifest(
            study="distances",
            arm=name,
            seed=seed,
            axis=part.axis,
            config={},
            diff={**CHANGES[part.axis], **part.extra},
            environment={},
            resolved={},
            hashes={},
            state=part.state,  # pyright: ignore[reportArgumentType]
            step=max(part.steps, default=0),
            message="the loss is not finite" if part.state == "diverged" else "",
            files=files,
        ),
    )


def checksum(weights: np.ndarray) -> str:
    return hashlib.sha256(weights.tobytes()).hexdigest()


def distances_of(arms: Mapping[str, Part], seed: int) -> SeedDistances:
    """Return the distances of one seed, in weights and, half of them, in predictions."""
    weights, predictions = {}, {}
    for step in STEPS:
        kept = {name: p.weights(seed, step) for name, p in arms.items() if step in p.steps}
        weights[step] = matrix(kept)
        predictions[step] = matrix({name: 0.5 * w for name, w in kept.items()}, names=kept)
    return SeedDistances(seed=seed, weights=weights, predictions=predictions)


def matrix(points: Mapping[str, np.ndarray], names: Mapping | None = None) -> DistanceMatrix:
    values = list(points.values())
    nudges = [name for name in points if name.startswith("nudge")]
    asked = ("baseline", *nudges) if nudges and "baseline" in points else ()
    return DistanceMatrix(
        parents={name: checksum(w) for name, w in (names or points).items()},
        norms={name: float(np.linalg.norm(w)) for name, w in points.items()},
        rows=tuple(
            tuple(0.0 if one is two else float(np.linalg.norm(one - two)) for two in values)
            for one in values
        ),
        left_out=LeftOut(asked=asked, values={}) if asked else None,
    )
