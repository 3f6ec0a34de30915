"""Gradients of a study's model under three attentions: exact where they must be, and traceless."""

from dataclasses import replace

import pytest
import torch

from attention_kernels import flash_attention
from stability.callbacks.gradient_callback import GradientProbe
from stability.config.arms import expand, with_seed
from stability.config.load import load_study
from stability.config.schema import AttentionConfig
from stability.model.lightning_module import next_token_loss
from stability.probe.gradient_evidence import GradientMeter
from stability.records.metric_log import read_metrics
from stability.records.paths import RunPaths
from stability.study.assemble import assemble, load_data
from stability.study.model_gradients import attention_rounding, gradients_of_arm
from tests.stability.study.recorded_bits import recorded_bits

CPU = torch.device("cpu")
OF_MODULES = "bf16-mixed, *.mlp_*=emulated:e4m3, blocks.layer_1.query=fp32"
PRECISIONS = ("bf16-mixed", "16-mixed", "32-true", "emulated:e5m10", OF_MODULES)


def _config(write_study, precision="bf16-mixed", **attention):
    def edit(content):
        content["base"]["precision"] = precision
        arm = {"implementation": "flash", "profile": "all_bf16"}
        content["arms"] = {"baseline": {}, "other": {"attention": {**arm, **attention}}}
        content["yardstick"] = "other"

    arms = {arm.name: arm.config for arm in expand(load_study(write_study(edit), None))}
    return with_seed(arms["other"], 0)


def _at(config):
    """Return the model that `config` trains, its weights by name, and its first batch."""
    config = replace(config, probe=replace(config.probe, every=0))
    model = assemble(config).model
    if config.precision == "bf16-true":
        model.bfloat16()
    batch = next(iter(load_data(config).train_dataloader()))
    return model, dict(model.named_parameters()), batch


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "32-true", OF_MODULES])
def test_as_trained_the_candidate_has_the_runs_own_gradient(write_study, precision):
    config = _config(write_study, precision)
    model, weights, batch = _at(config)
    gradients = gradients_of_arm(config, CPU)
    with torch.autocast("cpu", torch.bfloat16, enabled=precision.startswith("bf16-mixed")):
        loss = next_token_loss(model(batch[:, :-1]), batch)
    loss.backward()  # outside, as the trainer: autocast would lower the products of FP32 modules
    own = gradients.of(weights, batch, "candidate", False)
    for name, parameter in weights.items():
        assert torch.equal(own[name], parameter.grad), name


@pytest.mark.parametrize("precision", PRECISIONS)
def test_errors_are_small_and_the_rest_of_the_model_is_out_of_the_way(write_study, precision):
    config = _config(write_study, precision)
    _, weights, batch = _at(config)
    gradients = gradients_of_arm(config, CPU)
    scale = 2.0**12 if precision == "16-mixed" else 1.0
    metrics = (
        GradientMeter()
        .look(lambda role, isolated: gradients.of(weights, batch, role, isolated, scale))
        .metrics
    )
    bits = {"bf16": 8, "16-m": 11, "emul": 11, "32-t": 24}[precision[:4]]
    # a rounding of the attention's tensors is at most 2^-bits, of which most average out
    assert 0 < metrics["gradient/all/baseline_error"] < 4 * 2.0**-bits
    if bits < 24:
        assert metrics["gradient/all/ratio"] > 1.3  # all_bf16 is worse than the plain one
        # as trained, the rounding of all other layers falls anew with each change
        as_trained = metrics["gradient/all/baseline_error_as_trained"]
        assert as_trained > 1.5 * metrics["gradient/all/baseline_error"]


def test_at_fp64_there_is_nothing_to_judge_by(write_study):
    assert gradients_of_arm(_config(write_study, "64-true"), CPU) is None


def test_the_golden_as_candidate_is_exact_around_fp32(write_study):
    config = _config(write_study, "32-true")
    config = replace(config, attention=AttentionConfig(implementation="golden"))
    _, weights, batch = _at(config)
    gradients = gradients_of_arm(config, CPU)
    golden, candidate = (
        gradients.of(weights, batch, role, True) for role in ("golden", "candidate")
    )
    difference = max(float((golden[n] - candidate[n]).abs().max()) for n in golden)
    # the candidate's own results are rounded to FP32, the golden's are not
    assert 0 < difference < 1e-6


def test_a_layer_that_the_arm_leaves_alone_attends_alike_in_all_three(write_study):
    config = _config(write_study, layers=["layer_1"])
    gradients = gradients_of_arm(config, CPU)
    assert list(gradients.changed) == [False, True]
    assert gradients.candidate[0] is gradients.baseline[0]
    assert gradients.candidate[1] is not gradients.baseline[1]
    whole = gradients_of_arm(_config(write_study), CPU)
    _, weights, batch = _at(config)
    golden = gradients.of(weights, batch, "golden", True)
    deeper = whole.of(weights, batch, "golden", True)
    # the baseline's error in layer_0 is in all three, so in no difference of two
    assert any(not torch.equal(golden[name], deeper[name]) for name in golden)


def test_arms_that_leave_the_attention_alone_have_no_evidence(write_study):
    arms = {arm.name: arm.config for arm in expand(load_study(write_study(), None))}
    found = {name: gradients_of_arm(config, CPU) is not None for name, config in arms.items()}
    assert [name for name, has in found.items() if has] == ["flash_all_bf16", "flash_fa2"]


