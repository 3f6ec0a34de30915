"""What lies in an object store is read and written whole, and what goes wrong is one line."""

import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem
from fsspec.registry import _registry

from stability.records.object_store import at_hand, is_url, shown_url, written

KEYS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}


def refused(place, match, opened=at_hand, kind=ValueError):
    """Hold that `place` can't be opened, with these words."""
    with pytest.raises(kind, match=match), opened(place):
        pytest.fail("was opened")


class Breaking(MemoryFileSystem):
    """A store without whole uploads, to which the line breaks in the middle of each."""

    protocol = "breaking"
    store: ClassVar = {}
    pseudo_dirs: ClassVar = [""]

    @classmethod
    def _strip_protocol(cls, path):
        return "/" + path.removeprefix("breaking://").strip("/")

    def put_file(self, lpath, rpath, *args, **more):
        self.pipe_file(rpath, Path(lpath).read_bytes()[:3])
        raise TimeoutError("the line\nbroke")


@pytest.fixture
def memory():
    """The store `memory://`, empty."""
    store = fsspec.filesystem("memory")
    MemoryFileSystem.store.clear()
    yield store
    MemoryFileSystem.store.clear()


@pytest.fixture
def breaking():
    fsspec.register_implementation("breaking", Breaking, clobber=True)
    Breaking.store.clear()
    return fsspec.filesystem("breaking")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("s3://bucket/path.tar.gz", True),
        ("memory://x", True),
        ("S3://bucket/path", True),
        ("runs/s3://x", False),
        ("c:/x", False),
        ("s3:/bucket/x", False),
        ("runs/mine", False),
    ],
)
def test_a_url_is_told_from_a_path(text, expected):
    assert is_url(text) == expected


def test_a_path_is_at_hand_as_it_is(tmp_path):
    said = []
    with at_hand(str(tmp_path), said.append) as path:
        assert path == tmp_path
    with written(str(tmp_path / "x")) as path:
        assert path == tmp_path / "x"
    assert tmp_path.is_dir()
    assert said == []


def test_a_file_has_its_name_and_goes_afterwards(memory):
    memory.pipe({"/bucket/one.safetensors": b"x" * 2**20, "/bucket/one.safetensors.old": b""})
    said = []
    with at_hand("memory://bucket/one.safetensors", said.append) as path:
        assert path.name == "one.safetensors"
        assert path.read_bytes() == b"x" * 2**20
        assert [*path.parent.iterdir()] == [path]
    assert not path.parent.exists()
    assert said == [
        f"memory://bucket/one.safetensors: 1 file, 1.0 MB, to be copied to {path.parent}"
    ]


def test_a_folder_comes_with_the_folders_in_it(memory):
    memory.pipe({"/bucket/run/a": b"1", "/bucket/run/b/c": b"2", "/bucket/runs": b"no"})
    said = []
    with at_hand("memory://bucket/run/", said.append) as path:
        files = {str(x.relative_to(path)): x.read_bytes() for x in path.rglob("*") if x.is_file()}
    assert files == {"a": b"1", "b/c": b"2"}
    assert path.name == "run"
    assert "run/: 2 files, 0.0 MB" in said[0]


def test_no_name_of_an_object_leads_out_of_the_copy(memory):
    memory.pipe("/bucket/run/a", b"1")
    memory.store["/bucket/run/../../b"] = memory.store["/bucket/run/a"]
    refused("memory://bucket/run", r"memory://bucket/run: an object's name leads elsewhere")


def test_a_url_in_capitals_is_the_same_object(memory):
    with written("MEMORY://bucket/A") as path:
        path.write_bytes(b"1")
    assert memory.cat("/bucket/A") == b"1"
    with at_hand("Memory://bucket/A") as path:
        assert path.read_bytes() == b"1"


@pytest.mark.parametrize("last", ["..", ".", "../", "..?x"])
@pytest.mark.parametrize("opened", [at_hand, written])
def test_no_url_leads_out_of_the_temporary_folder(memory, monkeypatch, opened, last):
    monkeypatch.setattr(MemoryFileSystem, "_strip_protocol", lambda path: path[len("memory:/") :])
    memory.store[f"/bucket/{last}"] = None
    refused(f"memory://bucket/{last}", r"must name a file or a folder, as memory://bucket/", opened)


def test_an_object_beside_a_folder_of_its_name_is_not_left_out(memory, monkeypatch):
    def got(self, remote, local, **more):
        if not Path(local).is_dir():  # else s3fs does nothing, and says nothing
            Path(local).write_bytes(self.cat_file(remote))

    monkeypatch.setattr(MemoryFileSystem, "get_file", got)
    memory.pipe({"/bucket/run/a/b": b"2", "/bucket/run/c": b""})
    memory.store["/bucket/run/a"] = memory.store["/bucket/run/a/b"]
    said = r"^memory://bucket/run: a must arrive as a file of 1 byte, got a folder$"
    refused("memory://bucket/run", said, kind=OSError)


