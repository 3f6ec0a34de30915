"""Environment variables that say where and when a process runs, and not what it computes.

All others that a recorded training could read must be its baseline's, or that is unproven: any
script may take its learning rate from one. Those that math libraries read are compared by their
values (`records.identity`). A script that computes with one of these is not seen.
"""

import fnmatch
import re
from collections.abc import Mapping

from stability.records.identity import HARMLESS

__all__ = ["VOLATILE", "lasting"]

VOLATILE = {
    "_": "the path of the program that was started",
    "OLDPWD": "where a shell was before",
    "PWD": "where a shell is; the command of all arms starts in one folder, or a commit's",
    "SHLVL": "how many shells lie around the process",
    "STABILITY_*": "ours; what they ask for is part of the config",
    "PYTEST_*": "which test runs",
    "COV_*": "which coverage is measured",
    "RANDOM": "a shell's random number, where it exports it",
    "COLUMNS": "the terminal's width",
    "LINES": "its height",
    "TERM*": "its kind",
    "COLORTERM": "its colours",
    "FORCE_COLOR": "colours of what is printed",
    "NO_COLOR": "none of them",
    "CLICOLOR*": "colours again",
    "LS_COLORS": "colours of ls",
    "LESS*": "the pager",
    "PAGER": "the pager",
    "PS?": "the prompt",
    "PROMPT*": "the prompt",
    "CONDA_PROMPT_MODIFIER": "the prompt",
    "HIST*": "a shell's history",
    "MAIL": "a mailbox",
    "DISPLAY": "a screen",
    "WAYLAND_DISPLAY": "a screen",
    "WINDOWID": "a window",
    "TMUX*": "a terminal's session",
    "STY": "a terminal's session",
    "SSH_*": "a login's session",
    "GPG_*": "an agent's session",
    "DBUS_*": "a desktop's session",
    "XDG_*": "a desktop's session",
    "DESKTOP_*": "a desktop's session",
    "GNOME_*": "a desktop's session",
    "VSCODE_*": "an editor's session",
    "JPY_*": "a notebook's session",
    "KRB5CCNAME": "a ticket's file",
    "ITERM_*": "a terminal's session",
    "AWS_SESSION_TOKEN": "a login's, for some hours",
    "AWS_SECURITY_TOKEN": "the same by its older name",
    "GITHUB_*": "a job of GitHub's: its number, its commit, its files",
    "CI_JOB_*": "a job of GitLab's",
    "CI_PIPELINE_*": "the jobs that it is one of",
    "CI_COMMIT_*": "the commit that it is about; what is executed is compared",
    "CI_RUNNER_*": "the machine that it is on",
    "CI_CONCURRENT_*": "its place among those of that machine",
    "CI_BUILDS_DIR": "where it is",
    "CI_PROJECT_DIR": "where it is",
    "CI_SERVER_*": "the server that gave it",
    "BUILD_ID": "a build server's number of the job",
    "BUILD_NUMBER": "the same",
    "BUILD_TAG": "its name",
    "BUILD_URL": "where it is shown",
    "BUILD_DISPLAY_NAME": "as what it is shown",
    "INVOCATION_ID": "systemd's number of the start",
    "JOURNAL_STREAM": "where systemd writes what is printed",
    "SYSTEMD_*": "systemd's own",
    "HOSTNAME": "the machine's name; what it computes with is compared by itself",
    "RANK": "the place in a group; a group's size and each rank's batches are compared",
    "LOCAL_RANK": "the same on one machine",
    "GROUP_RANK": "of torchrun",
    "ROLE_*": "of torchrun",
    "WORLD_SIZE": "the size of a group, which is compared",
    "*_WORLD_SIZE": "the same, on one machine",
    "MASTER_ADDR": "where a group meets",
    "MASTER_PORT": "where a group meets: often a free port",
    "TORCHELASTIC_*": "torchrun's number of the start, its logs",
    "JOB_ID": "a scheduler's number of the job",
    "JOB_NAME": "a scheduler's name of the job",
    "TASK_ID": "a scheduler's number of the task",
    "SLURM*": "the job's number, its nodes and limits",
    "PBS_*": "the same of PBS",
    "LSB_*": "of LSF",
    "OMPI_*": "of Open MPI",
    "PMI*": "of MPI",
    "RAY_*": "of Ray",
    "WANDB_*": "where and under which name a run is shown",
    "MLFLOW_RUN_ID": "under which number a run is shown",
    "KUBERNETES_*": "the cluster's addresses",
    "POD_NAME": "the name of a cluster's pod",
    "POD_NAMESPACE": "where it is",
    "POD_UID": "its number",
    "POD_IP*": "its addresses",
    "POD_HOST_IP": "its machine's address",
    "*_SERVICE_HOST": "the cluster's addresses",
    "*_SERVICE_PORT*": "the cluster's addresses",
    "*_PORT_*_TCP*": "the cluster's addresses",
    "TMPDIR": "where what is temporary lies; a scheduler gives each job its own",
    "CUDA_VISIBLE_DEVICES": "which of a machine's GPUs; their kind is compared",
    "NVIDIA_VISIBLE_DEVICES": "the same for a container",
    "ROCR_VISIBLE_DEVICES": "the same of ROCm",
    "HIP_VISIBLE_DEVICES": "the same of ROCm",
    "GPU_DEVICE_ORDINAL": "the same of ROCm",
    "ZE_AFFINITY_MASK": "the same of Intel",
    "CUDA_MODULE_LOADING": "set by PyTorch itself",
    "PYTHONPATH": "where modules lie; those that are imported are compared by their contents",
    "PYTHONUNBUFFERED": "when what is printed appears",
    "PYTHONDONTWRITEBYTECODE": "whether compiled sources are kept",
}
"""Names as patterns, and what such a variable is."""

_VOLATILE = re.compile("|".join(map(fnmatch.translate, [*VOLATILE, *HARMLESS])))


def lasting(variables: Mapping[str, str]) -> dict[str, str]:
    """Return those of `variables` that a run's bits may depend on, whatever reads them."""
    return {name: value for name, value in sorted(variables.items()) if not _VOLATILE.match(name)}
