"""A run laid out over ranks: the same samples and weights, and bits that differ by order alone."""

import math
import multiprocessing
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stability.analysis.pair_contract import prove_pair
from stability.config.load import load_study
from stability.config.parallel import ParallelConfig
from stability.config.schema import AttentionConfig, SeedConfig
from stability.data.datamodule import TextDataModule
from stability.model.layouts import check_layout
from stability.model.ranks import ALONE, PATIENCE, Ranks
from stability.recorder.trainer_door import TrainerDoor
from stability.records.manifest import read_manifest, write_manifest
from stability.records.paths import RunPaths, checkpoint_steps
from stability.study.assemble import load_data
from stability.study.call_over_ranks import call_over_ranks
from stability.study.fork import fork_drifts, plan_fork, run_fork
from stability.study.observer_gate import check_observer
from stability.study.run_study import StudyError, check_study, plan_study, run_study
from stability.study.train_run import TrainOptions
from tests.conftest import SilentObserver, write_tiny
from tests.stability.study.layout_ranks import train_all

TWO = {
    "ddp": ParallelConfig(data=2),
    "fsdp": ParallelConfig(shard=2),
    "tensor": ParallelConfig(tensor=2),
    "sequence": ParallelConfig(tensor=2, sequence=True),
    "ddp, bf16": ParallelConfig(data=2, reduce="bf16"),
    "fsdp, bf16": ParallelConfig(shard=2, reduce="bf16"),
    "ddp, at fault": ParallelConfig(data=2, fault="replica_gain_1pct"),
    "fsdp, at fault": ParallelConfig(shard=2, fault="replica_gain_1pct"),
}
FOUR = {
    "ddp": ParallelConfig(data=4),
    "hsdp": ParallelConfig(data=2, shard=2),
    "fsdp of tensor": ParallelConfig(shard=2, tensor=2),
    "fsdp of sequence": ParallelConfig(shard=2, tensor=2, sequence=True),
    "replicas of tensor": ParallelConfig(data=2, tensor=2),
    "ddp, accumulated": ParallelConfig(data=4, accumulate=2),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory, text_file):
    """A tiny run, with norms of single heads, whose gradients ranks see a part of."""

    def edit(content):
        content["base"]["model"] |= {"qk_norm": True, "heads": 4, "width": 64}
        content["base"]["precision"] = "32-true"
        content["base"]["train"] |= {"steps": 3, "batch_size": 8, "grad_clip": 0.5}
        content["base"]["probe"] = {"every": 0}
        content["base"]["held_out"] = {"batches": 2}
        content["base"]["watch"] = {"every": 1}
        content["arms"] = {"baseline": {}, "fp32": {"nudge": {"ulps": 1}}}

    return load_study(write_tiny(tmp_path_factory.mktemp("base"), text_file, edit), None).base


def laid_out(base, layouts, **changes):
    return {name: replace(base, parallel=each, **changes) for name, each in layouts.items()}


def distance(one, other):
    pairs = [(one["weights"][name], value) for name, value in other["weights"].items()]
    square = sum(np.square(a - b).sum() for a, b in pairs)
    return math.sqrt(square / sum(np.square(b).sum() for _, b in pairs))


def same_bits(one, other):
    return all(np.array_equal(value, other["weights"][k]) for k, value in one["weights"].items())


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_replicas_shards_and_accumulation_end_in_the_same_bits(base, precision):
    one = train_all(
        {
            "one": replace(base, precision=precision),
            "accumulated": replace(
                base, precision=precision, parallel=ParallelConfig(accumulate=2)
            ),
            "unclipped": replace(
                base, precision=precision, train=replace(base.train, grad_clip=0.0)
            ),
        },
        ALONE,
    )
    first, second = call_over_ranks(2, train_all, laid_out(base, TWO, precision=precision))
    for name in ("ddp", "fsdp"):
        assert same_bits(first[name], one["accumulated"]), name
    # every rank has gathered the same
    assert all(same_bits(first[name], second[name]) for name in TWO)
    assert same_bits(first["ddp, bf16"], first["fsdp, bf16"])
    assert not same_bits(first["ddp, bf16"], first["ddp"])
    assert same_bits(first["ddp, at fault"], first["fsdp, at fault"])
    times = {"32-true": 100, "bf16-mixed": 2}[precision]
    assert distance(first["ddp, at fault"], one["one"]) > times * distance(first["ddp"], one["one"])
    assert not same_bits(one["one"], one["unclipped"]), "clipping must be active"
    for name, run in first.items():
        assert run["batches"] == one["one"]["batches"], name
        assert run["init"] == one["one"]["init"], name
        assert run["metrics"]["eval/loss"][0] == pytest.approx(
            one["one"]["metrics"]["eval/loss"][0], rel=1e-3
        )
    limit = {"32-true": 1e-6, "bf16-mixed": 1e-3}[precision]
    assert all(distance(first[name], one["one"]) < limit for name in list(TWO)[:4])


