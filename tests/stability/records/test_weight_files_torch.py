"""A file of torch.save gives its state dict's tensors, runs no code, and is named when it can't."""

import random

import pytest
import torch

from stability.records import weight_files as torch_file
from stability.records.weight_files import TorchFile


def _state():
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(4, 3, generator=generator)
    return {
        "w": weight,
        "tied": weight,
        "turned": weight.T,
        "low": torch.randn(5, generator=generator).bfloat16(),
        "count": torch.tensor(3),
        "empty": torch.empty(0, 2),
    }


def _save(path, content, **options):
    torch.save(content, path, **options)
    return path


@pytest.mark.parametrize("wrap", [dict, lambda s: {"state_dict": s, "epoch": 3, "loops": {"x": 1}}])
def test_every_tensor_comes_back_with_its_name_and_bits(tmp_path, wrap):
    state = _state()
    file = TorchFile(_save(tmp_path / "s.pt", wrap(state)))
    assert list(file.outlines) == list(state)
    for name, tensor in state.items():
        outline, found = file.outlines[name], file.load(name)
        assert (outline.shape, outline.dtype) == (tensor.shape, tensor.dtype)
        assert outline.device.type == "meta"
        assert torch.equal(found, tensor)
        assert found.dtype == tensor.dtype
    assert file.others == {}


# torch 2.13 deprecates making and reading qint8; 2.11 tells of checks that it leaves out
@pytest.mark.filterwarnings(
    "ignore:.*quantize:UserWarning",
    "ignore:TypedStorage:UserWarning",
    "ignore:Sparse invariant checks:UserWarning",
)
def test_what_is_no_tensor_with_values_is_described_not_read(tmp_path):
    state = {
        "w": torch.ones(2),
        "none": None,
        "sparse": torch.eye(3).to_sparse(),
        "outline": torch.empty(2, device="meta"),
        "int8": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
        7: [1.0],
    }
    file = TorchFile(_save(tmp_path / "s.pt", state))
    assert list(file.outlines) == ["w"]
    assert set(file.others) == {"none", "sparse", "outline", "int8", "7"}
    assert file.others["none"] == "NoneType"
    assert file.others["sparse"] == "float32 on cpu, sparse_coo"
    assert "meta" in file.others["outline"]


def test_gradients_are_left_behind(tmp_path):
    path = _save(tmp_path / "s.pt", {"w": torch.nn.Parameter(torch.ones(2))})
    assert not TorchFile(path).load("w").requires_grad


def test_the_file_is_mapped_anew_so_that_its_pages_are_let_go(tmp_path, monkeypatch):
    state = {f"w{i}": torch.full((100,), float(i)) for i in range(10)}
    path = _save(tmp_path / "s.pt", state)
    monkeypatch.setattr(torch_file, "_MAPPED_BYTES", 900)
    file = TorchFile(path)
    addresses = set()
    for _ in range(2):
        for name, tensor in state.items():
            found = file.load(name)
            addresses.add(found.untyped_storage().data_ptr() - 400 * int(found[0]))
            assert torch.equal(found, tensor)
    loaded = torch.load
    calls = []
    monkeypatch.setattr(torch, "load", lambda *a, **k: calls.append(1) or loaded(*a, **k))
    for name in state:
        file.load(name)
    assert len(calls) == 10 // 3


class _Foreign:
    """A class that a file from elsewhere could name."""


class _Evil:
    def __reduce__(self):
        return (print, ("executed",))


@pytest.mark.parametrize("thing", [_Foreign(), _Evil()], ids=["object", "code"])
def test_other_objects_are_refused_and_never_made(tmp_path, capsys, thing):
    path = _save(tmp_path / "s.ckpt", {"state_dict": {"w": torch.ones(1)}, "extra": thing})
    message = r"s.ckpt: must hold tensors and plain values alone, got \S*(_Foreign|print); save"
    with pytest.raises(ValueError, match=message):
        TorchFile(path)
    assert capsys.readouterr().out == ""


def _old(path):
    torch.save({"w": torch.ones(2)}, path, _use_new_zipfile_serialization=False)


def _cut(path):
    torch.save({"w": torch.ones(1000)}, path)
    path.write_bytes(path.read_bytes()[:-900])


@pytest.mark.parametrize(
    "write",
    [_old, _cut, lambda path: None, lambda path: path.touch(), lambda path: path.write_text("no")],
    ids=["old", "cut", "missing", "empty", "text"],
)
def test_a_missing_damaged_or_old_file_is_named(tmp_path, write):
    write(tmp_path / "s.pt")
    with pytest.raises(ValueError, match=r"s.pt: must be a whole file of torch.save, of torch 1.6"):
        TorchFile(tmp_path / "s.pt")


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (torch.ones(2), "Tensor"),
        ({"network": {"w": torch.ones(2)}, "epoch": 2}, "network, epoch"),
        ({"state_dict": {}}, "dict"),
        ({}, "dict"),
    ],
)
def test_a_file_without_a_state_dict_says_what_it_holds(tmp_path, content, found):
    path = _save(tmp_path / "s.pt", content)
    with pytest.raises(ValueError, match=f"s.pt: must hold a state dict, .* got {found}; save"):
        TorchFile(path)


def test_flipped_bytes_give_one_kind_of_error_or_none(tmp_path):
    path = _save(tmp_path / "s.pt", {"state_dict": {"w": torch.ones(3, 4), "n": torch.tensor(1)}})
    whole, generator = path.read_bytes(), random.Random(0)
    refused = []
    for _ in range(300):
        damaged = bytearray(whole)
        damaged[generator.randrange(len(whole) // 2)] = generator.randrange(256)
        path.write_bytes(damaged)
        try:
            file = TorchFile(path)
            total = sum(float(file.load(name).double().sum()) for name in file.outlines)
            assert isinstance(total, float)
        except ValueError as error:
            refused.append(str(error))
    assert len(refused) > 50
    assert all(str(path) in message for message in refused)
