"""Every kind of model in a study: ours, Hugging Face's, and a user's own."""

import json
from dataclasses import replace

import pytest
import torch

from stability.analysis.pair_contract import prove_pair
from stability.config.convert import from_dict
from stability.config.load import load_study
from stability.config.schema import ArmConfig, ModelConfig
from stability.records.manifest import read_manifest
from stability.records.metric_log import read_metrics
from stability.records.metric_names import drift_name
from stability.records.paths import RunPaths
from stability.records.snapshots import read_snapshot
from stability.study.assemble import assemble, imports_user_modules
from stability.study.capture import capture
from stability.study.observer_gate import check_observer
from tests.conftest import run_quietly, write_tiny

SHAPE = {"depth": 2, "width": 32, "heads": 2, "context": 32}
HF_LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "vocab_size": 256,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": None,
}
HF_GPT2 = {
    "model_type": "gpt2",
    "n_layer": 2,
    "n_embd": 32,
    "n_head": 2,
    "n_positions": 32,
    "vocab_size": 256,
    "attn_pdrop": 0.1,
    "resid_pdrop": 0.1,
    "embd_pdrop": 0.1,
    "bos_token_id": None,
    "eos_token_id": None,
}
OWN = "tests.stability.study.own_models"


def model_of(kind, folder):
    if kind == "llama":
        return {**SHAPE, "builder": "llama", "kv_heads": 1}
    if kind == "own":
        return {**SHAPE, "builder": f"{OWN}:build", "options": {"gain": 2.0}}
    (folder / kind).mkdir()
    config = {"hf_llama": HF_LLAMA, "hf_gpt2": HF_GPT2}[kind]
    (folder / kind / "config.json").write_text(json.dumps(config))
    return {"hf": str(folder / kind), "context": 32}


@pytest.fixture(
    scope="module",
    params=[
        "llama",
        pytest.param("own", marks=pytest.mark.slow),
        pytest.param("hf_llama", marks=pytest.mark.long),
        pytest.param("hf_gpt2", marks=pytest.mark.long),
    ],
)
def study(request, tmp_path_factory, text_file):
    folder = tmp_path_factory.mktemp(request.param)

    def edit(content):
        content["base"]["model"] = model_of(request.param, folder)
        content["base"]["probe"] |= {"inside": True}
        flash = {"attention": {"implementation": "flash", "profile": "fa2"}}
        content["arms"] = {
            "flash": {**flash, "probe": {"gradient_every": 3}},
            "rerun": {},
            "nudge": {"nudge": {"ulps": 1}},
            "init_seed": {"seed": {"init_offset": 1000}},
        }
        content["seeds"], content["yardstick"] = [0], "nudge"

    run_quietly(load_study(write_tiny(folder, text_file, edit)), folder / "runs")
    return folder / "runs" / "tiny"


def _metrics(study, arm):
    return read_metrics(RunPaths.for_run(study, arm, 0).metrics)


def test_a_study_of_any_model_trains_and_its_rerun_is_exactly_zero(study):
    for arm in ("baseline", "flash", "rerun", "nudge", "init_seed"):
        manifest = read_manifest(RunPaths.for_run(study, arm, 0).manifest)
        assert (manifest.state, manifest.step, manifest.message) == ("finished", 6, "")
    drift = drift_name("all", "rel_l2")
    assert _metrics(study, "rerun")[drift].values == [0.0] * 5
    for arm in ("flash", "nudge", "init_seed"):
        assert 0 < _metrics(study, arm)[drift].values[-1] < 10
    losses = _metrics(study, "baseline")["train/loss"].values
    assert losses[-1] < losses[0] < 12, "it learns"


def test_a_probe_looks_into_each_layer_of_any_model(study):
    metrics = _metrics(study, "baseline")
    for layer in ("layer_0", "layer_1"):
        assert metrics[f"deviation/{layer}/out/rel_fro"].steps == [0, 2, 4]
        assert 0 < metrics[f"deviation/{layer}/dq/rel_fro"].values[0] < 0.1
    assert metrics["watch/layer_1/head_0/query_norm"].steps == [0, 2, 4]


def test_the_gradient_of_any_model_has_evidence_in_an_arm_of_another_attention(study):
    metrics = _metrics(study, "flash")
    ratio = metrics["gradient/all/ratio"]
    assert ratio.steps == [0, 3]
    assert all(0.1 < value < 10 for value in ratio.values)
    assert {"gradient/query/ratio", "gradient/qkv/ratio"} & set(metrics), "by part, too"


def test_what_any_model_executed_is_witnessed_and_proves_the_pair(study):
    first, second = (RunPaths.for_run(study, arm, 0) for arm in ("baseline", "flash"))
    proof = prove_pair(first, second)
    assert proof.state == "holds", proof.sentence


