"""Attentions of a user's own that go wrong, for studies in tests."""

import os
import random
import signal

import numpy as np
import torch


def not_a_number(q, k, v, *, causal, scale=None):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal) * torch.nan


def deadly(q, k, v, *, causal, scale=None):
    os.kill(os.getpid(), signal.SIGKILL)


def drawing(q, k, v, *, causal, scale=None):
    """Draw from each global generator, as dropout does."""
    noise = torch.rand(()) + float(np.random.rand()) + random.random()
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)
    return out * (1 + 1e-3 * noise)
