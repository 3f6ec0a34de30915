"""`stability export STUDY`: a study as one file that others can check."""

import json as json_text
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from stability import __version__
from stability.cli.output import print_line

if TYPE_CHECKING:
    from stability.analysis.study_proof import StudyProof
    from stability.records.bundle import Bundle

__all__ = ["export"]


def export(study: Path, to: str | None = None, weights: bool = False) -> int:
    """Pack a study's records, report, proofs and versions into one file, for `stability verify`.

    Of the weights those at step 0 go with it, and of the others hashes and sketches, which check
    each drift, with the vectors: biases and the gains of norms. Exit code 1 if a pair of the study
    does not hold; the file is written all the same.

    Args:
        study: the folder of a study, e.g. runs/quickstart
        to: the file; by default STUDY.bundle.tar.gz beside the folder. A URL such as
            s3://bucket/path.tar.gz is one in an object store, and whatever else fsspec knows;
            S3 needs the extra `s3`
        weights: all snapshots that the study has kept go with it
    """
    from stability.cli.verdict import code_of
    from stability.records.bundle import BUNDLE_SUFFIX, check_suffix
    from stability.records.object_store import is_url, shown_url, written
    from stability.records.paths import check_exists

    given = study.resolve() if study.name in ("", "..") else study
    check_exists(given)
    place = to or str(given.with_name(f"{given.name}{BUNDLE_SUFFIX}"))
    with written(place) as bundle:
        check_suffix(bundle)  # packing takes long
        packed, proof = _pack(given, bundle, weights=weights)
        size = bundle.stat().st_size / 2**20
    at, name = (shown_url(place),) * 2 if is_url(place) else (str(bundle), bundle.name)
    print_line(f"{at}: {len(packed.files)} files, {size:.1f} MB; {proof.sentence}")
    print_line(f"elsewhere: stability verify {name}")
    return code_of(proof)


def _pack(study: Path, bundle: Path, *, weights: bool) -> "tuple[Bundle, StudyProof]":
    """Write the bundle of a study; return what is in it, and what was proven of it."""
    from stability.analysis.study_proof import prove_study  # heavy: numpy
    from stability.analysis.study_records import read_study
    from stability.records.atomic_files import write_text
    from stability.records.bundle import write_bundle
    from stability.records.sealed_json import jsonable
    from stability.report.markdown import summary_text
    from stability.report.page.html import write_page
    from stability.study.export import copy_records

    # on the study's disk files are linked, not copied; a share may be there to be read alone
    near = study.parent if os.access(study.parent, os.W_OK) else bundle.parent
    with tempfile.TemporaryDirectory(prefix=".export-", dir=near) as place:
        copy = Path(place) / study.name
        copy_records(study, copy, weights=weights)
        recorded = read_study(copy)
        write_page(recorded, copy)
        proof = prove_study(recorded, every_drift=True)
        content = json_text.dumps(jsonable(proof.to_dict()), indent=2)
        write_text(copy / "proofs.json", content + "\n")
        write_text(copy / "summary.md", summary_text(recorded))
        return write_bundle(copy, bundle, __version__, "all" if weights else "none"), proof
