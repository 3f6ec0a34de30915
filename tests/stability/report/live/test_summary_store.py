"""Summaries on disk: given back for the same records and the same code alone."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from stability.analysis.study_records import read_study
from stability.records.sealed_json import read_sealed, write_sealed
from stability.report.live import summary_store
from stability.report.live.study_index import find_studies
from stability.report.live.study_summary import Summary, summary_of_study
from stability.report.live.summary_store import SummaryStore, default_folder


@pytest.fixture(scope="module")
def summary(finished):
    return summary_of_study(read_study(finished))


@pytest.fixture
def study(finished):
    (found,) = find_studies(finished).values()
    return found


@pytest.fixture
def store(tmp_path):
    return SummaryStore(tmp_path / "caches" / "summaries")


def files_of(tmp_path):
    return list((tmp_path / "caches" / "summaries").iterdir())


def test_summary_comes_back_as_it_was(store, study, summary, tmp_path):
    assert summary.ladder.rungs
    assert store.find(study) is None
    store.keep(study, summary)
    assert store.find(study) == summary
    assert (tmp_path / "caches" / "summaries").stat().st_mode & 0o777 == 0o700
    bare = Summary(title="t", size="s", state="x")
    store.keep(study, bare)
    assert store.find(study) == bare
    assert len(files_of(tmp_path)) == 1


def test_summary_counts_for_its_records_its_place_and_its_code_alone(
    store, study, summary, tmp_path, monkeypatch
):
    store.keep(study, summary)
    assert store.find(replace(study, stamp="other")) is None
    assert store.find(replace(study, path=tmp_path)) is None
    monkeypatch.setattr(summary_store, "_code", lambda: "other")
    assert store.find(study) is None


def test_code_is_that_of_the_packages_at_hand(tmp_path, monkeypatch):
    class Package:
        __file__ = str(tmp_path / "__init__.py")

    (tmp_path / "__init__.py").write_text("a = 1")
    monkeypatch.setattr(summary_store, "stability", Package)
    code = summary_store._code.__wrapped__
    before = code()
    assert code() == before
    (tmp_path / "__init__.py").write_text("a = 2")
    assert code() != before


def _sealed_again(path: Path, change) -> None:
    content = read_sealed(path, "")
    change(content)
    write_sealed(path, content)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.write_bytes(path.read_bytes()[:-9]),
        lambda path: path.write_text("[]"),
        lambda path: path.write_text(json.dumps({"of": {}})),
        lambda path: path.write_text(path.read_text().replace("finished", "diverged")),
        lambda path: _sealed_again(path, lambda content: content["summary"].pop("title")),
        lambda path: _sealed_again(path, lambda content: content["summary"].update(more=1)),
        lambda path: _sealed_again(path, lambda content: content["summary"].update(ladder=[1])),
        lambda path: _sealed_again(path, lambda content: content["summary"].update(answers=1)),
        lambda path: _sealed_again(path, lambda content: content.pop("summary")),
    ],
)
def test_what_is_damaged_is_made_anew(store, study, summary, tmp_path, spoil):
    store.keep(study, summary)
    (path,) = files_of(tmp_path)
    spoil(path)
    assert store.find(study) is None
    store.keep(study, summary)
    assert store.find(study) == summary


def test_where_nothing_can_be_written_nothing_is_kept(study, summary, tmp_path):
    (tmp_path / "file").write_text("")
    store = SummaryStore(tmp_path / "file" / "summaries")
    store.keep(study, summary)
    assert store.find(study) is None


def test_oldest_go_first(store, study, summary, tmp_path, monkeypatch):
    monkeypatch.setattr(summary_store, "MOST", 2)
    each = [replace(study, path=Path(name)) for name in ("a", "b", "c")]
    for one in each:
        store.keep(one, summary)
    assert [store.find(one) == summary for one in each] == [False, True, True]


def test_store_is_in_the_account_s_own_caches(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    assert default_folder() == tmp_path / "caches" / "stability" / "summaries"
    monkeypatch.setenv("HOME", str(tmp_path))
    for unusable in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", unusable)
        assert default_folder() == tmp_path / ".cache" / "stability" / "summaries"
