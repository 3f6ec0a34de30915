"""Attentions of a user's own that go wrong, for studies in tests."""

import os
import signal

import torch


def not_a_number(q, k, v, *, causal, scale=None):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal) * torch.nan


def deadly(q, k, v, *, causal, scale=None):
    os.kill(os.getpid(), signal.SIGKILL)
