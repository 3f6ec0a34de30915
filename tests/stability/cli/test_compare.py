"""`stability compare` takes anything that holds weights, and says what it did not compare."""

import json
import math
import shutil

import fsspec
import pytest
import torch
from safetensors.torch import save_file

from stability.cli.main import main
from stability.metrics.drift import drift
from stability.records.dcp_files import write_dcp
from stability.records.paths import RunPaths
from stability.records.run_files import RunFiles
from stability.records.snapshots import write_snapshot
from tests.stability.records.dcp_by_hand import save


@pytest.fixture
def shown(capsys):
    def run(*words):
        assert main(["compare", *map(str, words)]) == 0
        return capsys.readouterr().out

    return run


@pytest.fixture
def refused(capsys):
    def run(*words):
        with pytest.raises(SystemExit) as stop:
            main(["compare", *map(str, words)])
        assert stop.value.code == 2
        line = capsys.readouterr().err
        assert line.count("\n") == 1
        return line

    return run


def _state(moved=0.0, layers=4):
    """Weights of which layer i has moved by `moved` * i."""
    generator = torch.Generator().manual_seed(0)
    return {
        f"h.{i}.w": (1 + moved * i) * torch.randn(5, 4, generator=generator) for i in range(layers)
    }


def _run(folder, steps):
    run = RunFiles.unnamed(folder)
    for step in steps:
        _add(run, step, _state(step / 100))
    return folder


def _add(run, step, state):
    write_snapshot(run.paths.snapshot(step), state)
    run.add(run.paths.snapshot(step))


def _everywhere(folder, state):
    """The same weights in every kind of file and folder."""
    (folder / "hf").mkdir()
    save_file(state, folder / "hf" / "model.safetensors")
    save_file(state, folder / "s.safetensors")
    torch.save(state, folder / "s.bin")
    torch.save({"state_dict": state, "pytorch-lightning_version": "2"}, folder / "s.ckpt")
    _add(RunFiles.unnamed(folder / "run"), 3, state)
    write_dcp(folder / "dcp", state).wait()
    write_dcp(folder / "step-3" / "model_0", state).wait()
    names = ("hf", "s.safetensors", "s.bin", "s.ckpt", "run", "dcp", "step-3")
    return [folder / name for name in names]


def test_any_kind_compares_with_any_other(shown, tmp_path):
    a, b = _state(0.1), _state()
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    mine, yours = _everywhere(tmp_path / "a", a), _everywhere(tmp_path / "b", b)
    for first, second in zip(mine, (*yours[1:], yours[0]), strict=True):
        found = json.loads(shown(first, second, "--json"))
        assert found["drift"] == drift(a, b)
        assert str(first) in found["a"]
        assert str(second) in found["b"]


def test_what_a_checkpoint_of_many_ranks_holds_beside_the_model_is_counted(shown, tmp_path):
    a, b = _state(0.1), _state()
    adam = {"state": {"h.0.w": {"exp_avg": a["h.0.w"], "step": 1}}}
    save(tmp_path / "a", {"model": a, "optimizer": adam, "train_state": {"step": 3}})
    save_file(b, tmp_path / "s.safetensors")
    found = json.loads(shown(tmp_path / "a", tmp_path / "s.safetensors", "--json"))
    assert found["drift"] == drift(a, b)
    assert found["a"] == f"{tmp_path / 'a'}, less 3 entries beside the model"
    assert found["only_in_a"] == found["only_in_b"] == []


def test_a_folder_that_would_run_something_is_refused_in_a_line(refused, tmp_path):
    planted = tmp_path / "planted"
    save(tmp_path / "a", {"model": _state()})
    text = f"touch {planted}".encode()
    call = b"\x80\x02cos\nsystem\nX" + len(text).to_bytes(4, "little") + text + b"\x85R."
    (tmp_path / "a" / ".metadata").write_bytes(call)
    line = refused(tmp_path / "a", tmp_path / "a")
    assert f"{tmp_path / 'a' / '.metadata'}: must be the metadata that" in line
    assert "it names os.system, which DCP does not write" in line
    assert not planted.exists()


def test_two_runs_meet_at_their_last_common_snapshot(shown, tmp_path):
    a, b = _run(tmp_path / "a", (0, 2, 4, 9)), _run(tmp_path / "b", (2, 4, 7))
    found = json.loads(shown(a, b, "--json"))
    assert (found["a"], found["b"]) == (f"{a}, step 4", f"{b}, step 4")
    assert found["drift"]["all"]["rel_l2"] == 0
    assert json.loads(shown(a, b, "--step", 2, "--json"))["a"] == f"{a}, step 2"


