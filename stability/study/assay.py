"""Plants known faults on a trained candidate, and measures what the evidence makes of each.

After a candidate's run of the first seed, its snapshots are loaded again and the run's own batches
go forward and backward through the model. At the *operator* the captured q, k, v and dO of each
layer are given to the candidate with each fault of `attention_kernels.testing.FAULTS`, to the
baseline and to the golden, and compared by the functions that the probe uses. In the *gradient*
the whole model's gradient is taken with the faulty candidate, the baseline and the golden, isolated
as in the study's own gradient evidence. A fault whose error is surely larger than the policy allows
is done after FEW looks; one that can only be seen by what repeats from look to look, a bias, takes
SHARE_LOOKS of them, on different batches. At 64-true, where the golden's gradient is no finer than
the candidate's, faults are planted at the operator alone.

Only a study with an arm of role `broken` is assayed: without one nothing can pass anyway. Leaves
out the file (`records.assay`) and what counts as found (`analysis.assay`).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attention_kernels import golden_attention
from attention_kernels.testing.faults import FAULTS, Fault, plant
from stability.analysis.assay import faults_due, stale_part
from stability.analysis.intervals import p_values
from stability.analysis.sequential import look_alpha
from stability.analysis.study_records import read_study
from stability.analysis.verdict import judge_arms
from stability.config.study import PolicyConfig
from stability.metrics.coherence import coherence_of
from stability.metrics.golden_error import GOLDEN_COLUMNS, golden_tensor
from stability.metrics.sketch import sketch
from stability.records.assay import (
    AssayRecord,
    FaultRecord,
    read_assay,
    sources_of,
    write_assay,
)
from stability.records.identity import environment
from stability.records.manifest import read_manifest
from stability.records.paths import RunPaths, snapshot_steps
from stability.records.run_files import read_run_snapshot
from stability.study.assemble import assemble, load_data, resolve_device
from stability.study.gpt_gradients import GptGradients, attention_rounding, attentions_of_arm
from stability.study.run import Run, has_ended

__all__ = ["assay_run", "update_assays"]

FEW = 3
"""Looks at the operator, and at a gradient whose error is far too large."""
SHARE_LOOKS = 24
"""Looks at a gradient whose error is not; the study's own evidence asks for 20."""
STAGES = (FEW, 6, 12)
"""Looks after which a ratio of errors may be enough, each with its share of the error rate."""
SEQUENCES = 4
"""Of a batch, as many as take part in a gradient, and half of them at the operator: a fault is a
thousand roundings large there, and time is what an assay costs."""
METRICS = ("error_ratio", "gain", "golden_bias_ulp")

Qkv = tuple[Tensor, Tensor, Tensor]


def update_assays(
    study: Path,
    runs: Sequence[Run],
    policy: PolicyConfig,
    note: Callable[[str, int, str], None],
    tell: Callable[[str], None] = lambda text: None,
    *,
    measure: Callable[[Run, PolicyConfig], AssayRecord | None] | None = None,
) -> list[AssayRecord]:
    """Assay each candidate of the first seed whose record is missing, stale, or not of its run.

    Nothing is done in a study without an arm that is broken on purpose, nor on a candidate that
    fails already: an assay can only keep an arm from passing. `note` is told of an arm, its seed
    and why it could not be assayed; `tell` of each that begins, since it takes some seconds.
    `measure` is `assay_run`, or that in a process of its own.
    """
    first = [run for run in runs if run.seed == runs[0].seed]
    if not any(run.arm.role == "broken" for run in first):
        return []
    failed = _failed(study, policy)
    made = []
    for run in first:
        # no policy's arms: those of role candidate are judged
        named = run.arm.name in policy.candidates
        is_judged = named if policy.candidates else run.arm.role == "candidate"
        if not is_judged or run.arm.name in failed:
            continue
        if not has_ended(run.paths) or _is_known(study, run):
            continue
        tell(f"planting known faults on {run.arm.name}, to see whether the study would find them")
        try:
            record = (measure or assay_run)(run, policy)
        except (ValueError, RuntimeError) as error:
            note(run.arm.name, run.seed, f"no assay: {error}")
            continue
        if record is not None:
            write_assay(study, record)
            made.append(record)
    return made


def _failed(study: Path, policy: PolicyConfig) -> set[str]:
    """Return the candidates that fail by what is on record; none where nothing can be judged."""
    try:
        judged = judge_arms(read_study(study), policy)
    except ValueError:  # damaged records, or no candidate: a verdict says so
        return set()
    return {arm.arm for arm in judged.candidates if arm.outcome == "FAIL"}


