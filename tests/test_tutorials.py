"""The tutorials, as their reader goes through them: files are written, commands run in order."""

import re
import shlex
import sys
from pathlib import Path

import pytest

from tests.pages import blocks_for, code_of, in_short

TEST = "test_tutorials.py::test_a_tutorial_is_gone_through"
TUTORIALS = {
    name: blocks_for(TEST, f"docs/{name}.md", "sh", "python")
    for name in ("my_kernel", "hugging_face")
}
"""Of the others: quickstart is README's, your_own_training and slurm have tests of their own."""


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
