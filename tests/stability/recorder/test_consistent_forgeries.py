"""A recorded study whose parts were changed under right checksums contradicts itself.

Beside `test_forgeries`: here whoever forges has put the checksums of log, snapshots and manifest in
order, so that only what several files say of one thing gives it away.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from stability.metrics.drift import drift
from stability.metrics.weight_counts import weight_counts
from stability.records.manifest import read_manifest, write_manifest
from stability.records.metric_names import DRIFT_FROM, DRIFT_OF, WEIGHT_HISTOGRAM, drift_name
from stability.records.paths import RunPaths, StudyPaths
from stability.records.run_files import RunFiles
from stability.records.sealed_json import read_sealed, write_sealed
from stability.records.snapshots import read_snapshot, write_snapshot
from tests.stability.recorder.recording import Recording, code_of, recorded_plain, words
from tests.stability.recorder.test_forgeries import run_of, verify
from tests.stability.sealing import seal

pytestmark = pytest.mark.slow

Forge = Callable[[Path], object]
ARMS = {
    "baseline": ((), ()),
    "rerun": ((), ()),
    "nudge": ((), ("--nudge", "1")),
    "fp32": (("--bf16",), ("--role", "reference")),
    "lr": (("--lr", "0.5"), ()),
}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study of five arms, that tests only read."""
    return recorded_plain(tmp_path_factory.mktemp("forged"), ARMS)


@pytest.fixture
def study(recorded: Path, tmp_path: Path) -> Path:
    """A copy of it, to be spoiled."""
    return shutil.copytree(recorded, tmp_path / "study")


def manifest(arm: str, /, **changes: Any) -> Forge:
    """Return what puts changes into an arm's manifest, sealed anew."""

    def forge(study: Path) -> None:
        path = run_of(study, arm).manifest
        write_manifest(path, replace(read_manifest(path), **changes))

    return forge


def resolved(arm: str, /, **changes: Any) -> Forge:
    def forge(study: Path) -> None:
        known = read_manifest(run_of(study, arm).manifest).resolved
        manifest(arm, resolved={**known, **changes})(study)

    return forge


def plan(edit: Callable[[dict[str, Any], dict[str, Any]], object]) -> Forge:
    """Return what edits study.json: its config, and its arms by name."""

    def forge(study: Path) -> None:
        path = StudyPaths(study).study
        content = read_sealed(path, "")
        edit(content["config"], {arm["name"]: arm for arm in content["arms"]})
        write_sealed(path, content)

    return forge


def role(arm: str, word: str) -> Forge:
    return plan(lambda config, arms: arms[arm].update(role=word))


def log(arm: str, edit: Callable[[dict[str, Any]], dict[str, Any] | None]) -> Forge:
    """Return what passes each line of a log through `edit`; None takes it out."""

    def forge(study: Path) -> None:
        run = run_of(study, arm)
        lines = map(json.loads, run.metrics.read_text(encoding="utf-8").splitlines())
        kept = [line for each in lines if (line := edit(each))]
        run.metrics.write_text("".join(map(seal, kept)), encoding="utf-8")
        RunFiles(run, read_manifest(run.manifest)).add(run.metrics)

    return forge


def at(step: int, name: str, **changes: Any) -> Callable[[dict[str, Any]], dict[str, Any] | None]:
    """Return what changes the line of `step` that has `name`, or takes it out."""

    def edit(line: dict[str, Any]) -> dict[str, Any] | None:
        if line["step"] != step or name not in line:
            return line
        return {**line, **changes} if changes else None

    return edit


def state(arm: str, step: int, change: Callable[[Tensor], Tensor]) -> Forge:
    """Return what changes a snapshot, and then all that the arm's log says of its snapshots."""

    def forge(study: Path) -> None:
        run, base = run_of(study, arm), run_of(study, "baseline")
        weights = {name: change(x) for name, x in read_snapshot(run.snapshot(step)).items()}
        write_snapshot(run.snapshot(step), weights)
        RunFiles(run, read_manifest(run.manifest)).add(run.snapshot(step))
        log(arm, lambda line: _measured_anew(line, run, base))(study)

    return forge


