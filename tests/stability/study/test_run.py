"""A run that has begun goes on with the attention that it was begun with, or is refused by name."""

import hashlib
import importlib
import py_compile
import shutil
import sys
from dataclasses import replace

import pytest
import torch

from stability.config.load import load_study
from stability.records.identity import environment
from stability.records.manifest import read_manifest, write_manifest
from stability.records.paths import RunPaths
from stability.study.run import RunConflictError, check_existing
from stability.study.run_study import plan_study
from tests.conftest import train_edited
from tests.stability.study.recorded_bits import recorded_bits

ATTENTION = """
from torch.nn.functional import scaled_dot_product_attention

def attend(q, k, v, *, causal, scale=None):
    return scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)
"""


def _own_attention(content):
    content["arms"] = {"own": {"attention": {"implementation": "my_attention:attend"}}}
    content["seeds"], content["yardstick"] = [0], ""
    content["base"]["probe"] = {"every": 0}


@pytest.fixture(scope="module")
def ended(tmp_path_factory, text_file):
    """The folder of a study with a user's attention, trained once; tests copy it."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "my_attention.py").write_text(ATTENTION)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        train_edited(folder, text_file, _own_attention)
    del sys.modules["my_attention"]
    return folder


@pytest.fixture
def source(ended, tmp_path, monkeypatch):
    """The file of the user's attention, which a test may edit and import anew."""
    shutil.copytree(ended, tmp_path, dirs_exist_ok=True, ignore=lambda *_: ["__pycache__"])
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield tmp_path / "my_attention.py"
    sys.modules.pop("my_attention", None)


@pytest.fixture
def stopped(source, ended):
    """The study, its output folder and its run `own`, which stopped after its last checkpoint."""
    study, out = load_study(ended / "tiny.yaml"), source.parent / "runs"
    run = RunPaths.for_run(out / "tiny", "own", 0)
    manifest = read_manifest(run.manifest)
    files = {name: sum for name, sum in manifest.files.items() if name != "metrics.jsonl"}
    write_manifest(run.manifest, replace(manifest, state="interrupted", step=5, files=files))
    return study, out, run


def _edit(source):
    source.write_text(ATTENTION.replace("scale=scale", "scale=scale, dropout_p=0.0"))
    sys.modules.pop("my_attention", None)


@pytest.mark.slow
def test_a_run_whose_attention_was_edited_is_not_resumed(source, stopped, run_tiny):
    study, out, run = stopped
    before = recorded_bits(out / "tiny")
    _edit(source)
    with pytest.raises(
        RunConflictError,
        match=r"own/seed-0: was stopped at step 5, trained by my_attention:attend as its source was"
        r" then \(SHA-256 [0-9a-f]{12}, now [0-9a-f]{12}\); put that source back to go on, use "
        r"--out for another folder, or move .*own/seed-0 away to train it anew",
    ):
        run_tiny(study, out)
    assert recorded_bits(out / "tiny") == before
    assert read_manifest(run.manifest).state == "interrupted"

    source.write_text(ATTENTION)
    sys.modules.pop("my_attention", None)
    assert run_tiny(study, out).ended[-1][2:] == ("finished", "")


def test_a_run_that_ended_is_no_answer_once_its_attention_was_edited(source, stopped, run_tiny):
    """It would be kept, and its PASS be taken for that of the kernel as it is now."""
    study, out, run = stopped
    run_tiny(study, out)
    _edit(source)
    said = (
        r"own/seed-0: has ended, trained by my_attention:attend as its source was then \(SHA-256 "
        r"[0-9a-f]{12}, now [0-9a-f]{12}\); use --out for another folder, or another name"
    )
    for trains_here in (True, False):
        planned = next(each for each in plan_study(study, out) if each.arm.name == "own")
        with pytest.raises(RunConflictError, match=said):
            check_existing(planned, trains_here=trains_here)
    with pytest.raises(RunConflictError, match=said):
        run_tiny(study, out)
    source.write_text(ATTENTION)
    sys.modules.pop("my_attention", None)
    assert run_tiny(study, out).ended[-1][2:] == ("finished", "kept")
    # where other machines train, this one may lack it
    source.unlink()
    sys.modules.pop("my_attention", None)
    assert check_existing(planned, trains_here=False) == []
    assert read_manifest(run.manifest).state == "finished"


