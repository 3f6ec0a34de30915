"""Runs of some arms that go one way, but for a walk in part of a bias, otherwise in each."""

from dataclasses import asdict

import torch

from stability.metrics.pieces import pieces_of
from stability.recorder.sketching import stored_sketch
from stability.records.manifest import read_manifest
from stability.records.paths import RunPaths, StudyPaths
from stability.records.protocol import Protocol
from stability.records.run_files import RunFiles
from stability.records.sealed_json import write_sealed
from stability.records.snapshots import write_snapshot
from stability.records.weight_sketches import write_weight_sketch

NOISY = (0, 16)
"""Which values of the bias walk by signs, otherwise in each run."""
STATES = {"baseline": (1, 0.0), "reference": (2, 1e-4), "nudge": (3, 1e-5), "candidate": (4, 2e-4)}
"""Of each arm its draw, and how far it is from the others' way."""


class Notes(list):
    def __call__(self, arm, text):
        self.append((arm, text))


def walked(arm, step):
    """Return weights after `step` updates: runs go one way, but for a walk in part of a bias."""
    number, shift = STATES[arm]
    shift = shift if step else 0.0
    state = {"wide.weight": torch.linspace(-1, 1, 2000).view(50, 40), "bias": torch.zeros(37)}
    state = {name: x + 0.01 * step + shift for name, x in state.items()}
    dice = torch.Generator().manual_seed(number)
    noise = 0.02 * torch.randn(step, 16, generator=dice).sign().sum(0)
    state["bias"][slice(*NOISY)] = noise if step else 0.0
    return state


def write(paths, step, state):
    """Write a snapshot and its sketch as a run does."""
    manifest = read_manifest(paths.manifest) if paths.manifest.is_file() else None
    files = RunFiles(paths, manifest or RunFiles.unnamed(paths.root).manifest)
    for path in (paths.snapshot(step), paths.sketch(step)):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_snapshot(paths.snapshot(step), state)
    write_weight_sketch(paths.sketch(step), stored_sketch(pieces_of(state)))
    files.add(paths.snapshot(step))
    files.add(paths.sketch(step))


def seed_of(folder, *arms):
    """Write runs of some arms, with the states of steps 0 and 9."""
    runs = {}
    for arm in arms:
        runs[arm] = RunPaths.for_run(folder, arm, 0)
        for step in (0, 9):
            write(runs[arm], step, walked(arm, step))
        role = arm if arm in ("reference", "nudge", "baseline") else "candidate"
        RunFiles(runs[arm], read_manifest(runs[arm].manifest)).update(
            study="s", arm=arm, role=role, state="finished", step=9
        )
    return runs


def seal(folder, **rule):
    """Seal a protocol, by default as it was before values were left out."""
    window = {"step": 0, "limit": 0.04, "settling": 10, "steps": [9], **rule}
    protocol = Protocol(study="s", policy={}, arms={}, window=window, looks=[3], seeds=[0], base={})
    write_sealed(StudyPaths(folder).protocol, asdict(protocol))


def drop(runs, *arms):
    """Drop the last snapshot of some arms, as `keep: settled` does."""
    for arm in arms:
        files = RunFiles(runs[arm], read_manifest(runs[arm].manifest))
        files.drop([runs[arm].snapshot(9)])
