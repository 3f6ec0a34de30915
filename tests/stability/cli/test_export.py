"""`stability export`: one file that is checked elsewhere, and in which nothing can be exchanged."""

import io
import json
import random
import shutil
import tarfile
import tempfile
from pathlib import Path

import fsspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stability.cli.main import main
from stability.records.bundle import opened_bundle
from stability.records.paths import RunPaths, list_runs, sketch_steps, snapshot_steps
from stability.records.run_lock import hold
from stability.study.export import copy_records


def code_of(*words):
    try:
        return main([*map(str, words)])
    except SystemExit as stop:
        return stop.code


@pytest.fixture
def study(trained, tmp_path):
    """A copy of a study, with what is no record beside its records."""
    folder = tmp_path / "here" / "tiny"
    shutil.copytree(trained, folder)
    (folder / "wandb").mkdir(exist_ok=True)
    (folder / "wandb" / "secret.log").write_text("a host's name")
    (folder / "jobs").mkdir()
    (folder / "jobs" / "slurm.json").write_text("{}")
    return folder


def held(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("weights", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_bundle_is_verified_where_nothing_else_of_the_study_is(study, tmp_path, capsys, weights):
    before = held(study)
    bundle = tmp_path / "elsewhere" / "tiny.tar.gz"
    words = ["--weights"] if weights else []
    assert code_of("export", study, "--to", bundle, *words) == 0
    said = capsys.readouterr().out
    assert "of " in said
    assert "planned pairs hold" in said
    assert held(study) == before, "the study is as it was"
    proven = study.parent / "moved"
    study.rename(proven)
    assert code_of("verify", bundle, "--all", "--json") == 0
    proof = json.loads(capsys.readouterr().out)
    assert proof["hold"] == proof["planned"] > 0
    with opened_bundle(bundle) as (folder, listed):
        names = held(folder)
        assert {"report.html", "proofs.json", "summary.md", "environment.txt"} <= names
        assert not [name for name in names if "wandb" in name or "jobs" in name or "lock" in name]
        assert json.loads((folder / "proofs.json").read_text())["hold"] == proof["hold"]
        lock = (folder / "environment.txt").read_text()
        assert "\ntorch==" in lock
        assert lock.startswith("# CPython ")
        assert listed.weights == ("all" if weights else "none")
        for run in list_runs(folder):
            kept = snapshot_steps(RunPaths.for_run(proven, run.arm, run.seed)) if weights else [0]
            assert snapshot_steps(run) == kept
            assert sketch_steps(run)


@pytest.mark.slow
def test_from_inside_of_the_study_it_is_the_same(study, monkeypatch, capsys):
    before = held(study)
    monkeypatch.chdir(study / "baseline")
    assert code_of("export", "..") == 0
    assert held(study) == before
    assert (study.parent / "tiny.bundle.tar.gz").exists()


@pytest.mark.slow
def test_by_default_it_lies_beside_the_study_and_says_how_it_is_checked(study, capsys):
    assert code_of("export", study) == 0
    said = capsys.readouterr().out
    assert "elsewhere: stability verify tiny.bundle.tar.gz" in said
    assert code_of("verify", study.parent / "tiny.bundle.tar.gz") == 0
    assert "files as they were listed" in capsys.readouterr().out


@pytest.mark.slow
def test_an_object_store_takes_a_bundle_and_gives_it_back_to_be_verified(trained, capsys):
    url = "memory://bundles/tiny.tar.gz"
    assert code_of("export", trained, "--to", url) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"{url}: ")
    assert f"elsewhere: stability verify {url}\n" in said
    assert code_of("verify", url) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"{url}: 1 file, ")
    assert "\ntiny.tar.gz: " in said
    assert code_of("verify", url, "--json") == 0
    assert json.loads(capsys.readouterr().out)["hold"] > 0


def test_a_bundle_that_is_torn_in_its_store_is_named_by_its_url(capsys):
    fsspec.filesystem("memory").pipe("/bundles/torn.tar.gz", b"torn")
    assert code_of("verify", "memory://bundles/torn.tar.gz") == 2
    said = "stability: memory://bundles/torn.tar.gz: must be a whole bundle"
    assert capsys.readouterr().err.startswith(said)


def test_a_url_that_holds_no_bundle_is_refused_unread(capsys):
    for words in (["memory://x/runs/mine"], ["memory://x/a.tar.gz", "runs/b"]):
        assert code_of("verify", *words) == 2
        said = "verify: a URL must be of what `stability export` writes, which ends in .tar.gz or "
        assert said in capsys.readouterr().err


def test_a_name_that_is_no_bundles_is_refused_before_anything_is_packed(tmp_path, capsys):
    for to in ("memory://x/a.zip", tmp_path / "a.zip"):
        assert code_of("export", tmp_path, "--to", to) == 2  # nor is it looked at
        assert f"{to}: must end in .tar.gz or .tgz\n" in capsys.readouterr().err


