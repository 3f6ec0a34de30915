"""Drift of a model that no rank holds, on simulated ranks: its time, its memory, its exchanges.

    PYTHONPATH=.:kernels python benchmarks/scale.py --weights 1e9 --shards 8

Writes two FP32 states of so many weights in so many shards, memory-maps them, and compares them on
as many ranks, which are threads of this process: the engine's own code, with collectives that copy
within one memory. Prints the time, the most memory this process has held (mapped pages that are
resident count), and the bytes exchanged. Removes its files in the end. Up to 1e8 weights the result
is held against `drift` of the whole. Leaves out a network.
"""

import argparse
import ctypes
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from stability.metrics.drift import drift
from stability.metrics.pieces import Piece
from stability.metrics.sharded_drift import drift_of_pieces
from tests.stability.metrics.simulated_ranks import on_ranks

COLUMNS = 1024
TENSORS = 100
WHOLE = 1e8
"""Weights up to which both states fit in memory, to be compared whole."""


class Shard(Mapping):
    """One shard of a state: each piece is mapped from the file when it is asked for."""

    def __init__(self, path: Path, rows: int, index: int, shards: int) -> None:
        self.path, self.rows, self.index, self.shards = path, rows, index, shards

    def __getitem__(self, name: str) -> Piece:
        number = self.rows * COLUMNS
        # copies on write, of which there are none: torch warns of memory it can't write to
        values = np.memmap(self.path, np.float32, "c", 4 * number * int(name), number)
        rows = torch.arange(self.index * self.rows, (self.index + 1) * self.rows)
        return Piece(
            values=torch.from_numpy(values).view(self.rows, COLUMNS),
            places=(rows, torch.arange(COLUMNS)),
            shape=(self.rows * self.shards, COLUMNS),
        )

    def __contains__(self, name: object) -> bool:
        return name in set(self)

    def __iter__(self) -> Iterator[str]:
        return map(str, range(TENSORS))

    def __len__(self) -> int:
        return TENSORS


def write(folder: Path, shards: int, rows: int) -> list[tuple[Shard, Shard]]:
    """Write both states and return the shards of each rank."""

    def one(shard: int) -> tuple[Shard, Shard]:
        generator = torch.Generator().manual_seed(shard)
        paths = [folder / f"{state}-{shard}" for state in "ab"]
        with paths[0].open("wb") as a, paths[1].open("wb") as b:
            for _ in range(TENSORS):
                weights = 0.02 * torch.randn(rows * COLUMNS, generator=generator)
                weights.numpy().tofile(b)
                weights += 1e-5 * torch.randn(rows * COLUMNS, generator=generator)
                weights.numpy().tofile(a)
        first, second = (Shard(path, rows, shard, shards) for path in paths)
        return first, second

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(one, range(shards)))


def memory(key: str = "VmHWM") -> float:
    """Return a line of the kernel's account of this process's memory, in GB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) * 1024 / 1e9


def compare(shards: list[tuple[Shard, Shard]], held: int) -> tuple[dict, int]:
    """Return the drift, and how many bytes were exchanged."""
    lock, sent_bytes = threading.Lock(), [0]

    def measure(rank) -> dict:
        really = rank.exchange

        def exchange(values, sent, received):
            with lock:
                sent_bytes[0] += values.numel() * values.itemsize
            return really(values, sent, received)

        rank.exchange = exchange
        return drift_of_pieces(*shards[rank.index], ranks=rank, held=held)

    found = on_ranks(len(shards), measure)
    for each in found:
        if isinstance(each, Exception):
            raise each
    assert all(each == found[0] for each in found), "the ranks disagree"
    return found[0], sent_bytes[0]


def whole(shards: list[tuple[Shard, Shard]]) -> dict:
    """Return the drift of both states, joined in memory."""
    states = (
        {name: torch.cat([pair[side][name].values for pair in shards]) for name in shards[0][side]}
        for side in (0, 1)
    )
    return drift(*states)


def give_memory_back() -> None:
    """Let the C library keep no freed memory, of which each of our threads would hoard its own."""
    arena_max, mmap_threshold = -8, -3
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(arena_max, 2)
        library.mallopt(mmap_threshold, 2**21)


def main() -> int:
    """Run it and return the exit code: 1 if the ranks find another drift than one process."""
    parser = argparse.ArgumentParser(description="Drift on simulated ranks")
    parser.add_argument("--weights", type=float, default=1e8)
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--held", type=int, default=6 * 2**20, help="values a rank is sent at once")
    parser.add_argument("--folder", type=Path, default=None, help="for 8 bytes a weight")
    options = parser.parse_args()
    give_memory_back()
    rows = max(1, round(options.weights / TENSORS / options.shards / COLUMNS))
    count = rows * COLUMNS * TENSORS * options.shards
    folder = Path(tempfile.mkdtemp(prefix="scale-", dir=options.folder))
    try:
        start = time.perf_counter()
        shards = write(folder, options.shards, rows)
        print(f"{count:.3e} weights in {options.shards} shards of {TENSORS} tensors, two states")
        print(f"  written in {time.perf_counter() - start:.0f} s")
        start, cpu = time.perf_counter(), time.process_time()
        found, sent = compare(shards, options.held)
        took, cpu = time.perf_counter() - start, time.process_time() - cpu
        print(f"  compared in {took:.0f} s, {cpu:.0f} s of CPU; {sent / 1e9:.2f} GB exchanged")
        print(f"  at most {memory():.2f} GB resident, libraries and mapped pages included")
        print(f"  all: {found['all']}", flush=True)
        return 0 if options.weights > WHOLE or whole(shards) == found else 1
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    sys.exit(main())
