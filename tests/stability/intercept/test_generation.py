"""Generation with cached keys, looked at token by token: right figures, and the same tokens."""

from itertools import product

import pytest
import torch
import transformers

from stability import shadow
from tests.sampling import one_in
from tests.stability.intercept.families.independent import recording

NEW, LENGTH = 6, 7
SIZES = {
    **{"vocab_size": 40, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16},
    **{"initializer_range": 0.3, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0},
}
KINDS = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM, {}),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM, {"sliding_window": 4}),
    "gpt_oss": (
        *(transformers.GptOssConfig, transformers.GptOssForCausalLM),
        {"num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 4},
    ),
}


def _model(kind, implementation):
    torch.manual_seed(0)
    config, build, more = KINDS[kind]
    model = build(config(**SIZES, **more))
    if kind == "gpt_oss":
        for layer in model.model.layers:
            torch.nn.init.normal_(layer.self_attn.sinks)
    model.set_attn_implementation(implementation)
    return model.eval()


def _generate(model, cache, padding, after):
    """Return tokens and logits; `after` is called with each token."""

    class Each(transformers.StoppingCriteria):
        def __call__(self, ids, scores, **_):
            after()
            return torch.zeros(len(ids), dtype=torch.bool)

    ids = torch.arange(1, 2 * LENGTH + 1).reshape(2, LENGTH)
    mask = torch.ones_like(ids)
    mask[1, :padding] = 0
    static = {"cache_implementation": "static", "disable_compile": True}
    made = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=NEW,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
        stopping_criteria=[Each()],
        **(static if cache == "static" else {}),
    )
    return made.sequences, torch.stack(made.logits)


CASES = [
    (kind, implementation, cache)
    for kind, implementation, cache in product(KINDS, ("sdpa", "eager"), ("dynamic", "static"))
    if (kind, implementation) != ("gpt_oss", "sdpa")  # transformers refuses its sinks there
]


@pytest.mark.parametrize(("kind", "implementation", "cache"), one_in(2, CASES))
@pytest.mark.parametrize(("inference", "padding"), [(False, 0), (True, 2)])
def test_each_token_is_measured_right_and_none_changes(
    kind, implementation, cache, inference, padding
):
    model = _model(kind, implementation)
    right, found = [], []
    with recording(model) as calls:

        def recompute():
            # at once: a static cache is written over
            right.append([call.relative_errors()["out"] for call in calls])
            calls.clear()

        expected = _generate(model, cache, padding, recompute)
    model = _model(kind, implementation)
    mode = torch.inference_mode() if inference else torch.no_grad()
    with mode, shadow(model, "flash:golden", evaluation=True) as probe:

        def step():
            probe.step()
            found.append(probe.metrics)

        made = _generate(model, cache, padding, step)
    assert all(torch.equal(x, y) for x, y in zip(expected, made, strict=True))
    assert not probe.findings
    assert [one.state for one in probe.coverage] == ["seen", "seen"]
    assert len(found) == len(right) == NEW
    # at first padding sees nothing, and is no number here
    start = 1 if padding else 0
    for figures, errors in zip(found[start:], right[start:], strict=True):
        for layer, error in zip(probe.layers, errors, strict=True):
            figure = figures[f"deviation/{layer}/out/golden_baseline_rel_fro"]
            assert figure == pytest.approx(error, abs=1e-12)
            assert 1e-9 < figure < 1e-6


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_each_token_may_be_a_micro_batch_of_one_step(cache):
    found = {}
    for which in ("first", "all"):
        model = _model("llama", "sdpa")
        options = {"evaluation": True, "micro_batches": which}
        with torch.no_grad(), shadow(model, "flash:golden", **options) as probe:
            _generate(model, cache, 0, lambda: None)
            probe.step()
        assert not probe.findings
        found[which] = {name.split("/")[1] for name in probe.metrics}
    layers = {f"model.layers.{index}.self_attn" for index in range(2)}
    assert found["first"] == layers
    later = {f"{layer}@batch{token}" for layer in layers for token in range(1, NEW)}
    assert found["all"] == layers | later
