"""What is kept is made once for each state of the records, and not too often."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from stability.report.live import cache
from stability.report.live.cache import StudyCache
from stability.report.live.study_index import StudyFolder


def found(name, stamp):
    return StudyFolder(name=name, path=Path(name), kind="study", stamp=stamp, newest=0.0, error="")


def test_value_is_made_anew_only_for_another_stamp_and_from_the_earlier_one():
    calls = []

    def make(study, earlier):
        calls.append((study.stamp, earlier))
        return f"made of {study.stamp}"

    values = StudyCache(make, 2)
    assert values.last("a") is None
    for stamp in ("1", "1", "2", "2"):
        assert values.get(found("a", stamp)) == f"made of {stamp}"
    assert calls == [("1", None), ("2", "made of 1")]
    assert (values.last("a"), values.stamp("a")) == ("made of 2", "2")


def test_those_asked_for_last_are_kept():
    made = []
    values = StudyCache(lambda study, _: made.append(study.name), 2)
    for name in ("a", "b", "a", "c", "a", "b"):
        values.get(found(name, "1"))
    assert made == ["a", "b", "c", "b"]


def test_error_is_passed_on_and_not_kept():
    made = []

    def make(study, earlier):
        made.append(earlier)
        if len(made) == 2:
            raise ValueError("torn")
        return "whole"

    values = StudyCache(make, 2)
    values.get(found("a", "1"))
    with pytest.raises(ValueError, match="torn"):
        values.get(found("a", "2"))
    assert values.last("a") == "whole"
    assert values.get(found("a", "2")) == "whole"
    assert made == [None, "whole", "whole"]


def test_two_who_ask_at_once_share_one_making_and_others_do_not_wait():
    begun, go_on, made = threading.Event(), threading.Event(), []

    def make(study, _):
        made.append(study.name)
        if study.name == "slow":
            begun.set()
            assert go_on.wait(60)
        return study.name

    values = StudyCache(make, 3)
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(values.get, found("slow", "1"))
        assert begun.wait(60)
        second = pool.submit(values.get, found("slow", "1"))
        assert pool.submit(values.get, found("quick", "1")).result(60) == "quick"
        go_on.set()
        assert first.result(60) == second.result(60) == "slow"
    assert made == ["slow", "quick"]


def test_what_takes_long_is_due_less_often(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def make(study, _):
        now[0] += 3

    values = StudyCache(make, 2)
    assert values.is_due(found("a", "1"))
    values.get(found("a", "1"))
    now[0] += 3 * cache.PAUSE
    assert not values.is_due(found("a", "1"))
    assert values.is_due(found("a", "2"))
    now[0] -= 1
    assert not values.is_due(found("a", "2"))