@pytest.mark.parametrize("accumulate", [1, 2])
def test_ranks_hash_an_update_of_several_batches_as_one_process_does(accumulate):
    """Each of three batches in turn, of which every rank has its part."""

    def told(parallel):
        found = []
        for rank in range(parallel.ranks):
            ranks = Ranks(rank=rank, count=parallel.ranks)
            door = TrainerDoor(None, None, (), None, ranks=ranks, parallel=parallel)
            held = rank // parallel.tensor * parallel.accumulate
            for batch in samples.chunk(3):
                for part in batch.chunk(parallel.parts)[held : held + parallel.accumulate]:
                    door.after_batch(None, {"loss": torch.zeros(())}, part)
            found.append(torch.stack(door._hashes).sum())
        return int(torch.stack(found[:: parallel.tensor]).sum())

    samples = torch.arange(24 * 5).view(24, 5)
    of_all = told(ParallelConfig())
    for layout in ({"data": 2}, {"data": 2, "shard": 2}, {"tensor": 2}, {"data": 2, "tensor": 2}):
        assert told(ParallelConfig(**layout, accumulate=accumulate)) == of_all, layout
    samples = torch.roll(samples, 1, 0)
    assert told(ParallelConfig()) != of_all


@pytest.mark.slow
def test_by_a_recipe_replicas_and_shards_end_in_the_bits_of_accumulation(base):
    """Each rank quantizes its own part of a batch, and draws by where that begins."""
    own = replace(base, precision="recipe:nvfp4")
    one = train_all(
        {"parts": replace(own, parallel=ParallelConfig(accumulate=2)), "one": own}, ALONE
    )
    layouts = {name: TWO[name] for name in ("ddp", "fsdp")}
    first, second = call_over_ranks(2, train_all, laid_out(own, layouts))
    for name in layouts:
        assert same_bits(first[name], one["parts"]), name
        assert same_bits(second[name], first[name])
    assert not same_bits(one["parts"], one["one"]), "tokens of other parts have other blocks"


@pytest.mark.slow
def test_delayed_scales_are_those_of_the_whole_batch_under_every_layout(base):
    """Each rank sees its own amaxes; the parts then differ from the whole by a sum's order alone.

    By scales of the values at hand each part of a batch has its own, as each rank's would be. A
    replica's gradients are larger than a part's, which under the scale of 1 that the first update
    has would be other bits of E5M2.
    """
    own, parted = replace(base, precision="recipe:fp8_delayed"), ParallelConfig(accumulate=2)
    current = replace(base, precision="recipe:fp8_current")
    one = train_all(
        {
            "parts": replace(own, parallel=parted),
            "one": own,
            "current parts": replace(current, parallel=parted),
            "current": current,
        },
        ALONE,
    )
    first, second = call_over_ranks(
        2, train_all, laid_out(own, {name: TWO[name] for name in ("ddp", "fsdp")})
    )
    for name, run in first.items():
        assert same_bits(run, one["parts"]), name
        assert same_bits(second[name], run)
    apart = distance(one["parts"], one["one"])
    assert apart < 0.3 * distance(one["current parts"], one["current"])
    assert apart < 0.3 * distance(one["current"], one["one"])


