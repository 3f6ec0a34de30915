"""Right attentions are told from wrong ones by the gradient of a GPT that trains in BF16.

A GPT of 3 layers, width 64, 4 heads and context 64 trains with plain attention at batch 8 and
AdamW 1e-3 on the standard library's text. On its weights and batches each attention's isolated
error is measured.
"""

import functools
import math
from collections import defaultdict
from functools import partial

import numpy as np
import pytest
import torch

from attention_kernels import PROFILES, baseline_attention, flash_attention
from attention_kernels.testing.faults import injected_bias, plant
from stability.config.schema import DataConfig, ModelConfig, OptimizerConfig
from stability.data.datamodule import TextDataModule
from stability.metrics.coherence import coherence_of
from stability.model.gpt import GPT
from stability.model.initial_weights import initialise
from stability.model.lightning_module import LanguageModel, next_token_loss
from stability.probe.gradient_evidence import GradientMeter
from stability.study.model_gradients import ModelGradients

MODEL = ModelConfig(depth=3, width=64, heads=4, context=64)


FA2 = partial(flash_attention, numerics=PROFILES["fa2"])
ATTENTIONS = {
    "fa2": FA2,
    "bias 0.2 ULP": injected_bias(FA2, 0.2),
    "dropped_key": plant(FA2, "dropped_key"),
}


def _measured(names, looks):
    """Return the geometric mean of the ratio, and share and its error, of each attention."""
    model = GPT(MODEL, [baseline_attention] * MODEL.depth)
    initialise(model, 0)
    trainer = LanguageModel(model, OptimizerConfig(), looks).configure_optimizers()
    optimizer, schedule = trainer["optimizer"], trainer["lr_scheduler"]["scheduler"]
    data = TextDataModule(
        DataConfig(), context=MODEL.context, batch_size=8, steps=looks, order_seed=0
    )
    data.setup("fit")
    gradients = {
        name: ModelGradients(
            config=MODEL,
            precision="bf16-mixed",
            candidate=[ATTENTIONS[name]] * MODEL.depth,
            baseline=[baseline_attention] * MODEL.depth,
            changed=[True] * MODEL.depth,
        )
        for name in names
    }
    meters, ratios = {name: GradientMeter() for name in names}, defaultdict(list)
    last = {}
    for batch in data.train_dataloader():
        weights = dict(model.named_parameters())
        of_any = partial(gradients[names[0]].of, weights, batch)
        shared = functools.cache(lambda role, of_any=of_any: of_any(role, True))
        for name in names:

            def take(role, isolated, name=name, weights=weights, batch=batch, shared=shared):
                if role != "candidate":
                    return shared(role)
                return gradients[name].of(weights, batch, role, isolated)

            last[name] = meters[name].look(take, as_trained=False).metrics
            ratios[name].append(last[name]["gradient/all/ratio"])
        with torch.autocast("cpu", torch.bfloat16):
            loss = next_token_loss(model(batch[:, :-1]), batch)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return {
        name: (
            math.exp(float(np.log(ratios[name]).mean())),
            last[name]["gradient/all/share"],
            last[name]["gradient/all/share_se"],
        )
        for name in names
    }


def _rows(found):
    return "\n".join(f"{name:16} {r:8.3f} {f:+.4f} {se:.4f}" for name, (r, f, se) in found.items())


@pytest.mark.long
def test_a_right_attention_a_biased_and_a_broken_one_are_told_apart():
    found = _measured(list(ATTENTIONS), 40)
    ratio, share, error = found["fa2"]
    assert 0.8 < ratio < 1.2, _rows(found)
    assert share + 1.73 * error < 0.01, _rows(found)
    ratio, share, error = found["bias 0.2 ULP"]
    assert ratio < 4, _rows(found)
    assert share - 1.73 * error > 0.01, _rows(found)
    assert found["dropped_key"][0] > 10, _rows(found)


def test_sketched_shares_are_those_of_the_whole_gradients():
    model = GPT(MODEL, [baseline_attention] * MODEL.depth)
    initialise(model, 0)
    gradients = ModelGradients(
        config=MODEL,
        precision="bf16-mixed",
        candidate=[ATTENTIONS["bias 0.2 ULP"]] * MODEL.depth,
        baseline=[baseline_attention] * MODEL.depth,
        changed=[True] * MODEL.depth,
    )
    weights, meter, errors = dict(model.named_parameters()), GradientMeter(), []
    generator = torch.Generator().manual_seed(0)
    for _ in range(6):
        batch = torch.randint(0, 256, (2, MODEL.context + 1), generator=generator)
        take = functools.cache(partial(gradients.of, weights, batch))
        metrics = meter.look(take, as_trained=False).metrics
        both = [take(role, True) for role in ("candidate", "golden")]
        errors.append(torch.cat([(both[0][n] - both[1][n]).double().flatten() for n in weights]))
    whole = torch.stack(errors)
    exact = coherence_of((whole @ whole.T).numpy())
    # six looks are fifteen pairs; each has the sketch's error of about 1 % of the squares
    assert metrics["gradient/all/share"] == pytest.approx(exact.share, abs=0.01)
    assert metrics["gradient/all/coherence"] == pytest.approx(exact.coherence, rel=0.05)
