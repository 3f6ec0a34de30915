"""The wheel holds all of the packages, and makes a study without a clone beside it.

So does the wheel that is built of the source distribution, and so it does beside the oldest
versions of what it needs that `pyproject.toml` lets in, and beside the newest that pip finds.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
import venv
import zipfile
from pathlib import Path
from typing import get_args

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from stability.cli.templates import Template
from tests.pages import in_short

ROOT = Path(__file__).parent.parent
PACKAGES = {
    "stability": "stability",
    "kernels/attention_kernels": "attention_kernels",
    "configs": "stability/configs",
    "docs": "stability/docs",
    "examples": "stability/examples",
    "experiments": "stability_experiments/experiments",
}
"""The folders of the clone, and what the wheel calls them."""

CHEAPEST = "fa3_table3"
"""The experiment that takes least at the size quick."""

TRAINS = """
import torch
from torch import nn

model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for _ in range(6):
    loss = nn.functional.cross_entropy(model(torch.randn(5, 8)), torch.randint(4, (5,)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
PRINTS_PLACES = """
import sys
import attention_kernels
import stability

print(stability.__file__, attention_kernels.__file__, *sys.path, sep="\\n")
"""


def tracked() -> list[str]:
    """What git has in the packages' folders, by its path in the clone."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", *PACKAGES], cwd=ROOT, check=True, capture_output=True, text=True
    )
    # a file that was deleted and not yet committed is in no wheel, nor are figures of results
    return [
        path
        for path in listed.stdout.split("\0")
        if path
        and (ROOT / path).exists()
        and not path.startswith(("docs/scripts/", "docs/screenshots/made_of.json"))
        and not (path.startswith("experiments/") and path.endswith(".png"))
    ]


def done(*words: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a command as somebody who has no clone does."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "STABILITY"))}
    return subprocess.run(
        [str(word) for word in words], cwd=cwd, capture_output=True, text=True, env=environment
    )


def run(*words: str | Path, cwd: Path, code: int = 0) -> str:
    """Run a command as `done` does, to the end `code`; return what it prints."""
    ended = done(*words, cwd=cwd)
    assert ended.returncode == code, ended.stdout + ended.stderr
    return ended.stdout


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a build reads: no older build lies in it, and none is left in the clone."""
    copy = tmp_path_factory.mktemp("copy")
    for path in ("pyproject.toml", "README.md", "LICENSE", *tracked()):
        (copy / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, copy / path)
    return copy


def build(source: Path, built: Path) -> Path:
    """Return the wheel of a folder or of a source distribution."""
    options = ["--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--wheel-dir", built]
    run(sys.executable, "-m", "pip", "wheel", *options, source, cwd=built.parent)
    (wheel,) = built.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(copy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel."""
    return build(copy, tmp_path_factory.mktemp("wheel") / "built")


@pytest.fixture(scope="module")
def place(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an environment into which the wheel is installed, beside what it needs."""
    folder = tmp_path_factory.mktemp("reader")
    environment = folder / "env"
    venv.create(environment, symlinks=True)
    python = environment / "bin" / "python"
    options = ["--quiet", "--no-index", "--no-deps"]
    run(sys.executable, "-m", "pip", "--python", python, "install", *options, wheel, cwd=folder)
    (packages,) = environment.glob("lib/python*/site-packages")
    # its folder alone: where the clone is, as an editable install, stands in a .pth file there
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    (folder / "train.py").write_text(TRAINS, encoding="utf-8")
    (folder / "places.py").write_text(PRINTS_PLACES, encoding="utf-8")
    return folder


def test_the_wheel_holds_every_tracked_file_of_the_packages_and_no_other(wheel: Path) -> None:
    expected = set()
    for path in tracked():
        (source,) = (folder for folder in PACKAGES if path.startswith(folder + "/"))
        expected.add(PACKAGES[source] + path.removeprefix(source))
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert len(expected) > 300
    assert "stability/recorder/inside/startup/sitecustomize.py" in held
    assert held == expected


@pytest.mark.slow
def test_the_source_distribution_makes_the_same_wheel(
    copy: Path, wheel: Path, tmp_path: Path
) -> None:
    hook = "from setuptools import build_meta; build_meta.build_sdist('sdist')"
    run(sys.executable, "-c", hook, cwd=copy)
    (source,) = (copy / "sdist").glob("*.tar.gz")
    found = build(source, tmp_path / "built")
    assert found.name == wheel.name
    contents = [
        {name: each.read(name) for name in each.namelist() if not name.endswith("RECORD")}
        for each in map(zipfile.ZipFile, (found, wheel))
    ]
    assert contents[0] == contents[1]


@pytest.mark.slow
def test_the_wheel_alone_records_a_script_and_shows_its_ladder_and_report(place: Path) -> None:
    python, stability = place / "env" / "bin" / "python", place / "env" / "bin" / "stability"
    ours, kernels, *searched = run(python, "places.py", cwd=place).splitlines()
    assert Path(ours).is_relative_to(place / "env")
    assert Path(kernels).is_relative_to(place / "env")
    assert not {str(ROOT), str(ROOT / "kernels")} & set(searched), "the clone is not there"
    for arm in ("baseline", "rerun"):
        asked = ["--study", "mine", "--arm", arm, "--wandb", "disabled", "--", python, "train.py"]
        said = run(stability, "record", *asked, cwd=place)
        assert f"{arm}, seed 0: finished after 6 updates, 4 weights of Sequential" in said
    ladder = run(stability, "show", "runs/mine", cwd=place)
    (rerun,) = (line for line in ladder.splitlines() if line.startswith("rerun"))
    assert "0 (exact)" in rerun
    run(stability, "report", "runs/mine", cwd=place)
    page = (place / "runs" / "mine" / "report.html").read_text(encoding="utf-8")
    assert "</html>" in page


LOADS = """
import sys
from pathlib import Path
from stability.config.arms import expand
from stability.config.command_study import expand_commands, is_command_study, load_command_study
from stability.config.load import load_study

for name in sys.argv[1:]:
    path = Path(name, "study.yaml")
    if is_command_study(path):
        study = load_command_study(path, {})
        arms = expand_commands(study)
    else:
        study = load_study(path)
        arms = expand(study)
    print(study.name, *sorted(arm.role for arm in arms if arm.role))
"""


@pytest.mark.slow
def test_the_wheel_alone_writes_every_template_and_each_study_of_them_loads(place: Path) -> None:
    python, stability = place / "env" / "bin" / "python", place / "env" / "bin" / "stability"
    with_study = []
    for template in get_args(Template):
        asked = ["--template", template, "--to", f"{template}/study.yaml"]
        said = run(stability, "init", *asked, cwd=place)
        written = said.splitlines()[0].removeprefix("written: ").split(", ")
        assert all((place / name).stat().st_size > 200 for name in written), written
        if f"{template}/study.yaml" in written:
            with_study.append(template)
    assert len(with_study) == 4, "checkpoints, which are there already, have no study"
    (place / "loads.py").write_text(LOADS, encoding="utf-8")
    loaded = run(python, "loads.py", *with_study, cwd=place).splitlines()
    for template, line in zip(with_study, loaded, strict=True):
        name, *roles = line.split()
        assert name == f"my_{template}"
        assert {"broken", "reference", "nudge"} <= {*roles}


@pytest.mark.slow
def test_the_wheel_alone_shows_its_pages_and_what_they_name_is_there(place: Path) -> None:
    stability = place / "env" / "bin" / "stability"
    listed = run(stability, "docs", cwd=place)
    names = re.findall(r"^  (\w+) ", listed, flags=re.MULTILINE)
    assert {path.stem for path in (ROOT / "docs").glob("*.md")} <= {*names}
    for name in names:
        page = run(stability, "docs", name, cwd=place)
        for file in re.findall(rf"\(({place}[^)]*)\)", page):
            assert Path(file).is_relative_to(place / "env"), (name, file)
            assert Path(file).exists(), (name, file)
        others = set(re.findall(r"\]\(([\w./-]+\.md)", page))
        assert {Path(target).stem for target in others} <= {*names, "README"}, name
    assert "kernel_check.yml (" in run(stability, "docs", "my_kernel", cwd=place)


@pytest.mark.slow
def test_the_wheel_alone_lists_the_experiments_and_runs_one(place: Path) -> None:
    stability = place / "env" / "bin" / "stability"
    held = (place / "env").glob("lib/python*/site-packages/stability_experiments/experiments/*.py")
    names = [path.stem for path in held if "\nSIZES" in path.read_text(encoding="utf-8")]
    assert len(names) > 10
    listed = run(stability, "experiment", cwd=place)
    assert [name for name in names if name not in listed.split()] == []
    refused = done(stability, "experiment", "fa3_tabel3", cwd=place)
    assert refused.returncode == 2
    assert "nearest: fa3_table3" in " ".join(refused.stderr.split())
    assert not (place / "experiments").exists(), "of what is not run nothing is kept"
    # a folder of the user's with the name of ours is not taken for it
    (place / "experiments").mkdir()
    (place / "experiments" / "__init__.py").write_text("raise SystemExit(9)\n", encoding="utf-8")
    before = {path: path.stat().st_mtime_ns for path in (place / "env").rglob("results/*")}
    said = run(stability, "experiment", CHEAPEST, "--size", "quick", cwd=place)
    assert "FlashAttention-3's table of errors" in said
    assert "holds       control: " in said
    assert before == {path: path.stat().st_mtime_ns for path in before}, "the package's own"


@pytest.mark.long
def test_the_demo_of_the_wheel_alone_ends_in_its_answer(place: Path, tmp_path: Path) -> None:
    stability = place / "env" / "bin" / "stability"
    said = run(stability, "demo", "--out", tmp_path / "runs", "--wandb", "disabled", cwd=place)
    for arm in ("flash_fa2", "flash_all_bf16", "broken"):
        assert re.search(rf"^{arm} (PASS|FAIL|INCONCLUSIVE|NO ASSAY)", said, re.MULTILINE), arm
    # the harm of these two is far beyond every limit, on any CPU
    assert "flash_all_bf16 FAIL" in said
    assert "broken FAIL, as it must" in said
    assert "planted faults were found" in " ".join(said.split())
    study = tmp_path / "runs" / "quickstart"
    assert "</html>" in (study / "report.html").read_text(encoding="utf-8")
    assert "24 of 24 planned pairs keep the contract" in run(stability, "verify", study, cwd=place)


def lower_bounds() -> dict[str, str]:
    """Return the lowest version that `pyproject.toml` lets in, by the name of what has one."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"].values()
    listed = [*project["dependencies"], *(each for extra in extras for each in extra)]
    found = {}
    for each in map(Requirement, listed):
        if each.name != project["name"]:
            (bound,) = each.specifier
            assert bound.operator == ">=", each
            found[canonicalize_name(each.name)] = bound.version
    return found


def test_the_oldest_set_is_the_lower_bounds_and_what_they_require() -> None:
    lines = (ROOT / "constraints-oldest.txt").read_text(encoding="utf-8").split("# what those", 1)
    pinned, required = (
        [Requirement(line) for line in part.splitlines()[1:] if line and not line.startswith("#")]
        for part in lines
    )
    versions = {}
    for each in (*pinned, *required):
        (pin,) = each.specifier
        assert pin.operator == "==", each
        assert canonicalize_name(each.name) not in versions, each
        versions[canonicalize_name(each.name)] = pin.version
    bounds = lower_bounds()
    assert [each.name for each in pinned] == sorted((x.name for x in pinned), key=str.lower)
    assert {
        canonicalize_name(each.name): versions[canonicalize_name(each.name)] for each in pinned
    } == bounds


UNREACHED = re.compile(
    r"NewConnectionError|ConnectTimeout|ReadTimeout|ProxyError|NameResolutionError|SSLError"
    r"|Connection (?:refused|reset|aborted|broken)|name resolution"
)
"""What pip says of an index that it can't reach; a conflict of versions is none of it."""


VERSIONS = {"oldest": ["-c", ROOT / "constraints-oldest.txt"], "newest": []}
"""What pip is told of the versions: the oldest set, or nothing, as somebody who installs today."""


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("versions", VERSIONS)
def test_a_study_comes_to_its_verdict_beside_the_oldest_and_the_newest_versions(
    versions: str, wheel: Path, tmp_path: Path
) -> None:
    if versions == "oldest" and sys.version_info[:2] != (3, 11):
        pytest.skip("the oldest set is of Python 3.11")
    # measured: 9 GB, beside what other tests write at the same time
    if shutil.disk_usage(tmp_path).free < 16 * 2**30:
        pytest.skip("torch's CUDA build, and what it needs, take 16 GB of free disk")
    # not in a folder that pytest keeps for later
    with tempfile.TemporaryDirectory(dir=tmp_path) as place:
        folder = Path(place)
        venv.create(folder / "env", with_pip=True, symlinks=True)
        python, stability = folder / "env" / "bin" / "python", folder / "env" / "bin" / "stability"
        options = [*VERSIONS[versions], "--no-cache-dir", "--retries", "1"]
        ended = done(python, "-m", "pip", "install", *options, wheel, cwd=folder)
        said = ended.stdout + ended.stderr
        if ended.returncode and UNREACHED.search(said):
            pytest.skip(f"no package index is reached: {said.splitlines()[-1]}")
        assert ended.returncode == 0, said
        run(python, "-m", "pip", "check", cwd=folder)
        run(stability, "init", "--template", "kernel", cwd=folder)
        study = folder / "study.yaml"
        study.write_text(in_short(study.read_text(encoding="utf-8")), encoding="utf-8")
        run(stability, "run", "study.yaml", cwd=folder)
        judged = run(stability, "verdict", "runs/my_kernel", cwd=folder, code=3)
        assert "mine INCONCLUSIVE. It has, with its controls, 1 of the 3 seeds" in judged
        run(stability, "report", "runs/my_kernel", cwd=folder)
        run(stability, "verify", "runs/my_kernel", cwd=folder)
        manifest = folder / "runs" / "my_kernel" / "mine" / "seed-0" / "manifest.json"
        environment = json.loads(manifest.read_text(encoding="utf-8"))["environment"]
        bounds = lower_bounds()
        for name in ("lightning", "numpy", "torch"):
            ran = Version(Version(environment[f"package.{name}"]).base_version)
            least = Version(bounds[name])
            assert ran > least if versions == "newest" else ran == least, name
