"""A study beyond memory or disk is refused before a byte is written, and one that fits is not."""

from types import SimpleNamespace

import pytest

from stability.cli.main import main
from stability.config.load import load_study
from stability.study import size_check
from stability.study.machine_memory import Memory
from stability.study.memory_estimate import estimate_memory, weight_bytes
from stability.study.run_study import check_study, plan_study, run_study
from stability.study.size_check import check_memory
from stability.study.train_run import TrainOptions
from tests.conftest import SilentObserver

HUGE = {"depth": 12, "width": 768, "heads": 12, "context": 32768}


def _main(capsys, *words):
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    return ended.value.code, capsys.readouterr().err.strip()


@pytest.fixture
def have(monkeypatch):
    """Return a function that makes this machine one with so many bytes of memory."""

    def set_memory(count: int) -> None:
        memory = Memory(count, "this machine")
        monkeypatch.setattr(size_check, "host_memory", lambda: memory)

    return set_memory


def _peak(runs):
    return max(estimate_memory(run.config, run.last_step).bytes for run in runs)


def test_scores_beyond_memory_are_refused_in_one_line_and_nothing_is_written(
    write_study, tmp_path, capsys
):
    path = write_study(lambda content: content["base"].update(model=HUGE))
    code, said = _main(capsys, "run", path, "--out", tmp_path / "runs", "--wandb", "disabled")
    assert code == 2
    assert "\n" not in said
    assert "attention scores of 12 heads x 32768 x 32768 in FP32, 4 sequences, 12 layers" in said
    assert said.startswith(f"stability: {path}: arm baseline: a run must fit the ")
    assert " TiB" in said
    assert "make train.batch_size, model.context or the model smaller" in said
    assert not (tmp_path / "runs").exists()


def test_the_arm_that_is_too_large_is_named_alone(write_study, tmp_path, have):
    def edit(content):
        content["base"]["attention"] = {"implementation": "flash"}
        content["base"]["model"] |= {"context": 256, "heads": 2}
        content["base"]["probe"] = {"every": 0}
        content["base"]["held_out"] = {"share": 0.0}
        content["arms"] = {
            "baseline": {},
            "plain": {"attention": {"implementation": "baseline"}, "probe": {"every": 0}},
        }
        content["yardstick"] = ""

    runs = plan_study(load_study(write_study(edit)), tmp_path)
    needs = {run.arm.name: _peak([run]) for run in runs}
    assert needs["plain"] > 1.1 * needs["baseline"]
    have(needs["plain"] - 1)
    with pytest.raises(ValueError, match=r"arm plain: a run must fit .* of this machine, got at"):
        check_study(runs)
    have(needs["plain"])
    assert check_study(runs) == []


def test_runs_side_by_side_count_together(write_study, tmp_path, have):
    runs = plan_study(load_study(write_study()), tmp_path)
    peaks = sorted(_peak([run]) for run in runs)
    three = peaks[-1] + peaks[0] + peaks[1]
    have(three - 1)
    check_study(runs, jobs=1)
    check_study(runs, jobs=2)
    with pytest.raises(ValueError, match=r"--jobs: 3 runs at once must fit .*; use --jobs 2$"):
        check_study(runs, jobs=3)
    have(three)
    check_study(runs, jobs=3)


def test_no_more_runs_count_than_can_train_at_once(write_study, tmp_path):
    def edit(content):
        content["arms"] = {name: content["arms"][name] for name in ("baseline", "rerun", "nudge")}
        content["yardstick"] = ""
        content["seeds"] = [0]

    runs = plan_study(load_study(write_study(edit)), tmp_path)
    assert size_check.most_at_once(runs, 8) == 2, "both wait for their baseline"
    assert size_check.most_at_once(runs, 1) == 1
    assert size_check.most_at_once(runs[1:], 8) == 2, "a baseline that has ended keeps nobody"
    assert size_check.most_at_once([], 8) == 0


def test_a_gpu_holds_what_trains_on_it(write_study, tmp_path, monkeypatch, have):
    runs = plan_study(load_study(write_study()), tmp_path)
    monkeypatch.setattr(size_check, "resolve_device", lambda config: SimpleNamespace(type="cuda"))
    monkeypatch.setattr(size_check.torch.cuda, "device_count", lambda: 2)
    peaks = sorted(_peak([run]) for run in runs)
    room = Memory(peaks[-1] + peaks[0], "its GPU")
    monkeypatch.setattr(size_check, "gpu_memory", lambda: room)
    have(10 * peaks[-1])
    size_check.check_memory(runs, jobs=4)
    with pytest.raises(ValueError, match=r"--jobs: 3 runs at once .* its GPU, .*use --jobs 4$"):
        size_check.check_memory(runs, jobs=5)
    monkeypatch.setattr(size_check, "gpu_memory", lambda: Memory(peaks[-1] - 1, "its GPU"))
    with pytest.raises(ValueError, match=r"arm \w+: a run must fit .* of its GPU, got"):
        size_check.check_memory(runs, jobs=1)


