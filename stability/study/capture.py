"""Captures q, k and v at one layer of a trained run, on a batch of the run's own text.

The run's model is rebuilt from its manifest with the weights of a snapshot, and the arguments of
the layer's attention are recorded. What is measured on them is left to `probe.microbenchmark`.
"""

from pathlib import Path

import torch
from torch import Tensor

from stability.config.convert import from_dict
from stability.config.schema import ArmConfig
from stability.model.gpt import GPT
from stability.probe.attention_inputs import AttentionInputs
from stability.records.manifest import read_manifest
from stability.records.paths import run_at, snapshot_steps
from stability.records.run_files import read_run_snapshot
from stability.study.assemble import load_data

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

    ValueError if the folder holds no run, the run no such snapshot, or the model no such layer.
    """
    paths = run_at(run, "capture: checkpoint")
    config = from_dict(ArmConfig, read_manifest(paths.manifest).config, str(paths.manifest))
    steps = snapshot_steps(paths)
    step = steps[-1] if step is None and steps else step
    if step not in steps:
        raise ValueError(f"capture: step must be one of {steps}, got {step!r} in {run}")
    if not 0 <= layer < config.model.depth:
        raise ValueError(f"capture: layer must be from 0 to {config.model.depth - 1}, got {layer}")
    recorders = [_Recorder() for _ in range(config.model.depth)]
    model = GPT(config.model, recorders)
    model.load_state_dict(read_run_snapshot(paths, step))
    with torch.no_grad():
        model(next(iter(load_data(config).train_dataloader()))[:, :-1])
    seen = recorders[layer].seen
    assert seen is not None
    q, k, v = (x.float() for x in seen)
    dout = torch.randn(q.shape, generator=torch.Generator().manual_seed(0))
    return AttentionInputs(q, k, v, dout)
