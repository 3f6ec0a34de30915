"""Walks through what has to be true before a release; publishes nothing. `make release-check`.

Each line is a check and what was found; exit code 1 if any does not hold. What no script can say is
listed at the end, for a person.
"""

import os
import re
import runpy
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator
from datetime import date, timedelta
from pathlib import Path

ROOT = Path(__file__).parent.parent
NOT_RELEASED = "not released"
RECENT = timedelta(days=14)
BY_HAND = (
    "`.ci/run` on a fresh clone, and `make test-slow` with its last result in tests/slow.md",
    "`make gpu` on a GPU, its JSON committed, and docs/measured.md",
    "the answer in README.md is what `make demo` prints",
    "each picture that `make screenshots` left in build/screenshots was looked at",
    "somebody who has not seen the project went through the three doors of the README",
)


def versions(root: Path) -> dict[str, str]:
    """Return the version by the file that names it; empty where one names none."""
    named = {
        "stability/__init__.py": r'__version__ = "([^"]+)"',
        "CITATION.cff": r"^version: (\S+)$",
        "CHANGELOG.md": r"^## (\S+)",
    }
    found = {
        "pyproject.toml": tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]
    }
    for name, pattern in named.items():
        match = re.search(pattern, (root / name).read_text(), re.MULTILINE)
        found[name] = match.group(1) if match else ""
    return found


def version_trouble(root: Path) -> str:
    """Say which files name another version, or that the changelog's newest has no date."""
    found = versions(root)
    if len(set(found.values())) > 1:
        return ", ".join(f"{name} {version or 'none'}" for name, version in found.items())
    (heading,) = re.findall(r"^## .*$", (root / "CHANGELOG.md").read_text(), re.MULTILINE)[:1]
    if NOT_RELEASED in heading or not re.search(r"\d{4}-\d\d-\d\d", heading):
        return f"CHANGELOG.md: {heading!r} must have the date of the release"
    return ""


_WHOLE = r'make test-slow(?! SLOW=(?!"slow and not long"))|\.ci/run'
"""What the row of a run of all slow tests says, with or without the long ones."""


