"""The benchmark judges before it times, counts as flash-attn does, and tells its requirements."""

import json
import os
import subprocess
import sys
import types
from functools import partial
from pathlib import Path

import pytest
import torch

from attention_kernels import PROFILES, flash_attention, golden_attention
from attention_kernels.masks import MaskArguments
from attention_kernels.peers.registry import PeerStatus, peers
from attention_kernels.testing import assert_within_budget

FOLDER = Path(__file__).parents[2] / "kernels" / "benchmarks"


@pytest.fixture
def room(monkeypatch):
    """The benchmark's modules by name, as `python kernels/benchmarks/run.py` sees them."""
    monkeypatch.syspath_prepend(str(FOLDER))
    names = [path.stem for path in FOLDER.glob("*.py")]
    before = set(sys.modules)
    yield types.SimpleNamespace(**{name: __import__(name) for name in names})
    for name in set(names) - before:
        del sys.modules[name]


def test_each_file_is_short_and_says_what_it_is():
    for path in FOLDER.glob("*.py"):
        text = path.read_text()
        assert text.startswith('"""'), path
        assert len(text.splitlines()) <= 300, path


def test_each_field_of_the_numerics_has_a_price(room):
    changed = {name for changes in room.registry.DIALS.values() for name in changes}
    assert changed == set(PROFILES["fa2"].to_dict()) - {"seed"}
    for changes in room.registry.DIALS.values():
        PROFILES["fa2"].with_(**changes).resolve(torch.bfloat16)


def test_each_kind_of_mask_has_a_price_and_is_right(room):
    shape = room.registry.square(2, 4, 40, 16)
    used = set()
    for kind in room.registry.MASKS:
        inputs = room.registry.masked(kind, shape, "cpu")
        used |= set(inputs.mask)
        out = flash_attention(inputs.q, inputs.k, inputs.v, **inputs.mask)
        exact = golden_attention(inputs.q, inputs.k, inputs.v, **inputs.mask)
        assert_within_budget(out, exact.bfloat16(), exact, 8.0, kind)
    assert used == set(MaskArguments.__annotations__) - {"scale"}


def test_flops_are_those_of_flash_attn(room):
    shape = room.registry.square(2, 16, 1024, 128)
    assert room.measure.flops(shape, causal=False) == 4 * 2 * 16 * 1024**2 * 128
    assert room.measure.flops(shape, causal=True) == 2 * 2 * 16 * 1024**2 * 128


def test_attentions_take_turns(room):
    order = []

    def attend(q, k, v, *, name):
        order.append((name, torch.is_grad_enabled()))
        return q + k + v

    inputs = room.registry.draw(room.registry.square(1, 1, 4, 16), "cpu")
    calls = {name: (partial(attend, name=name), inputs) for name in ("a", "b")}
    times = room.measure.take_turns(calls, rounds=2, forward_only=("b",))
    assert order == [("a", True), ("b", False)] * 3
    assert times["a"].both == times["a"].forward + times["a"].backward
    assert times["b"].backward is None


def test_a_time_is_the_median_of_the_turns_after_the_first(room, monkeypatch):
    seconds = iter([(100.0, 200.0), (1.0, 2.0), (9.0, 8.0), (3.0, 4.0)])
    monkeypatch.setattr(room.measure, "_once", lambda *_: next(seconds))
    times = room.measure.take_turns({"a": (None, None)}, rounds=3)
    assert times["a"] == (3.0, 4.0)


@pytest.mark.parametrize("wrong", ["out", "dq"])
def test_a_wrong_attention_is_never_timed(room, monkeypatch, wrong):
    def attend(q, k, v, *, causal, scale):
        if wrong == "dq":
            q = q.detach() + 0.9 * (q - q.detach())
        out = golden_attention(q, k, v, causal=causal, scale=scale).to(q.dtype)
        return out * 1.1 if wrong == "out" else out

    module = types.SimpleNamespace(attend=attend)
    monkeypatch.setitem(sys.modules, "benchmarked", module)
    with pytest.raises(AssertionError, match=f"benchmarked:attend {wrong}: max error"):
        room.run.gate("cpu", "benchmarked:attend")


def test_only_peers_that_run_and_are_right_are_timed(room, monkeypatch, capsys):
    module = types.SimpleNamespace(attend=lambda q, k, v, *, causal, scale: q + k + v)
    monkeypatch.setitem(sys.modules, "benchmarked", module)
    wrong = PeerStatus("benchmarked:attend", "", True, "", True)
    right = room.run.right_peers("cpu", [*peers("cpu"), wrong])
    assert [peer.name for peer in right] == ["sdpa:math", "sdpa:flash", "flex"]
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "flashinfer" in line and "left out: flashinfer is" in line]
    assert "benchmarked:attend" in lines[-1]
    assert "over the budget" in lines[-1]


