"""A folder of DCP's gives the model's tensors, whoever wrote them, and is named when it can't."""

import dataclasses
import errno
import io
import os
import zipfile

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stability.records import dcp_folders
from stability.records.dcp_folders import DcpFolder
from stability.records.weight_files import open_weights, tied_names
from tests.stability.records.dcp_by_hand import save, saved, write_chunks

W = torch.arange(24.0).reshape(4, 6)
"""Split in four parts in two files."""
BOXES = [
    ((0, 0), (3, 2), "__0_0.distcp"),
    ((0, 2), (3, 4), "__1_0.distcp"),
    ((3, 0), (1, 6), "__1_0.distcp"),
]


def _state():
    return {"h.0.w": torch.randn(3, 2), "low": torch.randn(5).bfloat16(), "n": torch.tensor(3)}


ADAM = {"state": {"h.0.w": {"exp_avg": torch.ones(3, 2), "step": 1}}, "param_groups": [{"lr": 0.1}]}
NESTED = {
    "accelerate": lambda s: {"model": s},
    "Lightning": lambda s: {"state_dict": s, "optimizer_0": ADAM},
    "torchtitan": lambda s: {**s, "optimizer": {"state.h.0.w.exp_avg": torch.ones(3, 2)}, "i": {}},
    "older torchtitan": lambda s: {"model": s, "optimizer": ADAM, "train_state": {"step": 3}},
    "tutorial": lambda s: {"app": {"model": s, "optim": ADAM}},
    "DeepSpeed": lambda s: {"module": s, "ema": {"h.0.w": torch.ones(3, 2)}},
}
FLAT = {
    "optimizer.state.exp_avg.h.0.w": torch.ones(3, 2),
    "chained_0.optimizer.state.fp32_param.h.0.w": torch.ones(3, 2),
    "rng_state/shard_0_1": io.BytesIO(b"1"),
    "h.0._extra_state/shard_0_1": io.BytesIO(b"1"),
}


@pytest.mark.parametrize("name", NESTED)
def test_the_model_is_found_in_what_every_framework_saves(tmp_path, name):
    state = _state()
    found = open_weights(save(tmp_path / "c", NESTED[name](state)))
    assert set(found) == set(state)
    assert all(torch.equal(found[x], state[x]) for x in state)
    assert found.dtypes == {x: state[x].dtype for x in found}
    assert found.others == {}
    is_alone = name == "accelerate"
    assert ("entries beside the model" in found.label) != is_alone


def test_megatrons_flat_names_are_told_from_its_optimizers(tmp_path):
    state = _state()
    found = open_weights(save(tmp_path / "c", {**state, **FLAT}, is_flat=True))
    assert set(found) == set(state)
    assert found.others == {"h.0._extra_state/shard_0_1": "an object, which is not unpickled"}
    assert found.label == f"{tmp_path / 'c'}, less 3 entries beside the model"
    assert set(DcpFolder(tmp_path / "c", everything=True).outlines) == {*state, *list(FLAT)[:2]}


@pytest.mark.parametrize(
    "state",
    [
        {"generator": {"model": _state()}, "discriminator": {"model": _state()}},
        {"network": _state(), "epoch": 2},
        {"optimizer": ADAM},
    ],
)
def test_a_checkpoint_without_one_model_says_what_it_holds(tmp_path, state):
    message = r"c: must hold the tensors of a model, got \w+\..*; save model.state_dict\(\), as"
    with pytest.raises(ValueError, match=message):
        open_weights(save(tmp_path / "c", state))


@settings(max_examples=25)
@given(st.data())
def test_any_cut_into_chunks_gives_the_same_tensor_and_parts_of_it(tmp_path_factory, data):
    shape = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    tensor = torch.randn(shape, dtype=torch.float64)
    boxes = [((0,) * len(shape), tuple(shape))]
    for _ in range(data.draw(st.integers(0, 4))):
        (offsets, sizes), axis = boxes.pop(0), data.draw(st.integers(0, len(shape) - 1))
        cut = data.draw(st.integers(0, sizes[axis]))
        for begin, length in ((0, cut), (cut, sizes[axis] - cut)):
            begins = [o + begin * (i == axis) for i, o in enumerate(offsets)]
            boxes.append((begins, [length if i == axis else s for i, s in enumerate(sizes)]))
    kept = [(o, s, f"__{i % 2}_0.distcp") for i, (o, s) in enumerate(boxes) if 0 not in s]
    folder = write_chunks(tmp_path_factory.mktemp("c"), {"w": (tensor, kept)})
    found = open_weights(folder)
    assert torch.equal(found["w"], tensor)
    begins = [data.draw(st.integers(0, size)) for size in shape]
    sizes = [data.draw(st.integers(0, s - b)) for b, s in zip(begins, shape, strict=True)]
    part = tuple(slice(b, b + s) for b, s in zip(begins, sizes, strict=True))
    assert torch.equal(found.part("w", begins, sizes), tensor[part])


