"""Calls of flash-attn and of flex_attention are seen, however imported, and read right."""

import copy
import functools
import importlib
import pickle
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

from attention_kernels import golden_attention
from stability import shadow
from stability.intercept.library_functions import watching_library_functions
from tests.stability.intercept.torch_models import unseen

WIDTH, HEADS, LENGTH = 32, 2, 12
FLASH = "flash_attn.flash_attn_interface"

pytestmark = [
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
    pytest.mark.filterwarnings("ignore:_compile flag on create_block_mask"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),
    pytest.mark.filterwarnings("ignore:.*autograd.function.Function.* should not be instantiated"),
]


def _dense(q, k, v, causal, window_size, softmax_scale):
    """Compute flash-attn's rule for one sequence by SDPA; (batch, tokens, heads, head_dim)."""
    rows, columns = torch.arange(q.shape[1]), torch.arange(k.shape[1])
    distance = columns[None] - rows[:, None] - (k.shape[1] - q.shape[1])
    left, right = (side if side >= 0 else 10**6 for side in window_size)
    right = 0 if causal else right
    visible = (distance >= -left) & (distance <= right)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, visible, scale=softmax_scale).transpose(1, 2)


def flash_attn_func(
    q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0
):
    return _dense(q, k, v, causal, window_size, softmax_scale)


def flash_attn_qkvpacked_func(
    qkv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1)
):
    return _dense(*qkv.unbind(2), causal, window_size, softmax_scale)


def flash_attn_kvpacked_func(
    q, kv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1)
):
    return _dense(q, *kv.unbind(2), causal, window_size, softmax_scale)


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    return_attn_probs=False,
):
    out = _varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, causal, window_size, softmax_scale)
    return (out, None, None) if return_attn_probs else out


def flash_attn_varlen_qkvpacked_func(
    qkv,
    cu_seqlens,
    max_seqlen,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
):
    given = (*qkv.unbind(1), cu_seqlens, cu_seqlens)
    return _varlen(*given, causal, window_size, softmax_scale)


def flash_attn_varlen_kvpacked_func(
    q,
    kv,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
):
    given = (q, *kv.unbind(1), cu_seqlens_q, cu_seqlens_k)
    return _varlen(*given, causal, window_size, softmax_scale)


def _varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, causal, window_size, softmax_scale):
    outs = []
    for i in range(len(cu_seqlens_q) - 1):
        rows = slice(cu_seqlens_q[i], cu_seqlens_q[i + 1])
        columns = slice(cu_seqlens_k[i], cu_seqlens_k[i + 1])
        one = _dense(
            q[None, rows], k[None, columns], v[None, columns], causal, window_size, softmax_scale
        )
        outs.append(one[0])
    return torch.cat(outs)


FUNCTIONS = (
    flash_attn_func,
    flash_attn_qkvpacked_func,
    flash_attn_kvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_varlen_kvpacked_func,
)


@pytest.fixture
def flash(monkeypatch):
    """Stand for the library, which needs a GPU."""
    package, interface = ModuleType("flash_attn"), ModuleType(FLASH)
    package.__spec__ = ModuleSpec("flash_attn", None)
    for function in FUNCTIONS:
        monkeypatch.setattr(function, "__module__", FLASH)
        setattr(package, function.__name__, function)
        setattr(interface, function.__name__, function)
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setitem(sys.modules, FLASH, interface)
    return package


def _importer(monkeypatch, text, name="model_of_somebody"):
    """Return a module that holds the library's functions under names of its own."""
    module = ModuleType(name)
    monkeypatch.setitem(sys.modules, name, module)
    exec(text + CALLS, module.__dict__)
    return module


class _Attention(nn.Module):
    def __init__(self, attend):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.attend = attend

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (HEADS, -1)) for t in self.qkv(x).chunk(3, -1))
        return self.attend(q, k, v).flatten(-2)


def _looked(attend, x=None):
    torch.manual_seed(0)
    model = _Attention(attend)
    plain = copy.deepcopy(model)
    x = torch.randn(2, LENGTH, WIDTH) if x is None else x
    plain(x).square().sum().backward()
    with shadow(model, "flash:golden") as probe:
        model(x).square().sum().backward()
        probe.step()
    for own, watched in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(own.grad, watched.grad)
    return probe


