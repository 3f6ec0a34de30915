"""A training's attention rounds stochastically by where the training stands, whoever looks on."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from stability.callbacks.rounding_steps import RoundingSteps
from stability.config.arms import expand
from stability.config.load import load_study
from stability.config.schema import AttentionConfig
from stability.data.datamodule import Share
from stability.intercept.replacement import Replacement
from stability.probe import attention_registry
from stability.probe.attention_registry import resolve_attention
from stability.probe.rounding_keys import EVALUATION, RoundingKeys, keyed
from stability.records.manifest import read_manifest, write_manifest
from stability.records.paths import RunPaths
from stability.study.observer_gate import check_observer
from tests.stability.study.recorded_bits import recorded_bits

CPU = torch.device("cpu")
STOCHASTIC = AttentionConfig(
    implementation="flash", profile="all_bf16", numerics={"rounding": "stochastic"}
)


@pytest.fixture
def drawn(monkeypatch):
    """The keys and places that flash attention is called with, in order."""
    found = []
    flash = attention_registry.flash_attention

    def recorded(q, k, v, **options):
        found.append((options.get("rounding_key"), options.get("rounding_place")))
        return flash(q, k, v, **options)

    monkeypatch.setattr(attention_registry, "flash_attention", recorded)
    return found


def _config(write_study):
    arms = {arm.name: arm.config for arm in expand(load_study(write_study(), None))}
    config = arms["flash_all_bf16"]
    train = replace(config.train, trainer={"accumulate_grad_batches": 2})
    return replace(config, train=train, attention=STOCHASTIC)


def test_looking_draws_by_the_models_own_keys_and_changes_no_bit(write_study, drawn):
    config = _config(write_study)
    assert check_observer(config, steps=2).equal
    layers, seed = config.model.depth, config.seed.base
    expected = {(seed, s, i, c) for s in (0, 1) for i in range(layers) for c in (0, 1)}
    keys = {key for key, _ in drawn}
    assert None not in keys, "each call has a key"
    evaluated = {key for key in keys if key[3] == EVALUATION}
    assert keys - evaluated == expected
    assert {key[1] for key in evaluated} <= {0, 1, 2}
    assert {place for _, place in drawn} == {(0, 0, config.model.heads)}
    of_model = 2 * len(expected)  # of the run that is watched, and of the one that is not
    assert len(drawn) - len(evaluated) > 1.4 * of_model, "the gradient was looked at too"


def steps_of(keys, head_parts=1, **share):
    """What two updates of four micro-batches, each of three sequences, set the keys to."""
    rank = share.pop("rank", 0)
    trainer = SimpleNamespace(
        global_step=0, global_rank=rank, datamodule=SimpleNamespace(share=Share(**share))
    )
    callback, found = RoundingSteps(keys, head_parts), []
    callback.setup(trainer, None, "fit")
    callback.on_train_start(trainer, None)
    for index in range(8):
        callback.on_train_batch_start(trainer, None, torch.zeros(3, 5), index)
        found.append((keys.step, keys.call, keys.first_batch))
        trainer.global_step = (index + 1) // 4
        callback.on_train_batch_end(trainer, None, None, None, index)
    assert (keys.step, keys.call, keys.first_batch) == (2, EVALUATION, 0)
    return found


def test_batches_of_an_update_have_calls_of_their_own_and_parts_of_a_batch_places():
    keys = RoundingKeys(seed=0)
    assert steps_of(keys) == [(s, c, 0) for s in (0, 1) for c in (0, 1, 2, 3)]
    # two parts of a batch in this process, of four: the second pair
    parts = steps_of(keys, parts=4, first=2, held=2)
    assert parts == [(s, c, 3 * part) for s in (0, 1) for c in (0, 1) for part in (2, 3)]


def test_a_rank_says_which_heads_it_holds():
    keys, q = RoundingKeys(seed=5), torch.zeros(2, 3, 4, 16)
    assert keys.at(1, q)["rounding_place"] == (0, 0, 3)
    steps_of(keys, head_parts=2, rank=3)
    assert keys.at(1, q) == {"rounding_key": (5, 2, 1, EVALUATION), "rounding_place": (0, 3, 6)}


def test_only_what_rounds_stochastically_gets_a_key():
    keys = RoundingKeys(seed=0)
    for name in ("flash:all_bf16", "baseline", "golden", "sdpa"):
        attention = resolve_attention(name, CPU)
        assert keyed(attention, 0, keys) is attention
    own = resolve_attention("baseline", CPU)
    for direction in ("both", "forward", "backward"):
        mixed = Replacement(
            candidate=resolve_attention(STOCHASTIC, CPU), layers=("*",), direction=direction
        ).mixed(own)
        outs = []
        for step in (1, 2, 2):
            keys.step = step
            q, k, v = (
                torch.randn(1, 2, 8, 16, generator=torch.Generator().manual_seed(i))
                for i in (1, 2, 3)
            )
            q.requires_grad_()
            out = keyed(mixed, 0, keys)(q, k, v, causal=True)
            out.sum().backward()
            outs.append((out.detach(), q.grad))
        moved = [not torch.equal(*pair) for pair in zip(outs[0], outs[1], strict=True)]
        assert moved == [direction != "backward", direction != "forward"]
        assert all(map(torch.equal, outs[1], outs[2]))


def _edit(content):
    content["base"]["attention"] = {
        "implementation": "flash", "profile": "all_bf16", "numerics": {"rounding": "stochastic"}
    }  # fmt: skip
    content["base"]["probe"] = {"every": 0}
    content["base"]["train"] |= {"checkpoint_every": 3}
    content |= {"arms": {"rerun": {}}, "seeds": [0], "yardstick": ""}


@pytest.mark.slow
def test_a_run_that_rounds_stochastically_goes_on_to_the_same_bits(write_study, run_tiny, tmp_path):
    study, root = load_study(write_study(_edit)), tmp_path / "runs" / "tiny"
    run_tiny(study, tmp_path / "runs")
    whole = recorded_bits(root)
    baseline, rerun = (RunPaths.for_run(root, arm, 0) for arm in ("baseline", "rerun"))
    one, other = (read_manifest(run.manifest).hashes for run in (baseline, rerun))
    assert one["final_weights"] == other["final_weights"], "both draw the same"
    manifest = read_manifest(baseline.manifest)
    last = max(baseline.checkpoints_dir.glob("*.ckpt"))
    gone = {baseline.name_of(last), "metrics.jsonl"}
    files = {name: sha for name, sha in manifest.files.items() if name not in gone}
    last.unlink()
    write_manifest(baseline.manifest, replace(manifest, state="interrupted", files=files))
    run_tiny(study, tmp_path / "runs")
    assert recorded_bits(root) == whole