def test_a_peer_that_refuses_a_shape_says_why_and_the_others_go_on(room, monkeypatch, capsys):
    def attend(q, k, v, *, causal, scale):
        raise RuntimeError("no kernel for head_dim 16; try 64")

    monkeypatch.setitem(sys.modules, "benchmarked", types.SimpleNamespace(attend=attend))
    rows, times = room.compare.compare_peers(
        "cpu",
        room.registry.square(1, 2, 32, 16),
        causal=True,
        own=["flash:fa2"],
        others=[PeerStatus("benchmarked:attend", "", True, "", True)],
        rounds=1,
    )
    assert list(times) == ["flash:fa2"]
    assert rows[1]["refused"] == "no kernel for head_dim 16"
    assert "not here: no kernel for head_dim 16" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("measured", "limit", "at_most", "met"),
    [
        (1.0, 1.0, True, True),
        (1.01, 1.0, True, False),
        (0.9, 1.0, False, False),
        (1.0, 1.0, False, True),
        (float("nan"), 1.0, True, False),
    ],
)
def test_a_requirement_is_met_up_to_its_limit(room, capsys, measured, limit, at_most, met):
    requirement = room.compare.Requirement("speed", measured, limit, at_most)
    assert requirement.met == met
    room.run.print_requirements([requirement])
    assert ("MISS" in capsys.readouterr().out) == (not met)


def test_gpu_goals_are_judged_by_the_mean_over_lengths(room):
    times = room.measure.Times
    measured = {
        (64, length, True): {
            "flash:fa2": times(1.0, 3.0),
            "sdpa:flash": times(forward, 2.0),
            "sdpa:cudnn": times(0.9, 9.0),
        }
        for length, forward in ((512, 0.5), (1024, 4.0))
    }
    found = room.gpu.speed_requirements(measured)
    assert [round(r.measured, 6) for r in found] == [round(2**0.5, 6), round(2 / 3, 6), 0.9]
    assert [r.met for r in found] == [True, False, True]
    del measured[64, 512, True]["flash:fa2"]
    assert not any(r.met for r in room.gpu.speed_requirements(measured))
    assert "sdpa:flash's, forward, head_dim 64 causal (worst length 0.50)" in found[0].claim


def test_published_marks_are_of_one_problem_and_stand_beside_ours(room, capsys):
    marks = json.loads((FOLDER / "published.json").read_text())["tflops"]
    work = [mark["milliseconds"] * mark["tflops"] for mark in marks]
    shares = [1.0, 0.5, 2.5, 1.25]  # full and causal forward, full and causal backward
    for found, share in zip(work, shares, strict=True):
        assert found == pytest.approx(share * work[0], rel=2e-3)
    row = {"name": "flash:fa2", "causal": False, "case": "b1-h8-g8-q512-k512-d256"}
    room.gpu.print_published([row | {"forward_tflops": 500.0, "backward_tflops": 250.0}])
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "711.7" in line and "ours   500.0" in line]
    assert [line for line in lines if "335.6" in line and line.endswith("-")]


@pytest.mark.parametrize("measured", [0.9, 1.1])
def test_the_command_writes_where_and_what_it_measured(room, monkeypatch, tmp_path, measured):
    def section():
        row = {"section": "peers", "name": "flash:fa2", "forward_s": 0.1}
        return [row], [room.compare.Requirement("twin over baseline", measured, 1.0)]

    monkeypatch.setattr(room.cpu, "sections", lambda _: {"peers": section, "dials": None})
    path = tmp_path / "cpu.json"
    code = room.run.main(["--json", str(path), "--only", "peers"])
    assert code == (0 if measured <= 1 else 1)
    found = json.loads(path.read_text())
    assert found["hardware"]["name"]
    assert found["versions"]["torch"] == torch.__version__
    assert found["rows"][0]["forward_s"] == 0.1
    assert found["requirements"][0]["met"] == (measured <= 1)
    assert "commit" in found
    assert "not_run" not in found


