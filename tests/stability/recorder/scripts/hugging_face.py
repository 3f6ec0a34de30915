"""Hugging Face's Trainer on a model of its own, made here."""

import argparse
import hashlib
import os
import sys
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

flags = argparse.ArgumentParser()
flags.add_argument("--seed", type=int, default=0)
flags.add_argument("--bf16", action="store_true")
flags.add_argument("--attention", default="sdpa", help="of transformers' names")
flags.add_argument("--reordered", action="store_true", help="multiply by the model's own code")
flags.add_argument("--held-out", action="store_true", help="evaluate what is not trained on")
asked = flags.parse_args()

torch.manual_seed(asked.seed)
config = GPT2Config(
    vocab_size=40,
    n_positions=12,
    n_embd=16,
    n_layer=2,
    n_head=2,
    attn_pdrop=0.0,
    attn_implementation=asked.attention,
    reorder_and_upcast_attn=asked.reordered,
)
model = GPT2LMHeadModel(config)
tokens = torch.randint(0, 40, (24, 12))
others = torch.randint(0, 40, (5, 12), generator=torch.Generator().manual_seed(1))


class Rows(Dataset[dict[str, torch.Tensor]]):
    """Rows of tokens, as a tokenizer gives them."""

    def __init__(self, rows: torch.Tensor) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = self._rows[index]
        return {"input_ids": row, "labels": row}


with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=4,
        gradient_accumulation_steps=2,
        max_steps=6,
        eval_strategy="steps",
        eval_steps=2,
        bf16=asked.bf16,
        seed=asked.seed,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        ddp_backend="gloo" if "WORLD_SIZE" in os.environ else None,
        disable_tqdm=True,
    )
    evaluated = Rows(others if asked.held_out else tokens[:4])
    trainer = Trainer(model, arguments, train_dataset=Rows(tokens), eval_dataset=evaluated)
    if "STABILITY_STUDY" in os.environ:
        from stability.integrations.transformers import Recorder

        trainer.add_callback(Recorder())
    trainer.train()
    for entry in trainer.state.log_history:
        if "eval_loss" in entry:
            sys.stdout.write(f"held out {entry['step']} {entry['eval_loss']}\n")
weights = torch.cat([x.detach().float().flatten() for x in model.parameters()])
if os.environ.get("RANK", "0") == "0":
    # at once: other ranks write to the same pipe
    sys.stdout.write(f"weights {hashlib.sha256(weights.numpy().tobytes()).hexdigest()}\n")
