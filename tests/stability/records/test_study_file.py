"""Who names a folder that is no study is told of the one that was meant."""

import pytest

from stability.records.study_file import read_study_file, studies_near


@pytest.fixture
def runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("quickstart", "mine"):
        (tmp_path / "runs" / name / "baseline" / "seed-0").mkdir(parents=True)
        (tmp_path / "runs" / name / "study.json").write_text("{}")
    return tmp_path


@pytest.mark.parametrize(
    ("named", "near"),
    [
        ("runs", "nearest: runs/mine, runs/quickstart"),
        ("quickstart", "nearest: runs/quickstart"),
        ("runs/mine/baseline/seed-0", "nearest: runs/mine"),
        ("runs/mine/study.json", "nearest: runs/mine"),
        ("runs/mime", "nearest: runs/mine"),
        ("quickstar", "nearest: runs/quickstart"),
        ("elsewhere", ""),
    ],
)
def test_the_study_that_was_meant_is_named(runs, named, near):
    relative = runs.relative_to(runs) / named
    assert studies_near(relative) == near
    with pytest.raises(ValueError, match=r"`stability run` (makes one|writes it)") as said:
        read_study_file(relative)
    assert str(said.value).endswith(near or "`stability run` makes one")


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ("elsewhere", "elsewhere: must be the folder of a study, got no such folder; `stability"),
        ("runs/mine/study.json", "study.json: must be the folder of a study, got a file; `stabi"),
        ("runs/mine/baseline", "baseline/study.json: there is no such file; `stability run` wri"),
    ],
)
def test_a_folder_without_a_study_is_told_from_none(runs, named, said):
    with pytest.raises(ValueError, match=said):
        read_study_file(runs.relative_to(runs) / named)


def test_of_many_studies_the_first_are_named(runs):
    for number in range(4):
        (runs / "runs" / f"z{number}").mkdir()
        (runs / "runs" / f"z{number}" / "study.json").write_text("{}")
    assert studies_near(runs.relative_to(runs) / "runs") == (
        "nearest: runs/mine, runs/quickstart, runs/z0 and 3 more"
    )
