"""`modules={"lm_head+loss": ...}`: a fused linear cross-entropy beside the two calls it stands for.

Stand-ins with the signature of Liger's take its place here; `test_liger` runs Liger's own.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from stability import shadow
from tests.stability.intercept.compiled_models import inductor
from tests.stability.intercept.module_models import Language, batch, judged, language_step, look

KEY = "lm_head+loss"


class FusedLinearCrossEntropy:
    """Called as Liger's: (weight, input, target); logits of some tokens at a time."""

    def __init__(self, chunk=5, ignore_index=-100, count=None):
        self.chunk, self.ignore_index, self.count = chunk, ignore_index, count

    def __call__(self, weight, hidden, targets):
        total = hidden.new_zeros((), dtype=torch.float32)
        for x, t in zip(hidden.split(self.chunk), targets.split(self.chunk), strict=True):
            logits = (x @ weight.T).float()
            total = total + F.cross_entropy(
                logits, t, ignore_index=self.ignore_index, reduction="sum"
            )
        kept = (targets != self.ignore_index).sum()
        return total / (self.count or kept)


def fused(head, hidden, targets, ignore_index=-100):
    return FusedLinearCrossEntropy(ignore_index=ignore_index)(head.weight, hidden, targets)


def _padded_step(model, **options):
    """A step whose last targets are padding, as a training on documents has it."""
    tokens = batch(0)
    targets = tokens[:, 1:].clone()
    targets[:, 10:] = options.get("ignore_index", -100)
    logits = model(tokens[:, :-1])
    loss = F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.reshape(-1), **options)
    loss.backward()


def test_a_fused_loss_that_is_right_passes_with_its_gradients():
    found = judged(look({KEY: fused}), KEY)
    assert list(found) == ["out", "dx", "dweight"]
    assert torch.tensor(found["out"][0]).isnan(), "one number has no error ratio"
    assert max(ratio for what, (ratio, _) in found.items() if what != "out") < 2
    assert max(abs(gain) for _, gain in found.values()) < 1e-6


@pytest.mark.parametrize("options", [{}, {"ignore_index": -1}], ids=["default", "ignore -1"])
def test_options_of_the_call_reach_the_candidate(options):
    torch.manual_seed(0)
    model = Language()
    with shadow(model, modules={KEY: fused}) as probe:
        _padded_step(model, **options)
        probe.step()
    assert not probe.findings
    assert max(abs(gain) for _, gain in judged(probe, KEY).values()) < 1e-6


@pytest.mark.parametrize(
    ("wrong", "gain"),
    [
        # 20 of 32 targets count
        (lambda head, x, t: FusedLinearCrossEntropy(count=32)(head.weight, x, t), 20 / 32 - 1),
        (lambda head, x, t: 1.001 * fused(head, x, t), 1e-3),
    ],
    ids=["mean over all", "factor"],
)
def test_a_wrong_factor_of_the_loss_is_its_gain_in_every_result(wrong, gain):
    torch.manual_seed(0)
    model = Language()
    with shadow(model, modules={KEY: wrong}) as probe:
        _padded_step(model)
        probe.step()
    found = judged(probe, KEY)
    assert all(each == pytest.approx(gain, abs=1e-6) for _, each in found.values()), found
    assert found["dx"][0] > 1000


def test_padding_that_counts_as_a_target_is_told():
    """With an ignore_index that is a token of the vocabulary, and a candidate that counts it."""

    def counts(head, x, t, ignore_index):
        return FusedLinearCrossEntropy()(head.weight, x, t)

    torch.manual_seed(0)
    model = Language()
    with shadow(model, modules={KEY: counts}) as probe:
        _padded_step(model, ignore_index=3)
        probe.step()
    found = judged(probe, KEY)
    assert found["dx"][0] > 1000
    assert found["dweight"][0] > 1000


class _Shifts(nn.Module):
    """Computes its loss inside, from all but the last position, as Hugging Face's models did."""

    def __init__(self, scale=1.0):
        super().__init__()
        self.language, self.scale = Language(), scale

    def forward(self, tokens):
        logits = self.language(tokens)[:, :-1].float() * self.scale
        return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), tokens[:, 1:].reshape(-1))


