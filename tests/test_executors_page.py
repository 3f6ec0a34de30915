"""docs/executors.md, as its reader goes through it, but for Slurm and Ray (`tests/clusters`)."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from stability.cli.main import main
from tests.pages import BEYOND_THIS_MACHINE, ROOT, blocks_for, in_short, prose_of

PAGE = (ROOT / "docs" / "executors.md").read_text()
TEST = "test_executors_page.py::test_the_page_is_gone_through"
BLOCKS = [block for _, block in blocks_for(TEST, "docs/executors.md", "sh")]


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with the study of the page, in short, and `stability` on PATH."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")
    study = yaml.safe_load(in_short((ROOT / "configs/templates/precision.yaml").read_text()))
    study |= {"name": "study", "seeds": [0, 1], "yardstick": "", "policy": {}}
    study["arms"] = {"nudge": study["arms"]["nudge"]}  # the page's two
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(study))
    return tmp_path


@pytest.mark.long
@pytest.mark.slow
def test_the_page_is_gone_through(place):
    gone = 0
    for block in reversed(BLOCKS):  # the runs by themselves first: the first block trains all
        here = [x for x in block.splitlines() if not x.startswith((*BEYOND_THIS_MACHINE,))]
        if not here:
            continue
        script = "set -e\n" + "\n".join(here)
        done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
        assert done.returncode == 0, (here, done.stdout, done.stderr)
        if any(line.startswith("for ") for line in here):
            trained = sorted(
                path.parent.parent.name for path in place.rglob("seed-*/manifest.json")
            )
            assert trained == ["baseline", "baseline", "nudge", "nudge"]
        gone += 1
    assert gone == 2
    assert re.search(r"study: (\d+) finished of \1 runs", done.stdout), done.stdout


def test_the_exit_codes_of_a_run_by_itself_are_those_of_the_table(place, capsys):
    rows = dict(re.findall(r"^\| (\d+) \| (.*?) \|$", PAGE, flags=re.MULTILINE))
    assert list(rows) == ["0", "1", "2", "130"]
    for words, said in (
        (["--only", "nobody", "--seed", "0"], "nobody"),  # no such arm
        (["--only", "nudge", "--seed", "7"], "7"),  # no such seed
        (["--only", "nudge", "--seed", "0"], "baseline"),  # no baseline
    ):
        with pytest.raises(SystemExit) as stopped:
            main(["run", "study.yaml", *words])
        assert stopped.value.code == 2
        assert said in capsys.readouterr().err


def test_what_submitit_takes_is_named_on_the_page():
    from stability.execute.slurm import OF_SUBMITIT

    named = set(re.findall(r"`--slurm\.([\w-]+)", prose_of(PAGE)))
    assert set(OF_SUBMITIT) <= named
