"""Wrong in what they compute: a factor, a sum of the backward, the arithmetic."""

import math

import torch

from tests.zoo.flash_by_hand import Flash
from tests.zoo.right import NARROW
from tests.zoo.table import wrong

# factors


@wrong("scale x 1.005", "scale")
class _ScaleGain(Flash):
    def scale(self, q, scale):
        return 1.005 * super().scale(q, scale)


@wrong("scale given is ignored", "scale")
class _ScaleIgnored(Flash):
    def scale(self, q, scale):
        return super().scale(q, None)


@wrong("scale for exp2, softmax by exp", "scale")
class _ScaleLog2(Flash):
    def scale(self, q, scale):
        return math.log2(math.e) * super().scale(q, scale)


@wrong("scale of the padded head_dim", "scale")
class _ScaleOfPadded(Flash):
    def scale(self, q, scale):
        padded = 16 * ((q.shape[-1] + 1 + 15) // 16)  # one more than it takes
        return padded**-0.5 if scale is None else scale


@wrong("out x 1.005", "out")
class _OutGain(Flash):
    def store(self, out, lse, rows, m, l, acc):
        super().store(out, lse, rows, m, l, 1.005 * acc)


@wrong("P x 1.005 in the backward", r"\bP\b|dq, dk,? (and )?dv|LSE")
class _BackwardP(Flash):
    def finite(self, lse):
        return super().finite(lse) - 0.005


class _Stored(Flash):
    """The gradients times a factor each, as they are stored."""

    factors = (1.0, 1.0, 1.0)

    def gradients(self, dq, dk, dv, kv_heads, dtype):
        dq, dk, dv = (factor * x for factor, x in zip(self.factors, (dq, dk, dv), strict=True))
        return super().gradients(dq, dk, dv, kv_heads, dtype)


@wrong("dq x 0.995", "dq")
class _DqGain(_Stored):
    factors = (0.995, 1.0, 1.0)


@wrong("dk x 1.005", "dk")
class _DkGain(_Stored):
    factors = (1.0, 1.005, 1.0)


@wrong("dv x 1.005", "dv")
class _DvGain(_Stored):
    factors = (1.0, 1.0, 1.005)


@wrong("dS without the scale in dk", "dk")
class _DkUnscaled(Flash):
    def backward(self, dout, q, k, v, out, lse, causal, scale):
        dq, dk, dv = super().backward(dout, q, k, v, out, lse, causal, scale)
        return dq, (dk.float() / scale).to(dk.dtype), dv


@wrong("delta x 0.95", "delta")
class _DeltaOff(Flash):
    def delta(self, dout, out):
        return 0.95 * super().delta(dout, out)


@wrong("delta forgotten", "delta")
class _DeltaForgotten(Flash):
    def delta(self, dout, out):
        return torch.zeros_like(super().delta(dout, out))


@wrong("delta of the tile's first row", "delta|dq")
class _DeltaOfAnotherRow(Flash):
    def delta(self, dout, out):
        delta = super().delta(dout, out)
        first = torch.arange(delta.shape[2]) // self.block_q * self.block_q
        return delta[:, :, first]


@wrong("LSE in base 2", "LSE")
class _LseLog2(Flash):
    def lse_to_return(self, lse):
        return lse / math.log(2)


@wrong("LSE x 1.005", "LSE")
class _LseGain(Flash):
    def lse_to_return(self, lse):
        return 1.005 * lse


@wrong("LSE without the maximum", "LSE")
class _LseWithoutMaximum(Flash):
    def forward(self, q, k, v, causal, scale):
        self.largest = torch.zeros(*q.shape[:3], 1)
        return super().forward(q, k, v, causal, scale)

    def store(self, out, lse, rows, m, l, acc):
        super().store(out, lse, rows, m, l, acc)
        self.largest[:, :, rows.start : rows.stop] = m.nan_to_num(neginf=0.0)

    def lse_to_return(self, lse):
        return lse - self.largest.squeeze(-1)


@wrong("out truncated as it is stored", "bias|round|out", NARROW)
class _Truncated(Flash):
    def store(self, out, lse, rows, m, l, acc):
        x = torch.where(l > 0, acc / l, 0.0)
        cut = x.to(out.dtype)
        towards_zero = torch.nextafter(cut, torch.zeros_like(cut))
        cut = torch.where(cut.float().abs() > x.abs(), towards_zero, cut)
        super().store(out, lse, rows, m, torch.ones_like(l), cut.float())
        lse[:, :, rows.start : rows.stop] = (m + l.log()).squeeze(-1)


# the sums of the backward


@wrong("dq written, not added", "dq")
class _DqWritten(Flash):
    def add_dq(self, dq, rows, keys, part):
        dq[:, :, rows.start : rows.stop] = part


@wrong("dv misses the last tile of queries", "dv|tail|quer")
class _DvMissesQueries(Flash):
    def row_blocks(self, query_len):
        self.last = (query_len - 1) // self.block_q * self.block_q
        return super().row_blocks(query_len)

    def add_dv(self, dv, rows, keys, part):
        if rows.start != self.last or rows.start == 0:
            super().add_dv(dv, rows, keys, part)


@wrong("dk written, not added", "dk")
class _DkWritten(Flash):
    def add_dk(self, dk, rows, keys, part):
        dk[:, :, keys.start : keys.stop] = part


# arithmetic


@wrong("no maximum is subtracted", "NaN|infinit|overflow|maximum")
class _NoMaximum(Flash):
    def step(self, s, v, m, l, acc, dtype):
        p = torch.exp(s)
        return torch.zeros_like(m), l + p.sum(-1, keepdim=True), acc + p.to(dtype).float() @ v


@wrong("accumulator not rescaled", "rescale|maximum|alpha|accumulator")
class _NotRescaled(Flash):
    def step(self, s, v, m, l, acc, dtype):
        alpha = torch.exp(m - torch.maximum(m, s.amax(-1, keepdim=True)).clamp(min=-1e30))
        return super().step(s, v, m, l, torch.where(alpha > 0, acc / alpha, acc), dtype)


@wrong("row sum not rescaled", "rescale|maximum|alpha|row sum")
class _SumNotRescaled(Flash):
    def step(self, s, v, m, l, acc, dtype):
        alpha = torch.exp(m - torch.maximum(m, s.amax(-1, keepdim=True)).clamp(min=-1e30))
        return super().step(s, v, m, torch.where(alpha > 0, l / alpha, l), acc, dtype)


@wrong("accumulator in BF16 over the keys", "err|out|accumulat")
class _NarrowAccumulator(Flash):
    block_k = 8

    def step(self, s, v, m, l, acc, dtype):
        m, l, acc = super().step(s, v, m, l, acc, dtype)
        return m, l, acc.bfloat16().float()


@wrong("dk summed in BF16", "dk")
class _NarrowDk(Flash):
    block_q = 8

    def add_dk(self, dk, rows, keys, part):
        super().add_dk(dk, rows, keys, part)
        at = slice(keys.start, keys.stop)
        dk[:, :, at] = dk[:, :, at].bfloat16().float()


@wrong("out in FP32 whatever q is", "dtype", NARROW)
class _WrongDtype(Flash):
    def forward(self, q, k, v, causal, scale):
        out, lse = super().forward(q, k, v, causal, scale)
        return out.float(), lse


@wrong("q scaled in place", "place|input")
class _InPlace(Flash):
    def forward(self, q, k, v, causal, scale):
        with torch.no_grad():
            q.detach().mul_(scale)
        return super().forward(q, k, v, causal, 1.0)
