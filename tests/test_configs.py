"""Every YAML in configs/ loads and expands, and says its claim, its time and its command."""

from pathlib import Path

import pytest
import yaml

from stability.analysis.pair_contract import axis_of
from stability.analysis.sequential import LOOKS
from stability.cli.main import main
from stability.config.arms import expand
from stability.config.command_study import expand_commands, is_command_study, load_command_study
from stability.config.convert import from_dict
from stability.config.load import load_study
from stability.config.schema import ModelConfig

ROOT = Path(__file__).parent.parent
MODELS = sorted((ROOT / "configs" / "model").glob("*.yaml"))
STUDIES = sorted(p for p in (ROOT / "configs").rglob("*.yaml") if p.parent.name != "model")


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_model_preset_loads(path):
    model = from_dict(ModelConfig, yaml.safe_load(path.read_text()), where=path.name)
    assert model.width % model.heads == 0
    assert path.read_text().startswith("#")


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_study_expands_into_arms_of_declared_axes(path):
    header = [line for line in path.read_text().splitlines() if line.startswith("#")]
    assert {"# Claim", "# Time", "# Run"} <= {line.split(":")[0] for line in header}
    if is_command_study(path):
        assert expand_commands(load_command_study(path, {}))
        return
    study = load_study(path, None)
    axes = {arm.name: axis_of(arm, study.allow_many) for arm in expand(study)}
    assert axes["baseline"] == "none"
    assert study.yardstick in axes


def test_quickstart_has_the_promised_arms():
    study = load_study(ROOT / "configs" / "quickstart.yaml", None)
    arms = expand(study)
    assert {arm.name: axis_of(arm) for arm in arms} == {
        "baseline": "none",
        "flash_fa2": "attention",
        "flash_all_bf16": "attention",
        "broken": "attention",
        "reference": "precision",
        "rerun": "none",
        "nudge": "nudge",
        "nudge_2": "nudge",
        "init_seed": "seed.init_offset",
    }
    assert {arm.name: arm.role for arm in arms} == {
        "baseline": "baseline",
        "flash_fa2": "candidate",
        "flash_all_bf16": "candidate",
        "broken": "broken",
        "reference": "reference",
        "rerun": "rerun",
        "nudge": "nudge",
        "nudge_2": "nudge",
        "init_seed": "yardstick",
    }
    judged = [arm for arm in arms if arm.role in ("candidate", "broken")]
    assert all(arm.config.probe.golden and arm.config.probe.every for arm in judged)


def test_quickstart_has_the_seeds_of_a_first_look_and_the_looks_of_coherence():
    study = load_study(ROOT / "configs" / "quickstart.yaml", None)
    assert len(study.seeds) == LOOKS[0]
    judged = [arm for arm in expand(study) if arm.role == "candidate"]
    assert len(judged) == 2
    for arm in judged:
        assert study.base.train.steps // arm.config.probe.gradient_every >= 20


WORKFLOW = ROOT / "examples" / "ci" / "kernel_check.yml"


def test_the_workflow_for_others_asks_what_the_verbs_take(capsys):
    steps = yaml.safe_load(WORKFLOW.read_text())["jobs"]["check"]["steps"]
    asked = [step["run"].split() for step in steps if step.get("run", "").startswith("stability ")]
    assert [words[1] for words in asked] == ["check", "run", "verdict", "export"]
    for words in asked:
        with pytest.raises(SystemExit, match="0"):
            main([words[1], "--help"])
        known = capsys.readouterr().out
        assert all(word in known for word in words if word.startswith("--")), words
