"""What runs in the user's process needs Python 3.9, torch 2.1 and the standard library alone.

The static tests hold that everywhere. A pair across versions is recorded where an interpreter with
an older torch is named: `STABILITY_OLD_PYTHON=/path/to/python`.
"""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

import stability
from stability.records.manifest import read_manifest
from stability.records.paths import RunPaths
from tests.stability.recorder.recording import SCRIPTS, code_of

_ROOT = Path(stability.__file__).parent
_ROOMS = {
    "probe": ("executed", "known_answers", "node_owners", "products"),
    "records": ("executed_row", "numeric_switches"),
}
"""What is loaded there of other rooms, under another package's name."""
SOURCES = [
    *sorted((_ROOT / "recorder" / "inside").rglob("*.py")),
    *(_ROOT / room / f"{name}.py" for room, names in _ROOMS.items() for name in names),
]
OLD = os.environ.get("STABILITY_OLD_PYTHON", "")

_NEWER_KEYWORDS = {"zip": {"strict"}, "dataclass": {"slots", "kw_only"}}
"""Keywords that Python 3.9 does not know."""
_NEWER_MODULES = {"tomllib"}


def imported(tree: ast.AST) -> Iterator[str]:
    """Give the top-level packages that a file imports by their absolute names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield (node.module or "").partition(".")[0]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_a_file_of_the_users_process_is_python_3_9(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 9))
    has_annotations = any(
        isinstance(node, ast.ImportFrom) and node.module == "__future__" for node in tree.body
    )
    for node in ast.walk(tree):
        assert not isinstance(node, (ast.Match, ast.TryStar)), path
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            given = {keyword.arg for keyword in node.keywords}
            assert not _NEWER_KEYWORDS.get(node.func.id, set()) & given, (path, node.lineno)
        if isinstance(node, ast.AnnAssign | ast.FunctionDef) and not has_annotations:
            # evaluated as it is imported: `X | None` is an error there
            said = [node.annotation] if isinstance(node, ast.AnnAssign) else [node.returns]
            unions = [x for each in said if each for x in ast.walk(each)]
            assert not any(isinstance(x, ast.BitOr) for x in unions), (path, node.lineno)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_a_file_of_the_users_process_imports_torch_and_the_standard_library_alone(
    path: Path,
) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    others = set(imported(tree)) - set(sys.stdlib_module_names) - {"torch"}
    # one of our own attentions, where it is asked for and installed beside the script
    # and the instrument, which says so
    others -= {"stability"} if path.name in ("attention.py", "recorded.py") else set()
    assert not others
    known = {file.stem for file in SOURCES}
    relative = [x for x in ast.walk(tree) if isinstance(x, ast.ImportFrom) and x.level]
    for node in relative:
        names = [node.module.rpartition(".")[2]] if node.module else [x.name for x in node.names]
        assert set(names) <= known, (path, node.lineno)
    assert not set(imported(tree)) & _NEWER_MODULES


def _torch_of(python: str) -> str:
    code = "import torch; print(torch.__version__)"
    ran = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


@pytest.mark.slow
@pytest.mark.skipif(not OLD, reason="STABILITY_OLD_PYTHON names no interpreter with an older torch")
@pytest.mark.parametrize("script", ["plain.py", "averaged.py", "compiled.py"])
def test_an_older_torch_is_an_arm(
    script: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:/usr/bin:/bin")
    content = {
        "name": "versions",
        "question": "another torch?",
        "base": {
            "command": f"python {SCRIPTS / script} --seed {{seed}} {{flags}}",
            "train": {"steps": 6},
            "same_start": True,
        },
        "arms": {"old": {"python": OLD}},
    }
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump(content))
    assert code_of("run", str(path), "--out", str(tmp_path), "--wandb", "disabled") == 0
    found = read_manifest(RunPaths.for_run(tmp_path / "versions", "old", 0).manifest)
    assert (found.state, found.step, found.axis) == ("finished", 6, "python")
    assert found.resolved["start"] == "given"
    assert found.environment["package.torch"] == _torch_of(OLD)
    assert found.hashes["batches"]
    capsys.readouterr()
    # under a compiler neither torch's products are seen, as with one torch (`test_scripts`)
    is_compiled = script == "compiled.py"
    assert code_of("verify", str(tmp_path / "versions")) == int(is_compiled)
    said = " ".join(capsys.readouterr().out.split())
    unseen = [
        f"what {arm}, seed 0 multiplied: torch.compile was called, and what a compiled graph "
        "multiplies is not seen"
        for arm in ("baseline", "old")
    ]
    proof = f"unproven: not on record: {', '.join(unseen)} 0 of 1 planned pairs"
    assert (proof in said) == is_compiled, said
