"""Whatever a power cut leaves of a study, the same command goes on from the right place.

Two sessions are recorded, operation by operation: one from nothing to the end, and one that goes on
after a power cut that cost a checkpoint. After each operation the power is cut in every way that
the model of a disk allows; what the program then decides for each run (kept, a checkpoint, or anew)
is held against what is known of the bytes without it.
"""

import functools
import hashlib
import json
import random
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from stability.config.load import load_study
from stability.config.study import StudyConfig
from stability.records.manifest import read_manifest
from stability.study import run as run_module
from stability.study.checkpoints import resume_from
from stability.study.run import Run, check_existing, has_ended
from stability.study.run_study import plan_study
from tests.conftest import run_quietly, write_tiny
from tests.sampling import one_in
from tests.stability.durability.disk import Blobs, Disk, Operation, Tree, recorded, tree_of
from tests.stability.study.recorded_bits import recorded_bits

ANEW, KEPT = 0, 10**6
"""Decisions; between them is the step of a checkpoint."""
ARMS = ("baseline", "rerun")
STEPS = 6
LEAST = 2000


def _edit(content):
    content |= {"arms": {"rerun": {}}, "seeds": [0], "yardstick": ""}
    content["base"]["train"] |= {"steps": STEPS, "keep_checkpoints": 2}
    content["base"]["probe"] = {"every": 3}


@dataclass(frozen=True)
class Session:
    """One call of the command: the disk before it, and what it did."""

    before: Tree
    operations: list[Operation]


@dataclass(frozen=True)
class Study:
    config: StudyConfig
    sessions: tuple[Session, ...]
    whole: Path
    """What an undisturbed study has recorded."""


@pytest.fixture(scope="module")
def study(tmp_path_factory, text_file) -> Study:
    """The recording of a study, and of one that lost its last checkpoint and went on."""
    folder = tmp_path_factory.mktemp("power")
    config = load_study(write_tiny(folder, text_file, _edit))
    first = _record(config, folder / "whole", {})
    lost = dict(_at_checkpoint(first))
    (last,) = [
        path for path in lost if path.endswith("rerun/seed-0/checkpoints/step-00000004.ckpt")
    ]
    lost[last] = bytes(len(lost[last] or b""))
    shutil.copytree(folder / "whole", folder / "kept")
    second = _record(config, folder / "again", lost)
    return Study(config, (first, second), folder / "kept" / "tiny")


def _record(config: StudyConfig, out: Path, before: Tree) -> Session:
    Blobs(out.with_suffix(".blobs")).lay(before, out, linked=False)
    with recorded(out) as operations:
        run_quietly(config, out)
    disk = Disk(before)
    for operation in operations:
        disk.apply(operation)
    # else some byte has gone another way than through `file_operations`
    assert disk.live() == tree_of(out)
    return Session(before, operations)


def _at_checkpoint(session: Session) -> Tree:
    """Return the disk as it is when the second run has listed its checkpoint of step 4."""
    disk, name = Disk(session.before), "rerun/seed-0/checkpoints/step-00000004.ckpt"
    for operation in session.operations:
        disk.apply(operation)
        content = disk.live().get("tiny/rerun/seed-0/manifest.json")
        if content and f'"{name.partition("seed-0/")[2]}"' in content.decode():
            return disk.live()
    raise AssertionError("no manifest lists the checkpoint")


