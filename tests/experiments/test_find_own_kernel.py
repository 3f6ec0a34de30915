"""The example of a kernel of one's own: it runs, and its package's entry points are understood."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from attention_kernels.testing import check_attention
from attention_kernels.testing.cells import FULL, QUICK
from stability import shadow
from tests.stability.intercept.torch_models import Decoder, train_step

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "experiments" / "own_kernel"


@pytest.mark.slow
def test_the_bug_is_named_in_its_head_and_the_right_kernel_is_not_accused():
    done = subprocess.run(
        [sys.executable, str(ROOT / "experiments" / "find_own_kernel.py")],
        capture_output=True,
        text=True,
        timeout=120,
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "PATH": "", "HOME": "/nonexistent"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    right, wrong = done.stdout.split("attend_without_tail")
    assert "no layer or head stands out" in right
    assert wrong.count("head 1: error ratio stands out since step 0") == 3


@pytest.mark.slow
def test_the_right_kernel_passes_the_check_where_its_backward_is_hard(monkeypatch):
    monkeypatch.syspath_prepend(PACKAGE)
    import own_kernel

    hard = [
        cell
        for cell in QUICK
        if cell.law == "one-signed v"
        or cell.shape.heads != cell.shape.kv_heads
        or cell.shape.query_len > cell.shape.key_len
    ]
    report = check_attention(own_kernel.attend, dtypes=["fp32"], cells=hard)
    assert report.passed, report.sentence
    assert not report.unsupported


def test_it_takes_a_head_dim_of_v_that_is_not_that_of_q_as_the_full_check_asks(monkeypatch):
    monkeypatch.syspath_prepend(PACKAGE)
    import own_kernel

    cells = [cell for cell in FULL if cell.shape.value_dim is not None]
    report = check_attention(own_kernel.attend, dtypes=["bf16"], cells=cells)
    assert report.passed, report.sentence
    assert report.cells == len(cells)


def test_autocast_changes_no_bit_of_it(monkeypatch):
    """In mixed precision it is on, and would round the operands that the kernel has widened."""
    monkeypatch.syspath_prepend(PACKAGE)
    import own_kernel

    q = torch.randn(1, 2, 64, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    alone = own_kernel.attend(q, q, q, causal=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(own_kernel.attend(q, q, q, causal=True), alone)


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """The package as if installed: its module on the path, its entry points in its metadata."""
    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]
    info = tmp_path / "own_kernel-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: own-kernel\nVersion: 0.1.0\n")
    lines = [
        line
        for group, entries in project["entry-points"].items()
        for line in (f"[{group}]", *(f"{name} = {value}" for name, value in entries.items()))
    ]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(PACKAGE)


def test_its_kernel_and_metric_are_known_by_name(installed):
    torch.manual_seed(0)
    model = Decoder()
    with shadow(model, "blockwise") as probe:
        train_step(model, 0)
        probe.step()
    assert not probe.findings
    assert probe.candidates[0].name == "blockwise"
    for what in ("out", "dq", "dk", "dv"):
        worst = probe.metrics[f"deviation/layers.1/{what}/worst_row"]
        assert worst >= probe.metrics[f"deviation/layers.1/{what}/rel_fro"] / 10 > 0
    assert probe.metrics["deviation/layers.1/out/worst_row"] < 1e-3


def test_a_metric_that_fails_is_a_finding(installed, monkeypatch):
    import own_kernel

    def fails(x, reference, valid):
        raise RuntimeError("no such figure")

    monkeypatch.setattr(own_kernel, "worst_row", fails)
    model = Decoder()
    with shadow(model, "blockwise", backward=False) as probe:
        train_step(model, 0)
        probe.step()
    assert "worst_row: RuntimeError: no such figure" in {text for _, _, text in probe.findings}
    assert probe.metrics["deviation/layers.0/out/rel_fro"] < 1e-3
