"""Runs on disk of which snapshots were dropped and sketches are left, without a training."""

import torch

from stability.metrics.weight_hash import weight_hash
from stability.metrics.weight_sketch import weight_sketch
from stability.records.run_files import RunFiles
from stability.records.snapshots import write_snapshot
from stability.records.weight_sketches import StoredSketch, write_weight_sketch


def state_of(seed, moved=0.0):
    generator = torch.Generator().manual_seed(0)
    x = {f"h.{i}.w": torch.randn(60, 50, generator=generator) for i in range(4)}
    x["norm.scale"] = torch.ones(())
    noise = torch.Generator().manual_seed(seed)
    # a counter is no weight
    return {
        **{name: w + moved * torch.randn(w.shape, generator=noise) for name, w in x.items()},
        "steps": torch.tensor(3),
    }


def run_with(folder, states, keep=(), sketched=True):
    """A run with a snapshot of each step, of which those not in `keep` are dropped."""
    files = RunFiles.unnamed(folder)
    for step, state in states.items():
        write_snapshot(files.paths.snapshot(step), state)
        files.add(files.paths.snapshot(step))
        if sketched:
            found = weight_sketch(state)
            stored = StoredSketch(
                weights=weight_hash(state),
                outline=found.outline,
                outside=found.outside,
                buckets=found.buckets,
            )
            write_weight_sketch(files.paths.sketch(step), stored)
            files.add(files.paths.sketch(step))
    files.drop(files.paths.snapshot(step) for step in states if step not in keep)
    return folder
