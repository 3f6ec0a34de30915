"""The most memory that a recorded process has held: its own pages, whatever its name is."""

import json
import subprocess
import sys

import pytest

LARGE = 200 * 2**20
PROGRAM = """
import json, os, sys, torch
from pathlib import Path
from stability.recorder.inside.memory import most_memory

Path("/proc/self/comm").write_text(sys.argv[1], encoding="utf-8")
before = most_memory()
rss = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
held = torch.ones(int(sys.argv[2]) // 4)
del held
print(json.dumps([before, rss, most_memory()]))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc is Linux's")
@pytest.mark.parametrize("name", ["python", "entraîne", "训练"])
def test_it_is_the_peak_of_the_processs_own_pages(name):
    """Not of what it could address, nor what is left of it now; a name may be in any letters."""
    command = [sys.executable, "-c", PROGRAM, name, str(LARGE)]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    before, rss, after = json.loads(ran.stdout)
    assert before.keys() == after.keys() == {"host"}
    assert 0.99 * rss <= before["host"] < 1.2 * rss
    assert 0.9 * LARGE < after["host"] - before["host"] < 1.2 * LARGE
