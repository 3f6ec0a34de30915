"""A run by a recipe is a pair like any other: repeatable, resumable, watched, held to its label."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from stability.analysis.pair_contract import prove_pair
from stability.callbacks.delayed_scales import DelayedScaling
from stability.callbacks.gradient_callback import GradientProbe
from stability.config.load import load_study
from stability.model.layouts import check_layout
from stability.model.lightning_module import next_token_loss
from stability.probe.rounding_keys import RoundingKeys
from stability.records.manifest import read_manifest, write_manifest
from stability.records.metric_log import read_metrics
from stability.records.metric_names import drift_name
from stability.records.paths import RunPaths
from stability.records.witness import read_witness
from stability.study import assemble as assemble_module
from stability.study.assemble import assemble
from stability.study.model_gradients import gradients_of_arm
from stability.study.observer_gate import check_observer
from tests.stability.study.recorded_bits import recorded_bits

pytestmark = pytest.mark.filterwarnings("ignore:Detected call of")


def _arms(precision="bf16-mixed", **arms):
    def edit(content):
        content.update(seeds=[0], arms={"baseline": {}, **arms}, yardstick="")
        content["base"]["precision"] = precision
        content["base"]["train"].update(steps=4, snapshot_steps=[2])
        content["base"]["probe"] = {"every": 0}

    return edit


def _run(tmp_path, arm):
    return RunPaths.for_run(tmp_path / "tiny", arm, 0)


def test_a_run_by_a_recipe_is_a_proven_pair_and_its_rerun_is_exactly_zero(
    write_study, run_tiny, tmp_path
):
    study = load_study(write_study(_arms("recipe:nvfp4", rerun={}, plain={"precision": "32-true"})))
    ended = run_tiny(study, tmp_path).ended
    assert [end[2:] for end in ended] == [("finished", "")] * 3
    drift = drift_name("all", "rel_l2")
    assert read_metrics(_run(tmp_path, "rerun").metrics)[drift].values == [0.0] * 3
    manifest = read_manifest(_run(tmp_path, "plain").manifest)
    assert (manifest.axis, manifest.diff) == (
        "precision",
        {"precision": ["recipe:nvfp4", "32-true"]},
    )
    proof = prove_pair(_run(tmp_path, "baseline"), _run(tmp_path, "plain"))
    assert (proof.state, proof.axes) == ("holds", ("precision",))
    rows = read_witness(_run(tmp_path, "baseline").witness).rows
    of = {row.module: set(row.operands) for row in rows if row.part == "linear"}
    assert of["blocks.layer_0.query"] == of["blocks.layer_0.mlp_up"] == {"float32"}
    assert of["blocks.layer_1.query"] == of[""] == {"bfloat16"}, "the last block and the output"


PARTS = {"forward": "mxfp4", "dgrad": "mxfp8+stochastic/mxfp8", "wgrad": "mxfp8+stochastic/mxfp8"}
TEXT = f"recipe:{' '.join(f'{name}={part}' for name, part in PARTS.items())}"


@pytest.mark.slow
def test_runs_by_recipes_in_parts_are_arms_of_their_own_however_they_are_spelled(
    write_study, run_tiny, tmp_path
):
    turned = dict(reversed(PARTS.items()))
    arms = {
        "parts": {"precision": {"*.mlp_*": PARTS}},
        "spelled": {"precision": {"*.mlp_*": turned | {"forward": "mxfp4/mxfp4"}}},
        "nearest": {"precision": {"*.mlp_*": PARTS | {"dgrad": "mxfp8", "wgrad": "mxfp8"}}},
    }
    study = load_study(write_study(_arms(**arms)))
    assert {end[2:] for end in run_tiny(study, tmp_path).ended} == {("finished", "")}
    bits = {arm: recorded_bits(_run(tmp_path, arm).root) for arm in arms}
    weights = {
        arm: {name: b for name, b in of.items() if name.endswith(".safetensors")}
        for arm, of in bits.items()
    }
    assert weights["parts"] == weights["spelled"] != weights["nearest"]
    manifest = read_manifest(_run(tmp_path, "parts").manifest)
    assert manifest.diff == {"precision": ["bf16-mixed", f"bf16-mixed, *.mlp_*={TEXT}"]}
    assert manifest.diff == read_manifest(_run(tmp_path, "spelled").manifest).diff
    proof = prove_pair(_run(tmp_path, "parts"), _run(tmp_path, "nearest"))
    assert (proof.state, proof.axes) == ("holds", ("precision",))
    rows = read_witness(_run(tmp_path, "parts").witness).rows
    of = {row.module: set(row.operands) for row in rows if row.part == "linear"}
    assert of["blocks.layer_1.mlp_up"] == {"float32"}
    assert of["blocks.layer_1.query"] == {"bfloat16"}


def test_a_module_that_the_recipe_did_not_compute_fails_the_run(
    write_study, run_tiny, tmp_path, monkeypatch
):
    def but_one(model, precision, *rest):
        modules = (*precision.modules, ("blocks.layer_0.mlp_up", "bf16"))
        with_module_precision(model, replace(precision, modules=modules), *rest)

    with_module_precision = assemble_module.with_module_precision
    monkeypatch.setattr(assemble_module, "with_module_precision", but_one)
    study = load_study(write_study(_arms(own={"precision": "recipe:mxfp8"})))
    said = (
        "witness: arm own is labelled recipe:mxfp8 in module blocks.layer_0.mlp_up, which "
        "multiplied BF16 in its backward"
    )
    assert run_tiny(study, tmp_path).ended[1] == ("own", 0, "failed", said)


BATCH = torch.arange(4 * 33).view(4, 33) % 64


def _two_updates(config, look=lambda parts, weights: None):
    """Train twice on BATCH, the first time by a thousandth of the loss; look within the second.

    Return the gradients of the second, what was seen, and the delayed scales that are left.
    """
    parts = assemble(config)
    (steps,) = (each for each in parts.callbacks if isinstance(each, DelayedScaling))
    trainer = SimpleNamespace(global_step=0, global_rank=0, world_size=1)
    steps.setup(trainer, None, "fit")
    seen, grads = None, {}
    for step, scale in enumerate((1e-3, 1.0)):
        steps.on_train_batch_start(trainer, None, BATCH, step)
        if step:
            seen = look(parts, {name: p.detach() for name, p in parts.model.named_parameters()})
        with torch.autocast("cpu", torch.bfloat16):
            (scale * next_token_loss(parts.model(BATCH[:, :-1]), BATCH)).backward()
        grads = {name: p.grad for name, p in parts.model.named_parameters()}
        parts.model.zero_grad()
        trainer.global_step += 1
        steps.on_train_batch_end(trainer, None, None, BATCH, step)
    return grads, seen, steps.state_dict()


def test_a_look_at_the_gradient_has_the_runs_delayed_scales_and_leaves_nothing_in_them(write_study):
    base = load_study(write_study()).base
    probe = replace(base.probe, shadows_are="baseline", gradient_every=1)
    config = replace(base, precision="recipe:fp8_delayed", probe=probe)

    def look(parts, weights):
        (probe,) = (each for each in parts.callbacks if isinstance(each, GradientProbe))
        as_trained = partial(probe._gradients, weights, role="candidate", is_isolated=False)
        as_trained((BATCH + 7) % 64, scale=100.0)
        return as_trained(BATCH)

    grads, seen, states = _two_updates(config, look)
    unseen, _, expected = _two_updates(config)
    assert all(torch.equal(seen[name], grads[name]) for name in grads)
    assert all(torch.equal(unseen[name], grads[name]) for name in grads)
    assert all(torch.equal(states[n]["amaxes"], each["amaxes"]) for n, each in expected.items())
    # by scales of gradients a thousandth as large these saturate, and by those at hand they do not
    name = "blocks.layer_0.mlp_up.weight"
    at_hand = replace(config, precision="recipe:fp8_current")
    weights = {n: p.detach() for n, p in assemble(config).model.named_parameters()}
    current = gradients_of_arm(at_hand, torch.device("cpu")).of(weights, BATCH, "candidate", False)
    assert grads[name].norm() < 0.1 * current[name].norm()
    dy = next(n for n in states if n.startswith("blocks.layer_1.mlp_residual: dgrad.left"))
    first, second = states[dy]["amaxes"].tolist()
    assert second == pytest.approx(1000 * first, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["recipe:nvfp4", "recipe:fp8_delayed", TEXT])
def test_a_run_that_was_cut_off_goes_on_to_the_same_bits(
    write_study, run_tiny, tmp_path, precision
):
    edit = _arms(precision, rerun={})
    study, root = load_study(write_study(edit), {"train.checkpoint_every": "2"}), tmp_path / "tiny"
    run_tiny(study, tmp_path)
    whole = recorded_bits(root)
    baseline = _run(tmp_path, "baseline")
    manifest = read_manifest(baseline.manifest)
    first, last = sorted(baseline.checkpoints_dir.glob("*.ckpt"))
    assert first.stem == "step-00000002", "it goes on from there"
    gone = {baseline.name_of(last), "metrics.jsonl"}
    files = {name: sha for name, sha in manifest.files.items() if name not in gone}
    last.unlink()
    write_manifest(baseline.manifest, replace(manifest, state="interrupted", files=files))
    run_tiny(study, tmp_path)
    assert recorded_bits(root) == whole


@pytest.mark.parametrize(
    "precision",
    [
        "recipe:nvfp4",
        "recipe:fp8_delayed",
        pytest.param("emulated:e5m2, *.mlp_*=recipe:nvfp4", marks=pytest.mark.slow),
    ],
)
def test_the_instruments_change_no_bit_of_a_run_by_a_recipe(write_study, precision):
    config = replace(load_study(write_study()).base, precision=precision)
    train = replace(config.train, trainer={"accumulate_grad_batches": 2})
    probe = replace(config.probe, gradient_every=2)
    assert check_observer(replace(config, train=train, probe=probe), steps=2).equal


def test_a_look_at_the_gradient_draws_what_the_training_draws(write_study):
    """The gradient as trained, of the keys of a step, is that of the model's own backward."""
    content = load_study(write_study()).base
    probe = replace(content.probe, shadows_are="baseline")
    config = replace(content, precision="recipe:nvfp4", probe=probe)
    keys = RoundingKeys(seed=config.seed.base, step=3, call=0)
    parts = assemble(config)
    batch = torch.arange(4 * 33).view(4, 33) % 64
    looks = gradients_of_arm(config, torch.device("cpu"), keys)
    assert looks is not None
    weights = {name: p.detach() for name, p in parts.model.named_parameters()}
    found = looks.of(weights, batch, "candidate", is_isolated=False)
    keys.step = 4
    later = looks.of(weights, batch, "candidate", is_isolated=False)
    name = "blocks.layer_0.mlp_up.weight"
    assert not torch.equal(found[name], later[name])
    # the assembled model holds keys of its own, which stand at step 0
    keys.step, keys.call = 0, 2**32
    with torch.autocast("cpu", torch.bfloat16):
        loss = next_token_loss(parts.model(batch[:, :-1]), batch)
    loss.backward()
    now = looks.of(weights, batch, "candidate", is_isolated=False)
    grads = {n: p.grad for n, p in parts.model.named_parameters()}
    assert all(torch.equal(now[n], grads[n]) for n in now)