def _is_right(probe):
    assert not probe.findings
    assert [(one.layer, one.state) for one in probe.coverage] == [("model", "seen")]
    for what in ("out", "dq", "dk", "dv"):
        assert probe.metrics[f"deviation/model/{what}/golden_baseline_rel_fro"] < 1e-5, what
    return True


CALLS = "\ndef attend(*a, **k): return f(*a, **k)"
IMPORTS = {
    "the package": "import flash_attn\ndef f(*a, **k): return flash_attn.flash_attn_func(*a, **k)",
    "a name": "from flash_attn import flash_attn_func as f",
    "an interface": f"from {FLASH} import flash_attn_func as f",
}


@pytest.mark.parametrize("way", IMPORTS)
def test_flash_attention_is_seen_however_it_was_imported(flash, monkeypatch, way):
    module = _importer(monkeypatch, IMPORTS[way])
    assert _is_right(_looked(functools.partial(module.attend, causal=True)))


def test_flash_attention_is_seen_as_an_attribute_of_the_model(flash):
    held = _looked(flash_attn_func)
    assert _is_right(held)

    class Static(_Attention):
        function = staticmethod(flash_attn_func)

        def forward(self, x):
            q, k, v = (t.unflatten(-1, (HEADS, -1)) for t in self.qkv(x).chunk(3, -1))
            return self.function(q, k, v, 0.0, None, True).flatten(-2)

    model = Static(None)
    with shadow(model) as probe:
        model(torch.randn(2, LENGTH, WIDTH)).sum().backward()
        copies = [copy.deepcopy(held._model), pickle.loads(pickle.dumps(model.state_dict()))]
        probe.step()
    assert probe.layers == ("model",)
    assert copies[0].attend is flash_attn_func
    assert Static.__dict__["function"].__func__ is flash_attn_func


@pytest.mark.parametrize(
    "options",
    [
        {"causal": True, "window_size": (3, -1)},
        {"window_size": (2, 4), "softmax_scale": 0.1},
        {"causal": True, "window_size": (1, 0)},
    ],
)
@pytest.mark.parametrize("form", ["plain", "qkvpacked", "kvpacked", "varlen"])
def test_the_masks_of_flash_attention_are_read_right(flash, form, options):
    starts = torch.tensor([0, 5, 5, 12], dtype=torch.int32)
    of_keys = torch.tensor([0, 7, 8, 12], dtype=torch.int32)

    def attend(q, k, v):
        if form == "plain":
            return flash.flash_attn_func(q, k[:, 2:], v[:, 2:], **options)
        if form == "qkvpacked":
            return flash.flash_attn_qkvpacked_func(torch.stack([q, k, v], 2), **options)
        if form == "kvpacked":
            kv = torch.stack([k, v], 2)[:, 2:]
            return flash.flash_attn_kvpacked_func(q, kv, **options)
        given = (starts, of_keys, 7, 7)
        return flash.flash_attn_varlen_func(q, k, v, *given, return_attn_probs=True, **options)[0]

    x = torch.randn(12, WIDTH) if form == "varlen" else None
    probe = _looked(attend, x)
    # the last sequence has fewer keys than queries: rows that see nothing are NaN in SDPA
    if form != "varlen":
        assert _is_right(probe)
    assert probe.layers == ("model",)


@pytest.mark.parametrize("form", ["", "qkvpacked_", "kvpacked_"])
def test_packed_sequences_are_read_as_flash_attention_reads_them(flash, form):
    starts = torch.tensor([0, 5, 5, 12], dtype=torch.int32)

    def attend(q, k, v):
        tensors = {
            "": (q, k, v, starts, starts, 7, 7),
            "qkvpacked_": (torch.stack([q, k, v], 1), starts, 7),
            "kvpacked_": (q, torch.stack([k, v], 1), starts, starts, 7, 7),
        }[form]
        function = getattr(flash, f"flash_attn_varlen_{form}func")
        return function(*tensors, causal=True, window_size=(3, -1))

    assert _is_right(_looked(attend, torch.randn(12, WIDTH)))


@unseen
def test_what_flash_attention_cant_be_repeated_with_is_a_finding(flash):
    probe = _looked(lambda q, k, v: flash.flash_attn_func(q, k, v, dropout_p=0.1))
    assert "not looked at: dropout_p 0.1; a shadow would drop other values" in {
        text for _, _, text in probe.findings
    }


