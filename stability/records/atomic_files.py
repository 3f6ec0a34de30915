"""Writes files atomically: to a temporary name beside them, forced to disk, then renamed.

So a reader finds either the old file or the new one, whole, even if the writer is killed or the
power is cut. Leaves out appending, where a kill tears at most the last line (`metric_log`), and the
operations themselves (`file_operations`).
"""

import contextlib
import errno
import os
import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from stability.records import file_operations

__all__ = [
    "DiskFullError",
    "is_disk_full",
    "make_folders",
    "naming",
    "remove",
    "remove_any",
    "remove_tree",
    "temporary_name",
    "write_text",
    "write_whole",
]

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""A full disk, a used-up quota, and a file at the size limit of the process or file system."""
_SAID = re.compile(r"\(os error (\d+)\)")
"""How Rust, in which safetensors is written, ends the text of an error that has no errno."""


class DiskFullError(OSError):
    """The disk is full; the files that were written before are whole."""


def is_disk_full(error: BaseException | None) -> bool:
    """Whether `error`, or an error in its chain of causes, says that the disk is full."""
    while error is not None:
        if isinstance(error, DiskFullError) or _code(error) in _FULL:
            return True
        error = error.__cause__ or error.__context__
    return False


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Turn an error of the system into one that names `path`; DiskFullError if the disk is full.

    A library may hide the system's error behind one of its own: the chain of causes is searched.
    """
    try:
        yield
    except DiskFullError:
        raise
    except Exception as error:
        if is_disk_full(error):
            raise DiskFullError(f"{path}: the disk is full") from error
        code = _first_code(error)
        if code:
            raise OSError(code, os.strerror(code), str(path)) from error
        raise


def write_whole(path: Path, content: Callable[[Path], object]) -> None:
    """Let `content` write a file at the temporary path that it is given, then call that `path`.

    Missing parent folders are created. When this returns the file is on the disk under its name.
    OSError, which names the file, if the system refuses something; DiskFullError if the disk is
    full. After an error `path` is unchanged and the temporary file is deleted. If the process is
    killed `path` is unchanged too, but a file `.<name>.<random>.tmp` may stay beside it.
    """
    with naming(path):
        make_folders(path.parent)
        temporary = temporary_name(path)
        try:
            file_operations.fill(temporary, content)
            # else the name could reach the disk before the content does
            file_operations.sync(temporary)
            file_operations.rename(temporary, path)
        except BaseException:
            # what hinders the writing may hinder this as well, and is told already
            with contextlib.suppress(OSError):
                file_operations.unlink(temporary)
            raise
        # a rename is on disk only once its folder is
        file_operations.sync(path.parent)


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path` in UTF-8, whole or not at all, with the errors of `write_whole`.

    A lone surrogate, which UTF-8 cannot hold but a file's name may, is written as its escape, e.g.
    `\\ud800`; in a JSON string that reads back as the same character.
    """
    content = text.encode("utf-8", "backslashreplace")
    write_whole(path, lambda temporary: temporary.write_bytes(content))


def make_folders(path: Path) -> None:
    """Make a folder and those above it that are missing, and force their names to disk.

    OSError, which names the folder, if the system refuses.
    """
    missing: list[Path] = []
    with naming(path):
        folder = path
        while not folder.is_dir():
            missing.append(folder)
            folder = folder.parent
        for folder in reversed(missing):
            # another process may make it at the same time
            with contextlib.suppress(FileExistsError):
                file_operations.make_folder(folder)
            file_operations.sync(folder.parent)


def temporary_name(path: Path) -> Path:
    """Return a new name beside `path`, `.<name>.<random>.tmp`; such files may always be deleted."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")


def remove(path: Path) -> None:
    """Delete a file if it is there; OSError, which names it, if the system refuses."""
    with naming(path), contextlib.suppress(FileNotFoundError):
        file_operations.unlink(path)


def remove_any(path: Path) -> None:
    """Delete what is there, a file or a folder with the files in it."""
    if path.is_dir() and not path.is_symlink():
        remove_tree(path)
    else:
        remove(path)


def remove_tree(path: Path) -> None:
    """Delete a folder and the files in it, if it is there; readers lose all of it at once.

    OSError, which names it, if the system refuses, or if it holds folders.
    """
    with naming(path), contextlib.suppress(FileNotFoundError):
        gone = path
        if not path.name.endswith(".tmp"):
            gone = temporary_name(path)
            file_operations.rename(path, gone)
        for file in list(gone.iterdir()):
            file_operations.unlink(file)
        file_operations.remove_folder(gone)


def _first_code(error: BaseException | None) -> int:
    """Return the first errno in a chain of causes; 0 if there is none."""
    while error is not None:
        if code := _code(error):
            return code
        error = error.__cause__ or error.__context__
    return 0


def _code(error: BaseException) -> int:
    if isinstance(error, OSError) and error.errno:
        return error.errno
    said = _SAID.search(str(error))
    return int(said.group(1)) if said else 0