@pytest.mark.slow
def test_a_users_own_model_trains_by_a_recipe_that_names_its_layers(
    write_study, run_tiny, tmp_path
):
    def edit(content):
        _arms(own={"precision": {"layers.0.*": "recipe:nvfp4"}})(content)
        content["base"]["model"] |= {"builder": "tests.stability.study.own_models:build"}
        content["base"]["model"] |= {"vocab_size": 256, "options": {"gain": 2.0}}

    study = load_study(write_study(edit))
    assert [end[2:] for end in run_tiny(study, tmp_path).ended] == [("finished", "")] * 2
    rows = read_witness(_run(tmp_path, "own").witness).rows
    of = {row.module: set(row.operands) for row in rows if row.part == "linear"}
    assert of["layers.0.qkv"] == of["layers.0.out"] == {"float32"}
    assert of["layers.1.qkv"] == of["head"] == {"bfloat16"}


def test_a_recipe_is_refused_where_it_would_not_be_computed(write_study):
    base = load_study(write_study()).base
    compiled = replace(base.train, compile="aot_eager")
    with pytest.raises(ValueError, match=r"train.compile must be empty with an emulated"):
        assemble(replace(base, precision="recipe:mxfp8", train=compiled))
    ranks = replace(base, precision="recipe:mxfp8", parallel=replace(base.parallel, tensor=2))
    with pytest.raises(ValueError, match=r"parallel.tensor must be 1 where precision is emulated"):
        check_layout(ranks)


