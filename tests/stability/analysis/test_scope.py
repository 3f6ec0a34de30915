"""What a verdict is of is read from the baseline's run: its size, its length and its device."""

from dataclasses import replace

import torch

from stability.analysis.scope import scope_of
from stability.analysis.study_records import read_study
from stability.cli.main import main
from stability.records.paths import RunPaths
from stability.records.snapshots import count_values, write_snapshot
from stability.report.view.evidence import scope_line
from tests.stability.report.synthetic import STEPS, write_study_json, write_synthetic


def test_it_names_weights_updates_and_device(tmp_path):
    write_synthetic(tmp_path)
    baseline = RunPaths.for_run(tmp_path, "baseline", 0)
    assert f", {STEPS:,} updates" in scope_of(read_study(tmp_path))
    assert "trained values" not in scope_of(read_study(tmp_path))
    write_snapshot(baseline.snapshot(0), {"w": torch.zeros(30, 40), "b": torch.zeros(25)})
    said = scope_of(read_study(tmp_path))
    assert said.startswith(f"1,225 trained values, sequences of 128 tokens, {STEPS:,} updates")
    assert scope_line(read_study(tmp_path)).startswith(f"Tried: {said}; nothing else.")


def test_of_a_gpu_its_own_name_is_told(tmp_path, monkeypatch):
    write_synthetic(tmp_path)
    study = read_study(tmp_path)
    run = study.arm("baseline").runs[study.seeds[0]]
    run.manifest.environment.update(gpu="NVIDIA H200", cpu="Xeon")
    assert scope_of(study).endswith(" updates, NVIDIA H200")
    on_cpu = {**study.base, "train": {**study.base["train"], "accelerator": "cpu"}}
    assert scope_of(replace(study, base=on_cpu)).endswith(" updates, Xeon"), "it lay idle"
    command = {**study.base, "program": "python a.py"}
    assert scope_of(replace(study, base=command)).endswith(" updates"), "nobody knows"
    run.manifest.environment.update(gpu="")
    assert scope_of(study).endswith(" updates, Xeon")


def test_the_length_of_the_sequences_is_told_of_our_own_models(tmp_path):
    write_synthetic(tmp_path)
    study = read_study(tmp_path)
    ours = {**study.base, "model": {"context": 1024}}
    assert f"sequences of 1,024 tokens, {STEPS:,} updates" in scope_of(replace(study, base=ours))
    command = {**ours, "program": "python a.py"}
    assert "tokens" not in scope_of(replace(study, base=command)), "a script has its own"


def test_of_a_script_the_keys_of_the_replaced_attention_are_told(tmp_path):
    write_synthetic(tmp_path)
    study = read_study(tmp_path)
    command = replace(study, base={**study.base, "program": "python a.py"})
    runs = [run for arm in study.candidates for run in arm.runs.values()]
    assert len(runs) > 1
    for run in runs:
        run.manifest.resolved["keys"] = [1024, 1024]
    assert f"attention over 1,024 keys, {STEPS:,} updates" in scope_of(command)
    assert "keys" not in scope_of(study), "our own model has a context"
    runs[0].manifest.resolved["keys"] = [17, 128]
    assert "attention over 17 to 1,024 keys" in scope_of(command)
    del runs[-1].manifest.resolved["keys"]
    assert "keys" not in scope_of(command), "of one candidate nobody knows"


def test_the_verdict_ends_with_what_was_tried(tmp_path, capsys):
    """A kernel that is wrong at other lengths has not been tried at them."""
    write_synthetic(tmp_path)
    main(["verdict", str(tmp_path)])
    assert capsys.readouterr().out.endswith(f"\n\n{scope_line(read_study(tmp_path))}\n")


def test_without_a_run_nothing_is_said(tmp_path):
    write_study_json(tmp_path)
    assert scope_line(read_study(tmp_path)) == ""


def test_a_damaged_snapshot_has_no_size(tmp_path):
    path = tmp_path / "step-00000000.safetensors"
    assert count_values(path) == 0
    path.write_bytes(b"no snapshot")
    assert count_values(path) == 0
