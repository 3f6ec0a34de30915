"""What is found below a folder, in which order, and what is not followed."""

import os
from dataclasses import replace

import pytest

from stability.records.manifest import read_manifest, write_manifest
from stability.records.metric_log import MetricLog
from stability.records.run_lock import hold
from stability.report.live.study_index import StudyIndex, find_studies


@pytest.fixture
def runs(tmp_path):
    (tmp_path / "runs").mkdir()
    return tmp_path / "runs"


@pytest.fixture
def write(synthetic):
    def write_one(folder, age=0):
        synthetic.write_study_json(folder)
        synthetic.write_run(folder, synthetic.ARMS[0], 0, until=3)
        for path in folder.rglob("*.json*"):
            os.utime(path, (2e9 - age, 2e9 - age))
        return folder

    return write_one


def test_newest_record_comes_first(runs, write):
    write(runs / "old", age=100)
    write(runs / "new", age=1)
    log = write(runs / "grows", age=50) / "baseline" / "seed-0" / "metrics.jsonl"
    assert list(find_studies(runs)) == ["new", "grows", "old"]
    os.utime(log, (2e9, 2e9))
    assert list(find_studies(runs)) == ["grows", "new", "old"]


def test_stamp_changes_with_each_record_and_only_then(runs, write):
    folder = write(runs / "study")
    seen = [find_studies(runs)["study"].stamp]
    assert find_studies(runs)["study"].stamp == seen[0]
    log = MetricLog(folder / "baseline" / "seed-0" / "metrics.jsonl")
    log.append(4, {"train/loss": 1.0})
    log.close()
    seen.append(find_studies(runs)["study"].stamp)
    os.utime(folder / "baseline" / "seed-0" / "manifest.json", (3e9, 3e9))
    seen.append(find_studies(runs)["study"].stamp)
    (folder / "report.html").write_text("no record")
    assert len(set(seen)) == 3
    assert find_studies(runs)["study"].stamp == seen[-1]


def test_stamp_changes_when_a_run_loses_its_process(runs, synthetic):
    folder = runs / "study"
    synthetic.write_study_json(folder)
    run = synthetic.write_run(folder, synthetic.ARMS[0], 0, state="running", until=3)
    index = StudyIndex(runs)
    with hold(run):
        held = index.find()["study"].stamp
        assert index.find()["study"].stamp == held
    gone = index.find()["study"].stamp
    assert gone != held
    write_manifest(run.manifest, replace(read_manifest(run.manifest), state="interrupted"))
    ended = index.find()["study"].stamp
    with hold(run):
        assert index.find()["study"].stamp == ended, "an ended run is not asked for its process"


@pytest.mark.parametrize(
    "name",
    ["study.json", "protocol.json", "window.json", "assay/flash.json", "distances/seed-0.json"],
)
def test_stamp_covers_all_that_a_verdict_rests_on(runs, write, name):
    folder = write(runs / "study")
    before = find_studies(runs)["study"].stamp
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text("{}")
    after = find_studies(runs)["study"].stamp
    (folder / name).write_text("[]")
    os.utime(folder / name, (2e9, 2e9))
    assert len({before, after, find_studies(runs)["study"].stamp}) == 3


def test_stamp_tells_a_file_that_was_put_in_place_of_another_like_it(runs, write):
    manifest = write(runs / "study") / "baseline" / "seed-0" / "manifest.json"
    before, status = find_studies(runs)["study"].stamp, manifest.stat()
    content = manifest.read_bytes()
    manifest.with_suffix(".new").write_bytes(content[::-1])
    manifest.with_suffix(".new").rename(manifest)
    os.utime(manifest, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert find_studies(runs)["study"].stamp != before


def test_pipe_in_place_of_a_record_makes_nobody_wait(runs, write):
    manifest = write(runs / "study") / "baseline" / "seed-0" / "manifest.json"
    manifest.unlink()
    os.mkfifo(manifest)
    assert list(find_studies(runs)) == ["study"]


def test_depth_is_three_and_a_study_is_not_searched(runs, write):
    write(runs / "a" / "b" / "deep")
    write(runs / "a" / "b" / "c" / "too-deep")
    write(runs / "outer" / "forks" / "inner")
    write(runs / "outer")
    write(runs / ".hidden")
    assert set(find_studies(runs)) == {"a/b/deep", "outer"}


def test_folder_of_one_study_goes_by_its_own_name(runs, write):
    assert list(find_studies(write(runs / "alone"))) == ["alone"]


def test_links_that_lead_out_are_not_followed(runs, write, tmp_path):
    outside = write(tmp_path / "outside")
    (runs / "link").symlink_to(outside)
    (runs / "loop").symlink_to(runs)
    inside = write(runs / "inside")
    (runs / "same").symlink_to(inside)
    found = find_studies(runs)
    assert "link" not in found
    assert {"inside", "same"} <= set(found)
    assert not any(each.path.resolve() == outside for each in found.values())


@pytest.mark.parametrize("what", ["baseline", "baseline/seed-0", "baseline/seed-0/metrics.jsonl"])
def test_records_that_lie_outside_are_an_error(runs, write, tmp_path, what):
    outside = write(tmp_path / "outside")
    folder = write(runs / "study")
    (folder / what).rename(tmp_path / "away")
    (folder / what).symlink_to(outside / what)
    assert "leads out of" in find_studies(runs)["study"].error
    assert not find_studies(outside)["outside"].error


@pytest.mark.parametrize("name", ["<script>", "a b", "100%2F..", "🦊", "n" * 255, "'\"&", "a.."])
def test_odd_names_are_kept_as_they_are(runs, write, name):
    write(runs / name)
    assert list(find_studies(runs)) == [name]


def test_name_that_is_no_text_can_be_written(runs, write):
    folder = write(runs / "plain")
    os.rename(folder, os.fsencode(runs) + b"/bad\xff")
    (name,) = find_studies(runs)
    assert name.encode("utf-8").startswith(b"bad")
    assert find_studies(runs)[name].path.is_dir()


def test_probe_is_found_and_an_empty_folder_is_empty(runs):
    assert find_studies(runs) == {}
    (runs / "probe").mkdir()
    (runs / "probe" / "probe.json").write_text("{")
    assert find_studies(runs)["probe"].kind == "probe"
