"""What `shadow` records says whether the probe has ended, and an ended log is sealed."""

import shutil

import pytest
import torch

from stability import shadow
from stability.analysis.probe_records import read_probe
from stability.cli.main import main
from stability.probe.measurements import StepMeasurements
from stability.probe.probe_recorder import ProbeRecorder
from stability.records.probe_record import METRICS_FILE, PROBE_FILE, read_probe_record
from stability.records.sealed_json import read_sealed, write_sealed
from stability.report.live.study_summary import summary_of_probe
from stability.report.page.html import render_probe
from tests.stability.intercept.torch_models import Decoder, train_step

UNFINISHED = "unfinished: its writer did not end, or runs still; 2 steps are on record"
UNSEALED = "nothing seals the end of an older version's log; 2 steps are on record"


@pytest.fixture(scope="module")
def probes(tmp_path_factory):
    """The folder of a probe after its third step, as a kill would leave it, and that of its end."""
    root = tmp_path_factory.mktemp("probes")
    model = Decoder()
    with shadow(model, records=root / "ended") as probe:
        for step in range(3):
            train_step(model, step, torch.float32)
            probe.step()
        shutil.copytree(root / "ended", root / "killed")
    return root


def _views(folder, capsys):
    main(["show", str(folder)])
    probed = read_probe(folder)
    page = render_probe(probed).partition("<main>")[0]
    return capsys.readouterr().out, page, summary_of_probe(probed).state


def test_an_ended_probe_names_its_log_and_is_shown_as_it_is(probes, capsys):
    record = read_probe_record(probes / "ended")
    assert record.state == "ended"
    assert record.log
    assert record.log["bytes"] == (probes / "ended" / METRICS_FILE).stat().st_size
    for view in _views(probes / "ended", capsys):
        assert "on record" not in view
    assert "3 of 3 steps looked at" in _views(probes / "ended", capsys)[0]


def test_a_probe_whose_process_died_is_readable_and_said_to_be_unfinished(probes, capsys):
    # the last step's figures were still on the device, as they are where a process is killed
    for view in _views(probes / "killed", capsys):
        assert UNFINISHED in view
        assert "of 0" not in view


def test_a_probe_of_before_logs_were_sealed_says_that_nothing_seals_its_end(
    probes, tmp_path, capsys
):
    folder = shutil.copytree(probes / "killed", tmp_path / "old")
    content = read_sealed(folder / PROBE_FILE, "")
    write_sealed(
        folder / PROBE_FILE, {k: v for k, v in content.items() if k not in ("state", "log")}
    )
    for view in _views(folder, capsys):
        assert UNSEALED in view.replace("&#39;", "'")
        assert "of 0" not in view


def test_an_ended_log_that_has_lost_a_line_is_refused_by_name(probes, tmp_path, capsys):
    folder = shutil.copytree(probes / "ended", tmp_path / "torn")
    log = folder / METRICS_FILE
    log.write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[:-1]))
    for verb in ("show", "report"):
        with pytest.raises(SystemExit) as stop:
            main([verb, str(folder)])
        assert stop.value.code == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert f"{log}: has lost its end: it must hold" in line


def test_a_recorder_writes_its_record_before_the_first_figure(tmp_path):
    recorder = ProbeRecorder(
        tmp_path / "p", model="m", primary={}, shadows={"flash:fa2": {}}, golden=True
    )
    assert not (tmp_path / "p").exists()
    recorder.write(7, StepMeasurements({"watch/l/max_logit": 1.0}, {}, ()))
    assert read_probe_record(tmp_path / "p").state == "running"
    recorder.end(("l",), 8)
    record = read_probe_record(tmp_path / "p")
    assert (record.state, record.steps, record.layers) == ("ended", 8, ["l"])


def test_a_line_that_a_full_disk_has_torn_is_no_part_of_the_sealed_log(tmp_path):
    recorder = ProbeRecorder(tmp_path, model="m", primary={}, shadows={}, golden=True)
    recorder.write(0, StepMeasurements({"watch/l/max_logit": 1.0}, {}, ()))
    log = tmp_path / METRICS_FILE
    whole = log.read_bytes()
    recorder._log.close()
    log.write_bytes(whole + b'{"step": 1, "watch')
    recorder.end(("l",), 2)
    assert log.read_bytes() == whole
    assert read_probe(tmp_path).steps() == []


def test_a_probe_that_raised_has_ended(tmp_path):
    model = Decoder()

    def fail():
        with shadow(model, records=tmp_path) as probe:
            train_step(model, 0, torch.float32)
            probe.step()
            raise KeyError("ours")

    with pytest.raises(KeyError, match="ours"):
        fail()
    assert read_probe(tmp_path).record.state == "ended"