def test_a_part_reads_the_chunks_that_it_meets_alone(tmp_path, monkeypatch):
    found = open_weights(write_chunks(tmp_path / "c", {"w": (W, BOXES)}))
    read, real = [], dcp_folders._read_saved
    monkeypatch.setattr(
        dcp_folders, "_read_saved", lambda path, x: read.append(x.offsets) or real(path, x)
    )
    assert torch.equal(found.part("w", (1, 2), (2, 3)), W[1:3, 2:5])
    assert read == [(0, 2)]
    with pytest.raises(ValueError, match=r"c: the part of w must lie in its shape \(4, 6\), got"):
        found.part("w", (2, 0), (3, 1))


def test_a_rank_without_values_may_say_the_place_of_one_that_has_some(tmp_path):
    boxes = [((0, 0), (0, 6), "__2_0.distcp"), *BOXES]
    assert torch.equal(open_weights(write_chunks(tmp_path / "c", {"w": (W, boxes)}))["w"], W)


def _info(metadata, index=0):
    return list(metadata.storage_data.values())[index]


def _chunk(metadata, index=0):
    return metadata.state_dict_metadata["w"].chunks[index]


def _replaced(metadata, files, data, index=0):
    """Put other bytes in the place of a chunk."""
    info = _info(metadata, index)
    info.relative_path, info.offset, info.length = "other.distcp", 0, len(data)
    files["other.distcp"] = data


def _huge(metadata, files):
    """Claim a tensor of 2^40 values, that torch.save holds in four bytes."""
    size = torch.Size([2**40])
    entry = metadata.state_dict_metadata["w"]
    entry.size, entry.chunks = size, entry.chunks[:1]
    entry.chunks[0].offsets, entry.chunks[0].sizes = torch.Size([0]), size
    metadata.storage_data = {
        dataclasses.replace(next(iter(metadata.storage_data)), offset=torch.Size([0])): _info(
            metadata
        )
    }
    buffer = io.BytesIO()
    torch.save(torch.ones(1).expand(2**40), buffer)
    _replaced(metadata, files, buffer.getvalue())


def _gap(metadata, files):
    del metadata.state_dict_metadata["w"].chunks[2]


def _twice(metadata, files):
    _chunk(metadata, 2).offsets, _chunk(metadata, 2).sizes = torch.Size([2, 0]), torch.Size([2, 6])
    for index in list(metadata.storage_data):
        if index.offset == torch.Size([3, 0]):
            moved = dataclasses.replace(index, offset=torch.Size([2, 0]))
            metadata.storage_data[moved] = metadata.storage_data.pop(index)


def _alias(metadata, files):
    _info(metadata, 2).offset = _info(metadata, 1).offset + 8


def _cut(metadata, files):
    files["__1_0.distcp"] = files["__1_0.distcp"][:-9]


def _outside(metadata, files):
    _info(metadata).relative_path = "../secret.distcp"


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_gap, r"c/\.metadata: must place all of w, 6 of its values are in no chunk"),
        (_twice, r"distcp: must hold no part of w that __\d_0\.distcp does, got chunks at"),
        (_alias, r"__1_0\.distcp: must hold each chunk once, w and w overlap"),
        (_cut, r"__1_0\.distcp: must hold \d+ bytes, has \d+; it is cut short, and ends before w"),
        (lambda m, f: f.pop("__0_0.distcp"), r"__0_0\.distcp: must be a file of the checkpoint"),
        (_huge, r"distcp: must hold the 4398046511104 bytes of a chunk of w, \d+ are said"),
        (_outside, r"\.metadata: .* w is in '\.\./secret\.distcp', which is no file of the folder"),
        (
            lambda m, f: setattr(_info(m), "transform_descriptors", ["stream.zstd/1"]),
            r"\.metadata: .* w is stored as \['stream\.zstd/1'\], must be plain",
        ),
        (lambda m, f: setattr(_info(m), "offset", -4), r"\.metadata: .* w is at -4 in"),
        (lambda m, f: setattr(_info(m), "length", True), r"\.metadata: .* no length of the type"),
        (lambda m, f: m.storage_data.clear(), r"\.metadata: .* w has a chunk at .* in no file"),
        (
            lambda m, f: setattr(_chunk(m), "sizes", torch.Size([9, 2])),
            r"__0_0\.distcp: must hold a part of w, whose shape is \(4, 6\); its chunk ends at",
        ),
        (
            lambda m, f: setattr(_chunk(m), "sizes", torch.Size([3])),
            r"\.metadata: .* w has 2 dimensions, a chunk of it 1",
        ),
        (lambda m, f: setattr(m, "storage_data", None), r"\.metadata: .* Metadata has no storage_"),
    ],
)
def test_chunks_that_do_not_make_up_a_tensor_are_named_when_it_is_opened(tmp_path, spoil, message):
    with pytest.raises(ValueError, match=message) as refused:
        open_weights(write_chunks(tmp_path / "c", {"w": (W, BOXES)}, spoil))
    assert str(tmp_path / "c") in str(refused.value)


