"""Dropout in a watched attention: compared where its seed is known, else a finding."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from attention_kernels import flash_attention
from stability import attention_call, shadow

SEEDED = {"dropout_p": 0.2, "dropout_seed": 7}


class _Attends(nn.Module):
    """Self-attention of two heads by a function, with its options."""

    def __init__(self, attend, **options):
        super().__init__()
        self.project = nn.Linear(32, 96)
        self._attend, self._options = attention_call(attend), options

    def forward(self, x):
        q, k, v = self.project(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        return self._attend(q, k, v, **self._options).transpose(1, 2).flatten(2)


def seeded(q, k, v, *, causal=False, dropout_p=0.0, dropout_seed=None):
    return flash_attention(q, k, v, causal=causal, dropout_p=dropout_p, dropout_seed=dropout_seed)


def misled(q, k, v, *, causal=False, dropout_p=0.0, dropout_seed=0):
    """Drops what another seed would."""
    return seeded(q, k, v, causal=causal, dropout_p=dropout_p, dropout_seed=dropout_seed + 1)


def torchs_own(q, k, v, *, causal=False, dropout_p=0.0):
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, dropout_p=dropout_p)


def watch(attend, candidate, **options):
    torch.manual_seed(0)
    model = _Attends(attend, causal=True, **options)
    x = torch.randn(3, 12, 32)
    with shadow(model, candidate, heads=True, positions=2, inside=True) as probe:
        model(x).square().sum().backward()
        probe.step()
    return probe


def test_dropout_of_a_known_seed_is_compared_forward_and_backward():
    probe = watch(seeded, "baseline", **SEEDED)
    assert not probe.findings
    for result in ("out", "dq", "dk", "dv"):
        (layer,) = probe.layers
        # two ways to compute it in FP32
        assert 0 < probe.metrics[f"deviation/{layer}/{result}/rel_fro"] < 1e-6
    golden = [value for name, value in probe.metrics.items() if "gain" in name and "z" not in name]
    assert golden
    assert max(map(abs, golden)) < 1e-5


def test_what_drops_by_another_seed_is_seen():
    probe = watch(misled, "flash:fa1", **SEEDED)
    (layer,) = probe.layers
    for result in ("out", "dq", "dk", "dv"):
        assert probe.metrics[f"deviation/{layer}/{result}/rel_fro"] > 0.1


def test_dropout_of_torchs_own_stream_is_told_and_not_compared():
    with pytest.warns(UserWarning, match=r"can't be repeated: dropout_p 0.2; a shadow would drop"):
        probe = watch(torchs_own, "flash:fa1", dropout_p=0.2)
    said = {text for _, _, text in probe.findings}
    assert said == {"not looked at: dropout_p 0.2; a shadow would drop other values"}


@pytest.mark.parametrize("candidate", ["sdpa", "flash:fa1"])
def test_a_seed_without_dropout_hinders_no_candidate(candidate):
    assert not watch(seeded, candidate, dropout_p=0.0, dropout_seed=7).findings


def test_a_candidate_that_has_no_dropout_says_so():
    said = {text for _, _, text in watch(seeded, "sdpa", **SEEDED).findings}
    assert said == {
        "sdpa: ValueError: sdpa: the mask must be one that it takes, got dropout_p; use 'sdpa:math'"
    }