def _measured_anew(line: dict[str, Any], run: RunPaths, base: RunPaths) -> dict[str, Any]:
    if WEIGHT_HISTOGRAM in line:
        state = read_snapshot(run.snapshot(line["step"]))
        return {**line, WEIGHT_HISTOGRAM: weight_counts(state.values())}
    if DRIFT_FROM not in line:
        return line
    paths = [each.snapshot(line["step"]) for each in (run, base)]
    found = drift(*map(read_snapshot, paths))
    sums = [
        read_manifest(each.manifest).files[each.name_of(path)]
        for each, path in zip((run, base), paths, strict=True)
    ]
    values = {
        drift_name(n, metric): x for n, drifts in found.items() for metric, x in drifts.items()
    }
    return {**line, **values, DRIFT_OF: sums[0], DRIFT_FROM: sums[1]}


def distances(study: Path) -> None:
    path = StudyPaths(study).distances(0)
    content = read_sealed(path, "")
    for step in content["steps"]:
        rows = step["weights"]["rows"]
        step["weights"]["rows"] = [[3 * x for x in row] for row in rows]
    write_sealed(path, content)


def left_out(study: Path) -> None:
    """Name a vector in the end of an arm's distances, and leave all distances as they are."""
    path = StudyPaths(study).distances(0)
    content = read_sealed(path, "")
    for step in content["steps"]:
        rows = step["weights"]["rows"]
        none = [[0.0] * len(rows) for _ in rows]
        forged = {"asked": ["baseline"], "values": {"no.bias": [[0, 3]]}}
        step["weights"]["left_out"] = {**forged, "kept_rows": rows, "left_rows": none}
    write_sealed(path, content)


def a_copied_seed(study: Path) -> None:
    for arm in ARMS:
        shutil.copytree(study / arm / "seed-0", study / arm / "seed-1")
        path = RunPaths.for_run(study, arm, 1).manifest
        write_manifest(path, replace(read_manifest(path), seed=1))
    plan(lambda config, arms: config.update(seeds=[0, 1]))(study)


def without_an_entry(study: Path) -> None:
    path = StudyPaths(study).study
    content = read_sealed(path, "")
    content["arms"] = [arm for arm in content["arms"] if arm["name"] != "lr"]
    write_sealed(path, content)


def another_label(study: Path) -> None:
    """Put the run of one change in the place of another one, under that one's label."""
    label = read_manifest(run_of(study, "lr").manifest)
    shutil.rmtree(study / "lr")
    shutil.copytree(study / "fp32", study / "lr")
    claims = {key: getattr(label, key) for key in ("arm", "axis", "diff", "config", "role")}
    manifest("lr", **claims)(study)


def an_unlisted_log(study: Path) -> None:
    log("lr", at(3, "train/loss", **{"train/loss": 1.0}))(study)
    files = read_manifest(run_of(study, "lr").manifest).files
    manifest("lr", files={n: sha for n, sha in files.items() if n != "metrics.jsonl"})(study)


