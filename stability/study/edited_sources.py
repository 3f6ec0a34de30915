"""Refuses to keep a recorded run whose script was edited since: its answer is of what is no more.

Looked at are the files that its command names and the modules that its process imported, as far as
they lie in the folder that the command runs in, or beside a file that it names. Leaves out what two
runs must have alike (`analysis.launch_contract`), and a run that has not ended.
"""

from collections.abc import Iterator
from pathlib import Path

from stability.recorder.inside.launched import NamedFiles
from stability.records.identity import recorded_modules
from stability.records.manifest import Manifest, read_manifest
from stability.records.module_sources import edited_modules
from stability.study.foreign_plan import ForeignRun

__all__ = ["refuse_edited"]


def refuse_edited(run: ForeignRun, folder: Path | None = None) -> None:
    """ValueError if a source of `run`, which has ended, is another one now, in `folder` or here."""
    place = folder or Path.cwd()
    manifest = read_manifest(run.paths.manifest)
    edited = [*_edited_files(manifest, place), *_edited_modules(manifest, place)]
    if edited:
        raise ValueError(
            f"{run.paths.root}: has ended, and {edited[0]} was edited since; use --out for another "
            "folder, or another name of the study, to run it as it is; put the file back to keep "
            "what there is"
        )


def _named(manifest: Manifest) -> dict[str, str]:
    """Return the hashes of the files that the command names, but those that it wrote itself."""
    files = manifest.resolved.get("launched", {}).get("files", {})
    return {
        name: known["sha256"]
        for name, known in files.items()
        # in braces is what a run fills in
        if known.get("sha256") and not known.get("written") and "{" not in name
    }


def _edited_files(manifest: Manifest, place: Path) -> Iterator[str]:
    was = _named(manifest)
    for name, now in NamedFiles(was, str(place)).hashes().items():
        if now.get("sha256") and name in was and now["sha256"] != was[name]:
            yield name


def _edited_modules(manifest: Manifest, place: Path) -> list[str]:
    folders = {place, *((place / name).parent for name in _named(manifest))}
    return edited_modules(recorded_modules(manifest.environment), folders)
