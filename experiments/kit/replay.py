"""Trains the GPT in a plain loop, on batches that every arm of a seed sees again, under the probe.

For experiments with many short arms that need figures in memory, not a study's records: BF16
autocast over FP32 weights, AdamW, the learning rate linear over its warm-up and constant then, no
clipping. Weights, batches and nudge are functions of the seed. Leaves out records, checkpoints and
the proof of the pair (`runner`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim import AdamW

from attention_kernels.arithmetic import settle_vector_math
from stability.config.schema import DataConfig, ModelConfig, OptimizerConfig, ProbeConfig
from stability.data.datamodule import batch_indices, cut_blocks
from stability.data.sources import load_texts
from stability.data.tokenizers import load_tokenizer
from stability.model.gpt import GPT
from stability.model.initial_weights import initialise, nudge_weights
from stability.probe.attention_probe import AttentionProbe, DualAttention, as_shadows
from stability.probe.attention_registry import ResolvedAttention, resolve_attention

__all__ = ["Course", "Recipe", "load_blocks", "train"]

SHADOW = "flash:fa2"
"""What every layer's attention is compared with; FP64 is the golden of both."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """What all arms of a comparison share."""

    model: ModelConfig
    optimizer: OptimizerConfig
    data: DataConfig = field(default_factory=DataConfig)
    batch_size: int
    steps: int
    probe_every: int
    device: str = "cpu"


@dataclass(frozen=True, kw_only=True, slots=True)
class Course:
    """One arm's training: the loss of every step, and the probe's metrics by probed step."""

    losses: list[float]
    probed: dict[int, dict[str, float]]


def load_blocks(recipe: Recipe) -> Tensor:
    """Return the text as blocks `(n_blocks, context + 1)`.

    ValueError for a text that cannot be read or a tokenizer with more tokens than the model has.
    """
    tokenizer = load_tokenizer(recipe.data.tokenizer)
    if tokenizer.vocab_size > recipe.model.vocab_size:
        raise ValueError(
            f"load_blocks: vocab_size must be at least the {tokenizer.vocab_size} of tokenizer "
            f"{recipe.data.tokenizer!r}, got {recipe.model.vocab_size}"
        )
    return cut_blocks(tokenizer.encode(load_texts(recipe.data)), recipe.model.context)


def train(
    recipe: Recipe,
    attention: Sequence[ResolvedAttention],
    blocks: Tensor,
    *,
    seed: int,
    nudge_ulps: int = 0,
) -> Course:
    """Train one arm: layer i attends by `attention[i]`, and the probe compares each with `SHADOW`.

    A loss at step s, counted from 0, is that of the weights after s updates. A run goes on to its
    last step, also where its loss is no number any more.
    """
    settle_vector_math()
    device = torch.device(recipe.device)
    model, probe = _model(recipe.model, attention, device)
    initialise(model, recipe.model.init, seed)
    nudge_weights(model, nudge_ulps, seed)
    model.to(device)
    optimizer = _optimizer(model, recipe.optimizer)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / max(1, recipe.optimizer.warmup_steps))
    )
    losses, probed = [], {}
    for step in range(recipe.steps):
        batch = blocks[batch_indices(seed, step, recipe.batch_size, len(blocks))].long().to(device)
        if step % recipe.probe_every == 0:
            probe.arm()
        with torch.autocast(device.type, dtype=torch.bfloat16):
            logits = model(batch[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        probe.disarm()
        if step % recipe.probe_every == 0:
            probed[step] = probe.collect().metrics
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return Course(losses=torch.stack(losses).tolist(), probed=probed)


def _model(
    config: ModelConfig, attention: Sequence[ResolvedAttention], device: torch.device
) -> tuple[GPT, AttentionProbe]:
    """Return the model on the CPU, and the probe that looks at every layer of it."""
    modules: dict[str, torch.nn.Module] = {}
    probe = AttentionProbe(
        ProbeConfig(golden=True, backward=False, inside=True),
        as_shadows([resolve_attention(SHADOW, device)]),
        shadow_is_candidate=False,
        modules=modules,
    )
    layers = [
        DualAttention(layer=f"layer_{index}", primary=each, probe=probe)
        for index, each in enumerate(attention)
    ]
    model = GPT(config, layers)
    modules.update(model.blocks.named_children())
    return model, probe


def _optimizer(model: GPT, chosen: OptimizerConfig) -> AdamW:
    return AdamW(
        model.parameters(),
        lr=chosen.lr,
        betas=chosen.betas,
        eps=chosen.eps,
        weight_decay=chosen.weight_decay,
    )
