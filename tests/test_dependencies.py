"""What the packages import is asked for in `pyproject.toml`, so that the wheel brings it along."""

import ast
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
FOLDERS = ("stability", "kernels/attention_kernels", "experiments")
OWN = {"stability", "attention_kernels", "experiments", "tests"}


def imported(path: Path) -> set[str]:
    """The top-level modules that a file imports by a statement, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {each.name.partition(".")[0] for each in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            found.add(node.module.partition(".")[0])
    return found - OWN - sys.stdlib_module_names


def declared() -> set[str]:
    """The distributions that `pyproject.toml` asks for, those of the tools aside."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    lists = [project["dependencies"], *(each for name, each in extras.items() if name != "dev")]
    return {canonicalize_name(Requirement(text).name) for each in lists for text in each}


def test_what_is_imported_is_asked_for():
    owners = packages_distributions()
    known = declared()
    missing = {}
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for module in imported(path):
                names = {canonicalize_name(name) for name in owners.get(module, [module])}
                if not names & known:
                    missing.setdefault(module, []).append(path.relative_to(ROOT).as_posix())
    assert missing == {}
