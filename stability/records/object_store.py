"""Files in an object store, by URL: copied to the disk to be read, and up once they are whole.

A URL is one that fsspec knows, such as `s3://bucket/runs/study.bundle.tar.gz`; most need a package
of their own, which finds credentials in its own way. What is read lies in a temporary folder, under
its own name, as long as it is needed; what is written is complete on the disk before an object has
its name, and S3 shows an object once all of it has arrived. Leaves out what the files hold.
"""

import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any

__all__ = ["at_hand", "is_url", "shown_url", "written"]

_URL = re.compile(r"[a-z][a-z0-9+.-]+://")
_USER = re.compile(r"(?<=://)[^/@]*@")
_S3 = ("s3", "s3a")


def is_url(text: str) -> bool:
    """Whether `text` is a URL, and no path of this disk."""
    return _URL.match(text) is not None


def shown_url(url: str) -> str:
    """Return a URL without the user and the password in it, as it may go on record."""
    return _USER.sub("", url)


@contextmanager
def at_hand(place: str, say: Callable[[str], object] | None = None) -> Iterator[Path]:
    """Yield the path of what is at `place`: itself, or of a URL a copy that goes afterwards.

    `say` is told how large the copy will be, before it is made. ValueError if the URL is of no
    store that can be read here, or names nothing; OSError if the store refuses, or if the disk has
    no room. A ValueError of what is done with the copy names the URL.
    """
    if not is_url(place):
        yield Path(place)
        return
    url = shown_url(place)
    store, path = _store(place)
    with _in_one_line(url):
        files = _files(store, path)
    size = sum(each or 0 for _, each in files.values())
    with tempfile.TemporaryDirectory(prefix="stability-store-") as folder:
        if say is not None:
            count = f"{len(files)} file{'s' if len(files) > 1 else ''}"
            say(f"{url}: {count}, {size / 2**20:.1f} MB, to be copied to {folder}")
        if size > shutil.disk_usage(folder).free:
            raise OSError(f"{url}: its {size / 2**20:.1f} MB must fit on the disk of {folder}")
        copy = Path(folder) / PurePosixPath(path).name
        copies = [copy / name for name in files]
        for each in copies:
            each.parent.mkdir(parents=True, exist_ok=True)
        with _in_one_line(url):
            store.get([each for each, _ in files.values()], [str(each) for each in copies])
        with _naming(url, copy):
            yield copy


@contextmanager
def written(place: str) -> Iterator[Path]:
    """Yield where to write the file that is to be at `place`: there, or of a URL a temporary path.

    A file is copied to its URL at the end, whole or not at all; after an error there is no object
    that was not there before, and S3 still has one that was. ValueError, before anything is
    written, if the URL is of no store that can be reached from here; OSError if the store refuses.
    """
    if not is_url(place):
        yield Path(place)
        return
    url = shown_url(place)
    store, path = _store(place)
    with _in_one_line(url):
        was_there = _is_there(store, path)
    with tempfile.TemporaryDirectory(prefix="stability-store-") as folder:
        file = Path(folder) / PurePosixPath(path).name
        with _naming(url, file):
            yield file
        with _in_one_line(url):
            try:
                store.put_file(str(file), path)
            except BaseException:
                # a store other than S3 may show the part that has arrived
                if not was_there:
                    with suppress(Exception):
                        store.rm_file(path)
                raise


def _store(url: str) -> tuple[Any, str]:
    """Return fsspec's access to the store of a URL, and the path in it."""
    import fsspec  # heavy where a store's package is: boto, asyncio

    protocol = url.partition("://")[0]
    said = shown_url(url)
    try:
        with _in_one_line(said):
            store, path = fsspec.url_to_fs(url)
    except ImportError as error:
        how = f"pip install 'training-stability[s3]' ({error})" if protocol in _S3 else str(error)
        raise ValueError(f"{said}: needs a package that is not installed: {how}") from error
    if not PurePosixPath(path).name:
        raise ValueError(f"{said}: must name a file or a folder, as {protocol}://bucket/path does")
    return store, path


def _files(store: Any, path: str) -> dict[str, tuple[str, int | None]]:
    """Return each file's object and size by its place below `path`; "" is the file at `path`."""
    found = store.info(path)
    if found["type"] == "file":
        return {"": (path, found["size"])}
    files = {}
    for name, each in store.find(path, detail=True).items():
        below = PurePosixPath(name).relative_to(path)
        # a key may be anything; as a path it must not lead out of the copy
        if ".." in below.parts:
            raise ValueError(f"an object's name leads elsewhere: {name!r}")
        if below.parts:  # else it stands for the folder itself
            files[str(below)] = name, each["size"]
    if not files:
        raise FileNotFoundError("it is a folder without files")
    return files


def _is_there(store: Any, path: str) -> bool:
    try:
        store.info(path)
    except FileNotFoundError:
        return False
    except PermissionError:  # who may write need not be allowed to look
        return True
    return True


@contextmanager
def _in_one_line(url: str) -> Iterator[None]:
    """Turn an error of a store into one that names the URL."""
    try:
        yield
    except ImportError:
        raise
    except FileNotFoundError as error:
        raise ValueError(f"{url}: must be there; {_reason(error)}") from error
    except ValueError as error:
        raise ValueError(f"{url}: {_reason(error)}") from error
    except Exception as error:  # of boto, aiohttp, Google's and Azure's packages: all their own
        raise OSError(f"{url}: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


@contextmanager
def _naming(url: str, copy: Path) -> Iterator[None]:
    """Let a ValueError name a URL where it names the copy."""
    try:
        yield
    except ValueError as error:
        raise ValueError(str(error).replace(str(copy), url)) from error
