"""Each peer computes what its arguments mean here, or is refused with the reason.

SDPA and FlexAttention run; the libraries, which need a GPU, are replaced by the golden in their
layout and conventions, so that a wrong transposition, scale or window shows.
"""

import sys
import types

import pytest
import torch

from attention_kernels import attention, baseline_attention, flash_attention, golden_attention
from attention_kernels import peer_libraries as libraries
from attention_kernels.peers import PEERS, peers
from attention_kernels.profiles import BASELINE_PROFILES, PROFILES
from attention_kernels.testing import Shape, assert_within_budget, make_qkv, with_gradients

SHAPES = (Shape(2, 4, 2, 65, 65, 40), Shape(2, 4, 2, 23, 70, 64), Shape(1, 4, 4, 70, 23, 64))
SDPA_ON_CPU = ("sdpa:math", "sdpa:flash")
LENGTHS = ((5, 9), (9, 5), (0, 4), (7, 7), (3, 0))


def draw(shape, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(0)
    q, k, v = make_qkv(shape, dtype, generator)
    return [q, k, v, torch.randn(q.shape, generator=generator).to(dtype)]


def alibi(shape):
    return torch.linspace(0.1, 0.8, shape.heads)


def bias(shape):
    x = torch.randn(1, shape.heads, shape.query_len, shape.key_len).mul(2)
    return x.masked_fill(x > 3, -torch.inf)


def visible(shape):
    x = torch.rand(shape.batch, 1, shape.query_len, shape.key_len) < 0.5
    x[:, :, 3] = False  # a row that attends nothing
    return x


def padding(shape):
    return torch.arange(shape.key_len) >= torch.arange(shape.batch).unsqueeze(1) * 5


MASKS = {
    "full": lambda _: {},
    "causal": lambda _: {"causal": True},
    "scaled": lambda _: {"scale": 0.3},
    "window": lambda _: {"window": (7, 3)},
    "left": lambda _: {"causal": True, "window": (7, None)},
    "padding": lambda shape: {"causal": True, "key_padding": padding(shape)},
    "visible": lambda shape: {"attn_mask": visible(shape)},
    "bias": lambda shape: {"attn_mask": bias(shape), "causal": True},
    "alibi": lambda shape: {"alibi_slopes": alibi(shape)},
}
FLEX_MASKS = MASKS | {
    "softcap": lambda _: {"softcap": 2.0},
    "all": lambda shape: (
        {"softcap": 2.0, "causal": True, "window": (9, None), "key_padding": padding(shape)}
        | {"attn_mask": bias(shape), "alibi_slopes": alibi(shape)}
    ),
}


def within_budget(found, plain, exact):
    for name, value in found.items():
        assert_within_budget(value, plain[name], exact[name], 2.0 if name == "out" else 3.0, name)


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", SDPA_ON_CPU)
def test_sdpa_means_what_the_golden_means(name, shape, kind):
    tensors, mask = draw(shape), MASKS[kind](shape)
    found = with_gradients(attention, *tensors, implementation=name, **mask)
    plain = with_gradients(baseline_attention, *tensors, **mask)
    exact = with_gradients(golden_attention, *(x.double() for x in tensors), **mask)
    assert found["out"].dtype == torch.bfloat16
    within_budget(found, plain, exact)


@pytest.mark.parametrize("kind", ["visible", "bias", "causal"])
def test_sdpa_never_sees_a_row_that_attends_nothing(monkeypatch, kind):
    seen = []

    def recording(q, k, v, attn_mask, **_):
        seen.append(attn_mask)
        return torch.zeros_like(q)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", recording)
    q, k, v, _ = draw(SHAPES[2])
    attention(q, k, v, implementation="sdpa:math", **MASKS[kind](SHAPES[2]))
    shown = seen[0] if seen[0].dtype == torch.bool else seen[0] > -torch.inf
    assert shown.any(-1).all()


@pytest.mark.parametrize("kind", FLEX_MASKS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_flex_means_what_the_golden_means(shape, kind):
    (q, k, v, _), mask = draw(shape, torch.float64), FLEX_MASKS[kind](shape)
    found = attention(q, k, v, implementation="flex", **mask)
    exact = golden_attention(q, k, v, **mask)
    # eager flex computes FP64 inputs in FP64; only its bias and slopes are FP32 here, as golden's
    assert (found - exact).norm() <= 1e-12 * exact.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_flex_errs_within_the_budget_of_its_dtype(dtype):
    q, k, v, _ = draw(SHAPES[0], dtype)
    found = attention(q, k, v, implementation="flex", causal=True)
    plain = baseline_attention(q, k, v, causal=True)
    assert_within_budget(found, plain, golden_attention(q, k, v, causal=True))


def pack(dtype, lengths=LENGTHS):
    generator = torch.Generator().manual_seed(0)
    queries, keys = (sum(pair[i] for pair in lengths) for i in (0, 1))
    q, k, v = (
        torch.randn(n, h, 32, generator=generator).to(dtype)
        for n, h in ((queries, 4), (keys, 2), (keys, 2))
    )
    starts = torch.tensor([[0, *pair] for pair in zip(*lengths, strict=True)]).cumsum(1).int()
    return q, k, v, {"cu_seqlens_q": starts[0], "cu_seqlens_k": starts[1]}


@pytest.mark.parametrize(
    "mask",
    [{}, {"causal": True}, {"window": (2, 1)}, {"alibi_slopes": torch.rand(5, 4), "causal": True}],
    ids=["full", "causal", "window", "alibi"],
)
def test_flex_keeps_packed_sequences_apart(mask):
    q, k, v, packing = pack(torch.float64)
    found = attention(q, k, v, implementation="flex", **packing, **mask)
    exact = golden_attention(q, k, v, **packing, **mask)
    assert (found - exact).norm() <= 1e-12 * exact.norm()


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


@pytest.mark.parametrize("name", ["sdpa:efficient", "sdpa:cudnn"])
def test_a_backend_that_the_cpu_has_not_is_refused_never_replaced(name):
    q, k, v, _ = draw(SHAPES[0])
    with pytest.raises(ValueError, match=f"attention: .*'{name}' for q .* on cpu; it says: PyTor"):
        attention(q, k, v, implementation=name)


def test_flex_has_no_gradients_on_the_cpu_and_says_so():
    q, k, v, _ = draw(SHAPES[0])
    with pytest.raises(ValueError, match=r"'flex'.* does not support backward on CPU"):
        attention(q.requires_grad_(), k, v, implementation="flex")
    with torch.no_grad():
        assert torch.isfinite(attention(q, k, v, implementation="flex")).all()


@pytest.mark.parametrize(
    ("name", "mask", "expected"),
    [
        ("sdpa:math", {"softcap": 30.0}, "softcap must be left out .*'sdpa:math', got 30.0; it ta"),
        ("flash_attn2", {"key_padding": torch.ones(2, 65).bool()}, "key_padding .* tensor"),
        ("flash_attn3", {"alibi_slopes": torch.ones(4)}, "alibi_slopes must be left out"),
        ("flashinfer", {"attn_mask": torch.ones(65, 65).bool()}, "attn_mask .*it takes causal, wi"),
        ("peers_of_a_user:attend", {"window": (3, 0)}, "window .*it takes causal"),
        ("sdpa:flash", {"dropout_p": 0.1}, "dropout_p must be 0"),
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
