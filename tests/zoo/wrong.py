"""Attentions that are wrong, each by one mistake that a kernel's author really makes.

Each is the flash attention written by hand with one step written wrongly. `noun` is what its author
would look for in the sentence that tells of it: a pattern, of which one alternative must occur,
whatever the case. Beside the factors, masks and tails stand mistakes that show rarely: in one head,
in one batch element, in one row of 64, in every third call, in a call that races.
"""

import math
import random
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from attention_kernels import PROFILES, flash_attention
from tests.zoo.flash_by_hand import Flash
from tests.zoo.right import ALL, NARROW

__all__ = ["WRONG", "Wrong"]


class Wrong(NamedTuple):
    """A wrong attention, the words that name its mistake, and the dtypes at which it is wrong."""

    name: str
    function: Callable[..., Any]
    noun: str
    dtypes: tuple[torch.dtype, ...]


_TABLE: list[Wrong] = []


def _wrong(
    name: str, noun: str, dtypes: tuple[torch.dtype, ...] = ALL
) -> Callable[[type[Flash]], type[Flash]]:
    """Put a kernel on the table."""

    def put(kernel: type[Flash]) -> type[Flash]:
        _TABLE.append(Wrong(name, kernel(), noun, dtypes))
        return kernel

    return put


# factors


@_wrong("scale x 1.005", "scale")
class _ScaleGain(Flash):
    def scale(self, q, scale):
        return 1.005 * super().scale(q, scale)


@_wrong("scale given is ignored", "scale")
class _ScaleIgnored(Flash):
    def scale(self, q, scale):
        return super().scale(q, None)


@_wrong("scale for exp2, softmax by exp", "scale")
class _ScaleLog2(Flash):
    def scale(self, q, scale):
        return math.log2(math.e) * super().scale(q, scale)


