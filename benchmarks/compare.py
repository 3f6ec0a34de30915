"""Time and memory of comparing two models of GPT-2 small's shapes from files, in a fresh process.

    PYTHONPATH=.:kernels python benchmarks/compare.py

Memory is the process's peak resident set (VmHWM) less what is resident after the imports, so it
counts the pages of mapped files while they are mapped. `getrusage` gives the same peak, but a child
inherits its parent's there. Exit code 1 if a limit is missed. Linux only. Leaves out the drift of
models that fit in memory (`metrics`).
"""

import argparse
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from stability.analysis.weight_comparison import compare_weights
from stability.records.weight_files import open_weights

VOCABULARY, CONTEXT, WIDTH, BLOCKS = 50257, 1024, 768, 12
LARGEST = 4 * VOCABULARY * WIDTH / 1e6
SECONDS_LIMIT, MEMORY_LIMIT = 20.0, 1000.0
PAIRS = (
    ("safetensors", "a.safetensors", "b.safetensors"),
    ("torch.save", "a.pt", "b.pt"),
    ("BF16 safetensors", "a.bf16.safetensors", "b.bf16.safetensors"),
)


def gpt2_state(seed: int) -> dict[str, Tensor]:
    """Return the 1.24e8 weights of GPT-2 small as it starts: normal matrices, ones and zeros."""
    generator = torch.Generator().manual_seed(seed)
    matrices = {"wte": (VOCABULARY, WIDTH), "wpe": (CONTEXT, WIDTH)}
    state = {}
    for block in range(BLOCKS):
        for name, rows, columns in (
            ("attn.c_attn", 1, 3),
            ("attn.c_proj", 1, 1),
            ("mlp.c_fc", 1, 4),
            ("mlp.c_proj", 4, 1),
        ):
            matrices[f"h.{block}.{name}.weight"] = (rows * WIDTH, columns * WIDTH)
            state[f"h.{block}.{name}.bias"] = torch.zeros(columns * WIDTH)
        for name in ("ln_1", "ln_2"):
            state[f"h.{block}.{name}.weight"] = torch.ones(WIDTH)
            state[f"h.{block}.{name}.bias"] = torch.zeros(WIDTH)
    state |= {"ln_f.weight": torch.ones(WIDTH), "ln_f.bias": torch.zeros(WIDTH)}
    for name, shape in matrices.items():
        state[name] = 0.02 * torch.randn(shape, generator=generator)
    return state


def write(folder: Path) -> None:
    """Write a pair of models that have drifted a little apart, as files of each kind."""
    b = gpt2_state(0)
    generator = torch.Generator().manual_seed(1)
    a = {name: x + 1e-4 * torch.randn(x.shape, generator=generator) for name, x in b.items()}
    for name, state in (("a", a), ("b", b)):
        save_file(state, folder / f"{name}.safetensors")
        torch.save(state, folder / f"{name}.pt")
        low = {parameter: x.bfloat16() for parameter, x in state.items()}
        save_file(low, folder / f"{name}.bf16.safetensors")


def resident(kind: str) -> float:
    """Return a figure of this process's memory in MB: VmRSS is now, VmHWM the peak."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(re.findall(rf"{kind}:\s+(\d+) kB", status)[0]) * 1024 / 1e6


def compare(first: Path, second: Path) -> None:
    """Compare two files and print seconds, MB above the start, and how many weights there were."""
    before = resident("VmRSS")
    start = time.perf_counter()
    a, b = open_weights(first), open_weights(second)
    found = compare_weights(a, b)
    seconds = time.perf_counter() - start
    count = sum(a[name].numel() for name in found.drifts if name != "all")
    print(seconds, resident("VmHWM") - before, count)


def child(*words: object) -> str:
    """Run this file in a fresh process and return what it printed."""
    command = [sys.executable, __file__, *map(str, words)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def main() -> int:
    """Write the models, compare them kind by kind, and return the exit code."""
    passed = True
    with tempfile.TemporaryDirectory() as folder:
        child("--write", folder)
        for kind, first, second in PAIRS:
            paths = (Path(folder) / first, Path(folder) / second)
            seconds, memory, count = map(float, child("--compare", *paths).split())
            passed &= seconds <= SECONDS_LIMIT and memory <= MEMORY_LIMIT + LARGEST
            print(
                f"compare of {count:.3g} weights a side, {kind:16}  {seconds:5.1f} s "
                f"(<= {SECONDS_LIMIT:g} s)   {memory:4.0f} MB (<= {MEMORY_LIMIT + LARGEST:.0f} MB)"
            )
    return 0 if passed else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", type=Path)
    parser.add_argument("--compare", type=Path, nargs=2)
    options = parser.parse_args()
    if options.write:
        write(options.write)
    elif options.compare:
        compare(*options.compare)
    else:
        sys.exit(main())
