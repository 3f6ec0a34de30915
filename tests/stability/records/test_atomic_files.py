"""A file is whole or not there, whatever interrupts its writing."""

import errno
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from stability.records import file_operations
from stability.records.atomic_files import DiskFullError, make_folders, write_text, write_whole

ROOT = Path(__file__).parents[3]


def test_text_arrives_in_utf8_and_its_folders_are_made(tmp_path):
    path = tmp_path / "a" / "b" / "note.txt"
    write_text(path, "\u03c3/n\n")
    assert path.read_bytes() == "\u03c3/n\n".encode()
    assert list(path.parent.iterdir()) == [path]


def test_a_crash_between_write_and_rename_leaves_the_old_file_alone(tmp_path, monkeypatch):
    path = tmp_path / "note.txt"
    write_text(path, "old")

    def crash(*args):
        raise OSError("no rename")

    monkeypatch.setattr(os, "replace", crash)
    with pytest.raises(OSError, match="no rename"):
        write_text(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def _write_half(path, error):
    def half(temporary):
        temporary.write_text("half")
        raise error

    write_whole(path, half)


def test_an_error_or_ctrl_c_in_the_writer_leaves_nothing(tmp_path):
    for error in (ValueError, KeyboardInterrupt):
        with pytest.raises(error):
            _write_half(tmp_path / "note.txt", error)
        assert list(tmp_path.iterdir()) == []


def test_bytes_are_forced_to_disk_before_the_rename_and_every_name_after(tmp_path, monkeypatch):
    calls = []
    sync, rename = os.fsync, os.replace

    def watched_sync(descriptor):
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        calls.append(".tmp" if path.suffix == ".tmp" else str(path.relative_to(tmp_path)))
        sync(descriptor)

    def watched_rename(source, target):
        calls.append("rename")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", watched_sync)
    monkeypatch.setattr(os, "replace", watched_rename)
    write_text(tmp_path / "a" / "b" / "note.txt", "text")
    assert calls == [".", "a", ".tmp", "rename", "a/b"]


def test_a_folder_that_another_process_makes_meanwhile_is_as_good(tmp_path, monkeypatch):
    make = file_operations.make_folder

    def late(path):
        make(path)
        make(path)

    monkeypatch.setattr(file_operations, "make_folder", late)
    make_folders(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()


class _HiddenError(RuntimeError):
    """An error of a library that says nothing of the one it comes from."""


@pytest.mark.parametrize("operation", ["make_folder", "fill", "sync", "rename"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EMFILE])
def test_what_the_system_refuses_is_told_with_the_name_of_the_file(
    tmp_path, monkeypatch, operation, code
):
    def refused(*_):
        try:
            raise OSError(code, os.strerror(code))
        except OSError:
            raise _HiddenError("unexpected pos") from None

    monkeypatch.setattr(file_operations, operation, refused)
    path = tmp_path / "folder" / "note.txt"
    with pytest.raises(OSError, match=re.escape(str(path.parent))) as caught:
        write_text(path, "text")
    assert isinstance(caught.value, DiskFullError) == (code == errno.ENOSPC)
    assert code == errno.ENOSPC or caught.value.strerror == os.strerror(code)
    assert list(tmp_path.rglob("*.*")) == []


def test_a_full_disk_is_told_from_the_text_of_a_library_without_an_errno(tmp_path):
    def refused(temporary):
        raise _HiddenError("Error while serializing: I/O error: no space left (os error 28)")

    with pytest.raises(DiskFullError, match=r"note.txt: the disk is full$"):
        write_whole(tmp_path / "note.txt", refused)


def test_a_process_killed_in_the_middle_leaves_the_old_file_alone(tmp_path):
    path = tmp_path / "note.txt"
    write_text(path, "old")
    code = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from stability.records.atomic_files import write_whole\n"
        "def half(temporary):\n"
        "    temporary.write_text('half of the new')\n"
        "    print('written', flush=True)\n"
        "    time.sleep(60)\n"
        "write_whole(Path(sys.argv[1]), half)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(path)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert process.stdout.readline() == b"written\n"
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=30)
    assert path.read_text() == "old"
    write_text(path, "new")
    assert path.read_text() == "new"