class Oracle:
    """What is known of the bytes of all sessions without asking the program."""

    def __init__(self, sessions: Iterable[Session]) -> None:
        self.lengths: dict[str, tuple[int, str]] = {}
        """By the SHA-256 of a checkpoint: the log's length when it was written, and its hash."""
        self.manifests: dict[str, set[bytes]] = {arm: set() for arm in ARMS}
        for session in sessions:
            disk = Disk(session.before)
            for operation in session.operations:
                disk.apply(operation)
                if operation[0] == "fill":
                    self._learn(operation[1], operation[2], disk.live())

    def _learn(self, path: str, content: bytes, tree: Tree) -> None:
        _, _, name = path.partition("/seed-0/")
        if "manifest.json" in name:
            self.manifests[path.split("/")[1]].add(content)
        if ".ckpt" in name:
            log = tree[path.partition("checkpoints/")[0] + "metrics.jsonl"] or b""
            known = (len(log), hashlib.sha256(log).hexdigest())
            self.lengths[hashlib.sha256(content).hexdigest()] = known

    def right(self, tree: Tree, arm: str) -> int:
        """Return the only right decision for a run."""
        root = f"tiny/{arm}/seed-0"
        content = tree.get(f"{root}/manifest.json")
        if content is None:
            return ANEW
        assert content in self.manifests[arm], "a manifest that nobody wrote: it is torn"
        manifest = json.loads(content)
        listed = {
            name: hashlib.sha256(tree.get(f"{root}/{name}") or b"").hexdigest() == expected
            for name, expected in manifest["files"].items()
        }
        if manifest["state"] == "finished":
            assert all(listed.values()), "a run has ended before its files were on the disk"
            return KEPT
        weights = [_step(name) for name in listed if "safetensors" in name and not listed[name]]
        log = tree.get(f"{root}/metrics.jsonl") or b""
        for step in sorted((_step(n) for n in listed if n.endswith(".ckpt")), reverse=True):
            name = f"checkpoints/step-{step:08d}.ckpt"
            length, expected = self.lengths[manifest["files"][name]]
            has_log = hashlib.sha256(log[:length]).hexdigest() == expected
            if listed[name] and has_log and step < min(weights, default=KEPT):
                return step
        return ANEW


def _step(name: str) -> int:
    return int(Path(name).stem.removeprefix("step-"))


def _promise(content: bytes | None) -> int:
    """Return what a manifest that is surely on the disk promises."""
    manifest = json.loads(content or b'{"files": {}, "state": ""}')
    steps = [_step(name) for name in manifest["files"] if name.endswith(".ckpt")]
    return KEPT if manifest["state"] == "finished" else max(steps, default=ANEW)


def _cuts(
    session: Session, oracle: Oracle, dice: random.Random, share: float
) -> Iterator[tuple[Tree, dict[str, int]]]:
    """Yield each state with what was promised before: no power cut may take that back.

    Cuts the power after a drawn share of the operations, in every way.
    """
    disk = Disk(session.before)
    promised = {arm: oracle.right(session.before, arm) for arm in ARMS}
    names = {arm: f"tiny/{arm}/seed-0/manifest.json" for arm in ARMS}
    for operation in session.operations:
        if dice.random() < share:
            for tree in disk.states(dice):
                yield tree, dict(promised)
        disk.apply(operation)
        if operation[0] == "sync":
            durable = disk.durable()
            for arm, name in names.items():
                if durable.get(name) != session.before.get(name):
                    promised[arm] = _promise(durable.get(name))
    for tree in disk.states(dice):
        yield tree, promised


@pytest.fixture
def one_environment(monkeypatch):
    """Hash the sources once and not for each state: what there is to import stays the same."""
    monkeypatch.setattr(run_module, "environment", functools.cache(run_module.environment))


def _decisions(runs: list[Run]) -> dict[str, int]:
    """Return what the program would do with each run; it changes nothing."""
    found = {}
    for run in runs:
        assert check_existing(run) == []
        if has_ended(run.paths):
            found[run.arm.name] = KEPT
        elif run.paths.manifest.exists():
            manifest = read_manifest(run.paths.manifest)
            found[run.arm.name] = resume_from(run.paths, manifest, lambda _: None)[0]
        else:
            found[run.arm.name] = ANEW
    return found


