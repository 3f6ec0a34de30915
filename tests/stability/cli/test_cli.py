"""The command line as a user meets it: exit codes, one-line errors, nothing half done."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from stability.cli.main import main
from stability.cli.retrained import _display
from stability.cli.run import _show_study, _write_report, split_options
from stability.report.terminal import progress
from stability.report.terminal.progress import StudyDisplay
from tests.stability.report import synthetic
from tests.stability.report.synthetic_verdict import study_verdict


@pytest.fixture
def refuse(tmp_path, capsys, monkeypatch):
    """Return a function that runs a command line, expects a refusal and returns its one line."""
    monkeypatch.chdir(tmp_path)

    def run(*words):
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(SystemExit) as stop:
            main([str(word) for word in words])
        assert stop.value.code == 2
        assert sorted(tmp_path.rglob("*")) == before, "nothing is written"
        line = capsys.readouterr().err
        assert line.count("\n") == 1
        assert line.startswith("stability: ")
        return line

    return run


def _base(path, value):
    def edit(content):
        group = content["base"]
        *parents, key = path.split(".")
        for parent in parents:
            group = group.setdefault(parent, {})
        group[key] = value

    return edit


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (_base("train.stepz", 3), ["tiny.yaml", "train.stepz", "steps"]),
        (_base("model", "demoo"), ["tiny.yaml", "model", "demoo", "demo"]),
        (_base("precision", "bf16-mixd"), ["tiny.yaml", "precision", "bf16-mixd", "bf16-mixed"]),
        (_base("attention.implementation", "flesh"), ["tiny.yaml", "'flesh'", "flash"]),
        (_base("attention.numerics", {"softmax": "bf17"}), ["tiny.yaml", "'bf17'", "bf16"]),
        (_base("train.steps", "many"), ["tiny.yaml", "train.steps", "many"]),
        (_base("precision", "emulated:e9m3"), ["precision", "emulated:e9m3", "64-true"]),
        (_base("data.source", "no/such/file.txt"), ["no/such/file.txt"]),
        (lambda c: c["arms"]["flash_fa2"]["attention"].update(profile="fa22"), ["'fa22'", "fa2"]),
        (lambda c: c["arms"].update(x={"atention": {}}), ["arms.x", "atention", "attention"]),
        (lambda c: c.update(yardstick="fp23"), ["yardstick", "fp23", "fp32"]),
        (lambda c: c["arms"].update(x={"precision": "32-true", "nudge": {"ulps": 1}}), ["arms.x"]),
        (lambda c: c.update(seeds=[]), ["seeds"]),
        (_base("model.vocab_size", 200), ["model.vocab_size", "256", "'bytes'", "200"]),
    ],
)
def test_bad_study_is_one_line_with_exit_code_2(write_study, refuse, edit, expected):
    line = refuse("run", write_study(edit), "--out", "runs")
    for part in expected:
        assert part in line


@pytest.mark.parametrize(("text", "reason"), [("", "empty"), ("too short", "short")])
def test_an_empty_or_short_text_is_refused_before_training(
    write_study, refuse, tmp_path, text, reason
):
    (tmp_path / "text.txt").write_text(text)
    edit = _base("data.source", str(tmp_path / "text.txt"))
    assert reason in refuse("run", write_study(edit), "--out", "runs")


def test_unknown_override_names_the_nearest(write_study, refuse):
    line = refuse("run", write_study(), "--train.stepz", "5")
    assert "train.stepz" in line
    assert "steps" in line


def test_override_without_value_is_refused(write_study, refuse):
    assert "--train.steps needs a value" in refuse("run", write_study(), "--train.steps")


def test_unknown_verb_names_the_nearest(refuse):
    assert "'rum'; nearest: run; `stability --help` lists them all\n" in refuse("rum")
    # like none of them
    assert refuse("-v") == "stability: no verb '-v'; `stability --help` lists them all\n"


def test_unknown_option_is_refused(write_study, refuse):
    assert "--wandbb" in refuse("run", write_study(), "--wandbb", "offline")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("check", "flash:fa2", "--quik"), "--quik; did you mean --quick?"),
        (("run", "study.yaml", "--check_observr=true"), "; did you mean --check-observer?"),
        (
            ("record", "--no-deterministic", "--", "x"),
            "--no-deterministic; did you mean --deterministic false?",
        ),
        (("init", "--stps", "5"), "--stps 5; did you mean --steps?"),
        (("init", "--templat", "kernel"), "--templat kernel; did you mean --template?"),
        (("record", "--study", "s", "--evn", "A=1", "--", "x"), "--evn A=1; did you mean --env?"),
        # what is given by its place alone is no option
        (
            ("compare", "--a", "x", "--b", "y"),
            "; a and b must be given by place, as in `stability compare one.safetensors "
            "other.safetensors`",
        ),
        (
            ("compare", "x", "y", "--c", "z"),
            "; its options are listed by `stability compare --help`",
        ),
        (("show", "x", "y", "z"), ": z; what it takes is listed by `stability show --help`"),
        (("run", "study.yaml", "--quik"), "; its options are listed by `stability run --help`"),
    ],
)
def test_a_misspelt_option_names_the_nearest_of_its_verb(refuse, words, said):
    """Also one that begins as another: it is a mistake, and no abbreviation."""
    assert refuse(*words).endswith(f"{said}\n")


@pytest.mark.parametrize("verb", ["run", "estimate"])
def test_a_missing_study_file_is_refused_and_those_that_are_there_are_named(
    write_study, refuse, verb
):
    make = "`stability init` writes one, and `stability demo` needs none\n"
    said = "must be a study's YAML file, got no such file; "
    assert refuse(verb, "tiny.yaml") == f"stability: tiny.yaml: {said}{make}"
    path = write_study()
    line = refuse(verb, path.with_name("tinny.yaml"))
    assert line.endswith(f"tinny.yaml: {said}nearest: {path}; {make}")
    line = refuse(verb, path.parent)
    assert f": must be a study's YAML file, got a folder; nearest: {path}" in line


def test_a_key_of_the_base_is_given_without_its_group(write_study, refuse):
    line = refuse("run", write_study(), "--base.train.steps", "5")
    assert line == "stability: --base.train.steps must be given without base., as --train.steps\n"


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (
            _base("attention", {"implementation": "flash", "numerics": {"blok_k": 3}}),
            "base.attention.numerics.blok_k: no field 'blok_k'; nearest: block_k",
        ),
        (
            _base("attention", {"implementation": "flash", "numerics": {"scores": "bf17"}}),
            "base.attention.numerics.scores: scores must be a format, got 'bf17'; nearest: bf16",
        ),
        (
            _base("precision", "emulated:e9"),
            "base.precision: name must be a known format or eXmY",
        ),
        (
            _base("optimizer.state", "bf17"),
            "base.optimizer.state: name must be a known format or eXmY",
        ),
    ],
)
def test_a_mistake_in_the_yaml_is_told_of_its_key_and_of_no_function(
    write_study, refuse, edit, said
):
    assert f"tiny.yaml: {said}" in refuse("run", write_study(edit))


@pytest.mark.parametrize("text", ["hello", ""])
def test_a_file_that_is_no_bundle_is_told_what_verify_takes(refuse, tmp_path, text):
    (tmp_path / "study.bundle").write_text(text)
    assert refuse("verify", "study.bundle") == (
        "stability: verify: first must be the folder of a study or a run, or what `stability "
        "export` writes, which ends in .tar.gz or .tgz, got the file 'study.bundle'\n"
    )
    assert refuse("verify", "study.tar") == (
        "stability: study.tar: must exist; nearest: study.bundle\n"
    )


def test_a_damaged_bundle_is_told_how_to_get_a_whole_one(refuse, tmp_path):
    (tmp_path / "study.bundle.tar.gz").write_text("garbage")
    assert refuse("verify", "study.bundle.tar.gz") == (
        "stability: study.bundle.tar.gz: must be a whole bundle: not a gzip file; copy it again, "
        "or write it anew by `stability export STUDY`\n"
    )


def test_a_dashboard_of_no_folder_says_how_to_get_a_first_study(refuse, tmp_path):
    said = "`stability run` makes one, and `stability demo` a first study in it\n"
    line = refuse("dashboard", "nowhere")
    assert line == f"stability: dashboard: runs must be a folder, got 'nowhere'; {said}"
    (tmp_path / "file").touch()
    assert "must be a folder, got the file 'file'" in refuse("dashboard", "file")


def test_showing_a_folder_without_a_study_is_refused(refuse, tmp_path):
    assert "study.json" in refuse("show", tmp_path)
    assert "study.json or probe.json, got no such folder, 'nowhere'" in refuse("show", "nowhere")


def test_overrides_are_told_from_options():
    rest, further = split_options(
        ["s.yaml", "--train.steps", "5", "--out", "x", "--precision=32-true", "--model.depth=-1"]
    )
    assert rest == ["s.yaml", "--out", "x"]
    overrides = {"train.steps": "5", "precision": "32-true", "model.depth": "-1"}
    assert further == {"overrides": overrides}


def test_run_trains_shows_the_ladder_and_writes_the_report(write_study, tmp_path, capsys):
    def edit(content):
        content["arms"] = {k: content["arms"][k] for k in ("baseline", "rerun", "fp32")}
        content["seeds"] = [0]

    words = ["run", str(write_study(edit)), "--out", str(tmp_path / "runs"), "--wandb", "disabled"]
    assert main([*words, "--train.steps", "2"]) == 0
    shown = capsys.readouterr().out
    for arm in ("baseline", "rerun", "fp32"):
        assert arm in shown
    assert (tmp_path / "runs" / "tiny" / "report.html").stat().st_size > 100_000
    assert "--seeds" not in shown, "nothing is in question"
    assert main(["show", str(tmp_path / "runs" / "tiny")]) == 0
    assert main(["report", str(tmp_path / "runs" / "tiny")]) == 0


@pytest.mark.parametrize(("planned", "is_told"), [(3, True), (5, False)])
def test_the_end_of_run_says_how_more_seeds_are_trained_where_they_may_decide(
    planned, is_told, tmp_path, monkeypatch, capsys
):
    study = synthetic.write_synthetic(tmp_path / "quickstart", seeds=[*range(planned)])
    decided = study_verdict()
    arms = tuple(replace(arm, outcome="INCONCLUSIVE") for arm in decided.arms)
    open_verdict = replace(decided, arms=arms, look=3, next_look=5)
    assert "the next look is at 5 seeds" in open_verdict.outlook
    monkeypatch.setattr("stability.report.view.evidence.verdict_of", lambda recorded: open_verdict)
    console = Console(width=80)
    with StudyDisplay(console, 0) as display:
        written = _write_report(study, "disabled", display)
    _show_study(written, console)
    said = capsys.readouterr().out
    assert ("the same command with --seeds 5 trains more seeds; it keeps these" in said) == is_told


def test_a_run_that_is_trained_anew_tells_no_time_of_a_report(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with _display() as display:
        display.run_started(1, 1, "nudge", 0, 10)
        now[0] = 5.0
        display.run_advanced("nudge", 0, 10, 2.0)
        display.run_ended("nudge", 0, "finished", "")
    assert capsys.readouterr().err.rstrip().endswith("left 0:00:00")


@pytest.mark.parametrize(
    "words", [["--help"], ["run", "--help"], ["show", "--help"], ["--version"]]
)
def test_help_explains_itself(words, capsys):
    try:
        code = main(words)
    except SystemExit as stop:
        code = stop.code
    assert code == 0
    text = capsys.readouterr().out
    assert "stability" in text
    assert max(map(len, text.splitlines())) <= 120
    if words == ["run", "--help"]:
        for word in ("--out", "--wandb", "snapshot_steps", "The study's YAML file".lower()):
            assert word.lower() in text.lower()


@pytest.mark.parametrize(
    ("words", "parsed"),
    [
        (["x", "--json"], ("x", None, True)),
        (["x", "--json", "false"], ("x", None, False)),
        (["--json", "No", "x", "fp32"], ("x", "fp32", False)),
        (["--json", "on", "x"], ("x", None, True)),
        (["x", "--json", "fp32"], ("x", "fp32", True)),
        (["x", "--json=false", "--arm", "false"], ("x", "false", False)),
        (["x", "false"], ("x", "false", False)),
    ],
    ids=str,
)
def test_a_flag_takes_yes_or_no_and_no_other_word(monkeypatch, words, parsed):
    got = []

    def show(folder: Path, arm: str | None = None, json: bool = False) -> int:
        got.append((str(folder), arm, json))
        return 0

    monkeypatch.setattr("stability.cli.show.show", show)
    assert main(["show", *words]) == 0
    assert got == [parsed]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["init", "--template", "kernl"],
            "--template must be one of kernel, precision, script, layouts, checkpoints, "
            "got 'kernl'; nearest: kernel",
        ),
        (
            ["run", "x.yaml", "--keep", "sum"],
            "--keep must be one of all, reference, last, none, got 'sum'",
        ),
        (
            ["run", "x.yaml", "--executor", "slrum"],
            "--executor must be one of local, slurm, ray, got 'slrum'; nearest: slurm",
        ),
        (["run", "x.yaml", "--jobs", "many"], "--jobs must be a whole number, got 'many'"),
        (["verdict", "x", "--alpha", "small"], "--alpha must be a number, got 'small'"),
    ],
)
def test_a_value_of_the_wrong_type_is_told_in_plain_words(words, said, capsys):
    with pytest.raises(SystemExit):
        main(words)
    assert capsys.readouterr().err == f"stability: {said}\n"


@pytest.mark.parametrize(
    "words",
    [
        ("init", "python", "train.py", "--steps", "5"),
        ("init", "--name", "mine", "python", "train.py", "--lr", "5"),
        ("record", "--study", "s", "--arm", "baseline", "python", "train.py"),
    ],
)
def test_a_command_that_no_dashes_come_before_is_told_where_they_belong(refuse, words):
    line = refuse(*words)
    assert "unrecognized arguments: python train.py" in line
    assert line.endswith("; a command comes last, after ` -- `, as in `-- python train.py`\n")


@pytest.mark.parametrize(
    "words",
    [
        ("init", "--stps", "5"),
        ("init", "mine", "--", "python", "train.py"),
        ("estimate", "study.yaml", "more"),
    ],
)
def test_of_other_words_that_nobody_takes_no_dashes_are_told(refuse, words):
    assert "unrecognized arguments" in (line := refuse(*words))
    assert "-- " not in line
