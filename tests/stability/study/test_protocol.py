"""The sealed protocol of a trained study: written once, before the first run, and held to."""

import dataclasses
import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from stability.analysis import protocol_check
from stability.analysis.protocol_check import protocol_changes
from stability.analysis.study_records import read_study
from stability.cli.main import main
from stability.config.load import load_study
from stability.config.study import PolicyConfig
from stability.records.manifest import read_manifest, write_manifest
from stability.records.paths import RunPaths, StudyPaths
from stability.records.protocol import (
    Protocol,
    leaves_out,
    protocol_hash,
    read_protocol,
    seal_protocol,
)
from stability.records.sealed_json import read_sealed, write_sealed
from stability.study import run_study as module
from stability.study.run_study import changed_protocol
from tests.conftest import train_edited
from tests.sampling import one_in

NONE = ["no protocol was sealed before the first run"]


def _edit(content):
    content["arms"] = {
        "truth": {"role": "reference", "until": 4},
        "nudge": {"nudge": {"ulps": 1}, "until": 4},
        "flash": {"attention": {"implementation": "flash"}},
    }
    content["base"]["train"] |= {"steps": 6}
    content["base"]["probe"] = {"every": 0}
    content |= {"yardstick": "", "seeds": [0], "policy": {"max_excess": 1.2}}


@pytest.fixture(scope="module")
def done(tmp_path_factory, text_file):
    """The YAML's path and the folder of a study of four runs, trained once."""
    return train_edited(tmp_path_factory.mktemp("protocol"), text_file, _edit)


@pytest.fixture
def study(done, tmp_path):
    """A copy of the trained study that a test may spoil."""
    shutil.copytree(done[1], tmp_path / "runs" / "tiny")
    return tmp_path / "runs" / "tiny"


def _edit_watched(content):
    _edit(content)
    content["arms"] = {
        "flash": {
            "attention": {"implementation": "flash"},
            "probe": {"every": 2, "gradient_every": 2, "seeds": "first"},
        }
    }


@pytest.fixture(scope="module")
def watched_once(tmp_path_factory, text_file):
    """The path and folder of a study whose candidate is looked at in the first seed."""
    return train_edited(tmp_path_factory.mktemp("watched"), text_file, _edit_watched)


@pytest.fixture
def watched(watched_once, tmp_path):
    """A copy of that study."""
    return shutil.copytree(watched_once[1], tmp_path / "runs" / "tiny")


def _changes(folder: Path) -> list[str]:
    recorded = read_study(folder)
    return protocol_changes(recorded, recorded.policy)


def _respell(folder: Path, edit) -> None:
    """Write study.json as a later `stability run` with a changed YAML would."""
    path = StudyPaths(folder).study
    content = read_sealed(path, writer="")
    edit(content)
    write_sealed(path, content)


def test_a_protocol_holds_all_that_a_verdict_rests_on(study):
    sealed = read_protocol(StudyPaths(study).protocol)
    assert sealed.policy["max_excess"] == 1.2
    probe = sealed.arms["truth"].pop("probe")
    assert (probe["every"], probe["backward"], probe["seeds"]) == (0, True, "all")
    assert sealed.arms["truth"] == {
        "role": "reference",
        "until": 4,
        "diff": {"precision": ["bf16-mixed", "32-true"]},
    }
    assert sealed.arms["flash"]["until"] == 6
    noise = {"part": 0.3, "times": 3.0, "block": 16, "limit": 2.0}
    rule = {"step": 0, "limit": 0.04, "settling": 10, "noise": noise}
    assert sealed.window == {**rule, "steps": [1, 2, 4]}
    assert (sealed.looks, sealed.seeds) == ([3, 5, 8, 12, 20], [0])
    assert sealed.base["train"]["steps"] == 6


def test_nothing_is_changed_in_a_study_that_was_left_alone(study):
    assert _changes(study) == []


def test_every_run_keeps_the_hash_of_its_protocol(study):
    here = protocol_hash(study)
    for run in read_study(study).arms:
        assert run.runs[0].manifest.hashes["protocol"] == here


