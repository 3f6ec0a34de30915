"""Captures q, k and v at one layer of a trained run, on a batch of the run's own text.

The run's model is rebuilt from its manifest with the weights of a snapshot, and the arguments of
the layer's attention are recorded. What is measured on them is left to `probe.microbenchmark`.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from stability.config.commands import is_adopted, is_command
from stability.config.convert import from_dict
from stability.config.schema import ArmConfig, ModelConfig
from stability.model.decoder import build_decoder
from stability.probe.attention_inputs import AttentionInputs
from stability.records.manifest import read_manifest
from stability.records.paths import RunPaths, run_at
from stability.records.run_files import read_run_snapshot, recorded_steps
from stability.study.assemble import load_data
from stability.study.memory_estimate import parameter_count

__all__ = ["capture"]


class _Recorder:
    """An attention that keeps its last arguments and computes with PyTorch's own."""

    def __init__(self) -> None:
        self.seen: tuple[Tensor, Tensor, Tensor] | None = None

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None = None
    ) -> Tensor:
        self.seen = (q.detach(), k.detach(), v.detach())
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=causal, scale=scale, enable_gqa=k.shape[1] != q.shape[1]
        )


def capture(run: Path, layer: int, step: int | None = None) -> AttentionInputs:
    """Return FP32 q, k and v at `layer` and a random dout, from the snapshot of `step` or the last.

    ValueError if the folder holds no run or one that our trainer did not train, the run no such
    snapshot or another model's, the model no such layer, or if the run's text can't be loaded.
    """
    paths = run_at(run, "run")
    recorded = dict(read_manifest(paths.manifest).config)
    if is_command(recorded):
        whose = (
            f"recorded of `{recorded['program']}`: only that script can build the model, and a "
            "probe looks at its inputs as it trains"
        )
        if is_adopted(recorded):
            whose = "adopted from checkpoints"
        raise ValueError(
            "run must be one that `stability run` trained by our own trainer, got "
            f"{str(run)!r}, which was {whose}; check the attention without a run, as by "
            "`stability check NAME`"
        )
    config = from_dict(ArmConfig, recorded, str(paths.manifest))
    steps = recorded_steps(paths)
    step = steps[-1] if step is None and steps else step
    if step not in steps:
        raise ValueError(f"step must be one of {steps}, got {step!r} in {run}")
    if not 0 <= layer < config.model.depth:
        raise ValueError(f"layer must be from 0 to {config.model.depth - 1}, got {layer}")
    weights = read_run_snapshot(paths, step)
    _check_size(paths, step, config.model, weights)
    recorders = [_Recorder() for _ in range(config.model.depth)]
    model = build_decoder(config.model.drawn(), recorders)
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        said = " ".join(str(error).split())[:200]
        raise ValueError(
            f"{paths.held_snapshot(step)}: must fit the manifest's model: {said}"
        ) from error
    with torch.no_grad():
        model(_first_batch(paths, config)[:, :-1])
    seen = recorders[layer].seen
    assert seen is not None
    q, k, v = (x.float() for x in seen)
    dout = torch.randn(q.shape, generator=torch.Generator().manual_seed(0))
    return AttentionInputs(q, k, v, dout)


def _check_size(
    paths: RunPaths, step: int, model: ModelConfig, weights: Mapping[str, Tensor]
) -> None:
    """ValueError if the manifest's model is not as large as the snapshot, before it is built."""
    found, expected = sum(x.numel() for x in weights.values()), parameter_count(model)
    if found != expected:
        raise ValueError(
            f"{paths.held_snapshot(step)}: must hold the {expected} weights of the manifest's "
            f"model, holds {found}"
        )


def _first_batch(paths: RunPaths, config: ArmConfig) -> Tensor:
    # in this process: for a single batch others are not worth their start
    config = replace(config, data=replace(config.data, workers=0))
    try:
        return next(iter(load_data(config).train_dataloader()))
    except (ValueError, OSError) as error:
        raise ValueError(f"{paths.manifest}: the run's text can't be loaded: {error}") from error