def test_no_two_objects_become_one_file(memory):
    memory.pipe("/bucket/run/a/b", b"2")
    memory.store["/bucket/run/a//b"] = memory.store["/bucket/run/a/b"]
    refused("memory://bucket/run", r"^memory://bucket/run: two objects would be one file, a/b$")


def test_a_key_that_stands_for_a_folder_is_no_file(memory):
    memory.pipe("/bucket/run/a/b", b"2")
    memory.store["/bucket/run/a/"] = MemoryFile(memory, "/bucket/run/a/", b"")
    with at_hand("memory://bucket/run") as path:
        assert [x.name for x in path.rglob("*") if x.is_file()] == ["b"]


def test_a_copy_that_is_not_whole_is_refused(memory, monkeypatch):
    def cut(self, remote, local, **more):
        for each in local:
            Path(each).write_bytes(b"12")

    monkeypatch.setattr(MemoryFileSystem, "get", cut)
    memory.pipe({"/bucket/a": b"123", "/bucket/run/b": b"123"})
    said = "must arrive as a file of 3 bytes, got 2$"
    refused("memory://bucket/a", rf"^memory://bucket/a: it {said}", kind=OSError)
    refused("memory://bucket/run", rf"^memory://bucket/run: b {said}", kind=OSError)
    monkeypatch.setattr(MemoryFileSystem, "get", lambda self, remote, local: None)
    refused("memory://bucket/a", "must arrive as a file of 3 bytes, got nothing$", kind=OSError)
    listed = {"type": "file", "size": None}  # by a server that does not say how much it sends
    monkeypatch.setattr(MemoryFileSystem, "info", lambda self, path: listed)
    refused("memory://bucket/a", "it must arrive as a file, got nothing$", kind=OSError)
    monkeypatch.setattr(MemoryFileSystem, "get", cut)
    with at_hand("memory://bucket/a") as path:
        assert path.read_bytes() == b"12"


def test_what_is_not_there_is_named(memory):
    memory.makedirs("/bucket/empty")
    for name in ("nothing", "empty"):
        refused(f"memory://bucket/{name}", rf"^memory://bucket/{name}: must be there; ")


def test_an_error_in_the_copy_names_the_url(memory):
    memory.pipe("/bucket/a", b"1")
    with (
        pytest.raises(ValueError, match=r"^memory://bucket/a: is not whole$"),
        at_hand("memory://bucket/a") as path,
    ):
        raise ValueError(f"{path}: is not whole")
    with (
        pytest.raises(ValueError, match=r"^memory://bucket/b: must end in \.c$"),
        written("memory://bucket/b") as path,
    ):
        raise ValueError(f"{path}: must end in .c")
    assert not memory.exists("/bucket/b")


def test_what_is_larger_than_the_disk_is_not_copied(memory, monkeypatch):
    memory.pipe("/bucket/a", b"1" * 2**20)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=2**20 - 1))
    refused(
        "memory://bucket/a",
        r"^memory://bucket/a: its 1\.0 MB must fit on the disk of /",
        kind=OSError,
    )


def test_a_file_is_written_under_its_name_when_it_is_whole(memory):
    with written("memory://bucket/a.tar.gz") as path:
        path.write_bytes(b"all of it")
        assert not memory.exists("/bucket/a.tar.gz")
    assert path.name == "a.tar.gz"
    assert memory.cat("/bucket/a.tar.gz") == b"all of it"
    assert not path.parent.exists()


@pytest.mark.parametrize("was_there", [False, True])
def test_an_upload_that_breaks_leaves_no_new_object(breaking, was_there):
    if was_there:
        breaking.pipe_file("/bucket/a", b"old")
    with (
        pytest.raises(OSError, match=r"^breaking://bucket/a: the line broke$"),
        written("breaking://bucket/a") as path,
    ):
        path.write_bytes(b"all of it")
    assert breaking.exists("/bucket/a") == was_there


def test_a_store_that_must_not_be_read_can_be_written_to(breaking, monkeypatch):
    def forbidden(self, path, **more):
        raise PermissionError("Forbidden")

    monkeypatch.setattr(Breaking, "info", forbidden)
    monkeypatch.setattr(Breaking, "put_file", MemoryFileSystem.put_file)
    refused("breaking://bucket/a", r"^breaking://bucket/a: Forbidden$", kind=OSError)
    with written("breaking://bucket/a") as path:
        path.write_bytes(b"all of it")
    assert breaking.cat("/bucket/a") == b"all of it"


def test_a_missing_package_is_told_with_the_command_that_installs_it(monkeypatch):
    for name in ("s3fs", "gcsfs"):
        monkeypatch.setitem(sys.modules, name, None)
    for protocol in ("s3", "gs"):
        monkeypatch.delitem(_registry, protocol, raising=False)
    refused("s3://b/x", r"^s3://b/x: .* pip install 'training-stability\[s3\]'")
    with (
        pytest.raises(ValueError, match=r"^gs://b/x: needs a package that is not installed: .*gcs"),
        written("gs://b/x"),
    ):
        pytest.fail("was begun")