@pytest.mark.parametrize(
    ("edit", "said"),
    one_in(
        3,
        [
            (
                lambda c: c["config"]["policy"].update(max_excess=1.5),
                ["policy.max_excess is 1.5, was sealed as 1.2"],
            ),
            (
                lambda c: c["config"]["policy"].update(candidates=["flash"]),
                ["policy.candidates is [flash], was sealed as []"],
            ),
            (
                lambda c: c["arms"].append(
                    {"name": "late", "axis": "none", "diff": {}, "role": "rerun", "until": 6}
                ),
                ["arm late was added"],
            ),
            (lambda c: c["arms"].pop(3), ["arm flash was taken out"]),
            (
                lambda c: c["arms"][3].update(role="yardstick"),
                ["arm flash.role is yardstick, was sealed as candidate"],
            ),
            (
                lambda c: c["arms"][3]["diff"].update({"attention.profile": ["", "fa3"]}),
                ["arm flash.attention.profile is fa3, was sealed as nothing"],
            ),
            (
                lambda c: [c["arms"][i].update(until=2) for i in (1, 2)],
                [
                    "arm truth.until is 2, was sealed as 4",
                    "arm nudge.until is 2, was sealed as 4",
                    "window.steps is [1, 2], was sealed as [1, 2, 4]",
                ],
            ),
            (
                lambda c: c["config"]["base"]["optimizer"].update(lr=2e-3),
                ["base.optimizer.lr is 0.002, was sealed as 0.001"],
            ),
            (
                lambda c: c["config"].update(seeds=[1, 0]),
                ["seeds are [1, 0], were sealed as [0]; seeds may only be added after those"],
            ),
        ],
    ),
    ids=["margin", "candidates", "added", "taken out", "role", "diff", "until", "base", "seeds"],
)
def test_what_is_changed_afterwards_is_told(study, edit, said):
    _respell(study, edit)
    assert _changes(study) == said


def _retell(folder: Path, arm: str, seed: int = 0, of: int = 0, **changes) -> None:
    """Write a run's manifest with other values, as another training would; from seed `of`."""
    manifest = read_manifest(RunPaths.for_run(folder, arm, of).manifest)
    path = RunPaths.for_run(folder, arm, seed).manifest
    path.parent.mkdir(parents=True, exist_ok=True)
    write_manifest(path, dataclasses.replace(manifest, seed=seed, **changes))


def _probed(folder: Path, **values) -> dict:
    config = read_manifest(RunPaths.for_run(folder, "flash", 0).manifest).config
    return {**config, "probe": {**config["probe"], **values}}


@pytest.mark.parametrize(
    ("values", "said"),
    one_in(
        2,
        [
            ({"backward": False}, "backward is False, was sealed as True"),
            ({"layers": ["layer_0"]}, "layers is [layer_0], was sealed as [*]"),
            ({"gradient_every": 0}, "gradient_every is 0, was sealed as 2"),
            ({"every": 0}, "every is 0, was sealed as 2"),
        ],
    ),
    ids=str,
)
def test_an_arm_that_was_probed_otherwise_than_sealed_is_told(watched, values, said):
    assert _changes(watched) == []
    _retell(watched, "flash", config=_probed(watched, **values))
    assert _changes(watched) == [f"in the run of flash, seed 0, probe.{said}"]


def test_probing_that_is_changed_in_the_yaml_is_told_before_a_run(watched, watched_once):
    asked = load_study(watched_once[0])
    assert changed_protocol(asked, watched.parent) == []
    arms = {**asked.arms, "flash": {**asked.arms["flash"], "probe": {"every": 2, "seeds": "first"}}}
    changed = dataclasses.replace(asked, arms=arms)
    assert changed_protocol(changed, watched.parent) == [
        "arm flash.probe.gradient_every is 0, was sealed as 2"
    ]


@pytest.mark.slow
def test_probing_the_first_seed_alone_is_no_change(watched, watched_once, run_tiny):
    asked = dataclasses.replace(load_study(watched_once[0]), seeds=(0, 1))
    run_tiny(asked, watched.parent)
    flash = read_study(watched).arm("flash").runs
    every = [run.manifest.config["probe"]["every"] for run in flash.values()]
    assert every == [2, 0]
    assert _changes(watched) == []
    _retell(watched, "flash", seed=1, of=1, config=_probed(watched))
    assert _changes(watched) == [
        "in the run of flash, seed 1, probe.every is 2, was sealed as 0",
        "in the run of flash, seed 1, probe.gradient_every is 2, was sealed as 0",
    ]


def test_a_protocol_of_before_probes_were_sealed_is_judged_by_what_it_holds(watched):
    path = StudyPaths(watched).protocol
    content = read_sealed(path, writer="")
    for arm in content["arms"].values():
        arm.pop("probe")
    write_sealed(path, content)
    hashes = read_manifest(RunPaths.for_run(watched, "flash", 0).manifest).hashes
    for run in read_study(watched).arms:
        _retell(watched, run.name, hashes={**hashes, "protocol": protocol_hash(watched)})
    _retell(
        watched,
        "flash",
        hashes={**hashes, "protocol": protocol_hash(watched)},
        config=_probed(watched, backward=False),
    )
    assert _changes(watched) == []


