"""One file that holds a study's records, to be checked by somebody who has nothing else of it.

It is a tar archive, compressed by gzip, of a folder with the study's name; equal files are in it
once. `bundle.json`, sealed, lists each file with its SHA-256, and `environment.txt` the versions
that the baseline trained with, for pip. Whoever opens a bundle has each file checked before it is
read. Leaves out what is packed (`study.export`) and what its records prove (`analysis`).
"""

import errno
import os
import shutil
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from stability.records.atomic_files import make_folders, write_whole
from stability.records.sealed_json import file_checksum, read_record, write_sealed

__all__ = [
    "BUNDLE_SUFFIX",
    "SUFFIXES",
    "Bundle",
    "check_suffix",
    "is_bundle",
    "opened_bundle",
    "write_bundle",
]

BUNDLE_SUFFIX = ".bundle.tar.gz"
SUFFIXES = (".tar.gz", ".tgz")
"""What the name of a bundle ends in."""
CONTENTS = "bundle.json"

_OF_THIS_MACHINE = (errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What a whole bundle may meet while it is unpacked."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bundle:
    """What `bundle.json` holds."""

    study: str
    made_by: str
    """The version of this package."""
    files: dict[str, str]
    """The SHA-256 of each file by its name in the study's folder."""
    weights: str
    """`all` that was kept, or `none`: snapshots after step 0 were left out, their sketches not."""


def is_bundle(path: Path) -> bool:
    """Whether a path is a file that may be a bundle."""
    return path.is_file() and path.name.endswith(SUFFIXES)


def check_suffix(to: Path) -> None:
    """ValueError if a file that is to be a bundle is called otherwise than `is_bundle` knows."""
    if not to.name.endswith(SUFFIXES):
        raise ValueError(f"{to}: must end in {' or '.join(SUFFIXES)}")


def write_bundle(folder: Path, to: Path, made_by: str, weights: str) -> Bundle:
    """Write the files of `folder`, a study's, into the bundle `to`, whole or not at all.

    ValueError if its name does not pass `check_suffix`.
    """
    check_suffix(to)
    files = {
        str(path.relative_to(folder).as_posix()): file_checksum(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path != folder / CONTENTS
    }
    bundle = Bundle(study=folder.name, made_by=made_by, files=files, weights=weights)
    content = {name: getattr(bundle, name) for name in bundle.__slots__}
    write_sealed(folder / CONTENTS, content)

    def pack(temporary: Path) -> None:
        # most of it are sketches and weights, in which there is little to find
        with tarfile.open(temporary, "w:gz", compresslevel=3) as archive:
            for name in (CONTENTS, *files):
                archive.add(folder / name, f"{folder.name}/{name}", filter=_of_nobody)

    make_folders(to.parent)
    write_whole(to, pack)
    return bundle


@contextmanager
def opened_bundle(path: Path) -> Iterator[tuple[Path, Bundle]]:
    """Unpack a bundle into a temporary folder; yield the study's folder and what is listed.

    ValueError, which names the file, for an archive that is damaged, that would write elsewhere, or
    that does not hold the files it lists, as they were.
    """
    with tempfile.TemporaryDirectory(prefix="stability-bundle-") as place:
        try:
            with tarfile.open(path, "r:gz") as archive:
                _unpack(archive, Path(place))
        except (tarfile.TarError, zlib.error, EOFError, OSError) as error:
            if isinstance(error, OSError) and error.errno in _OF_THIS_MACHINE:
                raise
            raise ValueError(
                f"{path}: must be a whole bundle: {error}; copy it again, or write it anew by "
                "`stability export STUDY`"
            ) from error
        folders = [each for each in Path(place).iterdir() if (each / CONTENTS).is_file()]
        if len(folders) != 1 or len(os.listdir(place)) != 1:
            raise ValueError(
                f"{path}: must be a bundle, which holds one folder with a {CONTENTS}; "
                "`stability export STUDY` writes one"
            )
        (folder,) = folders
        try:
            bundle = read_record(folder / CONTENTS, Bundle, "`stability export`")
        except ValueError as error:
            said = str(error).replace(f"{place}{os.sep}", "")
            raise ValueError(f"{path}: {said}") from error
        wrong = _difference(folder, bundle)
        if wrong:
            raise ValueError(f"{path}: {wrong}")
        yield folder, bundle


def _of_nobody(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Return a member without what it says of the machine and its users."""
    member.uid = member.gid = member.mtime = 0
    member.uname = member.gname = ""
    return member


def _unpack(archive: tarfile.TarFile, place: Path) -> None:
    """Write an archive's files below `place`, and nothing elsewhere; OSError for what is no bundle.

    There may be files, and second names of files that came before, in folders; no link of another
    kind, so that no path leads out, and no more bytes than the disk has room for.
    """
    left = shutil.disk_usage(place).free
    for member in archive:
        parts = PurePosixPath(member.name).parts
        if not parts or ".." in parts or parts[0] == "/" or "\\" in member.name:
            raise OSError(f"a member's name leads elsewhere: {member.name!r}")
        path = place.joinpath(*parts)
        if member.isdir():
            path.mkdir(parents=True, exist_ok=True)
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        if member.islnk():
            first = place.joinpath(*PurePosixPath(member.linkname).parts)
            if ".." in first.parts or not first.is_relative_to(place) or not first.is_file():
                raise OSError(f"{member.name!r} is a link to what is not in it")
            path.hardlink_to(first)
            continue
        content = archive.extractfile(member) if member.isreg() else None
        if content is None:
            raise OSError(f"{member.name!r} is neither a file nor a folder")
        left -= member.size
        if left < 0:
            said = "there is no room for a bundle's files: free some, or set TMPDIR"
            raise OSError(errno.ENOSPC, said, str(place.parent))
        with path.open("xb") as file:
            shutil.copyfileobj(content, file)


def _difference(folder: Path, bundle: Bundle) -> str:
    """Return what of the files is not as it is listed; empty if nothing is."""
    there = {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_symlink() or not path.is_dir()
    } - {CONTENTS}
    if bundle.study != folder.name:
        return f"is listed as the study {bundle.study}, its folder is {folder.name}"
    for name in sorted(bundle.files.keys() - there):
        return f"{name} is listed, and is not there"
    for name in sorted(there - bundle.files.keys()):
        return f"{name} is there, and is not listed"
    for name, checksum in bundle.files.items():
        if file_checksum(folder / name) != checksum:
            return f"{name} has other bytes than are listed"
    return ""
