"""`stability probe`: from a model's name and a text to records, a table and a page."""

import json
import re

import pytest
import torch
import transformers

from stability.cli.main import main
from stability.records.events import read_log_and_events
from stability.records.metric_log import read_metrics
from stability.records.probe_record import read_probe_record

OWN = """
import torch
from attention_kernels import flash_attention

calls = [0]

def good(q, k, v, *, causal, scale=None, attn_mask=None):
    return flash_attention(q, k, v, causal=causal, scale=scale, attn_mask=attn_mask)

def bad(q, k, v, *, causal, scale=None, attn_mask=None):
    calls[0] += 1
    if calls[0] == 2:  # the last layer is the first that a backward pass reaches
        seen = torch.ones(1, q.shape[1], 1, k.shape[2], dtype=torch.bool)
        seen[:, 1, :, 0] = False
        attn_mask = seen
    return flash_attention(q, k, v, causal=causal, scale=scale, attn_mask=attn_mask)

def fails(q, k, v, *, causal, scale=None):
    raise RuntimeError("no such kernel")
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders of tiny models: a Llama with weights, a GPT-2 with dropout, a ViT, and a text."""
    root = tmp_path_factory.mktemp("models")
    llama = transformers.LlamaConfig(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(llama).save_pretrained(root / "llama")
    gpt2 = transformers.GPT2Config(vocab_size=256, n_embd=64, n_layer=2, n_head=4, n_positions=64)
    gpt2.save_pretrained(root / "gpt2")
    bert = transformers.BertConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        architectures=["BertForMaskedLM"],
    )
    bert.save_pretrained(root / "bert")
    vit = transformers.ViTConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4
    )
    vit.save_pretrained(root / "vit")
    (root / "text.txt").write_text("All that is gold does not glitter. " * 40)
    return root


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def _probe(folders, out, *words, model="llama"):
    arguments = ["--model", str(folders / model), "--text", str(folders / "text.txt")]
    return main(["probe", *arguments, "--length", "16", "--out", str(out), "--name", "p", *words])


@pytest.mark.parametrize("model", ["llama", "gpt2", "bert"])
def test_every_layer_is_compared_forward_and_backward_and_recorded(
    folders, tmp_path, model, capsys
):
    assert _probe(folders, tmp_path, "--steps", "2", model=model) == 0
    record = read_probe_record(tmp_path / "p")
    assert record.steps == 2
    assert list(record.shadows) == ["flash:fa2"]
    metrics = read_metrics(tmp_path / "p" / "metrics.jsonl")
    assert record.layers
    for layer in record.layers:
        for what in ("out", "dq", "dk", "dv"):
            assert metrics[f"deviation/{layer}/{what}/error_ratio"].steps == [0, 1]
    printed = capsys.readouterr().out
    assert "random weights, bf16-mixed; tokens: bytes" in printed
    assert ("set to 0, since a shadow cannot repeat it" in printed) == (model != "llama")
    said = re.search(r"No layer or head is (surely )?beyond its limit: error ratio 2, ", printed)
    largest = re.search(r"the largest error ratio of a look is (\d+(?:\.\d+)?)", printed)
    assert bool(said[1]) == (float(largest[1]) > 2)
    assert (tmp_path / "p" / "probe.html").is_file()


@pytest.mark.slow
def test_given_weights_are_the_models_and_training_changes_what_comes_next(folders, tmp_path):
    found = {}
    for name, words in {
        "random": (),
        "seeded": ("--seed", "7"),
        "given": ("--weights", "given"),
        "trained": ("--weights", "given", "--lr", "0.01"),
    }.items():
        options = ("--steps", "2", "--precision", "32", "--tokenizer", "bytes")
        assert _probe(folders, tmp_path / name, *options, *words) == 0
        metrics = read_metrics(tmp_path / name / "p" / "metrics.jsonl")
        found[name] = metrics["watch/model.layers.0.self_attn/max_logit"].values
    # the folder's weights were drawn with seed 0, by the same code
    assert found["random"] == found["given"]
    assert found["seeded"][0] != found["given"][0]
    assert found["trained"][0] == found["given"][0]
    assert found["trained"][1] != found["given"][1]


