"""Real process groups on gloo: 1, 2 and 4 ranks have the drift and the norm of one process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from stability.metrics.drift import drift
from stability.metrics.sharded_sums import norm_of
from tests.stability.metrics.scripts.group_drift import states

SCRIPT = Path(__file__).parent / "scripts" / "group_drift.py"


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 4])
def test_every_rank_of_a_group_has_the_bits_of_one_process(count, tmp_path):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(rank), str(count), str(tmp_path / "meeting")],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
    said = [rank.communicate(timeout=300)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * count
    a, b = states()
    expected = [drift(a, b), drift(a, b), norm_of(a.values())]
    assert all(json.loads(text) == expected for text in said)
