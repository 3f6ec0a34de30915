"""One rank of a gloo group: drift and norm of sharded states, as JSON; `states` makes them whole.

python group_drift.py RANK COUNT MEETING_FILE
"""

import json
import sys

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from stability.metrics.sharded_drift import sharded_drift
from stability.metrics.sharded_sums import norm_of

PLACES = {
    "rows": Shard(0),
    "few_rows": Shard(0),
    "columns": Shard(1),
    "copied": Replicate(),
    "narrow": Shard(0),
    "double": Shard(1),
}


def states() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return a candidate and a baseline, whole: FP32, BF16 and FP64, few rows and many."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return 0.02 * torch.randn(shape, generator=generator)

    b = {
        "rows": normal(301, 70),
        "few_rows": normal(3, 5),
        "columns": normal(40, 33),
        "copied": torch.ones(64),
        "narrow": normal(400, 200).bfloat16(),
        "double": normal(20, 7).double(),
        "plain": normal(17),
        "number": torch.tensor(2.0),
    }
    a = {name: (x.double() + 1e-4 * normal(*x.shape)).to(x.dtype) for name, x in b.items()}
    return a, b | {"few_rows": a["few_rows"].clone()}


def main() -> None:
    """Measure, and print what was found."""
    rank, count, meeting = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=count)
    mesh = init_device_mesh("cpu", (count,))
    sharded = [
        {
            name: distribute_tensor(x, mesh, [PLACES[name]]) if name in PLACES else x
            for name, x in state.items()
        }
        for state in states()
    ]
    found = [sharded_drift(*sharded, held=held) for held in (2**26, 3000)]
    print(json.dumps([*found, norm_of(sharded[0].values())]))
    dist.barrier()  # a rank that leaves while another still talks may end that one
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
