"""One file that holds a study's records, to be checked by somebody who has nothing else of it.

It is a tar archive, compressed by gzip, of a folder with the study's name; equal files are in it
once. `bundle.json`, sealed, lists each file with its SHA-256, and `environment.txt` the versions
that the baseline trained with, for pip. Whoever opens a bundle has each file checked before it is
read. Leaves out what is packed (`study.export`) and what its records prove (`analysis`).
"""

import os
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from stability.records.atomic_files import make_folders, write_whole
from stability.records.sealed_json import file_checksum, read_record, write_sealed

__all__ = ["BUNDLE_SUFFIX", "Bundle", "is_bundle", "opened_bundle", "write_bundle"]

BUNDLE_SUFFIX = ".bundle.tar.gz"
CONTENTS = "bundle.json"


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
    return path.is_file() and path.name.endswith((".tar.gz", ".tgz"))


def write_bundle(folder: Path, to: Path, made_by: str, weights: str) -> Bundle:
    """Write the files of `folder`, a study's, into the bundle `to`, whole or not at all."""
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
                archive.add(folder / name, f"{folder.name}/{name}")

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
                archive.extractall(place, filter="data")
        except (tarfile.TarError, EOFError, OSError) as error:
            raise ValueError(f"{path}: must be a whole bundle: {error}") from error
        folders = [each for each in Path(place).iterdir() if (each / CONTENTS).is_file()]
        if len(folders) != 1 or len(os.listdir(place)) != 1:
            raise ValueError(
                f"{path}: must be a bundle, which holds one folder with a {CONTENTS}; "
                "`stability export STUDY` writes one"
            )
        (folder,) = folders
        bundle = read_record(folder / CONTENTS, Bundle, "`stability export`")
        wrong = _difference(folder, bundle)
        if wrong:
            raise ValueError(f"{path}: {wrong}")
        yield folder, bundle


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