def assay_run(run: Run, policy: PolicyConfig) -> AssayRecord | None:
    """Return what each planted fault shows on the candidate of `run`; None if it is no attention.

    ValueError for a run without snapshots of trained weights, a damaged one, and one that was
    trained with other sources than those that would be measured now.
    """
    device = resolve_device(run.config)
    gradients = attentions_of_arm(run.config, device)
    if gradients is None:
        return None
    sources = _sources_now(run)
    steps = _steps(run.paths)
    if not steps:
        raise ValueError(f"assay: {run.paths.root} must have a snapshot after step 0, has none")
    looks = list(_looks(run, steps, device))
    due = faults_due(run.config.precision)
    faults = [FAULTS[name] for name in due]
    operator = _operator(gradients, looks[:FEW], faults)
    own = FaultRecord(name="", what="no fault", levels=(), operator=operator[""])
    found = [
        _in_gradient(gradients, looks, fault, policy) if "gradient" in due[fault.name] else {}
        for fault in faults
    ]
    return AssayRecord(
        arm=run.arm.name,
        seed=run.seed,
        parents=_parents(run.paths),
        own=own,
        faults=tuple(
            FaultRecord(
                name=fault.name,
                what=fault.what,
                levels=due[fault.name],
                operator=operator[fault.name],
                **figures,
            )
            for fault, figures in zip(faults, found, strict=True)
        ),
        sources=sources,
    )


def _is_known(study: Path, run: Run) -> bool:
    """Whether the record of a run holds all that would be measured now, on its own weights."""
    try:
        known = read_assay(study, run.arm.name)
    except ValueError:  # damaged: it can be measured again
        return False
    if known is None or known.arm != run.arm.name or known.seed != run.seed:
        return False
    manifest = read_manifest(run.paths.manifest)
    return (
        dict(known.parents) == _parents(run.paths)
        and known.is_of(manifest.resolved, manifest.environment)
        and not stale_part(known, run.config.precision)
    )


def _sources_now(run: Run) -> dict[str, str]:
    """Return the sources that faults would be planted with; ValueError unless the run's own."""
    manifest = read_manifest(run.paths.manifest)
    trained = sources_of(manifest.resolved, manifest.environment)
    now = sources_of(assemble(run.config).attention.description, environment())
    other = [name.replace("_", " ") for name in now if now[name] != trained[name]]
    if other:
        raise ValueError(
            f"assay: {run.arm.name} must have the {other[0]} that it was trained with, has another "
            f"now; restore it, or move {run.paths.root} away to train it anew"
        )
    return now


def _steps(paths: RunPaths) -> list[int]:
    """Return up to FEW snapshot steps, the last ones, where weights are no longer the initial."""
    return [step for step in snapshot_steps(paths) if step > 0][-FEW:]


def _parents(paths: RunPaths) -> dict[str, str]:
    files = read_manifest(paths.manifest).files
    names = [paths.name_of(paths.snapshot(step)) for step in _steps(paths)]
    return {name: files[name] for name in names if name in files}


@dataclass(slots=True)
class _Look:
    """One batch at the weights of one snapshot, with the gradients that every fault shares."""

    weights: Mapping[str, Tensor]
    batch: Tensor
    golden: Mapping[str, Tensor] = field(default_factory=dict)
    baseline: float = math.nan
    """The norm of the baseline's error."""


def _looks(run: Run, steps: Sequence[int], device: torch.device) -> list[_Look]:
    """Return SHARE_LOOKS looks: the run's own batches in order, over the snapshots in turn."""
    weights = [
        {name: value.to(device) for name, value in read_run_snapshot(run.paths, step).items()}
        for step in steps
    ]
    loader = load_data(run.config).train_dataloader()
    looks = []
    for index, batch in zip(range(SHARE_LOOKS), loader, strict=False):
        looks.append(
            _Look(weights=weights[index % len(weights)], batch=batch[:SEQUENCES].to(device))
        )
    return looks


