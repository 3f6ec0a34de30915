"""A study trains without a warning where Slurm's `srun` is on the PATH, as on every login node."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]

TRAIN = """
import sys, warnings
from pathlib import Path

from stability.config.load import load_study
from tests.conftest import run_quietly

warnings.simplefilter("error")
warnings.filterwarnings("ignore", ".isinstance.treespec, LeafSpec.. is deprecated", FutureWarning)
print(run_quietly(load_study(Path(sys.argv[1]), None), Path(sys.argv[2])).ended)
"""


def test_a_study_trains_without_a_warning_where_srun_is_on_the_path(write_study, tmp_path):
    srun = tmp_path / "bin" / "srun"
    srun.parent.mkdir()
    srun.write_text("#!/bin/sh\nexit 1\n")
    srun.chmod(0o755)

    def one_short_run(content):
        content["arms"], content["seeds"] = {"baseline": {}}, [0]
        content["yardstick"] = ""
        content["base"]["train"]["steps"] = 2

    command = [sys.executable, "-c", TRAIN, str(write_study(one_short_run)), str(tmp_path / "runs")]
    path = os.pathsep.join([str(srun.parent), os.environ["PATH"]])
    trained = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env={**os.environ, "PATH": path}
    )
    assert trained.returncode == 0, trained.stderr
    assert trained.stdout == "[('baseline', 0, 'finished', '')]\n"
