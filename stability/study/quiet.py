"""Keeps Lightning's tips and device lines out of what a study shows."""

import logging
import warnings

__all__ = ["quieten_lightning"]


def quieten_lightning() -> None:
    """Let Lightning log errors alone, in this process, and none of its own warnings."""
    for name in ("lightning.pytorch", "lightning.fabric", "lightning"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"lightning(\.|$)")
