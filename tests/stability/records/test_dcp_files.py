"""A state is written as a folder of DCP's whole or not at all, and reads back to the same bits."""

import errno
import json
import os
import pickle
import signal
import subprocess
import sys
import warnings
from concurrent.futures import Future

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from stability.records import dcp_files, file_operations
from stability.records.atomic_files import DiskFullError
from stability.records.dcp_files import fill_state, write_dcp
from stability.records.paths import snapshot_steps
from stability.records.run_files import (
    RunFiles,
    content_checksum,
    damaged_files,
    missing_file,
    read_run_snapshot,
)
from stability.records.snapshots import hash_state, read_snapshot
from stability.records.weight_files import open_weights
from tests.stability.records.dcp_ranks import WHOLE, plain_state


def _state(scale=1.0):
    generator = torch.Generator().manual_seed(0)
    return {
        "h.w": scale * torch.randn(4, 3, generator=generator).T,
        "h.x": torch.nn.Parameter(torch.randn(6, generator=generator, dtype=torch.float64)),
        "low": torch.randn(5, generator=generator).bfloat16()[1:4],
        "steps": torch.tensor(7),
        "none": torch.empty(0, 2),
    }


def _same(found, state):
    return found.keys() == state.keys() and all(
        found[name].dtype == x.dtype and torch.equal(found[name], x) for name, x in state.items()
    )


@pytest.mark.parametrize("asynchronous", [True, False])
def test_what_is_written_reads_back_to_the_same_bits(tmp_path, asynchronous):
    state = _state()
    write = write_dcp(tmp_path / "a" / "step-3", state, asynchronous=asynchronous)
    assert write.wait() == tmp_path / "a" / "step-3"
    assert write.is_done
    assert _same(dict(open_weights(write.folder)), state)
    assert sorted(x.name for x in write.folder.parent.iterdir()) == ["step-3"]
    target = {name: torch.zeros_like(x) for name, x in state.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.load(target, checkpoint_id=write.folder)
    assert _same(target, state), "torch's own DCP reads it too"


def test_equal_states_give_equal_bytes_wherever_they_are_written(tmp_path):
    folders = [write_dcp(tmp_path / name, _state()).wait() for name in ("one", "another")]
    one, another, other = map(
        content_checksum, [*folders, write_dcp(tmp_path / "c", _state(2.0)).wait()]
    )
    assert one == another != other
    assert str(tmp_path).encode() not in (folders[0] / ".metadata").read_bytes()


def test_training_may_go_on_while_it_is_written(tmp_path, monkeypatch):
    begun: Future[None] = Future()
    real = dcp_files._Writer.write_data

    def late(*arguments):
        begun.result(60)
        return real(*arguments)

    monkeypatch.setattr(dcp_files._Writer, "write_data", late)
    state = _state()
    was = {name: x.detach().clone() for name, x in state.items()}
    writes = [write_dcp(tmp_path / "first", state)]
    with torch.no_grad():
        for x in state.values():
            x.add_(1)
    writes.append(write_dcp(tmp_path / "second", state))
    assert not any(write.is_done for write in writes)
    assert not (tmp_path / "first").exists()
    begun.set_result(None)
    assert _same(dict(open_weights(writes[0].wait())), was)
    assert _same(dict(open_weights(writes[1].wait())), state)


def test_a_folder_is_replaced_whole(tmp_path):
    write_dcp(tmp_path / "w", {**_state(), "more": torch.ones(3)}).wait()
    (tmp_path / "w" / "__9_0.distcp").touch()
    write_dcp(tmp_path / "w", _state(2.0)).wait()
    assert _same(dict(open_weights(tmp_path / "w")), _state(2.0))
    assert sorted(x.name for x in tmp_path.rglob("*")) == [".metadata", "__0_0.distcp", "w"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("place", ["write_data", "finish", "sync", "rename"])
def test_what_can_not_be_written_leaves_what_was_there(tmp_path, monkeypatch, place, code):
    write_dcp(tmp_path / "w", _state()).wait()

    def refuse(*arguments):
        raise OSError(code, os.strerror(code))

    def refuse_new(source, target):
        if source.name == ".w.tmp":
            refuse()
        os.replace(source, target)

    if place in ("sync", "rename"):
        does = {"sync": refuse, "rename": refuse_new}
        monkeypatch.setattr(file_operations, place, does[place])
    else:
        monkeypatch.setattr(FileSystemWriter, place, refuse)
    write = write_dcp(tmp_path / "w", _state(2.0))
    kind, message = (DiskFullError, "the disk is full") if code == errno.ENOSPC else (OSError, "w")
    with pytest.raises(kind, match=message) as refused:
        write.wait()
    assert str(tmp_path / "w") in str(refused.value)
    monkeypatch.undo()
    assert _same(dict(open_weights(tmp_path / "w")), _state())
    assert sorted(x.name for x in tmp_path.iterdir()) == ["w"]


@pytest.mark.slow
@pytest.mark.parametrize("operation", ["make_folder", "rename"])
def test_a_killed_write_leaves_nothing_that_a_reader_takes(tmp_path, operation):
    run = RunFiles.unnamed(tmp_path / "study" / "arm" / "seed-0")
    folder = run.paths.sharded_snapshot(4)
    code = (
        "import os, signal, sys, torch\n"
        "from pathlib import Path\n"
        "from stability.records import file_operations\n"
        "from stability.records.dcp_files import write_dcp\n"
        "def die(path, *rest):\n"
        f"    if path.name == '.{folder.name}.tmp': os.kill(os.getpid(), signal.SIGKILL)\n"
        f"    return real(path, *rest)\n"
        f"real, file_operations.{operation} = file_operations.{operation}, die\n"
        f"write_dcp(Path({str(folder)!r}), {{'w': torch.ones(3)}}).wait()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL
    assert not folder.exists()
    assert snapshot_steps(run.paths) == []
    if operation == "rename":
        (left,) = folder.parent.iterdir()
        assert (left / ".metadata").is_file(), "all of it was there but its name"
        with pytest.raises(ValueError, match="must be a run, or hold"):
            open_weights(folder.parent)
    write_dcp(folder, _state()).wait()
    assert [x.name for x in folder.parent.iterdir()] == [folder.name]
    assert snapshot_steps(run.paths) == [4]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1.0], "write_dcp: w must be a tensor, got list"),
        (torch.ones(2, device="meta"), r"write_dcp: w must have values, is torch.strided on meta"),
        (torch.eye(2).to_sparse(), r"write_dcp: w must have values, is torch.sparse_coo on cpu"),
    ],
)
def test_what_has_no_values_is_refused_before_anything_is_written(tmp_path, value, message):
    with pytest.raises(ValueError, match=message):
        write_dcp(tmp_path / "w", {"w": value})
    assert list(tmp_path.iterdir()) == []