def test_a_kernel_of_ones_own_is_located_and_a_failing_one_is_a_finding(
    folders, tmp_path, monkeypatch, capsys
):
    (tmp_path / "ownkernel.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    words = ("--candidate", "ownkernel:bad", "--json", "--precision", "32")
    assert _probe(folders, tmp_path / "a", *words) == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer["stands_out"][0].startswith("model.layers.1.self_attn, head 1: error ratio stan")
    several = "ownkernel:good,ownkernel:fails"
    assert _probe(folders, tmp_path / "b", "--candidate", several) == 1
    events = read_log_and_events(tmp_path / "b" / "p" / "metrics.jsonl")[1]
    assert len(events) == 3
    assert {event.text for event in events} == {"ownkernel:fails: RuntimeError: no such kernel"}
    assert "finding" in capsys.readouterr().out


WRONG = """
from attention_kernels import flash_attention

def _flash(q, k, v, causal, scale, attn_mask):
    return flash_attention(q, k, v, causal=causal, scale=scale, attn_mask=attn_mask)

def scaled(q, k, v, *, causal, scale=None, attn_mask=None):
    return 40 * _flash(q, k, v, causal, scale, attn_mask)

def raises(q, k, v, *, causal, scale=None, attn_mask=None):
    raise RuntimeError("no such kernel")

def nan(q, k, v, *, causal, scale=None, attn_mask=None):
    return _flash(q, k, v, causal, scale, attn_mask) * float("nan")
"""


@pytest.mark.parametrize(
    ("candidate", "headline"),
    [
        ("scaled", "every layer: error ratio is beyond its limit since step 0: out 2"),
        ("raises", "wrongkernels:raises failed in every layer: RuntimeError: no such kernel"),
        (
            "nan",
            "wrongkernels:nan returned values that are not finite in every layer, since step 0: "
            "out, dq, dk, dv",
        ),
    ],
)
def test_what_is_wrong_in_every_layer_is_the_headline_and_the_exit_code(
    folders, tmp_path, monkeypatch, capsys, candidate, headline
):
    """An error 20,000 times the baseline's everywhere stands out from nothing, nor does a crash."""
    (tmp_path / "wrongkernels.py").write_text(WRONG)
    monkeypatch.syspath_prepend(tmp_path)
    assert _probe(folders, tmp_path, "--candidate", f"wrongkernels:{candidate}") == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert headline in printed
    # before the table and the footnotes
    assert printed.index(headline) < printed.index("error: |candidate")
    page = (tmp_path / "p" / "probe.html").read_text()
    body = page[page.index("<header>") : page.index("</header>")]
    assert headline in body
    assert main(["show", str(tmp_path / "p")]) == 1
    assert headline in " ".join(capsys.readouterr().out.split())


def test_a_candidate_can_compute_in_some_layers(folders, tmp_path, capsys):
    words = ("--replace", "*.1.*", "--candidate", "flash:all_bf16")
    assert _probe(folders, tmp_path, *words) == 0
    record = read_probe_record(tmp_path / "p")
    assert record.primary["layers"] == "*.1.*"
    assert list(record.shadows) == ["own"]
    names = read_metrics(tmp_path / "p" / "metrics.jsonl")
    layers = {name.split("/")[1] for name in names if name.startswith("deviation/")}
    assert layers == {"model.layers.1.self_attn"}


def test_where_the_page_lies_is_printed_as_it_stands(folders, tmp_path, capsys):
    assert _probe(folders, tmp_path / "a[red]", "--replace", "*.1.*") == 0
    assert f"report: {tmp_path}/a[red]/p/" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--candidate", "flash:fa9"], "got 'fa9'; nearest: fa"),
        (["--candidate", ","], "candidate must name an attention, got ','"),
        (["--steps", "0"], "steps must be at least 1, got 0"),
        (["--text", "/nonexistent"], "text must be a file, got '/nonexistent'"),
        (["--length", "4000"], "text must hold steps * batch * length = 8000 tokens, got 1"),
        (
            ["--model", "no-such/model"],
            "a folder or a name that the hub or its cache has, got 'no-",
        ),
        (["--model", ""], "model must be given, as --model"),
        (["--tokenizer", "nothing"], "'nothing' is neither bytes, a tokenizer.json"),
        (["--overhead", "3"], "nrecognized arguments: --overhead"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(folders, tmp_path, capsys, words, message):
    with pytest.raises(SystemExit) as caught:
        _probe(folders, tmp_path, *words)
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_model_that_takes_no_text_and_a_folder_that_is_taken_are_refused(
    folders, tmp_path, capsys
):
    with pytest.raises(SystemExit):
        _probe(folders, tmp_path, model="vit")
    assert capsys.readouterr().err.startswith("stability: model must take text, got ViT")
    assert _probe(folders, tmp_path) == 0
    with pytest.raises(SystemExit):
        _probe(folders, tmp_path)
    assert capsys.readouterr().err.startswith("stability: folder must hold no probe yet")
