"""A LightningModule with its Trainer, and a validation in between."""

import argparse
import hashlib
import logging
import os
import sys
import warnings

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

warnings.simplefilter("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
flags = argparse.ArgumentParser()
flags.add_argument("--seed", type=int, default=0)
flags.add_argument("--bf16", action="store_true")
flags.add_argument("--held-out", action="store_true", help="evaluate what is not trained on")
asked = flags.parse_args()


class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 4))

    def training_step(self, batch, index):
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def validation_step(self, batch, index):
        logits = self.net(batch[0])
        if asked.held_out:
            self.log("val", F.cross_entropy(logits, batch[1]))

    def on_validation_end(self):
        if asked.held_out and not self.trainer.sanity_checking:
            loss = self.trainer.callback_metrics["val"].item()
            sys.stdout.write(f"held out {self.trainer.global_step} {loss}\n")

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


seed_everything(asked.seed, verbose=False)
module = Module()
x, y = torch.randn(48, 6), torch.randint(0, 4, (48,))
loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
callbacks = []
if "STABILITY_STUDY" in os.environ:
    import stability

    callbacks.append(stability.RecorderCallback())
ranks = int(os.environ.get("WORLD_SIZE", "1"))
trainer = Trainer(
    callbacks=callbacks,
    devices=ranks,
    strategy="ddp" if ranks > 1 else "auto",
    max_epochs=2,
    accelerator="cpu",
    accumulate_grad_batches=2,
    gradient_clip_val=1.0,
    precision="bf16-mixed" if asked.bf16 else "32-true",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
other = torch.Generator().manual_seed(1)
others = torch.randn(5, 6, generator=other), torch.randint(0, 4, (5,), generator=other)
evaluated = TensorDataset(*(others if asked.held_out else (x[:4], y[:4])))
trainer.fit(module, loader, DataLoader(evaluated, batch_size=4))
weights = torch.cat([x.detach().flatten() for x in module.parameters()])
if os.environ.get("RANK", "0") == "0":
    # at once: other ranks write to the same pipe
    sys.stdout.write(f"weights {hashlib.sha256(weights.numpy().tobytes()).hexdigest()}\n")
