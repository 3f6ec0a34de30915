"""Reads W&B's environment variables: they may say where runs go, never which run is which.

Honoured are WANDB_MODE (replaces the default mode), WANDB_PROJECT, WANDB_ENTITY, WANDB_BASE_URL,
WANDB_API_KEY, WANDB_NOTES, and WANDB_TAGS (added to our own tags). Ignored, because the study
decides a run's name, group, job type and folder, are WANDB_RUN_ID, WANDB_NAME, WANDB_RUN_GROUP,
WANDB_JOB_TYPE, WANDB_DIR and WANDB_SILENT. Refused are those in `REFUSED`, because they make W&B
join runs in another way than by their ids. No variable reaches the training. This file does not
start runs (`wandb_run`).
"""

import os
from typing import Literal

__all__ = [
    "PROJECT",
    "WandbMode",
    "added_tags",
    "check_account",
    "check_wandb",
    "destination",
    "project",
    "resolve_mode",
]

WandbMode = Literal["offline", "online", "disabled"]

PROJECT = "training-stability"

REFUSED = (
    "WANDB_RESUME",
    "WANDB_RESUME_FROM",
    "WANDB_FORK_FROM",
    "WANDB_RUN_STORAGE_ID",
    "WANDB_SWEEP_ID",
)

_MODES: dict[str, WandbMode] = {
    "offline": "offline",
    "dryrun": "offline",
    "online": "online",
    "run": "online",
    "disabled": "disabled",
}
"""The words that W&B accepts in WANDB_MODE, old ones included."""


def resolve_mode(mode: WandbMode) -> WandbMode:
    """Return the mode to use: WANDB_MODE replaces `offline`, which is the default, and no other.

    Raises ValueError if the variable holds an unknown word.
    """
    chosen = os.environ.get("WANDB_MODE", "")
    if mode != "offline" or not chosen:
        return mode
    if chosen not in _MODES:
        raise ValueError(
            f"resolve_mode: WANDB_MODE must be one of {', '.join(_MODES)}, got {chosen!r}; unset it"
        )
    return _MODES[chosen]


def project() -> str:
    """Return the W&B project that runs go to."""
    return os.environ.get("WANDB_PROJECT") or PROJECT


def destination() -> list[str]:
    """Return server, entity and project: two runs go to the same place if these are equal."""
    return [os.environ.get("WANDB_BASE_URL", ""), os.environ.get("WANDB_ENTITY", ""), project()]


def added_tags() -> list[str]:
    """Return the user's own tags."""
    tags = os.environ.get("WANDB_TAGS", "")
    return [tag.strip() for tag in tags.split(",")] if tags else []


def check_wandb(mode: WandbMode) -> None:
    """Check before training everything that would make W&B fail later.

    If `mode` is online this asks the server whose account we use. Raises ValueError for a variable
    that W&B or we refuse, and, online, if there is no account or the server can't be reached.
    """
    mode = resolve_mode(mode)
    if mode == "disabled":
        return
    found = [name for name in REFUSED if os.environ.get(name)]
    if found:
        raise ValueError(
            f"check_wandb: {found[0]} must be unset, got {os.environ[found[0]]!r}; a run that goes "
            "on is joined to its first part by its own id"
        )
    import wandb  # heavy: 1 s of CPU, and `disabled` never needs it

    try:
        wandb.Settings(project=project(), run_tags=tuple(added_tags()))
        wandb.setup()
    except (wandb.Error, ValueError) as error:
        raise ValueError(
            f"check_wandb: a WANDB_* variable is no W&B setting: {error}; mend or unset it"
        ) from error
    if mode == "online":
        check_account()


def check_account() -> None:
    """Ask the server whose account we use.

    Raises ValueError, which says what to do, if there is no account or no server.
    """
    import wandb  # heavy

    mode = os.environ.get("WANDB_MODE", "")
    if _MODES.get(mode, "online") != "online":
        raise ValueError(
            f"check_account: WANDB_MODE must be online or unset, got {mode!r}; unset it"
        )
    server = wandb.setup().settings.base_url
    instead = "run `wandb login` or set WANDB_API_KEY; `--wandb offline` needs neither"
    try:
        known = wandb.login(prompt=False, verify=True)
    except (wandb.Error, OSError) as error:
        raise ValueError(f"check_account: {server} refuses: {error}; {instead}") from error
    if not known:
        raise ValueError(f"check_account: no account is known at {server}; {instead}")
