"""The house rules of the design: arrows, sizes, names, lightness, and who may round."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = (ROOT / "stability", ROOT / "kernels" / "attention_kernels", ROOT / "experiments")
MODULES = sorted(path for package in PACKAGES for path in package.rglob("*.py"))
LONGEST = 500
FORBIDDEN = {"utils", "util", "helpers", "common", "misc", "core", "base"}
PUBLIC = {
    "attention_kernels": [
        "BASELINE_PROFILES",
        "PROFILES",
        "AttentionFn",
        "AttentionOutput",
        "BaselineNumerics",
        "FlashNumerics",
        "Format",
        "MaskArguments",
        "attention",
        "attention_with_kvcache",
        "baseline_attention",
        "dropout_keep_mask",
        "flash_attention",
        "golden_attention",
        "resolve_engine",
        "round_to",
    ],
    "stability": [
        "RecorderCallback",
        "ShadowCallback",
        "__version__",
        "attention_call",
        "module_call",
        "record",
        "register_transformers",
        "shadow",
    ],
}


def _fresh(code: str) -> subprocess.CompletedProcess[str]:
    path = f"{ROOT}:{ROOT / 'kernels'}"
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": path, "PATH": "", "HOME": "/nonexistent"},
        timeout=120,
    )


def test_imports_keep_the_contracts():
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout
    assert "5 kept, 0 broken" in done.stdout


def test_every_file_is_short_named_by_its_subject_and_opens_with_a_docstring():
    wrong = [
        f"{path.relative_to(ROOT)}: {problem}" for path in MODULES for problem in _problems(path)
    ]
    assert not wrong, "\n".join(wrong)


def test_every_file_of_tests_is_short():
    lengths = {path: len(path.read_text().splitlines()) for path in (ROOT / "tests").rglob("*.py")}
    assert lengths
    assert not {path.name: lines for path, lines in lengths.items() if lines > LONGEST}


def _problems(path: Path) -> list[str]:
    text = path.read_text()
    lines = len(text.splitlines())
    checks = {
        f"{lines} lines, at most {LONGEST}": lines <= LONGEST,
        "a forbidden name": path.stem not in FORBIDDEN,
        "no docstring at its top": text.startswith('"""')
        or (path.name == "__init__.py" and not text),
    }
    return [problem for problem, holds in checks.items() if not holds]


def test_no_folder_has_a_forbidden_name():
    assert not {path.parent.name for path in MODULES} & FORBIDDEN


@pytest.mark.parametrize("package", PUBLIC)
def test_public_surface_is_the_documented_one(package):
    done = _fresh(f"import {package}; print(sorted({package}.__all__))")
    assert done.stdout.strip() == str(sorted(PUBLIC[package])), done.stderr


@pytest.mark.slow
def test_numerics_run_where_triton_lightning_and_wandb_cannot_be_imported():
    done = _fresh(
        "import sys\n"
        "for name in ('triton', 'lightning', 'wandb'): sys.modules[name] = None\n"
        "import torch\n"
        "from attention_kernels import *\n"
        "from stability.metrics.deviation import deviation\n"
        "from stability.metrics.drift import drift\n"
        "from stability.metrics.wasserstein import wasserstein_1d\n"
        "q, k, v = (torch.randn(1, 2, 9, 16, requires_grad=True) for _ in range(3))\n"
        "out = flash_attention(q, k, v, causal=True)\n"
        "out.sum().backward()\n"
        "base = baseline_attention(q, k, v, causal=True)\n"
        "gold = golden_attention(q, k, v, causal=True)\n"
        "assert deviation(out.detach(), base.detach(), output_format='fp32')['max_abs'] < 1e-5\n"
        "assert drift({'w': out}, {'w': base})['all']['w1'] < 1e-5\n"
        "assert wasserstein_1d(out.detach(), gold.detach().float()) < 1e-5\n"
        "print('ran')\n"
    )
    assert done.stdout.strip() == "ran", done.stderr


def test_importing_the_packages_is_light():
    done = _fresh(
        "import sys, stability\n"
        "heavy = {'torch', 'lightning', 'wandb', 'triton', 'datasets', 'plotly'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
        "from attention_kernels import flash_attention\n"
        "assert not (heavy - {'torch'}) & set(sys.modules)\n"
        "print('light')\n"
    )
    assert done.stdout.strip() == "light", done.stderr


