"""Which calls count: those of training, at the steps asked for, in layers that are named."""

import copy
import pickle
import threading
import warnings

import pytest
import torch
from lightning.fabric import Fabric
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.module import _global_forward_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import _global_optimizer_post_hooks
from torch.optim.swa_utils import AveragedModel

from stability import shadow
from stability.intercept.layer_names import layer_names
from tests.stability.intercept.torch_models import (
    Decoder,
    Recomputed,
    tokens,
    train_step,
)


def _update(model, step):
    train_step(model, step)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= 0.01 * parameter.grad
                parameter.grad = None


def _evaluate(model, batch):
    model.eval()
    with torch.no_grad():
        model(tokens(batch)[:, :-1])
    model.train()


def _measured(evaluates):
    torch.manual_seed(0)
    model = Decoder()
    given = []
    with shadow(model, sinks=[lambda step, measured: given.append(measured.metrics)]) as probe:
        for step in range(3):
            if evaluates:
                _evaluate(model, 100 + step)
            _update(model, step)
            probe.step()
    assert not probe.findings
    return given


def test_an_evaluation_between_the_steps_is_not_what_is_measured():
    alone, beside = _measured(evaluates=False), _measured(evaluates=True)
    assert len(alone) == 3
    assert all("deviation/layers.2/dk/rel_fro" in metrics for metrics in beside)
    assert alone == beside


def test_a_step_of_evaluation_alone_is_told_and_looked_at_where_that_is_asked_for():
    model = Decoder()
    with shadow(model) as probe:
        _evaluate(model, 0)
        with pytest.raises(ValueError, match=r"step 0 was one of training .* evaluation=True"):
            probe.step()
    with shadow(model) as probe:
        _update(model, 0)
        probe.step()
        _evaluate(model, 1)
        probe.step()
    assert [(step, text[:40]) for step, _, text in probe.findings] == [
        (1, "no attention call of step 1 was one of t")
    ]
    with shadow(model, evaluation=True) as probe:
        _evaluate(model, 0)
        probe.step()
    assert "deviation/layers.0/out/rel_fro" in probe.metrics
    assert not probe.findings


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpointed_layers_backward_is_measured(reentrant):
    found = []
    for kind in (Decoder, Recomputed):
        torch.manual_seed(0)
        model = Recomputed()
        model.reentrant = reentrant
        if kind is Decoder:
            model.forward = lambda ids, m=model: m.head(_plain(m, ids))
        with shadow(model, "flash:all_bf16") as probe:
            train_step(model, 0)
            probe.step()
        assert not probe.findings
        assert probe.layers == ("layers.0", "layers.1", "layers.2")
        found.append(probe.metrics)
    assert found[0] == found[1]


def _plain(model, ids):
    x = model.embedding(ids)
    for layer in model.layers:
        x = x + layer(x)
    return x


def test_a_function_that_is_recomputed_outside_of_any_module_is_told():
    class Bare(nn.Module):
        def forward(self, x):
            q = x[:, None]
            attend = F.scaled_dot_product_attention
            return torch.utils.checkpoint.checkpoint(attend, q, q, q, use_reentrant=True)

    x = torch.randn(2, 5, 16, requires_grad=True)
    model = Bare()
    with shadow(model) as probe:
        model(x).sum().backward()
        with pytest.raises(
            ValueError, match=r"use_reentrant=True\) recomputes outside of any modu"
        ):
            probe.step()


def test_a_gradient_that_never_comes_is_a_finding():
    model = Decoder(depth=1)
    with shadow(model) as probe:
        model(tokens(0)[:, :-1])
        probe.step()
    assert (0, "layers.0", "dq, dk, dv not measured: no backward reached it") in probe.findings
    model.layers[0].qkv.requires_grad_(False)
    model.embedding.requires_grad_(False)
    model.norm.requires_grad_(False)
    with shadow(model) as probe:
        train_step(model, 0)
        probe.step()
    assert [text for _, _, text in probe.findings] == [
        "dq, dk, dv not measured: nothing before it is trained"
    ]


def test_steps_alone_are_those_looked_at():
    model, seen = Decoder(depth=1), []
    with shadow(model, steps=[1, 3], sinks=[lambda step, _: seen.append(step)]) as probe:
        for step in range(5):
            train_step(model, step)
            probe.step()
    assert seen == [1, 3]


def test_a_step_that_is_never_announced_is_told_at_the_next_forward():
    model = Decoder(depth=1)
    with shadow(model) as probe:
        train_step(model, 0)
        train_step(model, 1)  # a second micro-batch is no second step
        assert not probe.findings
        _update(model, 2)
        with pytest.warns(UserWarning, match=r"step\(\) was not called since"):
            _update(model, 3)
        _update(model, 4)
    assert [text.partition(" and ")[0] for _, _, text in probe.findings] == [
        "the weights were updated"
    ]


