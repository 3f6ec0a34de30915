"""The libraries, which need a GPU, are replaced by the golden in their layout and conventions.

So a wrong transposition, scale or window shows; and each says why where it does not run.
"""

import sys
import types

import pytest
import torch

from attention_kernels import attention, golden_attention
from attention_kernels.peers import libraries
from attention_kernels.peers.registry import peers
from attention_kernels.testing import with_gradients
from tests.kernels.peers.peer_calls import SHAPES, draw, pack


def in_library_layout(q, k, v, options, **packing):
    """The golden on (batch, length, heads, dim) or packed tensors, in q's dtype."""
    if not packing:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = golden_attention(q, k, v, **options, **packing).to(q.dtype)
    return out if packing else out.transpose(1, 2)


def fake_flash(unbounded, *, returns_lse):
    """FlashAttention with the golden's arithmetic; `unbounded` is its word for no window."""

    def arguments(softmax_scale, causal, window_size, **others):
        assert set(others) <= {"softcap", "alibi_slopes"}
        window = tuple(None if side == unbounded else side for side in window_size)
        return {"scale": softmax_scale, "causal": causal, "window": window} | others

    def flash_attn_func(q, k, v, **options):
        out = in_library_layout(q, k, v, arguments(**options))
        return (out, None) if returns_lse else out

    def flash_attn_varlen_func(q, k, v, *, max_seqlen_q, max_seqlen_k, **options):
        packing = {name: options.pop(name) for name in ("cu_seqlens_q", "cu_seqlens_k")}
        assert max_seqlen_q == packing["cu_seqlens_q"].diff().max()
        assert max_seqlen_k == packing["cu_seqlens_k"].diff().max()
        out = in_library_layout(q, k, v, arguments(**options), **packing)
        return (out, None) if returns_lse else out

    return {"flash_attn_func": flash_attn_func, "flash_attn_varlen_func": flash_attn_varlen_func}


class FakeWrapper:
    """FlashInfer's ragged wrapper with the golden's arithmetic; empty rows hold NaN."""

    def __init__(self, workspace, kv_layout):
        assert workspace.dtype == torch.uint8
        assert kv_layout == "NHD"

    def plan(self, qo_indptr, kv_indptr, num_qo_heads, num_kv_heads, head_dim_qk, **options):
        self.packing = {"cu_seqlens_q": qo_indptr, "cu_seqlens_k": kv_indptr}
        self.heads = (num_qo_heads, num_kv_heads, head_dim_qk)
        left = options["window_left"]
        self.dtype = options["q_data_type"]
        self.options = {
            "causal": options["causal"],
            "window": (None if left == -1 else left, None),
            "softcap": options["logits_soft_cap"],
            "scale": options["sm_scale"],
        }

    def run(self, q, k, v):
        assert (q.shape[1], k.shape[1], q.shape[2], q.dtype) == (*self.heads, self.dtype)
        out = in_library_layout(q, k, v, self.options, **self.packing)
        return out.masked_fill((out == 0).all(-1, keepdim=True), torch.nan)


@pytest.fixture
def fakes(monkeypatch):
    """Put all four libraries in place, on any device."""
    modules = {
        "flash_attn": fake_flash(-1, returns_lse=False),
        "flash_attn_interface": fake_flash(-1, returns_lse=True),
        "flash_attn.cute": fake_flash(None, returns_lse=True),
        "flashinfer": {"BatchPrefillWithRaggedKVCacheWrapper": FakeWrapper},
    }
    for name, contents in modules.items():
        module = types.ModuleType(name)
        module.__path__ = []
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(libraries, "device_problem", lambda *_: "")
    libraries._planned.cache_clear()
    yield
    libraries._planned.cache_clear()