def test_a_bundle_behind_a_signature_is_verified_and_the_signature_is_not_shown(capsys):
    fsspec.filesystem("memory").pipe("/bundles/torn.tar.gz?sig=S1", b"torn")
    assert code_of("verify", "memory://bundles/torn.tar.gz?sig=S1") == 2
    said = capsys.readouterr()
    assert said.err.startswith("stability: memory://bundles/torn.tar.gz: must be a whole bundle")
    assert "S1" not in said.out + said.err


def test_a_study_that_is_not_there_is_named(tmp_path, capsys):
    assert code_of("export", tmp_path / "runs" / "mine") == 2
    assert "runs/mine: must exist; nearest: no folder" in capsys.readouterr().err
    (tmp_path / "study.yaml").touch()
    assert code_of("export", tmp_path / "study.yaml") == 2
    assert "study.yaml: must be the folder of a study, got a file\n" in capsys.readouterr().err


@pytest.fixture(scope="module")
def exported(trained, tmp_path_factory):
    """A bundle, which tests copy."""
    bundle = tmp_path_factory.mktemp("bundle") / "tiny.tar.gz"
    assert code_of("export", trained, "--to", bundle) == 0
    return bundle


def repacked(bundle, to, change, more=""):
    """Write a copy of a bundle of what `change(name, data)` returns, and a file `more`."""
    changed = to / "changed.tar.gz"
    with tarfile.open(bundle) as old, tarfile.open(changed, "w:gz", compresslevel=1) as new:
        for member in old.getmembers():
            file = old.extractfile(member)
            data = change(member.name, file.read() if file else b"")
            if data is not None:
                entry = tarfile.TarInfo(member.name)
                entry.size = len(data)
                new.addfile(entry, io.BytesIO(data))
        if more:
            entry = tarfile.TarInfo(more)
            entry.size = 4
            new.addfile(entry, io.BytesIO(b"more"))
    return changed


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        ("nudge/seed-0/metrics.jsonl", b"loss", b"lass", "metrics.jsonl has other bytes than are"),
        ("nudge/seed-1/manifest.json", b"", None, "manifest.json is listed, and is not there"),
        ("bundle.json", b"none", b"nine", "must have the checksum"),
    ],
)
def test_what_was_exchanged_is_named(exported, tmp_path, capsys, file, old, new, said):
    def change(name, data):
        if not name.endswith(file):
            return data
        return None if new is None else data.replace(old, new)

    assert code_of("verify", repacked(exported, tmp_path, change)) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("tiny/more.txt", "more.txt is there, and is not listed"),
        ("../outside.txt", "must be a whole bundle"),
        ("/outside.txt", "must be a whole bundle"),
        ("other/more.txt", "must be a bundle, which holds one folder"),
        ("tiny/study.json", "must be a whole bundle"),
    ],
)
def test_a_file_that_is_not_listed_or_lies_elsewhere_is_refused(
    exported, tmp_path, capsys, more, said
):
    changed = repacked(exported, tmp_path, lambda _, data: data, more)
    assert code_of("verify", changed) == 2
    assert said in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["changed.tar.gz"]


@pytest.mark.parametrize(
    ("kind", "target"),
    [
        (tarfile.SYMTYPE, "/etc"),
        (tarfile.SYMTYPE, "study.json"),
        (tarfile.LNKTYPE, "../outside.txt"),
        (tarfile.LNKTYPE, "/etc/hostname"),
        (tarfile.LNKTYPE, "tiny/later.txt"),
        (tarfile.FIFOTYPE, ""),
        (tarfile.CHRTYPE, ""),
    ],
)
def test_a_member_that_could_lead_elsewhere_is_refused(tmp_path, capsys, kind, target):
    """Whatever comes after it: nothing is written through a link, and nothing is read by one."""
    bundle = tmp_path / "in" / "wild.tar.gz"
    bundle.parent.mkdir()
    (tmp_path / "outside.txt").write_text("mine")
    with tarfile.open(bundle, "w:gz") as archive:
        entry = tarfile.TarInfo("tiny/way")
        entry.type, entry.linkname = kind, target
        archive.addfile(entry)
        entry = tarfile.TarInfo("tiny/way/outside.txt")
        entry.size = 4
        archive.addfile(entry, io.BytesIO(b"more"))
    assert code_of("verify", bundle) == 2
    assert "must be a whole bundle" in capsys.readouterr().err
    assert (tmp_path / "outside.txt").read_text() == "mine"
    assert [path.name for path in bundle.parent.iterdir()] == ["wild.tar.gz"]


