"""Planted faults, look by look: which looks are taken, and what the candidate shows without one."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from attention_kernels import PROFILES, flash_attention, golden_attention
from stability.analysis.assay import found_at, is_settled
from stability.analysis.sequential import look_alpha
from stability.config.study import PolicyConfig
from stability.probe import planted_faults
from stability.probe.gradient_evidence import Attention, AttentionRole
from stability.probe.planted_faults import MOST, FaultLook, Plant, distinct_looks, plant_faults
from stability.records.assay import STAGES, FaultRecord

POLICY = PolicyConfig()
ALPHA = look_alpha(POLICY.alpha)
HEADS, TOKENS, HEAD_DIM = 2, 64, 16
WIDTH = HEADS * HEAD_DIM

BATCHES = st.lists(st.integers(0, 12), max_size=120)


@given(BATCHES, st.integers(1, 3))
def test_no_batch_is_looked_at_twice_at_the_same_weights(batches: list[int], weights: int) -> None:
    looks = distinct_looks(batches, weights)
    pairs = [(batches[place], at) for place, at in looks]
    assert len(set(pairs)) == len(pairs) == min(MOST, len(set(batches)) * weights)
    assert all(0 <= at < weights for _, at in looks)
    # each batch once before any comes again, and the first one of those that are equal
    first = [batches.index(batch) for batch in dict.fromkeys(batches)]
    assert [place for place, _ in looks][: len(first)] == first[:MOST]


def test_looks_go_over_the_weights_in_turn_and_over_all_pairs_in_the_end() -> None:
    assert distinct_looks("abcd", 3)[:6] == [(0, 0), (1, 1), (2, 2), (3, 0), (0, 1), (1, 2)]
    assert {at for _, at in distinct_looks("a", 3)} == {0, 1, 2}
    assert len(distinct_looks(range(200), 3)) == MOST
    assert distinct_looks("", 3) == []


def _candidate(q: Tensor, k: Tensor, v: Tensor, **mask: Any) -> Tensor:
    return flash_attention(q, k, v, numerics=PROFILES["fa2"], engine="twin", **mask)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


ROLES: Mapping[AttentionRole, Attention] = {"candidate": _candidate, "baseline": _sdpa}


def _gradient(
    batch: Tensor,
    weights: Tensor,
    candidate: Attention,
    plant: Plant,
    role: AttentionRole,
    is_isolated: bool,
) -> Mapping[str, Tensor]:
    """Return the gradient of a loss to the weights of one projection; the golden's in FP64."""
    leaf = weights.detach().requires_grad_()
    qkv = (batch @ leaf).view(*batch.shape[:2], 3, HEADS, HEAD_DIM).permute(2, 0, 3, 1, 4)
    if role == "golden":
        out = golden_attention(*qkv.bfloat16().double(), causal=True)
    else:
        attention = plant(candidate) if role == "candidate" else ROLES[role]
        out = attention(*qkv.bfloat16(), causal=True)
    out.double().square().sum().backward()
    assert leaf.grad is not None
    return {"weight": leaf.grad}


def _look(seed: int, *, weights: int = 0, candidate: Attention = _candidate) -> FaultLook:
    dice = torch.Generator().manual_seed(seed)
    batch = torch.randn(2, TOKENS, WIDTH, generator=dice)
    at = torch.randn(WIDTH, 3 * WIDTH, generator=torch.Generator().manual_seed(1000 + weights))
    take = partial(_gradient, batch, at / WIDTH**0.5, candidate)
    return FaultLook(gradient=take, operator=take)


DUE: dict[str, tuple[str, ...]] = dict.fromkeys(
    ("dq_gain", "bias_tenth_ulp", "dropped_key"), ("operator", "gradient")
)


def _planted(
    looks: list[FaultLook], is_open: Callable[[str], bool] | None = None
) -> tuple[FaultRecord, dict[str, FaultRecord]]:
    """Plant DUE; `is_open` says of which more looks are taken, else the policy does."""

    def is_done(fault: FaultRecord) -> bool:
        return is_settled(POLICY, fault) if is_open is None else not is_open(fault.name)

    own, faults = plant_faults(looks, DUE, _sdpa, is_done, lambda *_: None)
    return own, {fault.name: fault for fault in faults}


def _is_found(fault: FaultRecord, own: FaultRecord) -> bool:
    return found_at("gradient", fault, own, ALPHA, POLICY)


