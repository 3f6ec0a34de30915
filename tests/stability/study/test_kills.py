"""Killed at random points, mid-write included, a study ends in the bits of an undisturbed one."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from stability.config.load import load_study
from tests.stability.study.recorded_bits import recorded_bits
from tests.stability.study.test_any_model import HF_LLAMA

ROOT = Path(__file__).parents[3]
ARMS = {
    "baseline": {},
    "fp16": {"precision": "16-mixed"},
    "stochastic": {
        "attention": {
            "implementation": "flash",
            "numerics": {"rounding": "stochastic", "accumulator": "bf16"},
        }
    },
}


def _edit(content, model):
    content["base"]["model"] |= model
    content["arms"] = ARMS
    content["seeds"] = [0]
    content["yardstick"] = "fp16"
    content["base"]["train"] |= {"steps": 9, "checkpoint_every": 3}
    content["base"]["watch"] = {"every": 3}
    content["base"]["probe"] |= {"inside": True, "gradient_every": 2}


@pytest.mark.long
@pytest.mark.parametrize(
    ("seed", "model"),
    [
        (1, {}),
        (2, {}),
        (3, {"builder": "llama", "kv_heads": 1}),
        (4, {"builder": "huggingface", "options": {"config": HF_LLAMA}, "kv_heads": 1}),
    ],
    ids=["1", "2", "llama", "hugging face"],
)
def test_kills_at_random_points_change_no_bit(write_study, run_tiny, tmp_path, seed, model):
    study, out = write_study(partial(_edit, model=model)), tmp_path / "killed"
    done = subprocess.run(
        [sys.executable, "-m", "tests.stability.study.killing", study, out, str(seed), "12"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    kinds = {point[1] if point[0] == "file" else point[0] for point in found["points"]}
    assert len(found["points"]) == 12
    assert len(kinds) >= 5, found["points"]
    run_tiny(load_study(study), tmp_path / "whole")
    whole = recorded_bits(tmp_path / "whole" / "tiny")
    for folder in range(found["folders"]):
        assert recorded_bits(out / str(folder) / "tiny") == whole, found["points"]