def _free(monkeypatch, count):
    found = SimpleNamespace(f_bavail=count, f_frsize=1)
    monkeypatch.setattr(size_check.os, "statvfs", lambda folder: found)


def _on_disk(folder):
    kinds = ("*.safetensors", "*.ckpt")
    return sum(path.stat().st_size for kind in kinds for path in folder.rglob(kind))


def test_seeds_use_the_room_again_of_what_is_dropped(write_study, tmp_path, monkeypatch):
    def edit(content):
        content["arms"] = {name: content["arms"][name] for name in ("baseline", "rerun")}
        content["yardstick"] = ""
        content["seeds"] = [0, 1, 2]

    runs = plan_study(load_study(write_study(edit)), tmp_path / "runs")
    whole = sum(size_check.files_to_write(run).bytes for run in runs)
    by_kind = size_check.planned_files(runs[0])
    (steps, snapshot), (saved, checkpoint) = by_kind["snapshots"], by_kind["checkpoints"]
    # with `none` the snapshot of step 0 stays, with `last` that of the last step too
    for keep, kept in [("none", 1), ("last", 2), ("reference", len(steps))]:
        of_baseline = (len(steps) - kept) * snapshot * (keep != "reference")
        of_rerun = (len(steps) - (kept if keep != "reference" else 1)) * snapshot
        again = 2 * (of_baseline + of_rerun) + 4 * len(saved) * checkpoint
        needed = whole - again
        _free(monkeypatch, needed - 1)
        with pytest.raises(ValueError, match=r"must have room for the study"):
            size_check.check_disk(runs, tmp_path, keep)
        _free(monkeypatch, needed)
        size_check.check_disk(runs, tmp_path, keep)
    with pytest.raises(ValueError, match=r"must have room for the study"):
        size_check.check_disk(runs, tmp_path)


@pytest.mark.slow
def test_the_disk_must_hold_what_is_yet_to_be_written(write_study, tmp_path, monkeypatch):
    def edit(content):
        content["arms"] = {"baseline": {}, "rerun": {"until": 4}}
        content["yardstick"] = ""
        content["seeds"] = [0]

    study = load_study(write_study(edit))
    runs = plan_study(study, tmp_path / "runs")
    needed = sum(size_check.files_to_write(run).bytes for run in runs)
    _free(monkeypatch, needed - 1)
    with pytest.raises(ValueError, match=r"must have room for the study, got .* 2 runs; one of"):
        check_study(runs)
    assert not (tmp_path / "runs").exists()
    _free(monkeypatch, needed)
    options = TrainOptions(wandb_mode="disabled")
    run_study(study, tmp_path / "runs", options=options, observer=SilentObserver(), isolated=False)
    found = _on_disk(tmp_path / "runs")
    assert 0.7 * found < needed <= found
    assert [size_check.files_to_write(run).bytes for run in runs] == [0, 0]
    _free(monkeypatch, 0)
    assert check_study(runs) == [], "all of it is there"
    runs[1].paths.snapshot(4).unlink()
    assert size_check.files_to_write(runs[1]).bytes == weight_bytes(runs[1].config)


def _laid_out(**parallel):
    def edit(content):
        content["base"]["probe"] = {"every": 0}
        content["base"]["held_out"] = {"share": 0.0}
        content["base"]["train"]["batch_size"] = 8
        content["arms"] = {"baseline": {}, "laid_out": {"parallel": parallel}}
        content.pop("yardstick")

    return edit


def test_this_machine_holds_every_rank_of_a_run_that_trains_here(write_study, tmp_path, have):
    runs = plan_study(load_study(write_study(_laid_out(data=4))), tmp_path)
    alone, of_rank = (
        estimate_memory(run.config, run.last_step).bytes for run in (runs[0], runs[-1])
    )
    assert alone < 4 * of_rank, "each replica holds all weights"
    have(4 * of_rank - 1)
    with pytest.raises(ValueError, match=r"arm laid_out: .* on each of 4 ranks"):
        check_study(runs)
    check_study(runs, here=1)  # the others are elsewhere
    have(4 * of_rank)
    check_study(runs)


def test_a_gpu_holds_one_rank_of_a_run(write_study, tmp_path, monkeypatch):
    """A model that no GPU holds is what shards are for."""

    def edit(content):
        content["base"]["train"]["accelerator"] = "auto"
        _laid_out(shard=8)(content)

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    runs = plan_study(load_study(write_study(edit)), tmp_path)
    whole, shard = (estimate_memory(run.config, run.last_step).bytes for run in (runs[0], runs[-1]))
    assert shard < whole / 3

    def gpu(count):
        monkeypatch.setattr(size_check, "gpu_memory", lambda: Memory(count, "its GPU"))

    gpu(shard)
    check_memory(runs[-1:])
    with pytest.raises(ValueError, match=r"arm baseline: a run must fit"):
        check_memory(runs)
    gpu(shard - 1)
    with pytest.raises(ValueError, match=r"arm laid_out: a run must fit"):
        check_memory(runs[-1:])
