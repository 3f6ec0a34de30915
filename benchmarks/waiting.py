"""What the way in which idle OpenMP threads wait costs a training: alone, and on a busy machine.

    PYTHONPATH=.:kernels python benchmarks/waiting.py

Each policy trains the same small GPT in fresh processes: one alone, then two at once, which are as
many threads too many as the machine has cores. Printed are the median seconds of an update and the
CPU time it takes, and whether all policies end in the same weights; exit code 1 if they do not.
"""

import argparse
import hashlib
import json
import os
import resource
import statistics
import subprocess
import sys
import time

POLICIES = {
    "libgomp's own": {},
    "short spin": {"GOMP_SPINCOUNT": "10000"},
    "shorter spin": {"GOMP_SPINCOUNT": "1000"},
    "passive": {"OMP_WAIT_POLICY": "PASSIVE"},
}
"""Variables of each policy; those of the others are taken away."""
VARIABLES = {name for variables in POLICIES.values() for name in variables} | {"KMP_BLOCKTIME"}


def train(updates: int) -> None:
    """Train, and print seconds and CPU seconds of an update, and the hash of the weights."""
    import torch  # in the child alone, which has the variables

    from benchmarks.recorder import model

    torch.manual_seed(0)
    gpt = model(256)
    optimizer = torch.optim.AdamW(gpt.parameters())
    seconds = []
    for update in range(updates + 2):
        if update == 2:  # the first ones also make what is kept
            used = resource.getrusage(resource.RUSAGE_SELF)
        began = time.perf_counter()
        tokens = torch.randint(0, 256, (2, 65))
        logits = gpt(tokens[:, :-1])
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - began)
    now = resource.getrusage(resource.RUSAGE_SELF)
    cpu = now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime
    digest = hashlib.sha256()
    for weight in gpt.parameters():
        digest.update(weight.detach().numpy().tobytes())
    said = {"s": statistics.median(seconds[2:]), "cpu": cpu / updates, "hash": digest.hexdigest()}
    print(json.dumps(said))


def trained(variables: dict[str, str], processes: int, updates: int) -> list[dict]:
    """Return what each of several trainings at once has printed."""
    kept = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    words = [sys.executable, __file__, "--child", "--updates", str(updates)]
    children = [
        subprocess.Popen(words, env={**kept, **variables}, stdout=subprocess.PIPE, text=True)
        for _ in range(processes)
    ]
    return [json.loads(child.communicate()[0].splitlines()[-1]) for child in children]


def main() -> int:
    """Measure each policy in turn, several times, and print the table."""
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--updates", type=int, default=40)
    flags.add_argument("--rounds", type=int, default=3)
    flags.add_argument("--at-once", type=int, nargs="*", default=[1, 2])
    flags.add_argument("--child", action="store_true")
    asked = flags.parse_args()
    if asked.child:
        train(asked.updates)
        return 0
    found: dict[tuple[str, int], list[dict]] = {}
    for _ in range(asked.rounds):
        for name, variables in POLICIES.items():
            for processes in asked.at_once:
                told = trained(variables, processes, asked.updates)
                found.setdefault((name, processes), []).extend(told)
    print(f"{'idle threads':>14} {'at once':>8} {'ms an update':>13} {'CPU ms':>8}")
    for (name, processes), told in sorted(found.items(), key=lambda pair: pair[0][1]):
        ms, cpu = (1000 * statistics.median(each[what] for each in told) for what in ("s", "cpu"))
        print(f"{name:>14} {processes:>8} {ms:>13.1f} {cpu:>8.1f}")
    hashes = {each["hash"] for told in found.values() for each in told}
    print("the same weights" if len(hashes) == 1 else f"other weights: {sorted(hashes)}")
    return 0 if len(hashes) == 1 else 1


if __name__ == "__main__":
    sys.exit(main())
