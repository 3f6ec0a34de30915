"""Hashes of token ids: equal for equal data, different for anything else."""

import torch

from stability.data.fingerprint import BatchFingerprint, hash_tokens

TOKENS = torch.arange(12).view(3, 4)


def _chain(*batches, digest=""):
    fingerprint = BatchFingerprint(digest)
    for batch in batches:
        fingerprint.update(batch)
    return fingerprint.hexdigest()


def test_dtype_and_memory_layout_do_not_matter():
    assert hash_tokens(TOKENS) == hash_tokens(TOKENS.int())
    assert hash_tokens(TOKENS.T.contiguous().T) == hash_tokens(TOKENS)


def test_values_order_shape_and_cut_matter():
    changed = TOKENS.clone()
    changed[2, 3] += 1
    streams = [
        (TOKENS, TOKENS),
        (TOKENS, changed),
        (changed, TOKENS),
        (TOKENS,),
        (TOKENS.view(4, 3), TOKENS),
        (torch.cat([TOKENS, TOKENS]),),
        (),
    ]
    assert len({_chain(*stream) for stream in streams}) == len(streams)


def test_a_hash_can_be_gone_on_with():
    whole = _chain(TOKENS, TOKENS + 1, TOKENS + 2)
    assert _chain(TOKENS + 1, TOKENS + 2, digest=_chain(TOKENS)) == whole
