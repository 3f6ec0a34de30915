"""`stability demo`: train the study that comes with the package."""

from pathlib import Path

from stability.cli.run import run
from stability.config import shipped
from stability.tracking.environment import WandbMode

__all__ = ["demo"]


def demo(out: Path = Path("runs"), wandb: WandbMode | None = None, jobs: int = 0) -> int:
    """Train 27 paired runs on Python's own sources, judge two attentions, and write the report.

    It takes two to four minutes on two CPU cores, more without AVX-512, and needs nothing that is
    not installed.

    Args:
        out: folder that gets the folder `quickstart`
        wandb: where W&B's records go: offline, which needs no account, online or disabled
        jobs: how many runs train at once; 0 is one for each GPU, or one on a CPU
    """
    return run(shipped.configs() / "quickstart.yaml", out=out, wandb=wandb, jobs=jobs)
