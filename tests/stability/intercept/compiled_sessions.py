"""Sessions on compiled models: run with and without `shadow`, and what each has to leave."""

import copy

import torch
from torch._dynamo import eval_frame
from torch._dynamo.utils import counters
from torch.nn import functional as F
from torch.nn.modules import module as torch_module

from stability import shadow
from tests.stability.intercept.torch_models import tokens, train_step

LAYERS = ("layers.0", "layers.1", "layers.2")


def compile_root(model):
    model.compile()
    return model


def compile_one(model):
    model.layers[1].compile()
    return model


def wrap_one(model):
    model.layers[1] = torch.compile(model.layers[1])
    return model


def run_session(model, compiled, probe=None, *, steps=5, step_of=train_step):
    """Train as a user does; return the weights, and how often Dynamo has compiled."""
    counters.clear()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(5)
    for step in range(steps):
        optimizer.zero_grad()
        step_of(compiled, step)
        optimizer.step()
        if probe is not None:
            probe.step()
    compilations = {name: dict(counters[name]) for name in ("frames", "stats")}
    return [x.detach().clone() for x in model.state_dict().values()], compilations


def assert_same_run(plain, watched):
    """Equal weights, and not one compilation more."""
    assert all(torch.equal(x, y) for x, y in zip(plain[0], watched[0], strict=True))
    frames, watched_frames = (one[1]["frames"] for one in (plain, watched))
    assert plain[1]["stats"] == watched[1]["stats"]
    # the first run of a process may compile functions of a library that are compiled once
    assert watched_frames.get("total", 0) <= frames.get("total", 0)


def compare_sessions(model, compile_model, *, inside=True, step_of=train_step, **options):
    """Train with and without `shadow`, and return the ended session."""
    twin = copy.deepcopy(model)
    plain = run_session(model, compile_model(model), step_of=step_of)
    torch.compiler.reset()
    compiled = None if inside else compile_model(twin)
    with shadow(twin, every=2, **options) as probe:
        compiled = compile_model(twin) if compiled is None else compiled
        watched = run_session(twin, compiled, probe, step_of=step_of)
    assert_same_run(plain, watched)
    assert_nothing_left()
    return probe


def assert_nothing_left():
    assert not torch_module._has_any_global_hook()
    assert torch_module._has_any_global_hook.__module__ == torch_module.__name__
    assert torch._C._len_torch_function_stack() == 0
    assert not hasattr(eval_frame._maybe_set_eval_frame, "stability_tells")
    assert not hasattr(torch._TorchCompileInductorWrapper.__call__, "__wrapped__")
    dump = torch._C._dispatch_dump("aten::_scaled_dot_product_flash_attention_for_cpu")
    assert "compiled_taps.py" not in dump


def told_of(probe):
    """Return the findings, but for the one that compiled graphs are not searched throughout."""
    return [(layer, text) for _, layer, text in probe.findings if "is written by hand" not in text]


def step_of_another_length(model, step):
    batch = tokens(step, length=(24, 17, 31, 9, 12)[step])
    F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()).backward()


def assert_seen(probe, layers=LAYERS):
    assert set(probe.layers) == set(layers)
    assert {one.layer: one.state for one in probe.coverage} == dict.fromkeys(layers, "seen")
    for layer in layers:
        for what in ("out", "dq", "dk", "dv"):
            assert probe.metrics[f"deviation/{layer}/{what}/golden_baseline_rel_fro"] < 1e-5
    assert not told_of(probe)
