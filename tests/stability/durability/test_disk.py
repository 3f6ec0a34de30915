"""The model of a disk loses what was not synced, and nothing else."""

import random

from stability.records.atomic_files import write_text
from stability.records.metric_log import MetricLog
from tests.stability.durability.disk import Disk, recorded, tree_of


def _states(operations, count=None, seeds=20):
    disk = Disk()
    for operation in operations[:count]:
        disk.apply(operation)
    return [tree for seed in range(seeds) for tree in disk.states(random.Random(seed))]


def test_what_was_recorded_and_replayed_is_what_is_on_the_real_disk(tmp_path):
    with recorded(tmp_path) as operations:
        write_text(tmp_path / "a" / "note.txt", "old")
        write_text(tmp_path / "a" / "note.txt", "new")
        log = MetricLog(tmp_path / "a" / "metrics.jsonl")
        for step in range(3):
            log.append(step, {"x": 1.0})
        log.truncate_to(log.position() // 3)
        log.close()
    disk = Disk()
    for operation in operations:
        disk.apply(operation)
    assert disk.live() == tree_of(tmp_path)
    assert Disk(tree_of(tmp_path)).live() == tree_of(tmp_path)


def test_file_without_a_sync_may_be_lost_torn_or_hold_zeros():
    written = [("create", "log"), ("sync", "."), ("write", "log", b"x" * 1000)]
    found = {tree["log"] for tree in _states(written)}
    assert {b"", b"x" * 1000, bytes(1000)} <= found
    assert any(0 < len(content) < 1000 for content in found)
    assert any(b"x" in content and b"\0" in content for content in found)
    assert {tree["log"] for tree in _states([*written, ("sync", "log")])} == {b"x" * 1000}


def test_name_without_a_sync_of_its_folder_may_be_lost_though_its_bytes_are_there():
    written = [("fill", "t", b"new"), ("sync", "t"), ("rename", "t", "note")]
    found = [frozenset(tree.items()) for tree in _states(written)]
    assert set(found) == {
        frozenset(),
        frozenset({("t", b"new")}),
        frozenset({("note", b"new")}),
    }
    assert _states([*written, ("sync", ".")]) == [{"note": b"new"}] * 20


def test_rename_before_the_bytes_are_synced_may_leave_an_empty_file():
    found = [
        tree.get("note") for tree in _states([("fill", "t", b"n" * 9), ("rename", "t", "note")])
    ]
    assert b"" in found
    assert bytes(9) in found


def test_folder_whose_name_is_not_synced_takes_all_that_is_in_it_along():
    written = [("make_folder", "a"), ("fill", "a/note", b"new"), ("sync", "a/note"), ("sync", "a")]
    assert {} in _states(written)
    assert {} not in _states([*written, ("sync", ".")])


def test_deletion_without_a_sync_may_be_undone():
    written = [("fill", "note", b"n"), ("sync", "note"), ("sync", "."), ("unlink", "note")]
    assert {frozenset(tree) for tree in _states(written)} == {frozenset(), frozenset({"note"})}


def test_cut_that_was_not_synced_may_be_undone_under_what_was_written_after_it():
    written = [("fill", "log", b"12345678"), ("sync", "log"), ("sync", ".")]
    written += [("truncate", "log", 2), ("write", "log", b"ab")]
    found = {tree["log"] for tree in _states(written)}
    assert {b"12ab", b"12345678", b"12ab5678", b"12"} <= found
