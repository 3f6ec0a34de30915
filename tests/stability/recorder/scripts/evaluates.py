"""A language model that is evaluated as it trains, on its own text and on another, held out."""

import argparse
import hashlib
import os

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.functional import cross_entropy

flags = argparse.ArgumentParser()
flags.add_argument("--lr", type=float, default=1e-2)
flags.add_argument("--seed", type=int, default=0)
flags.add_argument("--bf16", action="store_true")
flags.add_argument("--steps", type=int, default=12)
flags.add_argument("--evaluate-every", type=int, default=4)
flags.add_argument("--kind", default="functional")
flags.add_argument("--crops", action="store_true", help="draw what is evaluated anew each time")
flags.add_argument("--closure", action="store_true", help="let the optimizer ask for the loss")
flags.add_argument("--late-optimizer", action="store_true", help="make it after the first pass")
flags.add_argument("--text", type=int, default=1, help="which text is held out")
asked = flags.parse_args()


class Model(nn.Module):
    """Returns logits, and with targets a loss, as nanoGPT does."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.into = nn.Linear(32, 96)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(32, 50)

    def forward(self, x: Tensor, y: "Tensor | None" = None):
        h = self.embed(x)
        q, k, v = self.into(h).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        y_heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        logits = self.head(self.drop(h + y_heads.transpose(1, 2).flatten(2)))
        if y is None:
            return logits
        loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
        return {"logits": logits, "loss": loss} if asked.kind == "mapping" else (logits, loss)


ranks = int(os.environ.get("WORLD_SIZE", "1"))
rank = int(os.environ.get("RANK", "0"))
if ranks > 1:
    torch.distributed.init_process_group("gloo")
torch.manual_seed(asked.seed)
own = Model()
model = nn.parallel.DistributedDataParallel(own) if ranks > 1 else own
optimizer = None if asked.late_optimizer else torch.optim.AdamW(model.parameters(), lr=asked.lr)
generator = torch.Generator().manual_seed(0)
training = torch.randint(0, 50, (40, 10), generator=generator)
held_out = torch.randint(0, 50, (11, 10), generator=torch.Generator().manual_seed(asked.text))
criterion = nn.CrossEntropyLoss()


def loss_of(tokens: Tensor) -> Tensor:
    """Return the loss of the model, as the kind of script has it."""
    x, y = tokens[:, :-1], tokens[:, 1:]
    if asked.kind in ("tuple", "mapping"):
        found = model(x, y)
        return found["loss"] if asked.kind == "mapping" else found[1]
    if asked.kind == "by name":
        return cross_entropy(model(x).flatten(0, 1), y.flatten())
    if asked.kind == "module":
        return criterion(model(x).flatten(0, 1), y.flatten())
    if asked.kind == "by hand":
        return -model(x).log_softmax(-1).gather(-1, y.unsqueeze(-1)).mean()
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


@torch.no_grad()
def evaluated(tokens: Tensor) -> float:
    """Return the mean loss over all of `tokens`, a rank's own part of them."""
    model.eval()
    if asked.crops:
        tokens = tokens[torch.randint(0, len(tokens), (8,))]
    total = 0.0
    for batch in tokens[rank::ranks].split(4):
        loss = loss_of(batch)
        total += loss.item() * len(batch)
        loss.zero_()  # what the script does with its loss is its own affair
    model.train()
    return total / len(tokens[rank::ranks])


def of_held_out(net: nn.Module) -> Tensor:
    """Return the held-out loss of a model; draws numbers, as a sampler would."""
    torch.randn(3)
    logits = net(held_out[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), held_out[:, 1:].flatten())


for step in range(asked.steps):
    first = 8 * step % 40
    batch = training[first : first + 8]

    def backward(batch: Tensor = batch) -> Tensor:
        """Compute the loss of the batch and its gradients."""
        with torch.autocast("cpu", enabled=asked.bf16):
            loss = loss_of(batch[rank::ranks])
        loss.backward()
        return loss

    if asked.closure:
        optimizer.step(backward)
    else:
        backward()
        optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=asked.lr)
        optimizer.step()
    optimizer.zero_grad()
    if (step + 1) % asked.evaluate_every == 0:
        print("evaluated", step + 1, evaluated(training), evaluated(held_out))
weights = torch.cat([x.detach().flatten() for x in own.parameters()])
if rank == 0:
    print("weights", hashlib.sha256(weights.numpy().tobytes()).hexdigest())
if ranks > 1:
    del model
    torch.distributed.destroy_process_group()
