"""Speed of the attentions on this machine, after checking that they are right.

    PYTHONPATH=kernels python kernels/benchmarks/run.py [--device cpu|cuda] [--json PATH]

Needs torch and `attention_kernels` alone. Ratios come from one run in which the attentions take
turns, so that a slow minute of a shared machine falls on all of them. FLOPs are counted as
flash-attn does: 4 B H T^2 D forward, halved if causal, 2.5 times as many backward. Exit code 1 if a
check fails or a required ratio is missed.
"""

import argparse
import json
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from registry import ATTENTIONS, CPU_SHAPE, GOLDEN_SHAPE, GPU_SHAPES, INTERPRETER_SHAPE

from attention_kernels import golden_attention
from attention_kernels.testing import Shape, assert_within_budget, make_qkv, with_gradients

GATE_SHAPE = Shape(batch=1, heads=4, kv_heads=2, query_len=100, key_len=100, head_dim=64)
MAX_TWIN_OVER_BASELINE = 1.3
MIN_INTERPRETER_OVER_TWIN = 20.0
MAX_GOLDEN_BYTES = 2e9


def gate(device: str, names: list[str]) -> None:
    """Hold each attention against flash-attn's budget, forward and backward; raise if one fails."""
    generator = torch.Generator(device).manual_seed(0)
    q, k, v = make_qkv(GATE_SHAPE, torch.bfloat16, generator)
    dout = torch.randn(q.shape, generator=generator, device=device).bfloat16()
    wide = [x.double() for x in (q, k, v, dout)]
    golden = with_gradients(golden_attention, *wide, causal=True)
    baseline = with_gradients(ATTENTIONS["baseline"], q, k, v, dout, causal=True)
    for name in names:
        if name.startswith("sdpa"):
            continue  # the peer is timed, not judged
        found = with_gradients(ATTENTIONS[name], q, k, v, dout, causal=True)
        factor = 8.0 if "all_bf16" in name else 3.0
        for what, value in found.items():
            assert_within_budget(value, baseline[what], golden[what], factor, f"{name} {what}")


def seconds(names: list[str], shape: Shape, *, causal: bool, device: str, rounds: int) -> dict:
    """Return each attention's median seconds, forward and forward plus backward, taking turns."""
    generator = torch.Generator(device).manual_seed(0)
    q, k, v = (x.requires_grad_() for x in make_qkv(shape, torch.bfloat16, generator))
    dout = torch.randn(q.shape, generator=generator, device=device).bfloat16()

    def both(name: str) -> None:
        torch.autograd.grad(ATTENTIONS[name](q, k, v, causal=causal), (q, k, v), dout)

    def forward(name: str) -> None:
        with torch.no_grad():
            ATTENTIONS[name](q, k, v, causal=causal)

    times: dict[str, dict[str, list[float]]] = {n: {"forward": [], "both": []} for n in names}
    for turn in range(rounds + (rounds > 1)):
        for name in names:
            for what, call in (("forward", forward), ("both", both)):
                elapsed = _timed(lambda call=call, name=name: call(name), device)
                if turn or rounds == 1:  # the first turn compiles and warms up
                    times[name][what].append(elapsed)
    return {n: {w: statistics.median(t) for w, t in by.items()} for n, by in times.items()}


def _timed(call: Callable[[], None], device: str) -> float:
    if device == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def bench_cpu() -> tuple[list[dict[str, Any]], bool]:
    """Time the twin against the baseline and the interpreted kernel; return rows and success."""
    rows, good = [], True
    names = ["baseline", "twin:fa2", "twin:all_bf16"]
    for causal in (True, False):
        found = seconds(names, CPU_SHAPE, causal=causal, device="cpu", rounds=7)
        base = found["baseline"]["both"]
        for name in names:
            ratio = found[name]["both"] / base
            rows.append(
                {"case": f"{CPU_SHAPE} causal={causal}", "attention": name}
                | {"seconds": found[name]["both"], "over_baseline": ratio}
            )
            print(
                f"{name:14} forward+backward {found[name]['both']:.3f} s   {ratio:.2f}x baseline"
                f"   causal={causal}"
            )
        good &= found["twin:fa2"]["both"] <= MAX_TWIN_OVER_BASELINE * base
    pair = seconds(
        ["twin:fa2", "triton:fa2"], INTERPRETER_SHAPE, causal=False, device="cpu", rounds=1
    )
    ratio = pair["triton:fa2"]["both"] / pair["twin:fa2"]["both"]
    rows.append({"case": str(INTERPRETER_SHAPE), "interpreter_over_twin": ratio})
    print(f"interpreted Triton {pair['triton:fa2']['both']:.1f} s   {ratio:.0f}x the twin")
    golden = _golden_peak()
    rows.append({"case": f"golden {GOLDEN_SHAPE}", "peak_bytes": golden})
    print(
        f"golden at length {GOLDEN_SHAPE.query_len}, forward+backward: peak {golden / 1e9:.2f} GB"
    )
    return rows, good and ratio >= MIN_INTERPRETER_OVER_TWIN and golden < MAX_GOLDEN_BYTES


def _golden_peak() -> int:
    """Return the peak memory in bytes of a process that runs the golden forward and backward."""
    done = subprocess.run([sys.executable, __file__, "--golden"], capture_output=True, check=True)
    return int(done.stdout)


def _golden() -> None:
    q, k, v = make_qkv(GOLDEN_SHAPE, torch.bfloat16, torch.Generator().manual_seed(0))
    with_gradients(golden_attention, q, k, v, q, causal=True)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def bench_gpu() -> tuple[list[dict[str, Any]], bool]:
    """Time the Triton kernels beside PyTorch's flash attention; return rows and success."""
    rows = []
    names = ["triton:fa2", "triton:all_bf16", "sdpa:flash"]
    for shape in GPU_SHAPES:
        for causal in (True, False):
            found = seconds(names, shape, causal=causal, device="cuda", rounds=20)
            flops = 4 * shape.batch * shape.heads * shape.query_len**2 * shape.head_dim
            flops /= 2 if causal else 1
            for name in names:
                forward, both = found[name]["forward"], found[name]["both"]
                row = {"case": f"{shape} causal={causal}", "attention": name}
                row |= {"forward_tflops": flops / forward / 1e12}
                row |= {"both_tflops": 3.5 * flops / both / 1e12}
                rows.append(row)
                print(
                    f"{row['case']:44} {name:16} {row['forward_tflops']:7.1f} TFLOPS forward"
                    f" {row['both_tflops']:7.1f} forward+backward"
                )
    return rows, True


def hardware(device: str) -> dict[str, Any]:
    """Return what the figures depend on."""
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent
    )
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else _cpu_name(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": commit.stdout.strip(),
    }


def _cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if sys.platform == "linux" else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return (
        f"{names[0] if names else platform.processor()} ({torch.backends.cpu.get_cpu_capability()})"
    )


def main() -> int:
    """Check, time, print, and write JSON if asked."""
    parser = argparse.ArgumentParser(description="speed of the attentions on this machine")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--golden", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.golden:
        _golden()
        return 0
    on_gpu = arguments.device == "cuda"
    gate(arguments.device, ["triton:fa2", "triton:all_bf16"] if on_gpu else ["twin:fa2"])
    about = hardware(arguments.device)
    print("  ".join(f"{name} {value}" for name, value in about.items()))
    rows, good = bench_gpu() if on_gpu else bench_cpu()
    if arguments.json:
        text = json.dumps({"hardware": about, "rows": rows}, indent=2)
        arguments.json.write_text(text + "\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
