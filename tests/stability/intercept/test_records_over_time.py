"""A probe's records go on after a resume, and those of several ranks are told apart."""

import io
import json
from dataclasses import replace

import pytest
import torch
from torch import multiprocessing
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from stability import shadow
from stability.analysis.probe_records import read_probe
from stability.cli.main import main
from stability.records.identity import environment
from stability.records.probe_record import (
    METRICS_FILE,
    PROBE_FILE,
    rank_folder,
    read_probe_record,
    write_probe_record,
)
from stability.report.page.html import render_probe
from tests.stability.intercept.torch_models import Decoder, tokens, train_step


def _train(model, steps, folder, state=None, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = steps.start
    step = first
    options = {"gradient_every": 2, "loss": lambda: _loss(model, step), **options}
    with shadow(model, records=folder, first_step=first, **options) as probe:
        if state is not None:
            probe.load_state_dict(state)
        for step in steps:
            optimizer.zero_grad()
            train_step(model, step)
            optimizer.step()
            probe.step()
    return probe


def _loss(model, step):
    batch = tokens(step)
    logits = model(batch[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def _model():
    torch.manual_seed(0)
    return Decoder(depth=1)


def _lines(folder):
    return [json.loads(line) for line in (folder / METRICS_FILE).read_text().splitlines()]


@pytest.mark.parametrize(
    "ends", ["whole", *(pytest.param(ends, marks=pytest.mark.slow) for ends in ("killed", "ahead"))]
)
def test_a_resumed_job_goes_on_with_its_records(tmp_path, ends):
    _train(_model(), range(6), tmp_path / "whole")
    model = _model()
    part = tmp_path / "part"
    if ends == "ahead":  # the checkpoint is of step 3, the job was killed at step 5
        _train(_model(), range(5), part)
    before = _train(model, range(3), part if ends != "ahead" else tmp_path / "other")
    if ends == "killed":
        record = read_probe_record(part)
        with (part / METRICS_FILE).open("a") as file:
            file.write('{"step": 3, "torn')
        write_probe_record(part, replace(record, state="running", log=None))
    checkpoint = io.BytesIO()
    torch.save(before.state_dict(), checkpoint)
    checkpoint.seek(0)
    _train(model, range(3, 6), part, torch.load(checkpoint, weights_only=True))
    assert _lines(part) == _lines(tmp_path / "whole")
    probed = read_probe(part)
    assert probed.steps() == list(range(6))
    assert probed.looked_at == "6 of 6 steps"
    assert probed.open_end == ""


def test_another_probe_in_the_folder_is_refused_by_what_differs(tmp_path):
    _train(_model(), range(2), tmp_path)
    with pytest.raises(ValueError, match=r"must hold no probe yet, got .* or give first_step"):
        _train(_model(), range(2), tmp_path)
    with pytest.raises(ValueError, match=r"its golden is True, not False; name another folder"):
        _train(_model(), range(2, 3), tmp_path, golden=False)
    with pytest.raises(ValueError, match=r"its shadows is .*fa2.*, not .*fa3"):
        _train(_model(), range(2, 3), tmp_path, candidate="flash:fa3")
    (tmp_path / PROBE_FILE).unlink()
    with pytest.raises(ValueError, match=r"must hold no other log, .* which has metrics.jsonl"):
        _train(_model(), range(2, 3), tmp_path)


def test_a_log_that_has_lost_its_end_is_not_gone_on_with(tmp_path):
    _train(_model(), range(2), tmp_path)
    log = tmp_path / METRICS_FILE
    log.write_bytes(log.read_bytes()[:-30])
    with pytest.raises(ValueError, match="has lost its end"):
        _train(_model(), range(2, 3), tmp_path)


def test_another_environment_is_said(tmp_path, monkeypatch):
    _train(_model(), range(2), tmp_path)
    here = environment()
    name = next(iter(here))
    monkeypatch.setattr(
        "stability.probe.probe_recorder.environment", lambda: {**here, name: "another"}
    )
    _train(_model(), range(2, 3), tmp_path)
    said = [event.text for event in read_probe(tmp_path).events]
    assert f"from step 2 on {name} is 'another', before it was {here[name]!r}" in said


def test_updates_that_were_made_without_the_probe_are_said(tmp_path):
    _train(_model(), range(2), tmp_path)
    _train(_model(), range(2, 3), tmp_path)
    assert not any("nothing is on record" in event.text for event in read_probe(tmp_path).events)
    _train(_model(), range(5, 6), tmp_path)
    said = [event.text for event in read_probe(tmp_path).events]
    assert "nothing is on record of updates 3 to 5: the probe ended before them" in said


def test_running_figures_that_begin_anew_are_said(tmp_path):
    _train(_model(), range(2), tmp_path)
    _train(_model(), range(2, 4), tmp_path)
    said = [event.text for event in read_probe(tmp_path).events]
    assert said == ["its running figures begin anew at step 2: no state was loaded"]


def test_ranks_are_told_apart(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        _train(_model(), range(2), tmp_path, gradient_every=0)
        probed = read_probe(tmp_path)
        expected = "" if rank else "nothing is on record of 1 of 2 ranks"
        assert probed.open_end == expected
    assert probed.layers == ["layers.0@rank0", "layers.0@rank1"]
    own = read_probe_record(rank_folder(tmp_path, 1))
    assert (own.rank, own.ranks) == (1, 2)
    for metric in ("rel_fro", "error_ratio"):
        first, second = (probed.series(layer, "dq", metric) for layer in probed.layers)
        assert first == second
        assert set(first) == {0, 1}
    assert main(["show", str(tmp_path)]) == 0
    assert "layers.0@rank1" in capsys.readouterr().out
    assert "layers.0@rank1" in render_probe(probed)
    write_probe_record(rank_folder(tmp_path, 1), replace(own, ranks=3))
    with pytest.raises(ValueError, match=r"rank-1.probe.json: must be of rank 1 of 2, is .* of 3"):
        read_probe(tmp_path)
    write_probe_record(tmp_path, replace(read_probe_record(tmp_path), ranks=2**40))
    (rank_folder(tmp_path, 1) / PROBE_FILE).rename(tmp_path / "away")
    with pytest.raises(ValueError, match=r"rank-1.probe.json: "):
        read_probe(tmp_path)
    write_probe_record(rank_folder(tmp_path, 1), own)
    write_probe_record(tmp_path, replace(read_probe_record(tmp_path), ranks=2))
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ValueError, match="its ranks is 2, not 4"):
        _train(_model(), range(2, 3), tmp_path, gradient_every=0)


def _rank(rank, folder):
    store = torch.distributed.FileStore(f"{folder}/store", 2)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    torch.manual_seed(0)
    model = DistributedDataParallel(Decoder(depth=1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with shadow(model, records=f"{folder}/probe", layers=["layers.*"]) as probe:
        for step in range(3):
            optimizer.zero_grad()
            train_step(model, 2 * step + rank)
            optimizer.step()
            probe.step()
    torch.save([p.detach() for p in model.parameters()], f"{folder}/watched-{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_two_processes_of_ddp_write_a_record_each(tmp_path):
    multiprocessing.spawn(_rank, (str(tmp_path),), nprocs=2)
    probed = read_probe(tmp_path / "probe")
    assert probed.layers == ["layers.0@rank0", "layers.0@rank1"]
    first, second = (probed.series(layer, "out", "rel_fro") for layer in probed.layers)
    assert set(first) == set(second) == {0, 1, 2}
    assert first != second  # each has its own part of the batch