@pytest.mark.slow
def test_attention_that_rounds_by_chance_draws_the_same_bits_under_every_layout(base):
    """In FP64, where layouts differ by less than a draw; each rank says where its part begins."""
    numerics = {"rounding": "stochastic", "accumulator": "bf16"}
    own = replace(
        base,
        precision="64-true",
        attention=AttentionConfig(implementation="flash", numerics=numerics),
    )
    parts = replace(own, parallel=ParallelConfig(accumulate=2))
    # the same weights and batches, and other draws
    other = replace(own, seed=SeedConfig(base=1, init_offset=-1, order_offset=-1))
    one = train_all({"one": own, "parts": parts, "other": other}, ALONE)
    layouts = {name: TWO[name] for name in ("ddp", "fsdp", "tensor", "sequence")}
    runs = call_over_ranks(2, train_all, laid_out(own, layouts))[0]
    drawn = distance(one["other"], one["one"])
    assert drawn > 1e-6
    for name, run in {"parts": one["parts"], **runs}.items():
        assert distance(run, one["one"]) < 1e-6 * drawn, name


@pytest.mark.slow
def test_in_fp64_every_layout_computes_the_same(base):
    """A part that is counted twice, or not at all, can't hide behind rounding."""
    one = train_all({"one": replace(base, precision="64-true")}, ALONE)["one"]
    runs = call_over_ranks(4, train_all, laid_out(base, FOUR, precision="64-true"))[0]
    for name, run in runs.items():
        assert run["batches"] == one["batches"]
        assert distance(run, one) < 1e-14, name
        for metric, values in one["metrics"].items():
            assert run["metrics"][metric] == pytest.approx(values, rel=1e-9), (name, metric)


@pytest.mark.slow
def test_the_probe_measures_the_heads_and_samples_of_the_first_rank(base):
    """In FP64, where layouts differ by less than a shadow in BF16 rounds."""
    shadow = AttentionConfig(implementation="flash", profile="all_bf16")
    probed = replace(
        base,
        precision="64-true",
        probe=replace(base.probe, every=1, heads=True, shadows=(shadow,)),
    )
    one = train_all({"one": probed}, ALONE)["one"]["metrics"]
    layouts = {"tensor": TWO["tensor"], "sequence": TWO["sequence"], "ddp": TWO["ddp"]}
    found = call_over_ranks(2, train_all, laid_out(probed, layouts))[0]
    # the error of the shadow: the run's own, in FP64 too, has other bits under each layout
    of_heads = {x for x in one if "/head_" in x and x.endswith(("/rel_fro", "/gain"))}
    for layout, heads in {"tensor": (0, 1), "sequence": (0, 1), "ddp": range(4)}.items():
        own = {name for name in of_heads if any(f"/head_{head}/" in name for head in heads)}
        seen = of_heads & found[layout]["metrics"].keys()
        assert seen == own != set(), layout
        for name in own:
            if layout != "ddp":
                assert found[layout]["metrics"][name] == pytest.approx(one[name], rel=1e-3), name
            elif name.endswith("/rel_fro"):
                # a replica has a half of the samples, whose errors are of one size with all
                assert found[layout]["metrics"][name] == pytest.approx(one[name], rel=0.5), name


@pytest.mark.slow
def test_gradient_evidence_is_that_of_the_first_ranks_samples_however_weights_are_shared(base):
    """Which are the first micro-batch's where one rank accumulates over as many."""
    judged = replace(
        base,
        precision="bf16-mixed",
        attention=AttentionConfig(implementation="flash", profile="all_bf16"),
        probe=replace(
            base.probe,
            every=1,
            gradient_every=1,
            shadows=(AttentionConfig(),),
            shadows_are="baseline",
        ),
    )
    parts = replace(judged, parallel=ParallelConfig(accumulate=2))
    one = train_all({"parts": parts}, ALONE)["parts"]["metrics"]
    named = {name for name in one if name.startswith("gradient/")}
    assert named
    layouts = {name: TWO[name] for name in ("ddp", "fsdp")}
    first, _ = call_over_ranks(2, train_all, laid_out(judged, layouts))
    for layout in layouts:
        found = first[layout]["metrics"]
        # as texts: a share is NaN before there are two looks
        assert all(repr(found[name]) == repr(one[name]) for name in named), layout


@pytest.mark.slow
def test_a_run_over_ranks_repeats_to_the_bit(base):
    again = {f"{name}, again": each for name, each in TWO.items()}
    first = call_over_ranks(2, train_all, laid_out(base, TWO | again, precision="16-mixed"))[0]
    for name in TWO:
        assert same_bits(first[name], first[f"{name}, again"]), name


