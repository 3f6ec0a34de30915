"""Faults planted on an attention that was put into somebody's script, and what becomes of them."""

import os
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from stability.analysis.assay import arm_assay
from stability.analysis.study_records import read_study
from stability.analysis.verdict import judge_arms
from stability.config.commands import GRADIENT_NEEDS
from stability.config.study import PolicyConfig
from stability.records.assay import read_assay, write_assay
from stability.records.manifest import read_manifest, write_manifest
from stability.records.metric_log import read_metrics
from stability.records.metric_names import deviation_name
from stability.records.paths import StudyPaths
from tests.stability.recorder.recording import Recording, code_of

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[3] / "examples"

LOOKED = ("--probe", "flash:fa2", "--every", "4", "--gradient-every", "4")
SWAPPED = ("--attention", "flash:fa2", *LOOKED)
BROKEN = ("--attention", "flash:fa2+out_gain_1pct", *LOOKED)
SHORT = ("--bf16", "--steps", "24", "--depth", "1")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    """A study of one seed, its candidate last, that tests only read."""
    folder = tmp_path_factory.mktemp("recorded")
    script = folder / "train.py"
    script.write_text((EXAMPLES / "gpt.py").read_text(encoding="utf-8"), encoding="utf-8")
    study = Recording(folder, [sys.executable, str(script), *SHORT])
    assert study.record("baseline") == 0
    assert study.record("early", options=SWAPPED) == 0
    assert study.record("unlooked", options=("--attention", "flash:fa2")) == 0
    assert study.record("broken", options=BROKEN) == 0
    assert study.record("fa2", options=SWAPPED) == 0
    return study


@pytest.fixture
def study(recorded: Recording, tmp_path: Path) -> Recording:
    """A copy of it, to be spoiled."""
    shutil.copytree(recorded.folder, tmp_path / "study")
    shutil.copy(recorded.out / "train.py", tmp_path)
    return Recording(tmp_path, recorded.command)


def said_of(study: Recording, arm: str) -> str:
    found = read_study(study.folder)
    return arm_assay(found, found.arm(arm), PolicyConfig()).sentence


