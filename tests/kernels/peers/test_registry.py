"""The one interface over all peers: names, arguments, a user's own function, and what runs here."""

import sys
import types

import pytest
import torch

from attention_kernels import attention, baseline_attention, flash_attention, golden_attention
from attention_kernels.peers.registry import PEERS, peers
from attention_kernels.profiles import BASELINE_PROFILES, PROFILES
from attention_kernels.testing import Shape, assert_within_budget, make_qkv
from tests.kernels.peers.peer_calls import SHAPES, draw, pack


@pytest.fixture
def users(monkeypatch):
    """A module of a user's, with one right function and several wrong ones."""

    def attend(q, k, v, *, causal, scale):
        return golden_attention(q, k, v, causal=causal, scale=scale).to(q.dtype)

    contents = {
        "attend": attend,
        "number": 3,
        "transposed": lambda q, k, v, *, causal, scale: q.transpose(1, 2),
        "with_lse": lambda q, k, v, *, causal, scale: (q, q[..., 0]),
        "unmasked": lambda q, k, v, scale: q,
    }
    module = types.SimpleNamespace(**contents)
    monkeypatch.setitem(sys.modules, "peers_of_a_user", module)


@pytest.mark.parametrize(
    ("name", "mask", "expected"),
    [
        ("sdpa:math", {"softcap": 30.0}, "softcap must be left out .*'sdpa:math', got 30.0; it ta"),
        ("flash_attn2", {"key_padding": torch.ones(2, 65).bool()}, "key_padding .* tensor"),
        ("flash_attn3", {"alibi_slopes": torch.ones(4)}, "alibi_slopes must be left out"),
        ("flashinfer", {"attn_mask": torch.ones(65, 65).bool()}, "attn_mask .*it takes causal, wi"),
        ("peers_of_a_user:attend", {"window": (3, 0)}, "window .*it takes causal"),
        (
            "sdpa:flash",
            {"dropout_p": 0.1, "dropout_seed": 1},
            "dropout_p must be left out with implementation 'sdpa:flash', got 0.1; it takes causal",
        ),
        ("peers_of_a_user:attend", {"dropout_p": 0.1, "dropout_seed": 1}, "dropout_p must be left"),
        ("sdpa:flash", {"window": (-1, 0)}, "window must be"),
        ("flex", {"scale": float("nan")}, "scale must be a finite number"),
    ],
)
def test_an_argument_that_a_peer_has_not_is_refused_by_name(users, name, mask, expected):
    q, k, v, _ = draw(SHAPES[0])
    with pytest.raises(ValueError, match=f"attention: {expected}"):
        attention(q, k, v, implementation=name, **mask)


def test_arguments_that_do_nothing_are_taken_by_all(users):
    q, k, v, _ = draw(SHAPES[0])
    nothing = {"softcap": 0.0, "window": None, "key_padding": None, "causal": False}
    nothing |= {"dropout_p": 0.0, "dropout_seed": 3, "dropout_offset": 4}
    for name in ("sdpa:math", "flex", "peers_of_a_user:attend"):
        plain = attention(q, k, v, implementation=name)
        assert torch.equal(attention(q, k, v, implementation=name, **nothing), plain)


def test_packed_sequences_are_refused_where_there_are_none(users):
    q, k, v, packing = pack(torch.bfloat16)
    for name in ("sdpa:flash", "peers_of_a_user:attend"):
        with pytest.raises(ValueError, match="attention: cu_seqlens_q must be left out"):
            attention(q, k, v, implementation=name, **packing)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("sdpa:flush", "'sdpa:flush'; nearest: sdpa:flash"),
        ("flash:fa22", "flash profile .*'fa22'; nearest: fa2"),
        ("baseline:plane", "baseline profile .*'plane'; nearest: plain"),
        ("flash_attn5", "'flash_attn5'; nearest: flash_attn"),
    ],
)
def test_an_unknown_name_gets_the_nearest(name, expected):
    q, k, v, _ = draw(SHAPES[0])
    with pytest.raises(
        ValueError, match=f"attention: implementation must name a known .*{expected}"
    ):
        attention(q, k, v, implementation=name)


def test_our_own_are_the_functions_of_the_api():
    q, k, v, _ = draw(SHAPES[0])
    numerics = PROFILES["all_bf16"]
    for name, direct in {
        "flash:all_bf16": flash_attention(q, k, v, numerics=numerics, causal=True),
        "flash": flash_attention(q, k, v, causal=True),
        "baseline:golden": baseline_attention(
            q, k, v, numerics=BASELINE_PROFILES["golden"], causal=True
        ),
        "golden": golden_attention(q, k, v, causal=True),
    }.items():
        found = attention(q, k, v, implementation=name, causal=True)
        assert found.dtype == direct.dtype
        assert torch.equal(found, direct)


def test_a_users_function_is_called_with_causal_and_scale(users):
    q, k, v, _ = draw(SHAPES[1])
    found = attention(q, k, v, implementation="peers_of_a_user:attend", causal=True, scale=0.3)
    assert torch.equal(found, golden_attention(q, k, v, causal=True, scale=0.3).to(q.dtype))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("no_such_module:attend", "a module that imports, .*No module named 'no_such_module'"),
        ("peers_of_a_user:atend", "'peers_of_a_user:atend'; nearest: attend"),
        ("peers_of_a_user:number", "a function that the module has"),
        ("peers_of_a_user:transposed", r"shaped as q \(2, 4, 65, 40\), got \(2, 65, 4, 40\)"),
        ("peers_of_a_user:with_lse", r"got tuple; return out alone"),
        ("peers_of_a_user:unmasked", r"\(q, k, v, \*, causal, scale\).*'causal'"),
    ],
)
def test_a_users_function_that_does_not_fit_is_refused(users, name, expected):
    q, k, v, _ = draw(SHAPES[0])
    with pytest.raises(ValueError, match=f"attention: .*{expected}"):
        attention(q, k, v, implementation=name)


def test_all_peers_are_listed_with_a_reason_where_they_do_not_run():
    found = {status.name: status for status in peers("cpu")}
    assert list(found) == list(PEERS)
    assert found["sdpa:flash"].available
    assert found["sdpa:math"].version == torch.__version__
    assert "forward only" in found["flex"].reason
    assert [name for name in found if found[name].backward] == ["sdpa:math", "sdpa:flash"]
    for status in found.values():
        assert status.available or status.reason


@pytest.mark.skipif(torch.cuda.is_available(), reason="the claim is about a machine without CUDA")
def test_without_cuda_no_peer_runs_on_cuda():
    assert not any(status.available for status in peers("cuda"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("name", PEERS)
def test_on_a_gpu_each_peer_that_runs_means_what_the_golden_means(name, causal):
    (status,) = (peer for peer in peers("cuda") if peer.name == name)
    if not status.available:
        pytest.skip(status.reason)
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = make_qkv(Shape(2, 4, 4, 256, 256, 64), torch.bfloat16, generator)
    with torch.no_grad():
        found = attention(q, k, v, implementation=name, causal=causal)
        plain = baseline_attention(q, k, v, causal=causal)
        assert_within_budget(found, plain, golden_attention(q, k, v, causal=causal))
