"""`stability init`: a study of any command, which runs as it was written."""

import shlex
import sys
from pathlib import Path

import pytest

from stability.cli.command_parts import parts_of
from stability.cli.flag_arms import flags_of_arms, is_lower_precision
from stability.cli.init import _updates
from stability.cli.study_text import study_text
from stability.config.command_study import expand_commands, load_command_study
from stability.config.commands import PRECISION_QUESTION
from stability.records.events import GRADIENT_IN_PART
from tests.stability.recorder.recording import SCRIPTS, code_of

PLAIN = [sys.executable, str(SCRIPTS / "plain.py")]


@pytest.mark.long
def test_a_study_is_written_after_a_trial_and_runs_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [*PLAIN, "--seed", "3", "--lr", "0.02", "--bf16"]
    assert code_of("init", "--name", "mine", "--steps", "5", "--", *words) == 0
    said = capsys.readouterr().out
    assert "after 2 updates: 6 weights of Sequential" in said or "after 2 updates:" in said
    assert "takes no seed" not in said
    assert [path.name for path in tmp_path.iterdir()] == ["study.yaml"]
    study = load_command_study(tmp_path / "study.yaml")
    assert study.base.flags == {"lr": 0.02, "bf16": True}
    assert [arm.role for arm in expand_commands(study)] == [
        "baseline",
        "reference",
        "rerun",
        "nudge",
    ]
    first = study.base.words()
    assert first == [*PLAIN, "--seed", "{seed}", "--lr", "0.02", "--bf16"]
    assert code_of("run", "study.yaml", "--wandb", "disabled") == 0
    assert "A/A is zero" in capsys.readouterr().out
    assert code_of("init", "--", *words) == 2
    assert "study.yaml: must not be there yet" in capsys.readouterr().err


def test_a_command_without_a_seed_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert code_of("init", "--", *PLAIN) == 0
    said = capsys.readouterr().out
    assert said.startswith("trial of the command, seed 0, 2 updates; what it prints:\nstep 0 loss ")
    assert said.count("step 0 loss") == 1, "of its other trial it prints the same"
    assert "\ntrial of the command, seed 1, 2 updates\nafter 2 updates: " in said
    assert "the command seeds itself: given another seed beforehand it is the same run" in said
    assert "to a new file" in said
    assert load_command_study(tmp_path / "study.yaml").seeds == (0,)
    assert (
        "no held-out loss: no call of the model in evaluation mode (`model.eval()`) and without "
        "gradients was seen in 2 updates (later ones are found in the runs); name a func"
    ) in said
    assert "; no PASS without it\n" in said