@pytest.mark.parametrize("trains_here", [True, False])
def test_nor_once_a_module_that_it_imports_was_edited(
    source, stopped, run_tiny, monkeypatch, trains_here
):
    study, out, run = stopped
    run_tiny(study, out)
    monkeypatch.chdir(source.parent)
    helper = source.with_name("my_helper.py")
    helper.write_text("BLOCK = 64\n")
    manifest = read_manifest(run.manifest)
    listed = {"module.my_helper": hashlib.sha256(helper.read_bytes()).hexdigest()}
    write_manifest(run.manifest, replace(manifest, environment={**manifest.environment, **listed}))
    planned = next(each for each in plan_study(study, out) if each.arm.name == "own")
    assert check_existing(planned, trains_here=trains_here) == []
    helper.write_text("BLOCK = 32\n")
    with pytest.raises(
        RunConflictError, match=r"has ended, and my_helper\.py was edited since; use"
    ):
        check_existing(planned, trains_here=trains_here)
    helper.unlink()
    assert check_existing(planned, trains_here=trains_here) == [], "it may lie elsewhere"


def test_an_attention_may_be_mended_before_the_first_checkpoint(source, stopped, run_tiny):
    study, out, run = stopped
    for path in run.checkpoints_dir.iterdir():
        path.unlink()
    _edit(source)
    assert run_tiny(study, out).ended[-1][2:] == ("finished", "")


def test_a_run_whose_attention_became_another_is_not_resumed(stopped, run_tiny):
    study, out, run = stopped
    manifest = read_manifest(run.manifest)
    other = {**manifest.resolved, "engine": "their_attention"}
    write_manifest(run.manifest, replace(manifest, resolved=other))
    said = r"holds a run with attention.engine = 'their_attention', asked for 'my_attention'; "
    with pytest.raises(RunConflictError, match=said):
        run_tiny(study, out)


@pytest.mark.parametrize(
    ("key", "library"), [("kernel_source", "attention_kernels"), ("package_source", "stability")]
)
def test_a_run_is_not_resumed_with_an_edited_library(stopped, run_tiny, monkeypatch, key, library):
    study, out, _ = stopped
    edited = {**environment(), key: "0123456789abcdef"}
    monkeypatch.setattr("stability.study.run.environment", lambda: edited)
    said = (
        rf"own/seed-0: was stopped at step 5, trained by {library} as its source was then "
        r"\(SHA-256 [0-9a-f]{12}, now 0123456789ab\); put that source back to go on, use "
    )
    with pytest.raises(RunConflictError, match=said):
        run_tiny(study, out)


def test_a_run_is_not_resumed_under_another_variable_of_the_math_library(
    stopped, run_tiny, monkeypatch
):
    study, out, _ = stopped
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    said = r"environment\.variable\.MKL_CBWR = None, asked for 'COMPATIBLE'"
    with pytest.raises(RunConflictError, match=said):
        run_tiny(study, out)


def test_a_run_whose_attention_comes_from_a_stale_pyc_is_refused(source, run_tiny):
    other = ATTENTION.replace("scale=scale", "scale=0.3")
    source.write_text(other)
    unchecked = py_compile.PycInvalidationMode.UNCHECKED_HASH
    py_compile.compile(str(source), invalidation_mode=unchecked)
    source.write_text(ATTENTION)
    ended = run_tiny(load_study(source.parent / "tiny.yaml"), source.parent / "anew").ended
    # in this test both arms train in one process, so the first one imports it too
    assert {state for _, _, state, _ in ended} <= {"failed", "skipped"}
    assert f"{source}: its .pyc is not that of its source" in ended[0][3]


@pytest.mark.parametrize("is_new", [True, False])
def test_a_run_is_not_resumed_with_a_module_more_or_less(
    stopped, run_tiny, tmp_path, monkeypatch, is_new
):
    study, out, run = stopped
    if is_new:
        (tmp_path / "start_hook.py").write_text("")
        monkeypatch.syspath_prepend(tmp_path)
        importlib.import_module("start_hook")
    else:
        manifest = read_manifest(run.manifest)
        more = {**manifest.environment, "module.start_hook": "abc"}
        write_manifest(run.manifest, replace(manifest, environment=more))
    try:
        ended = run_tiny(study, out).ended
    finally:
        sys.modules.pop("start_hook", None)
    assert ended[-1][2] == "failed"
    assert "environment.module.start_hook = " in ended[-1][3]


def test_a_run_is_not_resumed_with_another_switch(stopped, run_tiny, monkeypatch):
    study, out, _ = stopped
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    try:
        ended = run_tiny(study, out).ended
    finally:
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = True
    assert ended[-1][2] == "failed"
    assert "environment.switch.cuda_fp16_reduction = True, asked for False" in ended[-1][3]
