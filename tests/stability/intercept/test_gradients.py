"""`shadow(..., gradient_every=)`: gradient evidence of any torch model, and no trace of it."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attention_kernels import golden_attention
from stability.intercept.doors import catch_attention
from stability.intercept.gradients import CaughtGradients
from stability.intercept.replacement import Replacement
from stability.intercept.session import shadow
from stability.probe.attention_registry import resolve_attention
from tests.stability.intercept.torch_models import Decoder, tokens, train_step


def _model(dropout=0.0, dtype=torch.float32):
    torch.manual_seed(0)
    return Decoder(depth=2, dropout=dropout).to(dtype)


def _loss(model, step, precision):
    batch = tokens(step)
    with torch.autocast("cpu", precision, enabled=precision != torch.float32):
        logits = model(batch[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())


def _trained(steps, watch, *, dropout=0.0, precision=torch.bfloat16, **options):
    """Train with and without looks; return the model and what the sinks were given."""
    model, given, step = _model(dropout), [], 0
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    options = {"every": 0, "sinks": [lambda at, measured: given.append((at, measured))], **options}
    if watch:
        options |= {"gradient_every": 2, "loss": lambda: _loss(model, step, precision)}
    with shadow(model, "flash:all_bf16", **options) as session:
        for step in range(steps):
            optimizer.zero_grad()
            train_step(model, step, precision)
            optimizer.step()
            session.step()
    return model, given, session


def test_the_whole_models_gradient_is_looked_at_every_so_many_steps():
    _, given, session = _trained(6, True)
    assert [at for at, _ in given] == [2, 4, 6]
    last = given[-1][1].metrics
    assert last == session.gradient_metrics
    assert [measured.metrics["gradient/all/looks"] for _, measured in given] == [1, 2, 3]
    assert {name.split("/")[1] for name in last} == {"all", "embedding", "qkv", "norm", "other"}
    assert 1.2 < last["gradient/all/ratio"] < 20
    # BF16's 2^-8, much of which averages out; as trained all other layers' rounding is in it too
    assert 0 < last["gradient/all/baseline_error"] < 2**-8
    assert last["gradient/all/baseline_error_as_trained"] > last["gradient/all/baseline_error"]
    assert session.findings == []


def test_looking_changes_no_bit_also_with_dropout_and_running_means():
    states = [_trained(5, watch, dropout=0.2)[0].state_dict() for watch in (False, True)]
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name]), name


def test_a_replaced_model_is_compared_with_its_own_attention_and_goes_on_replaced():
    replaced = {"replace": ["*"]}
    states, given, _ = zip(
        *(_trained(4, watch, **replaced) for watch in (False, True)), strict=True
    )
    for name, value in states[0].state_dict().items():
        assert torch.equal(value, states[1].state_dict()[name]), name
    ratio = given[1][-1][1].metrics["gradient/all/ratio"]
    assert 1.2 < ratio < 20


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_isolated_is_one_precision_wider_whatever_the_model_is_in(dtype):
    model = _model(dtype=dtype)
    batch, seen = tokens(0), []

    def loss():
        logits = model(batch[:, :-1])
        seen.append(logits.dtype)
        return F.cross_entropy(logits.double().flatten(0, 1), batch[:, 1:].flatten())

    candidate = Replacement(candidate=resolve_attention("golden", torch.device("cpu")), layers="*")
    gradients = CaughtGradients(model, loss, candidate, catch_attention)
    as_trained = gradients.of("baseline", False)
    isolated = gradients.of("baseline", True)
    wide = torch.float32 if dtype is torch.bfloat16 else torch.float64
    assert seen == [dtype, wide]
    assert {x.dtype for x in as_trained.values()} == {dtype}
    assert {x.dtype for x in isolated.values()} == {wide}
    assert next(model.parameters()).dtype is dtype
    assert model.norm.running_mean.dtype is dtype
    assert model.norm.num_batches_tracked == 0


def test_isolated_switches_off_the_autocast_that_the_loss_switches_on():
    model, dtypes = _model(), []
    model.head.register_forward_hook(lambda module, args, out: dtypes.append(out.dtype))
    inside = []

    def attend(q, k, v, *, causal, scale=None):
        inside.append(q.dtype)
        return golden_attention(q, k, v, causal=causal, scale=scale).to(q.dtype)

    candidate = Replacement(candidate=resolve_attention(attend, torch.device("cpu")), layers="*")
    gradients = CaughtGradients(
        model, lambda: _loss(model, 0, torch.bfloat16), candidate, catch_attention
    )
    for is_isolated in (False, True):
        gradients.of("candidate", is_isolated)
    assert dtypes == [torch.bfloat16, torch.float32]
    # and the attention is given what it gets in the run
    assert inside == [torch.bfloat16] * 4
    assert not torch.is_autocast_enabled("cpu")


def test_as_trained_the_baseline_has_the_models_own_gradient():
    model = _model()
    candidate = Replacement(
        candidate=resolve_attention("flash:fa2", torch.device("cpu")), layers="*"
    )
    gradients = CaughtGradients(
        model, lambda: _loss(model, 0, torch.bfloat16), candidate, catch_attention
    )
    found = gradients.of("baseline", False)
    assert all(parameter.grad is None for parameter in model.parameters())
    train_step(model, 0, torch.bfloat16)
    for name, parameter in model.named_parameters():
        assert torch.equal(found[name], parameter.grad), name


def test_a_candidate_that_raises_is_a_finding_and_the_run_goes_on():
    def broken(q, k, v, *, causal, scale=None):
        raise RuntimeError("no kernel for this shape")

    model, step = _model(), 0
    with shadow(
        model, broken, every=0, gradient_every=1, loss=lambda: _loss(model, step, torch.bfloat16)
    ) as session:
        for step in range(2):
            train_step(model, step, torch.bfloat16)
            session.step()
    assert session.findings == [
        (1, "gradient", "candidate: RuntimeError: no kernel for this shape")
    ]
    assert math.isnan(session.gradient_metrics["gradient/all/ratio"])


def test_a_loss_must_be_given_and_must_run_the_model():
    model = _model()
    with (
        pytest.raises(ValueError, match="shadow: loss must be a function where gradient_every is"),
        shadow(model, gradient_every=20),
    ):
        pass
    other = nn.Linear(2, 2)
    bad = {
        "loss must run the model, got no attention call": lambda: other(torch.ones(2)).sum(),
        "loss must return one number with its graph, got float": lambda: _loss(
            model, 0, torch.float32
        ).item(),
    }
    for message, loss in bad.items():
        with shadow(model, every=0, gradient_every=1, loss=loss) as session:
            train_step(model, 0)
            session.step()
        assert message in session.findings[0][2]
        assert session.gradient_metrics == {}


@pytest.mark.parametrize("by_name", [False, True])
def test_isolated_widens_what_the_loss_itself_brings_in(by_name):
    """An image is FP32 whatever the model's copies are."""

    class Patches(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.patch = nn.Conv1d(3, 16, 4, stride=4)
            self.qkv = nn.Linear(16, 96)

        def forward(self, image):
            patch = self.patch
            x = F.conv1d(input=image, weight=patch.weight, stride=4) if by_name else patch(image)
            q, k, v = self.qkv(x.mT).view(2, -1, 2, 48).transpose(1, 2).chunk(3, dim=-1)
            return F.scaled_dot_product_attention(q, k, v)

    model, image = Patches(), torch.randn(2, 3, 32)
    options = {"every": 0, "gradient_every": 1, "loss": lambda: model(image).square().sum()}
    with shadow(model, "flash:fa2", **options) as session:
        session.step()
    assert session.findings == []
    metrics = session.gradient_metrics
    assert 0 < metrics["gradient/all/baseline_error"] < 2**-20
    assert 0.1 < metrics["gradient/all/ratio"] < 10


def _ratio(candidate: str, *, is_fixed: bool) -> float:
    """Return the geometric mean of the errors' ratio over 12 looks at a training in BF16.

    Each look is at the loss of its batch, or under its gradient at the logits, held fixed.
    """
    model, ratios, now = _model(), [], {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def logits() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(now["batch"][:, :-1])

    def entropy(x: Tensor) -> Tensor:
        return F.cross_entropy(x.float().flatten(0, 1), now["batch"][:, 1:].flatten())

    def loss() -> Tensor:
        return (logits() * now["kept"]).sum() if is_fixed else entropy(logits())

    sinks = [lambda _, measured: ratios.append(measured.metrics["gradient/all/ratio"])]
    options = {"every": 0, "gradient_every": 1, "loss": loss, "sinks": sinks}
    with shadow(model, candidate, **options) as session:
        for step in range(12):
            now["batch"] = tokens(step)
            optimizer.zero_grad()
            found = logits()
            found.retain_grad()
            entropy(found).backward()
            now["kept"] = found.grad.clone()
            optimizer.step()
            session.step()
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


@pytest.mark.slow
@pytest.mark.parametrize("candidate", ["flash:fa2", "flash:all_bf16", "flash:fa2+out_gain_1pct"])
def test_under_a_gradient_held_fixed_at_the_result_the_ratio_is_that_of_the_loss(candidate):
    """As in a script that computes the loss itself (`recorder.inside.returned_gradient`)."""
    fixed, whole = (_ratio(candidate, is_fixed=is_fixed) for is_fixed in (True, False))
    assert fixed == pytest.approx(whole, rel=0.05)
