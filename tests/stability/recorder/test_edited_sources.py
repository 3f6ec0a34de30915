"""A source that is changed while its training runs: what was executed of it is not known."""

import os
import sys
import time
from pathlib import Path

import pytest

from stability.recorder.inside.environment import changed_since
from tests.stability.recorder.recording import code_of
from tests.stability.recorder.test_launched import TRAINS, Shell


def test_a_file_that_is_older_is_not_changed_and_one_written_or_gone_is(tmp_path: Path) -> None:
    older, written, gone = (tmp_path / name for name in ("a.py", "b.py", "c.py"))
    for file in (older, written):
        file.write_text("x = 1\n", encoding="utf-8")
    time.sleep(0.05)  # the clock of a file system ticks slower than ours
    begun = time.time()
    assert changed_since(map(str, (older, written)), begun) == []
    time.sleep(0.05)
    written.write_text("x = 2\n", encoding="utf-8")
    os.utime(written, (0, 0))  # the content's time can be set
    assert changed_since(map(str, (older, written, gone)), begun) == [str(written), str(gone)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "before"), [("train.py", "data ="), ("net.py", "    optimizer.zero")]
)
def test_a_pair_whose_source_was_changed_meanwhile_is_unproven(
    file: str, before: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text("scale = 1\n", encoding="utf-8")
    text = TRAINS.replace("model =", "import net\nmodel =")
    # its content comes back to what it was, as after an edit that is undone
    indent = " " * (len(before) - len(before.lstrip()))
    text = text.replace(before, f"{indent}os.utime({str(tmp_path / file)!r})\n{before}")
    (tmp_path / "train.py").write_text(text, encoding="utf-8")
    study = Shell(tmp_path / "runs", [sys.executable, "train.py"])
    assert study.record("baseline") == 0
    said = f"what was executed of {tmp_path / file}: changed after the process had begun"
    assert study.manifest("baseline").resolved["doubts"] == [said]
    assert study.record("faster", "--lr", "0.2") == 0
    capsys.readouterr()
    assert code_of("verify", str(study.folder)) == 1
    assert "changed after the process had begun" in " ".join(capsys.readouterr().out.split())
