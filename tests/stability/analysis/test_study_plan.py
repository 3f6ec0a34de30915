"""What study.json says of an arm is held against its runs' manifests and the sealed protocol."""

import shutil
from dataclasses import replace

import pytest

from stability.analysis.study_plan import left_out_runs, plan_troubles, unplanned
from stability.analysis.study_records import find_arm, read_study
from stability.cli.main import main
from stability.records.manifest import read_manifest, write_manifest
from stability.records.paths import RunPaths, StudyPaths
from stability.records.sealed_json import read_sealed, write_sealed


@pytest.fixture
def study(trained, tmp_path):
    """A copy of a whole sealed study, to be spoiled."""
    return shutil.copytree(trained, tmp_path / "tiny")


def edit(study, change, path="study"):
    """Change study.json, or another sealed file of the study, and seal it anew."""
    file = getattr(StudyPaths(study), path)
    content = read_sealed(file, "")
    change(content)
    write_sealed(file, content)


def with_role(arm, role):
    def change(content):
        next(each for each in content["arms"] if each["name"] == arm)["role"] = role

    return change


def found(study, arm):
    read = read_study(study)
    manifest = read_manifest(RunPaths.for_run(study, arm, 0).manifest)
    return unplanned(read, find_arm(read, arm), manifest)


@pytest.mark.slow
def test_the_runs_of_a_sound_study_are_what_it_says(study):
    assert [found(study, arm.name) for arm in read_study(study).arms] == [None] * 7
    assert plan_troubles(read_study(study)) == []
    assert left_out_runs(read_study(study)) == []


@pytest.mark.parametrize(
    ("arm", "role", "said"),
    [
        ("flash_fa2", "yardstick", "was there as candidate when it was trained, the study has it"),
        pytest.param(
            "fp32",
            "rerun",
            "must not be rerun in an arm that changes precision",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "rerun",
            "broken",
            "must not be broken in an arm that changes nothing",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_another_role_is_no_pair(study, capsys, arm, role, said):
    edit(study, with_role(arm, role))
    was = found(study, arm)
    assert was is not None
    assert was.is_contradicted
    assert said in was.said
    assert main(["verify", str(study)]) == 1
    assert f"no pair: {was.said}" in capsys.readouterr().out


def test_the_role_of_an_older_record_is_that_of_the_seal(study):
    path = RunPaths.for_run(study, "flash_fa2", 0).manifest
    write_manifest(path, replace(read_manifest(path), role=""))
    assert found(study, "flash_fa2") is None
    edit(study, with_role("flash_fa2", "yardstick"))
    was = found(study, "flash_fa2")
    assert was is not None
    assert "was there as candidate" in was.said


def test_a_role_that_manifest_and_study_were_given_is_not_the_sealed_one(study):
    edit(study, with_role("flash_fa2", "yardstick"))
    path = RunPaths.for_run(study, "flash_fa2", 0).manifest
    write_manifest(path, replace(read_manifest(path), role="yardstick"))
    was = found(study, "flash_fa2")
    assert was is not None
    assert was.said == "flash_fa2 was sealed as candidate, the study has it as yardstick"


def test_another_base_than_the_baseline_was_trained_with_is_told(study):
    edit(study, lambda content: content["config"]["base"]["optimizer"].update(lr=1.0))
    was = found(study, "baseline")
    assert was is not None
    assert "baseline, seed 0, was trained with optimizer.lr = " in was.said
    assert was.said.endswith("the study's base has 1.0")


@pytest.mark.slow
def test_a_protocol_that_was_sealed_anew_is_not_the_runs(study, capsys):
    def without(content):
        content["arms"] = {n: arm for n, arm in content["arms"].items() if n != "flash_fa2"}

    edit(study, without, "protocol")
    said = "baseline, seed 0, was trained under another protocol than protocol.json"
    assert plan_troubles(read_study(study)) == [said]
    assert main(["verify", str(study)]) == 1
    assert said in capsys.readouterr().out


def test_one_run_under_two_seeds_is_no_repetition(study):
    first, second = (RunPaths.for_run(study, "rerun", seed) for seed in (0, 1))
    shutil.rmtree(second.root)
    shutil.copytree(first.root, second.root)
    write_manifest(second.manifest, replace(read_manifest(second.manifest), seed=1))
    assert plan_troubles(read_study(study)) == [
        "rerun, seed 1, ends in the same bits as seed 0: it is one run, no repetition"
    ]


def test_a_run_that_is_no_part_of_a_sealed_study_is_listed(study):
    edit(study, lambda content: content["config"].update(seeds=[0]))
    left = left_out_runs(read_study(study))
    assert "rerun/seed-1 is no part of the study, finished" in left