def test_a_run_against_a_file_is_taken_at_its_last_step_or_the_given_one(shown, tmp_path):
    run = _run(tmp_path / "a", (0, 2, 9))
    save_file(_state(0.09), tmp_path / "s.safetensors")
    for words, step in ((), 9), (("--step", "2"), 2):
        found = json.loads(shown(run, tmp_path / "s.safetensors", *words, "--json"))
        assert found["a"] == f"{run}, step {step}"
        assert (found["drift"]["all"]["rel_l2"] == 0) == (step == 9)


def test_what_a_study_leaves_on_disk_is_compared(shown, refused, trained):
    baseline = trained / "baseline" / "seed-0"
    found = json.loads(shown(trained / "rerun" / "seed-0", baseline, "--json"))
    assert found["a"].endswith("seed-0, step 6")
    assert all(metrics["rel_l2"] == 0 for metrics in found["drift"].values())
    assert (
        json.loads(shown(trained / "fp32" / "seed-0", baseline, "--json"))["drift"]["all"]["w1"] > 0
    )
    checkpoints = [
        next((trained / arm / "seed-0" / "checkpoints").glob("*.ckpt"))
        for arm in ("fp32", "baseline")
    ]
    moved = json.loads(shown(*checkpoints, "--json"))["drift"]
    assert moved.keys() - {"all"} == {f"model.{name}" for name in found["drift"].keys() - {"all"}}
    assert "nearest on the other: " in refused(checkpoints[0], baseline)


def test_of_two_runs_it_says_whether_they_are_a_pair(shown, trained, tmp_path):
    baseline, fp32 = trained / "baseline" / "seed-0", trained / "fp32" / "seed-0"
    other_seed = trained / "fp32" / "seed-1"
    said = {
        run: json.loads(shown(run, baseline, "--json"))["contract"] for run in (fp32, other_seed)
    }
    assert said[fp32] == "a pair: they differ in precision alone"
    assert said[other_seed].startswith("no pair: config.seed.")
    text = shown(other_seed, baseline)
    assert text.index("no pair: config.seed.") < text.index("rel_l2")
    loose = [_run(tmp_path / name, (1,)) for name in ("a", "b")]
    assert json.loads(shown(*loose, "--json"))["contract"].startswith("unproven: ")
    save_file(_state(), tmp_path / "s.safetensors")
    assert "contract" not in json.loads(shown(loose[0], tmp_path / "s.safetensors", "--json"))


def test_of_a_damaged_record_it_says_so_and_hashes_no_other_snapshot(shown, trained, tmp_path):
    for arm in ("baseline", "fp32"):
        shutil.copytree(trained / arm / "seed-0", tmp_path / arm / "seed-0")
    baseline, fp32 = tmp_path / "baseline" / "seed-0", tmp_path / "fp32" / "seed-0"
    RunPaths(fp32).snapshot(0).write_bytes(b"large, and verify's to read")
    assert "a pair: " in shown(fp32, baseline)
    RunPaths(fp32).witness.write_text("{}")
    text = " ".join(shown(fp32, baseline).split())
    assert "no pair: records of fp32, seed 0 is" in text