def _operator(
    gradients: GptGradients, looks: Sequence[_Look], faults: Sequence[Fault]
) -> dict[str, dict[str, dict[str, tuple[float, ...]]]]:
    """Return by fault, result and metric a value for each look and layer; "" is no fault."""
    columns = [GOLDEN_COLUMNS.index(metric) for metric in METRICS]
    names = ["", *(fault.name for fault in faults)]
    found: dict[str, dict[str, dict[str, list[float]]]] = {name: {} for name in names}
    for look in looks:
        for index, (qkv, dout) in enumerate(_captured(gradients, look)):
            if not gradients.changed[index]:
                continue
            golden = _results(golden_attention, tuple(x.double() for x in qkv), dout.double())
            baseline = _results(gradients.baseline[index], qkv, dout)
            for name in names:
                own = gradients.candidate[index]
                planted = plant(own, name) if name else own
                for result, value in _results(planted, qkv, dout).items():
                    values = golden_tensor(value, baseline[result], golden[result])
                    of_result = found[name].setdefault(result, {m: [] for m in METRICS})
                    for metric, number in zip(METRICS, values[columns].tolist(), strict=True):
                        of_result[metric].append(number)
    return {
        fault: {
            result: {metric: tuple(values) for metric, values in metrics.items()}
            for result, metrics in results.items()
        }
        for fault, results in found.items()
    }


def _captured(gradients: GptGradients, look: _Look) -> list[tuple[Qkv, Tensor]]:
    """Return q, k, v and dO of each layer as the run's attention is given them."""
    kept: list[dict[str, Any]] = [{} for _ in gradients.candidate]

    def catching(attention: Callable[..., Tensor], into: dict[str, Any]) -> Callable[..., Tensor]:
        def attend(q: Tensor, k: Tensor, v: Tensor, **mask: Any) -> Tensor:
            out = attention(q, k, v, **mask)
            into["qkv"] = q.detach(), k.detach(), v.detach()
            out.register_hook(lambda grad: into.update(dout=grad.detach()))
            return out

        return attend

    pairs = zip(gradients.candidate, kept, strict=True)
    own = replace(gradients, candidate=[catching(one, into) for one, into in pairs])
    own.of(look.weights, look.batch[: max(1, SEQUENCES // 2)], "candidate", False)
    rounding = attention_rounding(gradients.precision)
    # q may still be as wide as the model where autocast narrows it on the way into the kernel
    dtype = rounding if isinstance(rounding, torch.dtype) else None
    return [
        (
            tuple(x.to(dtype or x.dtype) for x in one["qkv"]),
            one["dout"].to(dtype or one["dout"].dtype),
        )
        for one in kept
    ]


def _results(
    attention: Callable[..., Tensor], qkv: Sequence[Tensor], dout: Tensor
) -> dict[str, Tensor]:
    leaves = [x.detach().requires_grad_() for x in qkv]
    out = attention(*leaves, causal=True)
    grads = torch.autograd.grad(out, leaves, dout.to(out.dtype))
    return {"out": out.detach(), **dict(zip(("dq", "dk", "dv"), grads, strict=True))}


def _in_gradient(
    gradients: GptGradients, looks: Sequence[_Look], fault: Fault, policy: PolicyConfig
) -> dict[str, Any]:
    """Return the figures of `FaultRecord` on the gradient."""
    planted = replace(
        gradients,
        candidate=[
            plant(attention, fault.name) if changed else attention
            for attention, changed in zip(gradients.candidate, gradients.changed, strict=True)
        ],
    )
    ratios: list[float] = []
    sketches: list[Tensor] = []
    for look in looks:
        if not look.golden:
            look.golden = gradients.of(look.weights, look.batch, "golden", True)
            own = gradients.of(look.weights, look.batch, "baseline", True)
            look.baseline = _norm(_error(own, look.golden))
        error = _error(planted.of(look.weights, look.batch, "candidate", True), look.golden)
        ratios.append(_norm(error) / look.baseline if look.baseline else math.inf)
        sketches.append(sketch(error))
        if len(ratios) in STAGES and _is_surely_above(ratios, policy):
            break
    errors = torch.stack(sketches).double()
    found = coherence_of((errors @ errors.mT).cpu().numpy())
    return {
        "ratios": tuple(ratios),
        "share": float(found.share),
        "share_se": float(found.share_se),
        "share_looks": found.looks,
    }


def _is_surely_above(ratios: Sequence[float], policy: PolicyConfig) -> bool:
    if not all(0 < ratio < math.inf for ratio in ratios):
        return False
    logs = {look: math.log(ratio) for look, ratio in enumerate(ratios)}
    # half is the share's, and a ratio is tried at each stage and at the end
    alpha = look_alpha(policy.alpha) / 2 / (len(STAGES) + 1)
    return p_values(logs, math.log(policy.max_gradient_ratio))[0] <= alpha


def _error(one: Mapping[str, Tensor], golden: Mapping[str, Tensor]) -> list[Tensor]:
    return [one[name] - exact for name, exact in golden.items()]


def _norm(parts: Sequence[Tensor]) -> float:
    return math.sqrt(sum(float(part.double().square().sum()) for part in parts))
