"""A model around Transformer Engine's attention, and what holds the instrument to it."""

import copy
import inspect

import pytest
import torch
from torch import nn

from stability import shadow

HEADS, GROUPS, WIDTH, BATCH, LENGTH = 4, 2, 16, 2, 12


def lengths(*values):
    return torch.tensor([0, *values]).cumsum(0).to(torch.int32)


PACKED = {"cu_seqlens_q": lengths(5, 0, 7), "cu_seqlens_kv": lengths(5, 0, 7)}


class Model(nn.Module):
    """Projections around one attention; queries may be fewer than keys."""

    def __init__(self, attend, call=None, queries=LENGTH, value_width=WIDTH):
        super().__init__()
        self.q = nn.Linear(WIDTH, HEADS * WIDTH)
        self.k = nn.Linear(WIDTH, GROUPS * WIDTH)
        self.v = nn.Linear(WIDTH, GROUPS * value_width)
        self.attend = attend
        self.call = call or {}
        self.queries = queries
        self.bias = nn.Parameter(torch.randn(1, HEADS, queries, LENGTH))

    def forward(self, x):
        heads = (HEADS, GROUPS, GROUPS)
        parts = zip((self.q, self.k, self.v), heads, strict=True)
        q, k, v = (one(x).unflatten(-1, (n, -1)) for one, n in parts)
        layout = self.call.get("qkv_format", self.attend.qkv_format)
        q = q[-self.queries :] if layout != "bshd" else q[:, -self.queries :]
        call = dict(self.call)
        if call.get("core_attention_bias_type") in ("post_scale_bias", "pre_scale_bias"):
            call["core_attention_bias"] = self.bias
        return self.attend(q, k, v, **call)


def inputs(layout):
    shape = {"sbhd": (LENGTH, BATCH), "bshd": (BATCH, LENGTH), "thd": (LENGTH,)}[layout]
    return torch.randn(*shape, WIDTH, generator=torch.Generator().manual_seed(1))


def loss_of(out, padding=None):
    out = out[0] if isinstance(out, tuple) else out
    weights = torch.linspace(-1, 1, out.numel()).reshape(out.shape)
    return (out * weights).sum() if padding is None else (out * weights)[~padding].sum()


class Recorded:
    """What an attention was given and gave, and the gradients, in an unwatched model."""

    def __init__(self, attend):
        self.attend = attend
        forward = type(attend).forward

        def keep(*args, **kwargs):
            given = inspect.signature(forward).bind(attend, *args, **kwargs).arguments
            given.pop("self")
            self.given = dict(given)
            out = forward(attend, *args, **kwargs)
            self.results = {"out": out[0] if isinstance(out, tuple) else out}
            self.results["out"].register_hook(lambda grad: setattr(self, "dout", grad.clone()))
            for what, x in self.leaves(self.given).items():
                x.register_hook(lambda grad, what=what: self.results.setdefault(what, grad.clone()))
            return out

        attend.forward = keep

    def leaves(self, given):
        names = {"dq": "query_layer", "dk": "key_layer", "dv": "value_layer"}
        names["dbias"] = "core_attention_bias"
        found = {what: given[name] for what, name in names.items() if name in given}
        offset = getattr(self.attend, "softmax_offset", None)
        if isinstance(offset, nn.Parameter):
            found["dsinks"] = offset
        return found

    def relative_errors(self, valid):
        """Return |x - FP64's| / |FP64's| of each result; of rows that count, where these differ."""
        wide = copy.deepcopy(self.attend).double()
        del wide.forward
        given = {
            name: x.detach().double().requires_grad_()
            if isinstance(x, torch.Tensor) and x.is_floating_point() and name != "alibi_slopes"
            else x
            for name, x in self.given.items()
        }
        out = type(wide).forward(wide, **given)
        out = out[0] if isinstance(out, tuple) else out
        names = [what for what in ("dq", "dk", "dv", "dbias", "dsinks") if what in self.results]
        leaves = {what: x for what, x in self.leaves(given).items() if what in names}
        if "dsinks" in names:
            leaves["dsinks"] = wide.softmax_offset
        grads = torch.autograd.grad(out, list(leaves.values()), self.dout.double())
        right = {"out": out.detach(), **dict(zip(leaves, grads, strict=True))}
        errors = {}
        for what, x in right.items():
            own = self.results[what].detach()
            if valid is not None and x.shape[: valid.dim()] == valid.shape:
                own, x = own[valid], x[valid]
            errors[what] = float((own.double() - x).norm() / x.norm())
        return errors


def looked(attend, call, x, valid=None, **options):
    """Train a step without and with `shadow`; hold bits and figures, and return the probe."""
    torch.manual_seed(0)
    model = Model(attend, call, **options)
    plain = copy.deepcopy(model)
    recorded = Recorded(plain.attend)
    expected = plain(x)
    loss_of(expected, None if valid is None else ~valid).backward()
    with shadow(model, "flash:golden", heads=True) as probe:
        out = model(x)
        loss_of(out, None if valid is None else ~valid).backward()
        probe.step()
    both = [one if isinstance(one, tuple) else (one,) for one in (expected, out)]
    for own, watched in zip(*both, strict=True):
        assert torch.equal(own, watched)
    for own, watched in zip(plain.parameters(), model.parameters(), strict=True):
        assert (own.grad is None) == (watched.grad is None)
        assert own.grad is None or torch.equal(own.grad, watched.grad)
    assert probe.findings == []
    assert [(one.layer, one.state) for one in probe.coverage] == [("attend", "seen")]
    for what, error in recorded.relative_errors(valid).items():
        figure = probe.metrics[f"deviation/attend/{what}/golden_baseline_rel_fro"]
        assert figure == pytest.approx(error, abs=1e-12), what
        assert 1e-9 < figure < 1e-6, what
    return probe
