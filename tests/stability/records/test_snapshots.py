"""Snapshots keep every bit; the hash of a state sees every bit, name, shape and dtype."""

import os
import struct

import pytest
import torch
from torch import nn

from stability.records.snapshots import hash_state, read_snapshot, write_snapshot


def _state():
    generator = torch.Generator().manual_seed(0)
    return {
        "w": torch.randn(4, 3, generator=generator),
        "b": torch.randn(3, generator=generator, dtype=torch.float64),
        "low": torch.randn(5, generator=generator).bfloat16(),
        "scalar": torch.tensor(2.0),
        "empty": torch.empty(0, 2),
    }


def test_a_state_comes_back_with_the_same_bits(tmp_path):
    state = _state()
    write_snapshot(tmp_path / "snapshots" / "s.safetensors", state)
    found = read_snapshot(tmp_path / "snapshots" / "s.safetensors")
    assert hash_state(found) == hash_state(state)
    assert {n: (t.dtype, t.shape) for n, t in found.items()} == {
        n: (t.dtype, t.shape) for n, t in state.items()
    }


def test_tied_and_non_contiguous_weights_and_parameters_are_written_by_value(tmp_path):
    weight = nn.Parameter(torch.arange(12.0).reshape(4, 3))
    state = {"embed": weight, "head": weight, "turned": weight.T, "column": weight[:, 1]}
    write_snapshot(tmp_path / "s.safetensors", state)
    found = read_snapshot(tmp_path / "s.safetensors")
    for name, tensor in state.items():
        assert torch.equal(found[name], tensor.detach()), name
    assert weight.T.stride() == (1, 3)


def test_the_same_state_is_the_same_file(tmp_path):
    state = _state()
    write_snapshot(tmp_path / "a", state)
    write_snapshot(tmp_path / "b", dict(reversed(state.items())))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_crash_leaves_the_old_snapshot_alone(tmp_path, monkeypatch):
    path = tmp_path / "s.safetensors"
    write_snapshot(path, {"w": torch.zeros(2)})

    def crash(*args):
        raise OSError("no rename")

    monkeypatch.setattr(os, "replace", crash)
    with pytest.raises(OSError, match="no rename"):
        write_snapshot(path, {"w": torch.ones(2)})
    assert torch.equal(read_snapshot(path)["w"], torch.zeros(2))
    assert list(tmp_path.iterdir()) == [path]


def test_a_missing_or_damaged_snapshot_is_named(tmp_path):
    path = tmp_path / "s.safetensors"
    with pytest.raises(ValueError, match=r"s.safetensors: must be a whole snapshot"):
        read_snapshot(path)
    write_snapshot(path, _state())
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(ValueError, match=r"s.safetensors: must be a whole snapshot"):
        read_snapshot(path)


def _nan(payload):
    return (
        torch.tensor(struct.unpack("<i", struct.pack("<I", payload))[0]).int().view(torch.float32)
    )


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"w": torch.zeros(2)}, {"v": torch.zeros(2)}),
        ({"w": torch.zeros(2)}, {"w": torch.zeros(2, 1)}),
        ({"w": torch.zeros(2)}, {"w": torch.zeros(2, dtype=torch.int32)}),
        ({"w": torch.zeros(4)}, {"w": torch.zeros(2), "x": torch.zeros(2)}),
        ({"w": torch.tensor(0.0)}, {"w": torch.tensor(-0.0)}),
        ({"w": _nan(0x7FC00000)}, {"w": _nan(0x7FC00001)}),
        ({"w": torch.ones(1)}, {"w": torch.nextafter(torch.ones(1), torch.tensor(2.0))}),
        (
            {"a": torch.ones(1), "b": torch.zeros(1)},
            {"a": torch.zeros(1), "b": torch.ones(1)},
        ),
    ],
    ids=["name", "shape", "dtype", "split", "sign-of-zero", "nan-payload", "one-ulp", "swapped"],
)
def test_the_hash_sees(one, other):
    assert hash_state(one) != hash_state(other)


def test_the_hash_is_of_values_not_of_memory():
    square = torch.arange(9.0).reshape(3, 3)
    assert hash_state({"a": square.T, "b": square}) == hash_state(
        {"b": nn.Parameter(square.clone()), "a": square.T.contiguous()}
    )
