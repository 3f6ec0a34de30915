"""A study's records without training: drifts that grow and then saturate, as real ones do."""

import math
import random
from pathlib import Path

import torch

from stability.analysis.protocol_check import protocol_of
from stability.analysis.study_records import read_study
from stability.records.manifest import Manifest, write_manifest
from stability.records.metric_log import MetricLog
from stability.records.metric_names import TRAIN_LOSS, deviation_name, drift_name
from stability.records.paths import RunPaths, StudyPaths
from stability.records.protocol import protocol_hash, seal_protocol
from stability.records.sealed_json import write_sealed
from stability.records.snapshots import write_snapshot

STEPS = 200
SEEDS = (0, 1)
LAYERS = 5
SNAPSHOTS = (0, 1, 2, 5, 10, 20, 50, 100, 200)

FLASH = {
    "attention.implementation": ["baseline", "flash"],
    "attention.profile": ["", "all_bf16"],
}
ARMS = [
    {"name": "baseline", "axis": "none", "diff": {}},
    {"name": "flash_all_bf16", "axis": "attention", "diff": FLASH},
    {
        "name": "flash_fa2",
        "axis": "attention",
        "diff": {**FLASH, "attention.profile": ["", "fa2"]},
    },
    {"name": "rerun", "axis": "none", "diff": {}},
    {"name": "nudge", "axis": "nudge", "diff": {"nudge.ulps": [0, 1]}},
    {"name": "fp32", "axis": "precision", "diff": {"precision": ["bf16-mixed", "32-true"]}},
    {"name": "init_seed", "axis": "seed.init_offset", "diff": {"seed.init_offset": [0, 1000]}},
]
CONFIG = {
    "name": "quickstart",
    "question": "Does flash attention move my weights more than things I already accept?",
    "base": {
        "model": {"depth": LAYERS, "width": 128, "heads": 4, "context": 128},
        "attention": {
            "implementation": "baseline",
            "profile": "",
            "numerics": {},
            "engine": "auto",
        },
        "precision": "bf16-mixed",
        "train": {"steps": STEPS, "log_every": 1, "snapshot_steps": list(SNAPSHOTS)},
    },
    "arms": {arm["name"]: {} for arm in ARMS},
    "seeds": list(SEEDS),
    "yardstick": "fp32",
    "early_step": 20,
}
# relative L2 after one step, growth a step before it saturates, and where it saturates
GROWTH = {
    "flash_all_bf16": (6e-4, 0.05, 0.09),
    "flash_fa2": (1.2e-4, 0.05, 0.075),
    "nudge": (2e-6, 0.09, 0.07),
    "fp32": (4e-4, 0.05, 0.08),
    "init_seed": (1.35, 0.0, 1.35),
}
ERROR = {"flash_all_bf16": (8e-3, 3.1, 0.05), "flash_fa2": (2.4e-3, 0.62, 0.002)}


def rel_l2(arm: str, seed: int, step: int) -> float:
    """The relative L2 drift that is recorded for an arm, seed and step."""
    if arm == "rerun" or (step == 0 and arm not in ("nudge", "init_seed")):
        return 0.0
    start, rate, ceiling = GROWTH[arm]
    grown = start * (1 + step) ** 0.5 * math.exp(rate * step)
    return grown * ceiling / (grown + ceiling) * (1 + 0.07 * seed * ((1 + len(arm)) % 4))


def drifts(arm: str, seed: int, step: int) -> dict[str, float]:
    far = rel_l2(arm, seed, step)
    shares = {"w1": 0.0004, "w1_over_std": 0.02, "mean_abs": 0.012, "max_abs": 0.3}
    return {
        **{metric: share * far for metric, share in shares.items()},
        "rel_l2": far,
        "cosine": 1 - far**2 / 2,
        "sign_flips": 0.1 * far,
    }


