"""Turns text into token ids: bytes, or a Hugging Face tokenizer.

Each document ends with a newline, so that none runs into the next. Leaves out blocks
(`datamodule`).
"""

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Protocol

import numpy as np
import tokenizers
import torch
from torch import Tensor

from stability.data.hub import offline_if_unreachable

__all__ = ["Tokenizer", "load_tokenizer"]

_CHUNK = 1000
"""Documents encoded at a time: their ids are Python integers until then."""


class Tokenizer(Protocol):
    """What turns documents into one stream of token ids."""

    vocab_size: int

    def encode(self, texts: Sequence[str]) -> Tensor:
        """Return the ids of all `texts`, one after another, as a 1-D int32 tensor."""
        ...


class _Bytes:
    vocab_size = 256

    def encode(self, texts: Sequence[str]) -> Tensor:
        content = "".join(f"{text}\n" for text in texts).encode("utf-8", "surrogatepass")
        return torch.from_numpy(np.frombuffer(content, dtype=np.uint8).astype(np.int32))


class _HuggingFace:
    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.vocab_size = tokenizer.get_vocab_size()

    def encode(self, texts: Sequence[str]) -> Tensor:
        parts = [np.zeros(0, dtype=np.int32)]
        for start in range(0, len(texts), _CHUNK):
            documents = [f"{text}\n" for text in texts[start : start + _CHUNK]]
            encodings = self._tokenizer.encode_batch(documents, add_special_tokens=False)
            ids = chain.from_iterable(encoding.ids for encoding in encodings)
            parts.append(np.fromiter(ids, dtype=np.int32))
        return torch.from_numpy(np.concatenate(parts))


def load_tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer `name`: `bytes`, a local tokenizer.json, or a name on the hub.

    ValueError, one line, if it is none of these.
    """
    if name == "bytes":
        return _Bytes()
    try:
        if Path(name).is_file():
            return _HuggingFace(tokenizers.Tokenizer.from_file(name))
        with offline_if_unreachable():
            return _HuggingFace(tokenizers.Tokenizer.from_pretrained(name))
    except Exception as error:  # the library's Rust side raises bare Exception
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"data.tokenizer: {name!r} is neither bytes, a tokenizer.json, nor a reachable "
            f"tokenizer: {reason}"
        ) from error