def _visit(study: Study, folder: Path, share: float) -> tuple[int, dict[tuple, Tree]]:
    """Check what is decided after a share of the operations.

    Returns the number of distinct states, and one state of each kind.
    """
    blobs, seen, kinds = Blobs(folder / "blobs"), set(), {}
    oracle, out = Oracle(study.sessions), folder / "cut"
    runs = plan_study(study.config, out)
    for number, session in enumerate(study.sessions):
        for tree, promised in _cuts(session, oracle, random.Random(number), share):
            digest = blobs.digest(tree)
            if digest in seen:
                continue
            seen.add(digest)
            blobs.lay(tree, out, linked=True)
            found = _decisions(runs)
            for arm, decision in found.items():
                assert decision == oracle.right(tree, arm), (arm, sorted(tree))
                assert decision >= promised[arm], (arm, sorted(tree))
            begun = any(Path(path).name == "manifest.json" for path in tree)
            assert "tiny/protocol.json" in tree or not begun, sorted(tree)
            kinds.setdefault(_kind(tree, found), tree)
            shutil.rmtree(out)
    return len(seen), kinds


def _kind(tree: Tree, found: dict[str, int]) -> tuple:
    """Return what is decided in a state: for each run, and for the study's own files."""
    files = ("tiny/protocol.json", "tiny/study.json", "tiny/distances/seed-0.json")
    return (*found.values(), *(name in tree for name in files))


def _check_that_it_goes_on(study: Study, tree: Tree, out: Path) -> None:
    Blobs(out.with_suffix(".blobs")).lay(tree, out, linked=False)
    ended = run_quietly(study.config, out).ended
    assert [state for *_, state, _ in ended] == ["finished"] * len(ARMS), ended
    assert recorded_bits(out / "tiny") == recorded_bits(study.whole)
    for name in ("protocol.json", "study.json", "distances/seed-0.json"):
        assert (out / "tiny" / name).read_bytes() == (study.whole / name).read_bytes()
    assert not list(out.rglob("seed-0/**/.*.tmp"))


@pytest.mark.slow
def test_a_sample_of_power_cuts_is_decided_right_and_one_goes_on(study, tmp_path, one_environment):
    states, kinds = _visit(study, tmp_path, 0.02)
    assert states >= 50
    assert len(kinds) >= 3
    _check_that_it_goes_on(study, list(kinds.values())[len(kinds) // 2], tmp_path / "again")


def _has_suffix(path: str, *suffixes: str) -> bool:
    return Path(path).suffix in suffixes


FORGOTTEN = {
    "the log": lambda path: _has_suffix(path, ".jsonl"),
    "a new file": lambda path: _has_suffix(path, ".tmp"),
    "a folder": lambda path: not _has_suffix(path, ".tmp", ".jsonl"),
    "the study's folder": lambda path: path in (".", "tiny"),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", one_in(4, FORGOTTEN))
def test_a_sync_that_is_forgotten_is_found(study, tmp_path, one_environment, what):
    forgotten = FORGOTTEN[what]
    less = [
        replace(
            session,
            operations=[o for o in session.operations if o[0] != "sync" or not forgotten(o[1])],
        )
        for session in study.sessions
    ]
    with pytest.raises(AssertionError, match=r"torn|on the disk|>=|protocol.json"):
        _visit(replace(study, sessions=tuple(less)), tmp_path, 0.3)


@pytest.mark.long
def test_every_power_cut_is_decided_right_and_one_of_each_kind_goes_on(
    study, tmp_path, one_environment
):
    states, kinds = _visit(study, tmp_path, 1.0)
    assert states >= LEAST
    runs = {kind[: len(ARMS)] for kind in kinds}
    assert {(ANEW, ANEW), (2, ANEW), (4, ANEW), (KEPT, ANEW), (KEPT, 4), (KEPT, KEPT)} <= runs
    for index, tree in enumerate(kinds.values()):
        _check_that_it_goes_on(study, tree, tmp_path / f"again-{index}")
