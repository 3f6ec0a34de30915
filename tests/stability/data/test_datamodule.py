"""Batches: every block once an epoch, and the same at a step across resumes and workers."""

import logging
import random
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch import Callback, Trainer
from torch.nn import functional as F

from stability.config.schema import DataConfig, HeldOutConfig, ModelConfig, OptimizerConfig
from stability.data.datamodule import TextDataModule, batch_indices, cut_blocks, held_out_indices
from stability.data.fingerprint import hash_tokens
from stability.data.tokenizers import load_tokenizer
from stability.model.gpt import GPT
from stability.model.initial_weights import initialise
from stability.model.lightning_module import LanguageModel

CONTEXT = 16
SEEDS = st.integers(-(2**40), 2**40)
SIZES = st.integers(1, 9)
COUNTS = st.integers(1, 40)


@pytest.fixture(scope="module")
def text_file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(Path(random.__file__).read_text()[: 17 * 30])  # fewer blocks than 8 steps need
    return path


def _data(text_file, steps=8, order_seed=3, **options):
    return TextDataModule(
        DataConfig(source=str(text_file), **options),
        context=CONTEXT,
        batch_size=5,
        steps=steps,
        order_seed=order_seed,
    )


def _expected(text_file, batches, order_seed=3):
    text = text_file.read_text()
    blocks = cut_blocks(load_tokenizer("bytes").encode([text]), CONTEXT).long()
    return [blocks[batch_indices(order_seed, t, 5, len(blocks))] for t in range(batches)]


class _Watch(Callback):
    """Keeps the batches, and a checkpoint of the third step as ModelCheckpoint would save it."""

    def __init__(self, checkpoint):
        self.batches = []
        self.checkpoint = checkpoint

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.batches.append(batch.clone())

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if self.checkpoint and trainer.global_step == 3 and not self.checkpoint.exists():
            trainer.save_checkpoint(self.checkpoint)


def _sdpa(q, k, v, *, causal, scale=None):
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)