def test_a_run_that_is_stopped_leaves_the_sections_that_it_has_finished(
    room, monkeypatch, tmp_path
):
    def section():
        return [{"section": "peers", "forward_s": 0.1}], []

    def stopped():
        raise KeyboardInterrupt

    sections = {"peers": section, "dials": stopped, "masks": None}
    monkeypatch.setattr(room.cpu, "sections", lambda _: sections)
    path = tmp_path / "cpu.json"
    with pytest.raises(KeyboardInterrupt):
        room.run.main(["--json", str(path)])
    found = json.loads(path.read_text())
    assert [row["section"] for row in found["rows"]] == ["peers"]
    assert found["not_run"] == ["dials", "masks"]
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--only", "peeers"], "no section peeers; there are peers, dials, masks"),
        pytest.param(
            ["--device", "cuda"],
            "--device cuda needs a CUDA device",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="needs no CUDA device"),
        ),
    ],
)
def test_what_cannot_be_measured_is_refused(room, capsys, words, expected):
    with pytest.raises(SystemExit) as stop:
        room.run.main(words)
    assert stop.value.code == 2
    assert expected in capsys.readouterr().err


def test_peers_table_and_costs_of_dials_come_out_on_the_cpu(room, monkeypatch):
    shape = room.registry.square(1, 2, 32, 16)
    monkeypatch.setattr(room.cpu, "CPU_SHAPES", [shape])
    longer = room.registry.square(1, 2, 48, 16)
    monkeypatch.setattr(room.cpu, "LONG_SHAPE", longer)
    monkeypatch.setattr(room.cpu, "LIMITS", {shape: 1.0, longer: 0.6})
    dials = {
        "exp exp2": {"exp": "exp2"},
        "all points fp64": room.registry.DIALS["all points fp64"],
        "fp_fusion": {"fp_fusion": True},
    }
    assert room.cpu.DEARER.keys() <= room.registry.DIALS.keys()
    monkeypatch.setattr(room.compare, "DIALS", dials)
    monkeypatch.setattr(room.cpu, "DIAL_ROUNDS", 1)
    monkeypatch.setattr(room.compare, "DIAL_SHAPES", {"cpu": shape})
    others = [peer for peer in peers("cpu") if peer.name in ("sdpa:flash", "flex")]
    sections = room.cpu.sections(others)
    rows, requirements = sections["peers"]()
    assert {row["name"] for row in rows} >= {"flash:fa2", "baseline:plain", "sdpa:flash", "flex"}
    assert [(r.limit, "causal" in r.claim) for r in requirements] == [
        (1.0, False),
        (1.0, True),
        (0.6, False),
        (0.6, True),
    ]
    for row in rows:
        assert (row["backward_tflops"] is None) == (row["name"] == "flex")
    costs, (dearest,) = sections["dials"]()
    assert costs[0]["forward_cost"] == costs[0]["cost"] == 1.0
    assert dearest.measured == costs[1]["cost"] > 0, "of the only dial that is to be cheap"
    assert (dearest.limit, dearest.claim[-10:]) == (1.3, "(exp exp2)")
    assert "fp_fusion" in costs[-1]["refused"]
    masks, _ = sections["masks"]()
    assert [row["name"] for row in masks] == list(room.registry.MASKS)


def test_launches_are_timed_beside_peers_and_a_small_call_beside_its_engine(room):
    shape = room.registry.square(1, 2, 32, 16)
    others = [peer for peer in peers("cpu") if peer.name == "sdpa:flash"]
    rows = room.compare.compare_kernels("cpu", shape, causal=True, others=others, rounds=1)
    assert [row["name"] for row in rows] == ["sdpa:flash", "fa2 launches"]
    count = room.measure.flops(shape, causal=True)
    for row in rows:
        assert row["section"] == "kernels"
        assert row["forward_tflops"] == pytest.approx(count / row["forward_s"] / 1e12)
        assert row["backward_tflops"] == pytest.approx(2.5 * count / row["backward_s"] / 1e12)
    (row,), (requirement,) = room.cpu.sections([])["small call"]()
    assert requirement.measured == row["over_twin"] > 1


@pytest.mark.slow
def test_it_runs_from_a_plain_checkout_with_torch_alone(tmp_path):
    script = (
        "import runpy, sys\n"
        "for name in ('lightning', 'wandb', 'scipy', 'rich', 'stability'):\n"
        "    sys.modules[name] = None\n"
        f"sys.argv = ['run.py', '--help']; sys.path.insert(0, {str(FOLDER)!r})\n"
        f"runpy.run_path({str(FOLDER / 'run.py')!r}, run_name='__main__')\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(FOLDER.parent)}
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=120,
        env=environment,
    )
    assert "--against" in done.stdout, done.stderr


@pytest.mark.slow
def test_growth_is_measured_in_a_process_of_its_own(room, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(FOLDER.parent))
    assert 0 < room.measure.twin_growth(1024) < 2**30
