"""Walks through what has to be true before a release; publishes nothing. `make release-check`.

Each line is a check and what was found; exit code 1 if any does not hold. What no script can say is
listed at the end, for a person.
"""

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


def slow_trouble(root: Path, today: date) -> str:
    """Say how old the newest result in tests/slow.md is, if it is too old."""
    found = re.findall(r"\b(\d{4})-(\d\d)-(\d\d)\b", (root / "tests" / "slow.md").read_text())
    newest = max(date(int(y), int(m), int(d)) for y, m, d in found)
    return f"the newest is of {newest}" if today - newest > RECENT else ""


def picture_trouble(root: Path) -> str:
    """Say which sources of pages, terminal and figures are others than when pictures were taken."""
    changed = runpy.run_path(str(ROOT / "docs" / "shown_pictures.py"))["changed_since"](root)
    return f"run make screenshots: {', '.join(changed)} changed since" if changed else ""


def tree_trouble(root: Path) -> str:
    """Say what is not committed."""
    asked = ["git", "status", "--porcelain"]
    said = subprocess.run(asked, cwd=root, capture_output=True, text=True, check=True).stdout
    return ", ".join(line[3:] for line in said.splitlines()[:5])


def build_trouble(root: Path) -> str:
    """Build the wheel, install it where nothing else of this project is, and ask its version."""
    with tempfile.TemporaryDirectory() as place:
        commands = (
            [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", place, str(root)],
            [sys.executable, "-m", "venv", f"{place}/env"],
        )
        for command in commands:
            subprocess.run(command, check=True, capture_output=True)
        (wheel,) = Path(place).glob("*.whl")
        python = f"{place}/env/bin/python"
        install = [python, "-m", "pip", "install", "-q", "-c", str(root / "constraints.txt")]
        subprocess.run([*install, str(wheel)], check=True, capture_output=True)
        asked = [f"{place}/env/bin/stability", "--version"]
        said = subprocess.run(asked, cwd=place, capture_output=True, text=True, check=True).stdout
    expected = f"stability {versions(root)['pyproject.toml']}\n"
    return "" if said == expected else f"the wheel says {said.strip()!r}"


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
        except (OSError, ValueError) as error:
            yield name, f"{type(error).__name__}: {error}"


def main() -> int:
    """Print each check, and what is left to a person."""
    checks = {
        "one version, and its date in the changelog": lambda: version_trouble(ROOT),
        "nothing is left to commit": lambda: tree_trouble(ROOT),
        "tests/slow.md is recent": lambda: slow_trouble(ROOT, date.today()),
        "pictures of the program are recent": lambda: picture_trouble(ROOT),
        "lint and tests": lambda: make_trouble("lint", "test"),
        "pictures and site": lambda: make_trouble("docs") or tree_trouble(ROOT),
        "the wheel installs and starts": lambda: build_trouble(ROOT),
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
