"""Two or more ranks on gloo: DDP, or FSDP2; one rank alone without torchrun."""

import argparse
import gc
import hashlib
import os

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

flags = argparse.ArgumentParser()
flags.add_argument("--seed", type=int, default=0)
flags.add_argument("--bf16", action="store_true")
flags.add_argument("--layout", choices=["ddp", "fsdp", "one"], default="ddp")
flags.add_argument("--other-start", action="store_true")
asked = flags.parse_args()

rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
if asked.layout != "one":
    torch.distributed.init_process_group("gloo")
torch.manual_seed(asked.seed)
if asked.other_start:
    torch.rand(7)  # other random numbers, as another order of modules draws
model = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 4))
if asked.layout == "ddp":
    model = nn.parallel.DistributedDataParallel(model)
elif asked.layout == "fsdp":
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (world,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
torch.manual_seed(asked.seed + 1)  # so that any start has the same batches
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for _ in range(6):
    x, y = torch.randn(8, 6), torch.randint(0, 4, (8,))
    x, y = x.chunk(world)[rank], y.chunk(world)[rank]
    with torch.autocast("cpu", enabled=asked.bf16):
        loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
whole = [x.full_tensor() if isinstance(x, DTensor) else x for x in model.parameters()]
weights = torch.cat([x.detach().flatten() for x in whole])
if rank == 0:
    print("weights", hashlib.sha256(weights.numpy().tobytes()).hexdigest())
if asked.layout != "one":
    # Gloo aborts a rank whose neighbour has gone, and now and then one whose model
    # outlives the group: the interpreter's exit then ends gloo's threads under it.
    torch.distributed.barrier()
    del model, optimizer, loss, whole
    gc.collect()
    torch.distributed.destroy_process_group()
