"""FlexAttention's BlockMask, read: against a mask written out by Python's own loops.

The second judge is flex_attention itself: the model's own result stands near the golden's.
"""

import gc
import itertools
import weakref

import pytest
import torch
import transformers
from torch import nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.utils._python_dispatch import TorchDispatchMode

from attention_kernels import golden_attention
from stability import shadow
from stability.intercept import block_masks
from stability.intercept.block_masks import read_block_mask
from tests.sampling import one_in

pytestmark = [
    pytest.mark.filterwarnings("ignore:_compile flag on create_block_mask"),
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),
    pytest.mark.filterwarnings("ignore:.*autograd.function.Function.* should not be instantiated"),
]

BATCH, HEADS, QUERIES, KEYS = 2, 3, 150, 170
DOCUMENT = (torch.arange(2 * KEYS) // 40).view(2, KEYS) % 3
ALLOWED = torch.rand(KEYS, 5, generator=torch.Generator().manual_seed(0)) < 0.1

MODS = {
    "causal": (lambda b, h, q, k: q >= k, (False, False)),
    "documents": (lambda b, h, q, k: DOCUMENT[b, q] == DOCUMENT[b, k], (True, False)),
    "a head's own reach": (lambda b, h, q, k: (q - k).abs() <= 20 * h, (False, True)),
    "both": (lambda b, h, q, k: (q + h > k) & (k % (b + 2) > 0), (True, True)),
    # takes numbers alone: with index tensors that broadcast, any() would see the whole table
    "a row of a table": (lambda b, h, q, k: (ALLOWED[q] & ALLOWED[k]).any(), (False, False)),
    "rows and keys that see nothing": (lambda b, h, q, k: (q > 30) & (k < 60), (False, False)),
    "everything": (lambda b, h, q, k: k >= 0, (False, False)),
}


def inputs(queries=QUERIES, keys=KEYS, requires_grad=False):
    torch.manual_seed(0)
    lengths = (queries, keys, keys)
    return [torch.randn(BATCH, HEADS, n, 16, requires_grad=requires_grad) for n in lengths]


def made(mod, q, k, depends=(True, True), **options):
    sizes = [size if on else None for size, on in zip((BATCH, HEADS), depends, strict=True)]
    return create_block_mask(mod, *sizes, q.shape[2], k.shape[2], device="cpu", **options)


def written_out(mod, queries, keys):
    lines = map(range, (BATCH, HEADS, queries, keys))
    seen = [bool(mod(*map(torch.tensor, place))) for place in itertools.product(*lines)]
    return torch.tensor(seen).view(BATCH, HEADS, queries, keys)


@pytest.fixture(params=["whole", "in blocks"])
def held(request, monkeypatch):
    if request.param == "in blocks":
        monkeypatch.setattr(block_masks, "WHOLE", 0)
        monkeypatch.setattr(block_masks, "TILE", 1000)
    return request.param


def as_tensor(read, q, k):
    if "attn_mask" in read.mask:
        return read.mask["attn_mask"]
    lines = [torch.arange(n) for n in (BATCH, HEADS, q.shape[2], k.shape[2])]
    shapes = [[-1 if own == axis else 1 for own in range(4)] for axis in range(4)]
    return read.mask["mask_mod"](*(x.view(shape) for x, shape in zip(lines, shapes, strict=True)))


@pytest.mark.parametrize("name", one_in(3, MODS))
def test_a_mask_is_read_as_written_out(name, held):
    mod, depends = MODS[name]
    q, k, _ = inputs(40, 50)
    expected = written_out(mod, 40, 50)
    read = read_block_mask(made(mod, q, k, depends, BLOCK_SIZE=16), q, k)
    got = as_tensor(read, q, k)
    assert read.mask.keys() == {"attn_mask" if held == "whole" else "mask_mod"}
    axes = zip(got.shape, (BATCH, HEADS), depends, strict=False)
    assert all(found == (size if on else 1) for found, size, on in axes)
    assert torch.equal(got.expand_as(expected), expected)
    assert torch.equal(read.attending, expected.any(3).any(1))
    assert torch.equal(read.attended, expected.any(2).any(1))
    assert not read.unsupported


class Flex(nn.Module):
    def __init__(self, block_mask, **options):
        super().__init__()
        self.block_mask, self.options = block_mask, options

    def forward(self, q, k, v):
        return flex_attention(q, k, v, block_mask=self.block_mask, **self.options)


def attend_by_tensor(q, k, v, *, causal, scale=None, attn_mask=None):
    return golden_attention(q, k, v, causal=causal, scale=scale, attn_mask=attn_mask).to(q.dtype)


def attend_by_function(q, k, v, *, causal, scale=None, mask_mod=None):
    return golden_attention(q, k, v, causal=causal, scale=scale, mask_mod=mask_mod).to(q.dtype)


def attend_by_anything(q, k, v, *, causal, scale=None, **mask):
    assert mask.keys() == {"attn_mask"}  # a function it does not name it might ignore
    return golden_attention(q, k, v, causal=causal, scale=scale, **mask).to(q.dtype)


CANDIDATES = {
    "tensor": attend_by_tensor,
    "function": attend_by_function,
    "anything": attend_by_anything,
    "sdpa": "sdpa",
    "sdpa:math": "sdpa:math",
    "flash:golden": "flash:golden",
    "baseline": "baseline",
}


@pytest.mark.parametrize("candidate", one_in(3, CANDIDATES))
@pytest.mark.parametrize("name", ["a row of a table", "both"])
def test_every_candidate_is_given_the_mask(candidate, name, held):
    mod, depends = MODS[name]
    qkv = inputs()
    model = Flex(made(mod, *qkv[:2], depends), scale=0.2)
    plain = model(*qkv)
    with shadow(model, CANDIDATES[candidate], evaluation=True) as probe:
        out = model(*qkv)
        probe.step()
    assert torch.equal(out, plain)
    for whose in ("baseline", "candidate"):
        assert probe.metrics[f"deviation/model/out/golden_{whose}_rel_fro"] < 1e-5, whose


def findings_of(model, qkv):
    with shadow(model, "flash:golden", evaluation=True) as probe, torch.no_grad():
        model(*qkv)
        probe.step()
    texts = [text for _, _, text in probe.findings]
    return [text for text in texts if "not measured" not in text]


def blocks(kept, mask_mod=None, full=None):
    """Return a BlockMask of 32 x 32 whose tables list `kept` (rows of key blocks)."""

    def table(rows):
        counts = torch.tensor([[[len(row) for row in rows]]], dtype=torch.int32)
        padded = [row + [0] * (2 - len(row)) for row in rows]
        return counts, torch.tensor([[padded]], dtype=torch.int32)

    full = table(full) if full else (None, None)
    return BlockMask.from_kv_blocks(*table(kept), *full, BLOCK_SIZE=32, mask_mod=mask_mod)


def below(b, h, q, k):
    return q >= k


CONTRADICTIONS = {
    "blocks are hidden by the tables alone": lambda: blocks([[0], [1]]),
    "a block is said to be whole": lambda: blocks([[], [1]], below, full=[[0], [0]]),
    "one batch was asked, and the second differs": lambda: create_block_mask(
        lambda b, h, q, k: q - 40 * b < k, None, None, 64, 64, device="cpu", BLOCK_SIZE=32
    ),
    "one head was asked, and the third differs": lambda: create_block_mask(
        lambda b, h, q, k: q - 20 * h < k, BATCH, None, 64, 64, device="cpu", BLOCK_SIZE=32
    ),
}


@pytest.mark.parametrize("name", one_in(3, CONTRADICTIONS))
@pytest.mark.filterwarnings("ignore:shadow. of 1 attention layers 1 are not seen")
def test_tables_that_contradict_the_function_are_told(name, held):
    (text,) = findings_of(Flex(CONTRADICTIONS[name]()), inputs(64, 64))
    assert "not looked at: a BlockMask whose blocks contradict its mask_mod" in text


@pytest.mark.parametrize("length", [50, 64])
@pytest.mark.parametrize(("kept", "full"), [([[0], [0, 1]], None), ([[0], [1]], [[], [0]])])
def test_tables_that_agree_are_not_told(kept, full, length, held):
    read = read_block_mask(blocks(kept, below, full), *inputs(length, length)[:2])
    assert not read.unsupported


def test_what_the_function_reads_is_read_anew(held):
    start = torch.tensor(0)
    q, k, v = inputs(64, 64)
    # tables of partial blocks alone are right whatever the function says
    mask = blocks([[0, 1], [0, 1]], lambda b, h, i, j: j >= start)
    model = Flex(mask)
    with shadow(model, "flash:golden", evaluation=True) as probe, torch.no_grad():
        for start_of_keys in (0, 9):
            start.fill_(start_of_keys)
            model(q, k, v)
            probe.step()
            assert probe.metrics["deviation/model/out/golden_baseline_rel_fro"] < 1e-5
        mask.mask_mod = below
        model(q, k, v)
        probe.step()
        assert probe.metrics["deviation/model/out/golden_baseline_rel_fro"] < 1e-5


def test_layers_share_the_tensor_of_a_mask():
    q, k, _ = inputs()
    mask = made(below, q, k, (False, False))
    first, second = (read_block_mask(mask, q, k) for _ in range(2))
    assert first.mask["attn_mask"] is second.mask["attn_mask"]
    other = read_block_mask(mask, q[:, :, :100], k)
    assert other.mask["attn_mask"].shape == (1, 1, 100, KEYS)
    assert mask in block_masks._LAST
    gone = weakref.ref(mask)
    del mask
    gc.collect()
    assert gone() is None


def test_one_mask_serves_batches_of_every_size(held):
    """A mask that tells no batches apart is made once, for training and for evaluation."""
    mask = create_block_mask(MODS["causal"][0], None, None, QUERIES, QUERIES, device="cpu")
    for batch in (4, 2, 3):
        q, k = (torch.zeros(batch, HEADS, QUERIES, 16) for _ in range(2))
        read = read_block_mask(mask, q, k)
        assert read.attending.shape == read.attended.shape == (batch, QUERIES)


def test_tables_that_are_written_later_are_told():
    mask, qkv = blocks([[0], [0, 1]], below), inputs(64, 64)
    assert not read_block_mask(mask, *qkv[:2]).unsupported
    mask.kv_num_blocks[..., 1] = 1
    assert "contradict" in read_block_mask(mask, *qkv[:2]).unsupported
    mask.kv_num_blocks[..., 1] = 2
    assert not read_block_mask(mask, *qkv[:2]).unsupported


def attend_and_disturb_padding(q, k, v, *, causal, scale=None, attn_mask=None, mask_mod=None):
    out = golden_attention(q, k, v, scale=scale, attn_mask=attn_mask, mask_mod=mask_mod)
    out[:, :, -10:] += 1
    return out.to(q.dtype)


@pytest.mark.parametrize("padded", [False, True])
def test_rows_of_padding_do_not_count(padded, held):
    qkv = inputs(40, 40)
    end = 30 if padded else 40
    mask = made(lambda b, h, q, k: (q >= k) & (k < end), *qkv[:2], (False, False))
    model = Flex(mask)
    with shadow(model, attend_and_disturb_padding, evaluation=True) as probe:
        model(*qkv)
        probe.step()
    figure = probe.metrics["deviation/model/out/golden_candidate_rel_fro"]
    assert figure < 1e-5 if padded else figure > 0.1
    read = read_block_mask(mask, *qkv[:2])
    assert read.rows_that_count(True).sum() == 2 * end
    assert read.rows_that_count(False).all()
    assert read_block_mask(mask, qkv[0][:, :, :35], qkv[1]).rows_that_count(True).all()


@pytest.mark.parametrize("candidate", ["flash:golden", "sdpa:math"])
def test_a_replacement_is_given_the_mask_and_its_gradients(candidate, held):
    mod, depends = MODS["both"]
    qkv = inputs(40, 50, requires_grad=True)
    model = Flex(made(mod, *qkv[:2], depends), scale=0.2)
    with shadow(model, candidate, replace=["model"]) as probe:
        out = model(*qkv)
        seen = torch.autograd.grad(out.square().sum(), qkv)
        probe.step()
    attn_mask = written_out(mod, 40, 50)
    exact = golden_attention(*qkv, scale=0.2, attn_mask=attn_mask)
    expected = torch.autograd.grad(exact.square().sum(), qkv)
    for one, other in zip((out, *seen), (exact, *expected), strict=True):
        assert (one - other).norm() < 1e-5 * other.norm()


class _Largest(TorchDispatchMode):
    """Remembers how many elements the largest tensor has that anything returns."""

    def __init__(self):
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        results = result if isinstance(result, (tuple, list)) else (result,)
        sizes = [x.numel() for x in results if isinstance(x, torch.Tensor)]
        self.numel = max([self.numel, *sizes])
        return result


def test_a_large_mask_is_never_held(monkeypatch):
    monkeypatch.setattr(block_masks, "WHOLE", 2**20)
    monkeypatch.setattr(block_masks, "TILE", 2**16)
    q, k, _ = inputs(2048, 2048)
    mask = made(below, q, k, (False, False))
    with _Largest() as largest:
        read = read_block_mask(mask, q, k)
    assert "mask_mod" in read.mask
    assert largest.numel <= 2**16
    assert read.attending.all()
    assert read.attended.all()


def llama():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=32,
        num_hidden_layers=2,
        vocab_size=40,
    )
    model = transformers.LlamaModel(config).eval()
    model.set_attn_implementation("flex_attention")
    return model


