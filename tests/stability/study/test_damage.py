"""A flipped bit in any record is found; a run goes on from what is whole, or is refused."""

import random
import resource
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest

from stability.analysis.study_records import read_study
from stability.config.load import load_study
from stability.records.manifest import read_manifest, write_manifest
from stability.records.paths import RunPaths
from stability.records.run_files import damage, read_run_snapshot
from stability.study.run import RunConflictError, locked
from stability.study.run_study import plan_study
from tests.stability.study.recorded_bits import recorded_bits


def _short(content):
    content["arms"] = {"baseline": {}, "fp32": {"precision": "32-true"}}
    content["seeds"] = [0]


def _flip(path, position, bit):
    content = bytearray(path.read_bytes())
    content[position] ^= 1 << bit
    path.write_bytes(content)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, text_file):
    """The records of a short study that ended undisturbed; tests copy them."""
    import yaml

    from tests.conftest import run_quietly, tiny_content

    folder = tmp_path_factory.mktemp("whole")
    content = tiny_content(text_file)
    _short(content)
    (folder / "tiny.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    run_quietly(load_study(folder / "tiny.yaml"), folder / "runs")
    return folder


@pytest.fixture
def copy(whole, tmp_path):
    """Study config and a copy of its records, to be spoiled."""
    shutil.copytree(whole / "runs", tmp_path / "runs")
    return load_study(whole / "tiny.yaml"), tmp_path / "runs"


@pytest.mark.parametrize(
    "name",
    [
        "manifest.json",
        "metrics.jsonl",
        "snapshots/step-00000004.safetensors",
        "checkpoints/step-00000006.ckpt",
    ],
)
def test_a_flipped_bit_in_a_run_is_found_and_the_file_named(copy, name):
    run = RunPaths.for_run(copy[1] / "tiny", "baseline", 0)
    path = run.root / name
    assert damage(run) == []
    dice, size = random.Random(name), path.stat().st_size
    for position in [0, size - 1, *(dice.randrange(size) for _ in range(40))]:
        bit = dice.randrange(8)
        _flip(path, position, bit)
        found = damage(run)
        assert found, (position, bit)
        assert any(str(path) in sentence for sentence in found), (position, bit, found)
        _flip(path, position, bit)
    assert damage(run) == []


def test_a_flipped_bit_in_the_study_is_found(copy):
    path = copy[1] / "tiny" / "study.json"
    dice, size = random.Random(0), path.stat().st_size
    for position in (dice.randrange(size - 1) for _ in range(60)):
        before = path.read_bytes()
        _flip(path, position, dice.randrange(8))
        # a flip may turn one kind of white space into another: it says the same
        if b"".join(before.split()) != b"".join(path.read_bytes().split()):
            with pytest.raises(ValueError, match=r"study\.json"):
                read_study(copy[1] / "tiny")
        path.write_bytes(before)


def test_an_ended_log_that_is_cut_or_swapped_is_not_read_as_data(copy):
    run = RunPaths.for_run(copy[1] / "tiny", "fp32", 0)
    lines = run.metrics.read_bytes().splitlines(keepends=True)
    run.metrics.write_bytes(b"".join(lines[:-1]))
    found = read_study(copy[1] / "tiny").arm("fp32").runs[0]
    assert found.state == "failed"
    assert "metrics.jsonl is not the one that the manifest lists" in found.message


@pytest.mark.parametrize("state", ["interrupted", "running"])
def test_a_log_listed_before_its_run_ended_stops_no_resume(copy, run_tiny, state):
    run = RunPaths.for_run(copy[1] / "tiny", "fp32", 0)
    manifest = read_manifest(run.manifest)
    assert "metrics.jsonl" in manifest.files
    write_manifest(run.manifest, replace(manifest, state=state))
    assert run_tiny(*copy).ended[1][2:] == ("finished", "")


def test_a_damaged_ended_run_is_refused_and_its_snapshot_never_read(copy, run_tiny):
    study, out = copy
    run = RunPaths.for_run(out / "tiny", "baseline", 0)
    _flip(run.snapshot(4), 900, 3)
    with pytest.raises(RunConflictError, match=r"step-00000004.safetensors: is damaged.*remove"):
        run_tiny(study, out)
    with pytest.raises(ValueError, match=r"step-00000004.safetensors: is damaged: its SHA-256"):
        read_run_snapshot(run, 4)
    run.snapshot(4).unlink()
    _flip(run.manifest, 900, 1)
    with pytest.raises(RunConflictError, match=r"manifest.json: must .*; remove .* to train it"):
        run_tiny(study, out)
    _flip(run.manifest, 900, 1)
    with pytest.raises(RunConflictError, match=r"step-00000004.safetensors: is missing; remove"):
        run_tiny(study, out)


@pytest.mark.parametrize(
    ("damaged", "said"),
    [
        ("checkpoints/step-00000006.ckpt", ["is damaged", "going on from step 4"]),
        ("snapshots/step-00000002.safetensors", ["is damaged", "starting anew"]),
        ("metrics.jsonl", ["line 1 must", "starting anew"]),
        ("", []),
    ],
)
def test_an_unfinished_run_goes_on_from_what_is_whole(copy, run_tiny, whole, damaged, said):
    study, out = copy
    run = RunPaths.for_run(out / "tiny", "fp32", 0)
    manifest = read_manifest(run.manifest)
    files = {name: sum for name, sum in manifest.files.items() if name != "metrics.jsonl"}
    write_manifest(run.manifest, replace(manifest, state="running", files=files))
    if damaged:
        _flip(run.root / damaged, 9, 2)
    observer = run_tiny(study, out)
    assert [ended[2:] for ended in observer.ended] == [("finished", "kept"), ("finished", "")]
    notes = " ".join(observer.notes)
    assert all(part in notes for part in said), notes
    assert bool(notes) == bool(said)
    assert recorded_bits(out / "tiny") == recorded_bits(whole / "runs" / "tiny")


def test_a_full_disk_is_a_clear_stop_and_nothing_is_lost(write_study, run_tiny, tmp_path, whole):
    path, out = write_study(_short), tmp_path / "runs"
    most = 150_000  # bytes of a file: a snapshot fits, a checkpoint does not
    done = subprocess.run(
        [sys.executable, "-m", "stability.cli.main", "run", path, "--out", out, "--wandb=disabled"],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (most, most)),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1, done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stderr.count("the disk is full") == 1
    assert "the same command goes on from here" in done.stderr
    run = RunPaths.for_run(out / "tiny", "baseline", 0)
    assert read_manifest(run.manifest).state == "interrupted"
    assert damage(run) == []
    assert not RunPaths.for_run(out / "tiny", "fp32", 0).manifest.exists()
    run_tiny(load_study(path), out)
    assert recorded_bits(out / "tiny") == recorded_bits(whole / "runs" / "tiny")


def test_a_run_that_another_process_trains_is_refused(write_study, run_tiny, tmp_path):
    study = load_study(write_study(_short), {"train.steps": "2"})
    run = plan_study(study, tmp_path / "runs")[0]
    with locked(run.paths):
        ended = run_tiny(study, tmp_path / "runs").ended
    assert "another process is training this run" in ended[0][3]
    assert run_tiny(study, tmp_path / "runs").ended[0][2:] == ("finished", "")
