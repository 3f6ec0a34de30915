"""What our decoders have in common, whatever their shape: heads, dropout, a given attention.

Nothing here has weights but `HeadNorm`, so the names, the order and the initial weights of a
model's parameters are its own. Leaves out the layers themselves (`gpt`, `llama`).

Shapes: B batch, T tokens, W width, H heads, D head_dim.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attention_kernels import AttentionFn
from stability.config.model import ModelConfig

__all__ = ["AttendingDecoder", "HeadNorm", "dropped", "shared_state", "split_heads"]


class HeadNorm(nn.Module):
    """RMSNorm over head_dim with a learned scale, the same for every head."""

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(head_dim))

    def forward(self, x_BHTD: Tensor) -> Tensor:
        """Normalise in the dtype of the weights; the result has the dtype of the input."""
        wide = x_BHTD.to(self.weight.dtype)
        return F.rms_norm(wide, self.weight.shape, self.weight, eps=1e-6).to(x_BHTD.dtype)


class AttendingDecoder(nn.Module):
    """A decoder whose layer i, called `layer_<i>`, attends by `attention[i]`.

    The attention functions are called, not owned: they are in no `state_dict`. ValueError if there
    is not one for each layer.
    """

    def __init__(self, config: ModelConfig, attention: Sequence[AttentionFn]) -> None:
        super().__init__()
        if len(attention) != config.depth:
            raise ValueError(
                f"{type(self).__name__}: attention must hold one function a layer "
                f"({config.depth}), got {len(attention)}"
            )
        self.config = config
        self.attention = tuple(attention)

    def _check_length(self, tokens: Tensor) -> None:
        """ValueError if there are more tokens than the context holds."""
        if tokens.shape[1] > self.config.context:
            raise ValueError(
                f"{type(self).__name__}.forward: tokens must be at most {self.config.context} "
                f"long, got {tuple(tokens.shape)}"
            )


def shared_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the state of `model` less the weights that `qk_norm` alone gives it."""
    added = [name for name, module in model.named_modules() if isinstance(module, HeadNorm)]
    return {
        name: value
        for name, value in model.state_dict().items()
        if name.rpartition(".")[0] not in added
    }


def dropped(x_BTW: Tensor, share: float, *, is_training: bool) -> Tensor:
    """Return x with a share of it dropped; without one nothing is called, so nothing is drawn."""
    return F.dropout(x_BTW, share, is_training) if share else x_BTW


def split_heads(x_BTW: Tensor, head_dim: int) -> Tensor:
    """Return `(batch, heads, tokens, head_dim)`."""
    return x_BTW.unflatten(-1, (-1, head_dim)).transpose(1, 2)
