"""The estimate is what a run can't do without: below what autograd keeps, and not far below it."""

import json
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stability.config.convert import from_dict
from stability.config.parallel import ParallelConfig
from stability.config.precision import emulated_format
from stability.config.schema import ArmConfig
from stability.model.lightning_module import next_token_loss
from stability.model.precision import EmulatedLinear
from stability.study.assemble import assemble
from stability.study.memory_estimate import (
    estimate_memory,
    kept_for_backward,
    parameter_count,
    weight_bytes,
)

SHAPE = {"depth": 2, "width": 64, "heads": 4, "context": 128, "vocab_size": 300}
UNWATCHED = {"every": 0}
FLASH = {"implementation": "flash"}


def _config(**changes) -> ArmConfig:
    content = {
        "model": SHAPE | changes.pop("model", {}),
        "train": {"batch_size": 3, "steps": 4, "accelerator": "cpu"} | changes.pop("train", {}),
        "probe": UNWATCHED,
        **changes,
    }
    return from_dict(ArmConfig, content, "a test")


def _bytes(config, name, until=4):
    parts = estimate_memory(config, until).parts
    return sum(part.bytes for part in parts if name in part.name)


LLAMA = {"builder": "llama", "kv_heads": 2}
OTHERS = {
    "builder": "huggingface",
    "options": {
        "config": {
            "model_type": "gpt2",
            "n_layer": 2,
            "n_embd": 64,
            "n_head": 4,
            "n_positions": 128,
            "vocab_size": 300,
            **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
            **dict.fromkeys(("bos_token_id", "eos_token_id")),
        }
    },
}


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"kv_heads": 2},
        {"qk_norm": True},
        {"depth": 3, "kv_heads": 1, "qk_norm": True},
        {**LLAMA, "qk_norm": True},
        {**LLAMA, "options": {"tied": True, "mlp_width": 100}},
        OTHERS,
    ],
)
@pytest.mark.parametrize(("precision", "width"), [("32-true", 4), ("64-true", 8)])
def test_the_parameters_are_those_of_the_model(shape, precision, width):
    config = _config(model=shape, precision=precision)
    weights = list(assemble(config).model.parameters())
    assert parameter_count(config.model) == sum(weight.numel() for weight in weights)
    assert weight_bytes(config) == sum(weight.nbytes for weight in weights)
    assert {weight.element_size() for weight in weights} == {width}


def _kept_by_autograd(config: ArmConfig) -> int:
    """Return the bytes of all that a training step keeps for its backward, each storage once."""
    model, seen = assemble(config).model, {}
    if config.precision == "bf16-true":
        model.to(torch.bfloat16)
    own = {weight.untyped_storage().data_ptr() for weight in model.parameters()}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage
        return tensor

    batch = torch.randint(0, 256, (config.train.batch_size, config.model.context + 1))
    is_lowered = config.precision.startswith(("bf16-mixed", "recipe:"))
    context = torch.autocast("cpu", torch.bfloat16, enabled=is_lowered)
    if config.precision.startswith("emulated:"):
        context = EmulatedLinear(emulated_format(config.precision))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), context:
        loss = next_token_loss(model(batch[:, :-1]), batch)
    assert loss.requires_grad
    return sum(storage.nbytes() for storage in seen.values())


NATIVE_ON_CPU = ["64-true", "32-true", "bf16-mixed", "bf16-true"]


@pytest.mark.parametrize(
    ("precision", "attention"),
    [
        *product(NATIVE_ON_CPU, ["baseline", "flash", "golden", "sdpa", "sdpa:math"]),
        *product(["emulated:e8m10"], ["baseline", "flash"]),
        *product(["bf16-mixed, *.mlp_*=fp32", "emulated:e4m3, *.mlp_*=bf16"], ["baseline"]),
        *product(["recipe:mxfp8", "bf16-mixed, *.mlp_*=recipe:nvfp4"], ["baseline"]),
    ],
)
def test_no_more_is_estimated_than_autograd_keeps_and_not_much_less(precision, attention):
    name, _, profile = attention.partition(":")
    config = _config(precision=precision, attention={"implementation": name, "profile": profile})
    kept = _kept_by_autograd(config)
    estimated = sum(part.bytes for part in kept_for_backward(config))
    assert 0.3 * kept < estimated <= kept


@pytest.mark.parametrize("precision", NATIVE_ON_CPU)
@pytest.mark.parametrize("shape", [LLAMA, OTHERS], ids=["llama", "huggingface"])
@pytest.mark.parametrize("attention", ["baseline", "flash"])
def test_what_others_keep_is_counted_without_being_computed(precision, shape, attention):
    config = _config(model=shape, precision=precision, attention={"implementation": attention})
    kept = _kept_by_autograd(config)
    estimated = sum(part.bytes for part in kept_for_backward(config))
    assert 0.3 * kept < estimated <= kept