@pytest.mark.parametrize("kind", ["fused", "foreach", "for-loop"])
def test_a_forgotten_step_is_told_whatever_kernel_updates_the_weights(kind):
    """A fused update moves no version counter; it is the default of Hugging Face's Trainer."""
    model = Decoder(depth=1)
    options = {"fused": {"fused": True}, "foreach": {"foreach": True}}.get(kind, {"foreach": False})
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    with shadow(model) as probe:
        train_step(model, 0)
        optimizer.step()
        assert not probe.findings
        with pytest.warns(UserWarning, match=r"step\(\) was not called since"):
            train_step(model, 1)
    assert [layer for _, layer, _ in probe.findings] == ["model"]


def test_a_step_that_is_forgotten_later_is_told_where_none_is_due_either():
    model, other = Decoder(depth=1), Decoder(depth=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    of_another = torch.optim.SGD(other.parameters(), lr=0.1)
    with shadow(model, every=50) as probe:
        for step in range(3):
            train_step(model, step)
            of_another.step()
            optimizer.step()
            probe.step()
        train_step(model, 3)
        optimizer.step()
        of_another.step()
        of_another.step()
        train_step(model, 4)
        assert not probe.findings
        with pytest.warns(UserWarning, match=r"step\(\) was not called since"):
            optimizer.step()
    assert len(probe.findings) == 1
    assert not _global_optimizer_post_hooks


def test_an_evaluation_before_the_step_is_announced_is_no_forgotten_step():
    model = Decoder(depth=1)
    with shadow(model) as probe:
        for step in range(2):
            _update(model, step)
            _evaluate(model, 10)
            probe.step()
    assert not probe.findings


def test_after_an_error_of_step_no_forgotten_step_is_told():
    model = Decoder(depth=1)
    with shadow(model, replace=["head"]) as probe:
        _update(model, 0)
        with pytest.raises(ValueError, match="globs of layers with attention"):
            probe.step()


def test_a_step_that_is_never_announced_is_told_at_the_end():
    model = Decoder(depth=1)
    with pytest.warns(UserWarning, match=r"step\(\) was not called"), shadow(model, steps=[100]):
        _update(model, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with shadow(model, every=0, replace=["layers.*"]):
            _update(model, 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"replace": ["nosuch*"]}, r"replace must be globs of module names, got 'nosuch\*'"),
        ({"layers": ["layer.2"]}, r"layers must be globs .* got 'layer.2', .* nearest: layers.2"),
        ({"layers": ["layer.*.qvk"]}, r"got 'layer\.\*\.qvk', .* nearest: layers\.\*\.qkv, "),
    ],
)
def test_a_glob_that_matches_no_module_is_refused_before_anything_runs(arguments, message):
    with pytest.raises(ValueError, match=message):
        shadow(Decoder(), **arguments).__enter__()


@pytest.mark.parametrize("argument", ["replace", "layers"])
def test_a_glob_that_matches_no_attention_is_refused_after_the_first_step(argument):
    model = Decoder()
    with shadow(model, **{argument: ["head"]}) as probe:
        train_step(model, 0)
        with pytest.raises(ValueError, match=rf"{argument} must be globs of layers with attention"):
            probe.step()


class _PeftModel(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.base_model = inner

    def forward(self, ids):
        return self.base_model(ids)


def test_wrappers_have_no_place_in_names(tmp_path):
    peft = type("PeftModel", (_PeftModel,), {})
    plain = Decoder()
    names = set(layer_names(plain).values())
    for wrapped in (
        AveragedModel(plain),
        torch.compile(plain, backend="eager"),
        peft(plain),
        _ddp(plain, tmp_path),
        Fabric(accelerator="cpu", devices=1).setup(plain),
    ):
        assert set(layer_names(wrapped).values()) == names, type(wrapped)
    model = peft(_ddp(Decoder(), tmp_path))
    with shadow(model, replace=["layers.1"]) as probe:
        train_step(model, 0)
        probe.step()
    assert probe.layers == ("layers.0", "layers.1", "layers.2")
    assert "deviation/layers.1/dq/rel_fro" in probe.metrics
    torch.distributed.destroy_process_group()


def _ddp(model, folder):
    if not torch.distributed.is_initialized():
        store = torch.distributed.FileStore(str(folder / "store"), 1)
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    return DistributedDataParallel(model)


def test_a_copy_of_a_watched_model_carries_nothing_of_the_instrument():
    model = Decoder(depth=1)
    with shadow(model) as probe:
        average = AveragedModel(model)
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), average.module]
        train_step(model, 0)
        copies.append(copy.deepcopy(model.layers))
        probe.step()
        average.update_parameters(model)
        for other in copies[:3]:
            train_step(other, 0)
        train_step(model, 1)
        probe.step()
    assert probe.layers == ("layers.0",)
    assert not probe.findings
    for other in copies:
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in other.modules())