def test_probing_that_another_version_sealed_is_compared_as_it_stands(watched):
    _retell(watched, "flash", config=_probed(watched, sharpness=3))
    assert _changes(watched) == [
        "in the run of flash, seed 0, probe.sharpness is 3, was sealed as nothing"
    ]


def test_another_rule_of_the_window_is_told(study, monkeypatch):
    monkeypatch.setattr(protocol_check, "SETTLING", 5)
    changes = protocol_changes(read_study(study), read_study(study).policy)
    assert changes == ["window.settling is 5, was sealed as 10"]


def test_another_rule_of_what_is_left_out_is_told(study, monkeypatch):
    monkeypatch.setitem(protocol_check.RULE, "part", 0.5)
    assert _changes(study) == ["window.noise.part is 0.5, was sealed as 0.3"]
    # sealed before anything was left out: nothing is left out of it today either
    content = read_sealed(StudyPaths(study).protocol, "")
    del content["window"]["noise"]
    write_sealed(StudyPaths(study).protocol, content)
    assert not leaves_out(study)
    assert not [said for said in _changes(study) if "noise" in said]


def test_seeds_of_an_arm_with_several_sources_are_told(study):
    manifest = read_manifest(RunPaths.for_run(study, "flash", 0).manifest)
    _respell(study, lambda content: content["config"].update(seeds=[0, 1, 2]))
    for seed in (1, 2):
        _retell(study, "flash", seed)
    assert _changes(study) == []
    _retell(study, "flash", 2, resolved={**manifest.resolved, "source": "edited"})
    assert _changes(study) == [
        "flash was trained with several sources of its attention: one with seeds 0, 1, "
        "another with seed 2"
    ]
    _retell(study, "flash", 2, environment={**manifest.environment, "kernel_source": "edited"})
    assert _changes(study) == [
        "the study was trained with several sources of its attention library: one with seeds "
        "0, 1, another with seed 2"
    ]


