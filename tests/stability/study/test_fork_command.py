"""A recorded run goes on from its script's checkpoint, unchanged and changed."""

import json
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from stability.cli.fork import split_options
from stability.records.manifest import Manifest, read_manifest, write_manifest
from stability.records.metric_log import read_text
from stability.records.metric_names import BATCH_HASH
from stability.records.paths import RunPaths
from tests.stability.recorder.recording import SCRIPTS, code_of
from tests.stability.records.dcp_by_hand import save

RESUMES = str(SCRIPTS / "resumes.py")
RESUME = ("--resume", "--resume {resume}")


class Forked:
    """A run on record whose script has saved a checkpoint into the run's folder."""

    def __init__(self, folder: Path) -> None:
        self.study = folder / "runs" / "mine"
        self.parent = RunPaths.for_run(self.study, "baseline", 0)
        self.checkpoint = self.parent.root / "late.pt"

    def record(self) -> None:
        """Record the parent."""
        options = ["--study", "mine", "--arm", "baseline", "--wandb", "disabled"]
        flags = ["--seed", "{seed}", "--lr", "0.01", "--save", "{out}/late.pt"]
        assert code_of("record", *options, "--", sys.executable, RESUMES, *flags) == 0

    def fake(self, words: list[str], **config: Any) -> None:
        """Put a parent on record that was never run: what is refused before anything runs."""
        self.parent.root.mkdir(parents=True)
        self.checkpoint.write_text("")
        empty: dict[str, Any] = {"axis": "none", "diff": {}, "environment": {}, "hashes": {}}
        resolved = {"command": words, "deterministic": False} if words else {}
        held = {"program": "x", "flags": {}, "attention": {"implementation": ""}, **config}
        manifest = Manifest(
            study="mine",
            arm="baseline",
            seed=0,
            config=held,  # pyright: ignore[reportArgumentType] a command's
            resolved=resolved,
            state="failed",
            step=0,
            message="",
            **empty,
        )
        write_manifest(self.parent.manifest, manifest)

    def fork(self, *options: str) -> int:
        """Fork it from its checkpoint."""
        start = ("--start", str(self.checkpoint)) if "--start" not in options else ()
        return code_of("fork", str(self.parent.root), *start, *options)

    def forks(self, name: str) -> tuple[RunPaths, RunPaths]:
        """The unchanged run and the fork."""
        folder = self.study / "forks" / name
        return RunPaths.for_run(folder, "baseline", 0), RunPaths.for_run(folder, "fork", 0)


@pytest.fixture
def forked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Forked:
    monkeypatch.chdir(tmp_path)
    return Forked(tmp_path)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Forked:
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("forked")
        patch.chdir(folder)
        made = Forked(folder)
        made.record()
        return made


def _drift(capsys: pytest.CaptureFixture[str]) -> dict[str, float]:
    return json.loads(capsys.readouterr().out)["rel_l2"]


@pytest.mark.slow
def test_a_changed_fork_drifts_on_the_batches_of_the_unchanged_one(
    recorded: Forked, capsys: pytest.CaptureFixture[str]
) -> None:
    change = ("--set", "flags.lr=0.02", "--name", "lr")
    capsys.readouterr()
    assert recorded.fork(*RESUME, *change, "--json") == 0
    drift = _drift(capsys)
    assert drift["0"] == 0 < drift["1"] < drift["6"]
    unchanged, fork = recorded.forks("lr")
    assert "step 6\n" in fork.output.read_text(), "it went on from there"
    batches = [read_text(run.metrics, BATCH_HASH) for run in (unchanged, fork)]
    assert batches[0] == batches[1]
    assert batches[0] != read_text(recorded.parent.metrics, BATCH_HASH)
    found = read_manifest(fork.manifest)
    assert found.diff == {"flags.lr": ["0.01", "0.02"]}
    assert found.step == 6

    # both are kept, another change under that name is refused, and what is recorded is a study
    before = fork.manifest.stat().st_mtime_ns
    assert recorded.fork(*RESUME, *change) == 0
    assert fork.manifest.stat().st_mtime_ns == before
    said = capsys.readouterr().out
    assert "drift from the run that goes on unchanged" in said
    assert recorded.fork(*RESUME, "--set", "flags.lr=0.03", "--name", "lr") == 2
    assert "holds another fork; give --name" in capsys.readouterr().err
    assert code_of("verify", str(recorded.study / "forks" / "lr")) == 0
    assert "a pair: flags.lr differs, and nothing else that was seen" in capsys.readouterr().out
    assert code_of("verify", str(recorded.study)) == 2
    assert "nothing is proven" in capsys.readouterr().out, "a fork is no arm of the study"