@_wrong("scale of the padded head_dim", "scale")
class _ScaleOfPadded(Flash):
    def scale(self, q, scale):
        padded = 16 * ((q.shape[-1] + 1 + 15) // 16)  # one more than it takes
        return padded**-0.5 if scale is None else scale


@_wrong("out x 1.005", "out")
class _OutGain(Flash):
    def store(self, out, lse, rows, m, l, acc):
        super().store(out, lse, rows, m, l, 1.005 * acc)


@_wrong("P x 1.005 in the backward", r"\bP\b|dq, dk,? (and )?dv|LSE")
class _BackwardP(Flash):
    def finite(self, lse):
        return super().finite(lse) - 0.005


class _Stored(Flash):
    """The gradients times a factor each, as they are stored."""

    factors = (1.0, 1.0, 1.0)

    def gradients(self, dq, dk, dv, kv_heads, dtype):
        dq, dk, dv = (factor * x for factor, x in zip(self.factors, (dq, dk, dv), strict=True))
        return super().gradients(dq, dk, dv, kv_heads, dtype)


@_wrong("dq x 0.995", "dq")
class _DqGain(_Stored):
    factors = (0.995, 1.0, 1.0)


@_wrong("dk x 1.005", "dk")
class _DkGain(_Stored):
    factors = (1.0, 1.005, 1.0)


@_wrong("dv x 1.005", "dv")
class _DvGain(_Stored):
    factors = (1.0, 1.0, 1.005)


@_wrong("dS without the scale in dk", "dk")
class _DkUnscaled(Flash):
    def backward(self, dout, q, k, v, out, lse, causal, scale):
        dq, dk, dv = super().backward(dout, q, k, v, out, lse, causal, scale)
        return dq, (dk.float() / scale).to(dk.dtype), dv


@_wrong("delta x 0.95", "delta")
class _DeltaOff(Flash):
    def delta(self, dout, out):
        return 0.95 * super().delta(dout, out)


@_wrong("delta forgotten", "delta")
class _DeltaForgotten(Flash):
    def delta(self, dout, out):
        return torch.zeros_like(super().delta(dout, out))


@_wrong("delta of the tile's first row", "delta|dq")
class _DeltaOfAnotherRow(Flash):
    def delta(self, dout, out):
        delta = super().delta(dout, out)
        first = torch.arange(delta.shape[2]) // self.block_q * self.block_q
        return delta[:, :, first]


@_wrong("LSE in base 2", "LSE")
class _LseLog2(Flash):
    def lse_to_return(self, lse):
        return lse / math.log(2)


@_wrong("LSE x 1.005", "LSE")
class _LseGain(Flash):
    def lse_to_return(self, lse):
        return 1.005 * lse


@_wrong("LSE without the maximum", "LSE")
class _LseWithoutMaximum(Flash):
    def forward(self, q, k, v, causal, scale):
        self.largest = torch.zeros(*q.shape[:3], 1)
        return super().forward(q, k, v, causal, scale)

    def store(self, out, lse, rows, m, l, acc):
        super().store(out, lse, rows, m, l, acc)
        self.largest[:, :, rows.start : rows.stop] = m.nan_to_num(neginf=0.0)

    def lse_to_return(self, lse):
        return lse - self.largest.squeeze(-1)


@_wrong("out truncated as it is stored", "bias|round|out", NARROW)
class _Truncated(Flash):
    def store(self, out, lse, rows, m, l, acc):
        x = torch.where(l > 0, acc / l, 0.0)
        cut = x.to(out.dtype)
        towards_zero = torch.nextafter(cut, torch.zeros_like(cut))
        cut = torch.where(cut.float().abs() > x.abs(), towards_zero, cut)
        super().store(out, lse, rows, m, torch.ones_like(l), cut.float())
        lse[:, :, rows.start : rows.stop] = (m + l.log()).squeeze(-1)


# edges of the mask


@_wrong("causal leak by one", "causal|mask|leak")
class _Leak(Flash):
    def after(self, row_I1, key_J):
        return key_J > row_I1 + 1


@_wrong("diagonal hidden", "diagonal|causal|mask")
class _DiagonalHidden(Flash):
    def after(self, row_I1, key_J):
        return key_J >= row_I1


@_wrong("causal mask top-left", "align|top-left|causal|mask|query_len")
class _TopLeft(Flash):
    def hidden(self, rows, keys, query_len, key_len, causal):
        return super().hidden(rows, keys, query_len, query_len, causal)


@_wrong("causal mask by tiles alone", "causal|mask|tile|diagonal")
class _ByTiles(Flash):
    def after(self, row_I1, key_J):
        return key_J // self.block_k > row_I1 // self.block_k


@_wrong("no mask in the backward", "backward|causal|mask")
class _BackwardUnmasked(Flash):
    def backward_hidden(self, rows, keys, query_len, key_len, causal):
        return self.hidden(rows, keys, query_len, key_len, False)


@_wrong("backward leaks by one", "backward|causal|mask")
class _BackwardLeak(Flash):
    def backward_hidden(self, rows, keys, query_len, key_len, causal):
        return super().hidden(rows, keys, query_len, key_len + 1, causal)


@_wrong("causal whatever is asked", "causal|mask")
class _AlwaysCausal(Flash):
    def hidden(self, rows, keys, query_len, key_len, causal):
        return super().hidden(rows, keys, query_len, key_len, True)


@_wrong("empty rows are the mean of v", "attend no|empty|no key|mask|rows? 0")
class _EmptyRowsMean(Flash):
    def forward(self, q, k, v, causal, scale):
        # what a mask of -1e30 in place of -inf gives: equal scores, all of them hidden
        out, lse = super().forward(q, k, v, causal, scale)
        mean = self.expand(v, q.shape[1]).float().mean(2, keepdim=True).to(out.dtype)
        return torch.where((lse == -torch.inf).unsqueeze(-1), mean, out), lse


@_wrong("empty rows are NaN", "NaN")
class _EmptyRowsNan(Flash):
    def store(self, out, lse, rows, m, l, acc):
        super().store(out, lse, rows, m, l, acc)
        out[:, :, rows.start : rows.stop] = (acc / l).to(out.dtype)


# the sums of the backward


@_wrong("dq written, not added", "dq")
class _DqWritten(Flash):
    def add_dq(self, dq, rows, keys, part):
        dq[:, :, rows.start : rows.stop] = part


@_wrong("dv misses the last tile of queries", "dv|tail|quer")
class _DvMissesQueries(Flash):
    def row_blocks(self, query_len):
        self.last = (query_len - 1) // self.block_q * self.block_q
        return super().row_blocks(query_len)

    def add_dv(self, dv, rows, keys, part):
        if rows.start != self.last or rows.start == 0:
            super().add_dv(dv, rows, keys, part)


@_wrong("dk written, not added", "dk")
class _DkWritten(Flash):
    def add_dk(self, dk, rows, keys, part):
        dk[:, :, keys.start : keys.stop] = part


# GQA


@_wrong("kv heads interleaved", "GQA|kv head|mapping|dk and dv")
class _Interleaved(Flash):
    def expand(self, x, heads):
        return x.repeat(1, heads // x.shape[1], 1, 1)

    def fold(self, x, kv_heads):
        return x.unflatten(1, (-1, kv_heads)).sum(1)


@_wrong("kv heads interleaved in the forward, blocked in the sums", "GQA|kv head|mapping|dk")
class _InterleavedRead(Flash):
    def expand(self, x, heads):
        return x.repeat(1, heads // x.shape[1], 1, 1)


@_wrong("dk of the group's last head", "GQA|dk")
class _DkNotSummed(Flash):
    def gradients(self, dq, dk, dv, kv_heads, dtype):
        dq, _, dv = super().gradients(dq, dk, dv, kv_heads, dtype)
        return dq, dk.unflatten(1, (kv_heads, -1))[:, :, -1].to(dtype), dv


@_wrong("dk and dv the mean over the group", "GQA|group|dk and dv|dk")
class _GroupMean(Flash):
    def fold(self, x, kv_heads):
        return x.unflatten(1, (kv_heads, -1)).mean(2)


# tails


@_wrong("last tile of keys dropped", "tail|last|tile|key")
class _TailDropped(Flash):
    def key_blocks(self, key_len):
        whole = key_len // self.block_k * self.block_k
        return super().key_blocks(whole if whole else key_len)


@_wrong("last tile of keys begins early", "tail|last|tile|key|twice")
class _TailTwice(Flash):
    def key_blocks(self, key_len):
        # so that no tile is short, as if rows already read were not read again
        for keys in super().key_blocks(key_len):
            yield range(max(0, keys.stop - self.block_k), keys.stop)


@_wrong("padding of the last tile counts", "tail|padding|key|tile")
class _TailUnmasked(Flash):
    def step(self, s, v, m, l, acc, dtype):
        missing = self.block_k - s.shape[-1]
        s = torch.nn.functional.pad(s, (0, missing))  # zeros: k beyond the end reads as 0
        v = torch.nn.functional.pad(v, (0, 0, 0, missing))
        return super().step(s, v, m, l, acc, dtype)


@_wrong("rows of the last tile are not written", "NaN|tail|row|repeatab|not written")
class _RowsUnwritten(Flash):
    def store(self, out, lse, rows, m, l, acc):
        super().store(out, lse, rows, m, l, acc)
        if len(rows) < self.block_q:
            out[:, :, rows.start : rows.stop] = torch.empty_like(out[:, :, rows.start : rows.stop])


@_wrong("each tile misses its last key", "key|tile|miss|row")
class _LastKeyOfTile(Flash):
    def hidden(self, rows, keys, query_len, key_len, causal):
        hidden = super().hidden(rows, keys, query_len, key_len, causal)
        hidden[:, self.block_k - 1 :] = True
        return hidden


@_wrong("keys from 1024 on are not read", "1024|long|key")
class _ShortLoop(Flash):
    def key_blocks(self, key_len):
        return super().key_blocks(min(key_len, 1024))


@_wrong("window of 512 though none was asked", "window|long|key|mask")
class _Windowed(Flash):
    def after(self, row_I1, key_J):
        return super().after(row_I1, key_J) | (key_J <= row_I1 - 512)


# where it reads


@_wrong("stale tile of v", "stale|tile|block")
class _StaleValues(Flash):
    def load_values(self, x, keys, heads):
        stale = range(0, len(keys)) if keys.start == self.block_k else keys
        return super().load_values(x, stale, heads)


@_wrong("v tile transposed", "v|out|tile")
class _Transposed(Flash):
    def load_values(self, x, keys, heads):
        v = super().load_values(x, keys, heads)
        return v.mT.reshape(v.shape)


@_wrong("strides ignored", "strid|contiguous")
class _StridesIgnored(Flash):
    def load(self, x, rows):
        plain = torch.empty(x.shape, device="meta").stride()
        return super().load(x.as_strided(x.shape, plain), rows)


@_wrong("the last head reads the one before", "head")
class _OneHead(Flash):
    def load(self, x, rows):
        x = super().load(x, rows)
        return x if x.shape[1] == 1 else torch.cat([x[:, :-1], x[:, -2:-1]], 1)


@_wrong("scale off in head 1 alone", "head|scale")
class _OneHeadScale(Flash):
    def load(self, x, rows):
        factor = torch.ones(x.shape[1])
        factor[1:2] = 1.02
        return super().load(x, rows) * factor[:, None, None]


@_wrong("the last batch element reads the first one's v", "batch|v|dv|out")
class _BatchMixed(Flash):
    def load_values(self, x, keys, heads):
        return super().load_values(torch.cat([x[:-1], x[:1]]), keys, heads)


@_wrong("head_dim past a power of two is dropped", "head_dim|scale|out|dq")
class _HeadDimTail(Flash):
    def load_keys(self, x, keys, heads):
        power = 2 ** int(math.log2(x.shape[-1]))
        k = super().load_keys(x, keys, heads)
        return torch.nn.functional.pad(k[..., :power], (0, x.shape[-1] - power))


# rarely


@_wrong("every third call is wrong", "repeat|call|scale|again")
class _ThirdCall(Flash):
    calls = 0

    def scale(self, q, scale):
        self.calls += 1
        return super().scale(q, scale) * (1.01 if self.calls % 3 == 0 else 1.0)


@_wrong("one row in 64 misses a key", "row|key|63")
class _RareRows(Flash):
    def after(self, row_I1, key_J):
        return super().after(row_I1, key_J) | ((row_I1 % 64 == 63) & (key_J == row_I1 - 1))


@_wrong("race: a tile's dq is lost", "repeat|race|again")
class _Race(Flash):
    # its own generator, never seeded again: two calls differ, as in a race
    chance = random.Random(0)

    def add_dq(self, dq, rows, keys, part):
        lost = self.chance.randrange(dq.shape[1])
        part = part.clone()
        part[:, lost] *= self.chance.choice((0.0, 1.0))
        super().add_dq(dq, rows, keys, part)


@_wrong("race: out in another order each call", "repeat|race|again", (torch.float32,))
class _RaceOrder(Flash):
    chance = random.Random(0)

    def key_blocks(self, key_len):
        blocks = list(super().key_blocks(key_len))
        self.chance.shuffle(blocks)
        return iter(blocks)


@_wrong("dropout left on", "repeat|race|again|dropout")
class _Dropout(Flash):
    chance = torch.Generator().manual_seed(0)

    def step(self, s, v, m, l, acc, dtype):
        kept = torch.rand(v.shape[-2], generator=self.chance) > 0.1
        return super().step(s, v * kept[:, None] / 0.9, m, l, acc, dtype)


# arithmetic


@_wrong("no maximum is subtracted", "NaN|infinit|overflow|maximum")
class _NoMaximum(Flash):
    def step(self, s, v, m, l, acc, dtype):
        p = torch.exp(s)
        return torch.zeros_like(m), l + p.sum(-1, keepdim=True), acc + p.to(dtype).float() @ v


@_wrong("accumulator not rescaled", "rescale|maximum|alpha|accumulator")
class _NotRescaled(Flash):
    def step(self, s, v, m, l, acc, dtype):
        alpha = torch.exp(m - torch.maximum(m, s.amax(-1, keepdim=True)).clamp(min=-1e30))
        return super().step(s, v, m, l, torch.where(alpha > 0, acc / alpha, acc), dtype)


@_wrong("row sum not rescaled", "rescale|maximum|alpha|row sum")
class _SumNotRescaled(Flash):
    def step(self, s, v, m, l, acc, dtype):
        alpha = torch.exp(m - torch.maximum(m, s.amax(-1, keepdim=True)).clamp(min=-1e30))
        return super().step(s, v, m, torch.where(alpha > 0, l / alpha, l), acc, dtype)


@_wrong("accumulator in BF16 over the keys", "err|out|accumulat")
class _NarrowAccumulator(Flash):
    block_k = 8

    def step(self, s, v, m, l, acc, dtype):
        m, l, acc = super().step(s, v, m, l, acc, dtype)
        return m, l, acc.bfloat16().float()


@_wrong("dk summed in BF16", "dk")
class _NarrowDk(Flash):
    block_q = 8

    def add_dk(self, dk, rows, keys, part):
        super().add_dk(dk, rows, keys, part)
        at = slice(keys.start, keys.stop)
        dk[:, :, at] = dk[:, :, at].bfloat16().float()


@_wrong("out in FP32 whatever q is", "dtype", NARROW)
class _WrongDtype(Flash):
    def forward(self, q, k, v, causal, scale):
        out, lse = super().forward(q, k, v, causal, scale)
        return out.float(), lse


@_wrong("q scaled in place", "place|input")
class _InPlace(Flash):
    def forward(self, q, k, v, causal, scale):
        with torch.no_grad():
            q.detach().mul_(scale)
        return super().forward(q, k, v, causal, 1.0)


WRONG: tuple[Wrong, ...] = (
    *_TABLE,
    Wrong(
        "flash:fa4 in FP32",
        partial(flash_attention, numerics=PROFILES["fa4"]),
        "err|exp|out",
        (torch.float32,),
    ),
    Wrong(
        "flash:fa3_fp8",
        partial(flash_attention, numerics=PROFILES["fa3_fp8"]),
        "err|out|P",
        ALL,
    ),
)
