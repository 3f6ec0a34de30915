"""The pickle of a DCP folder is read as records; what else it could do is refused, and not done."""

import contextlib
import enum
import itertools
import os
import pickle
import pickletools
import random
import struct
import tracemalloc
from pathlib import Path, PurePosixPath

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed._shard.sharded_tensor.metadata import MEM_FORMAT_ENCODING
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as OldProperties
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from stability.records.dcp_pickle import Record, read_dcp_pickle

SIZE = torch.Size([2, 3])
CHUNK = ChunkStorageMetadata(torch.Size([0, 0]), SIZE)


def _metadata(properties, **fields):
    return Metadata(
        state_dict_metadata={
            "w": TensorStorageMetadata(properties, SIZE, [CHUNK]),
            "step": BytesStorageMetadata(),
        },
        planner_data={"w": ("model", "layers", 0, "w")},
        storage_data={
            MetadataIndex("w", torch.Size([0, 0]), 0): _StorageInfo("__0_0.distcp", 5, 9)
        },
        storage_meta=StorageMeta(Path("/somewhere/step-3"), "id"),
        **fields,
    )


def _plain(thing):
    """Return what a record holds, records as pairs of their class and fields."""
    if isinstance(thing, Record):
        return thing.kind, {name: _plain(value) for name, value in thing.fields.items()}
    if isinstance(thing, dict):
        return [(_plain(key), _plain(value)) for key, value in thing.items()]
    return [_plain(x) for x in thing] if isinstance(thing, list) else thing


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("properties", [TensorProperties, OldProperties], ids=["2.3", "2.1"])
def test_what_dcp_writes_is_read(properties, protocol):
    written = _metadata(properties(dtype=torch.bfloat16), version="1.0.0")
    # Megatron adds these by itself
    written.mcore_data = {"w": {"nd_reformulated_orig_global_shape": (2, 3)}}
    data = TensorWriteData(CHUNK, properties(), SIZE)
    written.all_local_plans = [
        SavePlan([WriteItem(MetadataIndex("w"), WriteItemType.SHARD, tensor_data=data)])
    ]
    found = read_dcp_pickle(pickle.dumps(written, protocol=protocol)).fields
    tensor, step = found["state_dict_metadata"].values()
    assert _plain(tensor) == (
        "TensorStorageMetadata",
        {
            "properties": (
                "TensorProperties",
                {
                    "dtype": torch.bfloat16,
                    "layout": "torch.strided",
                    "requires_grad": False,
                    "memory_format": 0,
                    "pin_memory": False,
                },
            ),
            "size": (2, 3),
            "chunks": [("ChunkStorageMetadata", {"offsets": (0, 0), "sizes": (2, 3)})],
        },
    )
    assert step.kind == "BytesStorageMetadata"
    assert found["planner_data"] == {"w": ("model", "layers", 0, "w")}
    ((index, info),) = found["storage_data"].items()
    assert index.fields == {"fqn": "w", "offset": (0, 0), "index": 0}
    assert info.fields == {"relative_path": "__0_0.distcp", "offset": 5, "length": 9}
    assert found["storage_meta"].fields["checkpoint_id"].endswith("somewhere/step-3")
    assert found["mcore_data"] == {"w": {"nd_reformulated_orig_global_shape": (2, 3)}}


@pytest.mark.parametrize("protocol", [2, 4])
def test_an_enum_by_its_name_is_its_number(monkeypatch, protocol):
    # as Python 3.11.0 to 3.11.3, and so Debian 12's, write one
    monkeypatch.setattr(enum.Enum, "__reduce_ex__", lambda x, _: (getattr, (type(x), x.name)))
    written = Metadata({})
    formats = [*_MEM_FORMAT_ENCODING, *MEM_FORMAT_ENCODING]
    written.planner_data = [*formats, *WriteItemType]
    data = pickle.dumps(written, protocol=protocol)
    assert b"getattr" in data
    read = read_dcp_pickle(data).fields["planner_data"]
    assert read == [x.value for x in written.planner_data]


