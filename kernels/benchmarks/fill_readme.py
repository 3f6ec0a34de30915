"""Writes what a GPU has measured into the pages that state it, beside the model of machine code.

    PYTHONPATH=kernels python kernels/benchmarks/fill_readme.py [--check]

Reads `results/cuda.json`, which `run.py --device cuda` writes, and `results/static.json`, which
`static.py --json` writes, and puts their figures into three pages: rows of README.md, a table of
docs/measured.md, and the table of the model and the clock in this folder's README. `--check` writes
nothing. Exit code 1 where a page states other figures, and 2 where figures or their place are
missing: then no page is written.
"""

import argparse
import json
import math
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["BLOCKS", "Measured", "filled"]

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).parent / "results"
WIDTHS = (64, 128, 256)
LONG, SHORT = (4096, 8192, 16384), (512, 1024, 2048)
DIRECTIONS = ("forward", "backward")
FA2, CUDNN = "sdpa:flash", "sdpa:cudnn"
_OURS = {"kernels": "fa2 launches", "peers": "flash:fa2"}


class Measured(NamedTuple):
    """The results of a GPU and of the model, as their files have them."""

    clock: dict[str, Any]
    model: dict[str, Any]

    def row(
        self, section: str, name: str, head_dim: int, length: int, *, causal: bool
    ) -> dict[str, Any]:
        """Return what was measured of one attention; ValueError if it was not."""
        end = f"-q{length}-k{length}-d{head_dim}"
        for row in self.clock["rows"]:
            known = (row["section"], row["name"], row.get("causal")) == (section, name, causal)
            if known and row["case"].endswith(end) and "refused" not in row:
                return row
        kind = "causal" if causal else "full"
        raise ValueError(
            f"results/cuda.json: section {section} has no {name}, {kind}, length {length}, "
            f"head_dim {head_dim}; run `run.py --device cuda` with that section"
        )

    def speedup(
        self, section: str, peer: str, direction: str, lengths: Iterable[int]
    ) -> list[float]:
        """Return how many times as fast as `peer` we are: full and causal by head_dim.

        Of several lengths it is the geometric mean.
        """
        found = []
        for head_dim in WIDTHS:
            for causal in (False, True):
                logs = []
                for length in lengths:
                    rows = (
                        self.row(section, name, head_dim, length, causal=causal)
                        for name in (peer, _OURS[section])
                    )
                    theirs, ours = (row[f"{direction}_s"] for row in rows)
                    logs.append(math.log(theirs / ours))
                found.append(math.exp(sum(logs) / len(logs)))
        return found

    @property
    def gpu(self) -> str:
        """Its name, without the maker's."""
        return self.clock["hardware"]["name"].removeprefix("NVIDIA ")

    @property
    def commit(self) -> str:
        """The commit that was measured, cut to 7 digits; with `-changed` if files differed."""
        commit = self.clock["commit"]
        return commit[:7] + ("-changed" if commit.endswith("-changed") else "")

    @property
    def versions(self) -> str:
        """Those of torch and Triton."""
        found = self.clock["versions"]
        return f"torch {found['torch'].partition('+')[0]}, Triton {found['triton']}"


def _range(values: list[float], digits: int) -> str:
    return f"{min(values):.{digits}f} to {max(values):.{digits}f}x"


def _by_width(values: list[float], digits: int) -> str:
    """Write full and causal of each head_dim."""
    pairs = [values[at : at + 2] for at in range(0, len(values), 2)]
    return ", ".join(" and ".join(f"{x:.{digits}f}" for x in pair) + "x" for pair in pairs)


def speed_rows(measured: Measured) -> str:
    """Return the rows of README.md."""
    alone = [_range(measured.speedup("kernels", FA2, d, [8192]), 1) for d in DIRECTIONS]
    cudnn = _range(measured.speedup("kernels", CUDNN, "forward", [8192]), 2)
    calls = [
        _range(measured.speedup("peers", FA2, "forward", lengths), 2) for lengths in (LONG, SHORT)
    ]
    return (
        f"| the fast path of `fa2` on an NVIDIA {measured.gpu}, kernels alone at length 8192, over "
        f"PyTorch's FlashAttention-2: forward; backward | {'; '.join(alone)} |\n"
        f"| its forward over cuDNN's | {cudnn} |\n"
        "| calls with autograd over PyTorch's, forward, geometric means: lengths 4k to 16k; 512 to "
        f"2k, where a call waits for its host | {'; '.join(calls)} |\n"
    )


