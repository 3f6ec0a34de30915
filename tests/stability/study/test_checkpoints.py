"""A stopped or damaged run ends in the bits of an undisturbed one, or is refused by name."""

import errno
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from stability.analysis.study_records import read_study
from stability.config.load import load_study
from stability.records import sealed_json
from stability.records.manifest import read_manifest, write_manifest
from stability.records.metric_log import read_metrics
from stability.records.paths import RunPaths
from stability.records.run_files import damage, read_run_snapshot
from stability.records.sealed_json import write_sealed
from stability.study.run import RunConflictError, check_existing, locked
from stability.study.run_study import plan_study
from tests.conftest import train_edited
from tests.sampling import one_in
from tests.stability.study.recorded_bits import recorded_bits

ROOT = Path(__file__).parents[3]
KEPT = ("baseline", "fp32")


def _hundred_steps(content):
    content["arms"] = {arm: content["arms"][arm] for arm in KEPT}
    content["seeds"] = [0]
    content["base"]["train"]["steps"] = 100
    content["base"]["train"]["checkpoint_every"] = 7


def _start(study: Path, out: Path) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
    command = [sys.executable, "-m", "stability.cli.main", "run", str(study), "--out", str(out)]
    return subprocess.Popen(
        [*command, "--wandb", "disabled"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # a test run in the background has SIGINT ignored, and hands that on
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def _wait_for_lines(path: Path, lines: int, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and process.poll() is None:
        if path.exists() and path.read_bytes().count(b"\n") >= lines:
            return
        time.sleep(0.005)
    raise AssertionError(
        f"ended with {process.poll()} before line {lines}: {process.stdout.read()}"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arm", "lines", "how"),
    [
        pytest.param("baseline", 10, signal.SIGKILL, marks=pytest.mark.long),
        pytest.param("baseline", 70, signal.SIGKILL, marks=pytest.mark.long),
        ("fp32", 90, signal.SIGINT),
    ],
    ids=["killed-before-a-checkpoint", "killed-after-one", "interrupted-in-a-candidate"],
)
def test_a_stopped_study_goes_on_to_the_same_bits(write_study, run_tiny, tmp_path, arm, lines, how):
    path = write_study(_hundred_steps)
    process = _start(path, tmp_path / "stopped")
    run = RunPaths.for_run(tmp_path / "stopped" / "tiny", arm, 0)
    _wait_for_lines(run.metrics, lines, process)
    process.send_signal(how)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == (130 if how == signal.SIGINT else -signal.SIGKILL), output
    manifest = read_manifest(run.manifest)
    # the process that trains may find its command gone before it dies with it
    assert manifest.state == "interrupted" or (how, manifest.state) == (signal.SIGKILL, "running")
    assert len(read_metrics(run.metrics)["train/loss"].steps) < 100

    study = load_study(path, None)
    # as the command does: a process that has imported more is another one
    ended = run_tiny(study, tmp_path / "stopped", isolated=True).ended
    assert [(state, message) for _, _, state, message in ended][-1] == ("finished", ""), ended
    run_tiny(study, tmp_path / "whole")
    assert recorded_bits(tmp_path / "stopped" / "tiny") == recorded_bits(
        tmp_path / "whole" / "tiny"
    )


@pytest.mark.slow
def test_an_interrupt_within_a_checkpoint_is_an_interrupt(
    write_study, run_tiny, tmp_path, monkeypatch
):
    def interrupted(*arguments):
        try:
            raise KeyboardInterrupt
        finally:
            raise RuntimeError("unexpected pos")  # as torch's zip writer on its way out

    study = load_study(write_study(_hundred_steps), {"train.steps": "8"})
    with monkeypatch.context() as patch:
        patch.setattr("stability.study.checkpoints.torch.save", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run_tiny(study, tmp_path)
    run = RunPaths.for_run(tmp_path / "tiny", "baseline", 0)
    assert read_manifest(run.manifest).state == "interrupted"
    assert {ended[2] for ended in run_tiny(study, tmp_path).ended} == {"finished"}


def test_a_finished_study_is_not_trained_again(write_study, run_tiny, tmp_path):
    study = load_study(write_study(_hundred_steps), {"train.steps": "3"})
    run_tiny(study, tmp_path / "runs")
    files = {p: p.stat().st_mtime_ns for p in (tmp_path / "runs").rglob("*/seed-0/*")}
    ended = run_tiny(study, tmp_path / "runs").ended
    assert [(state, message) for _, _, state, message in ended] == [("finished", "kept")] * 2
    assert files == {p: p.stat().st_mtime_ns for p in (tmp_path / "runs").rglob("*/seed-0/*")}


def test_a_directory_with_another_run_is_refused_and_untouched(write_study, run_tiny, tmp_path):
    path = write_study(_hundred_steps)
    run_tiny(load_study(path, {"train.steps": "3"}), tmp_path / "runs")
    before = recorded_bits(tmp_path / "runs" / "tiny")
    with pytest.raises(RunConflictError, match=r"config.train.steps = 3, asked for 4; use --out"):
        run_tiny(load_study(path, {"train.steps": "4"}), tmp_path / "runs")
    assert recorded_bits(tmp_path / "runs" / "tiny") == before


def test_a_directory_that_is_no_run_is_refused(write_study, run_tiny, tmp_path):
    stranger = tmp_path / "runs" / "tiny" / "baseline" / "seed-0" / "thesis.txt"
    stranger.parent.mkdir(parents=True)
    (stranger.parent / ".manifest.json.ab12.tmp").write_text("half")  # what a kill may leave
    check_existing(plan_study(load_study(write_study(_hundred_steps), None), tmp_path / "runs")[0])
    stranger.write_text("years of work")
    with pytest.raises(RunConflictError, match="holds files but no whole manifest"):
        run_tiny(load_study(write_study(_hundred_steps), None), tmp_path / "runs")
    assert stranger.read_text() == "years of work"


def _one_seed(content):
    content["arms"] = {"baseline": {}, "fp32": {"precision": "32-true"}}
    content["seeds"] = [0]


def _cut(path, length):
    os.truncate(path, path.stat().st_size - length)


def _flip(path, position, bit):
    content = bytearray(path.read_bytes())
    content[position] ^= 1 << bit
    path.write_bytes(content)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, text_file):
    """The records of a short study that ended undisturbed; tests copy them."""
    folder = tmp_path_factory.mktemp("whole")
    train_edited(folder, text_file, _one_seed)
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
        "predictions/step-00000004.safetensors",
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


def test_a_damaged_snapshot_is_never_read(copy):
    run = RunPaths.for_run(copy[1] / "tiny", "baseline", 0)
    _flip(run.snapshot(4), 900, 3)
    with pytest.raises(ValueError, match=r"step-00000004.safetensors: is damaged: its SHA-256"):
        read_run_snapshot(run, 4)


@pytest.mark.parametrize(
    ("spoil", "said"),
    one_in(
        3,
        [
            (lambda run: _flip(run.snapshot(6), 900, 3), ["is damaged", "going on from step 4"]),
            (lambda run: run.snapshot(4).unlink(), ["is missing", "starting anew"]),
            (lambda run: _flip(run.manifest, 900, 1), ["manifest.json: must"]),
            (lambda run: _cut(run.metrics, 40), ["has lost its end", "going on from step 4"]),
            (lambda run: run.manifest.unlink(), []),
        ],
    ),
    ids=["flipped-snapshot", "lost-snapshot", "flipped-manifest", "cut-log", "lost-manifest"],
)
def test_a_damaged_ended_run_is_trained_again_to_the_same_bits(copy, run_tiny, whole, spoil, said):
    study, out = copy
    spoil(RunPaths.for_run(out / "tiny", "baseline", 0))
    observer = run_tiny(study, out)
    assert [ended[2:] for ended in observer.ended] == [("finished", ""), ("finished", "kept")]
    notes = " ".join(observer.notes)
    assert all(part in notes for part in said), notes
    assert recorded_bits(out / "tiny") == recorded_bits(whole / "runs" / "tiny")


def test_a_manifest_that_is_whole_but_not_of_this_version_is_refused(copy, run_tiny):
    run = RunPaths.for_run(copy[1] / "tiny", "baseline", 0)
    write_sealed(run.manifest, asdict(read_manifest(run.manifest)) | {"later": 1})
    before = run.manifest.read_bytes()
    with pytest.raises(RunConflictError, match=r"manifest.json: unknown key 'later'.*use --out"):
        run_tiny(*copy)
    assert run.manifest.read_bytes() == before


def test_a_manifest_that_cannot_be_read_now_is_not_taken_for_damaged(copy, run_tiny, monkeypatch):
    run = RunPaths.for_run(copy[1] / "tiny", "baseline", 0)
    read = sealed_json.read_plain

    def refused(path):
        if path == run.manifest:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return read(path)

    with monkeypatch.context() as patch:
        patch.setattr(sealed_json, "read_plain", refused)
        with pytest.raises(RunConflictError, match=r"can be read: Permission denied; use --out"):
            run_tiny(*copy)
    assert read_manifest(run.manifest).state == "finished"


@pytest.mark.parametrize(
    ("damaged", "said"),
    one_in(
        3,
        [
            ("checkpoints/step-00000006.ckpt", ["is damaged", "going on from step 4"]),
            ("snapshots/step-00000002.safetensors", ["is damaged", "starting anew"]),
            ("predictions/step-00000006.safetensors", ["is damaged", "going on from step 4"]),
            ("metrics.jsonl", ["metrics.jsonl is damaged in its first", "starting anew"]),
            ("", []),
        ],
    ),
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


@pytest.mark.parametrize(
    ("length", "said"),
    [
        (0, ["is missing", "going on from step"]),
        (1, ["must hold", "going on from step 4"]),
        (10**9, ["must hold", "starting anew"]),
    ],
    ids=["whole", "one-byte", "all"],
)
def test_a_checkpoint_ahead_of_its_log_is_passed_over(copy, run_tiny, whole, length, said):
    study, out = copy
    run = RunPaths.for_run(out / "tiny", "fp32", 0)
    manifest = read_manifest(run.manifest)
    files = {name: sum for name, sum in manifest.files.items() if name != "metrics.jsonl"}
    write_manifest(run.manifest, replace(manifest, state="running", files=files))
    log = run.metrics.read_bytes()
    run.metrics.write_bytes(log[: max(0, len(log) - length)])
    observer = run_tiny(study, out)
    notes = " ".join(observer.notes)
    assert [ended[2:] for ended in observer.ended] == [("finished", "kept"), ("finished", "")]
    assert all(part in notes for part in said) == bool(length), notes
    assert recorded_bits(out / "tiny") == recorded_bits(whole / "runs" / "tiny")


@pytest.mark.slow
def test_a_full_disk_is_a_clear_stop_and_nothing_is_lost(write_study, run_tiny, tmp_path, whole):
    path, out = write_study(_one_seed), tmp_path / "runs"
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


@pytest.mark.slow
def test_a_run_that_another_process_trains_is_refused(write_study, run_tiny, tmp_path):
    study = load_study(write_study(_one_seed), {"train.steps": "2"})
    run = plan_study(study, tmp_path / "runs")[0]
    with locked(run.paths):
        ended = run_tiny(study, tmp_path / "runs").ended
    assert "another process is training this run" in ended[0][3]
    assert run_tiny(study, tmp_path / "runs").ended[0][2:] == ("finished", "")
