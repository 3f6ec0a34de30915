"""A small language model of parts that candidates repeat, and the training step around it."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stability import module_call, shadow

VOCABULARY = 37


@module_call
def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate the halves of q and k, `(batch, heads, length, head_dim)`, as Hugging Face does."""

    def half(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return torch.cat((-second, first), dim=-1)

    return q * cos + half(q) * sin, k * cos + half(k) * sin


def angles(length: int, head_dim: int, base: float = 10000.0) -> tuple[Tensor, Tensor]:
    """Return cos and sin of each position, `(length, head_dim)`."""
    frequencies = base ** (-torch.arange(0, head_dim, 2) / head_dim)
    turned = torch.outer(torch.arange(length), frequencies).repeat(1, 2)
    return turned.cos(), turned.sin()


class Norm(nn.Module):
    """RMSNorm as Hugging Face writes it: in FP32, whatever comes in."""

    def __init__(self, width: int, eps: float = 1e-3) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + 0.1 * torch.randn(width))
        self.eps = eps

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return hidden_states over their root mean square, times the weight."""
        dtype = hidden_states.dtype
        x = hidden_states.to(torch.float32)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * x.to(dtype)


class MLP(nn.Module):
    """A gated MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, 2 * width, bias=False)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return down(silu(gate(x)) * up(x))."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """A norm, an attention with rotary positions, a norm and an MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.second_norm = Norm(width), Norm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.mlp = MLP(width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the stream after this block."""
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for t in self.qkv(self.norm(x)).chunk(3, -1)
        )
        q, k = rotate(q, k, *angles(q.shape[2], q.shape[3]))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + out.transpose(1, 2).flatten(2)
        return x + self.mlp(self.second_norm(x))


class Language(nn.Module):
    """A decoder whose dropout on the stream draws random numbers outside of the watched parts."""

    def __init__(self, depth: int = 2, width: int = 32, heads: int = 2, dropout: float = 0.0):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.dropout = nn.Dropout(dropout)
        self.batch_norm = nn.BatchNorm1d(width)
        self.norm = Norm(width)
        self.lm_head = nn.Linear(width, VOCABULARY, bias=False)
        self.recomputes = False

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits."""
        x = self.embedding(tokens)
        for layer in self.layers:
            if self.recomputes:
                x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
            else:
                x = layer(x)
            x = self.dropout(x)
        x = self.batch_norm(x.transpose(1, 2)).transpose(1, 2)
        return self.lm_head(self.norm(x))


def batch(step: int) -> Tensor:
    """Return random tokens, `(2, 17)`."""
    return torch.randint(0, VOCABULARY, (2, 17), generator=torch.Generator().manual_seed(step))


def language_loss(model: nn.Module, step: int, precision: torch.dtype = torch.float32) -> Tensor:
    """Return the loss of a batch."""
    tokens = batch(step)
    with torch.autocast("cpu", precision, enabled=precision != torch.float32):
        logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def language_step(model: nn.Module, step: int, precision: torch.dtype = torch.float32) -> Tensor:
    """Run forward and backward on a batch and return the loss."""
    loss = language_loss(model, step, precision)
    loss.backward()
    return loss


def rewritten_norm(module, x):
    """RMSNorm in another order, numerically as good."""
    wide = x.float()
    scale = wide.square().sum(-1, keepdim=True).div(x.shape[-1]).add(module.eps).sqrt()
    return module.weight * (wide / scale).to(x.dtype)


def train(model, steps=3, precision=torch.float32, micro_batches=1, probe=None):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(5)
    for step in range(steps):
        optimizer.zero_grad()
        for micro_batch in range(micro_batches):
            language_step(model, 10 * step + micro_batch, precision)
        optimizer.step()
        if probe is not None:
            probe.step()
    return {name: value.clone() for name, value in model.state_dict().items()}


def judged(probe, layer):
    """Return what a look says of a layer: result -> (error ratio, gain)."""
    found = {}
    for name, value in probe.metrics.items():
        parts = name.split("/")
        if parts[1] == layer and parts[-1] in ("error_ratio", "gain"):
            found.setdefault(parts[-2], {})[parts[-1]] = value
    return {what: (each["error_ratio"], each["gain"]) for what, each in found.items()}


def look(modules, model=None, **options):
    torch.manual_seed(0)
    with shadow(model or Language(), modules=modules, **options) as probe:
        language_step(probe._model, 0)
        probe.step()
    return probe
