"""Two ranks on gloo: an observer of one, a nudge that falls alike in any layout, one that dies."""

import re
from pathlib import Path

import pytest

from stability.records.manifest import ENDED
from stability.records.run_files import read_run_snapshot
from stability.records.sealed_json import read_sealed
from tests.stability.recorder.recording import SCRIPTS, Calling, Recording, code_of, words

CHECKED = ("--check-observer", "true")


def changed(folder: Path, script: str, *edits: tuple[str, str]) -> str:
    """Write a script of ours with edits, and return its path."""
    source = (SCRIPTS / script).read_text()
    for before, after in edits:
        assert before in source
        source = source.replace(before, after)
    path = folder / script
    path.write_text(source)
    return str(path)


def said(capfd: pytest.CaptureFixture[str]) -> str:
    """Return what was printed since the last call, on both streams, as one line."""
    captured = capfd.readouterr()
    return re.sub(r"\s+", " ", captured.out + captured.err)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["ddp", pytest.param("fsdp", marks=pytest.mark.long)])
def test_two_ranks_end_in_the_same_bits_unobserved(layout: str, tmp_path: Path) -> None:
    study = Recording(tmp_path, words("ranks.py", "--layout", layout, ranks=2))
    assert study.record("baseline", options=CHECKED) == 0
    observer = study.manifest("baseline").observer
    assert observer["equal"] is True
    assert observer["watched"] == study.manifest("baseline").hashes["final_weights"]
    assert observer["steps"] == 6
    assert list(study.manifest("baseline").resolved["rank_ends"]) == ["1"]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["ddp", pytest.param("fsdp", marks=pytest.mark.long)])
