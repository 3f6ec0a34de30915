"""What a study has recorded, to be compared bit by bit."""

from dataclasses import replace
from pathlib import Path

from stability.records.identity import is_compared, may_be_missing
from stability.records.manifest import read_manifest
from stability.records.witness import read_witness


def recorded_bits(study: Path) -> dict[str, bytes]:
    """Everything that training recorded: metrics, snapshots, and the manifests."""
    files = [*study.rglob("metrics.jsonl"), *study.rglob("*.safetensors")]
    bits = {str(path.relative_to(study)): path.read_bytes() for path in files}
    for path in study.rglob("manifest.json"):
        manifest = read_manifest(path)
        # a checkpoint holds the path of its own folder, a witness the stretches between resumes
        files = {
            name: sum if name != "witness.json" else "listed"
            for name, sum in manifest.files.items()
            if not name.startswith("checkpoints/")
        }
        # pytest's own process has other modules imported than one that only trains
        known = {
            name: value
            for name, value in manifest.environment.items()
            if is_compared(name) and not may_be_missing(name)
        }
        trained = replace(manifest, files=files, environment=known)
        bits[str(path.relative_to(study))] = repr(trained).encode()
    for path in study.rglob("witness.json"):
        witness = read_witness(path)
        bits[str(path.relative_to(study))] = repr((witness.rows, witness.answers)).encode()
    return bits
