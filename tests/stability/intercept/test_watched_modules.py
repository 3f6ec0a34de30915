"""What `shadow(modules=...)` leaves alone, tells, refuses and writes down."""

import copy
import random
import shutil
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from stability import shadow
from stability.analysis.probe_answer import answer_of_probe
from stability.analysis.probe_records import read_probe
from stability.cli.main import main
from tests.stability.intercept.module_models import (
    MLP,
    Language,
    Norm,
    batch,
    judged,
    language_step,
    look,
    rewritten_norm,
    train,
)


class _Part(nn.Module):
    """Language with one part more, in front of its head."""

    def __init__(self, part):
        super().__init__()
        self.part = part
        self.language = Language()

    def forward(self, tokens):
        x = self.part(self.language.embedding(tokens))
        return self.language.lm_head(x[0] if isinstance(x, tuple) else x)


class Counts(nn.Module):
    """Keeps state of every kind; the second call gives another result if `shows`."""

    def __init__(self, shows=False):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(32))
        self.register_buffer("seen", torch.zeros(()))
        self.calls, self.sums, self.shows = 0, [], shows

    def forward(self, x):
        self.calls += 1
        self.sums.append(float(x.detach().sum()))
        self.seen.add_(1)
        return x * self.weight * (self.calls if self.shows else 1)


class Spreads(nn.Module):
    def forward(self, x):
        return x * 2, {"scale": 2.0}, object()


@pytest.mark.parametrize(
    ("part", "text"),
    [
        (nn.Dropout(0.5), "not looked at: it draws random numbers, e.g. for dropout, and"),
        (nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.1)), "not looked at: it draws random numb"),
        (nn.Sequential(nn.Linear(32, 32), nn.ReLU(True)), "not looked at: it writes into its inp"),
        (Spreads(), "out_2, a object, is not compared: it is no tensor"),
    ],
    ids=["dropout", "inside", "in-place", "no tensor"],
)
def test_what_cannot_be_repeated_is_told_by_name(part, text):
    glob = "part.1" if "writes" in text else "part"
    probe = look({glob: "emulated:bf16"}, _Part(part))
    found = [found for _, layer, found in probe.findings if layer == glob]
    assert found[0].startswith(text)


def test_state_of_a_module_stays_the_runs_own_and_a_result_that_depends_on_it_is_told():
    model = _Part(Counts())
    with shadow(model, modules={"part": lambda m, x: x * m.weight}) as probe:
        for step in range(3):
            language_step(model, step)
            probe.step()
        assert model.part.calls == 3
        assert len(model.part.sums) == 3
        assert model.part.seen == 3
        assert not probe.findings
        assert judged(probe, "part")["dweight"][0] <= 1
    probe = look({"part": "emulated:bf16"}, _Part(Counts(shows=True)))
    assert not probe.findings, "its first call is made again as the first"
    model = _Part(Counts(shows=True))
    outside = []
    model.part.forward = lambda x: outside.append(1) or x * len(outside)
    probe = look({"part": "emulated:bf16"}, model)
    ((_, layer, text),) = probe.findings
    assert (layer, text.split(":")[0]) == ("part", "not measured")
    assert "it gives another out" in text
    assert not probe.metrics


