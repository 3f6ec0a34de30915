"""Puts a training together from what the environment asks for: its spool, states, nudge and end."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Any, Callable, Dict, Mapping

import torch
from torch import Tensor

from .attention import replace_attention
from .environment import environment, hash_state, own_files, own_modules
from .hooks import install, install_count
from .looks import Looks, is_looked_at
from .nudge import nudge_weights
from .spool import Spool
from .training import Training, is_due
from .witness import InsideWitness

__all__ = ["due_at", "looks_at", "record_process", "start_of"]


def record_process(asked: Mapping[str, str]) -> Callable[[], None]:
    """Hand all that this process trains to a spool; return what is to be called at its end."""
    # `startup` has put these rooms into the package under which this runs
    executed, known_answers, numeric_switches = (
        import_module(f".{name}", __package__)
        for name in ("probe.executed", "probe.known_answers", "records.numeric_switches")
    )

    def switches() -> Dict[str, Any]:
        return {**numeric_switches.numeric_switches(), **numeric_switches.training_switches()}

    rank = int(asked.get("RANK", "0"))
    attention = asked.get("STABILITY_ATTENTION", "")
    replaced = replace_attention(attention) if attention else None

    def begin(state: Dict[str, Tensor]) -> Dict[str, Any]:
        if replaced:
            replaced.prepare(next(iter(state.values())).device)
        if witness:
            witness.begin(state)
        return start_of(state, asked, rank, switches())

    def told() -> Dict[str, Any]:
        files = sorted(set(own_files().values()))
        calls = replaced.told() if replaced else {}
        seen = witness.told() if witness else {}
        return {"modules": own_modules(), "files": files, "attention": calls, **seen}

    observes = asked.get("STABILITY_OBSERVES", "1") == "1"
    training = Training(
        Spool(asked["STABILITY_SPOOL"], rank),
        due=due_at(asked.get("STABILITY_SNAPSHOTS", "")) if observes else lambda step: False,
        steps=int(asked.get("STABILITY_STEPS", "0")),
        keeps_state=rank == 0,
        begin=begin,
        end=told,
    )
    witness = None
    if observes:
        install(training)
    else:
        install_count(training)
    if observes and rank == 0:
        looks = Looks(training, executed.Executed, looks_at(asked))
        looks.begin()
        witness = InsideWitness(looks, switches, known_answers.known_answers, switches())
    return lambda: training.end("exit")


def due_at(listed: str) -> Callable[[int], bool]:
    """Return after which updates the state is kept: those listed, or the 1-2-5 series for none."""
    steps = {int(step) for step in listed.split(",") if step}
    return (lambda step: step in steps) if steps else is_due


def looks_at(asked: Mapping[str, str]) -> Callable[[int], bool]:
    """Return which updates are looked at: those that the baseline's were, if that is on record."""
    steps = {int(step) for step in asked.get("STABILITY_LOOKS", "").split(",") if step}
    last = int(asked.get("STABILITY_STEPS", "0"))
    return (lambda update: update in steps) if steps else (lambda u: is_looked_at(u, last))


def start_of(
    state: Dict[str, Tensor], asked: Mapping[str, str], rank: int, switches: Mapping[str, Any]
) -> Dict[str, Any]:
    """Nudge the start state if that is asked for, and return what is known before any update.

    `switches` are torch's, by name (`records.numeric_switches`).
    """
    before = hash_state(state)
    ulps, draw = (int(x) for x in asked.get("STABILITY_NUDGE", "0 0").split())
    if ulps:
        nudge_weights(state, ulps, int(asked.get("STABILITY_SEED", "0")), draw)
    group = _group_size()
    return {
        "init": before,
        "rank": rank,
        "world": group,
        "pid": os.getpid(),
        "script": sys.argv[0] if sys.argv else "",
        "environment": environment(switches),
        # here and at the end: Python takes away the script's name before it ends
        "modules": own_modules(),
    }


def _group_size() -> int:
    distributed = torch.distributed
    is_group = distributed.is_available() and distributed.is_initialized()
    return distributed.get_world_size() if is_group else 1
