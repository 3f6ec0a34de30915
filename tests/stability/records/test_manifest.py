"""A manifest comes back as it was written, or says in one line what is wrong with the file."""

import hashlib
import json
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

import attention_kernels
from stability.records.manifest import Manifest, environment, read_manifest, write_manifest
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


def test_the_environment_is_json_and_says_what_decides_the_bits():
    found = environment()
    assert json.loads(json.dumps(found)) == found == environment()
    assert found["torch"] == torch.__version__
    assert found["threads"] == torch.get_num_threads()
    assert found["cpu"]
    assert found["simd"] == torch.backends.cpu.get_cpu_capability()
    assert set(found) >= {"python", "triton", "lightning", "platform", "gpu", "kernel_source"}


def test_a_changed_kernel_changes_the_environment(tmp_path, monkeypatch):
    before = environment()["kernel_source"]
    folder = tmp_path / "attention_kernels"
    shutil.copytree(Path(attention_kernels.__file__).parent, folder)
    monkeypatch.setattr(attention_kernels, "__file__", str(folder / "__init__.py"))
    assert environment()["kernel_source"] == before
    for name in ("golden.py", "twin/forward.py"):
        was = environment()["kernel_source"]
        (folder / name).write_text((folder / name).read_text() + "# changed\n")
        assert environment()["kernel_source"] != was
    assert len(before) == len(hashlib.sha256().hexdigest())


def test_versions_are_read_without_importing_what_they_belong_to():
    code = (
        "import sys\n"
        "from stability.records.manifest import environment\n"
        "assert environment()['lightning']\n"
        "print(sorted({'lightning', 'wandb', 'datasets'} & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"},
        timeout=120,
    )
    assert done.stdout.strip() == "[]", done.stderr
