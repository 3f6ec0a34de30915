"""What is refused before a transformers model runs, and how such a model is told."""

import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch import nn

from stability.intercept.transformers import (
    catch_transformers,
    check_transformers,
    is_transformers_model,
)

ROOT = Path(__file__).parents[3]
tiny = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("tiny_transformers.py"))))


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("gpt2", "attn_pdrop"),
        ("llama", "attention_dropout"),
        ("bert", "attention_probs_dropout_prob"),
    ],
)
def test_attention_dropout_is_refused_in_training_only(name, field):
    model = tiny.TINY[name].build()
    setattr(model.config, field, 0.1)
    check_transformers(model.eval())
    message = rf"check_transformers: config.{field} of \S+ must be 0 in training, got 0.1; build"
    with pytest.raises(ValueError, match=message):
        check_transformers(model.train())
    with (
        pytest.raises(ValueError, match="check_transformers: config"),
        catch_transformers(model, lambda call, primary: call.q),
    ):
        pass


def test_learned_sinks_are_refused():
    model = tiny.TINY["llama"].build()
    check_transformers(model)
    model.model.layers[1].self_attn.sinks = nn.Parameter(model.lm_head.weight[0, :4].detach())
    message = "attention of model.layers.1.self_attn must have no sinks, got LlamaAttention with"
    with pytest.raises(ValueError, match=message):
        check_transformers(model)


def test_other_implementations_are_refused():
    model = tiny.TINY["llama"].build()
    model.config._attn_implementation_internal = "flash_attention_2"
    message = (
        "check_transformers: _attn_implementation of model.layers.0.self_attn must be 'eager' or "
        r"'sdpa', got 'flash_attention_2'; call model.set_attn_implementation\('sdpa'\)"
    )
    with pytest.raises(ValueError, match=message):
        check_transformers(model)


def test_models_of_transformers_are_told_without_importing_it():
    assert is_transformers_model(tiny.TINY["gpt2"].build())
    assert is_transformers_model(nn.Sequential(tiny.TINY["gpt2"].build()))
    code = (
        "import sys; from torch import nn\n"
        "from stability.intercept.transformers import is_transformers_model\n"
        "assert not is_transformers_model(nn.Linear(2, 2))\n"
        "assert 'transformers' not in sys.modules"
    )
    path = f"{ROOT}:{ROOT / 'kernels'}"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": path}, timeout=120)
