"""The doctor shows what runs here and why the rest does not, to people and to programs."""

import importlib.util
import json
import sys

import pytest
import torch

from attention_kernels import PROFILES
from attention_kernels.machine import _cpu_formats, _gpu_formats, engines
from attention_kernels.peers.registry import PEERS
from stability.cli import abilities as cli_abilities
from stability.cli.abilities import abilities
from stability.cli.main import main


def shown(capsys, *words):
    assert main(["doctor", *words]) == 0
    return capsys.readouterr().out


def test_json_has_every_attention_engine_and_format(capsys):
    found = json.loads(shown(capsys, "--json"))
    names = {row["name"]: row for row in found["attentions"]}
    assert set(PEERS) | {"golden", "flash:fa2", "baseline:plain"} <= set(names)
    assert len([name for name in names if name.startswith("flash:")]) == len(PROFILES)
    assert found["versions"]["torch"] == torch.__version__
    assert found["formats"]["fp32"]
    assert [engine["name"] for engine in found["engines"]] == ["twin", "triton"]
    for row in names.values():
        assert row["available"] or row["reason"]


def test_it_ends_with_what_runs_here_and_how_fast(capsys, monkeypatch):
    monkeypatch.setattr("stability.cli.abilities.which", lambda name: None)
    found = json.loads(shown(capsys, "--json"))
    able = {row["name"]: row for row in found["abilities"]}
    assert able["studies and the demo"]["available"]
    assert not able["--executor slurm"]["available"]
    assert able["--executor slurm"]["how"] == "sbatch is not on the PATH"
    assert all(row["how"] for row in able.values())
    assert len(found["speeds_ms"]) == 3
    assert all(0 < milliseconds < 60_000 for milliseconds in found["speeds_ms"].values())
    text = shown(capsys)
    assert text.index("attentions on") < text.index("what runs here") < text.index("how fast")
    assert text.rstrip().endswith(" ms")


def test_an_extra_that_is_not_installed_is_told_with_its_command(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    able = {each.name: each for each in abilities("cpu", 0)}
    assert able["Hugging Face models"].how == "pip install 'training-stability[transformers]'"
    assert not able["--executor ray"].available
    assert not able["Triton kernels"].available
    assert abilities("cuda", 2)[1].available
    assert abilities("cuda", 2)[2].how == "NCCL, 2 GPUs"


@pytest.mark.parametrize("width", ["80", "120"])
def test_no_line_is_wider_than_the_terminal_and_no_name_is_cut(capsys, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", width)
    text = shown(capsys)
    assert max(len(line) for line in text.splitlines()) <= int(width)
    for name in (*PEERS, "flash:PROFILE", torch.__version__, "e4m3", "twin"):
        assert name in text


def test_what_is_missing_comes_with_its_reason(capsys, monkeypatch):
    for name in ("flash_attn", "flashinfer"):
        monkeypatch.setitem(sys.modules, name, None)
    lines = shown(capsys).splitlines()
    (line,) = (line for line in lines if line.startswith("  flash_attn2"))
    assert "no" in line.split()
    assert "flash_attn is not installed" in line


def test_looking_changes_no_switch_of_torch(capsys):
    before = torch.get_rng_state(), torch.backends.cuda.matmul.fp32_precision
    shown(capsys)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == torch.backends.cuda.matmul.fp32_precision


def test_a_gpu_has_the_formats_of_its_capability():
    assert set(_gpu_formats((7, 0))) == {"fp64", "fp32", "fp16"}
    assert set(_gpu_formats((8, 0))) == {"fp64", "fp32", "fp16", "bf16", "tf32"}
    assert {"e4m3", "e5m2"} <= set(_gpu_formats((8, 9)))
    assert {"e4m3", "e5m2"} <= set(_gpu_formats((10, 0)))


def test_a_cpu_has_the_formats_of_its_flags():
    assert _cpu_formats({"avx2"}) == {"fp64": "SIMD", "fp32": "SIMD"}
    found = _cpu_formats({"amx_bf16", "avx512_bf16", "avx512_fp16"})
    assert (found["bf16"], found["fp16"]) == ("AMX", "AVX-512")


def test_triton_is_compiled_on_cuda_interpreted_on_the_cpu_and_named_if_absent(monkeypatch):
    pytest.importorskip("triton", reason="says how an installed engine runs")
    assert engines("cuda")[1].how == "compiled"
    assert engines("cpu")[1].how.startswith("interpreted")
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert not engines("cpu")[1].available


def test_unknown_option_is_one_line_and_exit_code_2(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["doctor", "--jsno"])
    assert stop.value.code == 2
    assert "--jsno" in capsys.readouterr().err


def test_what_is_timed_is_the_fastest_of_a_few_and_what_can_not_be_says_why(monkeypatch):
    clock = iter([0.0, 9.0, 10.0, 10.5, 20.0, 23.0])
    monkeypatch.setattr(cli_abilities.time, "perf_counter", lambda: next(clock))
    calls = []
    assert cli_abilities._fastest(lambda: calls.append(1), torch.device("cpu")) == 500
    assert len(calls) == 4, "the first warms up, and is not timed"

    def full(call, place):
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(cli_abilities, "_fastest", full)
    assert set(cli_abilities.speeds("cpu").values()) == {"CUDA out of memory"}
