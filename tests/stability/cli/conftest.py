"""A run that a command can be pointed at."""

from pathlib import Path

import pytest
import yaml

from stability.cli.main import main

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="session")
def trained_run(tmp_path_factory):
    """A run of two layers and two steps, with its snapshots."""
    folder = tmp_path_factory.mktemp("study")
    content = yaml.safe_load((ROOT / "configs" / "quickstart.yaml").read_text())
    content["base"]["model"] = {"depth": 2, "width": 32, "heads": 2, "context": 16}
    content["base"]["train"].update(steps=2, batch_size=2, snapshot_steps=[1], accelerator="cpu")
    content |= {"seeds": [0], "early_step": 1, "keep": "all"}
    arms = content["arms"]
    content["arms"] = {name: arms[name] for name in arms if name == content["yardstick"]}
    del content["policy"]
    (folder / "study.yaml").write_text(yaml.safe_dump(content))
    words = ["run", str(folder / "study.yaml"), "--out", str(folder), "--wandb", "disabled"]
    assert main(words) == 0
    return next(folder.glob("*/baseline/seed-0"))