class Decays(nn.Module):
    """Its result depends on a buffer that it changes."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x):
        out = x * self.scale.clone()
        self.scale.mul_(0.5)
        return out


def test_buffers_are_repeated_with_as_they_were_before_the_call():
    model = _Part(Decays())
    with shadow(model, modules={"part": "emulated:bf16"}) as probe:
        for step in range(2):
            language_step(model, step)
            probe.step()
    assert model.part.scale == 0.25
    assert not probe.findings
    assert judged(probe, "part")["out"] == (1.0, 0.0)


def test_a_hook_of_the_users_own_sees_each_call_once():
    model, seen = Language(), []
    for part in (model.layers[0].mlp, model.layers[0].mlp.gate):
        part.register_forward_hook(lambda m, args, out: seen.append(m))
    look({"*.mlp": "emulated:e4m3"}, model)
    assert seen == [model.layers[0].mlp.gate, model.layers[0].mlp]


def _one_nan(module, x):
    bad = torch.zeros_like(x)
    bad[0, 0, 0] = torch.nan
    return rewritten_norm(module, x) + bad


@pytest.mark.parametrize(
    ("candidate", "text"),
    [
        (lambda m: m, "<lambda>: TypeError: "),
        (lambda m, x: x[..., :-1], "<lambda>: BadResultError: returned out (2, 16, 31) torch.f"),
        (
            lambda m, x: x.double(),
            "<lambda>: BadResultError: returned out (2, 16, 32) torch.f",
        ),
        (lambda m, x: (x, x), "<lambda>: BadResultError: returned out_0, out_1, expected out"),
        (lambda m, x: x.detach(), "<lambda>: BadResultError: out carries no gradient"),
        (lambda m, x: x.clone(), "<lambda>: BadResultError: no gradient reaches weight"),
        (_one_nan, "1 values of out not finite"),
    ],
    ids=["arguments", "shape", "dtype", "number", "detached", "weight", "nan"],
)
def test_a_candidate_that_does_not_fit_is_a_finding_and_the_run_goes_on(candidate, text):
    torch.manual_seed(0)
    model = Language()
    twin = copy.deepcopy(model)
    with shadow(twin, modules={"norm": candidate}) as probe:
        watched = train(twin, 1, probe=probe)
    found = next(found for _, layer, found in probe.findings if layer == "norm")
    assert text in found
    assert all(torch.equal(x, watched[name]) for name, x in train(model, 1).items())


def test_a_candidate_that_writes_and_draws_random_numbers_does_not_reach_the_run():
    def writes(module, x):
        with torch.no_grad():
            x.zero_()
            module.weight.zero_()
        module.eps = 7.0
        return x * module.weight + 0 * torch.rand_like(x)

    torch.manual_seed(0)
    model = Language(dropout=0.1)
    twin = copy.deepcopy(model)
    with shadow(twin, modules={"*norm": writes}) as probe:
        watched = train(twin, probe=probe)
    assert all(torch.equal(x, watched[name]) for name, x in train(model).items())
    assert twin.norm.eps == model.norm.eps


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            {"modules": {"*.mpl": "compiled"}},
            r"modules must be globs of module names, got '\*.mpl",
        ),
        (
            {"modules": {"*.mlp": "compile"}},
            r"modules\['\*.mlp'\] must be one of emulated:<f",
        ),
        ({"modules": {"*.mlp": "emulated:e9"}}, r"modules\['\*.mlp'\]: precision: "),
        (
            {"modules": {"*.mlp": "recipe:fp8_delayed"}},
            r"must have scales of the values at hand, got 'recipe:fp8_delayed': .*fp8_current",
        ),
        ({"modules": {"*.mlp": "recipe:mxpf8"}}, r"precision: recipe must .* nearest: mxfp8"),
        ({"modules": {"*.mlp": "math:nosuch"}}, r"must be a function that math has, got 'nosuch'"),
        ({"modules": {"*.mlp": "no.such:f"}}, r"must be MODULE:FUNCTION of a module that imports"),
        ({"modules": {"*.mlp": 3}}, r"must be text or a function, got int"),
        ({"modules": {"*.mlp": "compiled"}, "replace": ["*"]}, r"candidate must be given for repl"),
        ({"modules": {"nosuch+loss": "compiled"}}, r"got 'nosuch', which matches none"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_anything_runs(arguments, text):
    with pytest.raises(ValueError, match=text):
        shadow(Language(), **arguments).__enter__()


def test_a_compiled_model_is_refused_by_name_before_it_trains():
    model = Language()
    model.layers[0].compile(backend="eager")
    with pytest.raises(ValueError, match=r"gradient_every or modules is given, got Block.compile"):
        shadow(model, modules={"*.mlp": "compiled"}).__enter__()
    model = Language()
    with shadow(model, modules={"*.mlp": "emulated:bf16"}):
        model.layers[1].compile(backend="eager")
        with pytest.raises(ValueError, match=r"got Block.compile\(\) at layers.1"):
            language_step(model, 0)


def test_what_is_not_called_is_told_and_a_glob_of_such_alone_is_an_error():
    model = Language()
    model.spare_norm = Norm(32)
    probe = look(
        {"batch_norm": "emulated:bf16", "*norm": rewritten_norm, "*": "emulated:bf16"}, model
    )
    told = {layer: text for _, layer, text in probe.findings}
    assert told["spare_norm"].startswith("not seen: it was not called")
    assert "layers" not in told
    with shadow(model, modules={"spare*": rewritten_norm}) as probe:
        language_step(model, 0)
        with pytest.raises(ValueError, match="modules must be globs of modules, functions, los"):
            probe.step()


def test_without_candidate_no_attention_is_looked_at_and_none_need_be_there():
    model = nn.Sequential(nn.Embedding(37, 32), MLP(32), nn.Linear(32, 37))
    probe = look({"1": "emulated:bf16"}, model)
    assert probe.layers == ("1",)
    assert not probe.findings
    probe = look({"norm": rewritten_norm})
    assert probe.layers == ("norm",)
    with pytest.raises(ValueError, match="has no attention that could be seen"):
        look({"1": "emulated:bf16"}, model, candidate="flash:fa2")


def test_each_shadow_has_its_own_name_where_a_probe_has_several():
    probe = look({"*.mlp": "emulated:e4m3"}, candidate="flash:fa2")
    shadows = {name.split("/")[2] for name in probe.metrics}
    assert shadows == {"flash_fa2", "emulated_e4m3"}


def test_evaluation_and_backward_off_measure_the_forward_alone():
    model = Language().eval()
    with shadow(model, modules={"*.mlp": "emulated:bf16"}, evaluation=True) as probe:
        with torch.no_grad():
            model(batch(0)[:, :-1])
        probe.step()
    assert {name.split("/")[2] for name in probe.metrics} == {"out"}
    probe = look({"*.mlp": "emulated:bf16"}, backward=False)
    assert {name.split("/")[2] for name in probe.metrics} == {"out"}
    with shadow(model, modules={"*.mlp": "emulated:bf16"}) as probe:
        model(batch(0)[:, :-1])
        with pytest.raises(ValueError, match="no call of step 0 was one of training"):
            probe.step()


def test_frozen_weights_have_no_figure_and_only_due_steps_are_looked_at():
    model = Language()
    model.layers[0].mlp.gate.requires_grad_(False)
    steps = []
    given = {"modules": {"*.0.mlp": "emulated:bf16"}, "sinks": [lambda step, _: steps.append(step)]}
    with shadow(model, steps=[0, 2], **given) as probe:
        for step in range(4):
            language_step(model, step)
            probe.step()
        assert "dgate.weight" not in judged(probe, "layers.0.mlp")
        assert "dup.weight" in judged(probe, "layers.0.mlp")
    assert steps == [0, 2]


def test_records_are_judged_and_shown_as_an_attentions_are(tmp_path, capsys):
    torch.manual_seed(0)
    model = Language()
    modules = {"*.mlp": "emulated:e4m3", "layers.*norm": rewritten_norm}
    with shadow(model, modules=modules, records=tmp_path) as probe:
        train(model, 5, torch.bfloat16, probe=probe)
    probed = read_probe(tmp_path)
    assert probed.record.shadows["emulated:e4m3"]["modules"] == ["*.mlp"]
    assert {"out", "dx", "dgate.weight", "dweight"} <= {*probed.compared}
    answer = answer_of_probe(probed)
    assert not answer.holds
    assert not answer.failures
    told = [line for line in answer.places if "error ratio" in line]
    assert told
    assert all(line.startswith("emulated_e4m3: every layer") for line in told), told
    assert "dgate.weight" in told[0]
    assert main(["show", str(tmp_path)]) == 1, "it fails, and says so"
    shown = capsys.readouterr().out
    assert "emulated_e4m3" in shown
    assert "rewritten_norm" in shown
    assert main(["report", str(tmp_path)]) == 0
    page = next(tmp_path.glob("*.html")).read_text()
    assert "Deviation layer by layer" in page
    assert "dgate.weight" in page


def _compiled_model():
    """Return a probe of three steps in which parts were repeated by torch.compile, and checked."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    model = Language(depth=1)
    with shadow(model, modules={"*.mlp": "compiled", "norm": "compiled"}) as probe:
        train(model, 3, probe=probe)
        assert not probe.findings
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
        for layer in ("layers.0.mlp", "norm"):
            found = judged(probe, layer)
            assert len(found) > 2
            assert max(ratio for ratio, _ in found.values()) < 2


