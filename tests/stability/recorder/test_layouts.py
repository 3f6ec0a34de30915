"""A script under torchrun in one process and in two is a pair whose change is the layout."""

import json
import sys

import pytest

from stability.analysis.arm_summary import groups_of_arm
from stability.analysis.study_records import read_study
from stability.cli.main import main
from stability.report.page.tables import changes
from tests.stability.recorder.recording import SCRIPTS, code_of

pytestmark = pytest.mark.slow


def test_two_ranks_beside_one_are_labelled_layout(tmp_path, monkeypatch, capsys):
    # torchrun sets it for several ranks, and another number of threads is another environment
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    script = [str(SCRIPTS / "ranks.py"), "--layout", "ddp", "--seed", "{seed}"]
    for arm, ranks in (("baseline", "1"), ("two", "2")):
        given = ["--study", "study", "--arm", arm, "--out", str(tmp_path), "--wandb", "disabled"]
        assert code_of("record", *given, "--", *launcher, ranks, *script) == 0
    study = read_study(tmp_path / "study")
    arm = study.arm("two")
    assert [run.manifest.ranks for run in (study.arm("baseline").runs[0], arm.runs[0])] == [1, 2]
    assert (arm.axis, groups_of_arm(study, arm)) == ("program", ["layout"])
    assert [row.group for row in changes(study)] == ["layout"]
    # the same sum of gradients in another order
    assert 0 < arm.runs[0].drift("rel_l2")[6] < 1e-5
    capsys.readouterr()
    assert main(["show", str(tmp_path / "study"), "two", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["groups"] == ["layout"]
    assert shown["change"] == (
        "layout: --standalone --nproc-per-node 1 -> --standalone --nproc-per-node 2"
    )
    assert main(["verify", str(tmp_path / "study")]) == 0
