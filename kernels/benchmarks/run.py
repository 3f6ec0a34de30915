"""Speed of the attentions on this machine, after checking that they are right.

    PYTHONPATH=kernels python kernels/benchmarks/run.py [--device cpu|cuda] [--json PATH]
        [--only SECTION ...] [--against PEER ...] [--golden]

Needs torch and `attention_kernels` alone. Prints each section, then which requirements are met, and
writes JSON with hardware, versions and commit. Exit code 1 if an attention is wrong or a
requirement is missed.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import cpu
import gpu
import torch
from gate import gate, right_peers
from tables import Requirement, print_requirements

from attention_kernels.machine import hardware, precision_switches, versions
from attention_kernels.peers.registry import peers


def commit() -> str:
    """Return the commit that runs, with "-changed" if files differ from it; "" outside of git."""
    here = Path(__file__).parent
    words = (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
    try:
        head, changed = (
            subprocess.run(["git", *w], capture_output=True, text=True, check=True, cwd=here).stdout
            for w in words
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return head.strip() + ("-changed" if changed.strip() else "")


def describe(device: str) -> dict[str, Any]:
    """Return what the figures depend on."""
    return {
        "device": device,
        "hardware": hardware(device),
        "threads": torch.get_num_threads(),
        "versions": versions(),
        "switches": precision_switches(),
        "commit": commit(),
        "peers": {peer.name: peer.version for peer in peers(device) if peer.available},
    }


def parse(words: list[str] | None) -> argparse.Namespace:
    """Return the arguments of the command line."""
    parser = argparse.ArgumentParser(description="speed of the attentions on this machine")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--json", type=Path, help="file to write the results to")
    parser.add_argument("--only", nargs="+", metavar="SECTION", help="instead of all sections")
    parser.add_argument("--against", nargs="+", metavar="PEER", default=[], help="instead of all")
    parser.add_argument("--golden", action="store_true", help="also the golden at 8192, minutes")
    arguments = parser.parse_args(words)
    place = gpu if arguments.device == "cuda" else cpu
    known = list(place.sections([]))
    unknown = set(arguments.only or ()) - set(known)
    if unknown:
        parser.error(f"no section {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda needs a CUDA device, there is none")
    return arguments


def main(words: list[str] | None = None) -> int:
    """Check, time, print, and write JSON if asked."""
    arguments = parse(words)
    device = arguments.device
    place = gpu if device == "cuda" else cpu
    about = describe(device)
    print(json.dumps(about, indent=1))
    for name in place.OWN:
        gate(device, name)
    wanted = [p for p in peers(device) if not arguments.against or p.name in arguments.against]
    others = right_peers(device, wanted)
    names = [*place.OWN, *(peer.name for peer in others)]
    print(f"within flash-attn's error budget: {', '.join(names)}")
    rows: list[dict[str, Any]] = []
    requirements: list[Requirement] = []
    todo = [
        section
        for name, section in place.sections(others).items()
        if not arguments.only or name in arguments.only
    ]
    for section in todo + ([cpu.run_golden] if arguments.golden else []):
        found, required = section()
        rows += found
        requirements += required
    print_requirements(requirements)
    if arguments.json:
        result = about | {"requirements": [r.to_dict() for r in requirements], "rows": rows}
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if all(requirement.met for requirement in requirements) else 1


if __name__ == "__main__":
    sys.exit(main())