def test_a_command_that_takes_the_seed_it_is_given_beforehand_has_three(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    source = (SCRIPTS / "plain.py").read_text()
    seeding = "torch.manual_seed(asked.seed)"
    assert seeding in source
    (tmp_path / "train.py").write_text(source.replace(seeding, "pass"))
    assert code_of("init", "--", sys.executable, "train.py") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "takes no seed that was found" in said
    assert "another seed makes another run" in said
    assert load_command_study(tmp_path / "study.yaml").seeds == (0, 1, 2)


def test_what_is_no_training_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert code_of("init", "--", sys.executable, "-c", "print(1)") == 1
    assert "no training was seen" in capsys.readouterr().out
    assert code_of("init") == 2
    assert "a command must follow --" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_flags_that_were_assigned_stay_so_and_one_seed_is_no_three(tmp_path: Path) -> None:
    path = tmp_path / "study.yaml"
    words = ["python", "train.py", "config.py", "--lr=1e-3", "--compile=False"]
    path.write_text(study_text("mine", words, {}, 7, is_seeded=False))
    study = load_command_study(path)
    assert study.base.words() == words
    assert study.seeds == (0,)
    assert (
        "a verdict needs 3 seeds, and the command was given none that it takes: put"
        in path.read_text()
    )
    edited = path.read_text().replace("compile: 'False'", "compile: true")
    path.write_text(edited.replace('compile: "False"', "compile: true"))
    assert load_command_study(path).base.words()[-1] == "--compile=True"


def test_the_arms_that_are_to_be_filled_in_are_those_of_a_verdict(tmp_path: Path) -> None:
    text = study_text("mine", ["python", "train.py", "--seed", "{seed}", "--lr", "0.1"], {}, 7)
    places = {
        "# candidate:": "candidate:",
        "#   flags: {a-flag: its-other-value}": "  flags: {x: 1}",
        "# reference:": "reference:",
        "#   role: ": "  role: ",
        "#   flags: {a-precision: a-higher-one}": "  flags: {y: 1}",
        "# broken:\n": "broken:\n",
        "#   flags: {a-learning-rate: ten-times-it}": "  flags: {lr: 1.0}",
    }
    for place, filled_in in places.items():
        assert place in text
        text = text.replace(place, filled_in)
    (tmp_path / "study.yaml").write_text(text)
    roles = [arm.role for arm in expand_commands(load_command_study(tmp_path / "study.yaml"))]
    assert roles == ["baseline", "candidate", "reference", "broken", "rerun", "nudge"]


def test_the_arms_of_an_attention_differ_in_a_planted_fault_and_are_probed(tmp_path: Path) -> None:
    text = study_text("mine", ["python", "train.py", "--seed", "{seed}"], {}, 7)
    for arm in ("fa2: {", "broken: {"):
        assert f"  # {arm}" in text
        text = text.replace(f"  # {arm}", f"  {arm}")
    (tmp_path / "study.yaml").write_text(text)
    arms = {arm.role: arm for arm in expand_commands(load_command_study(tmp_path / "study.yaml"))}
    right, wrong = arms["candidate"].config, arms["broken"].config
    assert wrong.attention == f"{right.attention}+out_gain_1pct"
    assert wrong.probe == right.probe
    assert right.probe.candidate == right.attention


@pytest.mark.parametrize(
    ("attention", "arm"),
    [
        ("flash:fa2", "fa2"),
        ("mine:attend", "attend"),
        ("mine:baseline", "candidate"),
        ("mine:broken", "candidate"),
        ("mine:null", "candidate"),
        ("mine:forks", "candidate"),
    ],
)
@pytest.mark.parametrize(("steps", "every"), [(7, 1), (100, 4), (1000, 40)])
def test_an_attention_is_written_with_its_fault_and_looks_enough(
    tmp_path: Path, attention: str, arm: str, steps: int, every: int
) -> None:
    words = ["python", "train.py", "--seed", "{seed}", "--bf16"]
    (tmp_path / "study.yaml").write_text(study_text("mine", words, {}, steps, attention=attention))
    arms = {x.name: x for x in expand_commands(load_command_study(tmp_path / "study.yaml"))}
    assert list(arms) == ["baseline", arm, "broken", "reference", "rerun", "nudge"]
    assert arms[arm].role == "candidate"
    assert arms[arm].config.attention == attention
    assert arms["broken"].role == "broken"
    assert arms["broken"].config.attention == f"{attention}+out_gain_1pct"
    for one, rarer in ((arms[arm], 1), (arms["broken"], 2)):
        assert one.config.probe.settings() == {
            "candidate": attention,
            "every": rarer * every,
            "gradient_every": rarer * every,
        }
    assert arms["reference"].role == "reference"
    assert arms["reference"].config.words() == words[:-1]


def test_beside_pytorchs_own_attention_the_fault_is_planted_on_another(tmp_path: Path) -> None:
    words = ["python", "train.py", "--seed", "{seed}"]
    text = study_text("mine", words, {}, 100, attention="sdpa:math")
    (tmp_path / "study.yaml").write_text(text)
    arms = {x.name: x for x in expand_commands(load_command_study(tmp_path / "study.yaml"))}
    assert list(arms) == ["baseline", "math", "broken", "rerun", "nudge"]
    assert arms["broken"].config.attention == "flash:fa2+out_gain_1pct"


@pytest.mark.parametrize(
    ("flags", "wide"),
    [
        (["--bf16"], []),
        (["--amp", "--lr", "0.1"], ["--lr", "0.1"]),
        (["--dtype", "bfloat16"], ["--dtype", "float32"]),
        (["--precision=bf16-mixed"], ["--precision=32-true"]),
        (["precision=bf16-mixed", "lr=1"], ["precision=32-true", "lr=1"]),
        (["--lr", "0.1"], None),
        (["--bf16", "--dtype", "float16"], None),
        (["--amp", "8"], None),
        (["--mixed_precision", "bf16"], ["--mixed_precision", "no"]),
        (["--kv_dtype", "bf16"], None),
        (["--bf16", "True"], ["--bf16", "False"]),
        (["bf16=true"], ["bf16=false"]),
        (["--bf16", "False"], None),
    ],
)
def test_a_reference_is_filled_in_where_a_flag_is_known(
    tmp_path: Path, flags: list[str], wide: list[str] | None
) -> None:
    """Of two such flags nobody knows which one decides."""
    text = study_text("mine", ["python", "train.py", *flags], {}, 7)
    (tmp_path / "study.yaml").write_text(text)
    arms = {x.role: x for x in expand_commands(load_command_study(tmp_path / "study.yaml"))}
    assert ("reference" in arms) == (wide is not None)
    assert ("  # reference:\n" in text) == (wide is None)
    if wide is not None:
        assert arms["reference"].config.words() == ["python", "train.py", *wide]


def test_an_attention_that_replaces_nothing_is_told_before_a_study_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--attention", "flash:fa2", "--", *PLAIN, "--seed", "0"]
    assert code_of("init", *words) == 1
    assert "FAILED" in capsys.readouterr().out
    assert code_of("init", "--attention", "flash:fa2+dq_gain", "--", *PLAIN) == 2
    assert "attention must be given without a planted fault" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("attention", "why"),
    [
        ("absent:attend", "No module named 'absent'; in this folder: absence"),
        ("absence:atend", "a function that absence has, got 'atend'; nearest: attend"),
        ("raises:attend", "got 'raises:attend'; RuntimeError: no such GPU"),
        ("absence.py:attend", "did you mean absence:attend"),
    ],
)
def test_an_attention_that_can_not_be_imported_is_told_in_one_line(
    attention: str,
    why: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "absence.py").write_text("def attend(q, k, v, *, causal, scale=None): ...\n")
    (tmp_path / "raises.py").write_text("raise RuntimeError('no such GPU')\n")
    files = sorted(tmp_path.iterdir())
    assert code_of("init", "--attention", attention, "--", *PLAIN, "--seed", "0") == 1
    said = capsys.readouterr().out
    assert "Traceback" not in said
    assert said.splitlines()[-1].startswith("FAILED: baseline, seed 0: attention must be ")
    assert why in said.splitlines()[-1]
    assert [path for path in sorted(tmp_path.iterdir()) if path.suffix] == files


