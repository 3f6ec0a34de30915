"""What `verify` finds unproven of a pair, every reader of its study is told, in the same words."""

import json
import shutil
from pathlib import Path

import pytest

from stability.analysis.drift_notes import unproven_of
from stability.analysis.pair_contract import prove_pair
from stability.analysis.study_records import read_study
from stability.records.manifest import read_manifest
from stability.records.metric_names import BATCH_HASH, BATCH_LABELS, BATCH_ORDER
from stability.report.page.html import prose
from tests.stability.recorder.recording import code_of, recorded_plain
from tests.stability.recorder.test_consistent_forgeries import Forge, log, resolved
from tests.stability.recorder.test_forgeries import run_of

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A baseline and one other arm, that tests only read."""
    arms = {"baseline": ((), ()), "lr": (("--lr", "0.5"), ())}
    return recorded_plain(tmp_path_factory.mktemp("told"), arms)


@pytest.fixture
def study(recorded: Path, tmp_path: Path) -> Path:
    return shutil.copytree(recorded, tmp_path / "study")


def entry(arm: str, name: str, value: str) -> Forge:
    """Return what puts a text into the line of an arm's second batch."""
    return log(
        arm,
        lambda line: {**line, name: value} if line["step"] == 2 and BATCH_HASH in line else line,
    )


def both(*forges: Forge) -> Forge:
    def forge(study: Path) -> None:
        for each in forges:
            each(study)

    return forge


def in_both(name: str, first: str, second: str) -> Forge:
    return both(entry("baseline", name, first), entry("lr", name, second))


def launched_unknown(study: Path) -> None:
    resolved("lr", launched={})(study)


KINDS: dict[str, tuple[Forge, str]] = {
    "rows in another order": (
        in_both(BATCH_ORDER, json.dumps("1 a"), json.dumps("1 b")),
        "the same batches (that of step 2 has the same rows in another order)",
    ),
    "labels in one alone": (
        in_both(BATCH_LABELS, json.dumps({"one": "1"}), json.dumps({"other": "2"})),
        "the same labels (batch 2 has the `one` in one, the `other` in the other)",
    ),
    "other target, in floating point": (
        in_both(
            BATCH_LABELS,
            json.dumps({"target, in floating point": "1"}),
            json.dumps({"target, in floating point": "2"}),
        ),
        "the same targets (those of batch 2 in `target, in floating point` differ",
    ),
    "labels that nobody saw": (
        resolved("lr", untold=["a Thing"]),
        "the same labels (a Thing was not seen)",
    ),
    "a doubt of the baseline alone": (
        resolved("baseline", doubts=["what was done in the dark"]),
        "what was done in the dark",
    ),
    "a start that is not on record": (launched_unknown, "what the process was started with"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_doubt_is_told_by_every_reader(
    kind: str, study: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    forge, said = KINDS[kind]
    forge(study)
    proof = prove_pair(run_of(study, "baseline"), run_of(study, "lr"))
    assert unproven_of(read_study(study).arms) == proof.unproven
    assert said in " ".join(proof.unproven)
    assert code_of("verify", str(study)) == 1
    capsys.readouterr()
    assert code_of("show", str(study)) == 0
    assert f"unproven: {said}" in " ".join(capsys.readouterr().out.split())
    assert code_of("report", str(study)) == 0
    page = (study / "report.html").read_text(encoding="utf-8")
    assert prose(f"unproven: {said}") in page


def test_a_study_without_a_doubt_tells_none(study: Path) -> None:
    assert unproven_of(read_study(study).arms) == []
    assert read_manifest(run_of(study, "lr").manifest).resolved["doubts"] == []
