"""The loss on held-out text is that of the recorded weights, and looking at it changes nothing."""

from dataclasses import replace

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn

from stability.config.convert import from_dict
from stability.config.load import load_study
from stability.config.schema import ArmConfig
from stability.model import held_out
from stability.recorder import writer as writer_file
from stability.recorder.trainer_door import TrainerDoor
from stability.recorder.witnessing import Witnessing
from stability.recorder.writer import LOG_PROBABILITIES, RunWriter
from stability.records.manifest import read_manifest
from stability.records.metric_log import MetricLog, read_metrics
from stability.records.metric_names import EVAL_LOSS
from stability.records.paths import RunPaths, prediction_steps, snapshot_steps
from stability.records.run_files import RunFiles, damage, read_run_snapshot
from stability.records.snapshots import read_snapshot
from stability.study.assemble import assemble, load_data
from tests.sampling import one_in
from tests.stability.study.recorded_bits import recorded_bits


def _expected(paths: RunPaths, step: int) -> torch.Tensor:
    """Log p of every held-out token, in FP64 from the logits of a model built from the records."""
    config = from_dict(ArmConfig, read_manifest(paths.manifest).config, "manifest")
    config = replace(config, probe=replace(config.probe, every=0))
    model = assemble(config).model
    model.load_state_dict(read_run_snapshot(paths, step))
    tokens = torch.stack(load_data(config).held_out_batches)
    is_mixed = config.precision == "bf16-mixed"
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=is_mixed):
        logits = torch.stack([model(batch[:, :-1]) for batch in tokens])
    log_p = logits.double().log_softmax(-1)
    return log_p.gather(-1, tokens[..., 1:, None]).squeeze(-1)


@pytest.mark.parametrize("arm", ["baseline", "flash_all_bf16", "fp32", "init_seed"])
def test_loss_and_predictions_are_those_of_the_snapshot(trained, arm):
    run = RunPaths.for_run(trained, arm, 1)
    losses = read_metrics(run.metrics)[EVAL_LOSS]
    assert losses.steps == snapshot_steps(run) == prediction_steps(run) == [0, 1, 2, 4, 6]
    for step in (0, 2, 6):
        expected = _expected(run, step)
        # each token's log p is rounded to FP32, by about 2**-24 of its size
        assert losses.values[losses.steps.index(step)] == pytest.approx(
            -float(expected.mean()), rel=1e-6
        )
        found = read_snapshot(run.predictions(step))[LOG_PROBABILITIES]
        assert found.dtype == torch.float32
        # cross-entropy subtracts logits of order 1 in FP32, some 5e-7 apart
        assert torch.allclose(found.double(), expected[0], rtol=1e-6, atol=1e-6)
    assert damage(run) == []
    assert run.name_of(run.predictions(4)) in read_manifest(run.manifest).files


def test_every_run_is_evaluated_on_the_same_text(trained):
    manifests = [read_manifest(path) for path in trained.rglob("manifest.json")]
    assert len(manifests) == 14
    assert len({manifest.hashes["held_out"] for manifest in manifests}) == 1
    assert len({manifest.hashes["batches"] for manifest in manifests}) == 2


def test_equal_runs_have_equal_losses_and_others_have_not(trained):
    losses = {
        arm: read_metrics(RunPaths.for_run(trained, arm, 0).metrics)[EVAL_LOSS].values
        for arm in ("baseline", "rerun", "flash_all_bf16")
    }
    assert losses["rerun"] == losses["baseline"] != losses["flash_all_bf16"]


