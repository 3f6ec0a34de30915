"""What a run attends by is tried on its GPU before anything is written, forward and backward."""

from dataclasses import replace

import pytest
import torch

from stability.config.load import load_study
from stability.config.precision import parse_precision
from stability.config.schema import AttentionConfig, ModelConfig
from stability.probe.attention_registry import resolve_attention
from stability.study import run_study
from stability.study.attention_trial import try_attention
from stability.study.run_study import StudyError, check_study, plan_study

CPU = torch.device("cpu")
MODEL = ModelConfig(depth=1, width=64, heads=4, kv_heads=2, context=1024)
TOO_LARGE = "triton: block_q and block_k must fit the GPU at head_dim 16"


class _Backward(torch.autograd.Function):
    """The identity, whose backward kernel does not fit."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, *_):
        raise ValueError(TOO_LARGE)


def _attention(calls, profile="fa2", engine="triton", fits=True, **numerics):
    """Flash attention, said to run on an engine, that notes its inputs and may not fit backward."""
    config = AttentionConfig(implementation="flash", profile=profile, numerics=numerics)
    found = resolve_attention(config, CPU)

    def attend(q, k, v, **options):
        calls.append((tuple(q.shape), tuple(k.shape), q.dtype, options))
        out = found.function(q, k, v, **options)
        return out if fits else _Backward.apply(out)

    return replace(found, function=attend, description={**found.description, "engine": engine})


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [
        ("bf16-mixed", torch.bfloat16),
        ("16-mixed", torch.float16),
        ("32-true", torch.float32),
        ("emulated:e4m3-saturate", torch.float32),
        ("bf16-mixed, *.mlp_*=emulated:e4m3", torch.bfloat16),
    ],
)
def test_a_kernel_is_called_with_the_run_s_heads_and_dtype(precision, dtype):
    calls = []
    try_attention([_attention(calls)], MODEL, parse_precision(precision), CPU)
    assert calls == [((1, 4, 256, 16), (1, 2, 256, 16), dtype, {"causal": True})]


def test_a_kernel_that_fits_forward_alone_is_refused_by_its_name():
    calls = []
    attentions = [_attention(calls), _attention(calls, "all_bf16", fits=False)]
    with pytest.raises(ValueError, match=rf"^flash:all_bf16: {TOO_LARGE}$"):
        try_attention(attentions, MODEL, parse_precision("bf16-mixed"), CPU)
    assert len(calls) == 2


def test_what_triton_does_not_run_is_left_alone():
    calls = []
    attention = _attention(calls, engine="twin", fits=False)
    try_attention([attention], MODEL, parse_precision("bf16-mixed"), CPU)
    assert calls == []


def test_a_kernel_that_rounds_by_a_key_is_given_one():
    calls = []
    attention = _attention(calls, rounding="stochastic")
    assert attention.takes_rounding_key
    try_attention([attention], MODEL, parse_precision("bf16-mixed"), CPU)
    assert calls[0][3]["rounding_key"][:2] == (0, 0)


@pytest.mark.parametrize(("isolated", "device"), [(True, "cuda"), (True, "cpu"), (False, "cuda")])
def test_the_process_of_a_study_holds_no_gpu(write_study, tmp_path, monkeypatch, isolated, device):
    """Runs that need all of it, or a GPU that takes one process at a time, come after it."""
    alone, here = [], []
    monkeypatch.setattr(run_study, "resolve_device", lambda _: torch.device(device))
    monkeypatch.setattr(run_study, "call_alone", lambda function, configs: alone.append(configs))
    monkeypatch.setattr(run_study, "try_attention", lambda *_: here.append(1))
    runs = plan_study(load_study(write_study()), tmp_path / "runs")
    check_study(runs, isolated=isolated)
    arms = len({run.arm.name for run in runs})
    on_gpu = device == "cuda"
    # all in one process, since each of them first imports all that trains
    assert [len(configs) for configs in alone] == [arms] * (isolated and on_gpu)
    assert len(here) == arms * (not isolated and on_gpu)


def test_arms_that_import_a_users_module_are_tried_each_in_a_process(
    write_study, tmp_path, monkeypatch
):
    """What one does to its process, another one's trial must not find."""
    alone = []
    monkeypatch.setattr(run_study, "resolve_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr(run_study, "call_alone", lambda function, configs: alone.append(configs))
    monkeypatch.setattr(run_study, "imports_user_modules", lambda config: True)
    runs = plan_study(load_study(write_study()), tmp_path / "runs")
    check_study(runs, isolated=True)
    assert len(alone) == len({run.arm.name for run in runs}) > 1
    assert all(len(configs) == 1 for configs in alone)


@pytest.mark.parametrize("place", ["attention", "shadow"])
def test_a_study_is_refused_before_anything_is_written(write_study, tmp_path, monkeypatch, place):
    def edit(content):
        own = {"implementation": "flash", "profile": "all_bf16"}
        content["base"]["probe"] = {"every": 2, "shadows": [own]}
        content["arms"] = {"baseline": {}, "flash": {"attention": own}}
        if place == "attention":
            content["base"]["probe"] = {"every": 0}
        content.pop("yardstick")

    def on_cpu(attentions, *sizes):
        broken = [_attention([], "all_bf16", fits=x.name != "flash:all_bf16") for x in attentions]
        try_attention(broken, *sizes[:2], CPU)

    # models are built on the CPU, whatever they train on
    monkeypatch.setattr(run_study, "resolve_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr(run_study, "try_attention", on_cpu)
    runs = plan_study(load_study(write_study(edit)), tmp_path / "runs")
    with pytest.raises(StudyError, match=rf"flash:all_bf16: {TOO_LARGE}"):
        check_study(runs)
    assert not (tmp_path / "runs").exists()
