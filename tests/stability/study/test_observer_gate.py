"""The observer gate: looking changes no bit, and a probe that would change one is caught."""

from dataclasses import replace

import pytest
import torch

from stability.config.arms import expand
from stability.config.load import load_study
from stability.probe.attention_probe import AttentionProbe
from stability.recorder import trainer_door
from stability.records.manifest import read_manifest
from stability.records.paths import RunPaths
from stability.study.model_gradients import ModelGradients
from stability.study.observer_gate import check_observer
from stability.study.run_study import run_study
from stability.study.train_run import TrainOptions
from tests.conftest import SilentObserver

CHECKED = TrainOptions(wandb_mode="disabled", check_observer=True)


def _config(write_study, arm="baseline", **train):
    arms = {arm.name: arm.config for arm in expand(load_study(write_study(), None))}
    config = arms[arm]
    return replace(config, train=replace(config.train, **train))


@pytest.mark.parametrize(
    ("arm", "train"),
    [
        ("baseline", {}),
        ("flash_all_bf16", {}),
        ("fp32", {}),
        ("baseline", {"trainer": {"accumulate_grad_batches": 2}}),
        pytest.param(
            # with the whole model's gradient, which an arm of the same attention does not look at
            "flash_fa2",
            {"compile": "aot_eager"},
            # Dynamo looks at .grad of what flows between the graphs: torch/_dynamo/variables
            marks=pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not"),
        ),
    ],
    ids=["bf16-mixed", "flash", "fp32", "gradient-accumulation", "compiled"],
)
def test_every_instrument_changes_no_bit(write_study, arm, train):
    check = check_observer(_config(write_study, arm, **train), steps=2)
    assert check.equal
    assert check.steps == 2
    assert len(check.watched) == 64


@pytest.mark.parametrize("how", ["draws", "writes"])
def test_a_probe_that_disturbs_is_caught(write_study, monkeypatch, how):
    look = AttentionProbe._evaluate

    def disturbing(self, captured, dout):
        first = not captured.seen
        look(self, captured, dout)
        if first and how == "writes" and dout is not None:
            dout.mul_(1.01)

    def drawing(self, call, primary):
        return primary(call.q + torch.rand(()).to(call.q.dtype) * 1e-2, call.k, call.v)[0]

    if how == "writes":
        monkeypatch.setattr(AttentionProbe, "_evaluate", disturbing)
    else:
        monkeypatch.setattr(AttentionProbe, "attend", drawing)
    config = _config(write_study)
    # steps that the study asks for are none of the gate's
    later = replace(config, probe=replace(config.probe, steps=(100,)))
    assert not check_observer(config if how == "draws" else later, steps=2).equal


def test_an_evaluation_that_disturbs_is_caught(write_study, monkeypatch):
    predict = trainer_door.log_probabilities

    def disturbing(model, *args):
        with torch.no_grad():
            next(model.parameters()).mul_(1 + 2**-20)
        return predict(model, *args)

    monkeypatch.setattr(trainer_door, "log_probabilities", disturbing)
    assert not check_observer(_config(write_study), steps=2).equal


@pytest.mark.parametrize("what", ["batch", "weights"])
def test_a_look_at_the_gradient_that_disturbs_is_caught(write_study, monkeypatch, what):
    of = ModelGradients.of

    def disturbing(self, weights, batch, role, is_isolated, scale=1.0):
        found = of(self, weights, batch, role, is_isolated, scale)
        with torch.no_grad():
            if what == "batch":
                batch.copy_(batch.flip(0))
                batch[:, -1] = 7
            else:
                next(iter(weights.values())).mul_(1.0001)
        return found

    config = _config(write_study, "flash_all_bf16")
    monkeypatch.setattr(ModelGradients, "of", disturbing)
    assert not check_observer(config, steps=2).equal


def test_the_manifest_holds_the_result_and_a_broken_gate_stops_the_run(
    write_study, tmp_path, monkeypatch
):
    def one_arm(content):
        content["arms"] = {"baseline": {}}
        content.update(seeds=[0], yardstick="")
        content["base"]["train"].update(steps=2, snapshot_steps=[1])
        content["early_step"] = 1

    study = load_study(write_study(one_arm), None)
    observer = SilentObserver()
    run_study(study, tmp_path / "a", options=CHECKED, observer=observer, isolated=False)
    manifest = read_manifest(RunPaths.for_run(tmp_path / "a" / "tiny", "baseline", 0).manifest)
    assert manifest.observer["equal"] is True
    assert manifest.observer["watched"] == manifest.observer["unwatched"]

    def disturbing(self, call, primary):
        return primary(call.q * 1.01, call.k, call.v)[0]

    monkeypatch.setattr(AttentionProbe, "attend", disturbing)
    run_study(study, tmp_path / "b", options=CHECKED, observer=observer, isolated=False)
    assert observer.ended[-1][2] == "failed"
    assert "observer gate: after 4 steps the weights must be" in observer.ended[-1][3]