@pytest.mark.parametrize("role", ["candidate", "baseline", "golden"])
@pytest.mark.parametrize("is_isolated", [True, False], ids=["isolated", "as-trained"])
def test_a_look_leaves_no_trace(write_study, role, is_isolated):
    config = _config(write_study, numerics={"rounding": "stochastic"})
    model, weights, batch = _at(config)
    hashes = {name: (x.detach().clone(), x._version) for name, x in weights.items()}
    tokens, attention = batch.clone(), model.attention
    with torch.autocast("cpu", torch.bfloat16):
        before = torch.get_rng_state()
        gradients_of_arm(config, CPU).of(weights, batch, role, is_isolated)
        assert torch.is_autocast_enabled("cpu")
        assert torch.equal(before, torch.get_rng_state())
    assert torch.get_default_dtype() is torch.float32
    assert model.attention is attention
    assert torch.equal(tokens, batch)
    for name, (value, version) in hashes.items():
        assert torch.equal(weights[name], value)
        assert weights[name]._version == version
        assert weights[name].grad is None


def test_what_attention_is_given_follows_the_precision():
    assert attention_rounding("bf16-mixed") is torch.bfloat16
    assert attention_rounding("16-mixed") is torch.float16
    assert attention_rounding("32-true") is torch.float32
    assert attention_rounding("emulated:e4m3").name == "e4m3"


def _with_looks(content):
    content["arms"] = {arm: content["arms"][arm] for arm in ("baseline", "flash_fa2", "fp32")}
    content["base"]["probe"] = {"every": 0, "gradient_every": 2}


@pytest.mark.slow
def test_in_a_study_the_first_seed_alone_pays_for_it(write_study, run_tiny, tmp_path):
    run_tiny(load_study(write_study(_with_looks), None), tmp_path)
    for arm in ("baseline", "flash_fa2", "fp32"):
        for seed in (0, 1):
            metrics = read_metrics(RunPaths.for_run(tmp_path / "tiny", arm, seed).metrics)
            looked = "gradient/all/ratio" in metrics
            assert looked == (arm == "flash_fa2" and seed == 0)
            if looked:
                assert metrics["gradient/all/ratio"].steps == [0, 2, 4]
                assert metrics["gradient/all/looks"].values == [1, 2, 3]


@pytest.mark.slow
def test_an_interrupted_run_goes_on_to_the_same_records(
    write_study, run_tiny, tmp_path, monkeypatch
):
    study = load_study(write_study(_with_looks), None)
    study = replace(study, seeds=(0,), base=study.base)
    run_tiny(study, tmp_path / "whole")
    look = GradientProbe._look

    def interrupted(self, trainer, batch):
        look(self, trainer, batch)
        if trainer.global_step == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(GradientProbe, "_look", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_tiny(study, tmp_path / "stopped")
    monkeypatch.setattr(GradientProbe, "_look", look)
    run_tiny(study, tmp_path / "stopped")
    whole, stopped = (recorded_bits(tmp_path / name / "tiny") for name in ("whole", "stopped"))
    assert whole == stopped
    log = RunPaths.for_run(tmp_path / "whole" / "tiny", "flash_fa2", 0).metrics
    assert read_metrics(log)["gradient/all/looks"].values == [1, 2, 3]


@pytest.mark.slow
def test_a_candidate_that_raises_in_a_look_does_not_stop_the_run(
    write_study, run_tiny, tmp_path, monkeypatch
):
    study = replace(load_study(write_study(_with_looks), None), seeds=(0,))

    def failing(*arguments, **keywords):
        raise RuntimeError("no kernel here")

    monkeypatch.setattr("stability.study.model_gradients.isolated_attention", failing)
    ended = run_tiny(study, tmp_path).ended
    assert {state for _, _, state, _ in ended} == {"finished"}
    log = RunPaths.for_run(tmp_path / "tiny", "flash_fa2", 0).metrics
    metrics = read_metrics(log)
    assert "gradient/all/ratio" not in metrics  # the baseline is needed first, and raises too
    # of the looks, each fourth one alone has the gradient as trained
    assert metrics["gradient/all/ratio_as_trained"].steps == [0]
    assert "baseline: RuntimeError: no kernel here" in log.read_text()


def test_flash_is_what_the_candidate_runs(write_study):
    # else all of the above could hold of the baseline alone
    gradients = gradients_of_arm(_config(write_study), CPU)
    q = torch.randn(1, 2, 32, 16, dtype=torch.bfloat16)
    numerics = gradients.candidate[0].keywords["numerics"]
    expected = flash_attention(q, q, q, causal=True, numerics=numerics)
    assert torch.equal(gradients.candidate[0](q, q, q, causal=True), expected)
    assert not torch.equal(gradients.baseline[0](q, q, q, causal=True), expected)


def test_a_gradient_reads_no_packages_metadata(write_study, monkeypatch):
    config = _config(write_study)
    _, weights, batch = _at(config)
    gradients = gradients_of_arm(config, CPU)
    monkeypatch.setattr(
        "stability.probe.attention_registry.plugins",
        lambda group: pytest.fail(f"{group} was read again, at each look"),
    )
    for role in ("candidate", "baseline", "golden"):
        assert gradients.of(weights, batch, role, True)
        assert gradients.of(weights, batch, role, False)
