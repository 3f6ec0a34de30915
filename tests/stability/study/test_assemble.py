"""A run computes in the precision, layers and one device that its config names."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from attention_kernels import round_to
from attention_kernels.formats import FORMATS, format_named
from attention_kernels.rounding import DTYPES
from stability.analysis.intervals import paired_interval
from stability.analysis.ladder import ladder_of
from stability.analysis.study_records import read_study
from stability.config.arms import expand
from stability.config.convert import ConfigError
from stability.config.load import load_study
from stability.config.schema import AttentionConfig
from stability.model.precision import EmulatedLinear
from stability.probe.attention_registry import with_input_format
from stability.records.manifest import read_manifest
from stability.records.metric_log import read_metrics
from stability.records.paths import RunPaths
from stability.records.run_files import RunFiles
from stability.study.assemble import assemble, load_data, make_trainer

# the scaler leaves the first updates of a narrow format out
pytestmark = pytest.mark.filterwarnings("ignore:Detected call of")
NATIVE = {
    "64-true": torch.float64,
    "32-true": torch.float32,
    "bf16-mixed": torch.bfloat16,
    "bf16-true": torch.bfloat16,
    "16-mixed": torch.float16,
}
EMULATED = ["fp16", "bf16", "e4m3-saturate", "e5m2", "e8m3"]


def _trainer(config, folder):
    return make_trainer(config, RunFiles.unnamed(folder), [], [])


def _seen(write_study, tmp_path, precision, attention=None):
    """Train two steps; return what one linear layer and its attention were given and gave."""
    base = load_study(write_study(), {"train.steps": "2"}).base
    config = replace(base, precision=precision, probe=replace(base.probe, every=0))
    if attention:
        config = replace(config, attention=attention)
    parts, seen = assemble(config), {}

    def look(module, arguments, out):
        seen["out"] = out.detach()
        out.register_hook(lambda grad: seen.update(dout=grad.detach()))

    parts.model.blocks["layer_1"].mlp_up.register_forward_hook(look)
    inner = parts.model.attention[0]

    def attend(q, k, v, **mask):
        out = inner(q, k, v, **mask)
        seen.update(q=q.detach(), attended=out.detach())
        return out

    parts.model.attention = (attend, *parts.model.attention[1:])
    trainer = _trainer(config, tmp_path)
    trainer.fit(parts.module, datamodule=load_data(config))
    seen["weight"] = parts.model.blocks["layer_1"].mlp_up.weight.detach()
    seen["plugin"] = trainer.precision_plugin
    return seen


@pytest.mark.parametrize("precision", NATIVE)
def test_a_native_precision_is_the_dtype_of_its_tensors(write_study, tmp_path, precision):
    seen = _seen(write_study, tmp_path, precision)
    assert {seen[name].dtype for name in ("out", "dout", "q", "attended")} == {NATIVE[precision]}
    stored = torch.float32 if precision.endswith("mixed") else NATIVE[precision]
    assert seen["weight"].dtype == stored


@pytest.mark.parametrize("name", EMULATED)
def test_an_emulated_precision_is_the_grid_of_its_tensors(write_study, tmp_path, name):
    seen = _seen(write_study, tmp_path, f"emulated:{name}")
    for what in ("out", "q", "attended"):
        x = seen[what]
        assert x.dtype == torch.float32
        assert torch.equal(round_to(x, name), x), what
        assert not torch.equal(round_to(x, f"e5m{1 if name == 'e5m2' else 2}"), x), what
    weight = seen["weight"]
    assert not torch.equal(round_to(weight, name), weight), "weights themselves stay FP32"


@pytest.mark.parametrize("precision", ["16-mixed", "emulated:fp16", "emulated:e4m3-saturate"])
def test_a_narrow_range_has_a_loss_scaler_that_steps(write_study, tmp_path, precision):
    scaler = _seen(write_study, tmp_path, precision)["plugin"].scaler
    assert scaler.is_enabled()
    assert scaler.state_dict()["_growth_tracker"] + (scaler.get_scale() < 65536) >= 1


@pytest.mark.parametrize("precision", ["bf16-mixed", "emulated:bf16", "emulated:e8m3"])
def test_a_wide_range_has_none(write_study, tmp_path, precision):
    assert _seen(write_study, tmp_path, precision)["plugin"].scaler is None


def test_a_gradient_beyond_a_saturating_format_shows_so_that_the_scaler_backs_off():
    x = torch.ones(2, 3, requires_grad=True)
    weight = torch.ones(4, 3, requires_grad=True)
    with EmulatedLinear(format_named("e4m3-saturate")):
        out = torch.nn.functional.linear(1000 * x, weight)
    assert out.max() == 448
    out.backward(torch.full_like(out, 1e5))
    assert not torch.isfinite(x.grad).any()
    assert not torch.isfinite(weight.grad).any()
    told = with_input_format(AttentionConfig(implementation="flash"), format_named("e4m3-saturate"))
    assert told.numerics["output"] == "e4m3-saturate"
    assert told.numerics["gradients"] == told.numerics["ds"] == "e4m3"


def test_an_overflow_leaves_the_update_out_and_halves_the_scale(write_study, tmp_path):
    base = load_study(write_study(), {"train.steps": "1"}).base
    config = replace(base, precision="16-mixed", probe=replace(base.probe, every=0))
    parts = assemble(config)
    before = {name: value.clone() for name, value in parts.model.state_dict().items()}
    trainer = _trainer(config, tmp_path)
    trainer.precision_plugin.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    trainer.fit(parts.module, datamodule=load_data(config))
    assert trainer.precision_plugin.scaler.get_scale() == 2.0**39
    after = parts.model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_emulated_is_native_where_the_sums_are_exact(name):
    """Small integers, in sums that FP32 holds exactly in any order, so only rounding is left.

    The gradient has 13 bits, more than either format keeps.
    """
    dice = torch.Generator().manual_seed(3)
    x, weight, bias = (
        torch.randint(-40, 40, shape, generator=dice).float()
        for shape in ((5, 7, 24), (16, 24), (16,))
    )
    dout = torch.randint(-5000, 5000, (5, 7, 16), generator=dice) / 128
    found = []
    for emulated in (False, True):
        leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
        context = (
            EmulatedLinear(FORMATS[name]) if emulated else torch.autocast("cpu", dtype=DTYPES[name])
        )
        with context:
            out = torch.nn.functional.linear(*leaves)
        out.backward(dout.to(out.dtype))  # the emulation rounds it itself
        found.append([out.float(), *(leaf.grad for leaf in leaves)])
    for native, emulated in zip(*found, strict=True):
        assert torch.equal(native, emulated)
    assert not torch.equal(found[1][0], torch.nn.functional.linear(x, weight, bias)), "rounds"


def test_an_attention_that_can_not_be_told_a_format_is_refused(write_study):
    base = load_study(write_study()).base
    sdpa = replace(base.attention, implementation="sdpa")
    with pytest.raises(ValueError, match=r"must be flash or baseline .* emulated, got 'sdpa'"):
        assemble(replace(base, precision="emulated:fp16", attention=sdpa))
    compiled = replace(base.train, compile="eager")
    with pytest.raises(ValueError, match=r"train.compile must be empty with an emulated"):
        assemble(replace(base, precision="emulated:fp16", train=compiled))


@pytest.mark.long
def test_emulated_and_native_fp16_drift_alike(write_study, run_tiny, tmp_path):
    def edit(content):
        content["base"]["precision"] = "32-true"
        content["base"]["train"]["steps"] = 4
        content["base"]["probe"] = {"every": 0}
        content["arms"] = {
            "baseline": {},
            "native": {"precision": "16-mixed"},
            "emulated": {"precision": "emulated:fp16"},
            "wrong": {"precision": "emulated:bf16"},
        }
        content.update(seeds=[0, 1, 2, 3, 4], yardstick="native")

    run_tiny(load_study(write_study(edit)), tmp_path)
    ladder = ladder_of(read_study(tmp_path / "tiny"))
    intervals = {
        arm: paired_interval(ladder.row(arm).ratio.early.per_seed, level=0.9)
        for arm in ("emulated", "wrong")
    }
    assert intervals["emulated"].low <= 1 <= intervals["emulated"].high
    assert 0.8 < intervals["emulated"].mean < 1.25
    assert intervals["wrong"].low > 2, "the test can tell BF16 from FP16"


HARSH = {"implementation": "flash", "profile": "all_bf16"}


def _model(write_study, **attention):
    def edit(content):
        content["arms"] = {"baseline": {}, "part": {"attention": {**HARSH, **attention}}}
        content["yardstick"] = ""
        content["base"]["probe"]["every"] = 0
        content["base"]["precision"] = "32-true"

    arms = {arm.name: arm.config for arm in expand(load_study(write_study(edit), None))}
    torch.manual_seed(0)
    return [assemble(arms[name]).model for name in ("baseline", "part")]


def _step(model):
    tokens = torch.arange(32).view(1, 32)
    logits = model(tokens)
    logits.square().mean().backward()
    return logits.detach(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("direction", ["forward", "backward", "both"])
def test_a_direction_changes_the_output_or_the_gradients(write_study, direction):
    own, part = (_step(model) for model in _model(write_study, direction=direction))
    assert torch.equal(own[0], part[0]) == (direction == "backward")
    name = "blocks.layer_0.query.weight"
    assert not torch.equal(own[1][name], part[1][name])


def test_only_the_named_layer_computes_otherwise(write_study):
    own, part = _model(write_study, layers=["layer_1"])
    seen = []
    for model in (own, part):
        streams = []
        for block in model.blocks.values():
            block.register_forward_hook(lambda m, i, out, to=streams: to.append(out.detach()))
        _step(model)
        seen.append(streams)
    (own_first, own_last), (part_first, part_last) = seen
    assert torch.equal(own_first, part_first)
    assert not torch.equal(own_last, part_last)


@pytest.mark.slow
def test_a_study_of_parts_trains_and_probes_the_changed_layers_alone(
    write_study, run_tiny, tmp_path
):
    def edit(content):
        content["arms"] = {
            "baseline": {},
            "upper": {"attention": {**HARSH, "layers": ["layer_1"]}},
            "backward": {"attention": {**HARSH, "direction": "backward"}},
        }
        content.update(seeds=[0], yardstick="")

    run_tiny(load_study(write_study(edit), None), tmp_path)
    hashes = set()
    for arm, layers in (("upper", {"layer_1"}), ("backward", {"layer_0", "layer_1"})):
        run = RunPaths.for_run(tmp_path / "tiny", arm, 0)
        manifest = read_manifest(run.manifest)
        assert manifest.state == "finished"
        assert manifest.axis == "attention"
        hashes.add(manifest.hashes["final_weights"])
        names = [name for name in read_metrics(run.metrics) if name.startswith("deviation/")]
        assert {name.split("/")[1] for name in names} == layers
    assert len(hashes) == 2


def test_no_such_layer_and_a_partial_base_are_refused(write_study):
    with pytest.raises(
        ValueError, match=r"attention.layers must match one of layer_0, layer_1, go"
    ):
        _model(write_study, layers=["layer_7"])

    def partial_base(content):
        content["base"]["attention"]["layers"] = ["layer_0"]

    with pytest.raises(ConfigError, match="layers and direction belong to an arm"):
        load_study(write_study(partial_base), None)


def test_an_unknown_compiler_is_refused_before_anything_is_written(write_study, run_tiny, tmp_path):
    def misspelled(content):
        content["base"]["train"]["compile"] = "inductr"

    with pytest.raises(
        ValueError, match=r"^train.compile must be a backend of .*, got 'inductr'; nearest: induct"
    ):
        run_tiny(load_study(write_study(misspelled)), tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


ROOT = Path(__file__).parents[3]

TRAIN = """
import sys, warnings
from pathlib import Path

from stability.config.load import load_study
from tests.conftest import run_quietly

warnings.simplefilter("error")
warnings.filterwarnings("ignore", ".isinstance.treespec, LeafSpec.. is deprecated", FutureWarning)
print(run_quietly(load_study(Path(sys.argv[1]), None), Path(sys.argv[2])).ended)
"""


@pytest.mark.long
def test_a_study_trains_without_a_warning_where_srun_is_on_the_path(write_study, tmp_path):
    srun = tmp_path / "bin" / "srun"
    srun.parent.mkdir()
    srun.write_text("#!/bin/sh\nexit 1\n")
    srun.chmod(0o755)

    def one_short_run(content):
        content["arms"], content["seeds"] = {"baseline": {}}, [0]
        content["yardstick"] = ""
        content["base"]["train"]["steps"] = 2

    command = [sys.executable, "-c", TRAIN, str(write_study(one_short_run)), str(tmp_path / "runs")]
    path = os.pathsep.join([str(srun.parent), os.environ["PATH"]])
    trained = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env={**os.environ, "PATH": path}
    )
    assert trained.returncode == 0, trained.stderr
    assert trained.stdout == "[('baseline', 0, 'finished', '')]\n"