@unseen
def test_an_argument_that_nobody_knows_is_a_finding(flash, monkeypatch):
    def flash_attn_func(q, k, v, softmax_scale=None, causal=False, qv=None, deterministic=True):
        return _dense(q, k, v, causal, (-1, -1), softmax_scale) + (0 if qv is None else qv)

    monkeypatch.setattr(flash_attn_func, "__module__", FLASH)
    monkeypatch.setattr(flash_attn_func, "__qualname__", "flash_attn_func")
    monkeypatch.setattr(flash, "flash_attn_func", flash_attn_func)
    assert _is_right(_looked(lambda q, k, v: flash.flash_attn_func(q, k, v, causal=True)))
    probe = _looked(lambda q, k, v: flash.flash_attn_func(q, k, v, qv=q))
    assert [text for _, _, text in probe.findings] == [
        "not looked at: the argument qv of flash-attn"
    ]


def test_everything_stands_where_it_stood_afterwards(flash, monkeypatch):
    module = _importer(monkeypatch, IMPORTS["a name"])
    model = _Attention(flash_attn_func)
    # in a list: this module's own name for it is replaced as well
    (function,) = kept = [flash_attn_func]
    with watching_library_functions(model):
        assert module.f is not kept[0]
        late = _importer(monkeypatch, IMPORTS["an interface"], "imported_late")
        assert late.f is not kept[0]
        with watching_library_functions(model):
            pass
        assert late.f is not kept[0]
    held = (flash.flash_attn_func, late.f, module.f, model.attend, flash_attn_func)
    assert all(each is function for each in held)
    assert importlib.import_module(FLASH).flash_attn_func is function


class _Flex(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.options = options

    def forward(self, q, k, v):
        return flex_attention(q, k, v, **self.options)


def _causal(batch, head, query, key):
    return query >= key


@pytest.mark.parametrize("compiled", [False, True])
def test_flex_attention_is_seen_with_its_mask(compiled):
    q, k, v = (torch.randn(2, 2, 128, 16) for _ in range(3))
    mask = create_block_mask(_causal, None, None, 128, 128, device="cpu")
    model = _Flex(block_mask=mask, scale=0.2)
    if compiled:
        model.run = torch.compile(flex_attention, backend="eager")
        model.forward = lambda q, k, v: model.run(q, k, v, **model.options)
    plain = model(q, k, v)
    with shadow(model, "flash:golden", evaluation=True) as probe:
        out = model(q, k, v)
        probe.step()
    assert torch.equal(out, plain)
    assert probe.metrics["deviation/model/out/golden_baseline_rel_fro"] < 1e-5
    expected = golden_attention(q, k, v, causal=True, scale=0.2)
    assert (out - expected).abs().max() < 1e-5


@pytest.mark.parametrize("is_trained", [False, True])
def test_a_loss_that_takes_the_lse_has_gradients_that_are_not_attentions_alone(
    monkeypatch, is_trained
):
    # its backward runs on a CPU, too, but is not let
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)
    model = _Flex(return_aux=AuxRequest(lse=True))
    qkv = [torch.randn(2, 2, 32, 16, requires_grad=True) for _ in range(3)]
    with shadow(model, "flash:golden", golden=True) as probe:
        out, aux = model(*qkv)
        (out.square().sum() + (aux.lse.sum() if is_trained else 0)).backward()
        probe.step()
    named = "deviation/model/{}/golden_baseline_rel_fro"
    results = {x for x in ("out", "lse", "dq", "dk", "dv") if named.format(x) in probe.metrics}
    assert results == {"out", "lse", "dv"} | (set() if is_trained else {"dq", "dk"})
    assert all(probe.metrics[named.format(x)] < 1e-6 for x in results)
    told = [text for _, _, text in probe.findings]
    assert told == ["all gradients but dv not measured: the loss takes the LSE, too"] * is_trained


@pytest.mark.filterwarnings("ignore:return_lse is deprecated")
@pytest.mark.parametrize("options", [{"return_lse": True}, {"return_aux": AuxRequest(lse=True)}])
def test_a_replaced_layer_that_is_asked_for_more_than_out_is_refused(options):
    model = _Flex(**options)
    qkv = list(torch.randn(3, 2, 2, 32, 16).unbind())
    plain = model(*qkv)
    with shadow(model, "flash:golden", evaluation=True), torch.no_grad():
        assert type(model(*qkv)) is type(plain)
    qkv[0].requires_grad_()
    # a bare out of a batch of two would be taken apart as out and LSE
    with (
        pytest.raises(ValueError, match=r"model must ask for its out alone .* got return_"),
        shadow(model, "flash:golden", replace=["*"]),
    ):
        model(*qkv)


