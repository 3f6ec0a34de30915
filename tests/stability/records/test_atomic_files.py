"""A file is whole or not there, whatever interrupts its writing."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from stability.records.atomic_files import atomic_path, write_text

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
    with atomic_path(path) as temporary:
        temporary.write_text("half")
        raise error


def test_an_error_or_ctrl_c_in_the_writer_leaves_nothing(tmp_path):
    for error in (ValueError, KeyboardInterrupt):
        with pytest.raises(error):
            _write_half(tmp_path / "note.txt", error)
        assert list(tmp_path.iterdir()) == []


def test_the_bytes_are_forced_to_disk_before_the_rename_and_the_folder_after(tmp_path, monkeypatch):
    calls = []
    sync, replace = os.fsync, os.replace

    def watched_sync(descriptor):
        calls.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).suffix)
        sync(descriptor)

    def watched_replace(source, target):
        calls.append("rename")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", watched_sync)
    monkeypatch.setattr(os, "replace", watched_replace)
    write_text(tmp_path / "folder" / "note.txt", "text")
    assert calls == [".tmp", "rename", ""]


def test_a_process_killed_in_the_middle_leaves_the_old_file_alone(tmp_path):
    path = tmp_path / "note.txt"
    write_text(path, "old")
    code = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from stability.records.atomic_files import atomic_path\n"
        "with atomic_path(Path(sys.argv[1])) as temporary:\n"
        "    temporary.write_text('half of the new')\n"
        "    print('written', flush=True)\n"
        "    time.sleep(60)\n"
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