def test_a_bundle_that_no_disk_holds_is_refused_before_it_fills_one(tmp_path, monkeypatch, capsys):
    bundle = tmp_path / "large.tar.gz"
    with tarfile.open(bundle, "w:gz") as archive:
        entry = tarfile.TarInfo("tiny/zeros")
        entry.size = 2**20
        archive.addfile(entry, io.BytesIO(bytes(2**20)))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=2**19))
    assert code_of("verify", bundle) == 2
    assert (
        "there is no room for a bundle's files: free some, or set TMPDIR" in capsys.readouterr().err
    )


@given(st.integers(0, 3000), st.integers(1, 255))
@settings(max_examples=60)
def test_a_damaged_archive_is_one_line(at, bits):
    with tempfile.TemporaryDirectory() as place:
        bundle = Path(place) / "small.tar.gz"
        with tarfile.open(bundle, "w:gz") as archive:
            entry = tarfile.TarInfo("tiny/bundle.json")
            entry.size = 3000
            archive.addfile(entry, io.BytesIO(random.Random(0).randbytes(3000)))
        data = bytearray(bundle.read_bytes())
        data[at % len(data)] ^= bits
        bundle.write_bytes(data)
        with pytest.raises(ValueError, match=r"small\.tar\.gz: "), opened_bundle(bundle):
            pass


def test_files_of_a_record_go_with_it_and_those_of_who_holds_it_do_not(
    study, tmp_path, monkeypatch
):
    """DCP hides what it says of a folder's content, and so does who holds a run."""
    run = RunPaths.for_run(study, "nudge", 0)
    folder = run.snapshots_dir / "step-00000009.dcp"
    folder.mkdir()
    there = [folder / ".metadata", folder / "__0_0.distcp"]
    gone = [run.lock, run.root / ".lease-abc", run.root / ".metrics.jsonl.1.tmp"]
    gone += [study / "old.bundle.tar.gz", study / "jobs" / "slurm.json"]
    for path in (*there, *gone):
        path.write_text("x")
    (study / "leases").mkdir()
    (study / "leases" / "an-arm.txt").write_text("x")
    monkeypatch.setattr("stability.study.export.is_held", lambda _: False)  # by a lease that is old
    copy_records(study, tmp_path / "copy", weights=True)
    copied = held(tmp_path / "copy")
    assert {str(path.relative_to(study)) for path in there} <= copied
    assert "leases/an-arm.txt" in copied
    assert not {str(path.relative_to(study)) for path in gone} & copied
    with pytest.raises(ValueError, match="must not be there yet"):
        copy_records(study, tmp_path / "copy", weights=True)


def test_what_can_not_be_exported_says_why(study, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    assert code_of("export", tmp_path / "empty") == 2
    assert "must be the folder of a study" in capsys.readouterr().err
    with hold(RunPaths.for_run(study, "nudge", 0)):
        assert code_of("export", study) == 2
    assert "must not be in training" in capsys.readouterr().err
    assert code_of("export", study, "--to", tmp_path / "a.zip") == 2
    assert "must end in .tar.gz or .tgz" in capsys.readouterr().err
    (tmp_path / "no.tar.gz").write_bytes(b"nothing")
    assert code_of("verify", tmp_path / "no.tar.gz") == 2
    assert "must be a whole bundle" in capsys.readouterr().err
    assert not list(study.parent.glob("*.tar.gz"))
    assert not list(study.parent.glob(".export-*"))


@pytest.mark.slow
def test_a_pair_that_does_not_hold_is_told_and_goes_with_it(study, capsys):
    shutil.rmtree(RunPaths.for_run(study, "nudge", 1).root)
    assert code_of("export", study) == 1
    assert code_of("verify", study.parent / "tiny.bundle.tar.gz") == 1


@pytest.mark.slow
def test_where_the_disk_has_no_links_files_are_copied(study, monkeypatch, capsys):
    def refuse(source, target):
        raise OSError("no links here")

    monkeypatch.setattr("stability.study.export.file_operations.link", refuse)
    assert code_of("export", study) == 0
    monkeypatch.undo()
    assert code_of("verify", study.parent / "tiny.bundle.tar.gz") == 0


def test_a_folder_of_bundles_is_told_apart_from_a_study(tmp_path, capsys):
    """Verified where it was exported to, `verify .` said that a file of a study is missing."""
    (tmp_path / "data.tar.gz").write_bytes(b"")
    assert code_of("verify", tmp_path) == 2
    assert "bundles lie" not in capsys.readouterr().err
    (tmp_path / "tiny.bundle.tar.gz").write_bytes(b"")
    assert code_of("verify", tmp_path) == 2
    said = capsys.readouterr().err
    assert f"name one, as {tmp_path / 'tiny.bundle.tar.gz'}" in " ".join(said.split())