class _Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def _pickled(thing):
    buffer = io.BytesIO()
    torch.save(thing, buffer)
    return buffer.getvalue()


def _bomb():
    """Return a file of torch.save whose values are packed: a gigabyte in a megabyte."""
    buffer = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(_pickled(torch.zeros(3, 2)))) as whole,
        zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for entry in whole.infolist():
            data = whole.read(entry)
            packed.writestr(entry.filename, bytes(2**22) if "data/" in entry.filename else data)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: _pickled({"w": _Evil(path)}), "must hold a whole chunk of w: Weights only"),
        (lambda path: _pickled(torch.zeros(2, 3)), r"of the shape \(3, 2\) for w, got .* \(2, 3\)"),
        (lambda path: _pickled(torch.zeros(3, 2).double()), r"hold torch.float32 .* torch.float64"),
        (lambda path: _pickled([1.0]), r"must hold torch.float32 of the shape .*, got list"),
        (lambda path: _pickled(torch.zeros(3, 2, device="meta")), "has an outline alone"),
        (lambda path: _bomb(), r"chunk of w: its \d+ bytes claim to hold 8\d+"),
        (lambda path: saved(torch.zeros(3, 2))[:-30], "must hold a whole chunk of w: File is not"),
        (lambda path: b"no archive at all, and no pickle", "chunk of w: it is no archive"),
        # zipfile finds the archive at its end, torch would read what is before it
        (lambda path: b"before" + _pickled(torch.zeros(3, 2)), "chunk of w: it is no archive"),
    ],
    ids=["code", "shape", "dtype", "list", "meta", "packed", "torn", "text", "prefixed"],
)
def test_a_chunk_that_is_not_what_was_said_is_named_and_nothing_of_it_runs(tmp_path, make, message):
    planted = tmp_path / "planted"
    folder = write_chunks(
        tmp_path / "c",
        {"w": (W, BOXES)},
        lambda metadata, files: _replaced(metadata, files, make(planted)),
    )
    found = open_weights(folder)
    with pytest.raises(ValueError, match=message) as refused:
        found["w"]
    assert str(folder / "other.distcp") in str(refused.value)
    assert not planted.exists()
    assert torch.equal(found.part("w", (0, 2), (3, 4)), W[:3, 2:])


def test_metadata_that_calls_is_refused_with_its_name(tmp_path):
    planted = tmp_path / "planted"
    folder = write_chunks(
        tmp_path / "c",
        {"w": (W, BOXES)},
        lambda metadata, files: setattr(metadata, "planner_data", {"w": _Evil(planted)}),
    )
    message = r"c/\.metadata: must be the metadata .* writes: it names \w+\.system, which DCP does"
    with pytest.raises(ValueError, match=message):
        open_weights(folder)
    assert not planted.exists()


def test_a_folder_around_it_is_opened_and_several_are_named(tmp_path):
    state = _state()
    save(tmp_path / "step-3" / "pytorch_model_fsdp_0", {"model": state})
    save(tmp_path / "step-3" / "optimizer_0", {"optimizer": ADAM})
    found = open_weights(tmp_path / "step-3")
    assert set(found) == set(state)
    assert found.label.endswith("step-3/pytorch_model_fsdp_0")
    save(tmp_path / "step-3" / "pytorch_model_fsdp_1", {"model": state})
    with pytest.raises(ValueError, match=r"step-3: must hold one checkpoint, got pytorch_model_"):
        open_weights(tmp_path / "step-3")


def test_a_torn_write_of_dcps_is_no_checkpoint(tmp_path):
    folder = write_chunks(tmp_path / "c", {"w": (W, BOXES)})
    (folder / ".metadata").rename(folder / ".metadata.tmp")
    with pytest.raises(ValueError, match=r"c: must be a run, .* or \.metadata; it holds "):
        open_weights(folder)


def test_tied_weights_count_once(tmp_path):
    w = torch.randn(3, 2)
    state = {"embed": w, "head": w, "other": torch.randn(3, 2), "one": torch.ones(3, 2)}
    state["ones"] = torch.ones(3, 2)
    found = open_weights(save(tmp_path / "c", {"model": state}))
    names = {name: (name,) for name in ("embed", "head", "other", "one", "ones")}
    assert tied_names((found,), names) == {"head": "embed"}


def test_a_file_that_may_not_be_read_is_named(tmp_path, monkeypatch):
    folder = write_chunks(tmp_path / "c", {"w": (W, BOXES)})

    def refuse(path):
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    found = open_weights(folder)
    monkeypatch.setattr(dcp_folders, "open_plain", refuse)
    with pytest.raises(ValueError, match=r"__0_0\.distcp: must hold a whole chunk of w: .*error"):
        found["w"]