def test_names_in_a_study_are_checked_without_torch():
    done = _fresh(
        "import sys\n"
        "import attention_kernels.formats, attention_kernels.numerics, attention_kernels.profiles\n"
        "from attention_kernels import PROFILES, BaselineNumerics, FlashNumerics, Format\n"
        "PROFILES['fa2'].with_(block_k=32, probabilities='e5m8').to_dict()\n"
        "assert not {'torch', 'numpy', 'triton'} & set(sys.modules)\n"
        "print('light')\n"
    )
    assert done.stdout.strip() == "light", done.stderr


def test_configs_and_records_are_read_and_analysed_without_torch():
    done = _fresh(
        "import sys\n"
        "import stability.config.diff, stability.config.load\n"
        "import stability.records.metric_table, stability.records.run_files\n"
        "import stability.records.parallel_reading, stability.records.waterfall_record\n"
        "import importlib, pkgutil, stability.analysis as room\n"
        "[importlib.import_module(f'{room.__name__}.{m.name}')"
        " for m in pkgutil.iter_modules(room.__path__)]\n"
        "heavy = {'torch', 'lightning', 'wandb', 'triton', 'datasets', 'plotly'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
        "print('light')\n"
    )
    assert done.stdout.strip() == "light", done.stderr


@pytest.mark.parametrize("name", ["forward", "backward"])
def test_twin_casts_only_through_round_to(name):
    source = (ROOT / "kernels" / "attention_kernels" / "twin" / f"{name}.py").read_text()
    narrow = re.findall(r"float16|bfloat16|\.half\(|\.bfloat16\(", source)
    assert not narrow, "a rounding point must go through rounding.round_to"


CHANGES = re.compile(
    r"\.(write_text|write_bytes|unlink|mkdir|touch|rmdir|hardlink_to|symlink_to|truncate)\("
    r"|\bos\.(replace|rename|remove|link|makedirs|ftruncate|fsync|fdatasync|write|utime)\("
    r"|\bshutil\.\w+\(|(FileIO|\bopen)\([^)]*[\"'][rb]*[wax+]"
)
ELSEWHERE = {
    "cli/main.py": "the null device",
    "cli/report.py": "a page that a browser opens once",
    "cli/verdict.py": "the summary of a workflow's job, which is GitHub's",
    "execute/ray_tasks.py": "what a task prints, which is no record",
    "recorder/inside/spool.py": "what a record is made of, in a process without this package",
    "records/bundle.py": "an archive, inside of `write_whole`, and a folder that it is unpacked in",
    "records/file_operations.py": "the place itself",
    "records/object_store.py": "a copy of what an object store holds, in a temporary folder",
    "report/live/summary_store.py": "a cache of the dashboard, kept out of the records",
    "recorder/launch.py": "what a command prints, which is no record",
    "study/export.py": "a file of a copy, inside of `write_whole`",
    "study/foreign.py": "the folder that a recorded training writes into, which is no record yet",
    "study/worktree.py": "checkouts of commits, kept out of the records",
    "tracking/wandb_run.py": "W&B's own folders",
}
"""Where files are changed otherwise, and which; a test that replays our operations misses them."""


def test_no_message_tells_a_user_to_remove_files_of_ours():
    said = re.compile(r"\b([Rr]emove|[Dd]elete) (it\b|this\b|that\b|the\b|them\b|\{)")
    found = [
        f"{path.name}: {literal.value}"
        for path in sorted((ROOT / "stability").rglob("*.py"))
        for literal in ast.walk(ast.parse(path.read_text()))
        if isinstance(literal, ast.Constant) and isinstance(literal.value, str)
        if said.search(literal.value) and literal.value not in _docstrings(path)
    ]
    assert found == []


def _docstrings(path):
    """Return the strings of a file that stand alone: docstrings, of attributes too."""
    tree = ast.parse(path.read_text())
    return {
        node.value.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }


def test_records_are_changed_by_the_file_operations_alone():
    found = set()
    for path in sorted((ROOT / "stability").rglob("*.py")):
        for line in path.read_text().splitlines():
            # `temporary` is what a library is given to write to, inside of `write_whole`
            code = re.sub(r"\b(file_operations|log|self|temporary)\.\w+\(", "(", line)
            if CHANGES.search(code) and not line.lstrip().startswith(('"', "#")):
                found.add(str(path.relative_to(ROOT / "stability")))
    assert found == {*ELSEWHERE}


def test_one_file_writes_the_weights_of_a_run():
    """Our trainer, somebody's script and an adopted series come on record by one door."""
    writers = {
        str(path.relative_to(ROOT))
        for path in MODULES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "write_snapshot"
    }
    assert writers == {"stability/recorder/writer.py"}