@pytest.mark.long
@pytest.mark.slow
def test_a_recipe_moves_the_weights_as_far_as_its_bits_say_and_the_model_learns(
    write_study, run_tiny, tmp_path
):
    """Between BF16 with 7 mantissa bits, FP8 with 3 and FP4 with 1, in the same blocks."""
    arms = {
        "rerun": {},
        "fp8": {"precision": {"blocks.*": "recipe:mxfp8"}},
        "fp4": {"precision": {"blocks.*": "recipe:nvfp4"}},
        "fp4_again": {"precision": {"blocks.*": "recipe:nvfp4"}},
        "but_last": {"precision": "recipe:nvfp4"},
        "reference": {"role": "reference"},
    }

    def edit(content):
        _arms(**arms)(content)
        content["base"]["train"].update(steps=30, snapshot_steps=[10, 20])
        content["early_step"] = 10

    study = load_study(write_study(edit))
    assert {state for *_, state, _ in run_tiny(study, tmp_path).ended} == {"finished"}
    metrics = {arm: read_metrics(_run(tmp_path, arm).metrics) for arm in arms}
    drift = {arm: metrics[arm][drift_name("all", "rel_l2")].values[-1] for arm in arms}
    assert drift["rerun"] == 0
    assert drift["fp4"] == drift["fp4_again"]
    assert drift["reference"] < drift["fp8"] < drift["but_last"] < drift["fp4"]
    for arm in ("fp8", "fp4", "but_last"):
        losses = metrics[arm]["train/loss"].values
        assert losses[-1] < 0.9 * losses[0]