class _WithDropout(LightningModule):
    """A module whose bits depend on the random generator and on the mode it is in."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.model = nn.Sequential(nn.Embedding(11, 8), nn.Dropout(0.5), nn.Linear(8, 11))

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(
            self.model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()
        )

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


def _trained_weights(fit, folder, blocks, *, watched):
    module = _WithDropout()
    batch = next(iter(blocks))
    files = RunFiles.unnamed(folder)
    log = MetricLog(folder / "updates.jsonl")
    door = TrainerDoor(
        RunWriter(files, log),
        module.model,
        range(5),
        Witnessing(module, 4, before={}),
        held_out=[batch],
        kept=1,
    )
    with torch.random.fork_rng():
        torch.manual_seed(5)
        fit(folder, module, [door] if watched else [], steps=4)
    log.close()
    return module.model[2].weight.detach().clone(), module.model[1].training


def test_evaluating_leaves_modes_and_generators_as_they_were(fit, blocks, tmp_path, monkeypatch):
    plain, _ = _trained_weights(fit, tmp_path / "plain", blocks, watched=False)
    watched, is_training = _trained_weights(fit, tmp_path / "watched", blocks, watched=True)
    assert torch.equal(plain, watched)
    assert is_training
    # without the guard, dropout would draw from the run's own generator
    monkeypatch.setattr(held_out, "_evaluating", lambda model, device: torch.no_grad())
    spoiled, _ = _trained_weights(fit, tmp_path / "spoiled", blocks, watched=True)
    assert not torch.equal(plain, spoiled)


def test_a_part_that_was_frozen_in_evaluation_mode_stays_in_it():
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Dropout(0.5), nn.Linear(2, 2)))
    model[1].eval()
    with held_out._evaluating(model, torch.device("cpu")):
        assert not any(module.training for module in model.modules())
    assert [module.training for module in model.modules()] == [True, True, False, False, False]


def _one_arm(content):
    content["arms"] = {"baseline": {}}
    content.update(seeds=[0], yardstick="")
    content["base"]["probe"] = {"every": 0}
    # no checkpoint between the snapshots of steps 2 and 4
    content["base"]["train"]["checkpoint_every"] = 3


@pytest.mark.parametrize(
    "at", one_in(3, ["before it is listed", "before it is written", "once it is listed"])
)
def test_a_run_stopped_at_its_predictions_ends_in_the_same_records(
    write_study, run_tiny, tmp_path, monkeypatch, at
):
    study = load_study(write_study(_one_arm))
    run_tiny(study, tmp_path / "whole")
    add, write = RunFiles.add, writer_file.write_snapshot

    def is_due(path):
        return path.parent.name == "predictions" and path.stem == "step-00000004"

    def stopping_add(self, path):
        if is_due(path) and at == "before it is listed":
            raise KeyboardInterrupt
        add(self, path)
        if is_due(path):
            raise KeyboardInterrupt

    def stopping_write(path, state):
        if is_due(path) and at == "before it is written":
            raise KeyboardInterrupt
        write(path, state)

    with monkeypatch.context() as patch:
        patch.setattr(RunFiles, "add", stopping_add)
        patch.setattr(writer_file, "write_snapshot", stopping_write)
        with pytest.raises(KeyboardInterrupt):
            run_tiny(study, tmp_path / "stopped")
    run = RunPaths.for_run(tmp_path / "stopped" / "tiny", "baseline", 0)
    assert read_manifest(run.manifest).state == "interrupted"
    assert run.predictions(4).exists() == (at != "before it is written")
    assert run_tiny(study, tmp_path / "stopped").ended[-1][2:] == ("finished", "")
    stopped, whole = (recorded_bits(tmp_path / name / "tiny") for name in ("stopped", "whole"))
    assert "baseline/seed-0/predictions/step-00000004.safetensors" in whole
    assert stopped == whole


def test_nothing_is_held_out_where_the_share_is_zero(write_study, run_tiny, tmp_path):
    def edit(content):
        _one_arm(content)
        content["base"]["held_out"] = {"share": 0}

    run_tiny(load_study(write_study(edit)), tmp_path)
    run = RunPaths.for_run(tmp_path / "tiny", "baseline", 0)
    assert EVAL_LOSS not in read_metrics(run.metrics)
    assert not run.predictions_dir.exists()
    assert read_manifest(run.manifest).hashes["held_out"] == ""


def test_an_arm_that_holds_out_other_text_is_no_pair(write_study, run_tiny, tmp_path):
    def edit(content):
        _one_arm(content)
        content["arms"]["other"] = {"held_out": {"share": 0.1}}

    with pytest.raises(
        ValueError, match=r"arms.other: held_out.share must be 0.05 .*, is 0.1: the text"
    ):
        run_tiny(load_study(write_study(edit)), tmp_path)