def verify(study: Recording, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    capsys.readouterr()
    code = code_of("verify", str(study.folder))
    return code, re.sub(r"\s+", " ", capsys.readouterr().out)


def test_faults_are_planted_on_the_candidate_and_none_of_its_bits_is_changed(
    recorded: Recording, capsys: pytest.CaptureFixture[str]
) -> None:
    record = read_assay(recorded.folder, "fa2")
    assert record is not None
    assert list(record.parents) == [
        f"snapshots/step-{step:08d}.safetensors" for step in (10, 20, 24)
    ]
    by_name = {fault.name: fault for fault in record.faults}
    assert len(by_name) == 11
    gains = by_name["dk_gain"].operator["dk"]["gain"]
    assert len(gains) == 3, "one layer, in as many looks"
    assert sum(gains) / 3 == pytest.approx(5e-3, rel=0.3)
    assert by_name["dk_gain"].operator["dq"] == record.own.operator["dq"]
    assert min(by_name["dropped_key"].ratios) > 2
    assert by_name["dropped_key"].share_looks < by_name["bias_tenth_ulp"].share_looks
    assert all(len(fault.own_ratios) == fault.share_looks for fault in record.faults)
    assert max(by_name["dropped_key"].own_ratios) < 2
    manifest = recorded.manifest("fa2")
    assert manifest.hashes["final_weights"] == recorded.manifest("early").hashes["final_weights"]
    assert read_assay(recorded.folder, "broken") is None, "it is a fault itself"
    assert read_assay(recorded.folder, "early") is None, "no arm was broken on purpose then"
    code, said = verify(recorded, capsys)
    assert code == 0, said


def test_the_arm_that_is_broken_trains_with_its_fault(recorded: Recording) -> None:
    manifest = recorded.manifest("broken")
    assert (manifest.axis, manifest.diff["attention.fault"]) == (
        "attention",
        [None, "out_gain_1pct"],
    )
    broken = read_study(recorded.folder).arm("broken")
    assert broken is not None
    assert broken.role == "broken"
    gains = {arm: _gain_of_out(recorded, arm) for arm in ("fa2", "broken")}
    assert gains == pytest.approx({"fa2": 0.0, "broken": 1e-2}, abs=5e-4)


def _gain_of_out(study: Recording, arm: str) -> float:
    found = read_metrics(study.paths(arm).metrics)[deviation_name("blocks.0", "out", "gain")]
    return found.values[-1]


def test_a_fault_near_a_limit_is_looked_at_again_at_more_batches(
    study: Recording, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stability.study.foreign_assay.FIRST_LOOKS", 3)
    whole = read_assay(study.folder, "fa2")
    assert whole is not None
    assert study.record("early", options=SWAPPED) == 0
    told = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert "neither found nor surely missed at 3 looks, so its command runs once more" in told
    record = read_assay(study.folder, "early")
    assert record is not None
    looks = {fault.name: fault.share_looks for fault in record.faults}
    assert looks["dropped_key"] == 3 < looks["bias_tenth_ulp"]
    # in its first looks a process gives the same as in one that begins with more of them
    for fault, other in zip(record.faults, whole.faults, strict=True):
        count = min(len(fault.ratios), len(other.ratios))
        assert fault.ratios[:count] == other.ratios[:count]
        assert fault.operator == other.operator
    # three snapshots, and no batch twice at one of them
    assert max(looks.values()) <= 72


@pytest.mark.long
def test_one_that_was_recorded_too_early_is_assayed_when_it_is_asked_for_again(
    study: Recording, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said_of(study, "early") == "no faults were planted on it; record it again"
    assert study.record("early", options=SWAPPED) == 0
    told = capsys.readouterr().out
    assert "on record already" in told
    assert "planting known faults on early, to see whether the study would find them" in told
    record = read_assay(study.folder, "early")
    assert record is not None
    assert len(record.faults) == 11
    assert study.record("early", options=SWAPPED) == 0
    assert "planting" not in capsys.readouterr().out, "it is known now"


def test_where_nothing_looks_no_fault_is_planted_and_the_verdict_says_so(
    recorded: Recording,
) -> None:
    assert said_of(recorded, "unlooked") == (
        "no faults were planted on it: nothing looks at the whole model's gradient there; give it "
        f"a probe with gradient_every, for which {GRADIENT_NEEDS}"
    )


@pytest.mark.long
def test_faults_are_not_planted_on_another_training(
    study: Recording, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # a script that was edited before is refused: this one is edited once that was looked at
    monkeypatch.setattr("stability.study.edited_sources.refuse_edited", lambda run: None)
    script = Path(study.command[1])
    source = script.read_text(encoding="utf-8")
    try:
        script.write_text(f"{source}# edited\n", encoding="utf-8")
        assert study.record("early", options=SWAPPED) == 0
        assert "no assay: early, run again, must have the module.__main__" in (
            capsys.readouterr().out
        )
        said = said_of(study, "early")
        assert said.startswith("no faults could be planted on it: early, run again, must have the")
        other = source.replace("(8,)).tolist()", "(8,)).sub(1).abs().tolist()")
        script.write_text(other, encoding="utf-8")
        assert study.record("early", options=SWAPPED) == 0
        assert "must be given the batches on record, batch 1 is another" in said_of(study, "early")
        script.write_text("raise SystemExit('no disk')", encoding="utf-8")
        assert study.record("early", options=SWAPPED) == 0
        assert "the command ended with exit code 1: no disk" in said_of(study, "early")
    finally:
        script.write_text(source, encoding="utf-8")
    assert study.record("early", options=SWAPPED) == 0
    record = read_assay(study.folder, "early")
    assert record is not None
    assert (record.own.error, len(record.faults)) == ("", 11), "it is tried again"


def another_figure(study: Recording) -> None:
    record = read_assay(study.folder, "fa2")
    assert record is not None
    write_assay(study.folder, replace(record, faults=record.faults[:-1]))


def an_edited_byte(study: Recording) -> None:
    path = StudyPaths(study.folder).assay("fa2")
    path.write_text(path.read_text(encoding="utf-8").replace("0.00", "0.01", 1), encoding="utf-8")


def of_another_arm(study: Recording) -> None:
    folder = StudyPaths(study.folder)
    shutil.copy(folder.assay("fa2"), folder.assay("early"))


def no_file(study: Recording) -> None:
    StudyPaths(study.folder).assay("fa2").unlink()


def other_weights(study: Recording) -> None:
    path = study.paths("fa2").manifest
    manifest = read_manifest(path)
    files = {name: "f" * 64 if "24" in name else sha256 for name, sha256 in manifest.files.items()}
    write_manifest(path, replace(manifest, files=files))


FORGED = {
    "figures": (another_figure, "fa2: its assay is another file than the one that its run lists"),
    "a byte": (an_edited_byte, "fa2.json"),
    "another arm's": (of_another_arm, "early: faults were planted on fa2, not on it"),
    "none": (no_file, "fa2: its run lists an assay, which is missing"),
    "weights": (other_weights, "fa2: faults were planted on other weights than those on record"),
}


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_assay_does_not_verify(
    name: str, study: Recording, capsys: pytest.CaptureFixture[str]
) -> None:
    forge, expected = FORGED[name]
    forge(study)
    code, said = verify(study, capsys)
    assert code != 0
    assert expected in said


WRONG = """
import torch

def attend(q, k, v, *, causal, scale=None):
    scale = 1.02 * (scale or q.shape[-1] ** -0.5)
    return torch.nn.functional.softmax(
        (scale * (q.float() @ k.float().mT)).masked_fill(
            ~torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(), float("-inf")
        ), -1
    ).matmul(v.float()).to(q.dtype)
"""


LOSS_OUTSIDE = (
    (
        "        if y is None:\n            return logits\n"
        "        return logits, F.cross_entropy(logits.float().flatten(0, 1), y.flatten())\n",
        "        return logits\n",
    ),
    (
        "        return model(tokens[:, :-1], tokens[:, 1:])[1]\n",
        "        logits = model(tokens[:, :-1])\n"
        "        return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())\n",
    ),
)
"""What makes of the example a script whose model returns logits alone."""


@pytest.fixture(scope="module", params=["returned", "outside"])
def judged(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The study of `examples`, and an arm beside its own: a wrong attention of a user's.

    The loss is what the model returns, or is computed outside of it.
    """
    folder = tmp_path_factory.mktemp("judged")
    shutil.copytree(EXAMPLES, folder / "examples")
    # with a constant in the model, which is in no snapshot that a fault is planted at
    script = folder / "examples" / "gpt.py"
    made = "        self.mlp = nn.Sequential("
    with_mask = f'        self.register_buffer("mask", torch.ones(3))\n{made}'
    text = script.read_text(encoding="utf-8").replace(made, with_mask)
    for inside, outside in LOSS_OUTSIDE if request.param == "outside" else ():
        assert inside in text
        text = text.replace(inside, outside)
    script.write_text(text, encoding="utf-8")
    (folder / "examples" / "mine.py").write_text(WRONG, encoding="utf-8")
    content = yaml.safe_load((folder / "examples" / "verdict.yaml").read_text(encoding="utf-8"))
    content["arms"]["wrong"] = {**content["arms"]["fa2"], "attention": "mine:attend"}
    (folder / "study.yaml").write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
        assert code_of("run", "study.yaml", "--wandb", "disabled") == 0
    return folder / "runs" / content["name"]


@pytest.mark.long
def test_a_swapped_attention_passes_where_its_faults_are_found_and_a_wrong_one_fails(
    judged: Path,
) -> None:
    study = read_study(judged)
    verdict = judge_arms(study, study.policy)
    right, wrong, broken = (verdict.arm(name) for name in ("fa2", "wrong", "broken"))
    assert right is not None
    assert right.outcome == "PASS", right.sentence
    assert "all 11 planted faults were found: 11 at the operator, 7 in the gradient" in (
        right.sentence
    )
    is_outside = "y is None" not in (judged.parents[1] / "examples" / "gpt.py").read_text()
    assert ("the gradient level is seen in part" in right.sentence) == is_outside
    assert not verdict.exploratory
    assert wrong is not None
    assert wrong.outcome == "FAIL", wrong.sentence
    assert read_assay(judged, "wrong") is None, "it fails already"
    assert broken is not None
    assert broken.answer == "FAIL, as it must"


@pytest.mark.long
def test_a_study_that_misses_a_planted_fault_passes_nothing(judged: Path) -> None:
    study = read_study(judged)
    arm = judge_arms(study, replace(study.policy, max_gain=6e-3)).arm("fa2")
    assert arm is not None
    assert arm.outcome == "NO ASSAY"
    assert "planted faults were missed: scale_gain at the operator" in arm.sentence
