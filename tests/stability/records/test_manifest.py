"""A manifest comes back as it was written, or says in one line what is wrong with the file."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from stability.records.manifest import Manifest, read_manifest, write_manifest
from stability.records.sealed_json import write_sealed

ROOT = Path(__file__).parents[3]
MANIFEST = Manifest(
    study="quickstart",
    arm="nudge",
    seed=1,
    axis="nudge",
    config={"model": {"depth": 2}, "optimizer": {"betas": [0.9, 0.95], "lr": 1e-3}},
    diff={"nudge.ulps": [0, 1]},
    environment={"torch": "2.13.0"},
    resolved={"engine": "twin", "numerics": {"scores": "fp32"}},
    hashes={"init_weights": "ab", "text": "cd"},
    state="failed",
    step=17,
    message="\u03c3 of \udcff: broke",
)


def test_a_manifest_comes_back_as_written(tmp_path):
    path = tmp_path / "run" / "manifest.json"
    write_manifest(path, MANIFEST)
    assert read_manifest(path) == MANIFEST
    write_manifest(path, replace(MANIFEST, state="finished", message=""))
    assert read_manifest(path).state == "finished"


def _without(key):
    return {k: v for k, v in asdict(MANIFEST).items() if k != key}


def _with(**changes):
    return {**asdict(MANIFEST), **changes}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "must be JSON, is torn or damaged"),
        (json.dumps(_with())[:-40], "must be JSON, is torn or damaged"),
        ("[1]", "must be a JSON object, is list"),
        (_without("hashes"), "missing key hashes; it is no whole manifest"),
        (_with(hash={}), "unknown key 'hash'; nearest: hashes"),
        (_with(state="done"), r"state must be one of \('running', .*, is 'done'"),
        (_with(step="17"), "step must be of type int, is '17'"),
        (_with(diff=None), "diff must be of type dict, is None"),
    ],
    ids=["empty", "torn", "list", "missing", "unknown", "state", "text-for-int", "null"],
)
def test_a_damaged_manifest_is_refused_in_one_line_that_names_it(tmp_path, content, message):
    path = tmp_path / "manifest.json"
    if isinstance(content, str):
        path.write_text(content)
    else:
        write_sealed(path, content)
    with pytest.raises(ValueError, match=message) as caught:
        read_manifest(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


def test_a_missing_manifest_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"none.json: there is no such file; `stability run` w"):
        read_manifest(tmp_path / "none.json")
