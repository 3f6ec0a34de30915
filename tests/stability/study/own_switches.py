"""An attention whose module changes its process as it is imported, as users' modules may."""

import torch

from attention_kernels import baseline_attention as attend

__all__ = ["attend"]

torch.set_float32_matmul_precision("medium")