def _fit(data, *, stop=None, save=None, resume=None, accumulate=1):
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    model = GPT(ModelConfig(depth=2, width=32, heads=2, context=CONTEXT), [_sdpa] * 2)
    initialise(model, 0)
    watch = _Watch(save)
    trainer = Trainer(
        accelerator="cpu",
        plugins=[LightningEnvironment()],
        devices=1,
        max_steps=stop or data.steps,
        accumulate_grad_batches=accumulate,
        gradient_clip_val=1.0,
        callbacks=[watch],
        enable_checkpointing=False,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    module = LanguageModel(model, OptimizerConfig(warmup_steps=2), steps=data.steps)
    trainer.fit(module, datamodule=data, ckpt_path=resume, weights_only=True)
    return watch.batches, model.state_dict()


def _same(first, second):
    return len(first) == len(second) and all(map(torch.equal, first, second))


def test_lightning_sees_the_batches_that_seed_and_step_name(text_file):
    batches, _ = _fit(_data(text_file))
    assert batches[0].dtype == torch.int64
    assert _same(batches, _expected(text_file, 8))


def test_a_resumed_run_ends_in_the_bits_of_an_undisturbed_one(text_file, tmp_path):
    whole, weights = _fit(_data(text_file))
    _fit(_data(text_file), stop=4, save=tmp_path / "3.ckpt")
    rest, resumed = _fit(_data(text_file), resume=tmp_path / "3.ckpt")
    assert _same(rest, whole[3:])
    assert weights.keys() == resumed.keys()
    for name, value in weights.items():
        assert torch.equal(value, resumed[name]), name


def test_accumulated_batches_go_on_where_the_updates_did(text_file, tmp_path):
    checkpoint = tmp_path / "3.ckpt"
    whole, weights = _fit(_data(text_file, steps=4), save=checkpoint, accumulate=2)
    assert _same(whole, _expected(text_file, 8))
    rest, resumed = _fit(_data(text_file, steps=4), resume=checkpoint, accumulate=2)
    assert _same(rest, whole[6:])
    assert all(torch.equal(value, resumed[name]) for name, value in weights.items())


# Python 3.12 warns of any fork in a process with threads, and PyTorch forks its workers
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_workers_change_nothing(text_file):
    data = _data(text_file, workers=1)
    data.setup("fit")
    assert _same(list(data.train_dataloader()), _expected(text_file, 8))


def test_reading_batches_leaves_the_global_generator_alone(text_file):
    before = torch.get_rng_state()
    data = _data(text_file)
    data.setup("fit")
    list(data.train_dataloader())
    assert torch.equal(torch.get_rng_state(), before)


def test_hash_and_vocabulary_are_those_of_the_tokens(text_file, tmp_path):
    data = _data(text_file)
    data.setup("fit")
    tokens = load_tokenizer("bytes").encode([text_file.read_text()])
    assert (data.text_hash, data.vocab_size) == (hash_tokens(tokens), 256)
    other = tmp_path / "other.txt"
    other.write_text(text_file.read_text().replace("a", "b"))
    changed = _data(other)
    changed.setup("fit")
    assert changed.text_hash != data.text_hash


def test_a_text_that_changed_since_the_last_run_is_read_anew(tmp_path):
    path = tmp_path / "text.txt"
    hashes = set()
    for letter in "ab":
        path.write_text(letter * (100 + ord(letter)))
        data = _data(path)
        data.setup("fit")
        hashes.add(data.text_hash)
    assert len(hashes) == 2


@pytest.mark.parametrize("tokens", [0, 16, 17 * 4, 17 * 5 - 2])
def test_a_text_too_short_for_a_batch_is_refused(tmp_path, tokens):
    path = tmp_path / "text.txt"
    path.write_text("x" * tokens)
    reason = "which is too short" if tokens else "which is empty"
    with pytest.raises(ValueError, match=reason):
        _data(path).setup("fit")


def test_a_text_of_just_one_batch_is_enough(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("x" * (17 * 5 - 1))
    _data(path).setup("fit")


def test_batches_before_setup_are_refused(text_file):
    with pytest.raises(ValueError, match="setup must be called before train_dataloader"):
        _data(text_file).train_dataloader()


@settings(max_examples=60)
@given(st.integers(0, 200), st.integers(1, 20))
def test_blocks_are_the_stream_without_its_rest(n_tokens, context):
    tokens = torch.arange(n_tokens)
    blocks = cut_blocks(tokens, context)
    assert blocks.shape == (n_tokens // (context + 1), context + 1)
    assert torch.equal(blocks.flatten(), tokens[: blocks.numel()])


@settings(max_examples=60)
@given(SEEDS, SIZES, COUNTS)
def test_each_epoch_visits_every_block_once(order_seed, batch_size, n_blocks):
    steps = 3 * n_blocks // batch_size + 1
    visited = torch.cat([batch_indices(order_seed, s, batch_size, n_blocks) for s in range(steps)])
    for epoch in range(3):
        one = visited[epoch * n_blocks : (epoch + 1) * n_blocks]
        assert sorted(one.tolist()) == list(range(n_blocks))


@settings(max_examples=30)
@given(SEEDS, SIZES, COUNTS, st.randoms(use_true_random=False))
def test_a_batch_needs_no_other_batch(order_seed, batch_size, n_blocks, shuffler):
    steps = list(range(12))
    in_order = {s: batch_indices(order_seed, s, batch_size, n_blocks).tolist() for s in steps}
    shuffler.shuffle(steps)
    state = torch.get_rng_state()
    for step in steps:
        assert batch_indices(order_seed, step, batch_size, n_blocks).tolist() == in_order[step]
    assert torch.equal(torch.get_rng_state(), state)


def test_epochs_and_seeds_have_their_own_order():
    orders = [batch_indices(seed, epoch, 50, 50).tolist() for seed in (0, 1) for epoch in (0, 1)]
    orders.append(list(range(50)))
    assert len({tuple(order) for order in orders}) == 5


def test_the_order_of_a_seed_is_the_same_on_every_machine():
    assert batch_indices(0, 0, 8, 8).tolist() == [5, 1, 4, 2, 3, 7, 6, 0]


def test_no_block_is_refused():
    with pytest.raises(ValueError, match="n_blocks must be >= 1, got 0"):
        batch_indices(0, 0, 1, 0)


def _splitting(text_file, order_seed=3, **held_out):
    data = TextDataModule(
        DataConfig(source=str(text_file)),
        context=CONTEXT,
        batch_size=2,
        steps=60,  # four epochs and more
        order_seed=order_seed,
        held_out=HeldOutConfig(**held_out),
    )
    data.setup("fit")
    return data


def _rows(batches):
    return [tuple(row) for batch in batches for row in batch.tolist()]


def test_no_block_that_is_held_out_is_ever_trained_and_all_others_are(text_file):
    data = _splitting(text_file, share=0.2, batches=2)
    blocks = cut_blocks(load_tokenizer("bytes").encode([text_file.read_text()]), CONTEXT)
    everything = {tuple(row) for row in blocks.tolist()}
    assert len(everything) == len(blocks) == 30
    held_out = {tuple(row) for row in blocks[held_out_indices(30, 0.2)].tolist()}
    trained = set(_rows(data.train_dataloader()))
    assert trained == everything - held_out
    assert len(trained) == 24
    evaluated = _rows(data.held_out_batches)
    assert set(evaluated) <= held_out
    assert len(set(evaluated)) == len(evaluated) == 4


def test_the_split_depends_on_the_text_alone(text_file):
    one, other = (_splitting(text_file, seed, share=0.2, batches=2) for seed in (3, 4))
    assert one.held_out_hash == other.held_out_hash
    assert _rows(one.held_out_batches) == _rows(other.held_out_batches)
    assert _rows(one.train_dataloader()) != _rows(other.train_dataloader())
    assert set(_rows(one.train_dataloader())) == set(_rows(other.train_dataloader()))


def test_other_held_out_batches_have_another_hash(text_file):
    hashes = {
        _splitting(text_file, share=share, batches=batches).held_out_hash
        for share, batches in ((0.2, 2), (0.2, 3), (0.4, 2), (0.0, 2))
    }
    assert len(hashes) == 4
    assert "" in hashes


@pytest.mark.parametrize(("share", "batches", "found"), [(0.05, 2, 2), (0.2, 4, 6), (0.97, 3, 29)])
def test_a_text_too_short_to_hold_some_out_is_refused(text_file, share, batches, found):
    rule = rf"held_out.share must leave {2 * batches} blocks.* got {share} of the 30 .*: {found};"
    with pytest.raises(ValueError, match=rule):
        _splitting(text_file, share=share, batches=batches)


@settings(max_examples=100)
@given(st.integers(0, 5000), st.floats(0, 0.999))
def test_held_out_blocks_are_spread_over_the_text(n_blocks, share):
    chosen = held_out_indices(n_blocks, share).tolist()
    assert len(chosen) == round(share * n_blocks)
    assert all(0 <= block < n_blocks for block in chosen)
    steps = {b - a for a, b in pairwise(chosen)}
    assert not steps or (min(steps) >= 1 and max(steps) - min(steps) <= 1)


def test_the_held_out_blocks_are_the_same_on_every_machine():
    assert held_out_indices(36_422, 0.05)[:3].tolist() == [10, 30, 50]
