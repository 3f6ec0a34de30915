"""The file of a hash and a sketch: whole, readable, and equal for equal weights."""

import pytest
import torch
from safetensors.torch import save_file

from stability.records.weight_sketches import StoredSketch, read_weight_sketch, write_weight_sketch


def stored(value=1.5):
    buckets = torch.full((16,), value, dtype=torch.float64)
    return StoredSketch(weights="ab" * 16, outline="cd" * 8, outside=2, buckets=buckets)


def test_a_sketch_is_read_as_it_was_written(tmp_path):
    write_weight_sketch(tmp_path / "a.safetensors", stored())
    write_weight_sketch(tmp_path / "b.safetensors", stored())
    found = read_weight_sketch(tmp_path / "a.safetensors")
    assert torch.equal(found.buckets, stored().buckets)
    assert (found.weights, found.outline, found.outside) == ("ab" * 16, "cd" * 8, 2)
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


def test_another_file_is_refused_by_name(tmp_path):
    path = tmp_path / "a.safetensors"
    for content in (None, b"no safetensors"):
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(ValueError, match=r"a\.safetensors: must be a whole sketch of weights"):
            read_weight_sketch(path)
    save_file({"buckets": torch.zeros(3)}, path)
    with pytest.raises(ValueError, match="must be a whole sketch of weights: 'weight_sketch'"):
        read_weight_sketch(path)
    for said in ('{"weights": 1, "outline": "", "outside": 0}', '{"weights": ""}', "[]", "{"):
        save_file({"buckets": torch.zeros(3).double()}, path, {"weight_sketch": said})
        with pytest.raises(ValueError, match="must be a whole sketch of weights"):
            read_weight_sketch(path)