def test_a_model_of_ones_own_that_needs_real_tensors_has_no_size_before_it_is_built():
    config = _config(model={"builder": "tests.stability.study.own_models:measured"})
    assert parameter_count(config.model) == 0
    own = _config(model={"builder": "tests.stability.study.own_models:build"})
    assert parameter_count(own.model) == sum(p.numel() for p in assemble(own).model.parameters())


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ({"context": 2048, "width": 64}, "attention scores of 4 heads x 2048 x 2048 in FP32"),
        ({"vocab_size": 500_000}, "logits of 3 x 128 tokens, 500000 kinds of them"),
        ({"width": 2048, "heads": 16}, "Adam's moments"),
        ({"depth": 40, "context": 128}, "activations of 40 layers, 3 x 128 tokens of width 64"),
    ],
)
def test_what_dominates_is_named(shape, words):
    many = {"batch_size": 100} if shape.get("depth") == 40 else {}
    attention = FLASH if many else {}
    config = _config(model=shape, attention=attention, train=many)
    expected = words.replace("3 x 128", "100 x 128") if many else words
    assert expected in estimate_memory(config, 4).largest.name


def test_only_the_baseline_holds_scores_and_the_probe_those_of_its_shadow():
    plain, flash = _config(), _config(attention=FLASH)
    matrix = 3 * 4 * 128 * 128 * 4
    # rounded apart, so twice in each of two layers, and two more while one is differentiated
    assert _bytes(plain, "attention scores") in (4 * matrix, 6 * matrix)
    assert _bytes(flash, "scores") == 0
    shadow = {"every": 10, "shadows": [{"implementation": "baseline"}], "golden": False}
    watched = _config(attention=FLASH, probe=shadow, model={"vocab_size": 16})
    assert _bytes(watched, "the probe's attention scores") == 4 * matrix
    first = replace(watched, probe=replace(watched.probe, every=0, steps=(3,)))
    assert _bytes(first, "the probe's") == 0, "a look that may never come is not counted"


def test_a_format_of_fp64_doubles_the_scores():
    wide = {"implementation": "baseline", "numerics": {"softmax": "fp64"}}
    config = _config(attention=wide, model={"context": 1024})
    single = _config(model={"context": 1024})
    assert _bytes(config, "scores") == 2 * _bytes(single, "scores")
    assert "in FP64" in estimate_memory(config, 4).largest.name


def test_a_run_of_one_update_has_no_moments_in_its_backward():
    config = _config(model={"context": 1024, "width": 128})
    short, long = (_bytes(config, "weights of", 1), _bytes(config, "weights and Adam", 2))
    assert (short, long) == (weight_bytes(config), 3 * weight_bytes(config))


MEASURE = """
import json, sys
from pathlib import Path
import torch
from stability.config.load import load_study
from stability.metrics.sharded_sums import norm_of
from stability.metrics.weight_sketch import weight_sketch
from stability.study.assemble import load_data
from stability.study.memory_estimate import estimate_memory
from stability.study.run_study import plan_study
from stability.study.train_run import TrainOptions, train
from tests.conftest import SilentObserver

def status(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(l for l in lines if l.startswith(name)).split()[1]) * 1024

run = plan_study(load_study(Path(sys.argv[1])), Path(sys.argv[2]))[0]
load_data(run.config)
norm_of([torch.ones(8)])  # numba and what it compiles take as much in any run: no part of it
weight_sketch({"w": torch.ones(8)})
before = status("VmRSS:")
train(run, TrainOptions(wandb_mode="disabled"), SilentObserver())
grown = status("VmHWM:") - before
print(json.dumps([grown, estimate_memory(run.config, run.last_step).bytes]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is read from /proc")
@pytest.mark.parametrize(
    "model",
    [
        {"depth": 2, "width": 32, "heads": 2, "context": 1536},
        {"depth": 4, "width": 512, "heads": 8, "context": 32},
    ],
)
def test_a_run_takes_more_than_estimated_and_less_than_four_times_as_much(
    write_study, tmp_path, model
):
    def edit(content):
        content["arms"] = {"baseline": {}}
        content["seeds"] = [0]
        content["yardstick"] = ""
        content["base"]["precision"] = "32-true"
        content["base"]["model"] = model
        content["base"]["train"] |= {"steps": 2, "batch_size": 1, "snapshot_steps": []}
        content["base"]["held_out"] = {"share": 0.0}
        content["base"]["probe"] = {"every": 0}

    command = [sys.executable, "-c", MEASURE, str(write_study(edit)), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    grown, estimated = json.loads(done.stdout.splitlines()[-1])
    assert estimated < grown < 4 * estimated


@given(
    data=st.integers(1, 3),
    shard=st.integers(1, 3),
    tensor=st.sampled_from([1, 2, 4]),
    accumulate=st.integers(1, 2),
)
def test_a_rank_holds_its_share_of_the_batch_and_of_what_ranks_share(
    data, shard, tensor, accumulate
):
    parts = data * shard * accumulate
    config = _config(train={"batch_size": 5 * parts})
    layout = {"data": data, "shard": shard, "tensor": tensor, "accumulate": accumulate}
    laid_out = replace(config, parallel=ParallelConfig(**layout))
    own = _config(train={"batch_size": 5})
    found = {part.name.partition(", over ")[0]: part.bytes for part in _parts(laid_out)}
    for part in _parts(own):
        ranks = tensor * (shard if "parameters" in part.name else 1)
        assert found[part.name] == part.bytes // ranks, part.name


def test_each_rank_begins_with_the_whole_model_on_its_cpu():
    wide = _config(
        model={"depth": 1, "width": 512, "heads": 8, "context": 2}, train={"batch_size": 64}
    )
    laid_out = replace(wide, parallel=ParallelConfig(shard=64))
    (only,) = _parts(laid_out)
    assert only.bytes == weight_bytes(wide)
    assert only.name.startswith("weights of ")


def _parts(config):
    return estimate_memory(config, 4).parts