def test_the_table_has_all_first_then_what_moved_most_and_counts_the_rest(shown, tmp_path):
    a, b = _state(0.1, layers=12), _state(layers=12)
    a["h.7.w"][0, 0] = math.nan
    save_file(a, tmp_path / "a.safetensors")
    save_file(b, tmp_path / "b.safetensors")
    text = shown(tmp_path / "a.safetensors", tmp_path / "b.safetensors", "--top", 3)
    first = [line.split()[0] for line in text.splitlines() if line.startswith(("all ", "h."))]
    assert first == ["all", "h.7.w", "h.11.w", "h.10.w"]
    assert "9 more parameters of at most rel_l2 9.0e-01" in text
    whole = shown(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert sum(line.startswith("h.") for line in whole.splitlines()) == 12
    assert "more parameter" not in whole
    pooled = shown(tmp_path / "a.safetensors", tmp_path / "b.safetensors", "--top", 0)
    assert "12 more parameters of at most rel_l2 nan" in pooled


def test_differences_are_listed_and_long_lists_counted(shown, tmp_path):
    extra = {f"extra.{i}": torch.ones(1) for i in range(11)}
    torch.save(_state() | extra | {"size": torch.ones(2), "n": torch.tensor(1)}, tmp_path / "a.pt")
    torch.save(_state() | {"size": torch.ones(3), "n": torch.tensor(1)}, tmp_path / "b.pt")
    text = " ".join(shown(tmp_path / "a.pt", tmp_path / "b.pt").split())
    assert "11 names only in a: extra.0, extra.1," in text
    assert "extra.7, and 3 more: see --json" in text
    assert "extra.8" not in text
    assert "only in b" not in text
    assert "1 name of different shapes: size (2,) and (3,)" in text
    assert "1 name not comparable: n (not floating-point: int64)" in text
    found = json.loads(shown(tmp_path / "a.pt", tmp_path / "b.pt", "--json"))
    assert found["only_in_a"] == list(extra)


@pytest.mark.parametrize("width", [60, 80, 140])
def test_a_narrow_terminal_gets_fewer_columns_but_whole_numbers(
    shown, tmp_path, monkeypatch, width
):
    long = {"a.very.long.name.of." * 4 + "weight": torch.ones(2)}
    torch.save(_state(0.1) | long, tmp_path / "a.pt")
    torch.save(_state() | long, tmp_path / "b.pt")
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.chdir(tmp_path)
    lines = shown("a.pt", "b.pt").splitlines()
    assert max(map(len, lines)) <= width
    (row,) = (line.split() for line in lines if line.startswith("h.3.w"))
    assert any(line.rstrip().endswith("flips") for line in lines) == (width == 140)
    assert row[1] == "3.0e-01"
    assert "0 (exact)" in "\n".join(lines)
    assert "\N{HORIZONTAL ELLIPSIS}" not in "\n".join(lines)


def test_bad_input_is_one_line_with_exit_code_2(refused, tmp_path):
    torch.save(_state(), tmp_path / "a.pt")
    torch.save({"b.x": torch.ones(1)}, tmp_path / "b.pt")
    (tmp_path / "torn.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{")
    here = tmp_path / "a.pt"
    assert "torn.safetensors: must be a whole" in refused(here, tmp_path / "torn.safetensors")
    assert "a.ptt: must exist; nearest: a.pt" in refused(here, tmp_path / "a.ptt")
    assert "must share a parameter, got h.0.w" in refused(here, tmp_path / "b.pt")
    assert "top must be >= 0, got -1" in refused(here, here, "--top", "-1")
    assert "neither is a run" in refused(here, here, "--step", "3")


def test_runs_without_a_common_snapshot_name_their_steps(refused, tmp_path):
    a, b = _run(tmp_path / "a", (1, 2)), _run(tmp_path / "b", (3,))
    assert "must have snapshots of one step, got steps [1, 2] and [3]" in refused(a, b)
    assert "nearest: 1, 2" in refused(a, b, "--step", 3)
    RunFiles.unnamed(tmp_path / "new").update()
    assert "must have snapshots, got none" in refused(tmp_path / "new", a)


def test_weights_in_an_object_store_are_compared_by_their_urls(tmp_path, shown, refused):
    folder = tmp_path / "b"
    folder.mkdir()
    save_file(_state(), tmp_path / "a.safetensors")
    save_file(_state(0.01), folder / "model.safetensors")
    store = fsspec.filesystem("memory")
    store.put(f"{tmp_path}/", "/weights/", recursive=True)
    urls = ["memory://weights/a.safetensors", "memory://weights/b"]
    here = json.loads(shown(tmp_path / "a.safetensors", folder, "--json"))
    found = json.loads(shown(*urls, "--json"))
    assert found["drift"] == here["drift"]
    assert [found["a"], found["b"]] == urls
    told = shown(tmp_path / "a.safetensors", urls[1])
    assert "memory://weights/b: 1 file, 0.0 MB, to be copied to " in told
    store.pipe("/weights/torn.safetensors", b"torn")
    assert "stability: memory://weights/torn.safetensors: must be a whole safetensors" in refused(
        "memory://weights/torn.safetensors", urls[1]
    )
    run = _run(tmp_path / "run", [0])
    store.put(f"{run}/", "/weights/run/", recursive=True)
    said = "compare: a URL must be of weights, got that of a run, memory://weights/run; name a"
    assert said in refused("memory://weights/run", urls[1])