def test_a_url_of_nothing_that_is_known_is_refused():
    refused("nowhere://b/x", r"^nowhere://b/x: Protocol not known: nowhere$")
    with (
        pytest.raises(ValueError, match=r"^memory://: must name a file or a folder, as memory://b"),
        written("memory://"),
    ):
        pytest.fail("was begun")


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("ftp://me:secret@host/a@b", "ftp://host/a@b"),
        ("ftp://me:p@ss@host/x", "ftp://host/x"),
        ("ftp://me:p?ss@host/x", "ftp://host/x"),
        ("https://host/x.tar.gz?X-Amz-Signature=0f/@1", "https://host/x.tar.gz"),
        ("s3://bucket/a@b", "s3://bucket/a@b"),
    ],
)
def test_no_password_and_no_signature_is_shown(url, shown):
    assert shown_url(url) == shown
    refused(url.replace("://", "+nowhere://"), rf"^{shown.replace('://', '.nowhere://')}: Protocol")


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        ("{url}", "https://host/x y.tar.gz"),
        ("no {url!r}, {url}", "no 'https://host/x y.tar.gz', https://host/x y.tar.gz"),
        ("/x y.tar.gz?sig=S1/2%3D: 403", "/x y.tar.gz: 403"),
        ("url='https://host/x%20y.tar.gz?sig=S1%2F2%3d'", "url='https://host/x%20y.tar.gz"),
        ("https://me:p%40S0@host/x y: 404", "https://host/x y: 404"),
        ("login of me:p@S0 failed, of sig=S1/2%3D", "login of ... failed, of ..."),
    ],
)
def test_what_a_store_says_shows_no_password_and_no_signature(memory, monkeypatch, error, shown):
    url = "https://me:p@S0@host/x y.tar.gz?sig=S1/2%3D"

    def lost(self, path, **more):
        raise FileNotFoundError(error.format(url=url))

    monkeypatch.setattr(MemoryFileSystem, "info", lost)
    monkeypatch.setattr(fsspec, "url_to_fs", lambda url: (memory, url))
    said = f"https://host/x y.tar.gz: must be there; {shown}"
    refused(url, f"^{re.escape(said)}$")


def test_a_signature_is_in_no_name_of_a_copy(memory):
    memory.pipe("/bucket/x.tar.gz?sig=S1/2", b"1")
    with at_hand("memory://bucket/x.tar.gz?sig=S1/2") as path:
        assert path.name == "x.tar.gz"
        assert path.read_bytes() == b"1"
    said = r"^memory://bucket/x: must have no \? to be written$"
    refused("memory://bucket/x?sig=S1", said, written)


@pytest.fixture
def s3(monkeypatch):
    """A bucket of a server that speaks S3's protocol; its address is in the environment."""
    pytest.importorskip("s3fs", reason="needs pip install 'training-stability[s3]'")
    server = pytest.importorskip(
        "moto.server", reason="needs pip install 'training-stability[dev]'"
    )
    running = server.ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    for name, value in {**KEYS, "AWS_ENDPOINT_URL": f"http://{host}:{port}"}.items():
        monkeypatch.setenv(name, value)
    store = fsspec.filesystem("s3", skip_instance_cache=True)
    store.mkdir("bucket")
    yield store
    running.stop()
    type(store).clear_instance_cache()


@pytest.mark.slow
def test_s3_itself_gives_back_what_it_was_given_or_says_what_is_wrong(s3, tmp_path, monkeypatch):
    large = bytes(range(256)) * 2**18  # 64 MB, which go up and come down in parts
    with written("s3://bucket/deep/a.tar.gz") as path:
        path.write_bytes(large)
    with written("s3://bucket/deep/er/b") as path:
        path.write_bytes(b"b")
    with at_hand("s3://bucket/deep") as path:
        assert (path / "a.tar.gz").read_bytes() == large
        assert (path / "er" / "b").read_bytes() == b"b"
    with at_hand("s3://bucket/deep/a.tar.gz") as path:
        assert path.stat().st_size == len(large)
    s3.pipe({"bucket/set/a/b": b"2", "bucket/set/c": b""})
    s3.call_s3("put_object", Bucket="bucket", Key="set/a/")  # as S3's console marks a folder
    with at_hand("s3://bucket/set") as path:
        assert sorted(x.name for x in path.rglob("*") if x.is_file()) == ["b", "c"]
    s3.pipe("bucket/set/a", b"1")
    s3.invalidate_cache()
    said = r"^s3://bucket/set: a must arrive as a file of 1 byte, got a folder$"
    refused("s3://bucket/set", said, kind=OSError)
    refused("s3://bucket/none", r"^s3://bucket/none: must be there; ")
    with (
        pytest.raises(ValueError, match=r"^s3://other/a: must be there; .*bucket does not exist"),
        written("s3://other/a") as path,
    ):
        path.write_bytes(b"a")
    for name in KEYS:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    type(s3).clear_instance_cache()
    refused("s3://bucket/c", r"^s3://bucket/c: .*credentials", written, kind=OSError)
