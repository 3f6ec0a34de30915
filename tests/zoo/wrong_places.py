"""Wrong in where they compute: the mask, the heads, the tails, what they read, and rarely."""

import math
import random

import torch

from tests.zoo.flash_by_hand import Flash
from tests.zoo.table import wrong

# edges of the mask


@wrong("causal leak by one", "causal|mask|leak")
class _Leak(Flash):
    def after(self, row_I1, key_J):
        return key_J > row_I1 + 1


@wrong("diagonal hidden", "diagonal|causal|mask")
class _DiagonalHidden(Flash):
    def after(self, row_I1, key_J):
        return key_J >= row_I1


@wrong("causal mask top-left", "align|top-left|causal|mask|query_len")
class _TopLeft(Flash):
    def hidden(self, rows, keys, query_len, key_len, causal):
        return super().hidden(rows, keys, query_len, query_len, causal)


@wrong("causal mask by tiles alone", "causal|mask|tile|diagonal")
class _ByTiles(Flash):
    def after(self, row_I1, key_J):
        return key_J // self.block_k > row_I1 // self.block_k


@wrong("no mask in the backward", "backward|causal|mask")
class _BackwardUnmasked(Flash):
    def backward_hidden(self, rows, keys, query_len, key_len, causal):
        return self.hidden(rows, keys, query_len, key_len, False)


@wrong("backward leaks by one", "backward|causal|mask")
class _BackwardLeak(Flash):
    def backward_hidden(self, rows, keys, query_len, key_len, causal):
        return super().hidden(rows, keys, query_len, key_len + 1, causal)


@wrong("causal whatever is asked", "causal|mask")
class _AlwaysCausal(Flash):
    def hidden(self, rows, keys, query_len, key_len, causal):
        return super().hidden(rows, keys, query_len, key_len, True)


@wrong("empty rows are the mean of v", "attend no|empty|no key|mask|rows? 0")
class _EmptyRowsMean(Flash):
    def forward(self, q, k, v, causal, scale):
        # what a mask of -1e30 in place of -inf gives: equal scores, all of them hidden
        out, lse = super().forward(q, k, v, causal, scale)
        mean = self.expand(v, q.shape[1]).float().mean(2, keepdim=True).to(out.dtype)
        return torch.where((lse == -torch.inf).unsqueeze(-1), mean, out), lse


@wrong("empty rows are NaN", "NaN")
class _EmptyRowsNan(Flash):
    def store(self, out, lse, rows, m, l, acc):
        super().store(out, lse, rows, m, l, acc)
        out[:, :, rows.start : rows.stop] = (acc / l).to(out.dtype)


# GQA


