"""`shadow` on transformers models: every result compared, bits untouched, errors found in place."""

import pytest
import torch

from attention_kernels import flash_attention
from stability import shadow
from stability.analysis.locate import Location, locate
from stability.records.metric_columns import Series
from tests.stability.intercept.tiny_transformers import TINY, padding

pytest.importorskip("transformers")

COMPARED = ("out", "dq", "dk", "dv", "carried", "total")
CASES = [(name, how) for name, tiny in TINY.items() for how in tiny.implementations]


def _loss(model, inputs):
    output = model(**inputs)
    found = output.logits if "logits" in output else output.last_hidden_state
    return found.float().square().mean()


def _gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("name", "how"), CASES, ids=[f"{n}-{h}" for n, h in CASES])
def test_forward_and_backward_of_every_layer_are_compared_and_nothing_changes(name, how):
    tiny = TINY[name]
    model = tiny.build().train()
    model.set_attn_implementation(how)
    inputs = tiny.inputs()
    if tiny.takes_padding:
        inputs["attention_mask"] = padding("right")
    loss = _loss(model, inputs)
    loss.backward()
    plain = _gradients(model)
    model.zero_grad()
    with shadow(model, "flash:fa2", heads=True, inside=True, inherited=True) as probe:
        watched = _loss(model, inputs)
        watched.backward()
        probe.step()
    assert torch.equal(loss, watched)
    assert not probe.findings
    for parameter, gradient in _gradients(model).items():
        assert torch.equal(gradient, plain[parameter]), parameter
    for layer in tiny.layers:
        for what in COMPARED:
            error = probe.metrics[f"deviation/{layer}/{what}/rel_fro"]
            assert 0 <= error < 1e-4, (layer, what)
        assert probe.metrics[f"deviation/{layer}/dq/golden_baseline_rel_fro"] < 1e-4
        assert probe.metrics[f"watch/{layer}/max_logit"] > 0


@pytest.mark.parametrize("name", list(TINY))
def test_a_key_dropped_in_layer_2_head_1_is_located_there(name):
    tiny = TINY[name]
    layers = [layer for layer in tiny.layers if "encoder_attn" not in layer]
    calls = [0]

    def drops(q, k, v, **mask):
        place = tiny.layers[calls[0] % len(tiny.layers)]
        calls[0] += 1
        if place == layers[2]:
            seen = torch.ones(1, q.shape[1], 1, k.shape[2], dtype=torch.bool)
            seen[:, 1, :, 1] = False
            given = mask.pop("attn_mask", None)
            if given is None:
                mask["attn_mask"] = seen
            elif given.dtype == torch.bool:
                mask["attn_mask"] = given & seen
            else:
                mask["attn_mask"] = given.masked_fill(~seen, -torch.inf)
        return flash_attention(q, k, v, **mask)

    model = tiny.build().eval()
    with (
        shadow(model, drops, heads=True, backward=False, evaluation=True) as probe,
        torch.no_grad(),
    ):
        model(**tiny.inputs())
        probe.step()
    assert not probe.findings
    found = locate({name: Series([0], [value]) for name, value in probe.metrics.items()})
    assert {each.place for each in found if each.what == "out"} == {Location(layers[2], 1)}


@pytest.mark.parametrize("direction", ["both", "forward", "backward"])
def test_a_candidate_takes_the_place_of_one_layers_attention(direction):
    """Only that layer is compared, and FP64 in its place changes little."""
    tiny = TINY["llama"]
    layer = tiny.layers[1]
    results = []
    for replace in ((), (layer,)):
        model = tiny.build().train()
        with shadow(model, "flash:golden", replace=replace, direction=direction) as probe:
            _loss(model, tiny.inputs()).backward()
            probe.step()
        results.append((_gradients(model), probe.metrics))
    (own, _), (replaced, metrics) = results
    assert {name.split("/")[1] for name in metrics if name.startswith("deviation")} == {layer}
    assert any(not torch.equal(own[name], replaced[name]) for name in own)
    for name, gradient in own.items():
        torch.testing.assert_close(replaced[name], gradient, rtol=1e-3, atol=1e-6)