@pytest.mark.slow
def test_an_attention_is_tried_in_the_script_with_the_probe_that_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--attention", "flash:fa2", "--", sys.executable, str(SCRIPTS / "evaluates.py")]
    words += ["--seed", "0", "--bf16", "--evaluate-every", "1"]
    assert code_of("init", "--steps", "20", *words, "--kind", "tuple") == 0
    said = capsys.readouterr().out
    assert "2 attention calls were replaced by flash:fa2" in said
    # what it prints is not what the command alone does
    assert "trial of the command with flash:fa2 for its attention, seed 0, 2 updates; " in said
    assert said.endswith(
        "every run ends after 20 updates, as init's --steps says\n"
        "first, its numbers alone: stability check flash:fa2 --quick --dtype bf16\n"
        "flash:fa2 is this package's own kernel, on a CPU its twin in PyTorch: of another\n"
        "  build, as flash-attn's, it says nothing; give that one as MODULE:FUNCTION\n"
        "study.yaml: stability run study.yaml\n"
        "how long that takes, and what a PASS lacks: stability estimate study.yaml\n"
        "explained, step by step: stability docs your_own_training\n"
    ), "nothing is left to be filled in"
    assert "held_out" not in (tmp_path / "study.yaml").read_text(), "the script evaluates"
    arms = [x.name for x in expand_commands(load_command_study(tmp_path / "study.yaml"))]
    assert arms == ["baseline", "fa2", "broken", "reference", "rerun", "nudge"]


