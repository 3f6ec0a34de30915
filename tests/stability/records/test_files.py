"""Manifests, snapshots, paths and names: whole or absent, and exactly what was written."""

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stability.records.atomic import atomic_path, write_text
from stability.records.layout import RunPaths, list_runs, snapshot_steps
from stability.records.manifest import Manifest, environment, read_manifest, write_manifest
from stability.records.names import deviation_name, drift_name, parse_deviation, parse_drift
from stability.records.snapshots import hash_state, read_snapshot, write_snapshot

ROOT = Path(__file__).parents[3]
MANIFEST = Manifest(
    study="s",
    arm="a",
    seed=3,
    axis="none",
    config={"train": {"steps": 2}},
    diff={"precision": ["bf16-mixed", "32-true"]},
    environment={"threads": 2},
    resolved={"engine": "twin"},
    hashes={"text": "0f"},
    state="running",
    step=0,
    message="",
)


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    write_text(path, "old")

    def fail(*args):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_text(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_process_killed_while_writing_leaves_the_old_file(tmp_path):
    path = tmp_path / "a.json"
    write_text(path, "old")
    code = (
        "import os, signal, sys\nfrom pathlib import Path\n"
        "from stability.records.atomic import atomic_path\n"
        "with atomic_path(Path(sys.argv[1])) as temporary:\n"
        "    temporary.write_text('half')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], env={"PYTHONPATH": str(ROOT)})
    assert done.returncode == -signal.SIGKILL
    assert path.read_text() == "old"


def test_missing_folders_are_made(tmp_path):
    with atomic_path(tmp_path / "a" / "b" / "c.txt") as temporary:
        temporary.write_text("x")
    assert (tmp_path / "a" / "b" / "c.txt").read_text() == "x"


def test_a_manifest_comes_back(tmp_path):
    write_manifest(tmp_path / "manifest.json", MANIFEST)
    assert read_manifest(tmp_path / "manifest.json") == MANIFEST


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is no such manifest"),
        ('{"study": "s"', "must be a JSON object"),
        ("[1]", "fields missing or unknown"),
        ('{"study": "s"}', r"fields missing or unknown: \['arm'"),
    ],
)
def test_a_manifest_that_is_none_is_refused_by_name(tmp_path, content, message):
    path = tmp_path / "manifest.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=f"manifest.json: {message}"):
        read_manifest(path)


def test_an_unknown_state_is_refused(tmp_path):
    write_manifest(tmp_path / "manifest.json", replace(MANIFEST, state="asleep"))
    with pytest.raises(ValueError, match=r"state must be .* is 'asleep'"):
        read_manifest(tmp_path / "manifest.json")


def test_the_environment_names_versions_and_the_kernels_source():
    found = environment()
    assert found["torch"] == torch.__version__
    assert found["threads"] == torch.get_num_threads()
    assert len(found["kernel_source"]) == 64


def test_snapshots_keep_bits_dtypes_and_layouts(tmp_path):
    weight = torch.tensor([[1.0, -0.0], [torch.nan, 1e-45]])
    state = {"w": weight, "transposed": weight.mT, "tied": weight, "d": weight.double()}
    write_snapshot(tmp_path / "s.safetensors", state)
    found = read_snapshot(tmp_path / "s.safetensors")
    assert hash_state(found) == hash_state(state)
    assert {name: x.dtype for name, x in found.items()} == {n: x.dtype for n, x in state.items()}


def test_a_damaged_snapshot_is_refused_by_name(tmp_path):
    write_snapshot(tmp_path / "s.safetensors", {"w": torch.ones(100)})
    whole = (tmp_path / "s.safetensors").read_bytes()
    (tmp_path / "s.safetensors").write_bytes(whole[:-4])
    for name in ("s", "absent"):
        with pytest.raises(ValueError, match=rf"{name}.safetensors: must be a whole snapshot"):
            read_snapshot(tmp_path / f"{name}.safetensors")


@pytest.mark.parametrize(
    "other",
    [
        {"w": torch.tensor([[1.0, 2.0]])},
        {"v": torch.tensor([1.0, 2.0])},
        {"w": torch.tensor([1.0, 2.0]).view(torch.int32)},
        {"w": torch.tensor([1.0, 2.0000002])},
        {"w": torch.tensor([1.0, 2.0]), "x": torch.empty(0)},
    ],
    ids=["shape", "name", "dtype", "bit", "more"],
)
def test_the_hash_sees_any_difference(other):
    assert hash_state(other) != hash_state({"w": torch.tensor([1.0, 2.0])})


def test_the_hash_tells_the_two_zeros_apart_and_ignores_order():
    zero = torch.zeros(1)
    assert hash_state({"w": zero}) != hash_state({"w": -zero})
    assert hash_state({"a": zero, "b": -zero}) == hash_state({"b": -zero, "a": zero})


def test_runs_and_snapshots_are_found_where_they_were_put(tmp_path):
    run = RunPaths.for_run(tmp_path, "flash", 10)
    write_snapshot(run.snapshot(7), {"w": torch.ones(1)})
    write_snapshot(run.snapshot(0), {"w": torch.ones(1)})
    (run.snapshots_dir / ".step-00000009.safetensors.ab.tmp").write_text("half")
    RunPaths.for_run(tmp_path, "flash", 9).root.mkdir(parents=True)
    (tmp_path / "flash" / "seed-x").mkdir()
    assert [(r.arm, r.seed) for r in list_runs(tmp_path)] == [("flash", 9), ("flash", 10)]
    assert snapshot_steps(run) == [0, 7]


@pytest.mark.parametrize("arm", ["", "..", ".", "a/b", "/a", "a\0", "x" * 65, "é"])
def test_an_arm_can_not_lead_out_of_its_study(tmp_path, arm):
    with pytest.raises(ValueError, match="arm must be 1 to 64 letters"):
        RunPaths.for_run(tmp_path, arm, 0)


PARTS = st.text("abc_.0", min_size=1, max_size=6)


@settings(deadline=None, max_examples=100)
@given(st.lists(PARTS, min_size=1, max_size=3).map("/".join), PARTS, PARTS)
def test_names_are_read_back_as_they_were_made(layer, what, metric):
    assert parse_deviation(deviation_name(layer, what, metric)) == (layer, what, metric)
    assert parse_drift(drift_name(layer, metric)) == (layer, metric)
    assert parse_deviation(drift_name(layer, metric)) is None
    assert parse_drift("train/loss") is None
