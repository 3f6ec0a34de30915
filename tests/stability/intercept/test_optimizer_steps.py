"""`modules={"optimizer": ...}`: one update repeated on copied parameters, gradients and state."""

import copy
from contextlib import ExitStack

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from stability import shadow
from stability.probe.optimizer_update import own_step
from tests.stability.intercept.module_models import (
    Language,
    judged,
    language_loss,
    language_step,
    train,
)


def fused(optimizer):
    """The same update by torch's fused kernel."""
    for group in optimizer.param_groups:
        group["foreach"], group["fused"] = False, True
    own_step(optimizer)


def without_bias_correction(optimizer):
    for group in optimizer.param_groups:
        for p in group["params"]:
            first, second = group["betas"]
            state = optimizer.state[p]
            p.data.mul_(1 - group["lr"] * group["weight_decay"])
            m = state.get("exp_avg", torch.zeros_like(p)).lerp(p.grad, 1 - first)
            v = state.get("exp_avg_sq", torch.zeros_like(p)).lerp(p.grad**2, 1 - second)
            p.data.sub_(group["lr"] * m / (v.sqrt() + group["eps"]))


def _two_groups(model):
    decayed = [x for x in model.parameters() if x.dim() > 1]
    others = [x for x in model.parameters() if x.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 1e-2}]
    return torch.optim.AdamW(groups, lr=1e-3)


def _watched(candidate, steps=3, make=_two_groups, scheduled=False):
    torch.manual_seed(0)
    model = Language()
    optimizer = make(model)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer) if scheduled else None
    with shadow(model, modules={"optimizer": candidate}) as probe:
        for step in range(steps):
            optimizer.zero_grad()
            language_step(model, step)
            optimizer.step()
            if scheduler:
                scheduler.step()
            probe.step()
    return probe


def test_training_ends_in_the_same_bits_with_its_updates_looked_at():
    torch.manual_seed(0)
    model = Language(dropout=0.1)
    twin = copy.deepcopy(model)
    plain = train(model)
    with shadow(twin, modules={"optimizer": without_bias_correction}) as probe:
        watched = train(twin, probe=probe)
    assert probe.metrics
    assert not probe.findings
    assert all(torch.equal(x, watched[name]) for name, x in plain.items())


@pytest.mark.parametrize("scheduled", [False, True])
def test_a_right_update_passes_group_by_group_and_a_wrong_one_is_told(scheduled):
    right = _watched(fused, scheduled=scheduled)
    assert not right.findings
    found = judged(right, "optimizer")
    assert list(found) == ["update_0", "update_1"]
    assert max(ratio for ratio, _ in found.values()) < 2
    assert max(abs(gain) for _, gain in found.values()) < 1e-4
    wrong = judged(_watched(without_bias_correction, scheduled=scheduled), "optimizer")
    assert min(ratio for ratio, _ in wrong.values()) > 20


def test_a_factor_of_one_groups_update_is_that_groups_gain():
    def larger(optimizer):
        optimizer.param_groups[1]["lr"] *= 1.01
        own_step(optimizer)

    found = judged(_watched(larger, make=lambda m: _with_sgd(m)), "optimizer")
    assert found["update_0"][0] == 1.0
    assert found["update_1"][1] == pytest.approx(0.01, rel=1e-3)


def _with_sgd(model):
    parts = list(model.parameters())
    return torch.optim.SGD([{"params": parts[:5]}, {"params": parts[5:]}], lr=0.5, momentum=0.9)


def test_two_optimizers_of_one_model_are_told_apart_and_another_models_is_passed_over():
    model, other = Language(), torch.nn.Linear(2, 2)
    parts = list(model.parameters())
    optimizers = [torch.optim.SGD(parts[:3], lr=0.1), torch.optim.SGD(parts[3:], lr=0.1)]
    optimizers.append(torch.optim.SGD(other.parameters(), lr=0.1))
    with shadow(model, modules={"optimizer": own_step}) as probe:
        language_step(model, 0)
        for optimizer in optimizers:
            optimizer.step()
        probe.step()
    assert probe.layers == ("optimizer", "optimizer#1")
    assert not probe.findings


@pytest.mark.parametrize("by_name", [False, True])
def test_a_step_that_trains_in_its_closure_is_measured_and_stays_as_it_was(by_name):
    """As Lightning's does: what the gradients were before the step is not what it takes."""
    ends = []
    for watched in (False, True):
        torch.manual_seed(0)
        model = Language()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

        def closure(model=model, optimizer=optimizer):
            optimizer.zero_grad()
            return language_step(model, 0)

        given = {"closure": closure} if by_name else {}
        candidates = {"optimizer": fused} if watched else {}
        with ExitStack() as stack:
            probe = stack.enter_context(shadow(model, modules=candidates)) if watched else None
            for _ in range(3):
                loss = optimizer.step(*(() if by_name else (closure,)), **given)
                assert loss is not None
                if probe is not None:
                    probe.step()
            if probe is not None:
                found = judged(probe, "optimizer")["update_0"]
                assert not probe.findings
        ends.append([x.detach().clone() for x in model.parameters()])
    assert all(torch.equal(x, y) for x, y in zip(*ends, strict=True))
    assert 0 < found[0] < 2
    assert abs(found[1]) < 1e-6