@pytest.mark.slow
def test_ranks_stop_together_once_the_loss_is_no_number(base):
    """One that went on would wait for the others until its connection is lost."""
    wild = replace(
        base,
        optimizer=replace(base.optimizer, lr=1e30, warmup_steps=0),
        train=replace(base.train, steps=20),
    )
    one = train_all({"one": wild}, ALONE)["one"]
    layouts = {name: TWO[name] for name in ("ddp", "fsdp", "tensor")}
    first, second = call_over_ranks(2, train_all, laid_out(wild, layouts))
    assert one["ended_at"] < 20
    for name in layouts:
        assert first[name]["ended_at"] == second[name]["ended_at"] == one["ended_at"], name


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["ddp", "fsdp", "sequence"])
def test_looking_changes_no_bit_over_ranks(base, layout):
    config = replace(base, parallel=TWO[layout], precision="bf16-mixed")
    assert all(check.equal for check in call_over_ranks(2, _checked, config))


def _checked(config, ranks):
    from stability.model.ranks import joined
    from stability.study.assemble import resolve_device

    with joined(ranks, resolve_device(config)):
        return check_observer(config, 2, ranks)


@given(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]), st.sampled_from([1, 2]), st.data())
def test_ranks_share_out_the_batch_of_one(base, replicas, accumulate, tensor, data):
    shard = data.draw(st.sampled_from([1, replicas]))
    layout = ParallelConfig(
        data=replicas // shard, shard=shard, tensor=tensor, accumulate=accumulate
    )
    config = replace(base, parallel=layout)
    whole = next(iter(load_data(base).train_dataloader())).tolist()
    seen = []
    for rank in range(layout.ranks):
        module = load_data(config, Ranks(rank=rank, count=layout.ranks))
        parts = iter(_loader(module, accumulate))
        first = [row for _ in range(accumulate) for row in next(parts).tolist()]
        if rank % tensor:
            assert first == seen[-1], "ranks that share a layer have the same samples"
        else:
            seen.append(first)
    assert [row for part in seen for row in part] == whole


def _loader(module: TextDataModule, per_step: int):
    from types import SimpleNamespace

    module.trainer = SimpleNamespace(accumulate_grad_batches=per_step, global_step=0)
    return module.train_dataloader()


@pytest.mark.parametrize(
    ("model", "parallel", "said"),
    [
        ({"heads": 2}, {"tensor": 4}, "must divide model.heads, 2, and kv_heads, 2, got 4"),
        ({"kv_heads": 1}, {"tensor": 2}, "and kv_heads, 1, got 2"),
        ({"dropout": 0.1}, {"data": 2}, "model.dropout must be 0 over 2 ranks, got 0.1"),
        ({"context": 33}, {"tensor": 2, "sequence": True}, "must divide model.context, 33"),
    ],
)
def test_a_model_that_cannot_be_laid_out_is_refused(base, model, parallel, said):
    config = replace(base, model=replace(base.model, **model), parallel=ParallelConfig(**parallel))
    with pytest.raises(ValueError, match=said):
        check_layout(config)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"data": 0}, "parallel: data must be >= 1, got 0"),
        ({"sequence": True}, "sequence must be false where tensor is 1"),
        ({"tensor": 2, "reduce": "bf16"}, "reduce must be 'own' where data and shard are 1"),
        ({"fault": "replica_left_out"}, "fault must be '' where data and shard are 1"),
    ],
)
def test_a_layout_that_is_none_is_refused(given, said):
    with pytest.raises(ValueError, match=said):
        ParallelConfig(**given)


def test_a_batch_that_ranks_cannot_share_is_refused(base):
    with pytest.raises(ValueError, match=r"must divide train.batch_size, 8, got 3"):
        replace(base, parallel=ParallelConfig(data=3))


class _Killer(SilentObserver):
    """Kills the second rank of the arm `sharded` once five updates are made.

    A checkpoint is written beside the training, and the one of step 4 waits for that of step 2.
    """

    def run_advanced(self, arm, seed, step, loss):
        super().run_advanced(arm, seed, step, loss)
        if arm == "sharded" and step == 5:
            # they are named by number, in the order in which they were started
            number = {int(x.name.split("-")[-1]): x for x in multiprocessing.active_children()}
            os.kill(number[max(number)].pid, signal.SIGKILL)


