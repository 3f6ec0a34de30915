"""Random numbers depend on the seed and the step alone: after a resume, and in both of a pair."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from stability.callbacks.random_numbers import RandomNumbers
from stability.config.load import load_study
from stability.records.manifest import read_manifest, write_manifest
from stability.records.paths import RunPaths
from tests.stability.study.recorded_bits import recorded_bits


def _edit(content):
    own = {"implementation": "tests.stability.study.own_attentions:drawing"}
    content["base"]["attention"] = own
    content["base"]["probe"] = {"every": 0}
    content["base"]["train"] |= {"checkpoint_every": 3}
    content |= {"arms": {"rerun": {}}, "seeds": [0], "yardstick": ""}


@pytest.mark.slow
def test_a_run_that_draws_goes_on_to_the_same_bits(write_study, run_tiny, tmp_path):
    study = load_study(write_study(_edit))
    run_tiny(study, tmp_path / "runs")
    whole = recorded_bits(tmp_path / "runs" / "tiny")
    baseline, rerun = (
        RunPaths.for_run(tmp_path / "runs" / "tiny", arm, 0) for arm in ("baseline", "rerun")
    )
    one, other = (read_manifest(run.manifest).hashes for run in (baseline, rerun))
    assert one["final_weights"] == other["final_weights"], "both draw the same"
    manifest = read_manifest(baseline.manifest)
    last = baseline.checkpoint(max(map(int, _steps(baseline))))
    gone = {baseline.name_of(last), "metrics.jsonl"}
    files = {name: sha for name, sha in manifest.files.items() if name not in gone}
    last.unlink()
    write_manifest(baseline.manifest, replace(manifest, state="interrupted", files=files))
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    run_tiny(study, tmp_path / "runs")
    assert recorded_bits(tmp_path / "runs" / "tiny") == whole


def _steps(run):
    return [path.stem.removeprefix("step-") for path in run.checkpoints_dir.glob("*.ckpt")]


def test_steps_and_seeds_draw_other_numbers():
    drawn = set()
    for seed, step in ((0, 0), (0, 1), (1, 0), (2**32 - 1, 0)):
        for _ in range(2):
            RandomNumbers(seed).before_update(None, step)  # pyright: ignore[reportArgumentType]
            drawn.add((float(torch.rand(())), float(np.random.rand()), random.random()))
    assert len(drawn) == 4
    assert all(len(set(column)) == 4 for column in zip(*drawn, strict=True))