def test_q_k_and_v_of_any_model_are_captured_from_a_snapshot(study):
    inputs = capture(RunPaths.for_run(study, "baseline", 0).root, 1)
    assert inputs.q.shape == (4, 2, 32, 16)
    assert inputs.q.std() > 0


def test_a_snapshot_holds_each_weight_once(study):
    for step in (0, 6):
        weights = read_snapshot(RunPaths.for_run(study, "baseline", 0).snapshot(step))
        pointers = [hash(x.numpy().tobytes()) for x in weights.values() if x.dim() == 2]
        assert len(set(pointers)) == len(pointers)
        assert all(x.dtype == torch.float32 for x in weights.values())


def _arm(model, folder, **changes):
    content = {
        "model": model_of(model, folder) if isinstance(model, str) else model,
        "train": {"batch_size": 2, "steps": 2, "accelerator": "cpu"},
        **changes,
    }
    if "hf" in content["model"]:
        config = json.loads((folder / model / "config.json").read_text())
        for name in ("attn_pdrop", "embd_pdrop", "resid_pdrop"):
            config.pop(name, None)
            config |= {name: 0.0} if model == "hf_gpt2" else {}
        options = {"config": config, "folder": str(folder / model)}
        kv_heads = config.get("num_key_value_heads", 0)
        content["model"] = {
            **SHAPE,
            "builder": "huggingface",
            "options": options,
            "kv_heads": kv_heads,
        }
    return from_dict(ArmConfig, content, "a test")


@pytest.mark.parametrize("precision", ["64-true", "bf16-true"])
def test_a_model_of_others_computes_in_the_precision_of_its_arm(tmp_path, precision):
    arm = _arm("hf_llama", tmp_path, precision=precision, probe={"every": 0})
    model = assemble(arm).model
    if precision == "bf16-true":
        model.to(torch.bfloat16)
    seen = set()
    tokens = torch.arange(8)[None]
    norm = model.model.layers[0].input_layernorm
    norm.register_forward_hook(lambda _, given, out: seen.add(out.dtype))
    exact = model(tokens)
    assert seen == {torch.float64 if precision == "64-true" else torch.bfloat16}
    if precision == "64-true":
        # the norms of transformers cast to FP32: with them the result moves by some 1e-7
        moved = norm.weight.data.clone()
        norm.weight.data *= 1 + 1e-12
        assert 0 < (model(tokens) - exact).abs().max() < 1e-9
        norm.weight.data = moved


@pytest.mark.parametrize("kind", ["hf_gpt2", "llama"])
def test_every_instrument_at_once_changes_no_bit_of_any_model(tmp_path, text_file, kind):
    flash = {"attention": {"implementation": "flash"}}
    probe = {"shadows_are": "baseline", "shadows": [{"implementation": "baseline"}]}
    arm = _arm(kind, tmp_path, data={"source": str(text_file)}, probe=probe, **flash)
    assert check_observer(arm, 2).equal


def test_emulation_that_would_round_nothing_is_refused(tmp_path):
    arm = _arm("hf_gpt2", tmp_path, precision="emulated:e4m3")
    with pytest.raises(ValueError, match="must not be emulated for GPT2LMHeadModel, got 'emul"):
        assemble(arm)


def test_other_initial_weights_can_not_be_asked_of_given_ones(tmp_path):
    arm = _arm("hf_llama", tmp_path, seed={"init_offset": 1})
    options = {**arm.model.options, "weights": "given"}
    arm = replace(arm, model=replace(arm.model, options=options))
    with pytest.raises(
        ValueError, match=r"seed\.init_offset must be 0 where model\.weights are gi"
    ):
        assemble(arm)


def test_a_model_that_ignores_the_attention_trains_where_nobody_asks_for_it():
    model = {**SHAPE, "builder": f"{OWN}:deaf"}
    assemble(_arm(model, None, probe={"every": 0}))
    message = "made no attention call in a forward pass of one block"
    with pytest.raises(ValueError, match=message):
        assemble(_arm(model, None, probe={"every": 2}))
    changed = {"every": 0, "shadows_are": "baseline"}
    with pytest.raises(ValueError, match=message):
        assemble(_arm(model, None, probe=changed, attention={"implementation": "flash"}))


def test_a_module_of_ones_own_is_imported_in_a_process_of_its_own():
    kinds = {f"{OWN}:build": True, "mine": True, "llama": False, "gpt2": False}
    for builder, is_own in kinds.items():
        arm = ArmConfig(model=ModelConfig(builder=builder, **SHAPE))
        assert imports_user_modules(arm) == is_own, builder