OWN = "contradicts itself: "
FORGED: dict[str, tuple[Forge, str]] = {
    "a candidate as a rerun": (role("lr", "rerun"), "must not be rerun in an arm that changes"),
    "a candidate as a nudge": (role("lr", "nudge"), "must not be nudge in an arm that changes"),
    "a candidate as the reference": (
        role("lr", "reference"),
        "lr, seed 0, was there as candidate when it was trained, the study has it as reference",
    ),
    "the reference as a candidate": (role("fp32", "candidate"), "was there as reference"),
    "a rerun as a candidate": (role("rerun", "candidate"), "was there as rerun when"),
    "the axis": (plan(lambda c, arms: arms["lr"].update(axis="flags")), "a change of flags.lr"),
    "the base": (
        plan(lambda config, arms: config["base"]["flags"].update(lr="0.1")),
        "baseline, seed 0, was trained with flags.lr = None, the study's base has '0.1'",
    ),
    "an entry taken out": (without_an_entry, "lr/seed-0 has ended and study.json does not list it"),
    "a loss of a rerun": (
        log("rerun", at(3, "train/loss", **{"train/loss": 1.0})),
        "train/loss at step 3 is 3.93",
    ),
    "a loss": (log("lr", at(3, "train/loss", **{"train/loss": 1.0})), OWN + "hashes.record is"),
    "no loss": (log("lr", at(3, "train/loss")), OWN + "hashes.record is"),
    "an unlisted log": (an_unlisted_log, OWN),
    "no batch": (log("lr", at(3, "batch_hash")), "has no batch of update 3, of 5"),
    "the histogram": (
        log("lr", at(0, "weights/all/nonfinite", **{"weights/all/nonfinite": 3.0})),
        "weights/all/nonfinite at step 0 is 3.0 on record, 0.0 from the snapshot",
    ),
    "the start": (state("lr", 0, lambda x: x + 1), "the weights at step 0 is 0176"),
    "a state between": (state("lr", 2, lambda x: x + 1), OWN + "hashes.record is"),
    "the last state": (state("lr", 5, lambda x: x + 1), OWN + "hashes.final_weights is"),
    "a rerun's state": (state("rerun", 2, lambda x: x + 1), "the weights at step 2 is"),
    "a nudge that is none": (
        state("nudge", 0, lambda x: x * 0),
        "units in the last place, by a nudge of 1",
    ),
    "an early end": (manifest("lr", state="diverged", step=2), OWN + "hashes.batches is"),
    "a divergence": (manifest("lr", state="diverged"), "losses of the log are not all bad"),
    "another command": (
        resolved("lr", command=[*words("plain.py"), "--lr", "0.6"]),
        "the command that was run has",
    ),
    "no command": (resolved("lr", command=[]), OWN + "hashes.record is"),
    "other names": (resolved("lr", names=["a"]), "resolved.names are 1, a, the last snapshot has"),
    "an observer": (
        manifest("lr", observer={"equal": True, "watched": "f"}),
        "observer.watched is f, hashes.final_weights",
    ),
    "another label": (another_label, "the command that was run has"),
    "a copied seed": (a_copied_seed, "seed 1, ends in the same bits as seed 0: it is one run"),
    "distances": (distances, "the distance of weights between"),
    "what is left out": (
        left_out,
        "leaves out values 0 to 2 of no.bias, noise moves no values by the files",
    ),
}


def test_the_study_that_is_forged_is_sound(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = verify(study, capsys)
    assert (code, "4 of 4 planned pairs keep the contract" in said) == (0, True), said
    assert "losses and what a probe saw are the runs' own word" in said


@pytest.mark.parametrize("name", FORGED)
def test_a_forgery_in_right_checksums_does_not_verify(
    name: str, study: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    forge, expected = FORGED[name]
    forge(study)
    code, said = verify(study, capsys)
    assert code == 1, said
    assert expected in said


def test_a_role_that_an_older_record_does_not_tell_is_unproven(
    study: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known = read_manifest(run_of(study, "fp32").manifest).hashes
    older = {name: sha for name, sha in known.items() if name != "record"}
    manifest("fp32", role="", hashes=older)(study)
    code, said = verify(study, capsys)
    assert code == 1
    assert "unproven: not on record: that fp32, seed 0, is there as reference" in said
    assert "3 of 4 planned pairs" in said


def test_a_baseline_alone_proves_nothing_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = Recording(tmp_path, words("plain.py", "--steps", "2"))
    assert study.record("baseline") == 0
    code, said = verify(study.folder, capsys)
    assert code == 2
    assert "nothing is proven: the study has no arm beside its baseline" in said
    assert "stability record --arm NAME" in said
    # an arm that is refused is none
    assert study.record("other", "--data-seed", "9") == 1
    code, said = verify(study.folder, capsys)
    assert code == 1
    assert "nothing is proven" in said
    assert "other/seed-0 is no part of the study, failed: pair contract: other: batch 1" in said
    assert code_of("verify", str(study.folder), "--json") == 1
    (left_out,) = json.loads(capsys.readouterr().out)["left_out"]
    assert left_out.startswith("other/seed-0 is no part of the study")