@pytest.mark.parametrize("direction", ["both", "forward", "backward"])
@pytest.mark.parametrize("grad", [True, False])
def test_so_is_flash_attention_in_each_direction(flash, direction, grad):
    x, starts = torch.randn(24, HEADS, 16), torch.tensor([0, 12, 24], dtype=torch.int32)
    x.requires_grad_(grad)

    class Asking(nn.Module):
        def forward(self, x):
            options = (starts, starts, 12, 12)
            return flash.flash_attn_varlen_func(x, x, x, *options, return_attn_probs=True)

    model = Asking()
    for steps in ([0], [1]):
        replaced = {"replace": ["*"], "direction": direction, "evaluation": True, "steps": steps}
        with (
            pytest.raises(ValueError, match="got return_attn_probs of flash-attn"),
            shadow(model, "flash:golden", **replaced),
        ):
            model(x)


@pytest.mark.filterwarnings("ignore:return_lse is deprecated")
def test_the_gradient_evidence_of_what_is_asked_for_more_tells_why():
    class Asking(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(16))

        def forward(self, q, k, v):
            out, lse = flex_attention(q * self.weight, k, v, return_lse=True)
            return out.square().sum() + lse.sum()

    model, qkv = Asking(), [torch.randn(2, 2, 32, 16) for _ in range(3)]
    loss = functools.partial(model, *qkv)
    with shadow(model, "flash:golden", every=0, gradient_every=1, loss=loss) as probe:
        probe.step()
    assert "golden: ValueError: shadow: model must ask" in probe.findings[0][2]


@unseen
def test_keys_of_another_dtype_are_told():
    q, (k, v) = torch.randn(2, 2, 32, 16), torch.randn(2, 2, 2, 32, 16).bfloat16()
    with shadow(_Flex(), "flash:golden", evaluation=True) as probe:
        probe._model(q, k, v)
        probe.step()
    assert any("torch.float32 with k of torch.bfloat16" in text for *_, text in probe.findings)


@unseen
@pytest.mark.parametrize("keys", [1, 2])
def test_keys_that_every_batch_shares_are_told(keys):
    """flex_attention takes one batch of keys for all queries."""
    mask = create_block_mask(_causal, 2, None, 32, 32, device="cpu")
    q, (k, v) = torch.randn(2, 2, 32, 16), torch.randn(2, keys, 2, 32, 16)
    with shadow(_Flex(block_mask=mask), "flash:golden", evaluation=True) as probe:
        probe._model(q, k, v)
        probe.step()
    told = [text for *_, text in probe.findings if "keys of batch 1 for queries of batch 2" in text]
    assert len(told) == (keys == 1)


@unseen
def test_a_score_mod_is_told():
    q, k, v = (torch.randn(1, 2, 128, 16) for _ in range(3))

    def relative(score, batch, head, query, key):
        return score + (query - key)

    model = _Flex(score_mod=relative)
    with shadow(model, evaluation=True) as probe:
        model(q, k, v)
        probe.step()
    assert probe.coverage[0].state == "seen in part"
    assert "the score_mod relative of flex_attention" in probe.coverage[0].why


@pytest.mark.long
def test_flex_attention_of_transformers_is_seen_with_padding():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=WIDTH,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        intermediate_size=WIDTH,
        num_hidden_layers=2,
        vocab_size=40,
        head_dim=16,
    )
    model = transformers.LlamaModel(config).eval()
    model.set_attn_implementation("flex_attention")
    ids, padding = torch.arange(2 * 128).reshape(2, 128) % 40, torch.ones(2, 128, dtype=torch.long)
    padding[1, 100:] = 0
    with torch.no_grad():
        plain = model(ids, padding).last_hidden_state
        with shadow(model, "flash:golden", evaluation=True) as probe:
            out = model(ids, padding).last_hidden_state
            probe.step()
    assert torch.equal(out, plain)
    assert probe.layers == ("layers.0.self_attn", "layers.1.self_attn")
    for layer in probe.layers:
        assert probe.metrics[f"deviation/{layer}/out/golden_baseline_rel_fro"] < 1e-5