def test_an_optimizer_needs_a_function_and_a_step_that_calls_its_closure_once():
    with pytest.raises(ValueError, match=r"modules\['optimizer'\] must be a function of an optimi"):
        shadow(Language(), modules={"optimizer": "compiled"}).__enter__()
    model = Language()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
    with shadow(model, modules={"optimizer": own_step}) as probe:
        optimizer.step(lambda: language_step(model, 0))
        probe.step()
    assert ("optimizer", "not looked at: its step calls its closure more than once") in [
        found[1:] for found in probe.findings
    ]


def test_a_candidate_that_calls_step_steps_the_copy_and_hooks_see_the_runs_own_step_alone():
    """A scheduler binds the run's own step to the optimizer, which the copy must not keep."""
    found = judged(_watched(lambda optimizer: optimizer.step(), scheduled=True), "optimizer")
    assert all(ratio == 1.0 for ratio, _ in found.values())
    seen = []
    handle = register_optimizer_step_pre_hook(lambda *_: seen.append(1))
    try:
        _watched(own_step, steps=2)
    finally:
        handle.remove()
    assert len(seen) == 2


class Holds(torch.optim.Optimizer):
    """Steps by another optimizer of the same parameters, as SAM and Lookahead do."""

    def __init__(self, parameters):
        super().__init__(list(parameters), {"lr": 1e-2})
        self.base = torch.optim.AdamW(self.param_groups)
        self.param_groups = self.base.param_groups

    def step(self, closure=None):
        self.base.step()


class KeepsItsOwn(torch.optim.Optimizer):
    """Keeps its parameters, momenta and count beside groups and state."""

    def __init__(self, parameters):
        super().__init__(list(parameters), {"lr": 1e-2})
        self.trained = self.param_groups[0]["params"]
        self.momenta = [torch.zeros_like(x) for x in self.trained]
        self.count = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.count += 1
        for x, momentum in zip(self.trained, self.momenta, strict=True):
            momentum.mul_(0.9).add_(x.grad)
            x.sub_(momentum, alpha=1e-2 / self.count)


@pytest.mark.parametrize("kind", [Holds, KeepsItsOwn])
def test_what_an_optimizer_keeps_beside_its_state_stays_the_runs_own(kind):
    def trained(candidate):
        torch.manual_seed(0)
        model = Language()
        optimizer = kind(model.parameters())
        probe = None
        with ExitStack() as ends:
            if candidate:
                modules = {"optimizer": candidate}
                probe = ends.enter_context(shadow(model, modules=modules))
            for step in range(3):
                optimizer.zero_grad()
                language_step(model, step)
                optimizer.step()
                if probe:
                    probe.step()
        return list(model.state_dict().values()), probe

    def doubled(optimizer):
        before = [x.clone() for group in optimizer.param_groups for x in group["params"]]
        own_step(optimizer)
        params = [x for group in optimizer.param_groups for x in group["params"]]
        with torch.no_grad():
            for x, y in zip(params, before, strict=True):
                x.mul_(2).sub_(y)

    alone, _ = trained(None)
    for candidate, expected in ((own_step, 0.0), (doubled, 1.0)):
        watched, probe = trained(candidate)
        assert all(map(torch.equal, alone, watched))
        assert not probe.findings
        gain = judged(probe, "optimizer")["update_0"][1]
        assert abs(gain - expected) < 1e-4


@pytest.mark.parametrize("others", [{}, {"lm_head": "emulated:bf16"}], ids=["alone", "with others"])
def test_a_first_step_that_a_scaler_of_gradients_skips_is_told_and_the_next_is_measured(others):
    torch.manual_seed(0)
    model = Language()
    optimizer, scaler = _two_groups(model), torch.amp.GradScaler("cpu")
    seen = []
    with shadow(model, modules={"optimizer": own_step} | others) as probe:
        for step in range(2):
            optimizer.zero_grad()
            loss = language_loss(model, step)
            scaler.scale(loss * float("inf") if step == 0 else loss).backward()
            scaler.step(optimizer)
            scaler.update()
            probe.step()
            seen.append("optimizer" in {name.split("/")[1] for name in probe.metrics})
    assert seen == [False, True]
    texts = [text for step, layer, text in probe.findings if (step, layer) == (0, "optimizer")]
    assert len(texts) == 1
    assert texts[0].startswith("not seen: no optimizer of the model made a step")
