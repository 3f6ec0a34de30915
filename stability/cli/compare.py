"""`stability compare`: how far apart two sets of weights on disk are, whatever holds them."""

from pathlib import Path

from stability.cli.output import HOLDS, print_json
from stability.records.paths import RunPaths, check_exists, is_run, snapshot_steps

__all__ = ["compare"]


def compare(a: Path, b: Path, step: int | None = None, top: int = 20, json: bool = False) -> int:
    """Compare the weights of two runs, files or folders, parameter by parameter.

    Each is the folder of a run, a snapshot or another safetensors file, a Lightning checkpoint, a
    Hugging Face folder, or a state dict of torch.save (.pt, .pth, .bin). Parameters are matched by
    name; what can't be compared is listed.

    Args:
        a: the candidate
        b: the reference, whose size and spread the drift is measured by
        step: the snapshot of the runs; the last one they share if not given
        top: how many parameters to show, those that moved most
        json: print all of it as one JSON object
    """
    if top < 0:
        raise ValueError(f"compare: top must be >= 0, got {top}; 0 shows the pooled weights alone")
    for path in (a, b):
        check_exists(path)
    runs = [path for path in (a, b) if is_run(path)]
    if step is not None and not runs:
        raise ValueError(f"compare: step must be left out, got {step}; neither is a run: {a}, {b}")
    if step is None and len(runs) == 2:
        step = _last_common_step(a, b)
    from rich.console import Console  # heavy, and the rest needs torch

    from stability.analysis.weight_comparison import compare_weights
    from stability.records.weight_files import open_weights
    from stability.report.terminal.pairs import print_comparison

    opened = (open_weights(path, step if path in runs else None) for path in (a, b))
    compared = compare_weights(*opened)
    if json:
        print_json(compared.to_dict())
    else:
        print_comparison(compared, top, Console())
    return HOLDS


def _last_common_step(a: Path, b: Path) -> int | None:
    """Return the last step of which both runs have a snapshot; None if a run has none at all."""
    steps_a, steps_b = (snapshot_steps(RunPaths(path)) for path in (a, b))
    common = set(steps_a) & set(steps_b)
    if common or not (steps_a and steps_b):
        return max(common, default=None)
    raise ValueError(
        f"compare: {a} and {b} must have snapshots of one step, got steps {steps_a} and {steps_b}"
    )