LIBRARY_MASKS = {
    "full": {},
    "causal": {"causal": True},
    "scaled": {"scale": 0.3, "causal": True},
    "window": {"window": (7, 3)},
    "left": {"causal": True, "window": (7, None)},
    "softcap": {"softcap": 2.0},
    "alibi": {"alibi_slopes": torch.linspace(0.1, 0.8, 4), "causal": True},
}


def takes(name, kind):
    refused = {
        "flash_attn3": ("alibi",),
        "flash_attn4": ("alibi", "softcap"),
        "flashinfer": ("alibi", "window"),
    }
    return kind not in refused.get(name, ())


@pytest.mark.parametrize("kind", LIBRARY_MASKS)
@pytest.mark.parametrize("name", libraries.LIBRARIES)
@pytest.mark.usefixtures("fakes")
def test_libraries_are_called_in_their_layout_and_words(name, kind):
    if not takes(name, kind):
        q, k, v, _ = draw(SHAPES[0])
        with pytest.raises(ValueError, match=f"attention: .*{name}"):
            attention(q, k, v, implementation=name, **LIBRARY_MASKS[kind])
        return
    for shape in SHAPES:
        q, k, v, _ = draw(shape)
        found = attention(q, k, v, implementation=name, **LIBRARY_MASKS[kind])
        assert torch.equal(found, golden_attention(q, k, v, **LIBRARY_MASKS[kind]).to(q.dtype))
    q, k, v, packing = pack(torch.bfloat16)
    found = attention(q, k, v, implementation=name, **packing, **LIBRARY_MASKS[kind])
    exact = golden_attention(q, k, v, **packing, **LIBRARY_MASKS[kind])
    assert torch.equal(found, exact.to(q.dtype))


@pytest.mark.usefixtures("fakes")
def test_flash_attn_is_differentiated_and_flashinfer_refuses_to_be():
    tensors = draw(SHAPES[0])
    found = with_gradients(attention, *tensors, implementation="flash_attn2", causal=True)
    exact = with_gradients(golden_attention, *tensors, causal=True)
    assert torch.equal(found["dk"], exact["dk"])
    q = tensors[0].requires_grad_()
    with pytest.raises(ValueError, match=r"attention: .*'flashinfer'.*FlashInfer has no backward"):
        attention(q, *tensors[1:3], implementation="flashinfer")


@pytest.mark.parametrize("name", libraries.LIBRARIES)
def test_a_library_that_is_not_installed_says_so(monkeypatch, name):
    monkeypatch.setitem(sys.modules, libraries.LIBRARIES[name].module.split(".")[0], None)
    q, k, v, _ = draw(SHAPES[0])
    with pytest.raises(ValueError, match=rf"attention: .*got '{name}' .*: .* is not installed"):
        attention(q, k, v, implementation=name)
    (status,) = (peer for peer in peers("cpu") if peer.name == name)
    assert not status.available
    assert "is not installed" in status.reason


def test_a_library_that_needs_a_gpu_says_so_on_the_cpu(monkeypatch):
    module = types.SimpleNamespace(**fake_flash(-1, returns_lse=False))
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    q, k, v, _ = draw(SHAPES[0])
    with pytest.raises(ValueError, match=r"'flash_attn2'.* runs on CUDA only, not on cpu"):
        attention(q, k, v, implementation="flash_attn2")


def test_a_library_that_fails_to_import_says_why(monkeypatch):
    class Broken(types.ModuleType):
        def __getattr__(self, name):
            raise ImportError("undefined symbol: _ZN3c10\nand a long trace")

    monkeypatch.setitem(sys.modules, "flash_attn", Broken("flash_attn"))
    _, available, reason = libraries.status("flash_attn2", torch.device("cpu"))
    assert not available
    assert reason == "flash_attn fails to import: undefined symbol: _ZN3c10"


def test_a_gpu_that_a_library_is_not_built_for_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    found = libraries.device_problem(libraries.LIBRARIES["flash_attn4"], torch.device("cuda"))
    assert found == "built for compute capability 9.x, 10.x, 11.x, the device has 7.5"
