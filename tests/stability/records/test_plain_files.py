"""Only plain files are opened: a reader of anything else would wait, or read without an end."""

import os
import socket
from pathlib import Path

import pytest

from stability.records import plain_files
from stability.records.plain_files import check_plain, open_plain, read_plain

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
