"""Text to token ids."""

import huggingface_hub.constants
import pytest
import tokenizers
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stability.data.tokenizers import load_tokenizer


@settings(max_examples=50)
@given(st.lists(st.text(), max_size=5))
def test_bytes_give_the_text_back(texts):
    ids = load_tokenizer("bytes").encode(texts)
    assert ids.dtype == torch.int32
    decoded = bytes(ids.tolist()).decode("utf-8")
    assert decoded == "".join(f"{text}\n" for text in texts)


@pytest.fixture
def word_tokenizer(tmp_path):
    model = tokenizers.models.WordLevel({"[UNK]": 0, "a": 1, "b": 2, "\n": 3}, unk_token="[UNK]")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return str(tmp_path / "tokenizer.json")


def test_a_local_tokenizer_ends_each_document_and_keeps_the_order(word_tokenizer):
    tokenizer = load_tokenizer(word_tokenizer)
    assert tokenizer.vocab_size == 4
    assert tokenizer.encode(["ab", "x", ""]).tolist() == [1, 2, 3, 0, 3, 3]
    many = tokenizer.encode(["a", "b"] * 1500)
    assert many.tolist() == [1, 3, 2, 3] * 1500, "also where more than one chunk is needed"
    assert tokenizer.encode([]).numel() == 0


def test_what_is_no_tokenizer_is_refused(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    broken = tmp_path / "tokenizer.json"
    broken.write_text("{}")
    for name in (str(broken), "no/such-tokenizer"):
        with pytest.raises(ValueError, match=f"data.tokenizer: '{name}' is neither bytes") as no:
            load_tokenizer(name)
        assert "\n" not in str(no.value)
    assert capfd.readouterr() == ("", "")
