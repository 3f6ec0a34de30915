"""A LightningModule with its Trainer, and a validation in between."""

import argparse
import hashlib
import logging
import os
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
asked = flags.parse_args()


class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 4))

    def training_step(self, batch, index):
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def validation_step(self, batch, index):
        self.net(batch[0])

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
trainer = Trainer(
    callbacks=callbacks,
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
trainer.fit(module, loader, DataLoader(TensorDataset(x[:4], y[:4]), batch_size=4))
weights = torch.cat([x.detach().flatten() for x in module.parameters()])
print("weights", hashlib.sha256(weights.numpy().tobytes()).hexdigest())
