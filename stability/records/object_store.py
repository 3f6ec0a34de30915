"""Files in an object store, by URL: copied to the disk to be read, and up once they are whole.

A URL is one that fsspec knows, such as `s3://bucket/runs/study.bundle.tar.gz`; most need a package
of their own, which finds credentials in its own way. What is read lies in a temporary folder, under
its own name, as long as it is needed; what is written is complete on the disk before an object has
its name, and S3 shows an object once all of it has arrived, as other stores need not. No message
has the user, the password or the query of a URL. Leaves out what the files hold.
"""

import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any

__all__ = ["at_hand", "is_url", "shown_url", "written"]

_URL = re.compile(r"[a-z][a-z0-9+.-]+://", re.IGNORECASE)
# user and password, and what is asked, which may be a signature
_HIDDEN = re.compile(r"(?<=://)[^/]*@|\?.*", re.DOTALL)
_HIDDEN_IN_TEXT = re.compile(r"(?<=://)[^/\s]*@|(?P<url>://[^\s?]*)\?\S*")
_S3 = ("s3", "s3a")


def is_url(text: str) -> bool:
    """Whether `text` is a URL, and no path of this disk."""
    return _URL.match(text) is not None


def shown_url(url: str) -> str:
    """Return a URL without user, password and query, as it may go on record."""
    return _HIDDEN.sub("", url)


@contextmanager
def at_hand(place: str, say: Callable[[str], object] | None = None) -> Iterator[Path]:
    """Yield the path of what is at `place`: itself, or of a URL a copy that goes afterwards.

    `say` is told how large the copy will be, before it is made. ValueError if the URL is of no
    store that can be read here, or names nothing; OSError if the store refuses, if the disk has no
    room, or if a file has not arrived as the store lists it. A ValueError of what is done with the
    copy names the URL.
    """
    if not is_url(place):
        yield Path(place)
        return
    url = shown_url(place)
    store, path, name = _store(place)
    with _in_one_line(place):
        files = _files(store, path)
    size = sum(each or 0 for _, each in files.values())
    with tempfile.TemporaryDirectory(prefix="stability-store-") as folder:
        if say is not None:
            count = f"{len(files)} file{'s' if len(files) > 1 else ''}"
            say(f"{url}: {count}, {size / 2**20:.1f} MB, to be copied to {folder}")
        if size > shutil.disk_usage(folder).free:
            raise OSError(f"{url}: its {size / 2**20:.1f} MB must fit on the disk of {folder}")
        copy = Path(folder) / name
        copies = [copy / below for below in files]
        for each in copies:
            each.parent.mkdir(parents=True, exist_ok=True)
        with _in_one_line(place):
            store.get([each for each, _ in files.values()], [str(each) for each in copies])
            _check_arrived(copy, {below: listed for below, (_, listed) in files.items()})
        with _naming(url, copy):
            yield copy


@contextmanager
def written(place: str) -> Iterator[Path]:
    """Yield where to write the file that is to be at `place`: there, or of a URL a temporary path.

    A file is copied to its URL at the end. S3 never shows a part of it; another store may, after an
    error, unless the object is known to be new and may be removed, as who may only write can't
    tell. ValueError, before anything is written, if the URL is of no store that can be reached from
    here; OSError if the store refuses.
    """
    if not is_url(place):
        yield Path(place)
        return
    url = shown_url(place)
    store, path, name = _store(place)
    if "?" in path:  # the object would be called otherwise than it is said to be
        raise ValueError(f"{url}: must have no ? to be written")
    with _in_one_line(place):
        was_there = _is_there(store, path)
    with tempfile.TemporaryDirectory(prefix="stability-store-") as folder:
        file = Path(folder) / name
        with _naming(url, file):
            yield file
        with _in_one_line(place):
            try:
                store.put_file(str(file), path)
            except BaseException:
                # a store other than S3 may show the part that has arrived
                if not was_there:
                    with suppress(Exception):
                        store.rm_file(path)
                raise


def _store(place: str) -> tuple[Any, str, str]:
    """Return fsspec's access to the store of a URL, the path in it, and the name of its copy."""
    import fsspec  # heavy where a store's package is: boto, asyncio

    given, _, rest = place.partition("://")
    protocol = given.lower()  # fsspec knows them by small letters alone
    url = shown_url(place)
    try:
        with _in_one_line(place):
            store, path = fsspec.url_to_fs(f"{protocol}://{rest}")
    except ImportError as error:
        reason = _reason(error, place)
        how = f"pip install 'training-stability[s3]' ({reason})" if protocol in _S3 else reason
        raise ValueError(f"{url}: needs a package that is not installed: {how}") from error
    name = shown_url(path).rstrip("/").rpartition("/")[2]
    if name in ("", ".", ".."):  # the last would be the folder that the temporary one is in
        raise ValueError(f"{url}: must name a file or a folder, as {protocol}://bucket/path does")
    return store, path, name


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
        # one that ends in a slash marks a folder, and may mark this one
        if not below.parts or (name.endswith("/") and not each["size"]):
            continue
        if str(below) in files:
            raise ValueError(f"two objects would be one file, {below}")
        files[str(below)] = name, each["size"]
    if not files:
        raise FileNotFoundError("it is a folder without files")
    return files


def _check_arrived(copy: Path, sizes: Mapping[str, int | None]) -> None:
    """OSError for a file below `copy` that is not there, or not of the size that the store lists.

    The store may have an object with the name of a folder, which no disk can have beside it.
    """
    for below, listed in sizes.items():
        file = copy / below
        size = file.stat().st_size if file.is_file() else None
        if size is not None and listed in (None, size):
            continue
        wanted = "" if listed is None else f" of {listed} byte{'s' if listed != 1 else ''}"
        got = size if size is not None else "a folder" if file.is_dir() else "nothing"
        raise OSError(f"{below or 'it'} must arrive as a file{wanted}, got {got}")


def _is_there(store: Any, path: str) -> bool:
    try:
        store.info(path)
    except FileNotFoundError:
        return False
    except PermissionError:  # who may write need not be allowed to look
        return True
    return True


@contextmanager
def _in_one_line(place: str) -> Iterator[None]:
    """Turn an error of a store into one that names the URL."""
    url = shown_url(place)
    try:
        yield
    except ImportError:
        raise
    except FileNotFoundError as error:
        raise ValueError(f"{url}: must be there; {_reason(error, place)}") from error
    except ValueError as error:
        raise ValueError(f"{url}: {_reason(error, place)}") from error
    except Exception as error:  # of boto, aiohttp, Google's and Azure's packages: all their own
        raise OSError(f"{url}: {_reason(error, place)}") from error


def _reason(error: BaseException, place: str) -> str:
    """Return what an error says, in one line, without what is hidden of the URL."""
    said = str(error)
    for hidden in _HIDDEN.findall(place):
        said = said.replace(hidden, "")
        bare = hidden.strip("@?")
        if ":" in bare or "=" in bare:  # else it may be any word
            said = said.replace(bare, "...")
    # a store may write the URL in another way: quoted, sorted
    said = _HIDDEN_IN_TEXT.sub(lambda found: found["url"] or "", said)
    return " ".join(said.split()) or type(error).__name__


@contextmanager
def _naming(url: str, copy: Path) -> Iterator[None]:
    """Let a ValueError name a URL where it names the copy."""
    try:
        yield
    except ValueError as error:
        raise ValueError(str(error).replace(str(copy), url)) from error