@pytest.mark.slow
def test_a_fork_that_changes_nothing_drifts_by_exactly_nothing(
    recorded: Forked, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert recorded.fork(*RESUME, "--until", "3", "--json") == 0
    assert _drift(capsys) == {"0": 0.0, "1": 0.0, "2": 0.0, "3": 0.0}


@pytest.mark.long
def test_a_folder_of_dcps_is_a_checkpoint_to_go_on_from(
    recorded: Forked, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = torch.load(recorded.checkpoint, weights_only=True)
    folder = save(recorded.parent.root.parent / "late-6", saved)
    capsys.readouterr()
    words = ("--until", "1", "--set", "flags.lr=0.02", "--name", "dcp", "--json")
    assert recorded.fork(*RESUME, "--start", str(folder), *words) == 0
    drift = _drift(capsys)
    assert drift["0"] == 0 < drift["1"]
    fork = recorded.forks("dcp")[1]
    assert "step 6\n" in fork.output.read_text(), "it went on from there"
    assert read_manifest(fork.manifest).config["start"] == str(folder)


@pytest.mark.long
def test_a_fork_of_a_studys_arm_takes_its_own_resume_and_its_typed_flags(
    recorded: Forked, forked: Forked, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(recorded.checkpoint, "late.pt")
    python = shlex.quote(sys.executable)
    base = {
        "command": f"{python} {shlex.quote(RESUMES)} --seed {{seed}} {{flags}} --resume {{resume}}",
        "flags": {"lr": 0.01, "save": "{out}/later.pt"},
        "env": {"LEFT": "as it was"},
        "start": "late.pt",
        "nudge": {"ulps": 1},
        "train": {"steps": 6},
    }
    content = {"name": "mine", "question": "?", "base": base, "arms": {"baseline": {}}}
    Path("study.yaml").write_text(yaml.safe_dump(content))
    assert code_of("run", "study.yaml", "--wandb", "disabled") == 0
    capsys.readouterr()
    later = str(forked.parent.root / "later.pt")
    more = ("--set", "flags.bf16=true", "--name", "bf16", "--until", "2", "--json")
    assert forked.fork("--start", later, *more) == 0
    drift = _drift(capsys)
    assert list(drift) == ["0", "1", "2"]
    assert drift["2"] > 0
    unchanged, fork = forked.forks("bf16")
    assert "step 12" in fork.output.read_text(), "it went on from the later checkpoint"
    found = read_manifest(unchanged.manifest)
    assert found.config["env"] == {"LEFT": "as it was"}  # pyright: ignore
    assert found.config["nudge"]["ulps"] == 0, "it was nudged at its start"  # pyright: ignore


@pytest.mark.slow
def test_a_fork_whose_script_refuses_it_is_told_and_not_shown(
    recorded: Forked, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert recorded.fork(*RESUME, "--set", "flags.nosuch=1", "--name", "x") == 1
    said = capsys.readouterr()
    assert "unrecognized arguments: --nosuch" in " ".join(said.err.split())
    assert not said.out
    failed = read_manifest(recorded.forks("x")[1].manifest)
    assert failed.state == "failed"
    assert failed.resolved["command"][-4:-2] == ["--nosuch", "1"], "a failed run can be forked"


COMMAND = [sys.executable, "train.py", "--lr", "0.1", "--betas", "1", "2"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "its command has no {resume}; say how it takes a checkpoint, as in --resume="),
        (("--resume", "--resume it"), "its command has no {resume}"),
        (("--resume", "'{resume}"), 'resume must be words as of a shell, got "\'{resume}"'),
        ((*RESUME, "--at", "2"), "is the run of a command, whose state is its script's own"),
        ((*RESUME, "--start", "no.pt"), "must be a checkpoint"),
        ((*RESUME, "--until", "-1"), "until must be >= 0, got -1"),
        ((*RESUME, "--name", "a/b"), "must be 1 to 64 letters, digits, dots, '_' or '-'"),
        ((*RESUME, "--set", "optimizer.lr=1"), "unknown key; nearest:"),
        ((*RESUME, "--set", "flags=1"), "flags must be set one by one, as in --set flags.lr=0.1"),
        ((*RESUME, "--set", "start=x.pt"), "start must not be set: both runs go on from one"),
        ((*RESUME, "--set", "train.steps=9"), "train must not be set: --until says"),
        ((*RESUME, "--set", "flags.betas=0.1"), "flags.betas must be there once, with as many"),
        ((*RESUME, "--set", "env.A=2"), "env.A: must be a string, got 2"),
        (
            (*RESUME, "--set", "flags.lr=1", "--set", "flags.x=2"),
            "must differ in one axis, differs in flags.lr, flags.x; make an arm of each, declare "
            "them one change by `change: flags`",
        ),
        (
            (*RESUME, "--set", "flags.lr=1", "--set", "env.A=b", "--change", "flags"),
            "change must hold all that differs",
        ),
    ],
    ids=str,
)
def test_what_can_not_be_forked_is_one_line_and_nothing_runs(
    forked: Forked,
    options: tuple[str, ...],
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    forked.fake(COMMAND)
    assert forked.fork(*options) == 2
    printed = capsys.readouterr().err
    assert said in printed
    assert printed.count("\n") == 1
    assert not (forked.study / "forks").exists()


def test_a_checkpoint_is_asked_for_and_a_command(
    forked: Forked, capsys: pytest.CaptureFixture[str]
) -> None:
    forked.fake([])
    assert code_of("fork", str(forked.parent.root), "--at", "2") == 2
    assert (
        "give --start with a checkpoint that it has saved, and no --at" in capsys.readouterr().err
    )
    assert forked.fork(*RESUME) == 2
    assert "its command is not on record, as of a script that calls" in capsys.readouterr().err
    assert code_of("bisect", str(forked.parent.root), "--at", "2") == 2
    assert "must be a run of our own trainer, is one of a command" in capsys.readouterr().err


def test_several_flags_are_one_change_where_that_is_declared(forked: Forked) -> None:
    from stability.study.fork_command import plan_command_fork

    forked.fake([*COMMAND, "--arm", "{arm}", "--resume", "old.pt"])
    changes = {"flags": {"lr": 1, "optimizer": {"beta": 2}}}
    start = str(forked.checkpoint)
    unchanged, fork = plan_command_fork(
        forked.parent, start, changes, resume=RESUME[1], change="flags"
    )
    assert fork.axis == "flags"
    assert fork.words[2:] == [
        *(
            "--betas",
            "1",
            "2",
            "--arm",
            "baseline",
            "--lr",
            "1",
            "--optimizer.beta",
            "2",
            "--resume",
            start,
        )
    ]
    assert unchanged.words[5:] == ["--arm", "baseline", "--lr", "0.1", "--resume", start]
    assert unchanged.folder == fork.folder
    assert unchanged.folder.parent == forked.study / "forks"
    assert not fork.asked.deterministic, "as the parent, and not as by default"
    # what --resume gives takes the place of what the parent was given
    longer = f"{RESUME[1]} --lr 0.3"
    assert plan_command_fork(forked.parent, start, {}, resume=longer)[0].words[5:] == [
        *("--arm", "baseline", "--resume", start, "--lr", "0.3")
    ]
    # a fork of a fork lies beside it
    again = RunPaths(unchanged.paths.root)
    again.root.mkdir(parents=True)
    shutil.copy(forked.parent.manifest, again.manifest)
    further, _ = plan_command_fork(again, start, {}, resume=RESUME[1])
    assert further.folder.parent == forked.study / "forks"


def test_of_a_command_an_attention_is_set_by_its_name():
    """Of our own trainer it has parts, and a name alone is refused there."""
    assert split_options(["--set", "attention=flash:fa2"])[1] == {
        "changes": {"attention": "flash:fa2"}
    }
