"""A training with attention; masked, or compiled as a whole graph, as the flags say."""

import argparse
import hashlib

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

flags = argparse.ArgumentParser()
flags.add_argument("--seed", type=int, default=0)
flags.add_argument("--bf16", action="store_true")
flags.add_argument("--masked", action="store_true")
flags.add_argument("--evaluates", action="store_true", help="attends there alone")
flags.add_argument("--evaluates-first", action="store_true", help="before any update")
flags.add_argument("--compiled", nargs="?", const="aot_eager", help="by this backend")
asked = flags.parse_args()


class Model(nn.Module):
    """One attention between two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(8, 3 * 32), nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Attend, and return one number a token."""
        q, k, v = self.into(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        mask = torch.ones(x.shape[1], x.shape[1]).tril().bool() if asked.masked else None
        if asked.evaluates and torch.is_grad_enabled():
            y = v
        else:
            y = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.out(y.transpose(1, 2).flatten(2))


torch.manual_seed(asked.seed)
model = Model()
run = torch.compile(model, fullgraph=True, backend=asked.compiled) if asked.compiled else model
# not Adam: the gradient of the keys' bias is rounding alone, which it would make as large as any
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
if asked.evaluates_first:
    with torch.no_grad():
        run(torch.randn(4, 32, 8))
for _ in range(4):
    with torch.autocast("cpu", enabled=asked.bf16):
        loss = run(torch.randn(4, 32, 8)).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if asked.evaluates:
        with torch.no_grad():
            run(torch.randn(4, 32, 8))
weights = torch.cat([x.detach().flatten() for x in model.parameters()])
print("weights", hashlib.sha256(weights.numpy().tobytes()).hexdigest())