def test_logits_may_lose_their_last_position_and_nothing_else():
    key = f"language.{KEY}"
    for scale in (1.0, 2.0):
        torch.manual_seed(0)
        model = _Shifts(scale)
        with shadow(model, modules={key: fused}) as probe:
            model(batch(0)).backward()
            probe.step()
        if scale == 1.0:
            assert not probe.findings
            assert max(abs(gain) for _, gain in judged(probe, key).values()) < 1e-6
        else:
            ((_, layer, text),) = probe.findings
            assert layer == key
            assert text.startswith("not looked at: the logits that the loss was given are not th")
            assert not probe.metrics


def test_a_loss_alone_is_looked_at_wherever_it_is_called():
    def smooth(logits, targets):
        return F.cross_entropy(logits, targets, label_smoothing=0.01)

    right = judged(look({"loss": F.cross_entropy}), "loss")
    assert {what: ratio for what, (ratio, _) in right.items() if what != "out"} == {"dx": 1.0}
    wrong = judged(look({"loss": smooth}), "loss")
    assert wrong["dx"][0] > 1000


def test_a_loss_of_evaluation_and_a_step_without_loss_are_passed_over():
    model = Language()
    with shadow(model, modules={"loss": F.cross_entropy}) as probe:
        with torch.no_grad():
            F.cross_entropy(torch.randn(4, 5), torch.zeros(4, dtype=torch.long))
        language_step(model, 0)
        probe.step()
        model(batch(0)[:, :-1]).sum().backward()
        probe.step()
    assert probe.findings[0][2].startswith("no call of step 1 was one of training")


def test_modes_of_the_callers_own_may_be_entered_and_left_around_a_step():
    model = Language()
    with shadow(model, modules={"loss": F.cross_entropy}) as probe:
        for step in range(2):
            with torch.device("cpu"):
                language_step(model, step)
                probe.step()
    assert not probe.findings


class _Heads(nn.Module):
    """Two heads, whose losses come after both or each behind its own."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(40, 32)
        self.first, self.second = nn.Linear(32, 40), nn.Linear(32, 40)

    def forward(self, tokens):
        x = self.embedding(tokens)
        return self.first(x), self.second(x)


def test_each_of_several_losses_of_a_pass_is_looked_at_with_its_own_head():
    def wrong_in_the_second(head, x, t):
        loss = F.cross_entropy(head(x), t)
        return loss * (1 + 0.01 * (head.weight.mean() > 0.5).float())

    torch.manual_seed(0)
    model = _Heads()
    with torch.no_grad():
        model.second.weight.add_(1)
    modules = {"*+loss": wrong_in_the_second, "loss": F.cross_entropy}
    with shadow(model, modules=modules) as probe:
        for micro_batch in range(2):
            tokens = batch(micro_batch)
            logits = [x.flatten(0, 1) for x in model(tokens)]
            sum(F.cross_entropy(x, tokens.flatten()) for x in logits).backward()
        probe.step()
    assert not probe.findings
    gains = {
        "/".join((name.split("/")[1], name.split("/")[-2])): value
        for name, value in probe.metrics.items()
        if name.endswith("/gain")
    }
    assert {name.split("/")[0] for name in gains} == {"first+loss", "second+loss", "loss", "loss#1"}
    for name, gain in gains.items():
        assert abs(gain - 0.01 * name.startswith("second")) < 1e-4, name


def test_targets_of_probabilities_are_those_of_flattened_tokens():
    torch.manual_seed(0)
    model = Language()
    tokens = batch(0)
    wanted = torch.softmax(torch.randn(tokens.numel(), 37), -1)
    modules = {KEY: lambda head, x, t, **options: F.cross_entropy(head(x), t, **options)}
    with shadow(model, modules=modules) as probe:
        F.cross_entropy(model(tokens).flatten(0, 1), wanted, label_smoothing=0.1).backward()
        probe.step()
    assert not probe.findings
    assert judged(probe, KEY)["dx"][0] == 1.0


@inductor
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
@pytest.mark.parametrize("key", ["loss", KEY])
def test_the_cross_entropy_that_inductor_makes_is_judged(key):
    torch._dynamo.reset()
    probe = look({key: "compiled"})
    assert not probe.findings
    found = judged(probe, key)
    assert set(found) == {"out", "dx"} | ({"dweight"} if key == KEY else set())
    assert max(ratio for what, (ratio, _) in found.items() if what != "out") < 1.5
    assert max(abs(gain) for _, gain in found.values()) < 1e-6
