"""`stability compare`: how far apart two sets of weights on disk are, whatever holds them."""

import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from stability.cli.output import HOLDS, print_json, print_line
from stability.cli.retrained import with_snapshot
from stability.records.object_store import at_hand, is_url, shown_url
from stability.records.paths import RunPaths, check_exists, is_run

__all__ = ["compare"]


def compare(
    a: str,
    b: str,
    step: int | None = None,
    top: int = 20,
    retrain: bool = False,
    json: bool = False,
) -> int:
    """Compare the weights of two runs, files or folders, parameter by parameter.

    Each is the folder of a run, a snapshot or another safetensors file, a Lightning checkpoint, a
    Hugging Face folder, a state dict of torch.save (.pt, .pth, .bin), or a folder that
    torch.distributed.checkpoint wrote (torchtitan, FSDP, Megatron's torch_dist), from any number of
    ranks; or the URL of such a file or folder in an object store, such as
    s3://bucket/model.safetensors. Parameters are matched by name; what can't be compared is listed.
    Any two may be compared: of two runs the first line says whether they keep the pair contract,
    with `b` as the baseline, as far as their small records tell; `stability verify B A` holds every
    file against its checksum too.

    Where the study's keep has dropped a snapshot the answer comes from sketches of the weights: the
    L2 distance and the cosine of all of them together, to 0.3 %, and whether they are equal.

    Args:
        a: the candidate
        b: the reference, whose size and spread the drift is measured by
        step: the snapshot of the runs; the last one they share if not given
        top: how many parameters to show, those that moved most
        retrain: have snapshots that were dropped again, by training their runs anew to the same
            bits, in runs/<study>/forks/<arm>
        json: print all of it as one JSON object
    """
    if top < 0:
        raise ValueError(f"compare: top must be >= 0, got {top}; 0 shows the pooled weights alone")
    say = None if json else print_line
    with at_hand(a, say) as first, at_hand(b, say) as second:
        urls = {path: url for path, url in ((first, a), (second, b)) if is_url(url)}
        for path, url in urls.items():
            if is_run(path):
                raise ValueError(
                    f"compare: a URL must be of weights, got that of a run, {shown_url(url)}; name "
                    "a snapshot in it"
                )
        for path in (first, second):
            check_exists(path)
        return _compare(first, second, urls, step, top, retrain=retrain, json=json)


def _compare(
    a: Path,
    b: Path,
    urls: Mapping[Path, str],
    step: int | None,
    top: int,
    *,
    retrain: bool,
    json: bool,
) -> int:
    """Compare what is on this disk; `urls` says which of both is a copy, and of what."""
    runs = [path for path in (a, b) if is_run(path)]
    if step is not None and not runs:
        raise ValueError(f"compare: step must be left out, got {step}; neither is a run: {a}, {b}")
    from stability.analysis.sketch_comparison import is_sketch_alone  # heavy: numpy

    if step is None and len(runs) == 2:
        step = _last_common_step(a, b)
    steps = [step if path in runs else None for path in (a, b)]
    contract = _contract(RunPaths(a), RunPaths(b)) if len(runs) == 2 else ""
    if retrain:
        a, b = (with_snapshot(*each) for each in zip((a, b), steps, strict=True))
    elif any(is_sketch_alone(*each) for each in zip((a, b), steps, strict=True)):
        return _show_sketched((a, steps[0]), (b, steps[1]), contract, json=json)
    from rich.console import Console  # heavy, and the rest needs torch

    from stability.analysis.weight_comparison import compare_weights
    from stability.records.weight_files import open_weights
    from stability.report.terminal.pairs import print_comparison

    opened = [open_weights(*each) for each in zip((a, b), steps, strict=True)]
    for weights, path in zip(opened, (a, b), strict=True):
        if path in urls:
            weights.label = weights.label.replace(str(path), shown_url(urls[path]))
    compared = compare_weights(*opened)
    if json:
        print_json({**compared.to_dict(), **({"contract": contract} if contract else {})})
    else:
        print_comparison(compared, top, Console(), contract)
    return HOLDS


def _show_sketched(
    a: tuple[Path, int | None], b: tuple[Path, int | None], contract: str, *, json: bool
) -> int:
    """Compare by sketch, and print what that tells and what it can't."""
    from rich.console import Console  # heavy, and the rest needs torch

    from stability.analysis.sketch_comparison import compare_by_sketch
    from stability.report.terminal.pairs import print_sketched

    compared = compare_by_sketch(a, b)
    if json:
        print_json({**compared.to_dict(), **({"contract": contract} if contract else {})})
        return HOLDS
    words = ["stability", "compare", str(a[0]), str(b[0])]
    step = a[1] if a[1] is not None else b[1]
    again = shlex.join([*words, *([] if step is None else ["--step", str(step)]), "--retrain"])
    print_sketched(compared, again, Console(), contract)
    return HOLDS


def _contract(run: RunPaths, baseline: RunPaths) -> str:
    """Return in a sentence whether two runs are a pair."""
    from stability.analysis.pair_contract import prove_pair  # heavy: numpy

    try:
        proof = prove_pair(baseline, run, _damage_of_small_files, reads_weights=False)
    except ValueError as error:  # the weights of a folder can be read, and its manifest not
        return f"unproven: {error}"
    if proof.unproven and not proof.breach:
        return f"unproven: not on record: {', '.join(proof.unproven)}"
    return proof.sentence


def _damage_of_small_files(paths: RunPaths) -> list[str]:
    """Return what is wrong with a run's files but its snapshots, which are large.

    Of those the one that is compared is held against its checksum when it is read.
    """
    from stability.records.manifest import read_manifest
    from stability.records.run_files import damaged_files, log_damage

    manifest = read_manifest(paths.manifest)
    folder = f"{paths.name_of(paths.snapshot(0).parent)}/"
    small = {name: known for name, known in manifest.files.items() if not name.startswith(folder)}
    damaged = damaged_files(paths, replace(manifest, files=small))
    found = [f"{paths.root / name}: {wrong}" for name, wrong in damaged.items()]
    log = log_damage(paths)
    return [*found, log] if log else found


def _last_common_step(a: Path, b: Path) -> int | None:
    """Return the last step of which both runs have a snapshot, or had; None if one never had any.

    One that was dropped counts too: an earlier step would be another question.
    """
    from stability.records.run_files import recorded_steps  # heavy: numpy

    steps_a, steps_b = (recorded_steps(RunPaths(path)) for path in (a, b))
    common = set(steps_a) & set(steps_b)
    if common or not (steps_a and steps_b):
        return max(common, default=None)
    raise ValueError(
        f"compare: {a} and {b} must have snapshots of one step, got steps {steps_a} and {steps_b}"
    )
