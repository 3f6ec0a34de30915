"""`shadow(modules=...)`: any module or function beside a candidate, without a trace in the run."""

import copy
from itertools import product

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from attention_kernels.linear_recipes import LINEAR_RECIPES
from attention_kernels.recipe_linear import recipe_linear
from stability import module_call, shadow
from tests.sampling import one_in
from tests.stability.intercept.module_models import (
    Language,
    angles,
    judged,
    language_step,
    look,
    rewritten_norm,
    rotate,
    train,
)


def eps_outside(module, x):
    wide = x.float()
    scale = wide.square().mean(-1, keepdim=True).sqrt() + module.eps
    return module.weight * (wide / scale).to(x.dtype)


class _WeightGain(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return 0.99 * gradient


def weights_gradient(module, x):
    return _WeightGain.apply(module.weight) * F.rms_norm(x, x.shape[-1:], None, module.eps)


def scaled(module, x):
    return 1.001 * rewritten_norm(module, x)


def fused_loss(head, hidden, targets):
    return F.cross_entropy((hidden @ head.weight.T).float(), targets)


EVERYTHING = {
    "*.mlp": "emulated:e4m3",
    "batch_norm": "emulated:bf16",
    "*norm": rewritten_norm,
    "layers.*.qkv": "emulated:bf16",
    "*.rotate": lambda q, k, cos, sin: (q * cos, k * cos),
    "loss": F.cross_entropy,
    "lm_head+loss": fused_loss,
}


@pytest.mark.parametrize(
    ("precision", "how"),
    one_in(2, product((torch.float32, torch.bfloat16), ("plain", "accumulated", "checkpointed"))),
)
def test_training_ends_in_the_same_bits_with_every_part_looked_at(precision, how):
    """Weights, BatchNorm's buffers and the random stream of dropout are all part of it."""
    torch.manual_seed(0)
    model = Language(dropout=0.1)
    model.recomputes = how == "checkpointed"
    twin = copy.deepcopy(model)
    given = {"precision": precision, "micro_batches": 1 + (how == "accumulated")}
    plain = train(model, **given)
    random_state = torch.get_rng_state()
    with shadow(twin, "flash:fa2", modules=EVERYTHING) as probe:
        watched = train(twin, **given, probe=probe)
    assert not probe.findings
    assert {"lm_head+loss", "loss", "layers.1.mlp", "norm", "layers.0.rotate"} <= {*probe.layers}
    assert len(probe.metrics) > 500
    assert torch.equal(torch.get_rng_state(), random_state)
    for name, value in plain.items():
        assert torch.equal(value, watched[name]), name


def test_right_norms_pass_and_wrong_ones_are_told_at_their_layer_and_result():
    """FP32 rounds at 6e-8: an eps of 1e-3 in another place, or a factor of 1.001, is far beyond."""
    for right in (rewritten_norm, lambda m, x: F.rms_norm(x, x.shape[-1:], m.weight, m.eps)):
        found = judged(look({"*norm": right}), "layers.1.norm")
        assert list(found) == ["out", "dx", "dweight"]
        assert max(ratio for ratio, _ in found.values()) < 2
        assert max(abs(gain) for _, gain in found.values()) < 1e-6
    eps = judged(look({"*norm": eps_outside}), "layers.1.norm")
    assert min(ratio for ratio, _ in eps.values()) > 100
    weight = judged(look({"*norm": weights_gradient}), "layers.0.second_norm")
    assert weight["dweight"][1] == pytest.approx(-0.01, abs=1e-6)
    assert weight["dweight"][0] > 1e4
    assert max(weight["out"][0], weight["dx"][0]) < 4
    factor = judged(look({"*norm": scaled}), "norm")
    assert all(gain == pytest.approx(0.001, abs=1e-6) for _, gain in factor.values())


def test_figures_are_those_of_an_independent_fp64_recomputation():
    """The gated MLP by hand in FP64, beside what the run itself computed: out, dx, and `.grad`."""
    torch.manual_seed(1)
    model = Language()
    mlp = model.layers[1].mlp
    kept = {}

    def keep(module, args, out):
        kept["x"], kept["out"] = args[0].detach().clone(), out.detach().clone()
        args[0].register_hook(lambda dx: kept.update(dx=dx.clone()))
        out.register_hook(lambda dout: kept.update(dout=dout.clone()))

    mlp.register_forward_hook(keep)
    with shadow(model, modules={"layers.1.mlp": "emulated:bf16"}) as probe:
        language_step(model, 0)
        probe.step()
    own = {"out": kept["out"], "dx": kept["dx"]}
    own |= {f"d{name}": x.grad for name, x in mlp.named_parameters()}
    exact = _by_hand(mlp, kept["x"], kept["dout"], torch.float64, lambda t: t)
    rough = _by_hand(mlp, kept["x"], kept["dout"], torch.float32, lambda t: t.bfloat16().float())
    assert list(judged(probe, "layers.1.mlp")) == list(own)
    for what in own:
        c, b, g = (each[what].double() for each in (rough, own, exact))
        at = f"deviation/layers.1.mlp/{what}/"
        baseline = float((b - g).norm() / g.norm())
        assert 1e-8 < baseline < 1e-6
        assert abs(probe.metrics[at + "golden_baseline_rel_fro"] - baseline) < 1e-12
        gain = float(((b - g) * g).sum() / (g * g).sum())
        assert abs(probe.metrics[at + "gain_baseline"] - gain) < 1e-12
        # by hand the candidate's silu rounds otherwise, in FP32: 1e-7 of an error of 2e-3
        candidate = float((c - g).norm() / g.norm())
        near = pytest.approx(candidate, rel=1e-3, abs=1e-7)
        assert probe.metrics[at + "golden_candidate_rel_fro"] == near


def _by_hand(mlp, x, dout, dtype, rounded):
    """Forward and backward of the gated MLP, each operand of a product rounded."""
    gate, up, down = (m.weight.detach().to(dtype) for m in (mlp.gate, mlp.up, mlp.down))
    x, dout, bias = x.to(dtype).flatten(0, 1), dout.to(dtype).flatten(0, 1), mlp.up.bias.to(dtype)
    r = rounded
    g = r(x) @ r(gate).T
    u = torch.addmm(bias.detach(), r(x), r(up).T)
    h = F.silu(g) * u
    dh = r(dout) @ r(down)
    du, silu = dh * F.silu(g), torch.sigmoid(g)
    dg = dh * u * (silu * (1 + g * (1 - silu)))
    return {
        "out": (r(h) @ r(down).T).reshape(2, 16, -1),
        "dx": (r(dg) @ r(gate) + r(du) @ r(up)).reshape(2, 16, -1),
        "dgate.weight": r(dg).T @ r(x),
        "dup.weight": r(du).T @ r(x),
        "dup.bias": du.sum(0),
        "ddown.weight": r(dout).T @ r(h),
    }


@pytest.mark.parametrize("format", ["bf16", "e5m2"])
def test_an_mlp_in_e4m3_errs_by_the_ratio_of_the_formats_spacings(format):
    """Rounding to m bits errs by 2^-m times the same: by 2^(7 - 3) and 2^(2 - 3)."""
    bits = {"bf16": 7, "e5m2": 2}[format]
    fine, rough = (
        look({"*.mlp": f"emulated:{one}"}, Language(width=128)).metrics for one in (format, "e4m3")
    )
    for what in ("out", "dx", "dgate.weight", "dup.weight", "ddown.weight"):
        name = f"deviation/layers.1.mlp/{what}/golden_candidate_rel_fro"
        # second order in e5m2's own error, an eighth
        assert rough[name] / fine[name] == pytest.approx(2.0 ** (bits - 3), rel=0.08), what


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "autocast"])
def test_a_recipe_errs_in_each_result_as_the_layer_computed_by_hand(autocast):
    """Of one linear layer, which the loss's own gradient goes through."""
    model = nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 8))
    x = torch.randn(4, 16, 32, generator=torch.Generator().manual_seed(0), requires_grad=True)
    found = {}

    def keep(module, args, out):
        out.register_hook(lambda grad: found.update(dout=grad.detach()))

    model[0].register_forward_hook(keep)
    with shadow(model, modules={"0": "recipe:mxfp8"}) as probe:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            model(x).float().square().sum().backward()
        probe.step()
    assert not probe.findings
    leaves = [t.detach().requires_grad_() for t in (x, model[0].weight, model[0].bias)]
    recipe_linear(*leaves, LINEAR_RECIPES["mxfp8"]).backward(found["dout"].bfloat16())
    exact = [t.detach().double().requires_grad_() for t in (x, model[0].weight, model[0].bias)]
    F.linear(*exact).backward(found["dout"].double())
    for what, own, true in zip(("dx", "dweight"), leaves, exact, strict=False):
        error = (own.grad - true.grad).norm() / true.grad.norm()
        name = f"deviation/0/{what}/golden_candidate_rel_fro"
        assert probe.metrics[name] == pytest.approx(float(error), rel=1e-2), what
    assert 0.01 < probe.metrics["deviation/0/out/golden_candidate_rel_fro"] < 0.1


