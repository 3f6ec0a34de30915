"""Only plain files are opened: a reader of anything else would wait, or read without an end."""

import errno
import os
import socket
from pathlib import Path

import pytest

from stability.records import plain_files
from stability.records.plain_files import check_plain, open_plain, read_plain
from stability.records.run_files import RunFiles, damaged_files
from stability.records.sealed_json import file_checksum
from stability.records.snapshots import read_snapshot

READERS = (open_plain, read_plain, check_plain)


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(os.path.relpath(path))


def _zeros(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _loop(path: Path) -> None:
    path.symlink_to(path.name)


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (_fifo, "Is a named pipe, must be a plain file"),
        (_socket, "Is a socket, must be a plain file"),
        (_zeros, "Is a device, must be a plain file"),
        (Path.mkdir, "Is a directory"),
        (_loop, "Too many levels of symbolic links"),
    ],
)
def test_what_is_no_plain_file_is_not_opened(tmp_path, monkeypatch, read, make, message):
    monkeypatch.chdir(tmp_path)  # the address of a socket may be no longer than 108 bytes
    path = tmp_path / "record.json"
    make(path)
    monkeypatch.setattr(plain_files.os, "open", lambda *_: pytest.fail("it was opened"))
    with pytest.raises(OSError, match=message) as caught:
        read(path)
    assert caught.value.filename == str(path)


def test_a_pipe_that_comes_after_the_look_is_not_waited_for(tmp_path, monkeypatch):
    path, plain = tmp_path / "record.json", tmp_path / "plain"
    os.mkfifo(path)
    plain.touch()
    looked = os.stat(plain)
    monkeypatch.setattr(plain_files.os, "stat", lambda _: looked)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="Is a named pipe"):
        open_plain(path)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_file_and_a_link_to_one_are_read(tmp_path):
    path, link = tmp_path / "record.json", tmp_path / "link.json"
    path.write_bytes(b"{}\n")
    link.symlink_to(path)
    for each in (path, link):
        assert read_plain(each) == b"{}\n"
        assert check_plain(each) == each
        with open_plain(each) as file:
            assert file.readline() == b"{}\n"
    with pytest.raises(FileNotFoundError):
        read_plain(tmp_path / "none")


def test_a_file_that_says_it_holds_a_terabyte_is_not_read(tmp_path):
    path = tmp_path / "record.json"
    with path.open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(OSError, match="holds 1099511627776 bytes, more than any record"):
        read_plain(path)


def _hollow(path: Path, *, written: int) -> Path:
    """Make a file of a terabyte in which `written` bytes are no holes."""
    with path.open("wb") as file:
        file.write(b"x" * written)
        file.truncate(2**40)
    return path


@pytest.mark.parametrize("read", [open_plain, check_plain, file_checksum, read_snapshot])
@pytest.mark.parametrize("written", [0, 5000])
def test_a_large_file_of_holes_is_neither_read_nor_given_to_a_library(tmp_path, read, written):
    path = _hollow(tmp_path / "step-1.safetensors", written=written)
    said = "holds 1099511627776 bytes, nearly all of them holes"
    with pytest.raises((OSError, ValueError), match=said) as caught:
        read(path)
    assert str(path) in str(caught.value)


def test_a_large_file_that_was_written_is_read_from_its_begin(tmp_path, monkeypatch):
    monkeypatch.setattr(plain_files, "MOST_BYTES", 2**20)
    path = tmp_path / "log"
    path.write_bytes(b"ab" * 2**20)
    assert check_plain(path) == path
    with open_plain(path) as file:
        assert file.read() == b"ab" * 2**20


def test_a_file_system_that_knows_no_holes_is_taken_at_its_word(tmp_path, monkeypatch):
    path = _hollow(tmp_path / "log", written=10)

    def refuse(descriptor: int, at: int, how: int) -> int:
        if how != os.SEEK_SET:
            raise OSError(errno.EINVAL, "Invalid argument")
        return at

    monkeypatch.setattr(plain_files.os, "lseek", refuse)
    open_plain(path).close()


def test_a_listed_file_of_holes_is_damaged(tmp_path):
    files = RunFiles.unnamed(tmp_path)
    path = files.paths.snapshot(1)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"weights")
    files.add(path)
    _hollow(path, written=10)
    wrong = damaged_files(files.paths, files.manifest)
    assert wrong[files.paths.name_of(path)].startswith("is damaged: it holds 1099511627776 bytes")
