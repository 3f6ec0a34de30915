"""Scripts of each kind, recorded by the command line alone: no bit changes, and pairs are pairs."""

from pathlib import Path

import pytest

from stability.records.witness import read_witness
from tests.sampling import others_long
from tests.stability.recorder.recording import (
    Calling,
    Recording,
    bits_of,
    code_of,
    launched,
    run_alone,
    words,
)

KINDS = {
    "plain": words("plain.py"),
    "accumulated and scaled": words("scaled.py"),
    "Muon and AdamW": words("two_optimizers.py"),
    "compiled": words("compiled.py"),
    "compiled in place": words("compiled.py", "--in-place"),
    "checkpointed": words("checkpointed.py"),
    "checkpointed, reentrant": words("checkpointed.py", "--reentrant"),
    "averaged and evaluated": words("averaged.py"),
    "given its own state": words("recurrent.py"),
    "adversaries": words("recurrent.py", "--adversaries"),
    "two ranks, DDP": words("ranks.py", "--layout", "ddp", ranks=2),
    "two ranks, FSDP2": words("ranks.py", "--layout", "fsdp", ranks=2),
    "Hugging Face": words("hugging_face.py"),
    "Lightning": words("lightning_fit.py"),
    "Accelerate": words("accelerated.py"),
    "accelerate launch, one process": launched("accelerated.py"),
    "accelerate launch, two ranks": launched("accelerated.py", ranks=2),
}
UPDATES = {
    "plain": 12,
    "Muon and AdamW": 7,
    "accelerate launch, two ranks": 3,
    "Lightning, two ranks": 4,
}
SLOW = ("averaged and evaluated", "Lightning")
"""What CI runs of them besides the first."""


def _mark(kind: str) -> pytest.MarkDecorator:
    return pytest.mark.slow if kind in SLOW else pytest.mark.long


@pytest.mark.parametrize(
    "kind",
    [kind if kind == "plain" else pytest.param(kind, marks=_mark(kind)) for kind in KINDS],
)
def test_a_script_is_recorded_and_paired(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hold_to_a_study(Recording(tmp_path, KINDS[kind]), UPDATES.get(kind, 6), capsys)


@pytest.mark.slow
def test_the_lack_of_deterministic_algorithms_is_a_change(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = Recording(tmp_path, words("plain.py"))
    off = ("--deterministic", "false")
    assert study.record("baseline") == 0
    assert study.record("free", options=off) == 0
    assert study.manifest("free").axis == "deterministic"
    assert "deterministic" not in study.manifest("baseline").config
    assert code_of("verify", str(study.folder)) == 0
    capsys.readouterr()
    # beside another change it is refused before the command starts
    assert study.record("both", "--lr", "0.1", options=off) == 2
    assert "differs in flags.lr, deterministic" in " ".join(capsys.readouterr().err.split())
    assert not study.paths("both").root.exists()


DOORS = {
    "call": words("calls.py"),
    "call, DDP": words("calls.py", "--layout", "ddp", ranks=2),
    "call, FSDP2": words("calls.py", "--layout", "fsdp", ranks=2),
    "Lightning": words("lightning_fit.py"),
    "Hugging Face": words("hugging_face.py"),
    "Lightning, two ranks": words("lightning_fit.py", ranks=2),
    "Hugging Face, two ranks": words("hugging_face.py", ranks=2),
}


@pytest.mark.slow
@pytest.mark.parametrize("door", others_long(DOORS, slow=["Lightning"]))
def test_a_script_that_opens_a_door_is_recorded_and_paired(
    door: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hold_to_a_study(Calling(tmp_path, DOORS[door]), UPDATES.get(door, 6), capsys)


def hold_to_a_study(study: Recording, updates: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Record four arms: no bit changes, pairs are pairs, and the ladder and report are made."""
    alone = run_alone([*study.command, "--seed", "0", "--bf16"])
    capsys.readouterr()
    assert study.record("baseline", "--bf16") == 0
    assert bits_of(capsys.readouterr().out) == alone, "recording changed a bit"
    assert study.record("rerun", "--bf16") == 0
    assert study.record("nudge", "--bf16", options=("--nudge", "1")) == 0
    assert study.record("fp32", options=("--role", "reference")) == 0
    capsys.readouterr()

    baseline = study.manifest("baseline")
    assert (baseline.state, baseline.step, len(study.batches("baseline"))) == (
        "finished",
        updates,
        updates,
    )
    assert set(study.drift("rerun").values()) == {0.0}
    assert study.manifest("rerun").hashes["final_weights"] == baseline.hashes["final_weights"]
    for arm in ("nudge", "fp32"):
        assert study.batches(arm) == study.batches("baseline")
        assert study.manifest(arm).hashes["init_weights"] == baseline.hashes["init_weights"]
        assert 0 < study.drift(arm)[updates] < 0.2
    assert study.drift("nudge")[0] < 1e-6, "one unit in the last place"

    assert code_of("show", str(study.folder)) == 0
    ladder = capsys.readouterr().out
    assert "0 (exact)" in ladder
    assert "--bf16: given" in ladder
    is_compiled = any("compiled.py" in word for word in study.command)
    hold_to_witnesses(study, is_compiled=is_compiled)
    assert code_of("verify", str(study.folder)) == int(is_compiled)
    proof = " ".join(capsys.readouterr().out.split())
    if is_compiled:
        assert "3 unproven" in proof
        assert "torch.compile was called, and what a compiled graph multiplies is not" in proof
    else:
        assert "3 of 3 planned pairs keep the contract" in proof
        assert "linear products: BF16 -> FP32" in proof
    assert "3 drifts computed anew from snapshots, as on record" in proof
    assert code_of("report", str(study.folder)) == 0
    assert "--bf16: given" in (study.folder / "report.html").read_text(encoding="utf-8")


def hold_to_witnesses(study: Recording, *, is_compiled: bool) -> None:
    """Every arm bears witness: one and the same for a rerun, of other products for other flags."""
    found = {
        arm: read_witness(study.paths(arm).witness)
        for arm in ("baseline", "rerun", "nudge", "fp32")
    }
    assert found["rerun"] == found["baseline"]
    assert found["nudge"].rows == found["baseline"].rows
    for arm, dtype in (("baseline", "bfloat16"), ("fp32", "float32")):
        witness = found[arm]
        (stretch,) = witness.all
        assert stretch.answers["at_start"] == stretch.answers["at_end"]
        assert stretch.answers["at_start"]["fp32_product_bits"] > 17
        assert "commit" in stretch.git
        if is_compiled:
            assert (witness.rows, stretch.steps) == ([], [])
            continue
        made = study.manifest(arm).step
        assert set(stretch.steps) >= {update for update in (0, 1, 4) if update < made}
        linear = [row for row in witness.rows if row.part == "linear"]
        assert {row.during for row in linear} == {"forward", "backward"}
        assert {each for row in linear for each in row.operands} == {dtype}
        names = study.manifest(arm).resolved["names"]
        assert all(any(name.startswith(row.module) for name in names) for row in linear)
        assert not [row for row in witness.rows if row.part == "unowned"]


def test_a_snapshot_past_the_end_is_told_and_not_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before the command starts where its end is given, and with the record where it is not."""
    study = Recording(tmp_path, words("plain.py", "--steps", "3"))
    given = ("--snapshots", "2,50")
    assert study.record("baseline", options=(*given, "--steps", "3")) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "record: snapshots must not lie beyond the end of training, step 3" in said
    assert not study.folder.exists()
    assert study.record("baseline", options=given) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "no snapshot after 50 updates, as asked for: training ended after 3" in said
