"""The pages on policies, reports, adopting and extending: what they show is carried out."""

import dataclasses
import re
import shlex
import shutil
import subprocess
import sys
import tomllib

import pytest
import torch
import yaml

from stability.config.load import load_study
from stability.config.study import PolicyConfig
from stability.records.metric_log import read_metrics
from stability.records.paths import RunPaths
from tests.pages import ROOT, blocks_for, code_of

POLICY, REPORT, EXTEND = (
    (ROOT / "docs" / f"{name}.md").read_text() for name in ("policy", "read_a_report", "extend")
)
HERE = "test_how_to.py::"
((_, POLICY_SHOWN),) = blocks_for(
    HERE + "test_the_policy_of_the_page_is_one", "docs/policy.md", "yaml"
)
ADOPTING = blocks_for(HERE + "test_checkpoints_are_adopted_as_the_page_says", "docs/adopt.md", "sh")
OWN = HERE + "test_what_is_of_the_readers_own_trains_and_is_measured"
NAMES_ITS_FILE = r"^# (\w+\.\w+)\n"
EXTENDING = [
    *blocks_for(OWN, "docs/extend.md", "python", "toml", "yaml", having=NAMES_ITS_FILE),
    *blocks_for(OWN, "docs/extend.md", "sh"),
]
((_, FORMATS_ASKED),) = blocks_for(
    HERE + "test_the_formats_of_the_page_are_there",
    "docs/extend.md",
    "python",
    having="format_named",
)
DIFFS = [
    diff
    for _, diff in blocks_for(
        HERE + "test_a_change_of_the_package_does_what_the_page_says", "docs/extend.md", "diff"
    )
]


def _go_through(blocks):
    """Run the commands of a page one after another; each ends with 0, or with what it says."""
    for language, block in blocks:
        for line in block.splitlines() if language == "sh" else ():
            program, *words = shlex.split(line, comments=True)
            said = re.search(r"# exit code (\d)", line)
            if program == "stability":
                assert code_of(words) == (int(said[1]) if said else 0), line
            else:
                subprocess.run([sys.executable, *words], check=True)


def test_the_table_of_limits_is_the_policys():
    rows = re.findall(r"^\| `(\w+)` \| `(\S+)` \|", POLICY, flags=re.MULTILINE)
    fields = dataclasses.fields(PolicyConfig)
    assert rows == [(field.name, repr(field.default)) for field in fields]


def test_the_policy_of_the_page_is_one(tmp_path):
    content = yaml.safe_load((ROOT / "configs" / "quickstart.yaml").read_text())
    policy = yaml.safe_load(POLICY_SHOWN)["policy"]
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(content | {"policy": policy}))
    loaded = load_study(tmp_path / "study.yaml").policy
    default = PolicyConfig()
    assert loaded.max_error_ratio > default.max_error_ratio  # "wider than usual"
    assert loaded.margin_nats < default.margin_nats  # "narrower than usual"
    assert loaded.step == policy["step"]


def test_the_sections_that_a_reader_is_sent_to_are_those_of_the_page():
    table = REPORT.split("| question | section of the page | look for |")[1].split("\n\n")[0]
    table = re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", table)  # a link's text is what is named
    named = [row.split("|")[2].strip() for row in table.splitlines()[2:]]
    folder = ROOT / "stability" / "report" / "page"
    sources = "".join(
        path.read_text() for path in (*folder.glob("*.py"), folder / "assets" / "report.html.j2")
    )
    assert len(named) == 9
    assert [name for name in named if not re.search(rf"[\">]{name}[\"<]", sources)] == []


@pytest.mark.slow
def test_checkpoints_are_adopted_as_the_page_says(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    _go_through(ADOPTING)
    said = capsys.readouterr().out
    assert re.search(r"^lr_x2 +declared: the learning rate,", said, flags=re.MULTILINE)
    assert "2 unproven" in said
    roles = ["--role", "mine=candidate", "--role", "fp32=reference", "--study", "judged"]
    for seed in range(3):
        series = []
        for size, name in enumerate(("baseline", "mine", "fp32")):
            folder = tmp_path / f"{name} of seed {seed}"
            folder.mkdir()
            for step in (0, 10):
                state = torch.load(f"checkpoints/lr_x2/step-{step}.pt")
                moved = seed + 1e-4 * step * size
                torch.save({key: x + moved for key, x in state.items()}, folder / f"step-{step}.pt")
            series.append(f"{name}={folder}")
        assert code_of(["adopt", *series, *roles, "--seed", str(seed)]) == 0
    capsys.readouterr()
    assert code_of(["verdict", "runs/judged"]) == 4  # exploratory, and no PASS
    said = capsys.readouterr().out
    assert "there is no nudge" in said
    assert "checkpoints tell none" in said


def _written(blocks, place):
    """Write the blocks that name their file in their first line."""
    for _, block in blocks:
        file = re.match(NAMES_ITS_FILE, block)
        if file:
            (place / file[1]).write_text(block)


def _installed(place):
    """Make the package of `place` known by its entry points, as an editable install does."""
    project = tomllib.loads((place / "pyproject.toml").read_text())["project"]
    info = place / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    names = f"Name: {project['name']}\nVersion: {project['version']}\n"
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\n{names}")
    groups = project["entry-points"].items()
    lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in x.items()) for group, x in groups]
    (info / "entry_points.txt").write_text("\n".join(lines))


@pytest.mark.slow
def test_what_is_of_the_readers_own_trains_and_is_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    _written(EXTENDING, tmp_path)
    _installed(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    _go_through(EXTENDING)
    assert "mine" in capsys.readouterr().out
    found = read_metrics(RunPaths.for_run(tmp_path / "runs" / "my_study", "mine", 0).metrics)
    (name,) = re.findall(r"`(deviation/\S+)`", EXTEND)
    assert len(found[name].values) == 2
    assert all(0 < value < 1 for value in found[name].values), found[name].values


def test_the_formats_of_the_page_are_there():
    exec(compile(FORMATS_ASKED, "docs/extend.md", "exec"), {})


@pytest.mark.parametrize("diff", DIFFS, ids=("a metric", "a format"))
def test_a_change_of_the_page_fits_the_package_of_today(diff):
    done = subprocess.run(
        ["git", "apply", "--check", "-"], input=diff, text=True, cwd=ROOT, capture_output=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_change_of_the_package_does_what_the_page_says(tmp_path):
    """Applied to a copy of the package: drift has the column, and doctor the format."""
    copy = tmp_path / "clone"
    for folder in ("stability", "kernels"):
        shutil.copytree(
            ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__", "results")
        )
    for diff in DIFFS:
        subprocess.run(["git", "apply", "-"], input=diff, text=True, cwd=copy, check=True)
    for step, factor in enumerate((1.0, 1.5)):
        torch.save({"weight": torch.ones(3, 2) * factor}, tmp_path / f"step-{step}.pt")
    compared = _asked_of(copy, "compare", "step-1.pt", "step-0.pt", "--json", cwd=tmp_path)
    assert yaml.safe_load(compared)["drift"]["all"]["rms"] == 0.5
    assert re.search(r"^ +e3m4fn ", _asked_of(copy, "doctor", cwd=tmp_path), flags=re.MULTILINE)


def _asked_of(copy, *words, cwd):
    path = {"PYTHONPATH": f"{copy}:{copy / 'kernels'}", "COLUMNS": "120", "HOME": str(cwd)}
    line = [sys.executable, "-m", "stability.cli.main", *words]
    return subprocess.run(
        line, env=path, cwd=cwd, check=True, capture_output=True, text=True
    ).stdout