@pytest.mark.filterwarnings("ignore:shadow. of 2 attention layers 2 are not seen")
@pytest.mark.slow
@pytest.mark.parametrize("agree", [False, True])
def test_a_block_mask_that_transformers_is_given_is_read(agree, held):
    model, ids = llama(), torch.arange(64)[None] % 40
    tables = [[0], [0, 1]] if agree else [[0], [1]]
    mask = blocks(tables, lambda b, h, q, k: (q >= k) & (k < 54))
    with shadow(model, attend_and_disturb_padding, evaluation=True) as probe, torch.no_grad():
        model(ids, mask)
        probe.step()
    told = [text for _, _, text in probe.findings if "contradict" in text]
    assert len(told) == (0 if agree else 2)
    for layer in LAYERS if agree else ():
        assert probe.metrics[f"deviation/{layer}/out/golden_candidate_rel_fro"] < 1e-5


LAYERS = ("layers.0.self_attn", "layers.1.self_attn")


@pytest.mark.long
@pytest.mark.parametrize("length", [100, 128])
def test_padding_of_transformers_is_read(length, held):
    model = llama()
    ids, padding = torch.arange(2 * length).view(2, length) % 40, torch.ones(2, length).long()
    padding[1, 60:] = 0
    with torch.no_grad():
        plain = model(ids, padding).last_hidden_state
        with shadow(model, ["flash:golden", "sdpa:math"], evaluation=True) as probe:
            out = model(ids, padding).last_hidden_state
            probe.step()
    assert torch.equal(out, plain)
    for layer in LAYERS:
        for candidate in ("flash_golden", "sdpa_math"):
            for whose in ("baseline", "candidate"):
                name = f"deviation/{layer}/{candidate}/out/golden_{whose}_rel_fro"
                assert probe.metrics[name] < 1e-5, name
