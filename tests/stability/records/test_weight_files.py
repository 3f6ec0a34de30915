"""Whatever holds weights opens as one kind of mapping that reads a tensor when it is asked for."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from stability.records.paths import RunPaths, is_run
from stability.records.run_files import RunFiles
from stability.records.snapshots import hash_state, write_snapshot
from stability.records.weight_files import open_weights


def _state(scale=1.0):
    generator = torch.Generator().manual_seed(0)
    return {
        "h.0.w": scale * torch.randn(4, 3, generator=generator),
        "h.1.w": scale * torch.randn(6, generator=generator, dtype=torch.float64),
        "low": torch.randn(5, generator=generator).bfloat16(),
        "steps": torch.tensor(7),
        "none": torch.empty(0, 2),
    }


def _run(folder, steps=(0, 2, 40)):
    run = RunFiles.unnamed(folder / "study" / "arm" / "seed-0")
    for step in steps:
        write_snapshot(run.paths.snapshot(step), _state(step + 1.0))
        run.add(run.paths.snapshot(step))
    return run.paths.root


def _safetensors(folder):
    save_file(_state(), folder / "w.safetensors")
    return folder / "w.safetensors"


def _pth(folder):
    torch.save(_state(), folder / "w.pth")
    return folder / "w.pth"


def _checkpoint(folder):
    content = {"state_dict": _state(), "pytorch-lightning_version": "2.6", "epoch": 1}
    torch.save(content, folder / "w.ckpt")
    return folder / "w.ckpt"


def _hf(folder):
    save_file(_state(), folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    return folder


def _sharded(folder):
    names = list(_state())
    shards = {"m-1.safetensors": names[:2], "m-2.safetensors": names[2:]}
    for shard, mine in shards.items():
        save_file({name: _state()[name] for name in mine}, folder / shard)
    weight_map = {name: shard for shard, mine in shards.items() for name in mine}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


KINDS = [_safetensors, _pth, _checkpoint, _hf, _sharded]


@pytest.mark.parametrize("write", KINDS)
def test_every_kind_gives_the_same_names_and_bits(tmp_path, write):
    path = write(tmp_path)
    found, state = open_weights(path), _state()
    assert hash_state(found) == hash_state(state)
    assert found.shapes == {name: tuple(tensor.shape) for name, tensor in state.items()}
    assert found.dtypes == {name: tensor.dtype for name, tensor in state.items()}
    assert len(found) == len(state)
    assert str(path) in found.label
    with pytest.raises(KeyError, match="nothing"):
        found["nothing"]


@pytest.mark.parametrize("write", KINDS)
def test_no_mapping_of_the_file_is_left_behind(tmp_path, write):
    if not Path("/proc/self/maps").exists():
        pytest.skip("needs /proc to see what is mapped")
    found = open_weights(write(tmp_path))
    assert [
        float(found[name].double().sum()) for name in found if found.dtypes[name].is_floating_point
    ]
    mapped = str(tmp_path) in Path("/proc/self/maps").read_text()
    assert mapped == (write in (_pth, _checkpoint)), "only torch's files stay mapped while open"
    del found
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


def test_some_names_alone_are_weights_too(tmp_path):
    found = open_weights(_safetensors(tmp_path)).only(["low", "h.0.w"])
    assert list(found) == ["low", "h.0.w"]
    assert list(found.shapes) == list(found.dtypes) == ["low", "h.0.w"]
    assert "steps" not in found
    assert torch.equal(found["h.0.w"], _state()["h.0.w"])


def test_a_run_opens_at_its_last_snapshot_or_at_a_step(tmp_path):
    run = _run(tmp_path)
    assert is_run(run)
    assert hash_state(open_weights(run)) == hash_state(_state(41.0))
    assert hash_state(open_weights(run, 2)) == hash_state(_state(3.0))
    assert open_weights(run, 2).label.endswith("seed-0, step 2")


def test_a_step_without_snapshot_names_the_nearest(tmp_path):
    with pytest.raises(ValueError, match=r"seed-0: must have a snapshot of step 3; .* 0, 2, 40$"):
        open_weights(_run(tmp_path), 3)
    with pytest.raises(ValueError, match=r"nearest: 5, 6, 7$"):
        open_weights(_run(tmp_path / "many", range(8)), 30)


def test_a_run_without_snapshots_is_named(tmp_path):
    RunFiles.unnamed(tmp_path).update()
    with pytest.raises(ValueError, match="must have snapshots, got none"):
        open_weights(tmp_path)


def test_a_snapshot_that_is_not_the_one_listed_is_refused(tmp_path):
    run = RunPaths(_run(tmp_path, (0, 2)))
    content = bytearray(run.snapshot(2).read_bytes())
    content[-1] ^= 1  # the weights stay numbers: only the checksum tells
    run.snapshot(2).write_bytes(content)
    with pytest.raises(ValueError, match=r"step-00000002.safetensors: is damaged: its SHA-256"):
        open_weights(run.root)
    write_snapshot(run.snapshot(3), _state())
    with pytest.raises(ValueError, match=r"step-00000003.*: is not in the run's manifest"):
        open_weights(run.root)
    assert hash_state(open_weights(run.root, 0)) == hash_state(_state(1.0))
    run.manifest.unlink()
    assert not is_run(run.root)
    with pytest.raises(ValueError, match=r"seed-0: must be a run, or hold .* it holds snapshots"):
        open_weights(run.root)


def test_a_step_of_a_file_is_refused(tmp_path):
    assert not is_run(tmp_path)
    with pytest.raises(ValueError, match=r"w.pth: must be a run to have a step, got step 4"):
        open_weights(_pth(tmp_path), 4)


def _lying_index(folder):
    _sharded(folder)
    save_file({"h.0.w": torch.ones(2)}, folder / "m-1.safetensors")


def _index_without_map(folder):
    (folder / "model.safetensors.index.json").write_text('{"weights": 3}')


def _index_without_file(folder):
    _sharded(folder)
    (folder / "m-2.safetensors").unlink()


def _torn(folder):
    path = _safetensors(folder).rename(folder / "model.safetensors")
    path.write_bytes(path.read_bytes()[:-8])


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (_torn, "model.safetensors: must be a whole safetensors file: .*not fully covered"),
        (_lying_index, "index.json: must name what its files hold, got h.1.w, .* m-1.safetensors"),
        (_index_without_map, "index.json: must map names to files in weight_map"),
        (_index_without_file, "m-2.safetensors: must be a whole safetensors file"),
        (lambda folder: None, "must be a run, or hold model.safetensors.* holds nothing"),
        (_pth, "must be a run, or hold model.safetensors.* it holds w.pth"),
        (_run, "must be a run, .* it holds study"),
    ],
)
def test_a_folder_that_holds_no_weights_or_damaged_ones_is_named(tmp_path, write, message):
    write(tmp_path)
    with pytest.raises(ValueError, match=message) as refused:
        open_weights(tmp_path)
    assert str(tmp_path) in str(refused.value)


def test_the_index_says_which_tensors_count(tmp_path):
    _sharded(tmp_path)
    save_file(
        {"h.0.w": torch.ones(2), "h.1.w": torch.ones(2), "old": torch.ones(2)},
        tmp_path / "m-1.safetensors",
    )
    assert list(open_weights(tmp_path)) == list(_state())


def test_the_folder_of_a_study_names_its_runs(tmp_path):
    run = _run(tmp_path)
    with pytest.raises(ValueError, match=f"it holds {run}$"):
        open_weights(tmp_path / "study")


def test_a_missing_or_unknown_file_is_named(tmp_path):
    _pth(tmp_path)
    with pytest.raises(ValueError, match=r"w.ptx: must exist; nearest: w.pth"):
        open_weights(tmp_path / "w.ptx")
    with pytest.raises(ValueError, match=r"must exist; nearest: no folder .*nowhere$"):
        open_weights(tmp_path / "nowhere" / "w.pth")
    (tmp_path / "w.npz").touch()
    with pytest.raises(ValueError, match=r"w.npz: must be a run, .* or end in .safetensors, .ckpt"):
        open_weights(tmp_path / "w.npz")
