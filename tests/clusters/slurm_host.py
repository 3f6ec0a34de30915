"""A real Slurm on this host alone: a controller and two nodes, with ports and a key of its own.

    python -m tests.clusters.slurm_host start FOLDER [PORT]
    python -m tests.clusters.slurm_host stop FOLDER

Needs root and Debian's packages `slurm-wlm` and `munge`; nothing outside of the folder is changed,
so it stands beside another Slurm. Programs find it by `SLURM_CONF=FOLDER/slurm.conf`.
"""

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from shutil import which

NODES = ("n1", "n2")
PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch")
CONFIG = """
ClusterName=trial
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
MinJobAge=86400
ReturnToService=1
KillWait=5
MpiDefault=none
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=DEFAULT Nodes={nodes} MaxTime=INFINITE State=UP
PartitionName=main Default=YES PriorityTier=1 GraceTime={grace_s}
PartitionName=urgent PriorityTier=2
"""
GRACE_S = 3600
"""How long a job of `main` has to end once one of `urgent` needs its node; so long that no test
takes a requeue by Slurm, at its end, for the job's own."""


def lacking() -> str:
    """Return why no Slurm can be started here; empty if one can."""
    missing = [name for name in PROGRAMS if which(name, path=_path()) is None]
    if missing:
        return f"no {', '.join(missing)}: apt-get install slurm-wlm munge"
    return "" if os.getuid() == 0 else "Slurm is started by root alone"


def start(folder: Path, port: int = 27817) -> None:
    """Start it, and wait until its nodes are idle; TimeoutError if they aren't within 30 s."""
    (folder / "state").mkdir(parents=True)
    key = folder / "munge.key"
    key.touch(0o600)
    key.write_bytes(secrets.token_bytes(128))
    files = {"key": "key", "socket": "socket", "pid": "pid", "log": "log", "seed": "seed"}
    named = {name: folder / f"munge.{end}" for name, end in files.items()}
    options = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log"}
    words = [f"--{x}={named[y]}" for x, y in (options | {"seed-file": "seed"}).items()]
    _call(folder, "munged", "--force", *words)
    host = socket.gethostname().partition(".")[0]
    config = CONFIG.format(
        host=host, port=port, folder=folder, nodes=",".join(NODES), grace_s=GRACE_S
    )
    for number, node in enumerate(NODES, start=1):
        config += (
            f"NodeName={node} NodeAddr=127.0.0.1 NodeHostname={host} Port={port + number} CPUs=1 "
            "State=UNKNOWN\n"
        )
    (folder / "slurm.conf").write_text(config)
    _call(folder, "slurmctld", "-c")
    for node in NODES:
        _call(folder, "slurmd", "-c", "-N", node)
    end = time.monotonic() + 30
    states = "sinfo", "--Node", "--noheader", "--partition=main", "--format=%T"
    while ask(folder, *states).split() != ["idle"] * len(NODES):
        if time.monotonic() > end:
            raise TimeoutError(f"the nodes are not idle: see {folder}/slurmctld.log")
        time.sleep(0.2)


def stop(folder: Path) -> None:
    """End it, and what it runs."""
    ask(folder, "scancel", "--quiet", f"--user={os.getuid()}")
    end = time.monotonic() + 30
    while ask(folder, "squeue", "-h") and time.monotonic() < end:
        time.sleep(0.2)
    for name in ("slurmctld", *(f"slurmd-{node}" for node in NODES), "munge"):
        file = folder / f"{name}.pid"
        if file.exists():
            _end(int(file.read_text()))


def _end(process: int) -> None:
    for signal_, patience_s in ((signal.SIGTERM, 20), (signal.SIGKILL, 5)):
        end = time.monotonic() + patience_s
        with suppress(ProcessLookupError):
            os.kill(process, signal_)
        while Path(f"/proc/{process}").exists() and time.monotonic() < end:
            time.sleep(0.1)


def ask(folder: Path, *words: str) -> str:
    """Return what a command of this Slurm prints; empty if it fails."""
    done = subprocess.run(words, env=variables(folder), capture_output=True, text=True, timeout=60)
    return done.stdout if done.returncode == 0 else ""


def has_died(job: str) -> bool:
    """Whether no process of a job, by its number, is left: a node starts no second copy of it."""
    return not any(_is_step_of(job, path) for path in Path("/proc").glob("[0-9]*/cmdline"))


def _is_step_of(job: str, path: Path) -> bool:
    try:
        return path.read_bytes().startswith(f"slurmstepd: [{job}.".encode())
    except OSError:  # it has ended meanwhile
        return False


def variables(folder: Path) -> dict[str, str]:
    """Return the variables of a process that is to find this Slurm."""
    return {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "PATH": _path()}


def _call(folder: Path, *words: str) -> None:
    subprocess.run(words, env=variables(folder), check=True, timeout=60)


def _path() -> str:
    return f"{os.environ['PATH']}:/usr/sbin:/sbin"


if __name__ == "__main__":
    verb, where, *ports = sys.argv[1:]
    target = Path(where).resolve()
    start(target, *map(int, ports)) if verb == "start" else stop(target)
