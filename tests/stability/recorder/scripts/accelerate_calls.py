"""A loop of Accelerate that tells of itself; the lines that do so end in `# recorded`."""

import argparse
import gc
import hashlib

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import stability  # recorded

flags = argparse.ArgumentParser()
flags.add_argument("--seed", type=int, default=0)
flags.add_argument("--bf16", action="store_true")
flags.add_argument("--split", action="store_true")  # a batch is of all processes, in one order
asked = flags.parse_args()

set_seed(asked.seed)
accelerator = Accelerator(
    cpu=True,
    gradient_accumulation_steps=2,
    mixed_precision="bf16" if asked.bf16 else "no",
    dataloader_config=DataLoaderConfiguration(
        split_batches=asked.split, use_seedable_sampler=asked.split
    ),
)
model = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
data = TensorDataset(torch.randn(48, 6), torch.randint(0, 4, (48,)))
model, optimizer, loader = accelerator.prepare(
    model, optimizer, DataLoader(data, batch_size=4, shuffle=True)
)
recorder = stability.record(model, optimizer, optional=True)  # recorded
for x, y in loader:
    recorder.batch(x, y)  # recorded
    with accelerator.accumulate(model):
        loss = F.cross_entropy(model(x), y)
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    recorder.step(loss) if accelerator.sync_gradients else None  # recorded
recorder.end()  # recorded
weights = torch.cat([x.detach().flatten() for x in model.parameters()])
if accelerator.is_main_process:
    print("weights", hashlib.sha256(weights.numpy().tobytes()).hexdigest())
# as in ranks.py
accelerator.wait_for_everyone()
del model, optimizer, loader, loss
accelerator.free_memory()
gc.collect()
accelerator.end_training()