def deviations(arm: str, layer: int, step: int) -> dict[str, float]:
    size, ratio, bias = ERROR.get(arm, ERROR["flash_all_bf16"])
    grown = 1 + 0.15 * layer + step / 400
    return {
        "rel_fro": size * grown,
        "error_ratio": ratio * (1 + 0.05 * layer),
        "bias_ulp": bias * (layer - 2) * grown,
        "golden_candidate_rel_fro": size,
        "golden_baseline_rel_fro": size / ratio,
    }


def loss(arm: str, seed: int, step: int) -> float:
    """A falling loss whose noise is the batch's, so that all arms share it but for their drift."""
    noise = random.Random(1000 * seed + step).gauss(0, 0.06)
    shift = 0.0 if arm == "baseline" else 0.3 * rel_l2(arm, seed, step)
    wobble = shift * math.sin(step / 9 + len(arm)) * 0.3
    return 2.1 + 3.4 * math.exp(-step / 35) + noise + wobble


def write_run(
    study_dir: Path, arm: dict, seed: int, *, state: str = "finished", until: int = STEPS
) -> RunPaths:
    """Write one run's records, up to step `until`."""
    name = arm["name"]
    paths = RunPaths.for_run(study_dir, name, seed)
    paths.root.mkdir(parents=True, exist_ok=True)
    initial = f"init-{seed}" if name != "init_seed" else f"other-{seed}"
    hashes = {"init_weights": initial * 8, "text": "text" * 16}
    hashes["protocol"] = protocol_hash(study_dir)
    if state == "finished":
        final = "baseline" if name == "rerun" else name
        hashes |= {"batches": f"batches-{seed}" * 6, "final_weights": f"{final}-{seed}" * 6}
    write_manifest(
        paths.manifest,
        Manifest(
            study=CONFIG["name"],
            arm=name,
            seed=seed,
            axis=arm["axis"],
            config=CONFIG["base"],
            diff=arm["diff"],
            environment={"python": "3.11", "torch": "2.13.0", "threads": 2},
            resolved={"engine": "twin", "numerics": {"accumulator": "fp32"}},
            hashes=hashes,
            state=state,
            step=until,
            message="ValueError: loss is not finite" if state == "failed" else "",
        ),
    )
    log = MetricLog(paths.metrics)
    for step in range(until + 1):
        metrics = {} if step == STEPS else {TRAIN_LOSS: loss(name, seed, step)}
        if step in SNAPSHOTS and name != "baseline":
            values = drifts(name, seed, step)
            metrics |= {drift_name("all", metric): value for metric, value in values.items()}
            metrics[drift_name("blocks.0.qkv.weight", "rel_l2")] = values["rel_l2"]
        if step % 20 == 0 and step < STEPS:
            for layer in range(LAYERS):
                for metric, value in deviations(name, layer, step).items():
                    metrics[deviation_name(f"layer_{layer}", "out", metric)] = value
        if metrics:
            log.append(step, metrics)
    log.close()
    return paths


def write_study_json(study_dir: Path, **changes: object) -> None:
    study_dir.mkdir(parents=True, exist_ok=True)
    content = {"config": {**CONFIG, **changes}, "arms": ARMS}
    write_sealed(StudyPaths(study_dir).study, content)


def seal(study_dir: Path) -> None:
    """Seal the study's protocol, which the manifests written after it will keep the hash of."""
    study = read_study(study_dir)
    seal_protocol(study_dir, protocol_of(study, study.policy))


def write_synthetic(study_dir: Path, **changes: object) -> Path:
    """Write a whole finished study into `study_dir`; `changes` go into its config."""
    write_study_json(study_dir, **changes)
    seal(study_dir)
    for seed in changes.get("seeds") or SEEDS:
        for arm in ARMS:
            paths = write_run(study_dir, arm, seed)
            write_snapshot(paths.snapshot(STEPS), {"w": torch.zeros(30, 40), "b": torch.zeros(25)})
    return study_dir
