"""What `verify` refuses of a pair, `show` and `verdict` refuse too, and say so."""

import json
import shutil
from dataclasses import replace

import pytest

from stability.analysis.study_records import read_study
from stability.cli.main import main
from stability.config.load import load_study
from stability.records.manifest import read_manifest, write_manifest
from stability.records.paths import RunPaths
from tests.conftest import run_quietly, train_edited
from tests.sampling import one_in
from tests.stability.sealing import change_witness

ARM = "flash_fa2"


def _small(content):
    content["arms"] = {name: content["arms"][name] for name in ("baseline", ARM)}
    content |= {"seeds": [0], "early_step": 1, "yardstick": ""}
    content["base"]["train"] |= {"steps": 4, "snapshot_steps": [1]}
    content["base"]["probe"] = {"every": 0}


@pytest.fixture(scope="module")
def sample(tmp_path_factory, text_file):
    """The YAML and the folder of a trained study; tests only read them."""
    return train_edited(tmp_path_factory.mktemp("refused"), text_file, _small)


@pytest.fixture
def study(sample, tmp_path):
    """A copy of its folder, to be spoiled."""
    return shutil.copytree(sample[1], tmp_path / "runs" / "tiny")


def _run(study, arm=ARM):
    return RunPaths.for_run(study, arm, 0)


def _answer(capsys, *words):
    """Return the exit code of a command and its JSON."""
    code = main([*map(str, words), "--json"])
    return code, json.loads(capsys.readouterr().out)


def _row(ladder):
    return next(row for row in ladder["rows"] if row["arm"] == ARM)


def _other_answer(stretch):
    for answers in stretch["answers"].values():
        answers["gemm_fp32"] = "0" * 16


def _other_switch(stretch):
    for moment in ("at_start", "at_end"):
        stretch["switches"][moment]["sdpa_flash"] = False


def _other_product(stretch):
    for row in stretch["executed"]:
        row[5] = "float64" if row[0] == "linear" else row[5]


def _seal(run, **changes):
    write_manifest(run.manifest, replace(read_manifest(run.manifest), **changes))


def _flip(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def _other_batches(run):
    _seal(run, hashes={**read_manifest(run.manifest).hashes, "batches": "f" * 64})


def _changing(edit):
    return lambda run: change_witness(run, edit)


PLANTED = {
    "a known answer": (_changing(_other_answer), "known answer gemm_fp32 is "),
    "a switch": (_changing(_other_switch), "switch sdpa_flash is "),
    "a dtype": (_changing(_other_product), "what is executed in linear differs"),
    "no snapshot": (lambda run: run.snapshot(1).unlink(), "step-00000001.safetensors: is missing"),
    "no checkpoint": (lambda run: run.checkpoint(4).unlink(), "is missing"),
    "no witness": (lambda run: run.witness.unlink(), "witness.json: is missing"),
    "a damaged witness": (lambda run: _flip(run.witness), "witness.json is damaged: its SHA-256"),
    "short": (lambda run: _seal(run, step=2), "says that it finished at step 2 of 4"),
    "other batches": (_other_batches, "hashes.batches must be the baseline's '"),
}


@pytest.mark.parametrize("name", one_in(3, PLANTED))
@pytest.mark.parametrize("arm", [ARM, "baseline"])
def test_a_pair_that_does_not_hold_has_no_numbers(study, capsys, name, arm):
    plant, said = PLANTED[name]
    assert _row(_answer(capsys, "show", study)[1])["rel_l2"]["last"]["n"] == 1
    plant(_run(study, arm))
    row = _row(_answer(capsys, "show", study)[1])
    assert row["state"] == "failed"
    assert said in row["message"]
    assert [row[of][at]["n"] for of in ("rel_l2", "w1") for at in ("early", "last")] == [0] * 4
    assert row["final_loss"]["n"] == 0
    code, answer = _answer(capsys, "verdict", study)
    (judged,) = answer["arms"]
    assert (code, judged["outcome"]) == (3, "INCONCLUSIVE")
    assert said in judged["sentence"]
    code, checked = _answer(capsys, "verify", study)
    assert (code, checked["hold"]) == (1, 0)


def test_the_bytes_of_a_snapshot_are_looked_at_by_verify_alone(study, capsys):
    before = _answer(capsys, "show", study)[1]
    _flip(_run(study).snapshot(1))
    assert _answer(capsys, "show", study)[1] == before
    code, checked = _answer(capsys, "verify", study)
    assert (code, checked["pairs"][0]["state"]) == (1, "damaged")


def test_a_file_that_goes_while_a_study_is_watched_is_missed(study):
    known = read_study(study)
    assert read_study(study, known).arm(ARM).runs[0] is known.arm(ARM).runs[0]
    _run(study).witness.unlink()
    assert read_study(study, known).arm(ARM).runs[0].state == "failed"


def test_a_checkpoint_that_a_running_run_has_just_dropped_is_not_missed(study, monkeypatch):
    from stability.analysis import study_records

    run, find = _run(study), study_records.missing_file
    manifest = read_manifest(run.manifest)
    _seal(run, state="running")

    def drop(paths, listed):
        if paths == run:
            kept = {name: sum for name, sum in manifest.files.items() if "checkpoint" not in name}
            _seal(run, files=kept)
            shutil.rmtree(run.checkpoint(4).parent)
        return find(paths, listed)

    monkeypatch.setattr(study_records, "missing_file", drop)
    assert read_study(study).arm(ARM).runs[0].error == ""


def test_two_runs_of_which_one_has_no_witness_are_unproven(study, capsys):
    runs = [_run(study, arm).root for arm in ("baseline", ARM)]
    assert main(["verify", *map(str, runs)]) == 0
    capsys.readouterr()
    run = _run(study)
    files = read_manifest(run.manifest).files
    _seal(run, files={name: sum for name, sum in files.items() if name != "witness.json"})
    assert main(["verify", *map(str, runs)]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert f"unproven: what {ARM}, seed 0 executed, which has no witness" in said
    code, (proof,) = _answer(capsys, "verify", *runs)
    assert (code, proof["is_pair"], proof["state"]) == (1, True, "unproven")
    assert main(["verify", str(study)]) == 1
    capsys.readouterr()
    assert main(["show", str(study)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"Unproven: not all is on record of what {ARM} executed: what {ARM}, seed 0" in said


def test_a_run_whose_known_answers_are_not_its_baselines_is_refused(sample, study):
    shutil.rmtree(_run(study).root)
    change_witness(_run(study, "baseline"), _other_answer)
    observer = run_quietly(load_study(sample[0]), study.parent)
    manifest = read_manifest(_run(study).manifest)
    assert manifest.state == "failed"
    assert manifest.step == 0
    said = f"witness: arm {ARM} computes other bits than its baseline: known answer gemm_fp32 is "
    assert manifest.message.startswith(said)
    assert (ARM, 0, "failed") in [(arm, seed, state) for arm, seed, state, *_ in observer.ended]