def test_a_module_is_compiled_once_for_all_looks(monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    _compiled_model()


class Scales(nn.Module):
    def __init__(self, by):
        super().__init__()
        self.by = by

    def forward(self, x):
        return x * (1 + self.by / 100)


def test_more_variants_of_a_module_than_torch_would_compile_are_all_compiled(monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = _Part(nn.Sequential(*(Scales(i) for i in range(12))))
    probe = look({"part.*": "compiled"}, model)
    assert not probe.findings
    # one of the first value, one where it was seen to change, and one for each that followed
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs == 12


@pytest.mark.slow  # Inductor takes 10 seconds
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
@pytest.mark.skipif(not shutil.which("g++"), reason="Inductor needs g++ on a CPU")
def test_what_inductor_makes_of_a_module_passes():
    _compiled_model()


class _Sums:
    def __init__(self):
        self.sums, self.calls = [torch.zeros(32)], 0


class KeepsTensors(nn.Module):
    """Adds to tensors that are no buffers, and its result depends on one of them."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(32))
        self.mean = torch.zeros(32)
        self.kept = {"sums": [torch.zeros(32)]}
        self.sums = _Sums()
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x):
        self.mean.mul_(0.9).add_(x.detach().mean((0, 1)))
        for sums in (self.kept["sums"], self.sums.sums):
            sums[0].add_(x.detach().sum((0, 1)))
        self.sums.calls += 1
        noise = torch.rand(32, generator=self.generator)
        return x * self.weight + 0.1 * self.mean + 0.1 * noise


def _trained_with_kept_tensors(modules):
    torch.manual_seed(0)
    model = _Part(KeepsTensors())
    probe = None
    if modules:
        with shadow(model, modules=modules) as probe:
            weights = train(model, probe=probe)
    else:
        weights = train(model)
    part = model.part
    kept = part.mean, part.kept["sums"][0], part.sums.sums[0], torch.tensor(part.sums.calls)
    return [*weights.values(), *kept, part.generator.get_state()], probe


def test_tensors_that_are_no_buffers_stay_the_runs_own_wherever_a_module_keeps_them():
    def moves_all(module, x):
        for kept in (module.mean, module.kept["sums"][0], module.sums.sums[0]):
            kept.add_(7.0)
        return x * module.weight

    alone, _ = _trained_with_kept_tensors({})
    for candidate in ("emulated:bf16", moves_all):
        watched, probe = _trained_with_kept_tensors({"part": candidate})
        assert all(map(torch.equal, alone, watched))
        assert not probe.findings
        assert judged(probe, "part")["dweight"][0] <= 1, "it is made again with what it was"


class _DrawsOnTheHost(nn.Module):
    def forward(self, x):
        return x * (1 + random.random() + np.random.rand())


def test_draws_of_python_and_numpy_are_told_and_are_the_runs_own():
    def draws(module, x):
        return x * random.random() * np.random.rand()

    def ends(part, candidate):
        random.seed(0)
        np.random.seed(0)
        probe = look({"part": candidate}, _Part(part))
        return probe, (random.random(), np.random.rand())

    _, alone = ends(Norm(32), "emulated:bf16")
    _, watched = ends(Norm(32), draws)
    assert watched == alone
    probe, _ = ends(_DrawsOnTheHost(), draws)
    ((_, layer, text),) = probe.findings
    assert layer == "part"
    assert text.startswith("not looked at: it draws random numbers")


@dataclass
class _Given:
    x: torch.Tensor
    scale: float = 2.0


class _TakesDataclass(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, given):
        return _Given(self.linear(given.x) * given.scale)


class _GivesDataclass(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = _TakesDataclass()

    def forward(self, x):
        return self.inner(_Given(x)).x


def test_tensors_in_a_dataclass_that_is_given_have_their_gradient_and_their_golden():
    def wrong(module, given):
        return _Given(module.linear(given.x) * given.scale * 1.01)

    found = {}
    for candidate in (wrong, "emulated:bf16"):
        probe = look({"part.inner": candidate}, _Part(_GivesDataclass()))
        assert not probe.findings
        found[candidate] = judged(probe, "part.inner")
        assert set(found[candidate]) == {"dx", "out_x", "dlinear.weight", "dlinear.bias"}
    assert all(abs(gain - 0.01) < 1e-4 for _, gain in found[wrong].values())


def test_where_nothing_was_called_no_nearest_name_is_made_up():
    model = Language()
    with shadow(model, modules={"loss": "compiled"}) as probe:
        model(torch.zeros(1, 8, dtype=torch.long)).sum().backward()
        with pytest.raises(ValueError, match=r"got 'loss', which .*; none was called at all$"):
            probe.step()
