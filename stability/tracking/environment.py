"""Reads W&B's environment variables: they may say where runs go, but not which run is which.

We honour WANDB_MODE (where no mode is asked for), WANDB_PROJECT, WANDB_ENTITY, WANDB_BASE_URL,
WANDB_API_KEY, WANDB_NOTES, and WANDB_TAGS (added to our own tags). We ignore WANDB_RUN_ID,
WANDB_NAME, WANDB_RUN_GROUP, WANDB_JOB_TYPE and WANDB_DIR, because the study decides the id, name,
group, job type and folder of a run, and WANDB_SILENT, because W&B is always silent here. We refuse
those in `REFUSED`, which make W&B continue or join runs in ways of its own: here a run is continued
by its own id only. No variable changes the training. W&B runs are started in `wandb_run`.
"""

import os
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import wandb

__all__ = [
    "PROJECT",
    "WandbMode",
    "added_tags",
    "check_account",
    "check_not_offline",
    "check_wandb",
    "destination",
    "project",
    "resolve_mode",
    "set_up",
]

WandbMode = Literal["offline", "online", "disabled"]

PROJECT = "training-stability"
"""The W&B project that runs go to unless WANDB_PROJECT names another."""

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
"""Maps each word that W&B accepts in WANDB_MODE, deprecated ones included, to its mode."""


def resolve_mode(mode: WandbMode | None) -> WandbMode:
    """Return `mode`, as in `wandb.init`; where it is None WANDB_MODE, and "offline" without that.

    Raises ValueError if the variable is read and holds an unknown word.
    """
    chosen = os.environ.get("WANDB_MODE", "")
    if mode is not None or not chosen:
        return mode or "offline"
    if chosen not in _MODES:
        raise ValueError(f"WANDB_MODE must be one of {', '.join(_MODES)}, got {chosen!r}; unset it")
    return _MODES[chosen]


def project() -> str:
    """Return the W&B project that runs go to."""
    return os.environ.get("WANDB_PROJECT") or PROJECT


def destination() -> list[str]:
    """Return server, entity and project ("" for W&B's own default).

    Two runs go to the same place if these are equal.
    """
    return [os.environ.get("WANDB_BASE_URL", ""), os.environ.get("WANDB_ENTITY", ""), project()]


def added_tags() -> list[str]:
    """Return the tags in WANDB_TAGS, which are separated by commas."""
    tags = os.environ.get("WANDB_TAGS", "")
    return [tag.strip() for tag in tags.split(",")] if tags else []


def set_up(settings: "wandb.Settings") -> Any:
    """Call `wandb.setup`; where the service that WANDB_SERVICE names has ended, with another.

    W&B names the service of a study in the environment of all its runs. This unsets the variable.
    """
    import wandb  # heavy

    try:
        return wandb.setup(settings=settings)
    except Exception as error:  # W&B 0.31 has it in a private module, and below no error of its own
        if type(error).__name__ != "WandbServiceConnectionError":
            raise
        os.environ.pop("WANDB_SERVICE", None)
        return wandb.setup(settings=settings)


def check_wandb(mode: WandbMode) -> None:
    """Check before training what would make W&B fail during it.

    If `mode` is online, whatever WANDB_MODE says, this also logs in. Raises ValueError for a
    variable that W&B or we refuse and, if online, without an account or if the server can't be
    reached.
    """
    if mode == "disabled":
        return
    found = [name for name in REFUSED if os.environ.get(name)]
    if found:
        raise ValueError(
            f"{found[0]} must be unset, got {os.environ[found[0]]!r}; a run that goes "
            "on is joined to its first part by its own id"
        )
    check_settings(mode)
    if mode == "online":
        check_account()


def check_settings(mode: WandbMode) -> None:
    """Raise ValueError unless W&B can be imported, and takes the WANDB_* variables."""
    try:
        import wandb  # heavy: 1 s of CPU, and `disabled` never needs it
    except ImportError as error:
        raise ValueError(
            f"W&B can't be imported: {error}; install wandb with all that it needs, "
            "or set WANDB_MODE=disabled"
        ) from error

    # `Settings` checks the project and the tags, `setup` the other WANDB_* variables.
    try:
        wandb.Settings(project=project(), run_tags=tuple(added_tags()))
        # else `login` goes by WANDB_MODE, and tells of the account that it uses
        set_up(wandb.Settings(mode=mode, silent=True))
    except (wandb.Error, ValueError) as error:
        raise ValueError(
            f"a WANDB_* variable is no W&B setting: {_reason(error)}; mend or unset it"
        ) from error


def _reason(error: Exception) -> str:
    """Return what W&B refuses, in one line; of pydantic's error the setting and its value."""
    if not hasattr(error, "errors"):
        return str(error)
    found = error.errors()  # pyright: ignore[reportAttributeAccessIssue]
    return "; ".join(
        f"{'.'.join(map(str, each['loc']))}: {each['msg']}, got {each['input']!r}" for each in found
    )


def check_not_offline() -> None:
    """Raise ValueError if WANDB_MODE says to stay away from the server, and no flag says else."""
    mode = os.environ.get("WANDB_MODE", "")
    if _MODES.get(mode, "online") != "online":
        raise ValueError(f"WANDB_MODE must be online or unset, got {mode!r}; unset it")


def check_account(without: str = "`--wandb offline` needs neither") -> None:
    """Check with the server that we are logged in to an account; `without` says what needs none.

    Raises ValueError, which says what to do, if there is no account, or if the server can't be
    reached.
    """
    import wandb  # heavy

    server = set_up(wandb.Settings(silent=True)).settings.base_url
    instead = f"run `wandb login` or set WANDB_API_KEY; {without}"
    try:
        known = wandb.login(prompt=False, verify=True)
    except (wandb.Error, OSError) as error:
        raise ValueError(f"W&B: {server} refuses: {error}; {instead}") from error
    if not known:
        raise ValueError(f"W&B: no account is known at {server}; {instead}")