def test_a_state_is_filled_by_name_and_shape(tmp_path):
    folder = write_dcp(tmp_path / "w", _state()).wait()
    weights = open_weights(folder)
    target = {"h.w": torch.zeros(3, 4).double(), "h.x": torch.nn.Parameter(torch.zeros(6))}
    fill_state(target, weights)
    assert torch.equal(target["h.w"], _state()["h.w"].double())
    assert torch.equal(target["h.x"], _state()["h.x"].float())
    with pytest.raises(ValueError, match=r"w: must hold other, does not"):
        fill_state({"other": torch.zeros(2)}, weights)
    with pytest.raises(ValueError, match=r"w: h.w must be of the shape \(2, 2\), is \(3, 4\)"):
        fill_state({"h.w": torch.zeros(2, 2)}, weights)


def _run(folder):
    run = RunFiles.unnamed(folder / "study" / "arm" / "seed-0")
    for step in (0, 2):
        run.add(write_dcp(run.paths.sharded_snapshot(step), _state(step + 1.0)).wait())
    return run


def test_a_runs_sharded_snapshot_is_listed_checked_read_and_removed(tmp_path):
    run = _run(tmp_path)
    assert snapshot_steps(run.paths) == [0, 2]
    assert damaged_files(run.paths, run.manifest) == {}
    assert missing_file(run.paths, run.manifest) == ""
    found = open_weights(run.paths.root)
    assert found.label.endswith("seed-0, step 2")
    assert hash_state(found) == hash_state(read_run_snapshot(run.paths, 2))
    assert hash_state(found) == hash_state(_state(3.0))
    assert hash_state(read_snapshot(run.paths.held_snapshot(0))) == hash_state(_state(1.0))
    run.remove(run.paths.sharded_snapshot(2))
    assert snapshot_steps(run.paths) == [0]
    assert list(run.manifest.files) == ["snapshots/step-00000000.dcp"]
    assert [x.name for x in run.paths.snapshots_dir.iterdir()] == ["step-00000000.dcp"]


