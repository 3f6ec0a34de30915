"""Records that a test has changed, under a right seal: lines of a metric log, and witnesses."""

import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from stability.records.identity import hash_environment
from stability.records.manifest import read_manifest, write_manifest
from stability.records.paths import RunPaths
from stability.records.run_files import RunFiles
from stability.records.witness import Witness, read_witness, write_witness


def seal(line: dict | str) -> str:
    """Return a line of the log that says `line`, a JSON object; an old checksum is replaced.

    Written without the code under test.
    """
    if isinstance(line, dict):
        line = json.dumps({key: value for key, value in line.items() if key != "crc"})
    said = line.removesuffix("}")
    return f'{said}, "crc": "{zlib.crc32(said.encode()):08x}"}}\n'


def change_witness(run: RunPaths, edit: Callable[[Any], object]) -> None:
    """Change the stretches of a run's witness, and seal it anew as its manifest lists it."""
    stretches = json.loads(json.dumps(read_witness(run.witness).stretches))
    for stretch in stretches:
        edit(stretch)
    write_witness(run.witness, Witness(stretches=stretches))
    RunFiles(run, read_manifest(run.manifest)).add(run.witness)


def change_environment(run: RunPaths, environment: Mapping[str, Any]) -> None:
    """Put another environment into a run's manifest, with the hash that it has."""
    manifest = read_manifest(run.manifest)
    hashes = {**manifest.hashes, "environment": hash_environment(environment)}
    write_manifest(run.manifest, replace(manifest, environment=dict(environment), hashes=hashes))
