"""`stability workspace STUDY`: build a study's panels in the W&B app."""

import os
from pathlib import Path

import wandb
from rich.console import Console

from stability.analysis.study_records import read_study
from stability.cli.json_output import print_json
from stability.report.wandb_panels import as_json, save_workspace
from stability.tracking.wandb_environment import check_account, project

__all__ = ["workspace"]


def workspace(study: Path, json: bool = False) -> int:
    """Build a workspace in the W&B app: ladder, loss, drift, deviation, watch; print its address.

    The study's runs must be online, by `stability run --wandb online` or `wandb sync`.

    Args:
        study: the folder of a study, e.g. runs/quickstart
        json: print which panels there would be, and send nothing
    """
    recorded = read_study(study)
    if json:
        print_json(as_json(recorded))
        return 0
    check_account()
    try:
        entity = os.environ.get("WANDB_ENTITY") or wandb.Api().default_entity or ""
        address = save_workspace(recorded, entity, project())
    except wandb.Error as error:
        raise ValueError(f"workspace: W&B refuses: {error}; try again later") from error
    Console().print(address, soft_wrap=True, highlight=False)
    return 0