def test_a_product_that_a_recipe_leaves_as_it_is_is_told():
    class Mixing(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.Linear(32, 32)

        def forward(self, x):
            return self.up(x) @ self.up.weight

    model = nn.Sequential(nn.Linear(32, 32), Mixing())
    with shadow(model, modules={"1": "recipe:nvfp4"}) as probe:
        model(torch.randn(16, 32)).sum().backward()
        probe.step()
    assert [text for *_, text in probe.findings] == ["recipe:nvfp4 leaves matmul in it as it is"]


def interleaved(q, k, cos, sin):
    """Rotary of neighbouring pairs in place of halves."""

    def turned(x):
        even, odd = x[..., ::2], x[..., 1::2]
        return torch.stack((-odd, even), dim=-1).flatten(-2)

    return q * cos + turned(q) * sin, k * cos + turned(k) * sin


def other_base(q, k, cos, sin):
    return rotate(q, k, *angles(q.shape[2], q.shape[3], base=9900.0))


def addcmul(q, k, cos, sin):
    """A right one, in another order."""

    def turned(x):
        return torch.addcmul(torch.cat((-x[..., 8:], x[..., :8]), -1) * sin, x, cos)

    return turned(q), turned(k)


def test_wrong_rotary_embeddings_are_told_at_q_and_k_and_their_gradients():
    right = judged(look({"*.rotate": addcmul}), "layers.0.rotate")
    assert list(right) == ["out_0", "out_1", "dq", "dk"]
    assert max(ratio for ratio, _ in right.values()) < 2
    for wrong in (interleaved, other_base):
        found = judged(look({"*.rotate": wrong}), "layers.1.rotate")
        assert min(ratio for ratio, _ in found.values()) > 1000, wrong


@module_call
def twice(x):
    return 2 * x


class _CallsTwice(nn.Module):
    def __init__(self):
        super().__init__()
        self.language = Language()

    def forward(self, tokens):
        x = twice(self.language.embedding(tokens))
        return self.language.lm_head(twice(x * 8))


def test_each_call_of_a_function_in_one_module_is_looked_at_by_its_number():
    def wrong_in_the_second(x):
        return twice(x) * (1.01 if x.abs().max() > 16 else 1.0)

    probe = look({"*twice": wrong_in_the_second}, _CallsTwice(), micro_batches="all")
    assert judged(probe, "model.twice")["out"][1] == 0
    assert abs(judged(probe, "model.twice#1")["out"][1] - 0.01) < 1e-5
    assert not [name for name in probe.metrics if "@batch" in name]