def _flip(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: _flip(folder / "__0_0.distcp"), "is damaged: its SHA-256 is"),
        (lambda folder: _flip(folder / ".metadata"), "is damaged: its SHA-256 is"),
        (lambda folder: (folder / "__0_0.distcp").unlink(), "is damaged: its SHA-256 is"),
        (lambda folder: (folder / "more").write_text("x"), "is damaged: its SHA-256 is"),
        (lambda folder: (folder / "more").mkdir(), "is damaged: more: Is a directory"),
        (lambda folder: os.mkfifo(folder / "pipe"), "is damaged: pipe: Is a named pipe"),
        (lambda folder: folder.rename(folder.with_name("gone")), "is missing"),
    ],
)
def test_a_sharded_snapshot_that_is_not_the_one_listed_is_refused(tmp_path, spoil, message):
    run = _run(tmp_path)
    spoil(run.paths.sharded_snapshot(2))
    assert message in damaged_files(run.paths, run.manifest)["snapshots/step-00000002.dcp"]
    if message != "is missing":
        with pytest.raises(ValueError, match=rf"step-00000002.dcp: {message}"):
            open_weights(run.paths.root, 2)
    else:
        assert "is missing" in missing_file(run.paths, run.manifest)


@pytest.mark.slow
@pytest.mark.parametrize("name", WHOLE)
def test_one_process_reads_what_two_ranks_wrote_to_the_same_bits(two_ranks, name):
    assert _same(dict(open_weights(two_ranks / name)), plain_state())


@pytest.mark.slow
def test_what_dcps_hugging_face_writer_puts_together_is_read_as_any_of_its_folders(two_ranks):
    expected = {name: x for name, x in plain_state().items() if x.is_floating_point()}
    assert _same(dict(open_weights(two_ranks / "hf_whole")), expected)
    (two_ranks / "hf_shards").joinpath("shard-00001-model-00001-of-00001.safetensors").replace(
        two_ranks / "away"
    )
    with pytest.raises(ValueError, match=r"hf_shards: must hold the files of all ranks, has \['00"):
        open_weights(two_ranks / "hf_shards")
    (two_ranks / "away").replace(
        two_ranks / "hf_shards" / "shard-00001-model-00001-of-00001.safetensors"
    )


@pytest.mark.slow
def test_two_ranks_read_what_any_number_wrote_and_fail_together(two_ranks):
    ours = [json.loads((two_ranks / f"found-{rank}.json").read_text()) for rank in range(2)]
    for found in ours:
        assert found["folders"] == ["ours_fsdp", "ours_later", "ours_tensor"]
        assert found["is_done"]
        into = {name: same for name, same in found.items() if name.startswith("into")}
        assert into == dict.fromkeys(into, True)
        assert len(into) == len(WHOLE) + 1
        assert "sum must be sharded or replicated, got (Partial(sum),)" in found["partial"]
        assert "process_group must be a group of its own" in found["no group"]
        assert found["full"] == f"DiskFullError: {two_ranks / 'full'}, rank 1: the disk is full"
    left = {path.name for path in two_ranks.iterdir()}
    assert not {"full", ".full.tmp", "partial", "alone"} & left
    later = {name: x + 1 if x.is_floating_point() else x for name, x in plain_state().items()}
    assert _same(dict(open_weights(two_ranks / "ours_later")), later)


@pytest.mark.slow
def test_what_is_on_both_ranks_is_written_once(two_ranks):
    metadata = pickle.loads((two_ranks / "ours_tensor" / ".metadata").read_bytes())
    written = [(index.fqn, tuple(index.offset)) for index in metadata.storage_data]
    assert len(written) == len(set(written))
    assert sorted(x for x in written if x[0] == "first.bias") == [("first.bias", (0,))]
    assert len([x for x in written if x[0] == "first.weight"]) == 2
    assert {info.relative_path for info in metadata.storage_data.values()} == {
        "__0_0.distcp",
        "__1_0.distcp",
    }
