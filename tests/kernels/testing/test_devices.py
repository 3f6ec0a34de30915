"""A check on another device: the attention alone is called there, on inputs with the same strides.

Without a GPU "cpu:0" stands for one: torch takes it for another device than "cpu", so that all is
copied there and back.
"""

import functools
from dataclasses import replace

import pytest
import torch

from attention_kernels import PROFILES, flash_attention
from attention_kernels.testing import check, check_attention, plant
from attention_kernels.testing.calls import Signature, call
from attention_kernels.testing.cells import QUICK, Cell, reference
from attention_kernels.testing.devices import called_on, inputs_on, usable_device
from attention_kernels.testing.inputs import Shape
from attention_kernels.testing.refusals import UnsupportedError
from attention_kernels.testing.trained_masks import trained_mask_findings
from tests.kernels.testing.checked import PLAIN, plain

OTHER = torch.device("cpu:0")
STRIDED = [cell for cell in QUICK if cell.strided]


@pytest.mark.parametrize("cell", STRIDED, ids=str)
def test_inputs_have_the_same_values_and_strides_there(cell):
    here = reference(cell, torch.bfloat16).inputs
    there = inputs_on(OTHER, here)
    for x, y in zip(here, there, strict=True):
        assert torch.equal(x, y)
        assert (x.stride(), x.shape) == (y.stride(), y.shape)
        assert x.untyped_storage().data_ptr() != y.untyped_storage().data_ptr()


def test_a_view_that_begins_within_its_storage_is_moved_whole():
    x = torch.arange(24.0).view(2, 3, 4)[:, 1:, 1:]
    (moved, *_) = inputs_on(OTHER, (x, x, x, x))
    assert torch.equal(moved, x)


@pytest.mark.parametrize("cell", [PLAIN[0], STRIDED[0]], ids=str)
def test_what_comes_back_is_what_is_given_on_the_cpu(cell):
    where = reference(cell, torch.bfloat16)
    here = call(plain, Signature(plain, None), where)
    there = call(plain, Signature(plain, None), where, OTHER)
    assert here.results.keys() == there.results.keys()
    assert all(torch.equal(x, there.results[name]) for name, x in here.results.items())
    assert not there.breaches


def test_it_is_called_on_the_device():
    def attend(q, k, v, *, causal, scale=None):
        raise NotImplementedError(f"called on {q.device} and {v.device}")

    where = reference(PLAIN[0], torch.bfloat16)
    with pytest.raises(UnsupportedError, match="called on meta and meta"):
        call(attend, Signature(attend, None), where, torch.device("meta"))
    with pytest.raises(NotImplementedError, match="called on meta"):
        called_on(torch.device("meta"), attend)(*where.inputs[:3], causal=True)


def test_an_input_that_is_changed_there_is_found_and_the_next_call_gets_it_unchanged():
    def attend(q, k, v, *, causal, scale=None):
        out = plain(q, k, v, causal=causal, scale=scale)
        k.detach().zero_()
        return out

    where = reference(PLAIN[0], torch.bfloat16)
    before = where.inputs.k.clone()
    called = call(attend, Signature(attend, None), where, OTHER)
    assert [x.sentence for x in called.breaches] == ["k, an input, is changed in place"]
    assert torch.equal(where.inputs.k, before)


def test_a_result_that_stays_on_another_device_is_found():
    def attend(q, k, v, *, causal, scale=None):
        return torch.empty_like(plain(q, k, v, causal=causal, scale=scale), device="meta")

    called = call(attend, Signature(attend, None), reference(PLAIN[0], torch.bfloat16), OTHER)
    assert "on meta and must be dense, on q's device" in called.breaches[0].sentence


@pytest.mark.parametrize("device", ["meta", "cuda:99", "gpu"])
def test_a_device_that_is_not_there_is_refused_before_anything_is_computed(device):
    with pytest.raises(ValueError, match=f"device must be one .* got '{device}'"):
        check_attention(plain, device=device)


def test_masks_are_trained_there_too():
    def attend(q, k, v, *, causal, scale=None, attn_mask=None):
        # the bias's gradient is lost
        return plain(q + 0 * attn_mask.sum(), k, v, causal=causal, scale=scale)

    ours = list(trained_mask_findings(called_on(OTHER, attend), "causal", torch.float32))
    usual = list(trained_mask_findings(attend, "causal", torch.float32))
    assert ours == usual
    assert {x.result for x in ours} >= {"out", "dbias"}


def test_a_gpu_that_a_further_call_has_broken_is_no_refusal(monkeypatch):
    def broken(_device):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(check, "wait_for", broken)
    report = check_attention(plain, dtypes=["bf16"], cells=PLAIN[:1])
    assert not report.passed
    assert "breaks the GPU where a mask is trained or dropout is on: CUDA error" in report.sentence
    there = replace(report, device=torch.device("xpu:0"))
    assert "FAILS at bf16 on XPU:0: breaks" in there.sentence


NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
ON_GPU = [
    Cell(law="normal", shape=Shape(2, 4, 2, 130, 130, 64), causal=True),
    Cell(law="normal", shape=Shape(2, 4, 2, 66, 66, 64), causal=True, strided="qkv"),
    *PLAIN,
]


@pytest.mark.gpu
@NEEDS_CUDA
def test_the_kernel_passes_on_a_gpu_and_a_fault_in_it_is_found():
    device = usable_device("cuda")
    kernel = functools.partial(flash_attention, numerics=PROFILES["fa2"], engine="triton")
    options = {"dtypes": ["bf16"], "cells": ON_GPU, "device": device}
    right = check_attention(kernel, **options)
    assert right.passed, right.sentence
    assert torch.cuda.get_device_name(device) in right.sentence
    wrong = check_attention(plant(kernel, "dk_gain"), **options)
    assert "dk is 1.005" in wrong.sentence


@pytest.mark.gpu
@NEEDS_CUDA
def test_what_a_call_changes_of_the_gpu_is_found():
    def attend(q, k, v, *, causal, scale=None):
        torch.rand(1, device=q.device)
        return plain(q, k, v, causal=causal, scale=scale)

    found = check_attention(attend, dtypes=["bf16"], cells=PLAIN[:1], device="cuda").sentence
    assert "changes the GPU's random numbers" in found
