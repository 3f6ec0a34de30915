"""The verdict is told when it is news, wherever the one before it was told."""

import os
from pathlib import Path

import pytest

from stability.records.paths import StudyPaths
from stability.tracking import publish
from stability.tracking.environment import WandbMode
from tests.stability.fuzz.offline_wandb import OfflineRun


class Telling:
    """A study that is published again and again, each time with another report."""

    def __init__(self, folder: Path) -> None:
        self._paths = StudyPaths(folder)
        self._calls = 0
        self.told: list[str] = []

    def begun(self, **given: object) -> OfflineRun:
        run = OfflineRun(**given)
        run.dir = run.dir.replace("offline-run-0-", f"offline-run-{self._calls}-")
        Path(run.dir).mkdir(parents=True)
        run.alert = lambda title, text, level: self.told.append(text.split("\n")[0])
        return run

    def publish(self, verdict: str, mode: WandbMode, *, is_uploaded: bool = True) -> None:
        self._calls += 1
        self._paths.report.parent.mkdir(parents=True, exist_ok=True)
        self._paths.report.write_text(f"page {self._calls}")
        content = publish.StudyContent(
            paths=self._paths,
            config={"study": "s", "question": "q"},
            verdict=verdict,
            evidence=[{"arm": "a", "role": "candidate", "outcome": verdict, "answer": verdict}],
            ladder="{}",
            deviations=[],
            ended=[],
        )
        assert publish.publish(content, mode) == ""
        folder = self._paths.wandb_dir
        (made,) = folder.glob(f"offline-run-{self._calls}-*")
        if mode == "offline" and is_uploaded:
            (made / "run.wandb.synced").touch()
        # the clock that dates files may be slower than this test
        for stamp in folder.rglob("told-*"):
            if stamp.stat().st_mtime > 10**6:
                os.utime(stamp, (self._calls, self._calls))


@pytest.fixture
def study(tmp_path, monkeypatch) -> Telling:
    telling = Telling(tmp_path / "s")
    monkeypatch.setattr("wandb.init", telling.begun)
    monkeypatch.setattr("wandb.setup", lambda **_: None)
    monkeypatch.setattr(publish, "_send_tables", lambda *_: None)
    monkeypatch.setattr("stability.tracking.wandb_run._count_rows", lambda *_: 0)
    return telling


@pytest.mark.parametrize("mode", ["offline", "online"])
def test_a_verdict_that_returns_is_told_again_and_one_that_stays_is_not(study, mode):
    for verdict in ("FAIL", "FAIL", "PASS", "PASS", "FAIL"):
        study.publish(verdict, mode)
    assert study.told == ["FAIL", "PASS", "FAIL"]


@pytest.mark.parametrize("modes", [("offline", "online"), ("online", "offline")])
def test_what_was_told_in_one_mode_is_no_news_in_the_other(study, modes):
    for verdict in ("FAIL", "PASS", "FAIL"):
        for mode in modes:
            study.publish(verdict, mode)
    assert study.told == ["FAIL", "PASS", "FAIL"]


def test_what_lies_in_a_folder_that_was_not_uploaded_has_been_told_to_nobody(study):
    study.publish("FAIL", "offline", is_uploaded=False)
    study.publish("FAIL", "online")
    assert study.told == ["FAIL", "FAIL"]
