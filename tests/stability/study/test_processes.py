"""Runs in processes of their own end in the bits of runs one after another; a dead one is told."""

import subprocess
import sys

import pytest
import torch

from stability.config.load import load_study
from stability.records.manifest import read_manifest
from stability.records.paths import RunPaths
from stability.study import processes
from tests.stability.study.recorded_bits import recorded_bits


def _three(content):
    content["arms"] = {"baseline": {}, "fp32": {"precision": "32-true"}, "rerun": {}}
    content["seeds"] = [0]


@pytest.mark.slow
def test_two_at_once_end_in_the_same_bits(write_study, run_tiny, tmp_path):
    study = load_study(write_study(_three))
    together = run_tiny(study, tmp_path / "together", jobs=2)
    assert sorted(ended[:3] for ended in together.ended) == [
        (arm, 0, "finished") for arm in ("baseline", "fp32", "rerun")
    ]
    assert together.ended[0][0] == "baseline"
    assert len(together.losses) == 3 * 6
    run_tiny(study, tmp_path / "alone")
    alone = recorded_bits(tmp_path / "alone" / "tiny")
    assert recorded_bits(tmp_path / "together" / "tiny") == alone
    again = run_tiny(study, tmp_path / "together", jobs=2).ended
    assert [message for *_, message in again] == ["kept"] * 3


@pytest.mark.slow
def test_a_killed_child_is_a_failed_run_and_the_others_go_on(write_study, run_tiny, tmp_path):
    def edit(content):
        _three(content)
        own = {"implementation": "tests.stability.study.own_attentions:deadly"}
        content["arms"]["deadly"] = {"attention": own}

    ended = run_tiny(load_study(write_study(edit)), tmp_path, jobs=2).ended
    assert ("deadly", 0, "failed", "killed by signal 9") in ended
    assert sorted(arm for arm, _, state, _ in ended if state == "finished") == [
        "baseline",
        "fp32",
        "rerun",
    ]


@pytest.mark.slow
def test_candidates_of_a_failed_baseline_are_skipped(write_study, run_tiny, tmp_path):
    def edit(content):
        _three(content)
        own = {"implementation": "tests.stability.study.own_attentions:deadly"}
        content["base"]["attention"] = own

    ended = run_tiny(load_study(write_study(edit)), tmp_path, jobs=2).ended
    assert ended[0] == ("baseline", 0, "failed", "killed by signal 9")
    assert {ended[2:] for ended in ended[1:]} == {("skipped", "its baseline did not finish")}


def test_what_the_server_has_ready_can_be_imported_and_holds_what_a_run_needs():
    # multiprocessing leaves out, in silence, what it cannot import: each run would be slower
    code = (
        "import importlib, sys\n"
        f"importlib.import_module({processes._READY!r})\n"
        "from stability.records import identity\n"
        "assert identity._distributions.cache_info().currsize == 1\n"
        "assert {'wandb', 'safetensors.torch', 'stability.study.train_run'} <= set(sys.modules)\n"
        "import torch\n"
        "assert not torch.cuda.is_initialized()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.fixture
def matmul_precision():
    """Put back what checking a study, which imports the arms' modules, leaves in this process."""
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)
    sys.modules.pop("tests.stability.study.own_switches", None)


def test_what_an_arms_module_does_to_its_process_reaches_no_other_run(
    write_study, run_tiny, tmp_path, matmul_precision
):
    def edit(content):
        own = {"implementation": "tests.stability.study.own_switches:attend"}
        content["base"]["precision"] = "32-true"
        content |= {"arms": {"coarse": {"attention": own}}, "yardstick": ""}
        content["seeds"] = [0, 1]

    def edit_alone(content):
        edit(content)
        content |= {"arms": {}, "yardstick": ""}

    run_tiny(load_study(write_study(edit_alone)), tmp_path / "alone", isolated=True)
    assert torch.get_float32_matmul_precision() == "highest"
    beside = run_tiny(load_study(write_study(edit)), tmp_path / "beside", isolated=True)
    assert torch.get_float32_matmul_precision() == "medium"  # the check has imported it here
    assert [ended[:3] for ended in beside.ended] == [
        ("baseline", 0, "finished"),
        ("coarse", 0, "failed"),
        ("baseline", 1, "finished"),
        ("coarse", 1, "failed"),
    ]
    said = "environment.switch.cuda_matmul_fp32 must be the baseline's 'ieee', is 'tf32'"
    assert said in beside.ended[1][3]
    for seed in (0, 1):
        alone, other = (
            read_manifest(RunPaths.for_run(tmp_path / folder / "tiny", "baseline", seed).manifest)
            for folder in ("alone", "beside")
        )
        assert other.hashes["final_weights"] == alone.hashes["final_weights"]
        assert other.environment == alone.environment


def test_no_jobs_are_refused(write_study, run_tiny, tmp_path):
    with pytest.raises(ValueError, match="jobs must be >= 1, got 0"):
        run_tiny(load_study(write_study(_three)), tmp_path, jobs=0)
    assert not list(tmp_path.glob("tiny/*"))
