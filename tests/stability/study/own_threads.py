"""An attention whose module changes threads and environment as it is imported, as users' may."""

import os

import torch

from attention_kernels import baseline_attention as attend

__all__ = ["attend"]

torch.set_num_threads(3)
os.environ["MKL_CBWR"] = "COMPATIBLE"