class _Calls:
    """Is pickled as a call."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


class _Foreign:
    pass


def _dtype_with_state():
    return b"\x80\x04ctorch\nfloat32\n}X\x01\x00\x00\x00aK\x01sb."


def _state_of_a_class():
    name = b"ctorch.distributed.checkpoint.metadata\nMetadata\n"
    return b"\x80\x04" + name + b"}X\x0c\x00\x00\x00__setstate__K\x01sb."


HOSTILE = {
    "os.system": (_Calls(os.system, "touch {planted}"), r"names posix\.system"),
    "eval": (_Calls(eval, "open({planted!r}, 'w').close()"), r"names \w*builtin\w*\.eval"),
    "getattr": (_Calls(getattr, Metadata, "__init__"), r"calls \S*\.getattr with"),
    "getattr of enum": (
        _Calls(getattr, WriteItemType, "mro"),
        r"calls \w*builtin\w*\.getattr with",
    ),
    "getattr of text": (
        _Calls(getattr, "{planted}", "SHARD"),
        r"calls \w*builtin\w*\.getattr with",
    ),
    "torch.load": (_Calls(torch.load, "{planted}"), r"names torch\.serialization\.load"),
    "torch.hub": (_Calls(torch.hub.load, "a", "b"), r"names torch\.hub\.load"),
    "torch.save": (_Calls(torch.save, 1, "{planted}"), r"names torch\.serialization\.save"),
    "tensor": (torch.ones(2), r"names torch\._utils\._rebuild_tensor_v2"),
    "array": (numpy.ones(2), r"names numpy\.\S+\._?\w*reconstruct"),
    "object": (_Foreign(), r"names \S*_Foreign"),
    "dotted": (
        _Calls(Path.touch, Path("{planted}")),
        r"names pathlib\S*Path",
    ),
    "size of text": (_Calls(torch.Size, "{planted}"), r"calls torch\.Size with .*planted"),
    "size below 0": (_Calls(torch.Size, [-1]), r"calls torch\.Size"),
    "size of truth": (_Calls(torch.Size, [True]), r"calls torch\.Size"),
    "enum of text": (_Calls(WriteItemType, "{planted}"), r"calls \S*WriteItemType with"),
    "path of number": (_Calls(PurePosixPath, 3), r"calls pathlib\S*PurePosixPath with \(3,\)"),
    "record called": (_Calls(Metadata, {"a": 1}), r"calls \S*metadata\.Metadata with"),
    "info called": (_Calls(_StorageInfo, "/etc/passwd", 0, 9), r"calls \S*_StorageInfo with"),
}


def _with(thing, planted):
    if isinstance(thing, _Calls):
        function, arguments = thing.call
        filled = [
            type(x)(str(x).format(planted=str(planted))) if isinstance(x, str | Path) else x
            for x in arguments
        ]
        return _Calls(function, *filled)
    return thing


@pytest.mark.parametrize("hidden", ["alone", "planner_data", "chunk", "fqn"])
@pytest.mark.parametrize("name", HOSTILE)
def test_whatever_else_a_pickle_calls_or_makes_is_refused_and_not_done(tmp_path, name, hidden):
    planted = tmp_path / "planted"
    thing = _with(HOSTILE[name][0], planted)
    content = thing
    if hidden != "alone":
        content = _metadata(TensorProperties())
        if hidden == "planner_data":
            content.planner_data = thing
        elif hidden == "chunk":
            content.state_dict_metadata["w"].chunks.append(thing)
        else:
            object.__setattr__(next(iter(content.storage_data)), "fqn", thing)
    for protocol in (2, 4):
        with pytest.raises(ValueError, match=HOSTILE[name][1]):
            read_dcp_pickle(pickle.dumps(content, protocol=protocol))
    assert not planted.exists()


def test_a_name_of_torch_is_not_asked_of_torch(monkeypatch):
    """It imports some of its modules when it is asked for them."""
    asked = []
    monkeypatch.setattr(torch, "__getattr__", asked.append)
    with pytest.raises(ValueError, match=r"names torch\._no_module"):
        read_dcp_pickle(b"\x80\x04ctorch\n_no_module\n.")
    assert asked == []


def test_the_planted_calls_are_real(tmp_path):
    planted = tmp_path / "planted"
    for name in ("os.system", "eval"):
        pickle.loads(pickle.dumps(_with(HOSTILE[name][0], planted)))
        assert planted.exists()
        planted.unlink()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (_dtype_with_state(), "gives dtype the state dict"),
        (_state_of_a_class(), r"gives \S*metadata\.Metadata the state dict"),
        (b"\x80\x04}(K\x01K\x02ttsK\x01.", "cut short or damaged"),
        (b"\x80\x04}((((ttttK\x01s.", "has a key that is"),
        (
            b"\x80\x04ctorch.distributed.checkpoint.metadata\nMetadata\nK\x01\x85\x81.",
            r"makes \S*metadata\.Metadata with \(1,\)",
        ),
        (b"\x80\x04ctorch\nSize\n)\x81.", r"makes torch\.Size with \(\)"),
        (b"\x80\x04K\x01K\x02a.", "appends to int"),
        (b"\x80\x04K\x01K\x02K\x03s.", "sets items of int"),
        (b"\x80\x04K\x01\x86.", "a tuple of 2 has fewer items"),
        (b"\x80\x04K\x01.", "holds int, and no Metadata"),
        (b"\x80\x04}.", "holds dict, and no Metadata"),
        (b"(ios\nsystem\n.", "has the opcode INST"),
        (b"(S'a'\n.", "has the opcode STRING"),
        (b"(cos\nsystem\no.", r"names os\.system"),
        (b"\x80\x02\x82\x01.", "has the opcode EXT1"),
        (b"\x80\x04\x95\x00\x00\x00\x00\x00\x00\x00\x00Pa\n.", "has the opcode PERSID"),
        (b"\x80\x04K\x01Q.", "has the opcode BINPERSID"),
        (b"\x80\x05\x96\x00\x00\x00\x00\x00\x00\x00\x00.", "has the opcode BYTEARRAY8"),
        (b"\x80\x04h\x07.", "cut short or damaged"),
        (b"\x80\x04a.", "cut short or damaged"),
        (b"", "cut short or damaged"),
        (b"PK\x03\x04", "cut short or damaged|has the opcode"),
    ],
)
def test_opcodes_that_dcp_does_not_write_are_refused(data, message):
    with pytest.raises(ValueError, match=message):
        read_dcp_pickle(data)


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x04\x8d" + struct.pack("<Q", 2**40) + b"ab.",
        b"\x80\x04X" + struct.pack("<I", 2**31) + b"ab.",
        b"\x80\x04B" + struct.pack("<I", 2**31) + b"ab.",
        b"\x80\x04\x95" + struct.pack("<Q", 2**40) + b"N.",
        b"\x80\x04Nr" + struct.pack("<I", 2**31) + b".",
    ],
    ids=["text of 1 TB", "text of 2 GB", "bytes of 2 GB", "frame of 1 TB", "place 2e9 of the memo"],
)
def test_a_claimed_size_takes_no_memory(data):
    tracemalloc.start()
    with pytest.raises(ValueError, match=r"cut short or damaged|no Metadata"):
        read_dcp_pickle(data)
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()


def test_a_key_that_takes_for_ever_to_hash_is_refused_at_once():
    # each tuple holds the one before twice
    nested = b"\x85\x94" + b"".join(b"h" + bytes([i]) + b"\x86\x94" for i in range(60))
    data = b"\x80\x04}K\x01" + nested + b"K\x01s."
    with pytest.raises(ValueError, match="has a key that is tuple"):
        read_dcp_pickle(data)


WHOLE = pickle.dumps(_metadata(TensorProperties()))


@given(st.integers(0, len(WHOLE) - 1), st.integers(0, 255), st.integers(0, len(WHOLE)))
def test_a_damaged_pickle_gives_one_kind_of_error_or_a_record(place, value, length):
    damaged = bytearray(WHOLE)
    damaged[place] = value
    for data in (bytes(damaged), WHOLE[:length], bytes(damaged[:length])):
        with contextlib.suppress(ValueError):
            assert read_dcp_pickle(data).kind == "Metadata"


def test_opcodes_in_any_order_give_one_kind_of_error_or_a_record():
    generator = random.Random(0)
    places = [place for _, _, place in pickletools.genops(WHOLE)]
    parts = [WHOLE[a:b] for a, b in itertools.pairwise([*places, len(WHOLE)])]
    for _ in range(300):
        generator.shuffle(parts)
        with pytest.raises(ValueError, match=r"."):
            read_dcp_pickle(b"".join(parts))


@pytest.mark.parametrize("large", ["a path", "a size", "fields"])
def test_what_a_pickle_could_have_copied_again_and_again_is_bounded(large):
    written = _metadata(TensorProperties())
    if large == "a path":
        written.storage_meta.checkpoint_id = PurePosixPath(*["a" * 1000] * 5)
    elif large == "a size":
        written.state_dict_metadata["w"].size = torch.Size([1] * 65)
    else:
        vars(written).update({f"field_{i}": i for i in range(65)})
    with pytest.raises(ValueError, match="fields" if large == "fields" else "it calls"):
        read_dcp_pickle(pickle.dumps(written))