@pytest.mark.parametrize(
    "key",
    one_in(3, ["module.helper", "package_source", "package.torch", "threads", "switch.mkldnn"]),
)
def test_seeds_of_an_arm_that_were_trained_otherwise_are_told_and_fail_verify(study, key, capsys):
    _respell(study, lambda content: content["config"].update(seeds=[0, 1, 2]))
    for arm in ("flash", "baseline"):
        known = read_manifest(RunPaths.for_run(study, arm, 0).manifest).environment
        _retell(study, arm, 0, environment={**known, "module.helper": "as it was"})
        for seed, value in ((1, {}), (2, {key: "edited"})):
            _retell(study, arm, seed, environment={**known, "module.helper": "as it was", **value})
    said = [
        f"{arm}, seed 2, was trained with another environment.{key} than seed 0"
        for arm in ("baseline", "flash")
    ]
    assert _changes(study) == said
    assert main(["verify", str(study), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["seeds_apart"] == said
    assert main(["verdict", str(study)]) == 4
    assert main(["verify", str(study)]) == 1
    assert said[1] in " ".join(capsys.readouterr().out.split())


def test_a_module_that_one_seed_lacks_is_told_and_many_entries_are_counted(study):
    _respell(study, lambda content: content["config"].update(seeds=[0, 1, 2]))
    known = read_manifest(RunPaths.for_run(study, "flash", 0).manifest).environment
    for seed in (1, 2):
        others = {f"module.m{number}": "new" for number in range(6)}
        _retell(study, "flash", seed, environment={**known, **others, "package.new": "1"})
    assert _changes(study) == [
        "flash, seeds 1, 2, were trained with another environment.module.m0, "
        "environment.module.m1, environment.module.m2, environment.module.m3 and 2 more than seed 0"
    ]


def test_seeds_that_are_added_are_no_change(study):
    _respell(study, lambda content: content["config"].update(seeds=[0, 1, 2]))
    assert _changes(study) == []


@pytest.mark.slow
def test_a_policy_of_the_command_line_is_a_change(study):
    found = protocol_changes(read_study(study), PolicyConfig(max_excess=1.2, alpha=0.2))
    assert found == ["policy.alpha is 0.2, was sealed as 0.05"]


def test_a_seed_that_was_trained_is_not_left_out_in_silence(study):
    shutil.copytree(study / "baseline" / "seed-0", study / "baseline" / "seed-7")
    assert _changes(study) == ["seed 7 was trained and is left out"]


def test_a_protocol_that_was_deleted_is_not_made_again(study, done, run_tiny):
    StudyPaths(study).protocol.unlink()
    assert _changes(study) == NONE
    asked = load_study(done[0])
    assert changed_protocol(asked, study.parent) == NONE
    run_tiny(asked, study.parent)
    assert not StudyPaths(study).protocol.exists()
    assert _changes(study) == NONE


def test_a_protocol_that_was_written_anew_is_not_the_one_of_the_runs(study):
    path = StudyPaths(study).protocol
    content = read_sealed(path, writer="")
    content["policy"]["max_excess"] = 1.5
    write_sealed(path, content)
    _respell(study, lambda content: content["config"]["policy"].update(max_excess=1.5))
    assert _changes(study) == [
        "baseline, seed 0, was trained under another protocol than protocol.json"
    ]


def test_runs_of_before_there_were_protocols_are_exploratory(study):
    path = RunPaths.for_run(study, "nudge", 0).manifest
    manifest = read_manifest(path)
    hashes = {name: hash for name, hash in manifest.hashes.items() if name != "protocol"}
    write_manifest(path, dataclasses.replace(manifest, hashes=hashes))
    assert _changes(study) == ["nudge, seed 0, was trained under no protocol"]


def test_a_broken_seal_is_told_by_readers_and_refused_by_a_run(study, done, run_tiny):
    path = StudyPaths(study).protocol
    path.write_text(path.read_text().replace("1.2", "1.5"))
    assert _changes(study) == [
        f"the protocol can't be relied on: {path}: must have the checksum of what it says, has "
        "not; it was damaged or edited"
    ]
    before = StudyPaths(study).study.read_bytes()
    with pytest.raises(ValueError, match=r"protocol.json: must have the checksum"):
        run_tiny(load_study(done[0]), study.parent)
    assert StudyPaths(study).study.read_bytes() == before


@pytest.mark.slow
def test_a_changed_policy_keeps_the_first_seal_and_the_runs_go_on(study, done, run_tiny):
    asked = load_study(done[0])
    policy = dataclasses.replace(asked.policy, max_excess=1.5)
    changed = dataclasses.replace(asked, policy=policy, seeds=(0, 1))
    sealed = StudyPaths(study).protocol.read_bytes()
    said = ["policy.max_excess is 1.5, was sealed as 1.2"]
    assert changed_protocol(changed, study.parent) == said
    run_tiny(changed, study.parent)
    assert StudyPaths(study).protocol.read_bytes() == sealed
    assert _changes(study) == said
    assert {run.state for arm in read_study(study).arms for run in arm.runs.values()} == {
        "finished"
    }


def test_a_kill_between_seal_and_first_run_leaves_the_seal(done, tmp_path, run_tiny, monkeypatch):
    asked = load_study(done[0])

    def killed(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, "_train_in_turn", killed)
        with pytest.raises(KeyboardInterrupt):
            run_tiny(asked, tmp_path)
    folder = tmp_path / "tiny"
    sealed = StudyPaths(folder).protocol.read_bytes()
    assert not list(folder.glob("*/seed-*"))
    policy = dataclasses.replace(asked.policy, max_excess=1.5)
    changed = dataclasses.replace(asked, policy=policy)
    assert changed_protocol(changed, tmp_path) == ["policy.max_excess is 1.5, was sealed as 1.2"]
    with monkeypatch.context() as patch:
        patch.setattr(module, "_train_in_turn", lambda *args: None)
        run_tiny(changed, tmp_path)
    assert StudyPaths(folder).protocol.read_bytes() == sealed


def test_a_study_that_is_planned_and_not_begun_has_nothing_to_change(done, tmp_path):
    assert changed_protocol(load_study(done[0]), tmp_path) == []
    assert not list(tmp_path.iterdir())


def _protocol(limit: float) -> Protocol:
    return Protocol(
        study="s",
        policy={"max_excess": limit},
        arms={},
        window={},
        looks=[3],
        seeds=[0],
        base={},
    )


def test_of_processes_that_begin_at_once_the_first_decides_for_all(tmp_path, monkeypatch):
    barrier, link = Barrier(8), os.link

    def all_at_once(*args):
        barrier.wait(10)
        link(*args)

    monkeypatch.setattr(os, "link", all_at_once)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda n: seal_protocol(tmp_path, _protocol(n)), range(1, 9)))
    assert len({json.dumps(one.policy) for one in found if one}) == 1
    assert all(found)
    assert [path.name for path in tmp_path.iterdir()] == ["protocol.json"]