def last_slow_run(root: Path) -> tuple[date, str]:
    """Return date and result of the newest row of tests/slow.md that is of all slow tests.

    ValueError if there is none.
    """
    runs = []
    for line in (root / "tests" / "slow.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("| ").split(" | ")]
        is_whole = re.search(_WHOLE, cells[0]) and "stopped" not in cells[0]
        if line.startswith("|") and len(cells) == 4 and is_whole:
            runs.append((date.fromisoformat(cells[1]), cells[3]))
    if not runs:
        raise ValueError("tests/slow.md must have a row of `make test-slow` or `.ci/run`, has none")
    newest = max(day for day, _ in runs)
    return [run for run in runs if run[0] == newest][-1]


def slow_trouble(root: Path, today: date) -> str:
    """Say how old the newest run of all slow tests is, if it is too old, or what failed in it."""
    day, result = last_slow_run(root)
    if today - day > RECENT:
        return f"the newest is of {day}"
    failed = re.search(r"\b[1-9][\d,]* (?:failed|errors?)\b", result)
    return f"that of {day} has {failed.group()}" if failed else ""


def picture_trouble(root: Path) -> str:
    """Say which sources of pages, terminal and figures are others than when pictures were taken."""
    changed = runpy.run_path(str(ROOT / "docs" / "scripts" / "shown_pictures.py"))["changed_since"](
        root
    )
    return f"run make screenshots: {', '.join(changed)} changed since" if changed else ""


def tree_trouble(root: Path) -> str:
    """Say what is not committed."""
    asked = ["git", "status", "--porcelain"]
    said = subprocess.run(asked, cwd=root, capture_output=True, text=True, check=True).stdout
    return ", ".join(line[3:] for line in said.splitlines()[:5])


def said(*words: str | Path, cwd: Path) -> str:
    """Run a command as a reader does, and return what it prints; CalledProcessError if it fails."""
    asked = [str(word) for word in words]
    # where the clone is stands in PYTHONPATH, if anywhere
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    return subprocess.run(
        asked, cwd=cwd, env=environment, capture_output=True, text=True, check=True
    ).stdout


def built(root: Path, place: Path) -> tuple[Path, Path]:
    """Build the wheel and the source distribution in the folder `place`, and return their files."""
    said(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", place, root, cwd=place)
    hook = f"from setuptools import build_meta; build_meta.build_sdist({str(place)!r})"
    said(sys.executable, "-c", hook, cwd=root)
    (wheel,), (source,) = place.glob("*.whl"), place.glob("*.tar.gz")
    return wheel, source


def build_trouble(root: Path) -> str:
    """Install wheel and source distribution where nothing else of this project is, and use each.

    They share an environment, for what they require is large: the second takes the first's place.
    """
    expected = f"stability {versions(root)['pyproject.toml']}\n"
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        said(sys.executable, "-m", "venv", place / "env", cwd=place)
        bin_folder = place / "env" / "bin"
        install = [bin_folder / "python", "-m", "pip", "install", "-q", "-c"]
        install.append(root / "constraints.txt")
        for distribution in built(root, place):
            said(*install, distribution, cwd=place)
            again = ["--force-reinstall", "--no-deps", distribution]
            said(*install, *again, cwd=place)
            found = said(bin_folder / "stability", "--version", cwd=place)
            if found != expected:
                return f"{distribution.name} says {found.strip()!r}"
            use(bin_folder / "stability", place / distribution.name.replace(".", "_"))
    return ""


def use(stability: Path, folder: Path) -> None:
    """Do in a new folder what a reader does first, with a kernel that is right."""
    folder.mkdir()
    said(stability, "doctor", cwd=folder)
    said(stability, "init", "--template", "kernel", cwd=folder)
    said(stability, "check", "my_kernel:attend", "--quick", "--dtype", "bf16", cwd=folder)


def wheel_trouble(root: Path) -> str:
    """Run the slow and long tests of the wheel: the demo, a study beside the oldest and the newest.

    One that is skipped, for the lack of Python 3.11, of disk or of an index, is a trouble too.
    """
    words = [sys.executable, "-m", "pytest", "-q", "-m", "slow or long", "tests/test_wheel.py"]
    ended = subprocess.run(words, cwd=root, capture_output=True, text=True, check=False)
    last = (ended.stdout.strip().splitlines() or [ended.stderr.strip() or "no output"])[-1]
    return last if ended.returncode or re.search(r"\bskipped\b", last) else ""


def make_trouble(*targets: str) -> str:
    """Run make's targets; say which one fails."""
    for target in targets:
        if subprocess.run(["make", target], cwd=ROOT, capture_output=True, check=False).returncode:
            return f"make {target} fails"
    return ""


def walk(checks: dict[str, Callable[[], str]]) -> Iterator[tuple[str, str]]:
    """Yield each check's name and its trouble, empty where it holds."""
    for name, check in checks.items():
        try:
            yield name, check()
        except subprocess.CalledProcessError as error:
            yield name, f"{' '.join(map(str, error.cmd[:4]))} ...: exit code {error.returncode}"
        except (OSError, ValueError, ImportError) as error:
            yield name, f"{type(error).__name__}: {error}"


def main() -> int:
    """Print each check, and what is left to a person."""
    checks = {
        "one version, and its date in the changelog": lambda: version_trouble(ROOT),
        "nothing is left to commit": lambda: tree_trouble(ROOT),
        "tests/slow.md is recent, and nothing failed": lambda: slow_trouble(ROOT, date.today()),
        "pictures of the program are recent": lambda: picture_trouble(ROOT),
        "lint and tests": lambda: make_trouble("lint", "test"),
        "pictures and site": lambda: make_trouble("docs") or tree_trouble(ROOT),
        "wheel and source distribution install and run": lambda: build_trouble(ROOT),
        "the demo from the wheel, the oldest and newest versions": lambda: wheel_trouble(ROOT),
    }
    failed = 0
    for name, trouble in walk(checks):
        failed += bool(trouble)
        sys.stdout.write(
            f"{'FAILS' if trouble else 'holds'}  {name}{': ' * bool(trouble)}{trouble}\n"
        )
        sys.stdout.flush()
    sys.stdout.write("\nby hand:\n" + "".join(f"  [ ] {line}\n" for line in BY_HAND))
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
