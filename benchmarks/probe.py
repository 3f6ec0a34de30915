"""Cost of the probe on this machine, on the demo's model: off, on, within a budget, and in memory.

    PYTHONPATH=.:kernels python benchmarks/probe.py

Prints ratios of one run, from interleaved repetitions, against the requirements. Leaves out the
other measures (`metrics`) and the kernels (`kernels/benchmarks`). Exit code 1 if one is missed.
"""

import argparse
import logging
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch.nn import functional as F

from stability.config.load import load_study
from stability.config.schema import ArmConfig
from stability.intercept.session import shadow
from stability.metrics.deviation import compare
from stability.probe.attention_registry import ResolvedAttention
from stability.probe.schedule import Schedule
from stability.records.metric_log import MetricLog
from stability.records.run_files import RunFiles
from stability.study.assemble import assemble, fit, load_data, make_trainer
from stability.tracking.loggers import RecordsLogger

ROOT = Path(__file__).parents[1]
OFF_LIMIT, PROBED_LIMIT, BUDGET, NOISE = 0.01, 0.15, 0.05, 0.02
LOOK_EVERY, LOOK_LIMIT, FORWARD_LIMIT = 50, 0.04, 0.002
SHAPE = (8, 8, 1024, 64)


def demo_config(**probe: object) -> ArmConfig:
    """Return the demo's baseline arm with another probe."""
    base = load_study(ROOT / "configs" / "quickstart.yaml").base
    return replace(base, probe=replace(base.probe, **probe))


class Loop:
    """The demo's model in a plain training loop; `probed` steps are looked at as the demo's are."""

    def __init__(self, config: ArmConfig, every: int = 0) -> None:
        self.config = config
        parts = assemble(config)
        self.model = parts.model
        self.probe = getattr(parts.model.attention[0], "probe", None)
        self.schedule = Schedule(every=every)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=5e-4)
        self.step_number = 0
        generator = torch.Generator().manual_seed(0)
        size = (config.train.batch_size, config.model.context + 1)
        self.tokens = torch.randint(0, config.model.vocab_size, size, generator=generator)

    def step(self) -> None:
        """Make one update."""
        due = self.probe is not None and self.schedule.is_due(self.step_number)
        if due:
            self.probe.arm()
        with torch.autocast("cpu", torch.bfloat16):
            logits = self.model(self.tokens[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), self.tokens[:, 1:].flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step_number += 1
        if due:
            self.probe.disarm()
            self.probe.collect()

    def seconds(self, steps: int) -> float:
        """Return the wall time of `steps` updates."""
        start = time.perf_counter()
        for _ in range(steps):
            self.step()
        return time.perf_counter() - start


def interleaved(first: Callable[[], float], second: Callable[[], float], times: int) -> list[float]:
    """Return the ratios second / first of interleaved repetitions, each pair in either order."""
    first(), second()
    ratios = []
    for index in range(times):
        if index % 2:
            b, a = second(), first()
        else:
            a, b = first(), second()
        ratios.append(b / a)
    return sorted(ratios)


def report(what: str, value: float, limit: float, spread: str = "") -> bool:
    """Print a share beside its limit, and say whether it is kept."""
    kept = value <= limit
    mark = "ok" if kept else "MISSED"
    print(f"{what:58} {value:8.2%}  (limit {limit:.3g}) {mark} {spread}")
    return kept


def probe_off() -> bool:
    """Measure what a probe that is not due does in a step, over the step's time.

    Two whole loops differ by less than the machine's noise, which is printed beside it.
    """
    plain, idle = Loop(demo_config(every=0)), Loop(demo_config(every=1))
    layers = idle.model.attention
    nothing = torch.zeros(1)
    instant = ResolvedAttention(
        name="nothing", function=lambda q, k, v, **mask: nothing, description={}
    )
    for layer in layers:
        object.__setattr__(layer, "primary", instant)
    calls = 2000
    start = time.perf_counter()
    for _ in range(calls):
        for layer in layers:
            layer(nothing, nothing, nothing, causal=True)
    per_step = (time.perf_counter() - start) / calls
    idle = Loop(demo_config(every=1))
    ratios = interleaved(lambda: plain.seconds(4), lambda: idle.seconds(4), 40)
    spread = f"whole loops {statistics.median(ratios) - 1:+.1%}, {quartiles(ratios)}"
    return report("probe not due: share of a step", per_step / step_seconds(), OFF_LIMIT, spread)


def shadow_off() -> bool:
    """Measure what `shadow` does in a step between two due ones, over the step's time."""
    plain, other = Loop(demo_config(every=0)), Loop(demo_config(every=0))
    calls = 2000
    with shadow(other.model, "flash:fa2", every=0, steps=[10**9]) as probe:
        start = time.perf_counter()
        for _ in range(calls):
            probe.step()
        per_step = (time.perf_counter() - start) / calls

    def shadowed() -> float:
        with shadow(other.model, "flash:fa2", every=0, steps=[10**9]):
            return other.seconds(4)

    ratios = interleaved(lambda: plain.seconds(4), shadowed, 40)
    spread = f"whole loops {statistics.median(ratios) - 1:+.1%}, {quartiles(ratios)}"
    return report("shadow() not due: share of a step", per_step / step_seconds(), OFF_LIMIT, spread)


def step_seconds() -> float:
    """Return the time of one update of the demo's model."""
    loop = Loop(demo_config(every=0))
    loop.seconds(2)
    return loop.seconds(10) / 10


def quartiles(ratios: list[float]) -> str:
    """Return the quartiles of sorted ratios as words."""
    first, last = ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]
    return f"quartiles {first - 1:+.1%} {last - 1:+.1%}"