@wrong("kv heads interleaved", "GQA|kv head|mapping|dk and dv")
class _Interleaved(Flash):
    def expand(self, x, heads):
        return x.repeat(1, heads // x.shape[1], 1, 1)

    def fold(self, x, kv_heads):
        return x.unflatten(1, (-1, kv_heads)).sum(1)


@wrong("kv heads interleaved in the forward, blocked in the sums", "GQA|kv head|mapping|dk")
class _InterleavedRead(Flash):
    def expand(self, x, heads):
        return x.repeat(1, heads // x.shape[1], 1, 1)


@wrong("dk of the group's last head", "GQA|dk")
class _DkNotSummed(Flash):
    def gradients(self, dq, dk, dv, kv_heads, dtype):
        dq, _, dv = super().gradients(dq, dk, dv, kv_heads, dtype)
        return dq, dk.unflatten(1, (kv_heads, -1))[:, :, -1].to(dtype), dv


@wrong("dk and dv the mean over the group", "GQA|group|dk and dv|dk")
class _GroupMean(Flash):
    def fold(self, x, kv_heads):
        return x.unflatten(1, (kv_heads, -1)).mean(2)


# tails


@wrong("last tile of keys dropped", "tail|last|tile|key")
class _TailDropped(Flash):
    def key_blocks(self, key_len):
        whole = key_len // self.block_k * self.block_k
        return super().key_blocks(whole if whole else key_len)


@wrong("last tile of keys begins early", "tail|last|tile|key|twice")
class _TailTwice(Flash):
    def key_blocks(self, key_len):
        # so that no tile is short, as if rows already read were not read again
        for keys in super().key_blocks(key_len):
            yield range(max(0, keys.stop - self.block_k), keys.stop)


@wrong("padding of the last tile counts", "tail|padding|key|tile")
class _TailUnmasked(Flash):
    def step(self, s, v, m, l, acc, dtype):
        missing = self.block_k - s.shape[-1]
        s = torch.nn.functional.pad(s, (0, missing))  # zeros: k beyond the end reads as 0
        v = torch.nn.functional.pad(v, (0, 0, 0, missing))
        return super().step(s, v, m, l, acc, dtype)


@wrong("rows of the last tile are not written", "NaN|tail|row|repeatab|not written")
class _RowsUnwritten(Flash):
    def store(self, out, lse, rows, m, l, acc):
        super().store(out, lse, rows, m, l, acc)
        if len(rows) < self.block_q:
            out[:, :, rows.start : rows.stop] = torch.empty_like(out[:, :, rows.start : rows.stop])


@wrong("each tile misses its last key", "key|tile|miss|row")
class _LastKeyOfTile(Flash):
    def hidden(self, rows, keys, query_len, key_len, causal):
        hidden = super().hidden(rows, keys, query_len, key_len, causal)
        hidden[:, self.block_k - 1 :] = True
        return hidden


@wrong("keys from 1024 on are not read", "1024|long|key")
class _ShortLoop(Flash):
    def key_blocks(self, key_len):
        return super().key_blocks(min(key_len, 1024))


@wrong("window of 512 though none was asked", "window|long|key|mask")
class _Windowed(Flash):
    def after(self, row_I1, key_J):
        return super().after(row_I1, key_J) | (key_J <= row_I1 - 512)


# where it reads


@wrong("stale tile of v", "stale|tile|block")
class _StaleValues(Flash):
    def load_values(self, x, keys, heads):
        stale = range(0, len(keys)) if keys.start == self.block_k else keys
        return super().load_values(x, stale, heads)


@wrong("v tile transposed", "v|out|tile")
class _Transposed(Flash):
    def load_values(self, x, keys, heads):
        v = super().load_values(x, keys, heads)
        return v.mT.reshape(v.shape)


@wrong("strides ignored", "strid|contiguous")
class _StridesIgnored(Flash):
    def load(self, x, rows):
        plain = torch.empty(x.shape, device="meta").stride()
        return super().load(x.as_strided(x.shape, plain), rows)


@wrong("the last head reads the one before", "head")
class _OneHead(Flash):
    def load(self, x, rows):
        x = super().load(x, rows)
        return x if x.shape[1] == 1 else torch.cat([x[:, :-1], x[:, -2:-1]], 1)


@wrong("scale off in head 1 alone", "head|scale")
class _OneHeadScale(Flash):
    def load(self, x, rows):
        factor = torch.ones(x.shape[1])
        factor[1:2] = 1.02
        return super().load(x, rows) * factor[:, None, None]


@wrong("the last batch element reads the first one's v", "batch|v|dv|out")
class _BatchMixed(Flash):
    def load_values(self, x, keys, heads):
        return super().load_values(torch.cat([x[:-1], x[:1]]), keys, heads)


@wrong("head_dim past a power of two is dropped", "head_dim|scale|out|dq")
class _HeadDimTail(Flash):
    def load_keys(self, x, keys, heads):
        power = 2 ** int(math.log2(x.shape[-1]))
        k = super().load_keys(x, keys, heads)
        return torch.nn.functional.pad(k[..., :power], (0, x.shape[-1] - power))


# rarely


@wrong("every third call is wrong", "repeat|call|scale|again")
class _ThirdCall(Flash):
    calls = 0

    def scale(self, q, scale):
        self.calls += 1
        return super().scale(q, scale) * (1.01 if self.calls % 3 == 0 else 1.0)


@wrong("one row in 64 misses a key", "row|key|63")
class _RareRows(Flash):
    def after(self, row_I1, key_J):
        return super().after(row_I1, key_J) | ((row_I1 % 64 == 63) & (key_J == row_I1 - 1))


@wrong("race: a tile's dq is lost", "repeat|race|again")
class _Race(Flash):
    # its own generator, never seeded again: two calls differ, as in a race
    chance = random.Random(0)

    def add_dq(self, dq, rows, keys, part):
        lost = self.chance.randrange(dq.shape[1])
        part = part.clone()
        part[:, lost] *= self.chance.choice((0.0, 1.0))
        super().add_dq(dq, rows, keys, part)


@wrong("race: out in another order each call", "repeat|race|again", (torch.float32,))
class _RaceOrder(Flash):
    chance = random.Random(0)

    def key_blocks(self, key_len):
        blocks = list(super().key_blocks(key_len))
        self.chance.shuffle(blocks)
        return iter(blocks)


@wrong("dropout left on", "repeat|race|again|dropout")
class _Dropout(Flash):
    chance = torch.Generator().manual_seed(0)

    def step(self, s, v, m, l, acc, dtype):
        kept = torch.rand(v.shape[-2], generator=self.chance) > 0.1
        return super().step(s, v * kept[:, None] / 0.9, m, l, acc, dtype)
