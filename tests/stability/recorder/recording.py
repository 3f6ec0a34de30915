"""Records the scripts beside this file, as anybody would: by the command line alone."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from stability.cli.main import main
from stability.records.manifest import Manifest, read_manifest
from stability.records.metric_log import read_metrics, read_text
from stability.records.metric_names import BATCH_HASH, TRAIN_LOSS, drift_name
from stability.records.paths import RunPaths

SCRIPTS = Path(__file__).parent / "scripts"
_TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]


def words(script: str, *flags: str, ranks: int = 1) -> list[str]:
    """Return the command that runs a script of ours."""
    start = [sys.executable] if ranks == 1 else _TORCHRUN
    return [*start, str(SCRIPTS / script), *flags]


def launched(script: str, *flags: str, ranks: int = 1) -> list[str]:
    """Return the command that runs a script of ours by `accelerate launch`, on the CPU."""
    start = [str(Path(sys.executable).with_name("accelerate")), "launch"]
    start += ["--num_processes", str(ranks), "--num_machines", "1", "--mixed_precision", "no"]
    start += ["--dynamo_backend", "no", "--num_cpu_threads_per_process", "1"]
    # `--cpu` would have MPI start the ranks; a port of 0 is any that is free
    start += ["--cpu"] if ranks == 1 else ["--multi_gpu", "--main_process_port", "0"]
    return [*start, str(SCRIPTS / script), *flags]


@dataclass
class Recording:
    """A study of one command."""

    out: Path
    command: list[str]

    def record(self, arm: str, *flags: str, seed: int = 0, options: tuple[str, ...] = ()) -> int:
        """Record an arm, its own flags after the command's; return the exit code."""
        given = ["--study", "study", "--arm", arm, "--seed", str(seed), "--out", str(self.out)]
        given += ["--wandb", "disabled"] if "--wandb" not in options else []
        return code_of("record", *given, *options, "--", *self.command, "--seed", "{seed}", *flags)

    @property
    def folder(self) -> Path:
        """The study's folder."""
        return self.out / "study"

    def paths(self, arm: str, seed: int = 0) -> RunPaths:
        """The run's files."""
        return RunPaths.for_run(self.folder, arm, seed)

    def manifest(self, arm: str, seed: int = 0) -> Manifest:
        """The run's manifest."""
        return read_manifest(self.paths(arm, seed).manifest)

    def batches(self, arm: str, seed: int = 0) -> dict[int, str]:
        """The hash of all batches by step."""
        return read_text(self.paths(arm, seed).metrics, BATCH_HASH)

    def losses(self, arm: str, seed: int = 0) -> list[float]:
        """The loss of each update."""
        return read_metrics(self.paths(arm, seed).metrics)[TRAIN_LOSS].values

    def drift(self, arm: str, seed: int = 0) -> dict[int, float]:
        """The relative drift from the baseline, over all weights, by step."""
        found = read_metrics(self.paths(arm, seed).metrics)[drift_name("all", "rel_l2")]
        return dict(zip(found.steps, found.values, strict=True))


Arms = Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]]
"""Flags of the script and options of `stability record`, by arm."""


def compiled_study(
    out: Path, monkeypatch: pytest.MonkeyPatch, script: str, *flags: str
) -> Recording:
    """Return a study of a script that compiles; no other test's graphs are there to be found.

    Where its flags name Inductor and there is no C++ compiler, the test is skipped.
    """
    if "inductor" in flags and shutil.which("g++") is None:
        pytest.skip("Inductor needs a C++ compiler on the CPU")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(out / "graphs"))
    return Recording(out, words(script, *flags))


def recorded_plain(out: Path, arms: Arms) -> Path:
    """Record five steps of `plain.py` in each arm; return the study's folder."""
    study = Recording(out, words("plain.py", "--steps", "5"))
    for arm, (flags, options) in arms.items():
        assert study.record(arm, *flags, options=options) == 0
    return study.folder


class Calling(Recording):
    """A study of a script that opens a door itself, where the variables say so."""

    def record(self, arm: str, *flags: str, seed: int = 0, options: tuple[str, ...] = ()) -> int:
        """Run an arm; `options` become variables. Return 1 where no run was finished."""
        given = dict(zip(options[::2], options[1::2], strict=True))
        variables = {
            "STABILITY_STUDY": "study",
            "STABILITY_ARM": arm,
            "STABILITY_SEED": str(seed),
            "STABILITY_OUT": str(self.out),
            **{f"STABILITY_{name[2:].upper()}": value for name, value in given.items()},
        }
        ran = subprocess.run(
            [*self.command, "--seed", str(seed), *flags],
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
            check=False,
        )
        sys.stdout.write(ran.stdout)
        sys.stderr.write(ran.stderr)
        return int(ran.returncode != 0 or self.manifest(arm, seed).state != "finished")


def code_of(*arguments: str) -> int:
    """Return the exit code of `stability` with these arguments."""
    try:
        return main(list(arguments))
    except SystemExit as error:  # how wrong input ends
        return int(error.code or 0)


def bits_of(text: str) -> str:
    """Return the hash of the last weights that a script has printed."""
    found = [line.split()[1] for line in text.splitlines() if line.startswith("weights ")]
    assert len(found) == 1, text
    return found[0]


def run_alone(command: list[str]) -> str:
    """Run a command without a recorder, and return the hash of its last weights."""
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return bits_of(ran.stdout)