def trained(config: ArmConfig, steps: int) -> float:
    """Return the wall time of an arm's first `steps` updates, trained as a study does."""
    train = replace(config.train, steps=steps, checkpoint_every=steps, snapshot_steps=())
    config = replace(config, train=train)
    parts, data = assemble(config), load_data(config)
    with tempfile.TemporaryDirectory() as folder:
        files = RunFiles.unnamed(Path(folder))
        log = MetricLog(files.paths.metrics)
        trainer = make_trainer(config, files, [RecordsLogger(log)], parts.callbacks)
        start = time.perf_counter()
        fit(trainer, parts, data)
        seconds = time.perf_counter() - start
        log.close()
    return seconds


def probing() -> bool:
    """Measure the share of the demo's probing: every 10 steps, shadow, golden, backward."""
    plain, probed = demo_config(every=0), demo_config(every=10)
    ratios = interleaved(lambda: trained(plain, 40), lambda: trained(probed, 40), 5)
    share = 1 - 1 / statistics.median(ratios)
    spread = f"range {1 - 1 / ratios[0]:.1%} {1 - 1 / ratios[-1]:.1%}"
    return report("probing every 10 steps as the demo: share of time", share, PROBED_LIMIT, spread)


def budgeted() -> bool:
    """Measure the share that a probe at every step takes under `overhead: 5%`."""
    plain, probed = demo_config(every=0), demo_config(every=1, overhead="5%")
    ratios = interleaved(lambda: trained(plain, 100), lambda: trained(probed, 100), 3)
    share = 1 - 1 / statistics.median(ratios)
    spread = f"range {1 - 1 / ratios[0]:.1%} {1 - 1 / ratios[-1]:.1%}"
    return report("every step, overhead 5%: share of time", share, BUDGET + NOISE, spread)


def looking(limit: float, candidate: str = "flash:fa2", times: int = 9, **options: bool) -> bool:
    """Measure the share of a `shadow` that looks at every 50th step, 4 layers of width 256.

    The first look, which also lists the layers, is made once in a run and stands beside it.
    """
    config = demo_config(every=0)
    model = replace(config.model, depth=4, width=256, heads=4, context=256)
    sdpa = replace(config.attention, implementation="sdpa")
    plain, watched = (Loop(replace(config, model=model, attention=sdpa)) for _ in range(2))
    plain.seconds(2)
    watched.seconds(2)
    with shadow(watched.model, candidate, every=1, **options) as probe:

        def looked_at() -> float:
            start = time.perf_counter()
            watched.step()
            probe.step()
            probe.deliver()
            return time.perf_counter() - start

        first = looked_at() / plain.seconds(1)
        ratios = interleaved(lambda: plain.seconds(1), looked_at, times)
    share = (statistics.median(ratios) - 1) / LOOK_EVERY
    spread = f"a look: {quartiles(ratios)} of a step, the first {first - 1:+.0%}"
    what = ", ".join([candidate, *(name if on else f"no {name}" for name, on in options.items())])
    return report(f"shadow, every {LOOK_EVERY}th step ({what}): share", share, limit, spread)


def metrics_of_a_layer() -> None:
    """Print the time of one layer's metrics over that of reading both tensors twice."""
    generator = torch.Generator().manual_seed(0)
    reference = torch.randn(SHAPE, generator=generator).bfloat16()
    x = (reference.float() * (1 + 2**-8 * torch.randn(SHAPE, generator=generator))).bfloat16()

    def best(call: Callable[[], object]) -> float:
        call()
        times = []
        for _ in range(7):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        return min(times)

    def sums(widen: Callable[[torch.Tensor], torch.Tensor]) -> None:
        for tensor in (x, reference, x, reference):
            widen(tensor).sum()

    cost = best(lambda: compare(x, reference))
    narrow, wide = best(lambda: sums(lambda t: t)), best(lambda: sums(torch.Tensor.double))
    print(f"metrics of one layer {SHAPE} BF16, with its histogram: {cost * 1e3:.1f} ms")
    print(f"  over summing both tensors twice in FP64: {cost / wide:.2f}x (wanted: 1x)")
    print(f"  over reading both tensors twice in BF16: {cost / narrow:.0f}x (wanted: 1x)")


def memory() -> None:
    """Print what a probed step adds to the peak memory of an unprobed one, by depth."""
    print("peak memory that a probed step adds:", end="")
    for depth in (2, 4, 8):
        peaks = []
        for every in (0, 1):
            command = [sys.executable, __file__, "--peak", str(depth), str(every)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            peaks.append(float(done.stdout))
        print(f"   depth {depth}: {peaks[1] - peaks[0]:.0f} MiB", end="")
    print("   (wanted: the same)")


def print_peak(depth: int, every: int) -> None:
    """Print this process's peak memory in MiB after three steps of a model of some depth."""
    config = demo_config(every=every)
    model = replace(config.model, depth=depth, context=512)
    loop = Loop(replace(config, model=model), every=every)
    loop.seconds(3)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def main() -> int:
    """Run all of it and return the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--peak", nargs=2, type=int, metavar=("DEPTH", "EVERY"))
    peak = parser.parse_args().peak
    if peak:
        print_peak(*peak)
        return 0
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore", module=r"lightning(\.|$)")
    print(
        f"{torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}, "
        f"torch {torch.__version__}"
    )
    kept = [probe_off(), shadow_off(), probing(), budgeted()]
    kept += [
        looking(LOOK_LIMIT, golden=True, backward=True),
        looking(FORWARD_LIMIT, golden=False, backward=False),
    ]
    metrics_of_a_layer()
    memory()
    return 0 if all(kept) else 1


if __name__ == "__main__":
    sys.exit(main())
