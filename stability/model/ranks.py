"""The ranks of a run: processes that train it together, and what they tell one another.

They meet at a store that the process which has started them keeps, or the first of several such
(`study.rank_tasks`). Leaves out what each of them computes (`layouts`) and how they are started
(`study.processes`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

__all__ = ["ALONE", "Ranks", "beside", "is_lost_connection", "joined", "meeting_place", "part"]

PATIENCE = timedelta(minutes=30)
"""How long a rank waits for the others at one exchange: the first may write files meanwhile."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks:
    """One process's place among those that train a run."""

    rank: int = 0
    count: int = 1
    host: str = "127.0.0.1"
    """Where the store is that they meet at."""
    port: int = 0

    @property
    def is_first(self) -> bool:
        """Whether this one keeps the record."""
        return self.rank == 0

    def told(self, value: Any = None) -> Any:
        """Return what the first rank gives; all must call it at the same place."""
        if self.count == 1:
            return value
        given = [value]
        dist.broadcast_object_list(given, src=0)
        return given[0]

    def gathered(self, value: Any) -> list[Any]:
        """Return what each rank gives, in their order."""
        if self.count == 1:
            return [value]
        found: list[Any] = [None] * self.count
        dist.all_gather_object(found, value)
        return found

    def stacked(self, value: Tensor) -> Tensor:
        """Return the tensors of all ranks, of one shape, as `(ranks, ...)` where they lie."""
        if self.count == 1:
            return value[None]
        found = value.new_empty((self.count, *value.shape))
        dist.all_gather(list(found.unbind()), value.contiguous())
        return found


ALONE = Ranks()
"""Of a run in one process."""


def meeting_place(host: str, port: int = 0, *, keeps: bool = False) -> Any:
    """Return the store at which ranks meet, at `port` of `host`.

    This process keeps it if it `keeps` it, or if no port is given: then at one that is free.
    """
    return dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
        host, port, is_master=keeps or port == 0, wait_for_workers=False, timeout=PATIENCE
    )


@contextmanager
def joined(ranks: Ranks, device: torch.device) -> Iterator[None]:
    """Meet the other ranks; inside, they can be told things.

    Nobody is waited for at the end: a rank that has failed leaves others in the middle of an
    exchange, and its process must end for them to notice. `part` is how all leave together.
    """
    if ranks.count == 1:
        yield
        return
    store = meeting_place(ranks.host, ranks.port)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=ranks.rank,
        world_size=ranks.count,
        timeout=PATIENCE,
        device_id=torch.device("cuda", 0) if device.type == "cuda" else None,
    )
    yield


def beside() -> Any:
    """Return the group of all ranks for what is written beside training; asked for by all at once.

    Its exchanges are those of CPUs, and meet none of training's.
    """
    return _beside(dist.group.WORLD)


@cache
def _beside(_: Any) -> Any:
    return dist.new_group(backend="gloo")


def part(ranks: Ranks) -> None:
    """Leave the group once all are here; to be called by each rank that has done its part."""
    if ranks.count > 1:
        dist.barrier()
        dist.destroy_process_group()


def is_lost_connection(said: str) -> bool:
    """Whether an error's text says no more than that another rank is gone."""
    words = (
        "by peer",
        "broken pipe",
        "third_party/gloo",
        "gloo/transport",
        "nccl error",
        "tcpstore",
    )
    return any(word in said.lower() for word in words)
