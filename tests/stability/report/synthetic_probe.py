"""A probe's records without a model: healthy layers, and one error planted where asked."""

import random
from pathlib import Path

from stability.metrics.golden_error import GOLDEN_COLUMNS
from stability.metrics.ulp import ULP_EDGES
from stability.records.events import Event, log_event
from stability.records.metric_log import MetricLog
from stability.records.metric_names import ULP_HISTOGRAM, deviation_name, head_part, watch_name
from stability.records.metric_table import DEVIATION_METRICS
from stability.records.probe_record import METRICS_FILE, ProbeRecord, write_probe_record

COMPARED = ("out", "lse", "dq", "dk", "dv", "carried", "total")


def measurements(rng: random.Random, times: float = 1.0, bias: float = 0.0) -> dict[str, float]:
    """Return every metric of one healthy place, its error `times` as large, biased by `bias`."""
    error = 1e-3 * rng.uniform(0.6, 1.7) * times
    values = dict.fromkeys(DEVIATION_METRICS, error)
    values |= {
        "bias_ulp": bias + rng.gauss(0, 0.01),
        "bias_ulp_se": 0.01,
        "error_ratio": rng.uniform(0.7, 1.6) * times,
        "nonfinite": 0.0,
        "gain": rng.gauss(0, 1e-4),
        "gain_baseline": rng.gauss(0, 1e-4),
        "golden_bias_ulp": bias + rng.gauss(0, 0.005),
        "golden_bias_ulp_baseline": rng.gauss(0, 0.005),
        "baseline_over_rounding": 1.2 + rng.gauss(0, 0.01),
        "golden_nonfinite": 0.0,
        "max_abs": 0.0156 * rng.choice((1, 2)),
    }
    return values


def write_probe(
    folder: Path,
    *,
    seed: int = 0,
    layers: int = 4,
    heads: int = 4,
    planted: tuple[int, int] | None = None,
    since: int = 20,
    biased: int | None = None,
    golden: bool = True,
    shadows: tuple[str, ...] = ("",),
    events: tuple[Event, ...] = (),
) -> Path:
    """Write a probe of steps 0, 10, ... 50; an error from `since` on in (layer, head) `planted`."""
    rng, log = random.Random(seed), MetricLog(folder / METRICS_FILE)
    names = [f"model.layers.{index}.self_attn" for index in range(layers)]
    for step in range(0, 60, 10):
        metrics, counts = {}, {}
        for shadow in shadows:
            for index, layer in enumerate(names):
                wrong = planted is not None and planted[0] == index and step >= since
                bias = 0.2 if biased == index else 0.0
                for what in COMPARED:
                    hit = wrong and what not in ("lse", "carried")
                    found = measurements(rng, 300.0 if hit else 1.0, bias if what == "out" else 0.0)
                    rows = {"": found}
                    for head in range(heads):
                        mine = hit and planted is not None and planted[1] == head
                        rows[head_part(head)] = measurements(
                            rng, 600.0 if mine else 1.0, bias if what == "out" else 0.0
                        )
                    for part, values in rows.items():
                        metrics |= {
                            deviation_name(layer, what, m, shadow=shadow, part=part): v
                            for m, v in values.items()
                            if golden or m not in GOLDEN_COLUMNS
                        }
                    name = deviation_name(layer, what, ULP_HISTOGRAM, shadow=shadow)
                    counts[name] = [rng.randrange(50) for _ in range(len(ULP_EDGES) + 1)]
                metrics[watch_name("max_logit", layer=layer)] = rng.uniform(3, 9)
        log.append(step, metrics, counts)
    for event in events:
        log_event(log, event)
    log.close()
    length = log.position()
    write_probe_record(
        folder,
        ProbeRecord(
            model="TinyModel",
            primary={"implementation": "own"},
            shadows={name or "flash:fa2": {"implementation": "flash"} for name in shadows},
            golden=golden,
            layers=names,
            steps=55,
            environment={"torch": "2.13"},
            state="ended",
            log={"bytes": length, "sha256": log.hash_until(length)},
        ),
    )
    return folder