def test_a_call_of_a_copy_is_not_measured():
    model = Decoder(depth=1)
    other = copy.deepcopy(model)
    with shadow(model) as probe:
        train_step(other, 3)
        train_step(model, 0)
        probe.step()
    alone = copy.deepcopy(other)
    with shadow(alone) as twin:
        train_step(alone, 0)
        twin.step()
    assert probe.metrics == twin.metrics


def test_two_threads_may_run_the_model():
    model = Decoder()
    errors = []

    def work(batch):
        try:
            for _ in range(5):
                train_step(model, batch)
        except Exception as error:
            errors.append(error)

    with shadow(model, "flash:fa2") as probe:
        threads = [threading.Thread(target=work, args=(batch,)) for batch in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        probe.step()
    assert not errors
    assert probe.layers == ("layers.0", "layers.1", "layers.2")
    assert probe.metrics["deviation/layers.2/dq/rel_fro"] > 0


def test_a_thread_that_still_runs_the_model_at_the_end_leaves_no_mode_behind():
    model, entered, ended = Decoder(depth=1), threading.Event(), threading.Event()
    left = []

    def wait(*_):
        entered.set()
        ended.wait(10)

    model.norm.register_forward_hook(wait)

    def work():
        model(tokens(0)[:, :-1])
        left.append(torch._C._len_torch_function_stack())

    thread = threading.Thread(target=work)

    def end_too_early():
        with shadow(model, evaluation=True):
            thread.start()
            assert entered.wait(10)

    with pytest.raises(ValueError, match="Attention was not run in the step"):
        end_too_early()
    ended.set()
    thread.join()
    assert left == [0]
    assert not _global_forward_hooks


class _Interrupted(Decoder):
    def forward(self, ids):
        super().forward(ids)
        raise KeyboardInterrupt


def test_an_interrupt_leaves_no_mode_and_no_hook():
    model = _Interrupted(depth=1)
    with pytest.raises(KeyboardInterrupt), shadow(model):
        model(tokens(0))
    assert torch._C._len_torch_function_stack() == 0
    assert not _global_forward_hooks


def test_the_forward_after_an_interrupt_has_its_own_names():
    model = Decoder(depth=2)
    stops = [True]

    def stop(*_):
        if stops.pop():
            raise KeyboardInterrupt

    handle = model.layers[1].register_forward_pre_hook(stop)
    with shadow(model) as probe:
        with pytest.raises(KeyboardInterrupt):
            model(tokens(0)[:, :-1])
        handle.remove()
        q = torch.randn(1, 1, 4, 16)
        F.scaled_dot_product_attention(q, q, q)
        train_step(model, 0)
        assert torch._C._len_torch_function_stack() == 0
        probe.step()
    assert probe.layers[0] == "layers.0"
    assert "layers.1" in probe.layers


def test_nested_shadows_see_the_model_and_not_one_another():
    model = Decoder()
    with shadow(model, "sdpa") as outer, shadow(model, "sdpa") as inner:
        train_step(model, 0)
        inner.step()
        outer.step()
    assert inner.layers == outer.layers == ("layers.0", "layers.1", "layers.2")
    assert inner.metrics == outer.metrics
    assert inner.metrics["deviation/layers.2/dq/rel_fro"] == 0


class _ByName(nn.Module):
    """Calls SDPA by one of its names."""

    def __init__(self, name):
        super().__init__()
        self.linear, self.name = nn.Linear(16, 48), name

    def forward(self, x):
        q, k, v = (y[:, None] for y in self.linear(x).chunk(3, -1))
        return self.name(q, k, v, None, 0.0, True)[:, 0]


@pytest.mark.parametrize("name", ["function", "operator", "overload", "exported"])
def test_sdpa_is_seen_by_each_of_its_names(name):
    x = torch.randn(2, 5, 16)
    names = {
        "operator": torch.ops.aten.scaled_dot_product_attention,
        "overload": torch.ops.aten.scaled_dot_product_attention.default,
    }
    own = _ByName(names.get(name, F.scaled_dot_product_attention))
    model = nn.Sequential(own, nn.Linear(16, 16))
    if name == "exported":
        model[0] = torch.export.export(own, (x,)).module()
    model(x).square().sum().backward()
    plain = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    with shadow(model, "flash:golden", golden=True) as probe:
        model(x).square().sum().backward()
        probe.step()
    assert all(torch.equal(a, b.grad) for a, b in zip(plain, model.parameters(), strict=True))
    assert probe.layers == ("0",)
    for result in ("out", "dq", "dk", "dv"):
        assert probe.metrics[f"deviation/0/{result}/golden_baseline_rel_fro"] < 1e-5
    assert not probe.findings
