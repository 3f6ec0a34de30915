"""Every kind of model in a study: ours, Hugging Face's, and a user's own."""

import json

import pytest
import torch

from stability.analysis.pair_contract import prove_pair
from stability.config.load import load_study
from stability.records.manifest import read_manifest
from stability.records.metric_log import read_metrics
from stability.records.metric_names import drift_name
from stability.records.paths import RunPaths
from stability.records.snapshots import read_snapshot

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
KINDS = ["llama", "own", "hf_llama", "hf_gpt2"]


def model_of(kind, folder):
    if kind == "llama":
        return {**SHAPE, "builder": "llama", "kv_heads": 1}
    if kind == "own":
        return {**SHAPE, "builder": f"{OWN}:build", "options": {"gain": 2.0}}
    (folder / kind).mkdir()
    config = {"hf_llama": HF_LLAMA, "hf_gpt2": HF_GPT2}[kind]
    (folder / kind / "config.json").write_text(json.dumps(config))
    return {"hf": str(folder / kind), "context": 32}


@pytest.fixture(scope="module", params=KINDS)
def study(request, tmp_path_factory, text_file):
    from tests.conftest import run_quietly, write_tiny

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


def test_a_snapshot_holds_each_weight_once(study):
    for step in (0, 6):
        weights = read_snapshot(RunPaths.for_run(study, "baseline", 0).snapshot(step))
        pointers = [hash(x.numpy().tobytes()) for x in weights.values() if x.dim() == 2]
        assert len(set(pointers)) == len(pointers)
        assert all(x.dtype == torch.float32 for x in weights.values())