def test_what_observing_changes_on_the_second_rank_alone_does_not_count(
    layout: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    # under DDP no gradient of the last update has told the first rank of it
    moved = (
        "for _ in range(6):\n",
        "for update in range(6):\n"
        '    if update == 5 and rank and os.environ.get("STABILITY_OBSERVES") == "1":\n'
        '        optimizer.param_groups[0]["lr"] = 0.011\n',
    )
    script = changed(tmp_path, "ranks.py", moved)
    study = Recording(tmp_path / "runs", words(script, "--layout", layout, ranks=2))
    assert study.record("baseline", options=CHECKED) == 1
    where = " on rank 1" if layout == "ddp" else ""  # the first rank gathers what is sharded
    assert f"it must end in the same bits, differs{where} after 6 updates" in said(capfd)
    manifest = study.manifest("baseline")
    assert (manifest.state, manifest.observer["equal"]) == ("failed", False)
    assert manifest.observer.get("ranks") == (["1"] if layout == "ddp" else None)


@pytest.mark.slow
def test_a_rerun_that_another_rank_alone_ends_otherwise_is_told_and_not_proven(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    unsteady = (
        "for _ in range(6):\n",
        "for update in range(6):\n"
        "    if update == 5 and rank:\n"
        '        optimizer.param_groups[0]["lr"] *= 1 + int.from_bytes(os.urandom(2)) / 2**20\n',
    )
    script = changed(tmp_path, "ranks.py", unsteady)
    study = Recording(tmp_path / "runs", words(script, ranks=2))
    assert study.record("baseline") == 0
    capfd.readouterr()
    assert study.record("rerun") == 0
    noted = "the script is not deterministic: its rerun ends in other bits on rank 1 alone"
    assert noted in said(capfd)
    assert study.drift("rerun")[6] == 0
    assert code_of("verify", str(study.folder)) == 1
    assert "what rank 1 held at the end" in said(capfd)


NORM = ("nn.GELU(), nn", "nn.BatchNorm1d(16), nn")
"""A model whose buffers every rank has of its own batches."""
ALONE = ('if asked.layout == "ddp":', 'if asked.layout == "never":')
"""No rank's gradients come to another one, as between the averages of local SGD."""


@pytest.mark.long
def test_weights_of_another_rank_that_no_record_has_make_a_pair_unproven(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, edits in (("together", [NORM]), ("apart", [NORM, ALONE])):
        (tmp_path / name).mkdir()
        script = changed(tmp_path / name, "ranks.py", *edits)
        study = Recording(tmp_path / name / "runs", words(script, ranks=2))
        assert study.record("baseline") == 0
        assert study.record("rerun") == 0
        assert study.drift("rerun")[6] == 0
        capfd.readouterr()
        assert code_of("verify", str(study.folder)) == (0 if name == "together" else 1)
        doubt = "unproven: not on record: the weights of rank 1: they are others than the first's"
        assert (doubt in said(capfd)) == (name == "apart")


@pytest.mark.long
@pytest.mark.parametrize("layout", ["fsdp", pytest.param("ddp", marks=pytest.mark.long)])
def test_a_nudge_and_a_given_start_fall_alike_on_two_ranks_and_in_one_process(
    layout: str, tmp_path: Path
) -> None:
    starts = {}
    for name, ranks in ((layout, 2), ("one", 1)):
        out = tmp_path / name
        study = Recording(out, words("ranks.py", "--layout", name, ranks=ranks))
        assert study.record("baseline") == 0
        assert study.record("nudge", options=("--nudge", "3")) == 0
        assert study.record("given", "--other-start", options=("--same-start", "true")) == 0
        assert study.manifest("given").resolved["start"] == "given"
        for arm in ("nudge", "given"):
            starts[name, arm] = read_run_snapshot(study.paths(arm), 0)
        starts[name, ""] = read_run_snapshot(study.paths("baseline"), 0)
    assert starts["one", ""].keys() == starts[layout, ""].keys()
    for name, value in starts["one", ""].items():
        for arm in ("", "nudge", "given"):
            assert starts[layout, arm][name].equal(starts["one", arm][name]), (name, arm)
        moved = starts[layout, "nudge"][name]
        assert starts[layout, "given"][name].equal(value)
        # with a coin of its own for each shard both halves would fall alike
        coins = moved > value
        assert not moved.eq(value).any()
        assert len(coins) < 16 or not coins[: len(coins) // 2].equal(coins[len(coins) // 2 :])


DEATHS = {
    "error": (
        'raise RuntimeError("the disk is full")',
        "3 updates: RuntimeError: the disk is full",
    ),
    "signal": ("os.kill(os.getpid(), 9)", "it was killed by signal 9"),
    "exit": ("raise SystemExit(0)", "after 3 updates"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "death"),
    [
        ("ddp", "error"),
        *[
            pytest.param(*each, marks=pytest.mark.long)
            for each in [("fsdp", "error"), ("ddp", "signal"), ("fsdp", "signal"), ("ddp", "exit")]
        ],
    ],
)
def test_a_rank_that_dies_in_the_middle_is_named_and_nothing_counts(
    layout: str, death: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    how, sentence = DEATHS[death]
    loop = f"for update in range(6):\n    if rank and update == 3:\n        {how}\n"
    script = changed(tmp_path, "ranks.py", ("for _ in range(6):\n", loop))
    study = Recording(tmp_path / "runs", words(script, "--layout", layout, ranks=2))
    assert study.record("baseline") == 1
    text = said(capfd)
    assert "the command ended with exit code 1: rank 1 ended first" in text
    assert sentence in text
    assert study.manifest("baseline").state == "failed"
    assert "rank 1 ended first" in study.manifest("baseline").message
    assert not list(study.paths("baseline").root.rglob("*.safetensors"))
    assert not (study.folder / "study.json").exists()
    assert not list(study.folder.rglob(".spool-*"))


@pytest.mark.long
def test_a_run_whose_second_rank_dies_while_it_tells_of_itself_does_not_count(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = changed(
        tmp_path, "calls.py", ("if update == asked.fails:", "if rank and update == asked.fails:")
    )
    study = Calling(tmp_path, words(script, "--layout", "fsdp", "--fails", "3", ranks=2))
    assert study.record("baseline") == 1
    assert "[rank1]: RuntimeError: the disk is full" in said(capfd)
    # torchrun ends the first rank, which writes, before or after it can say that it failed
    assert study.manifest("baseline").state not in ENDED
    assert not (study.folder / "study.json").exists()


@pytest.mark.slow
def test_study_json_is_what_an_ended_run_leaves(tmp_path: Path) -> None:
    """So that the absence of it above says something."""
    study = Recording(tmp_path, words("plain.py", "--steps", "2"))
    assert study.record("baseline") == 0
    assert read_sealed(study.folder / "study.json", "test")["arms"]