def speed_table(measured: Measured) -> str:
    """Return the paragraph and the table of docs/measured.md."""
    left_out = measured.clock.get("not_run", [])
    not_run = f"; its sections of {' and '.join(left_out)} were not reached" if left_out else ""
    growth = {
        row["case"]: row["bytes"] for row in measured.clock["rows"] if row["section"] == "memory"
    }
    if not {"length 8192", "length 16384"} <= growth.keys():
        raise ValueError("results/cuda.json: section memory has no length 8192 and 16384")

    def wide(section: str, peer: str, direction: str, lengths: Iterable[int] = (8192,)) -> str:
        return _by_width(measured.speedup(section, peer, direction, lengths), 2)

    return (
        f"On one NVIDIA {measured.gpu}, {measured.versions}, at commit {measured.commit}, the fast "
        "path of `fa2` in\n"
        f"BF16 (`make gpu`'s benchmark{not_run}),\nfull and causal at head_dim 64, 128 and 256:\n\n"
        "| what | measured |\n|---|---|\n"
        "| kernels alone at length 8192, 16 heads, over PyTorch's FlashAttention-2: forward | "
        f"{wide('kernels', FA2, 'forward')} |\n"
        f"| the same backward | {wide('kernels', FA2, 'backward')} |\n"
        "| the same forward over cuDNN's; our goal is 0.85x | "
        f"{wide('kernels', CUDNN, 'forward')} |\n"
        "| calls with autograd, lengths 4k to 16k, geometric mean, over PyTorch's "
        f"FlashAttention-2: forward; backward | {wide('peers', FA2, 'forward', LONG)}; "
        f"{wide('peers', FA2, 'backward', LONG)} |\n"
        "| the same, lengths 512 to 2k, where a call waits for its host; our goal is 1.0x | "
        f"{wide('peers', FA2, 'forward', SHORT)}; {wide('peers', FA2, 'backward', SHORT)} |\n"
        "| memory at length 16k over 8k | "
        f"{growth['length 16384'] / growth['length 8192']:.2f}x |\n"
    )


def model_table(measured: Measured) -> str:
    """Return the table of the model and the clock, with a line that says whose they are."""
    model = {(row["direction"], row["head_dim"]): row["tflops"] for row in measured.model["rows"]}
    lines = [
        f"The model with Triton {measured.model['versions']['triton']}; the clock of an NVIDIA "
        f"{measured.gpu} with Triton {measured.clock['versions']['triton']}, at {measured.commit}:",
        "",
        "| head_dim | forward: model | clock | clock / model | backward: model | clock | clock / "
        "model |",
        "|---|---|---|---|---|---|---|",
    ]
    for head_dim in WIDTHS:
        row = measured.row("kernels", _OURS["kernels"], head_dim, 8192, causal=False)
        cells = []
        for direction in DIRECTIONS:
            if (direction, head_dim) not in model:
                raise ValueError(f"results/static.json: has no {direction}, head_dim {head_dim}")
            guess, clock = model[direction, head_dim], row[f"{direction}_tflops"]
            cells += [f"{guess:.0f}", f"{clock:.0f}", f"{clock / guess:.2f}"]
        lines.append(f"| {head_dim} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


class Block(NamedTuple):
    """Lines of a page that the results fill."""

    page: str
    found_by: str
    """A regular expression of the lines that are there, which must occur once."""
    text: Callable[[Measured], str]


BLOCKS = (
    Block(
        "README.md",
        r"\| the fast path of `fa2` on an .*\n\| its forward over .*\n\| calls with autograd .*\n",
        speed_rows,
    ),
    Block(
        "docs/measured.md",
        r"On one NVIDIA .*the fast path of `fa2` in\nBF16 (?s:.*?)\| memory at length 16k .*\n",
        speed_table,
    ),
    Block(
        "kernels/benchmarks/README.md",
        r"The model with Triton (?s:.*?)\| 256 \|.*\n",
        model_table,
    ),
)


def filled(text: str, block: Block, measured: Measured) -> str:
    """Return a page's text with its block filled; ValueError where the block is not there once."""
    places = list(re.finditer(block.found_by, text))
    if len(places) != 1:
        raise ValueError(
            f"{block.page}: lines like {block.found_by!r} must be there once, found {len(places)}"
        )
    (place,) = places
    return text[: place.start()] + block.text(measured) + text[place.end() :]


def main(words: list[str] | None = None) -> int:
    """Fill the pages, or tell those that state something else; return the exit code."""
    parser = argparse.ArgumentParser(description="put a GPU's results into the pages")
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args(words).check
    try:
        read = (json.loads((RESULTS / name).read_text()) for name in ("cuda.json", "static.json"))
        measured = Measured(*read)
        old = {block.page: (ROOT / block.page).read_text(encoding="utf-8") for block in BLOCKS}
        new = {block.page: filled(old[block.page], block, measured) for block in BLOCKS}
    except (OSError, ValueError, KeyError) as error:
        lacks = f"results/cuda.json or static.json: has no {error}"
        print(lacks if isinstance(error, KeyError) else error, file=sys.stderr)
        return 2
    others = [page for page in new if new[page] != old[page]]
    for page in others:
        print(f"{page}: {'states other figures' if check else 'filled'}")
        if not check:
            whole = (ROOT / page).with_name(Path(page).name + ".part")
            whole.write_text(new[page], encoding="utf-8")
            whole.replace(ROOT / page)
    return 1 if check and others else 0


if __name__ == "__main__":
    sys.exit(main())
