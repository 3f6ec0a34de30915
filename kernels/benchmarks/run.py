"""Times the attentions on this machine, after checking that each of them is right.

    PYTHONPATH=kernels python kernels/benchmarks/run.py [--device cpu|cuda] [--json PATH]
        [--only SECTION ...] [--against PEER ...] [--golden]

There is no speed without right results: each attention is first held to flash-attn's error budget.
One of ours that is wrong ends the run; a peer that is wrong, or refuses, is left out, and said so.
Then each section is printed, and which requirements are met. The results are written as JSON with
hardware, versions and commit, after each section, so that a run that is stopped leaves those that
it has finished. Exit code 1 if one of ours is wrong or a requirement is missed.

torch and `attention_kernels` are all that it needs.
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
from compare import Requirement
from registry import GATE_SHAPE, draw

from attention_kernels import attention
from attention_kernels.machine import hardware, precision_switches, versions
from attention_kernels.peers.registry import PeerStatus, peers
from attention_kernels.testing import Shape, assert_within_budget, with_gradients

FACTORS = {"flash:all_bf16": 8.0}
"""How many times the baseline's error an attention may err; 3 for all others. `all_bf16` keeps its
sums in BF16 and errs more: that is its point."""


def gate(device: str, name: str, shape: Shape = GATE_SHAPE, *, forward_only: bool = False) -> None:
    """Raise AssertionError naming what is wrong, causal or not, forward or backward."""
    inputs = draw(shape, device)
    tensors = [x.detach() for x in (inputs.q, inputs.k, inputs.v, inputs.dout)]
    wide = [x.double() for x in tensors]
    for causal in (False, True):
        exact = with_gradients(attention, *wide, implementation="golden", causal=causal)
        plain = with_gradients(attention, *tensors, implementation="baseline:plain", causal=causal)
        for what, value in _run(name, tensors, causal, forward_only).items():
            factor = FACTORS.get(name, 3.0)
            assert_within_budget(value, plain[what], exact[what], factor, f"{name} {what}")


def _run(
    name: str, tensors: list[torch.Tensor], causal: bool, forward_only: bool
) -> dict[str, torch.Tensor]:
    options = {"implementation": name, "causal": causal}
    if forward_only:
        with torch.no_grad():
            return {"out": attention(*tensors[:3], **options)}
    return with_gradients(attention, *tensors, **options)


def right_peers(device: str, found: list[PeerStatus]) -> list[PeerStatus]:
    """Return the peers that run and are right; print the others with the reason."""
    shape = GATE_SHAPE._replace(kv_heads=GATE_SHAPE.heads)  # not all peers take grouped heads
    right = []
    for peer in found:
        reason = peer.reason
        if peer.available:
            try:
                gate(device, peer.name, shape, forward_only=not peer.backward)
            except (ValueError, AssertionError, RuntimeError) as error:
                reason = str(error).splitlines()[0]
            else:
                right.append(peer)
                continue
        print(f"  {peer.name:18}left out: {reason}")
    return right


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
    todo = {
        name: section
        for name, section in place.sections(others).items()
        if not arguments.only or name in arguments.only
    }
    if arguments.golden:
        todo["golden"] = cpu.run_golden
    for done, section in enumerate(todo.values(), start=1):
        found, required = section()
        rows += found
        requirements += required
        if arguments.json:
            stated = {"requirements": [r.to_dict() for r in requirements], "rows": rows}
            left = {"not_run": list(todo)[done:]} if done < len(todo) else {}
            write(arguments.json, about | left | stated)
    print_requirements(requirements)
    return 0 if all(requirement.met for requirement in requirements) else 1


def write(path: Path, result: dict[str, Any]) -> None:
    """Write `result` as JSON; a run that is stopped leaves the whole of an earlier one."""
    whole = path.with_name(path.name + ".part")
    whole.write_text(json.dumps(result, indent=1) + "\n")
    whole.replace(path)


def print_requirements(requirements: list[Requirement]) -> None:
    """Print each requirement with its number and whether it is met."""
    print("\nrequirements")
    for requirement in requirements:
        sign = "<=" if requirement.at_most else ">="
        verdict = "met " if requirement.met else "MISS"
        number = f"{requirement.measured:.3g} {sign} {requirement.limit:.3g}"
        print(f"  {verdict}  {number:16} {requirement.claim}")


if __name__ == "__main__":
    sys.exit(main())
