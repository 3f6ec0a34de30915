"""Calls a function on ranks of its own: processes of this machine that meet for it alone.

Leaves out the ranks of a run, whose failures are told in its manifest (`rank_processes`).
"""

import os
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from stability.model.ranks import ALONE, Ranks, is_lost_connection, meeting_place
from stability.study.fresh_process import how_it_ended, received, start_process

__all__ = ["call_over_ranks", "see_one_gpu"]


def call_over_ranks(count: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Return what `function(*args, ranks)` gives on each of `count` ranks, in fresh processes.

    RuntimeError, which names the rank, if one raises or ends without an answer: the first that says
    more than that another is gone. Then the others, which may wait for it, are killed.
    """
    store = meeting_place(ALONE.host)
    started = [
        start_process(_called, function, args, Ranks(rank=rank, count=count, port=store.port))
        for rank in range(count)
    ]
    rank_of = {connection: rank for rank, (_, connection) in enumerate(started)}
    answers: dict[int, Any] = {}
    failed: list[str] = []
    try:
        while len(answers) < count and not failed:
            waiting: list[Connection] = [x for x, rank in rank_of.items() if rank not in answers]
            for connection in wait(waiting):
                rank = rank_of[connection]  # pyright: ignore[reportArgumentType]
                process, ours = started[rank]
                what, value = received(process, ours) or ("raised", "")
                if what == "returned":
                    answers[rank] = value
                else:
                    failed.append(f"rank {rank}: {value or how_it_ended(process)}")
        if failed:
            failed += _said_later(started, answers)
            causes = [said for said in failed if not is_lost_connection(said)]
            raise RuntimeError((causes or failed)[0])
        return [answers[rank] for rank in range(count)]
    finally:
        for process, connection in started:
            if failed:
                process.kill()
            process.join()
            connection.close()


def _said_later(started: list[Any], answers: dict[int, Any]) -> list[str]:
    """Return what other ranks have said by now of a failure: it may be the first one's cause."""
    found = []
    for rank, (process, connection) in enumerate(started):
        process.join(1.0)
        if rank not in answers and connection.poll():
            with suppress(EOFError):
                what, value = connection.recv()
                found += [f"rank {rank}: {value}"] if what == "raised" else []
    return found


def _called(
    connection: Connection, function: Callable[..., Any], args: tuple[Any, ...], ranks: Ranks
) -> None:
    see_one_gpu(ranks.rank)
    try:
        connection.send(("returned", function(*args, ranks)))
    except Exception as error:
        traceback.print_exc()
        connection.send(("raised", f"{type(error).__name__}: {error}"))


def see_one_gpu(slot: int) -> None:
    """Leave this process one of several GPUs, chosen by a number."""
    if torch.cuda.device_count() > 1:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        devices = visible if visible[0] else [str(i) for i in range(torch.cuda.device_count())]
        os.environ["CUDA_VISIBLE_DEVICES"] = devices[slot % len(devices)]
