"""Liger's kernels themselves, beside the parts of a model: in Triton's interpreter, on a CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("liger_kernel", reason="needs liger-kernel, of the extra `dev`")

pytestmark = pytest.mark.slow

RESULTS = {
    "norm": {"out", "dx", "dweight"},
    "layers.0.mlp": {"out", "dx", "dgate.weight", "dup.weight", "dup.bias", "ddown.weight"},
    "layers.0.rotate": {"out_0", "out_1", "dq", "dk"},
    "loss": {"out", "dx"},
    "lm_head+loss": {"out", "dx", "dweight"},
}
WRONG = {
    "norm": "eps 10 % larger",
    "layers.0.mlp": "gate and up exchanged",
    "layers.0.rotate": "turned the other way",
    "loss": "smoothed",
    "lm_head+loss": "smoothed",
}


@pytest.fixture(scope="module")
def found():
    command = [sys.executable, "-m", "tests.stability.intercept.liger_models"]
    root = Path(__file__).parents[3]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_training_beside_liger_keeps_its_bits_and_nothing_is_left_out(found):
    assert found["bits_equal"]
    assert found["findings"] == []


@pytest.mark.parametrize("part", RESULTS)
def test_ligers_kernel_is_as_good_as_the_models_own_part(part, found):
    judged = found["judged"][f"{part}: right"]
    assert judged.keys() == RESULTS[part]
    ratios = [ratio for ratio, _ in judged.values() if ratio == ratio]  # a loss alone has none
    assert len(ratios) >= len(judged) - 1
    assert max(ratios) < 1.2
    assert max(abs(gain) for _, gain in judged.values()) < 1e-6


@pytest.mark.parametrize("part", WRONG)
def test_a_kernel_told_something_else_is_found_wrong_in_every_result(part, found):
    judged = found["judged"][f"{part}: {WRONG[part]}"]
    assert judged.keys() == RESULTS[part]
    for what, (ratio, gain) in judged.items():
        assert ratio > 100 or (ratio != ratio and abs(gain) > 1e-4), what