def test_a_fault_is_looked_at_until_it_is_settled_and_the_candidate_at_the_same_looks() -> None:
    asked: list[tuple[str, int, int]] = []

    def is_done(fault: FaultRecord) -> bool:
        asked.append((fault.name, len(fault.ratios), len(fault.own_ratios)))
        return fault.name == "dropped_key" or len(fault.ratios) == 12

    told: list[tuple[int, int, int]] = []
    looks_due = [_look(seed) for seed in range(30)]
    own, faults = plant_faults(looks_due, DUE, _sdpa, is_done, lambda *now: told.append(now))
    looks = {fault.name: fault.share_looks for fault in faults}
    assert looks == {"dq_gain": 12, "bias_tenth_ulp": 12, "dropped_key": 3}
    assert {len(fault.own_ratios) for fault in faults} == {3, 12}
    assert own.ratios == ()
    open_at = {3: set(DUE), 6: {"dq_gain", "bias_tenth_ulp"}, 12: {"dq_gain", "bias_tenth_ulp"}}
    assert told == [(n, 30, 3 if n < 3 else 2 if n < 12 else 0) for n in range(1, 13)]
    assert set(asked) == {(name, at, at) for at, names in open_at.items() for name in names}
    assert set(open_at) < set(STAGES)
    # its error is rounding: about as large as the baseline's, and shared by no two looks
    most = faults[0]
    assert min(most.own_ratios) > 0.3
    assert max(most.own_ratios) < 3
    assert abs(most.own_share) < 4 * most.own_share_se < 0.2


@pytest.fixture
def plant_as(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Plant], None]:
    """Return a function that puts another mistake in the place of a fault of the table."""

    def put(name: str, mistake: Plant) -> None:
        table = planted_faults.FAULTS
        other = replace(table[name], plant=mistake)
        monkeypatch.setattr(planted_faults, "FAULTS", {**table, name: other})

    return put


def _nothing(attention: Attention) -> Attention:
    return attention


def test_batches_that_come_again_make_no_fault_found(
    plant_as: Callable[[str, Plant], None],
) -> None:
    """At one batch and the same weights all rounding is the same bits, and looks like a bias."""
    plant_as("dq_gain", _nothing)
    same = [_look(0, weights=i % 3) for i in range(24)]
    own, faults = _planted(same, lambda name: True)
    none = faults["dq_gain"]
    assert none.share - 4 * none.share_se > POLICY.max_share
    assert (none.own_share, none.own_ratios) == (none.share, none.ratios)
    assert not _is_found(none, own)
    # what would be found without the candidate's own figures
    assert _is_found(replace(none, own_share=0.0, own_share_se=0.001), own)


def test_a_finding_is_held_against_the_candidate_at_the_same_looks_and_not_at_later_ones() -> None:
    """Of two batches that come again and again after six that differ."""
    looks = [*(_look(seed) for seed in range(6)), *(_look(i % 2, weights=1) for i in range(18))]
    _, faults = _planted(looks, lambda name: name == "dq_gain")
    early = faults["bias_tenth_ulp"]
    assert (early.share_looks, len(early.own_ratios)) == (3, 3)
    late = faults["dq_gain"]
    assert late.own_share - 2 * late.own_share_se > POLICY.max_share
    assert early.own_share != late.own_share
    assert late.own_ratios[:3] == early.own_ratios


def test_over_batches_that_differ_a_gross_fault_is_found_and_none_is_not(
    plant_as: Callable[[str, Plant], None],
) -> None:
    plant_as("dq_gain", _nothing)
    own, faults = _planted([_look(seed, weights=seed % 3) for seed in range(24)])
    assert faults["dropped_key"].share_looks < 24
    assert _is_found(faults["dropped_key"], own)
    assert not _is_found(faults["dq_gain"], own)
    assert abs(faults["dq_gain"].share) < 4 * faults["dq_gain"].share_se


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_fault_whose_gradient_is_no_number_is_found_and_a_candidates_own_is_not(
    value: float, plant_as: Callable[[str, Plant], None]
) -> None:
    def spoilt(attention: Attention) -> Attention:
        return lambda *qkv, **mask: attention(*qkv, **mask) * value

    plant_as("dropped_key", spoilt)
    own, faults = _planted([_look(seed) for seed in range(3)])
    assert _is_found(faults["dropped_key"], own)
    own, faults = _planted([_look(seed, candidate=spoilt(_candidate)) for seed in range(3)])
    assert not any(_is_found(fault, own) for fault in faults.values())


def test_beside_an_exact_baseline_an_exact_candidate_errs_no_further_and_another_endlessly() -> (
    None
):
    errors = planted_faults._Errors()
    for value, accepted in ((0.0, 0.0), (1.0, 0.0), (3.0, 1.5)):
        errors.add([torch.tensor([value])], accepted)
    assert errors.ratios == [1.0, math.inf, 2.0]


def test_without_a_batch_nothing_is_planted() -> None:
    with pytest.raises(ValueError, match="the model was given none as a whole"):
        _planted([])
