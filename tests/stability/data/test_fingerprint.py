"""Hashes of token ids: equal for equal data, different for anything else."""

import torch

from stability.data.fingerprint import hash_tokens

TOKENS = torch.arange(12).view(3, 4)


def test_dtype_and_memory_layout_do_not_matter():
    assert hash_tokens(TOKENS) == hash_tokens(TOKENS.int())
    assert hash_tokens(TOKENS.T.contiguous().T) == hash_tokens(TOKENS)


def test_values_order_shape_and_length_matter():
    changed = TOKENS.clone()
    changed[2, 3] += 1
    texts = [TOKENS, changed, TOKENS.flip(0), TOKENS.view(4, 3), TOKENS[:2]]
    assert len({hash_tokens(text) for text in texts}) == len(texts)
