"""`stability verify` proves a pair from its records, or names the first break."""

import json
import shutil
from dataclasses import replace

import pytest

from stability.analysis.pair_contract import prove_pair
from stability.cli.main import main
from stability.records.manifest import read_manifest, write_manifest
from stability.records.paths import RunPaths
from tests.stability.sealing import seal


@pytest.fixture
def runs(trained, tmp_path):
    """Copies of a baseline and three candidates, to be spoiled."""
    shutil.copytree(trained, tmp_path / "tiny")
    names = ("baseline", "fp32", "rerun", "init_seed")
    return {name: RunPaths.for_run(tmp_path / "tiny", name, 0) for name in names}


def _change(paths, **changes):
    write_manifest(paths.manifest, replace(read_manifest(paths.manifest), **changes))


def test_honest_pairs_are_proven_and_named(runs):
    said = {name: prove_pair(runs["baseline"], run).sentence for name, run in runs.items()}
    assert said == {
        "baseline": "an A/A pair",
        "fp32": "a pair: they differ in precision alone",
        "rerun": "an A/A pair",
        "init_seed": "a pair: they differ in seed.init_offset alone",
    }


def test_another_seed_is_no_pair(runs, trained):
    proof = prove_pair(runs["baseline"], RunPaths.for_run(trained, "fp32", 1))
    assert proof.breach.field == "config.seed.base"
    fields = {line.field: line.sameness for line in proof.lines}
    assert fields["config less the axis"] == fields["hashes.init_weights"] == "different"
    assert fields["config.precision"] == "different by design"
    assert fields["batch 1"] == "different"


def test_another_batch_is_named_by_its_step(runs):
    path = runs["fp32"].metrics
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        if "batch_hash" in line and line["step"] >= 4:
            line["batch_hash"] = "f" * 64
    path.write_text("".join(seal(line) for line in lines))
    manifest = read_manifest(runs["fp32"].manifest)
    _change(runs["fp32"], files={n: s for n, s in manifest.files.items() if "metrics" not in n})
    assert prove_pair(runs["baseline"], runs["fp32"]).breach.field == "batch 4"


@pytest.mark.parametrize(
    ("name", "change", "field"),
    [
        ("fp32", {"environment": {"cpu": "another"}}, "environment.cpu"),
        ("fp32", {"hashes": {"text": "x", "init_weights": "y"}}, "hashes.text"),
        ("rerun", {"hashes": {"final_weights": "other"}}, "hashes.final_weights"),
    ],
)
def test_each_part_is_broken_once(runs, name, change, field):
    manifest = read_manifest(runs[name].manifest)
    whole = {key: {**getattr(manifest, key), **values} for key, values in change.items()}
    _change(runs[name], **whole)
    assert prove_pair(runs["baseline"], runs[name]).breach.field == field


def test_damaged_records_prove_nothing(runs):
    path = runs["fp32"].snapshot(2)
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    broken = prove_pair(runs["baseline"], runs["fp32"]).breach
    assert broken.field == "records of fp32, seed 0"
    assert "is damaged" in broken.first


def test_a_damaged_log_is_a_broken_line_and_no_crash(runs):
    path = runs["fp32"].metrics
    path.write_bytes(path.read_bytes().replace(b"train/loss", b"train/lost", 1))
    proof = prove_pair(runs["baseline"], runs["fp32"])
    assert proof.breach.field == "records of fp32, seed 0"
    assert {line.field: line.sameness for line in proof.lines}["batches"] == "unknown"


def test_the_command_shows_a_run_a_study_and_json(runs, trained, capsys):
    assert main(["verify", str(runs["baseline"].root), str(runs["fp32"].root)]) == 0
    shown = capsys.readouterr().out
    assert "a pair: they differ in precision alone" in shown
    assert "batches up to step 6" in shown
    assert main(["verify", str(trained)]) == 0
    assert "12 of 12 planned pairs keep the contract" in capsys.readouterr().out
    _change(
        runs["rerun"], environment=read_manifest(runs["rerun"].manifest).environment | {"cpu": "x"}
    )
    arguments = [str(runs["baseline"].root), str(runs["rerun"].root), "--json"]
    assert main(["verify", *arguments]) == 1
    (proof,) = json.loads(capsys.readouterr().out)
    assert proof["is_pair"] is False
    assert proof["sentence"].startswith("no pair: environment.cpu is")


def test_a_folder_that_is_no_run_is_one_line(tmp_path, runs, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["verify", str(runs["baseline"].root), str(tmp_path)])
    assert caught.value.code == 2
    assert "must be a run's folder" in capsys.readouterr().err
    with pytest.raises(SystemExit) as caught:
        main(["verdict", str(runs["baseline"].manifest)])
    assert caught.value.code == 2
    assert f"nearest: {tmp_path / 'tiny'}" in capsys.readouterr().err