def test_a_model_without_its_loss_is_looked_at_under_the_scripts_own_gradient(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As most scripts: `loss = F.cross_entropy(model(x), y)`."""
    monkeypatch.chdir(tmp_path)
    words = [sys.executable, str(SCRIPTS / "evaluates.py"), "--seed", "0"]
    assert code_of("init", "--steps", "20", "--attention", "flash:fa2", "--", *words) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"the whole model's gradient is {GRADIENT_IN_PART}" in said
    written = load_command_study(tmp_path / "study.yaml")
    arms = {x.name: x for x in expand_commands(written)}
    for arm, every in (("fa2", 1), ("broken", 2)):
        assert arms[arm].config.probe.settings()["gradient_every"] == every
    assert "stability check flash:fa2 --quick --dtype fp32 flash:fa2 is this" in said


def test_a_gradient_that_can_not_be_looked_at_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As of a loss to which the model adds what it keeps to itself."""
    monkeypatch.chdir(tmp_path)
    source = (SCRIPTS / "evaluates.py").read_text()
    source = source.replace("        h = self.embed(x)\n", "        h = self.h = self.embed(x)\n")
    source = source.replace("loss.backward()\n", "(loss + own.h.mean()).backward()\n")
    (tmp_path / "train.py").write_text(source)
    words = [sys.executable, "train.py", "--seed", "0"]
    assert code_of("init", "--steps", "20", "--attention", "flash:fa2", "--", *words) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "Traceback" not in said
    assert (
        "or all of its own that the loss is made of; of Model: something that was not returned is "
        "a part of the loss. No PASS without it: mend that"
    ) in said
    assert "2 attention calls were replaced by flash:fa2" in said
    text = (tmp_path / "study.yaml").read_text()
    assert "`gradient_every: 1`\n  # does, and for that the model must return its loss" in text
    arms = {x.name: x for x in expand_commands(load_command_study(tmp_path / "study.yaml"))}
    for arm, every in (("fa2", 1), ("broken", 2)):
        assert arms[arm].config.probe.settings()["every"] == every
        assert arms[arm].config.probe.settings()["gradient_every"] == 0


@pytest.mark.slow
def test_a_reference_that_can_not_be_paired_is_left_to_be_filled_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By a flag that is known, weights of another dtype; and one that the script does not take."""
    monkeypatch.chdir(tmp_path)
    source = (SCRIPTS / "plain.py").read_text()
    typed = 'flags.add_argument("--dtype", choices=["bfloat16", "float32"], default="float32")\n'
    source = source.replace("asked = flags.parse_args()", f"{typed}asked = flags.parse_args()")
    cast = "model.to(getattr(torch, asked.dtype))\noptimizer ="
    (tmp_path / "train.py").write_text(source.replace("optimizer =", cast, 1))
    words = [sys.executable, "train.py", "--seed", "0", "--dtype", "bfloat16"]
    assert code_of("init", "--", *words) == 0
    said = capsys.readouterr().out
    assert "no reference is written: " in said
    assert "starts from other weights, or another dtype" in said
    assert "fill in a candidate, a reference, a broken arm and a held-out loss" in said
    source = (tmp_path / "train.py").read_text().replace('["bfloat16", "float32"]', '["bfloat16"]')
    (tmp_path / "train.py").write_text(source.replace('default="float32"', 'default="bfloat16"'))
    assert code_of("init", "--to", "b.yaml", "--", *words) == 0
    assert "no reference is written: the command ended with exit code 2" in capsys.readouterr().out


def test_the_next_commands_and_what_is_to_be_filled_in_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert code_of("init", "--", *PLAIN, "--seed", "0", "--bf16") == 0
    said = capsys.readouterr().out
    assert "study.yaml: fill in a candidate, a broken arm and a held-out loss, then: " in said
    assert "how long that takes, and what a PASS lacks: stability estimate study.yaml" in said
    written = (tmp_path / "study.yaml").read_text()
    assert "\n  # held_out: losses:loss\n" in written
    filled = tmp_path / "filled.yaml"
    filled.write_text(written.replace("  # held_out: losses:loss", "  held_out: losses:loss"))
    assert load_command_study(filled).base.held_out == "losses:loss"
    assert "stability check" not in said, "no attention is in question"
    assert "a reference is" not in said, "it is written"
    assert "every run ends after 100 updates, since the command names none that was found" in said


def test_runs_end_where_the_command_ends_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert code_of("init", "--", *PLAIN, "--seed", "0", "--steps", "12") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "every run ends after 12 updates, the command's own --steps 12 study.yaml:" in said
    assert "a reference is the command one precision higher" in said
    assert "without one there is no PASS" in said
    assert "no call of the model in evaluation mode" in said
    assert "none is needed where the script itself evaluates twice or more in a run" in said
    study = load_command_study(tmp_path / "study.yaml")
    assert study.base.train.steps == 12
    assert study.base.words()[-2:] == ["--steps", "12"]


@pytest.mark.parametrize(
    ("given", "flags", "steps", "said"),
    [
        (None, ["--iters=7"], 7, "the command's own --iters=7"),
        (5, ["--iters=7"], 5, "as init's --steps says; the command has --iters=7"),
        (5, [], 5, "as init's --steps says"),
        (None, ["--iters=7", "--max-steps", "7"], 7, "own --iters=7, --max-steps 7"),
        (None, ["--steps", "9", "--iters=7"], 7, "own --iters=7, the smallest of --steps 9, --i"),
        (7, ["--iters=7"], 7, "as init's --steps says; the command has --iters=7"),
        (None, [], 100, "the command names none that was found; --steps before the -- sets others"),
    ],
)
def test_who_chose_where_runs_end_is_said(
    given: int | None, flags: list[str], steps: int, said: str
) -> None:
    found, why = _updates(given, ["python", "train.py", *flags])
    assert found == steps
    assert said in why
    assert ("the command" in why) == bool(flags or given is None)


def test_runs_that_the_command_would_end_too_early_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    flags = ["--max-steps", "9", "--steps", "3"]
    assert code_of("init", "--steps", "200", "--", *PLAIN, *flags) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "steps must be <= 3, where the command ends itself by --steps 3, got 200" in said
    assert "raise --steps 3 in the command, or lower --steps before the --" in said
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "whose"),
    [
        (["--steps", "19", "--", *PLAIN], "as init's --steps says"),
        (["--", *PLAIN, "--steps=19"], "the command's own --steps=19"),
    ],
)
def test_an_attention_needs_as_many_updates_as_the_gradient_needs_looks(
    words: list[str],
    whose: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert code_of("init", "--attention", "flash:fa2", *words) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"steps must be >= 20 with --attention, got 19, {whose}: the gradient is judged" in said
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("own", "asked", "is_lower"),
    [
        (["--seed", "0"], "bf16=true", True),
        (["--seed", "0", "--dtype", "float32"], "dtype=bfloat16", True),
        (["--seed", "0", "--dtype", "float32"], "dtype=bf16", True),
        (["--seed", "0"], "precision=bf16-mixed", True),
        (["--seed", "0", "--bf16"], "lr=0.1", False),
        (["--seed", "0"], "lr=0.1", False),
        (["--seed", "0", "--dtype", "bfloat16"], "dtype=float16", False),
    ],
)
def test_a_candidate_of_lower_precision_is_told_from_others(own, asked, is_lower) -> None:
    parts = parts_of(["python", "train.py", *own])
    arms = flags_of_arms(parts, {"candidate": asked})
    assert is_lower_precision(parts, arms["candidate"]) == is_lower


@pytest.mark.slow
def test_a_question_of_precision_is_told_what_answers_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [sys.executable, str(SCRIPTS / "evaluates.py"), "--seed", "0"]
    assert code_of("init", "--name", "mine", "--candidate", "bf16=true", "--", *words) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "bf16=true is a lower precision than the command's, beside which no step" in said
    assert f"--candidate out, as in the command at the end; {PRECISION_QUESTION}" in said
    assert "fill in" not in said
    instead = said.partition("study.yaml: in it no step can be judged; instead: stability ")[2]
    assert f"#   stability {instead}\n" in (tmp_path / "study.yaml").read_text()
    assert code_of(*shlex.split(instead)) == 0
    said = " ".join(capsys.readouterr().out.split())
    written = load_command_study(tmp_path / "study_precision.yaml")
    assert written.name == "mine_precision", "its runs are of a folder of their own"
    (reference,) = [arm for arm in expand_commands(written) if arm.role == "reference"]
    assert reference.config.words() == [*words[:3], "{seed}"]
    assert "without a candidate the ladder tells how far the baseline's precision moves" in said