@pytest.mark.slow
def test_a_rank_that_dies_ends_the_run_with_its_name_and_it_goes_on_to_the_same_bits(
    write_study, tmp_path
):
    def edit(content):
        content["base"]["probe"] = {"every": 0}
        content["arms"] = {"baseline": {}, "sharded": {"parallel": {"shard": 2}}}
        content["base"]["train"] |= {"steps": 10, "keep_checkpoints": 0}
        content["arms"]["again"] = content["arms"]["sharded"]
        content["seeds"] = [0]
        content.pop("yardstick")

    study, options = load_study(write_study(edit), None), TrainOptions(wandb_mode="disabled")
    killed = _Killer()
    runs = run_study(study, tmp_path, options=options, observer=killed)
    said = {arm: (state, message) for arm, _, state, message in killed.ended}
    assert said["sharded"] == ("failed", "rank 1: killed by signal 9")
    manifests = {run.arm.name: run.paths.manifest for run in runs}
    assert read_manifest(manifests["sharded"]).message == "rank 1: killed by signal 9"
    assert checkpoint_steps(runs[1].paths)[0] == 2

    run_study(study, tmp_path, options=options, observer=SilentObserver())
    ended = {arm: read_manifest(path) for arm, path in manifests.items()}
    assert {each.state for each in ended.values()} == {"finished"}
    weights = {arm: each.hashes["final_weights"] for arm, each in ended.items()}
    assert weights["sharded"] == weights["again"] != weights["baseline"]
    for arm in ("sharded", "again"):
        # what the first rank has written is what one rank would have
        assert ended[arm].hashes["batches"] == ended["baseline"].hashes["batches"]
        assert prove_pair(runs[0].paths, RunPaths(manifests[arm].parent)).state == "holds"

    # a checkpoint is whole: the run goes on from it to the same bits, and so does another layout
    same = plan_fork(RunPaths(manifests["sharded"].parent), 4, {}, name="same")
    assert run_fork(same, options, SilentObserver()).state == "finished"
    assert set(fork_drifts(same).values()) == {0.0}
    other = plan_fork(runs[0].paths, 4, {"parallel": {"data": 2}}, name="other")
    assert run_fork(other, options, SilentObserver()).state == "finished"
    assert 0 < fork_drifts(other)[10] < 1e-3


def test_more_ranks_than_gpus_are_refused_before_anything_is_written(
    write_study, tmp_path, monkeypatch
):
    def edit(content):
        content["base"]["train"].pop("accelerator")
        content["arms"] = {"baseline": {}, "wide": {"parallel": {"data": 4}}}
        content.pop("yardstick")

    study = load_study(write_study(edit), None)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(StudyError, match=r"at most 2 ranks here, one a GPU, got 4 in arm wide"):
        check_study(plan_study(study, tmp_path))


class _Forger(SilentObserver):
    """Puts other initial weights into the baseline's manifest once it has ended."""

    manifest: Path

    def run_ended(self, arm, seed, state, message):
        super().run_ended(arm, seed, state, message)
        if arm == "baseline":
            known = read_manifest(self.manifest)
            other = {**known.hashes, "init_weights": 64 * "0"}
            write_manifest(self.manifest, replace(known, hashes=other))


@pytest.mark.slow
def test_a_failure_of_the_first_rank_ends_the_run_at_once_with_its_reason(write_study, tmp_path):
    """The other rank is in the middle of an exchange, and must not be waited for."""

    def edit(content):
        content["base"]["probe"] = {"every": 0}
        content["arms"] = {"baseline": {}, "sharded": {"parallel": {"shard": 2}}}
        content["seeds"] = [0]
        content.pop("yardstick")

    study, observer = load_study(write_study(edit), None), _Forger()
    observer.manifest = plan_study(study, tmp_path)[0].paths.manifest
    began = time.monotonic()
    runs = run_study(
        study, tmp_path, options=TrainOptions(wandb_mode="disabled"), observer=observer
    )
    said = {arm: message for arm, _, _, message in observer.ended}
    assert said["sharded"].startswith("pair contract: sharded, seed 0: hashes.init_weights must be")
    assert read_manifest(runs[1].paths.manifest).message == said["sharded"]
    # not the half hour after which an exchange gives up
    assert time.monotonic() - began < PATIENCE.total_seconds() / 2
