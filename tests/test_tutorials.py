"""The tutorials, as their reader goes through them: files are written, commands run in order."""

import re
import shlex
import sys
from pathlib import Path

import pytest

from tests.pages import blocks_for, code_of, in_short, in_words

TEST = "test_tutorials.py::test_a_tutorial_is_gone_through"
TO_A_VERDICT = "test_tutorials.py::test_a_trainer_comes_to_the_verdict_that_its_tutorial_shows"
TRAINER = "docs/hugging_face.md"
TUTORIALS = {
    "my_kernel": blocks_for(TEST, "docs/my_kernel.md", "sh", "python"),
    "hugging_face": blocks_for(
        TEST, TRAINER, "sh", "python", having="^# hf_train|stability record"
    ),
}
"""Of the others: quickstart is README's, your_own_training and slurm have tests of their own."""
VERDICT = blocks_for(TO_A_VERDICT, TRAINER, "sh", "text", having="stability run|FAIL, as it must")
"""What is typed for a verdict on a training of Trainer's, and after it what is printed."""
MACHINE = r"(?<= updates, )[^;]*(?=;)"
"""Where the runs were made, in the last lines of an answer."""


def expected_codes(line):
    """Return the exit codes that a line of a page may end with."""
    named = re.search(r"# exit code (\d)", line)
    if named:
        return (int(named.group(1)),)
    return (0, 1, 3, 4) if " verdict " in line else (0,)


@pytest.mark.slow
@pytest.mark.parametrize("name", TUTORIALS)
def test_a_tutorial_is_gone_through(name, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")
    gone = 0
    for language, block in TUTORIALS[name]:
        if language == "python":
            (tmp_path / re.match(r"# (\w+\.py)\n", block).group(1)).write_text(block)
        for line in block.splitlines() if language == "sh" else ():
            words = shlex.split(line, comments=True)
            assert words[0] == "stability"
            assert code_of(words[1:]) in expected_codes(line), (line, capfd.readouterr())
            gone += 1
            if words[1] == "init":
                study = tmp_path / "study.yaml"
                study.write_text(in_short(study.read_text()))
    assert gone >= 6
    said = capfd.readouterr().out
    if name == "hugging_face":
        (rerun,) = (row for row in said.splitlines() if row.startswith("rerun "))
        assert "0 (exact)" in rerun
        assert re.search(r"^fa2 ", said, flags=re.MULTILINE)


@pytest.mark.long
def test_a_trainer_comes_to_the_verdict_that_its_tutorial_shows(tmp_path, monkeypatch, capfd):
    """With the tutorial's script, steps and seeds: 18 runs."""
    ((_, script),) = (each for each in TUTORIALS["hugging_face"] if each[0] == "python")
    (tmp_path / "hf_train.py").write_text(script)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")
    said = ""
    for language, block in VERDICT:
        if language == "text":
            shown = re.sub(MACHINE, "this one", block)
            assert in_words(shown) in in_words(re.sub(MACHINE, "this one", said))
        for line in block.splitlines() if language == "sh" else ():
            assert code_of(shlex.split(line)[1:]) == 0, (line, capfd.readouterr())
            said = capfd.readouterr().out
    assert [language for language, _ in VERDICT] == ["sh", "text"]
